"""Other algorithms of PyTorch for a kernel: which exist, how to run one, and what it costs here.

Each returns the kernel's result in the same layout, but not with the same bits: with those of the settings of
torch.backends and torch.nn.attention that its name stands for.
"""

from __future__ import annotations

import contextlib
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from penstock.capture.operators import describe, tensors_in
from penstock.core.trace import Variant
from penstock.errors import PenstockError
from penstock.runtime.copy_engine import CopyEngine
from penstock.runtime.devices import Device
from penstock.runtime.interrupts import Interrupts

AS_TRACED = ""
TIMES = 2  # each is run so often, and the best time counts
NOISE = 0.05  # of a time: what is no difference

Arguments = Mapping[str, Any]


# -- how each runs ---------------------------------------------------------------------------------


def _setting(
    read: Callable[[], bool], write: Callable[[bool], None], on: bool
) -> Callable[[Any, Arguments], Any]:
    """Run a kernel under a setting of torch.backends, without its warnings."""

    def run(operator: Any, given: Arguments) -> Any:
        before = read()
        write(on)
        try:
            return operator(**given)
        finally:
            write(before)

    return run


def _math_attention(operator: Any, given: Arguments) -> Any:
    """Run it as torch.nn.attention.sdpa_kernel(SDPBackend.MATH) does, in the layout of the fused kernel."""
    inputs = given["query"], given["key"], given["value"]
    causal, scale = given["is_causal"], given["scale"]

    def attention(*tensors: torch.Tensor) -> torch.Tensor:
        attend = torch.ops.aten._scaled_dot_product_attention_math.default
        output: torch.Tensor = attend(*tensors, None, 0.0, causal, scale=scale)[0]
        return output

    made: Sequence[torch.Tensor]
    if "grad_out" in given:
        with _autograd():
            leaves = [tensor.detach().requires_grad_() for tensor in inputs]
            made = torch.autograd.grad(attention(*leaves), leaves, given["grad_out"])
    else:
        query, key, _ = inputs
        made = attention(*inputs), _log_sum_exp(query, key, causal, scale)
    shapes = operator(**{name: _shape_only(value) for name, value in given.items()})
    return tuple(_with_layout_of(tensor, shape) for tensor, shape in zip(made, shapes, strict=True))


def _log_sum_exp(query: torch.Tensor, key: torch.Tensor, causal: bool, scale: float | None) -> torch.Tensor:
    """[batch, head, query] as the fused kernel's backward reads it."""
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.matmul(query.float() * factor, key.float().transpose(-2, -1))
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(later, -torch.inf)
    return torch.logsumexp(scores, dim=-1)


@contextlib.contextmanager
def _autograd() -> Iterator[None]:
    """Record for autograd, which PyTorch does not do below a dispatch mode."""
    keys = torch._C.DispatchKey
    without_autocast = torch._C.DispatchKeySet(keys.AutocastCPU) | torch._C.DispatchKeySet(keys.AutocastCUDA)
    with _disable_current_modes():
        included = torch._C._dispatch_tls_local_include_set()
        with torch._C._ForceDispatchKeyGuard(included, without_autocast), torch.enable_grad():
            yield


def _shape_only(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _with_layout_of(tensor: torch.Tensor, shape: torch.Tensor) -> torch.Tensor:
    if tensor.stride() == shape.stride() and tensor.dtype is shape.dtype:
        return tensor
    return torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device=tensor.device).copy_(
        tensor
    )


# What a plan may name, and how it runs.
RUNNERS: dict[str, Callable[[Any, Arguments], Any]] = {
    "without oneDNN": _setting(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, False),
    "with oneDNN": _setting(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, True),
    "without cuDNN": _setting(torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled, False),
    "deterministic cuDNN": _setting(
        torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic, True
    ),
    "math attention": _math_attention,
}


# -- which there are -------------------------------------------------------------------------------

_CONVOLUTIONS = ("convolution", "convolution_backward")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_ATTENTIONS = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)
_OPERATORS = frozenset((*_CONVOLUTIONS, *_PRODUCTS, *_ATTENTIONS))
_ARM = platform.machine() in ("aarch64", "arm64")


def alternatives(operator: Any, given: Arguments) -> list[str]:
    """The algorithms that this kernel can run with instead: names in RUNNERS."""
    name = describe(operator).name
    tensor = next(tensors_in(list(given.values())), None)
    if tensor is None:
        return []
    if name in _ATTENTIONS:
        query, key = given["query"], given["key"]
        plain = not given["dropout_p"] and given["attn_mask"] is None and query.shape[1] == key.shape[1]
        return ["math attention"] * plain
    if tensor.device.type == "cuda":
        if name not in _CONVOLUTIONS or not torch._C._get_cudnn_enabled():
            return []
        return ["without cuDNN"] + ["deterministic cuDNN"] * (not torch._C._get_cudnn_deterministic())
    if tensor.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return []
    # Products of 32 bits are MKL's where there is MKL.
    if name in _CONVOLUTIONS or tensor.dtype in (torch.bfloat16, torch.float16) or _ARM:
        return ["without oneDNN" if torch._C._get_mkldnn_enabled() else "with oneDNN"]
    return []


