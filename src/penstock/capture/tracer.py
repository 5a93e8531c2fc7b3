"""A PyTorch step to a Trace, without memory and without running it, or on a real run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only

from penstock.capture.recorder import Recorder, costs_of_recording
from penstock.capture.roofline import DATA_SHEETS, estimator, measure_cpu
from penstock.core.trace import EVICTABLE, Trace
from penstock.errors import InvalidArgument


class _Hold:
    """Autograd's hold of a saved storage. Its death is the release by the backward node."""

    __slots__ = ("recorder", "saved", "tensor")

    def __init__(self, recorder: Recorder, tensor: int, saved: torch.Tensor) -> None:
        self.recorder = recorder
        self.tensor = tensor
        self.saved = saved.detach()  # without the graph, or a saved output would keep itself alive
        recorder.holds(tensor, +1, by_reference=True)

    def __del__(self) -> None:
        self.recorder.holds(self.tensor, -1, by_reference=True)


class _SavedTensors(torch.autograd.graph.saved_tensors_hooks):
    """Saved-tensor hooks that keep every tensor and tell the recorder.

    counts_zeros   measure the density of what is saved
    """

    def __init__(self, recorder: Recorder, counts_zeros: bool = False) -> None:
        self._recorder = recorder
        self._counts_zeros = counts_zeros
        self._seen: set[tuple[int, int]] = set()
        super().__init__(self._pack, self._unpack)

    def _pack(self, saved: torch.Tensor) -> torch.Tensor | _Hold:
        tensor = self._recorder.tensor_of(saved)
        if not self._recorder.is_movable(tensor):
            return saved.detach()
        key = (tensor, saved._version)
        if key not in self._seen:
            self._seen.add(key)
            self._recorder.saved(tensor)
            if self._counts_zeros and saved.is_floating_point():
                begun_s = time.perf_counter()
                with self._recorder.paused():
                    nonzero = int(torch.count_nonzero(saved.detach()))
                self._recorder.exclude(time.perf_counter() - begun_s)
                self._recorder.has_density(tensor, nonzero / max(saved.numel(), 1))
        return _Hold(self._recorder, tensor, saved)

    def _unpack(self, packed: torch.Tensor | _Hold) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        self._recorder.loaded(packed.tensor, packed.saved.untyped_storage())
        return packed.saved


class _CpuMeter:
    def begin(self) -> None:
        pass

    def end(self) -> int:
        return 0

    def in_use_bytes(self) -> int:
        return 0


class CudaMeter:
    """Waits for each kernel on a CUDA device and reads what the allocator saw."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before_bytes = 0

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before_bytes = torch.cuda.memory_allocated(self._device)

    def end(self) -> int:
        torch.cuda.synchronize(self._device)
        after = torch.cuda.memory_allocated(self._device)
        return max(0, torch.cuda.max_memory_allocated(self._device) - max(after, self._before_bytes))

    def in_use_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)


_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


class _Twins:
    """Fake stand-ins for the real tensors of a model, so that nothing reads or writes the real ones."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in self._pairs:
            if tensor.is_leaf:
                # Backward will hang a fake gradient on the real leaf: remember what to put back.
                self._gradients.append((tensor, tensor.grad))
            # Optimizers read their step counters: a lifted constant keeps its value.
            is_constant = tensor.numel() == 1 and not tensor.requires_grad
            lift = torch.ops.aten.lift_fresh.default if is_constant else self._mode.from_tensor
            self._pairs[id(tensor)] = (tensor, lift(tensor))
        return self._pairs[id(tensor)][1]

    def restore_gradients(self) -> None:
        for tensor, gradient in self._gradients:
            tensor.grad = gradient


class _FakeRecorder(Recorder):
    """A recorder that puts fake twins in the place of real tensors."""

    def __init__(self, twins: _Twins, **options: Any) -> None:
        super().__init__(**options)
        self._twins = twins

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if operator not in _LIFTS:
            args, kwargs = tree_map_only(torch.Tensor, self._twins.of, (args, kwargs or {}))
        return super().__torch_dispatch__(operator, types, args, kwargs)

    def tensor_of(self, tensor: torch.Tensor) -> int:
        return super().tensor_of(self._twins.of(tensor))


