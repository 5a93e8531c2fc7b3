"""A PyTorch step to a Trace, without memory and without running it, or on a real run."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import _foreach_supported_types as optimized
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._foreach_utils import _foreach_supported_types as listed
from torch.utils._pytree import tree_map_only

from penstock.capture import slices
from penstock.capture.datasheets import DATA_SHEETS
from penstock.capture.operators import (
    OperatorMode,
    describe,
    gives_the_same_bits,
    tensors_in,
    written_tensors,
)
from penstock.capture.phases import ACTIVATION, BACKWARD, FORWARD, INPUT, Phases
from penstock.capture.recorder import SMALLEST_MOVABLE_BYTES, KernelRecord, TensorRecord, make_trace
from penstock.capture.regions import compiled_regions_visible, region_inputs
from penstock.capture.roofline import estimator, measure_cpu
from penstock.capture.slices import extent, part_sizes, run_in_parts
from penstock.core.arguments import type_phrase
from penstock.core.trace import Trace
from penstock.errors import InvalidArgument
from penstock.runtime.devices.driver import Driver
from penstock.runtime.devices.drivers import make_driver


class TracingCosts(NamedTuple):
    """Seconds that tracing adds to the iteration it traces.

    traced_s   for each kernel
    passed_s   for each operator that is no kernel, such as a view
    """

    traced_s: float = 0.0
    passed_s: float = 0.0


NO_TRACING_COSTS = TracingCosts()


class _Watch(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a storage that knows which tensor it is.

    tensor      its first part, where it is divided
    part_bytes  of each part; of a whole one, one number
    """

    __slots__ = ("address", "part_bytes", "tensor")
    address: int
    tensor: int
    part_bytes: list[int]

    @property
    def tensors(self) -> range:
        """All its parts."""
        return range(self.tensor, self.tensor + len(self.part_bytes))


