"""Watch one iteration below autograd, kernel by kernel, and make a Trace of it.

A storage is one tensor of the trace, followed from the kernel that makes it to the moment its
memory is freed. Storages that autograd saves may leave memory and come back as another storage:
whoever moves them says so with `saved`, `holds`, `loaded` and `brought_back`.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.core.repeat import harmless_makers
from penstock.core.trace import KINDS, PHASES, Lists, Trace

FORWARD, BACKWARD, OPTIMIZER = range(len(PHASES))
WEIGHT, GRADIENT, OPTIMIZER_STATE, ACTIVATION, INPUT, _ = range(len(KINDS))


class Meter(Protocol):
    """Measures one kernel on a real device."""

    def begin(self) -> None: ...

    def end(self) -> int:
        """Wait until the kernel is done. Returns the bytes that lived during it only."""
        ...

    def in_use_bytes(self) -> int:
        """Device bytes in use now."""
        ...


def tensors_in(values: object) -> Iterator[torch.Tensor]:
    """The tensors in arguments or results of an operator, which nest lists at most."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from tensors_in(value)


@cache
def _written_arguments(operator: Any) -> tuple[tuple[int, str], ...]:
    """(position, name) of the arguments that ``operator`` writes to."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(operator._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@cache
def _is_random(operator: Any) -> bool:
    """Whether it gives other results if it is run again: random numbers, or sums in any order."""
    tags = getattr(operator, "tags", ())
    return any(
        tag in tags
        for name in ("nondeterministic_seeded", "nondeterministic_bitwise")
        if (tag := getattr(torch.Tag, name, None)) is not None
    )


@cache
def _name(operator: Any) -> str:
    return str(operator._schema.name).removeprefix("aten::")


@dataclass(slots=True)
class _Tensor:
    size_bytes: int
    kind: int
    before: bool  # it existed before the iteration
    birth: int
    death: int | None = None
    held_until: int | None = None  # first kernel during which only autograd holds it
    saves: int = 0  # holds that autograd has
    references: int = 0  # those of them that keep the storage in memory
    storages: int = 1  # storages in memory now: itself, or its copy brought back
    maker: int = -1  # kernel that makes it, the same again if it is run again
    itemsize: int = 1
    density: float = 1.0


class _Watch(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a storage that knows which tensor it is."""

    __slots__ = ("address", "tensor")
    address: int
    tensor: int


class Costs(NamedTuple):
    """Seconds that recording adds to the iteration it records.

    recorded_s   for each kernel
    passed_s     for each operator that is not recorded, such as a view
    """

    recorded_s: float
    passed_s: float


NO_COSTS = Costs(0.0, 0.0)