@contextlib.contextmanager
def _optimizers_restored() -> Iterator[None]:
    """Give every optimizer that steps inside its state back."""
    before: dict[int, tuple[torch.optim.Optimizer, dict[Any, Any], list[dict[str, Any]]]] = {}

    def remember(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if id(optimizer) not in before:
            state = {key: dict(value) for key, value in optimizer.state.items()}
            before[id(optimizer)] = (optimizer, state, [dict(group) for group in optimizer.param_groups])

    hook = register_optimizer_step_pre_hook(remember)
    try:
        yield
    finally:
        hook.remove()
        for optimizer, state, groups in before.values():
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, saved in zip(optimizer.param_groups, groups, strict=True):
                group.clear()
                group.update(saved)


@contextlib.contextmanager
def _modules_restored() -> Iterator[None]:
    """Give every module that runs inside the tensors back that it had as buffers and attributes."""
    before: dict[int, tuple[torch.nn.Module, dict[str, Any], dict[str, Any]]] = {}

    def remember(module: torch.nn.Module, *_: Any) -> None:
        if id(module) not in before:
            before[id(module)] = (module, dict(module.__dict__), dict(module._buffers))

    hook = register_module_forward_pre_hook(remember)
    try:
        yield
    finally:
        hook.remove()
        for module, attributes, buffers in before.values():
            for name, value in list(module.__dict__.items()):
                if isinstance(value, FakeTensor):
                    del module.__dict__[name]
                    if name in attributes:
                        module.__dict__[name] = attributes[name]
            module._buffers.update(buffers)


def fake_mode() -> FakeTensorMode:
    """The mode in which tensors have shapes and no memory: build models inside it to trace them."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def trace(
    step: Callable[[], object],
    *,
    fake: bool = True,
    device: str = "cpu",
    warmup: int = 1,
    mode: FakeTensorMode | None = None,
    evictable: str = "saved",
    density: bool = False,
) -> Trace:
    """Capture one whole iteration, such as forward, backward and optimizer, as a Trace.

    step     runs one iteration: it makes the loss, calls backward and steps the optimizer
    fake     True: nothing is executed and no memory is used; the model may be a real one, or one
             built inside `fake_mode()`. Parameters, gradients and optimizer state are as before
             afterwards. False: the step is run ``warmup + 1`` times for real, and timed.
    device   where kernel times are for, when fake: "cpu" (this one, measured briefly) or a name
             in penstock.capture.roofline.DATA_SHEETS. When real: the device the step runs on.
    warmup   iterations before the one that is recorded, so that the optimizer's state exists
    mode     the fake mode the model was built in, if it was
    evictable   as of Trace. "saved": what `offload` can carry out. "all": weights, gradients and the
             optimizer's state may leave too, for studies
    density  count the zeros of what autograd saves, which compression lives on; needs a real run

    Raises InvalidArgument where a fake step needs the value of a tensor, or the device is unknown.
    """
    if evictable not in EVICTABLE:
        raise InvalidArgument(f"evictable is {evictable!r}: give one of {', '.join(map(repr, EVICTABLE))}")
    if not fake:
        return _trace_real(step, torch.device(device), warmup, evictable, density)
    if density:
        raise InvalidArgument("a fake tensor has no zeros to count: take density=True out, or fake=False in")
    if device != "cpu" and device not in DATA_SHEETS:
        raise InvalidArgument(f"no data sheet for {device!r}: give one of cpu, {', '.join(DATA_SHEETS)}")
    sheet = measure_cpu() if device == "cpu" else DATA_SHEETS[device]
    mode = mode or fake_mode()
    twins = _Twins(mode)
    recorders = [_FakeRecorder(twins, estimate=estimator(sheet)) for _ in range(warmup + 1)]
    try:
        with _optimizers_restored(), _modules_restored(), torch.random.fork_rng(devices=[]), mode:
            for recorder in recorders:
                with recorder, _SavedTensors(recorder):
                    step()
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise InvalidArgument(
            f"the step reads a value of a tensor ({error.func}), and a fake tensor has none: take calls such "
            "as .item(), and indexing with masks, out of the step, or trace a real run with fake=False"
        ) from error
    finally:
        twins.restore_gradients()
    notes = {"device": device, "torch": str(torch.__version__)}
    return recorders[-1].trace(measured=False, notes=notes, evictable=evictable)


def _trace_real(
    step: Callable[[], object], device: torch.device, warmup: int, evictable: str, density: bool
) -> Trace:
    for _ in range(warmup):
        step()
    meter = CudaMeter(device) if device.type == "cuda" else _CpuMeter()
    recorder = Recorder(meter, costs=costs_of_recording(meter))
    begun_s = time.perf_counter()
    with recorder, _SavedTensors(recorder, density):
        step()
    step_s = time.perf_counter() - begun_s
    notes = {"device": str(device), "torch": str(torch.__version__), "step_s": f"{step_s:.6f}"}
    return recorder.trace(measured=True, notes=notes, evictable=evictable)