class Tracer(OperatorMode):
    """Records every kernel that runs while it is entered, and the life of every storage.

    driver     of the accelerator that kernels are executed on: each is waited for. None: there is none, or
               nothing is executed
    fakes      take the places of real tensors, where nothing is executed
    costs      what tracing itself costs, taken off the times of real kernels
    estimate   gives the seconds of a kernel that is not executed: (operator, arguments, result)
    density    measure which fraction of each activation's elements is not zero, when backward begins
    divided    sizes of the tensors that are divided into parts: those of large weights. None: none is, as on
               a device that empties whole storages
    device     storages on others have no bytes on it; None: all count
    """

    def __init__(
        self,
        driver: Driver | None = None,
        estimate: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], float] | None = None,
        *,
        fakes: _FakeTensors | None = None,
        costs: TracingCosts = NO_TRACING_COSTS,
        density: bool = False,
        divided: set[int] | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self._device = device
        self._divided = divided
        self._driver = driver
        self._estimate = estimate
        self._fakes = fakes
        self._costs = costs
        self._counts_zeros = density
        self._phases = Phases(self._has_kind)
        self._kernels: list[KernelRecord] = []
        self._tensors: list[TensorRecord] = []
        self._dtypes: dict[int, torch.dtype] = {}  # of tensors that a kernel made
        self._watches: dict[int, _Watch] = {}  # by address of the storage
        self._left_s: float | None = None  # when the last kernel was recorded
        self._excluded_s = 0.0  # since then, on what the iteration would not do by itself
        self._passed = 0  # operators since then that are no kernels
        self._finished = False  # what is freed after the iteration was alive at its end

    def __enter__(self) -> Tracer:
        self._phases.enter()
        super().__enter__()
        self._left_s = time.perf_counter()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._finished = True
        self._phases.exit()

    def trace(self, *, measured: bool, notes: Mapping[str, str] | None = None) -> Trace:
        """What was recorded."""
        return make_trace(self._kernels, self._tensors, measured=measured, notes=notes)

    @property
    def kernel_time_s(self) -> float:
        return sum(kernel.time_s for kernel in self._kernels)

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._fakes is not None and operator not in _LIFTS:
            args, kwargs = tree_map_only(torch.Tensor, self._fakes.of, (args, kwargs))
        if not describe(operator).is_kernel:
            self._passed += 1
            if self._divided is not None and args and isinstance(args[0], torch.nn.Parameter):
                self._add_weight(args[0].untyped_storage().nbytes())  # kernels may see views of it only
            return operator(*args, **kwargs)
        if self._counts_zeros and self._phases.current() == BACKWARD:
            self._counts_zeros = False
            self._count_zeros()
        is_divided = self._is_divided if self._divided else None
        return run_in_parts(operator, args, kwargs, self._run, is_divided)

    def _run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run and record one kernel."""
        entered_s = time.perf_counter()
        facts = describe(operator)
        inputs = () if facts.reads_shapes else self._tensors_of(*tensors_in((args, kwargs)))
        region = region_inputs(args) if facts.is_opaque else None
        spare = set(self._tensors_of(*region.spare)) if region is not None else set()
        driver, workspace_bytes, in_use_bytes = self._driver, 0, 0
        if driver is not None:
            driver.reset_peaks()
            before_bytes = driver.allocated_bytes()
        begun_s = time.perf_counter()
        result = operator(*args, **kwargs)
        if driver is not None:
            driver.synchronize()
            after, in_use_bytes = driver.memory(), driver.allocated_bytes()
            workspace_bytes = max(0, after.peak_allocated_bytes - max(after.allocated_bytes, before_bytes))
        ended_s = time.perf_counter()
        phase = self._phases.current()
        written = inputs  # whatever an operator without a schema does
        if region is not None:
            written = self._tensors_of(*region.written)
        elif not facts.is_opaque:
            written = self._tensors_of(*written_tensors(facts, args, kwargs))
        made = self._results(result, inputs, phase == FORWARD and gives_the_same_bits(operator, args))
        if spare:
            results = dict.fromkeys(self._tensors_of(*tensors_in(result)))
            written += tuple(index for index in results if index in spare)
        for index in written:
            self._tensors[index].producer = -1
        for index in inputs:  # what the kernel itself ends, as a compiled region does, was there while it ran
            if self._tensors[index].death == len(self._kernels):
                self._tensors[index].death = len(self._kernels) + 1
        if self._estimate is not None:
            kernel_s = self._estimate(operator, args, kwargs, result)
        else:
            # The time since the last kernel is the program's own.
            gap_s = entered_s - self._left_s - self._excluded_s if self._left_s is not None else 0.0
            cost_s = self._costs.traced_s + self._passed * self._costs.passed_s
            kernel_s = max(ended_s - begun_s + max(gap_s, 0.0) - cost_s, 0.0)
        self._kernels.append(
            KernelRecord(
                facts.name, kernel_s, inputs, written + made, workspace_bytes, phase, begun_s, ended_s,
                in_use_bytes,
            )
        )  # fmt: skip
        self._excluded_s = 0.0
        self._passed = 0
        self._left_s = time.perf_counter()
        return result

    def _results(self, result: Any, inputs: tuple[int, ...], is_repeatable: bool) -> tuple[int, ...]:
        """The tensors that the kernel made: its results that are not its arguments."""
        made: list[int] = []
        kernel = len(self._kernels)
        for tensor in tensors_in(result):
            if tensor.untyped_storage()._cdata in self._watches:
                made += (index for index in self._tensors_of(tensor) if index not in inputs)
                continue
            watch = self._born(tensor.untyped_storage(), ACTIVATION, before=False)
            for index in watch.tensors:
                self._tensors[index].itemsize = tensor.element_size()
                self._tensors[index].float32 = tensor.dtype is torch.float32
                self._tensors[index].producer = kernel if is_repeatable and len(watch.tensors) == 1 else -1
                self._dtypes[index] = tensor.dtype
            made += watch.tensors
        return tuple(made)

    def _watch_of(self, tensor: torch.Tensor) -> _Watch:
        """The tensor's storage; one not seen before was there already."""
        storage = (tensor if self._fakes is None else self._fakes.of(tensor)).untyped_storage()
        watch = self._watches.get(storage._cdata)
        if watch is not None:
            return watch
        if isinstance(tensor, torch.nn.Parameter):
            self._add_weight(storage.nbytes())
        return self._born(storage, INPUT, before=True)

    def _add_weight(self, size_bytes: int) -> None:
        if self._divided is not None and size_bytes >= slices.DIVISIBLE_BYTES:
            self._divided.add(size_bytes)

    def _tensors_of(self, *tensors: torch.Tensor) -> tuple[int, ...]:
        """Positions of the records of the tensors' storages, or of those parts that hold their elements."""
        found: list[int] = []
        for tensor in tensors:
            watch = self._watch_of(tensor)
            if len(watch.part_bytes) == 1:
                found.append(watch.tensor)
                continue
            first, last = extent(tensor)
            begin = 0
            for index, size_bytes in enumerate(watch.part_bytes, watch.tensor):
                if begin < last and first < begin + size_bytes:
                    found.append(index)
                begin += size_bytes
        return tuple(found)

    def _is_divided(self, tensor: torch.Tensor) -> bool:
        return len(self._watch_of(tensor).part_bytes) > 1

    def _has_kind(self, tensors: list[torch.Tensor], kind: int) -> None:
        for part in tensors_in(tensors):
            for index in self._watch_of(part).tensors:
                self._tensors[index].kind = kind

    def _born(self, storage: torch.UntypedStorage, kind: int, before: bool) -> _Watch:
        watch = _Watch(storage, self._freed)
        watch.address, watch.tensor = storage._cdata, len(self._tensors)
        size_bytes = storage.nbytes() if self._device in (None, storage.device) else 0
        watch.part_bytes = part_sizes(size_bytes) if size_bytes in (self._divided or ()) else [size_bytes]
        birth = 0 if before else len(self._kernels)
        for part_bytes in watch.part_bytes:
            movable = part_bytes >= SMALLEST_MOVABLE_BYTES
            self._tensors.append(TensorRecord(part_bytes, kind, before, birth, None, movable=movable))
        self._watches[watch.address] = watch
        return watch

    def _freed(self, watch: _Watch) -> None:
        if self._finished:
            return
        if self._watches.get(watch.address) is watch:
            del self._watches[watch.address]
        for index in watch.tensors:
            self._tensors[index].death = len(self._kernels)

    def _count_zeros(self) -> None:
        """Measure the density of every activation that is alive."""
        begun_s = time.perf_counter()
        for watch in list(self._watches.values()):
            dtype, storage = self._dtypes.get(watch.tensor), watch()
            if storage is None or dtype is None or not dtype.is_floating_point or not sum(watch.part_bytes):
                continue
            elements = storage.nbytes() // dtype.itemsize
            values = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, (elements,))
            for index in watch.tensors:
                self._tensors[index].density = int(torch.count_nonzero(values)) / max(elements, 1)
        self._excluded_s += time.perf_counter() - begun_s


