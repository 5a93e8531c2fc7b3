"""How to run a kernel again, with the same bits: as a whole, or to memory that is already there."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from penstock.capture.operators import out_overloads, tensors_in
from penstock.errors import PenstockError
from penstock.runtime.storages import DROPPED, ManagedStorage

# What runs again runs below autocast: its arguments were cast already.
_BELOW_AUTOCAST = functools.reduce(
    operator.or_,
    (
        torch._C.DispatchKeySet(key)
        for name, key in torch._C.DispatchKey.__members__.items()
        if name.startswith("Autocast")
    ),
)


class TensorArgument(NamedTuple):
    """A tensor argument, as a view of its storage."""

    managed: ManagedStorage
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, value: torch.Tensor, managed: ManagedStorage) -> TensorArgument:
        offset = int(value.storage_offset())
        return cls(managed, tuple(value.shape), value.stride(), offset, value.dtype, value.device)

    def tensor(self) -> torch.Tensor:
        storage = self.managed.storage()
        made = torch.empty(0, dtype=self.dtype, device=self.device)
        return made.set_(storage, self.offset, self.size, self.stride)


# Each says what those after it do where they say "none".
_FLOAT32 = (
    ("generic", "all"),
    *(
        (backend, operation)
        for operation in ("all", "matmul", "conv", "rnn")
        for backend in ("cuda", "mkldnn")
    ),
)


def _matmul_precision() -> str | None:
    """None where torch refuses to say, as the program set precisions that its older API has no name for."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _float32_precisions() -> tuple[Any, ...]:
    """By both of torch's APIs, as kernels read both."""
    return _matmul_precision(), *(torch._C._get_fp32_precision_getter(*of) for of in _FLOAT32)


def _set_float32_precisions(values: tuple[Any, ...]) -> None:
    matmul, *precisions = values
    now = _matmul_precision()
    if matmul is not None and now is not None and matmul != now:
        torch.set_float32_matmul_precision(matmul)
    for of, precision in zip(_FLOAT32, precisions, strict=True):
        for value in ("none", precision):
            if torch._C._get_fp32_precision_getter(*of) != precision:
                torch._C._set_fp32_precision_setter(*of, value)


# What a user can switch that changes the bits of a kernel, for this thread or the process: read, and written.
_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_num_threads, torch.set_num_threads),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch._C._get_onednn_allow_tf32, torch._C._set_onednn_allow_tf32),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (_float32_precisions, _set_float32_precisions),
)


def switches() -> tuple[Any, ...]:
    return tuple(read() for read, _ in _SWITCHES)


def _switch(values: tuple[Any, ...]) -> None:
    for (read, write), value in zip(_SWITCHES, values, strict=True):
        if read() != value:
            write(value)


@dataclass(eq=False)
class Recipe:
    """How to run one kernel again.

    generator   that it draws from, and its state when it ran; None where it draws nothing
    reads       storages of the arguments
    makes       storages of the results, and the position of each among the results
    result      the only one, where the kernel can write it to memory that is there; else None
    write       what writes it there
    need_bytes  device memory that it needs besides its arguments
    held        references that keep `reads` alive while an output is dropped
    """

    operator: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    generator: tuple[torch.Generator, torch.Tensor] | None
    switches: tuple[Any, ...]
    reads: list[ManagedStorage]
    makes: dict[ManagedStorage, int]
    result: TensorArgument | None
    write: Writer | None
    need_bytes: int
    held: list[torch.UntypedStorage] = field(default_factory=list)

    @property
    def is_needed(self) -> bool:
        """One of its outputs is dropped, and still referenced."""
        return any(made.state == DROPPED and made.storage() is not None for made in self.makes)


class NotRepeatable(Exception):
    """A tensor argument is not a plain view of a storage."""


def is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor._is_zerotensor())
    )


def made_again(recipe: Recipe, managed: ManagedStorage) -> torch.UntypedStorage:
    """Run the kernel again, for one of its results."""
    tensor = next(itertools.islice(tensors_in(run(recipe)), recipe.makes[managed], None), None)
    result = None if tensor is None else tensor.untyped_storage()
    if result is None or result.nbytes() != managed.size_bytes:
        raise PenstockError(
            f"{recipe.operator} gives other results when it runs again: train with "
            "PlanOptions(recompute=False)"
        )
    return result