def has_alternatives(operator: Any) -> bool:
    """Whether kernels of this operator can have alternatives."""
    return describe(operator).name in _OPERATORS


def bind_arguments(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """The arguments of a call by name, with the defaults of those that were left out."""
    schema = operator._schema.arguments
    given = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    given.update({argument.name: value for argument, value in zip(schema, args, strict=False)})
    return given | (kwargs or {})


def run_as(name: str, operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the kernel with the algorithm of this name."""
    return RUNNERS[name](operator, bind_arguments(operator, args, kwargs))


# -- what each costs -------------------------------------------------------------------------------


class Variants:
    """Runs and measures the algorithms of kernels: once for each operator and set of shapes.

    ran      algorithm of the kernel that ran last
    counts   kernels of this step that did not run as traced, by algorithm
    """

    def __init__(self, device: Device, engine: CopyEngine, interrupts: Interrupts, allowed: bool) -> None:
        self._device, self._engine, self._interrupts, self._allowed = device, engine, interrupts, allowed
        self._known: dict[Any, dict[str, Variant]] = {}
        self._costs: dict[str, Variant] = {}  # of the kernel that was recorded last
        self.ran = AS_TRACED
        self.counts: Counter[str] = Counter()

    def run(self, name: str, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Run the kernel with algorithm ``name``; as traced where its present arguments do not allow that."""
        given = bind_arguments(operator, args, kwargs)
        if name not in alternatives(operator, given):
            self.ran = AS_TRACED
            return operator(*args, **(kwargs or {}))
        result = RUNNERS[name](operator, given)
        self.ran = name
        self.counts[name] += 1
        return result

    def retry_with_alternative(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, error: BaseException
    ) -> Any:
        """Run a kernel that failed with another algorithm, which may need less memory; None: none can run."""
        if self._allowed and isinstance(error, RuntimeError) and has_alternatives(operator):
            for name in alternatives(operator, bind_arguments(operator, args, kwargs)):
                with contextlib.suppress(RuntimeError):  # as torch's errors are, of every kind
                    return self.run(name, operator, args, kwargs)
        return None

    def measure(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any
    ) -> None:
        """Measure the alternatives of the kernel that returned ``result``. Their results are freed."""
        self._costs = {}
        if not self._allowed or not has_alternatives(operator):
            return
        self._device.synchronize()  # nothing else may run meanwhile
        given = bind_arguments(operator, args, kwargs)
        if not (names := alternatives(operator, given)):
            return
        key = (operator, *names, *map(_shape_key, given.values()))
        if key not in self._known:
            runs = {name: partial(RUNNERS[name], operator, given) for name in names}
            runs[AS_TRACED] = partial(operator, **given)
            found = {name: cost for name, call in runs.items() if (cost := self._cost(name, call, result))}
            self._known[key] = found if AS_TRACED in found and len(found) > 1 else {}
        self._costs = self._known[key]

    def _cost(self, name: str, call: Callable[[], Any], result: Any) -> Variant | None:
        """Time and workspace, with warm caches. None where it cannot run here, or its result has another
        layout."""
        layout = _shape_key(result)
        times_s: list[float] = []
        try:
            for _ in range(TIMES):
                with self._interrupts, self._engine.lock:
                    needed_bytes = sum(tensor.untyped_storage().nbytes() for tensor in tensors_in(result))
                    self._engine.make_room(needed_bytes, expected=True)
                begun_s = time.perf_counter()
                self._device.meter.begin_kernel()
                made = call()
                self._device.meter.end_kernel()
                self._device.synchronize()
                workspace_bytes = self._device.meter.workspace_bytes()
                times_s.append(time.perf_counter() - begun_s)
                if _shape_key(made) != layout:
                    return None
                del made
        except (RuntimeError, MemoryError, PenstockError):  # it does not fit, or does not support this
            return None
        return Variant(name, min(times_s), workspace_bytes)

    def algorithms_of_last_kernel(self, time_s: float, workspace_bytes: int) -> dict[str, Variant]:
        """The algorithms of the kernel recorded last, by name, scaled to the time and workspace that it took.
        Times within `NOISE` count as equal."""
        costs = self._costs
        if self.ran not in costs:
            return {AS_TRACED: Variant(AS_TRACED, time_s, workspace_bytes)}
        ratios = {name: cost.time_s / costs[AS_TRACED].time_s for name, cost in costs.items()}
        ratios = {name: 1.0 if abs(ratio - 1) <= NOISE else ratio for name, ratio in ratios.items()}
        return {
            name: cost._replace(time_s=time_s * ratios[name] / ratios[self.ran])
            for name, cost in costs.items()
        }


def _shape_key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, tuple | list):
        return tuple(map(_shape_key, value))
    return value