_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


class _FakeTensors:
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


@contextlib.contextmanager
def _fakes_on_lists() -> Iterator[None]:
    """torch's optimizers and clipping call operators on lists for these types only."""
    for known in (optimized, listed):
        known.append(FakeTensor)
    try:
        yield
    finally:
        for known in (optimized, listed):
            known.remove(FakeTensor)


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
) -> Trace:
    """Capture one whole iteration, such as forward, backward and optimizer, as a Trace.

    step     runs one iteration: it makes the loss, calls backward and steps the optimizer
    fake     True: nothing is executed and no memory is used; the model may be a real one, or one
             built inside `fake_mode()`. Parameters, gradients and optimizer state are as before
             afterwards. False: the step is run ``warmup + 1`` times for real, and timed;
             the zeros of activations are counted when backward begins, which compression lives on.
    device   where kernel times are for, when fake: "cpu" (this one, measured briefly) or a name
             in penstock.capture.datasheets.DATA_SHEETS. When real: the device the step runs on.
    warmup   iterations before the one that is recorded, so that the optimizer's state exists
    mode     the fake mode the model was built in, if it was

    A region of `torch.compile` is one kernel. It has to be compiled inside: what was compiled before, by a
    step outside of penstock, cannot be seen.

    Raises InvalidArgument where a fake step needs the value of a tensor, or the device is unknown.
    """
    if not callable(step):
        raise InvalidArgument(
            f"step is {type_phrase(step)}: give a function without arguments that runs one iteration"
        )
    if not fake:
        return _trace_real(step, torch.device(device), warmup)
    if device != "cpu" and device not in DATA_SHEETS:
        raise InvalidArgument(f"no data sheet for {device!r}: give one of cpu, {', '.join(DATA_SHEETS)}")
    sheet = measure_cpu() if device == "cpu" else DATA_SHEETS[device]
    mode = mode or fake_mode()
    fakes = _FakeTensors(mode)
    divided: set[int] | None = set() if device == "cpu" else None
    tracers = [Tracer(estimate=estimator(sheet), fakes=fakes, divided=divided) for _ in range(warmup + 1)]
    try:
        with (
            compiled_regions_visible(),
            _fakes_on_lists(),
            _optimizers_restored(),
            _modules_restored(),
            torch.random.fork_rng(devices=[]),
            mode,
        ):
            for tracer in tracers:
                with tracer:
                    step()
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise InvalidArgument(
            f"the step reads a value of a tensor ({error.func}), and a fake tensor has none: take calls such "
            "as .item(), and indexing with masks, out of the step, or trace a real run with fake=False"
        ) from error
    finally:
        fakes.restore_gradients()
    notes = {"device": device, "torch": str(torch.__version__)}
    return tracers[-1].trace(measured=False, notes=notes)