class Recorder(TorchDispatchMode):
    """Records every kernel that runs while it is entered.

    meter      measures real kernels; None where nothing is executed
    costs      what recording itself costs, taken off the times of real kernels
    estimate   gives the seconds of a kernel that is not executed: (operator, arguments, result)
    """

    def __init__(
        self,
        meter: Meter | None = None,
        estimate: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], float] | None = None,
        *,
        costs: Costs = NO_COSTS,
    ) -> None:
        super().__init__()
        self._meter = meter
        self._estimate = estimate
        self._costs = costs
        self._names: list[str] = []
        self._times_s: list[float] = []
        self.begins_s: list[float] = []  # when each kernel began and ended, by time.perf_counter
        self.ends_s: list[float] = []
        self.in_use_bytes: list[int] = []  # after each kernel
        self._workspace: list[int] = []
        # In use, but of no known tensor: what the program carries along from earlier iterations.
        self._unknown_bytes: list[int] = []
        self._phases: list[int] = []
        self._inputs: list[list[int]] = []
        self._outputs: list[list[int]] = []
        self._tensors: list[_Tensor] = []
        self._watches: dict[int, _Watch] = {}  # by address of the storage
        self._own: dict[int, _Watch] = {}  # by tensor: the storage it was born in
        self._present_bytes = 0  # of all watched storages
        self._held: dict[int, _Watch] = {}  # saved tensors that the program may still hold
        self._save_tensor: list[int] = []
        self._save_kernel: list[int] = []
        self._load_tensor: list[int] = []
        self._load_kernel: list[int] = []
        self._spans: list[tuple[int, int, int]] = []  # tensor, first kernel, past the last
        self._loads_open: dict[int, tuple[int, Any]] = {}  # by tensor: first kernel, backward node
        self._left_s: float | None = None
        self._excluded_s = 0.0
        self._passed = 0  # operators since the last kernel that were not recorded
        self._in_optimizer = False
        self._densities_known = False
        self._hooks: list[Any] = []
        self._paused = False
        self._finished = False  # what happens after the iteration is not part of it

    # -- what others tell the recorder ---------------------------------------------------------

    @property
    def kernels(self) -> int:
        """How many kernels have run."""
        return len(self._names)

    def know(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Register tensors that exist before the iteration."""
        for tensor in tensors:
            self._tensors[self.tensor_of(tensor)].kind = KINDS.index(kind)

    def tensor_of(self, tensor: torch.Tensor) -> int:
        """Index of the tensor whose storage this is; one not seen before was there already."""
        return self.storage_of(tensor.untyped_storage())

    def storage_of(self, storage: torch.UntypedStorage) -> int:
        address = storage._cdata
        watch = self._watches.get(address)
        if watch is not None:
            return watch.tensor
        return self._born(storage, kind=INPUT, before=True)

    def has_density(self, tensor: int, density: float) -> None:
        """This fraction of the tensor's elements is not zero."""
        self._tensors[tensor].density = density
        self._densities_known = True

    def is_movable(self, tensor: int) -> bool:
        """Whether the iteration made this tensor: only then can it leave memory for a while."""
        return not self._tensors[tensor].before

    def saved(self, tensor: int) -> None:
        """Autograd saves this storage, in this version, for the first time."""
        self._save_tensor.append(tensor)
        self._save_kernel.append(self.kernels)

    def holds(self, tensor: int, change: int, *, by_reference: bool = False) -> None:
        """Autograd has one hold more (+1) or less (-1) of this tensor.

        by_reference   the hold is another reference to the storage, which keeps it in memory
        """
        if self._finished:
            return
        entry = self._tensors[tensor]
        entry.saves += change
        entry.references += change if by_reference else 0
        if change > 0 and entry.held_until is None and tensor in self._own:
            self._held[tensor] = self._own[tensor]
        if entry.saves == 0:
            self._close_span(tensor)
            if entry.storages == 0:
                entry.death = self.kernels

    def loaded(self, tensor: int, storage: torch.UntypedStorage) -> None:
        """A backward node asks for this tensor, and finds it in ``storage``."""
        self._load_tensor.append(tensor)
        self._load_kernel.append(self.kernels)
        self._loads_open.setdefault(tensor, (self.kernels, torch._C._current_autograd_node()))
        if storage._cdata not in self._watches:
            self.brought_back(tensor, storage)

    def brought_back(self, tensor: int, storage: torch.UntypedStorage) -> None:
        """This storage is, or is about to become, a copy of the tensor."""
        self._tensors[tensor].storages += 1
        self._watch(storage, tensor)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing of what runs inside: it is not the iteration's own."""
        self._paused, before = True, self._paused
        try:
            yield
        finally:
            self._paused = before

    def exclude(self, time_s: float) -> None:
        """Seconds since the last kernel that the iteration would not spend by itself."""
        self._excluded_s += time_s

    # -- watching ------------------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        self._hooks = [
            register_optimizer_step_pre_hook(self._optimizer_begins),
            register_optimizer_step_post_hook(self._optimizer_ends),
        ]
        super().__enter__()
        self._left_s = time.perf_counter()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._finished = True
        for hook in self._hooks:
            hook.remove()

    def _optimizer_begins(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._in_optimizer = True
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter in parameters:
            self._tensors[self.tensor_of(parameter)].kind = WEIGHT
            if parameter.grad is not None:
                self._tensors[self.tensor_of(parameter.grad)].kind = GRADIENT

    def _optimizer_ends(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._in_optimizer = False
        for state in optimizer.state.values():
            if isinstance(state, Mapping):
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        self._tensors[self.tensor_of(value)].kind = OPTIMIZER_STATE

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Questions about tensors and marks for profilers are no kernels; what runs while paused is not
        # the iteration's.
        if self._paused or operator.namespace in ("prim", "profiler"):
            self._passed += 1
            return operator(*args, **kwargs)
        entered_s = time.perf_counter()
        self._note_released_holds()
        self._note_finished_nodes()
        inputs = {self.tensor_of(tensor) for tensor in tensors_in((args, kwargs))}
        if self._meter is not None:
            self._meter.begin()
        begun_s = time.perf_counter()
        result = operator(*args, **kwargs)
        workspace = self._meter.end() if self._meter is not None else 0
        ended_s = time.perf_counter()

        written = {
            self.tensor_of(tensor)
            for position, name in _written_arguments(operator)
            for tensor in tensors_in(args[position] if position < len(args) else kwargs.get(name))
        }
        made = self._results(operator, result, inputs, written)
        if made is None:  # a view: no kernel ran
            self._passed += 1
            self._excluded_s += time.perf_counter() - entered_s - (ended_s - begun_s)
            return result
        if self._estimate is not None:
            kernel_s = self._estimate(operator, args, kwargs, result)
        else:
            # The time since the last kernel is the program's own, unless it was spent on moving tensors.
            gap_s = entered_s - self._left_s - self._excluded_s if self._left_s is not None else 0.0
            cost_s = self._costs.recorded_s + self._passed * self._costs.passed_s
            kernel_s = max(ended_s - begun_s + max(gap_s, 0.0) - cost_s, 0.0)
        self._excluded_s = 0.0
        self._passed = 0
        self._names.append(_name(operator))
        self._times_s.append(kernel_s)
        self.begins_s.append(begun_s)
        self.ends_s.append(ended_s)
        in_use_bytes = self._meter.in_use_bytes() if self._meter is not None else 0
        self.in_use_bytes.append(in_use_bytes)
        self._workspace.append(workspace)
        self._unknown_bytes.append(max(in_use_bytes - self._present_bytes, 0))
        self._phases.append(self._phase())
        self._inputs.append(sorted(inputs))
        self._outputs.append(sorted(made | written))
        self._note_makers(operator, result, made, written)
        self._left_s = time.perf_counter()
        return result

    def _results(self, operator: Any, result: Any, inputs: set[int], written: set[int]) -> set[int] | None:
        """Tensors that the kernel made, or None where it made only another view of its inputs."""
        made = set()
        produced = False
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            address = storage._cdata
            known = self._watches[address].tensor if address in self._watches else None
            if known is None:
                produced = True
                made.add(self._born(storage, ACTIVATION, before=False))
            elif known not in inputs:
                made.add(known)
        return None if not produced and not written and inputs and _has_tensors(result) else made

    def _note_makers(self, operator: Any, result: Any, made: set[int], written: set[int]) -> None:
        """Remember which kernel could make its results again, bit for bit: one of the forward pass that
        writes nothing in place and draws no random numbers. (A batch norm moves its running statistics,
        which its schema does not say; run again, it is given none.)"""
        kernel = len(self._names) - 1
        for tensor in tensors_in(result):
            watch = self._watches.get(tensor.untyped_storage()._cdata)
            if watch is not None and watch.tensor in made:
                self._tensors[watch.tensor].itemsize = tensor.element_size()
        repeats = self._phases[-1] == FORWARD and not written and not _is_random(operator)
        for index in made | written:
            self._tensors[index].maker = kernel if repeats and index in made else -1

    def _phase(self) -> int:
        if self._in_optimizer:
            return OPTIMIZER
        return BACKWARD if torch._C._current_autograd_node() is not None else FORWARD

    # -- lifetimes -----------------------------------------------------------------------------

    def _born(self, storage: torch.UntypedStorage, kind: int, before: bool) -> int:
        tensor = len(self._tensors)
        size_bytes = storage.nbytes()
        self._tensors.append(_Tensor(size_bytes, kind, before, 0 if before else self.kernels))
        if before:  # until now it was among the unknown
            self._unknown_bytes = [max(unknown - size_bytes, 0) for unknown in self._unknown_bytes]
        self._own[tensor] = self._watch(storage, tensor)
        return tensor

    def _watch(self, storage: torch.UntypedStorage, tensor: int) -> _Watch:
        watch = _Watch(storage, self._storage_freed)
        watch.address = storage._cdata
        watch.tensor = tensor
        self._present_bytes += self._tensors[tensor].size_bytes
        self._watches[watch.address] = watch
        return watch

    def _storage_freed(self, watch: _Watch) -> None:
        if self._finished:
            return
        if self._watches.get(watch.address) is watch:
            del self._watches[watch.address]
        if self._own.get(watch.tensor) is watch:
            del self._own[watch.tensor]
        entry = self._tensors[watch.tensor]
        self._present_bytes -= entry.size_bytes
        entry.storages -= 1
        if entry.storages > 0:
            return
        if entry.held_until is None:
            entry.held_until = self.kernels
            self._held.pop(watch.tensor, None)
        self._close_span(watch.tensor)
        if entry.saves == 0:
            entry.death = self.kernels

    def _note_released_holds(self) -> None:
        """Find saved tensors that only autograd holds now, where the storage itself was kept."""
        for tensor, watch in list(self._held.items()):
            storage = watch()
            # One more reference than holds: the Python object that was just looked at.
            others = 1 + self._tensors[tensor].references
            if storage is None or torch._C._storage_Use_Count(storage._cdata) <= others:
                self._tensors[tensor].held_until = self.kernels
                del self._held[tensor]

    def _note_finished_nodes(self) -> None:
        """A node uses what it loaded until it ends, also where the graph is retained."""
        node = torch._C._current_autograd_node()
        for tensor in [tensor for tensor, (_, loader) in self._loads_open.items() if loader is not node]:
            self._close_span(tensor)

    def _close_span(self, tensor: int) -> None:
        begin, _ = self._loads_open.pop(tensor, (self.kernels, None))
        if begin < self.kernels:
            self._spans.append((tensor, begin, self.kernels))

    # -- the result ----------------------------------------------------------------------------

    def trace(
        self, *, measured: bool, notes: Mapping[str, str] | None = None, evictable: str = "saved"
    ) -> Trace:
        """What was recorded. Tensors still alive at the end that the optimizer made are persistent."""
        count = self.kernels
        for tensor, begin, end in self._spans:
            for kernel in range(begin, end):
                if tensor not in self._inputs[kernel]:
                    self._inputs[kernel].append(tensor)
        alive = [entry.death is None for entry in self._tensors]
        persistent = [
            still and (entry.before or entry.kind in (WEIGHT, GRADIENT, OPTIMIZER_STATE))
            for entry, still in zip(self._tensors, alive, strict=True)
        ]
        birth = [0 if lasts else entry.birth for entry, lasts in zip(self._tensors, persistent, strict=True)]
        death = [count if entry.death is None else entry.death for entry in self._tensors]
        held_until = [
            dead if entry.held_until is None else min(entry.held_until, dead)
            for entry, dead in zip(self._tensors, death, strict=True)
        ]
        integers = np.int64
        inputs, outputs = Lists.of([sorted(entry) for entry in self._inputs]), Lists.of(self._outputs)
        makers = np.array([entry.maker for entry in self._tensors], dtype=integers)
        lasting = np.array(persistent, dtype=np.bool_)
        return Trace(
            kernel_name=tuple(self._names),
            kernel_time_s=np.array(self._times_s, dtype=np.float64),
            kernel_workspace_bytes=np.array(self._workspace, dtype=integers)
            + np.array(self._unknown_bytes, dtype=integers),
            kernel_phase=np.array(self._phases, dtype=integers),
            inputs=inputs,
            outputs=outputs,
            tensor_bytes=np.array([entry.size_bytes for entry in self._tensors], dtype=integers),
            tensor_kind=np.array([entry.kind for entry in self._tensors], dtype=integers),
            tensor_persistent=lasting,
            tensor_birth=np.array(birth, dtype=integers),
            tensor_death=np.array(death, dtype=integers),
            tensor_held_until=np.array(held_until, dtype=integers),
            save_tensor=np.array(self._save_tensor, dtype=integers),
            save_kernel=np.array(self._save_kernel, dtype=integers),
            load_tensor=np.array(self._load_tensor, dtype=integers),
            load_kernel=np.array(self._load_kernel, dtype=integers),
            evictable=evictable,
            tensor_recompute=harmless_makers(makers, inputs, outputs, lasting),
            tensor_itemsize=np.array([entry.itemsize for entry in self._tensors], dtype=integers),
            tensor_density=np.array(
                [entry.density for entry in self._tensors] if self._densities_known else [], dtype=np.float64
            ),
            measured=measured,
            notes=dict(notes or {}),
        )


def _has_tensors(result: Any) -> bool:
    return next(tensors_in(result), None) is not None


_known_costs: dict[type, Costs] = {}


def costs_of_recording(meter: Meter) -> Costs:
    """What recording with such a meter costs, by a kernel that does next to nothing.

    Measured once in a process, in some 10 ms.
    """
    kind = type(meter)
    if kind not in _known_costs:
        tensor = torch.zeros(1)
        count = 200

        def run() -> float:
            begun_s = time.perf_counter()
            for _ in range(count):
                tensor.add_(1)
            return time.perf_counter() - begun_s

        def run_recorded() -> float:
            with Recorder(meter) as recorder:
                run()
            return sum(recorder._times_s)

        def run_passed() -> float:
            with Recorder(meter) as recorder, recorder.paused():
                return run()

        with torch.no_grad():
            plain_s, recorded_s, passed_s = (
                min(measure() for _ in range(5)) for measure in (run, run_recorded, run_passed)
            )
        _known_costs[kind] = Costs(
            max(recorded_s - plain_s, 0.0) / count, max(passed_s - plain_s, 0.0) / count
        )
    return _known_costs[kind]