def default_generator(device: Any) -> torch.Generator:
    device = torch.device(device)
    if device.type == "cpu":
        return torch.default_generator
    generators: Any = getattr(torch, device.type).default_generators
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    generator: torch.Generator = generators[index]
    return generator


def run(recipe: Recipe, target: torch.Tensor | None = None) -> Any:
    """Run the kernel again; its result goes to ``target``, if that is given. Dispatch modes that the program
    entered before the run see it once more."""

    def restored(value: Any) -> Any:
        if isinstance(value, TensorArgument):
            return value.tensor()
        if isinstance(value, tuple | list):
            return type(value)(map(restored, value))
        return value

    with torch._C._ExcludeDispatchKeyGuard(_BELOW_AUTOCAST), _original_state(recipe):
        args, kwargs = restored(recipe.args), {name: restored(kwarg) for name, kwarg in recipe.kwargs.items()}
        if target is None or recipe.write is None:
            return recipe.operator(*args, **kwargs)
        return recipe.write(target, *args, **kwargs)


@contextlib.contextmanager
def _original_state(recipe: Recipe) -> Iterator[None]:
    """Restore the random state and the switches of the kernel's first run."""
    now_switched = switches()
    generator, state = recipe.generator or (None, None)
    now = generator.get_state() if generator is not None else None
    try:
        if now_switched != recipe.switches:
            _switch(recipe.switches)
        if generator is not None:
            generator.set_state(state)
        yield
    finally:
        if generator is not None:
            generator.set_state(now)
        if now_switched != recipe.switches:
            _switch(now_switched)


# -- results in place ------------------------------------------------------------------------------

aten = torch.ops.aten

Writer = Callable[..., torch.Tensor]  # called with where the result goes, and the operator's own arguments


def writer(operator: Callable[..., Any], args: tuple[Any, ...], device_type: str) -> Writer | None:
    """What computes the operator's one result with the same kernel, and writes it to a tensor of the result's
    shape, strides and dtype; None where torch has only kernels that allocate it."""
    if not isinstance(operator, torch._ops.OpOverload):
        return None
    if operator is aten.convolution.default and _by_cudnn(args):
        return _convolved_by_cudnn
    return _writer(operator, device_type)


@functools.cache
def _writer(operator: torch._ops.OpOverload, device_type: str) -> Writer | None:
    if operator in (aten.clone.default, aten._to_copy.default):
        return _copied
    if operator is aten.relu.default:
        return _clamped
    if len(operator._schema.returns) != 1:
        return None
    for overload, out in out_overloads(operator):
        if _has_kernel(overload, device_type):
            return functools.partial(_written, overload, out)
    return None


def _has_kernel(overload: torch._ops.OpOverload, device_type: str) -> bool:
    """A kernel of its own. Those that torch generates for other `out` overloads call the operator that
    allocates, and copy: on a CPU as on all devices."""
    keys = {"CPU", torch._C._dispatch_key_for_device(device_type)}
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), key) for key in keys)


def _written(
    overload: torch._ops.OpOverload, out: str, target: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    return overload(*args, **kwargs, **{out: target})


# As torch computes these:


def _by_cudnn(args: tuple[Any, ...]) -> bool:
    """Without a bias, which newer versions add in the same kernel, and of two or three dimensions, as one is
    computed as two."""
    return (
        len(args) == 9
        and args[2] is None
        and args[0].dim() > 3
        and torch._C._select_conv_backend(*args) == torch._C._ConvBackend.Cudnn  # a new object each time
    )


def _convolved_by_cudnn(
    target: torch.Tensor,
    image: torch.Tensor,
    weight: torch.Tensor,
    bias: None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> torch.Tensor:
    return aten.cudnn_convolution.out(
        image,
        weight,
        padding,
        stride,
        dilation,
        groups,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled(),
        torch._C._get_fp32_precision_getter("cuda", "conv") == "tf32",
        out=target,
    )


def _copied(target: torch.Tensor, source: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return target.copy_(source)


def _clamped(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return torch.clamp_min(source, 0, out=target)