def _trace_real(step: Callable[[], object], device: torch.device, warmup: int) -> Trace:
    driver = None if device.type == "cpu" else make_driver(device)
    divided: set[int] | None = set() if driver is None else None
    costs, where = _costs_of_tracing(driver), device if driver is None else driver.device
    tracer = Tracer(driver, costs=costs, density=True, divided=divided, device=where)
    with compiled_regions_visible():
        for _ in range(warmup):
            step()
        begun_s = time.perf_counter()
        with tracer:
            step()
        step_s = time.perf_counter() - begun_s
    notes = {"device": str(device), "torch": str(torch.__version__), "step_s": f"{step_s:.6f}"}
    return tracer.trace(measured=True, notes=notes)


_known_costs: dict[type, TracingCosts] = {}


def _costs_of_tracing(driver: Driver | None) -> TracingCosts:
    """What tracing with such a driver costs, by a kernel and a view that do next to nothing.

    Measured once in a process, in some 10 ms.
    """
    kind = type(driver)
    if kind not in _known_costs:
        tensor = torch.zeros(1)
        count = 200

        def kernel() -> object:
            return tensor.add_(1)

        def took_s(call: Callable[[], object]) -> float:
            begun_s = time.perf_counter()
            for _ in range(count):
                call()
            return time.perf_counter() - begun_s

        def traced(call: Callable[[], object]) -> tuple[float, float]:
            """What is recorded as the time of kernels, and what it took in all."""
            with Tracer(driver) as tracer:
                all_s = took_s(call)
            return tracer.kernel_time_s, all_s

        with torch.no_grad():
            kernel_s = min(took_s(kernel) for _ in range(5))
            view_s = min(took_s(tensor.detach) for _ in range(5))
            traced_s = min(traced(kernel)[0] for _ in range(5))
            passed_s = min(traced(tensor.detach)[1] for _ in range(5))
        _known_costs[kind] = TracingCosts(
            max(traced_s - kernel_s, 0.0) / count, max(passed_s - view_s, 0.0) / count
        )
    return _known_costs[kind]
