"""The clock of kernels: sees every operator that runs, and keeps the storages that it touches on the device.

Before a kernel: the actions that are due, the residency of every storage that it touches, room for what it
makes. After it: what it wrote is dirty, what it made is managed. Autograd's saved tensors are storages like
any other, and autograd's own checks stay on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from time import perf_counter
from typing import Any

import torch
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._dynamo.eval_frame import skip_code
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.capture.operators import Operator, describe, tensors_in, written_tensors
from penstock.capture.phases import Phases
from penstock.capture.recorder import KernelRecord, TensorRecord
from penstock.capture.slices import join, slices
from penstock.core.columns import KINDS
from penstock.runtime.copies import CopyEngine
from penstock.runtime.devices import Device
from penstock.runtime.interrupts import Interrupts
from penstock.runtime.needs import Needs
from penstock.runtime.schedule import Evict, Prefetch, Schedule
from penstock.runtime.storages import LEAVING, NEVER, RESIDENT, ManagedStorage, Storages

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer))
_ACTIVATION, _INPUT = KINDS.index("activation"), KINDS.index("input")
_LASTING = frozenset(KINDS.index(kind) for kind in ("weight", "gradient", "optimizer_state"))
_NOTHING: dict[str, Any] = {}
_LIST_OPERATORS = ("_foreach_", "_fused_", "_amp_foreach")


class Recording:
    """What the clock notes of a step, for a trace."""

    def __init__(self) -> None:
        self.kernels: list[KernelRecord] = []
        self.tensors: list[TensorRecord] = []
        self.in_memory_bytes: list[int] = []  # after each kernel


class Clock(TorchDispatchMode):
    """Carries out a schedule while kernels run, and enforces the budget where none is followed.

    kernels      that have run in this step
    operators    that were seen in this step
    clock_s      seconds spent in this file and below in this step, waits excluded
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's own way to keep torch.compile out takes 2 us an operator

    def __init__(
        self,
        device: Device,
        engine: CopyEngine,
        smallest_bytes: int,
        interrupts: Interrupts | None = None,
    ) -> None:
        super().__init__()
        self._interrupts = interrupts or Interrupts()
        engine.check_interrupt = self._interrupts.check
        self._device = device
        self._engine = engine
        self._lock = engine.lock
        self.storages = Storages(device.adopt, self._bury, smallest_bytes)
        engine.victims = self._victims
        self._facts: dict[int, tuple[Operator, Any]] = {}  # by the operator's identity, and the operator
        self.phases = Phases(self.know)
        self._needs_bytes: dict[str, int] = {}  # by operator: what it took last
        self._inferred = Needs() if device.infers_needs else None
        # Where nothing is planned, so much more leaves, in the background, than room is needed for.
        self._ahead_bytes = min(64 << 20, engine.budget_bytes // 10)
        self._schedule: Schedule | None = None
        self._alternatives: tuple[Schedule, ...] = ()
        self._carried: dict[int, ManagedStorage] = {}
        self._numbered: list[ManagedStorage] = []
        self._recording: Recording | None = None
        self._step = 0
        self._in_step = False
        self._left_s = 0.0
        self._seen: list[str] = []
        self.kernels = self.operators = 0
        self.clock_s = 0.0
        self.entered = False
        self.rests = False

    # -- on and off ----------------------------------------------------------------------------

    def start(self) -> None:
        """See every operator of this thread from now on."""
        self.__enter__()
        self.entered = True

    def stop(self) -> None:
        """See no more. Where another mode was entered since, this one lies still below it."""
        if self._is_innermost():
            self.__exit__(None, None, None)
        self.entered = False

    # -- steps ---------------------------------------------------------------------------------

    def begin_step(self, known: Iterable[Schedule], recording: Recording | None) -> None:
        """A step begins.

        known       schedules it may follow, the likeliest first
        recording   where to note what happens
        """
        with self._interrupts, self._lock:
            self._step += 1
            schedules = tuple(known)
            self._schedule = schedules[0] if schedules else None
            self._alternatives = schedules[1:]
            self._recording = recording
            self.kernels = self.operators = 0
            self.clock_s = 0.0
            self._numbered = []
            self._seen = []
            self._in_step = True
            if self._schedule is not None:
                for tensor, tier in self._schedule.away_at_start:
                    if (managed := self._tensor(tensor)) is not None:
                        self._engine.release(managed, tier)
                self._rest_if_nothing_moves(recording)
            self.phases.enter()
        self._left_s = perf_counter()

    def _rest_if_nothing_moves(self, recording: Recording | None) -> None:
        """Do not look at kernels in a step for which everything is there and stays, on a device that keeps
        the budget by itself if the step should turn out another."""
        assert self._schedule is not None
        self.rests = (
            recording is None
            and self._device.keeps_budget
            and self._schedule.is_still
            and self._is_innermost()
            and all(managed.state == RESIDENT for managed in self.storages.by_use.values())
        )
        if self.rests:
            self.__exit__(None, None, None)

    def _is_innermost(self) -> bool:
        return self.entered and _python_dispatch._get_current_dispatch_mode() is self

    def end_step(self) -> None:
        """The step is over: what lasts keeps its number for the next one."""
        with self._interrupts:
            self._end_step()

    def _end_step(self) -> None:
        if self.rests:
            self.__enter__()
        self.phases.exit()
        with self._lock:
            self.storages.bury()
            self._in_step = False
            if not self.rests:
                self._carried = {
                    managed.index: managed for managed in self._numbered if managed.storage() is not None
                }
            self.rests = False
            if self._recording is not None:
                self._finish(self._recording)
            self._recording = None

    def know(self, tensor: torch.Tensor, kind: int) -> None:
        """The tensor is a weight, a gradient, or the optimizer's."""
        for storage in _storages_of(tensor):
            with self._interrupts, self._lock:
                self.storages.bury()
                managed = self.storages.meet(storage)
                managed.kind = kind
                managed.lasts = kind in _LASTING

    @property
    def followed(self) -> Schedule | None:
        """The schedule that the step has followed to its end; None where it did something else."""
        schedule = self._schedule
        if schedule is not None and (self.rests or self.kernels == schedule.kernels):
            return schedule
        return None

    @property
    def touched_bytes(self) -> int:
        """Of all storages that the step has touched."""
        return sum(managed.size_bytes for managed in self._numbered)

    # -- every operator ------------------------------------------------------------------------

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        compiler = set_eval_frame(None)
        if compiler is None:
            return self._dispatch(operator, types, args, kwargs or {})
        try:
            return self._dispatch(operator, types, args, kwargs or {})
        finally:
            set_eval_frame(compiler)

    def _dispatch(self, operator: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known = self._facts.get(id(operator))
        if known is None:
            known = self._facts[id(operator)] = (describe(operator), operator)
        facts = known[0]
        if not self.entered:
            return operator(*args, **kwargs)
        if not facts.is_kernel:
            if self._device.empties_storages:
                with self._interrupts:
                    return self._view(operator, args, kwargs)
            return operator(*args, **kwargs)
        if types and any(kind not in _PLAIN for kind in types):
            return NotImplemented  # a tensor of another kind does it with operators on plain ones
        if facts.name[0] == "_" and facts.name.startswith(_LIST_OPERATORS):
            parts = slices(operator, args, kwargs)
            if parts is not None:
                return join(operator, [self._run(operator, facts, *part) for part in parts])
        with self._interrupts:
            return self._run(operator, facts, args, kwargs)

    def _view(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """torch refuses a view of a storage that is empty."""
        used: list[ManagedStorage] = []
        with self._lock:
            if self.storages.dead:
                self.storages.bury()
            for tensor in tensors_in(args):
                for storage in _storages_of(tensor):
                    managed = self.storages.find(storage)
                    if managed is not None and managed.movable and managed not in used:
                        used.append(managed)
            for managed in used:
                managed.pins += 1
            try:
                if any(managed.state > LEAVING for managed in used):
                    self._engine.demand(used)
            except BaseException:
                self._unpin(used)
                raise
        try:
            return operator(*args, **kwargs)
        finally:
            with self._lock:
                self._unpin(used)

    def _run(self, operator: Any, facts: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        entered_s = perf_counter()
        engine, device, storages = self._engine, self._device, self.storages
        waits = len(engine.waits)
        written: list[ManagedStorage] = []
        with self._lock:
            if storages.dead:
                storages.bury()
            used = self._used(args, kwargs)
            kernel = self.kernels
            if self._in_step:
                self._number(used)
                if self._schedule is not None:
                    self._act(kernel, facts.name)
            for managed in used:
                managed.pins += 1
            try:
                device.begin_kernel(used)
                away = False
                for managed in used:
                    if managed.state > LEAVING:
                        away = True
                if away:
                    engine.demand(used)
                if facts.is_opaque and device.empties_storages:
                    written = used  # any of them may be, and nobody else would notice
                    for managed in written:
                        engine.will_write(managed)
                elif facts.written:
                    written = self._used(tuple(written_tensors(facts, args, kwargs)), _NOTHING)
                    for managed in written:
                        if managed.clean or managed.guarded or managed.state:
                            engine.will_write(managed)
                need_bytes = self._need_bytes(kernel, facts.name, used, (operator, args, kwargs))
                if need_bytes or away:
                    engine.make_room(need_bytes, 0 if self._schedule is not None else self._ahead_bytes)
            except BaseException:
                self._unpin(used)
                raise
        recording = self._recording
        if recording is not None:
            device.begin_measuring()
        begun_s = perf_counter()
        while True:
            try:
                result = operator(*args, **kwargs)
                break
            except BaseException as error:
                again = False
                try:
                    again = facts.is_repeatable and self._frees_enough(error, need_bytes)
                finally:
                    if not again:
                        with self._lock:
                            self._unpin(used)
                if not again:
                    device.kernel_failed(error, need_bytes)
                    raise
        if recording is not None:
            device.end_measuring()
        ended_s = perf_counter()
        with self._lock:
            if storages.dead:
                storages.bury()
            made: list[ManagedStorage] = []
            taken_bytes = 0
            for tensor in (result,) if type(result) is torch.Tensor else tensors_in(result):
                for storage in _storages_of(tensor):
                    found = storages.by_key.get(storage._cdata)
                    if found is None:
                        found = storages.meet(storage, True)
                        found.birth = kernel if self._in_step else -1
                        found.kind = _ACTIVATION
                        taken_bytes += found.size_bytes
                    made.append(found)
            self._unpin(used)
            if self._in_step:
                self._number(made, True)
                schedule = self._schedule
                if schedule is not None and schedule.known[kernel] != len(self._numbered):
                    self._schedule = None  # its numbers mean other tensors
                if recording is not None:
                    self._record(recording, facts, result, used, written, made, entered_s, begun_s, ended_s)
                    taken_bytes += recording.kernels[-1].workspace_bytes
                self.kernels = kernel + 1
                self._seen.append(facts.name)
            if self._inferred is not None:
                workspace_bytes = (
                    recording.kernels[-1].workspace_bytes if recording is not None and self._in_step else 0
                )
                self._inferred.note(operator, taken_bytes - workspace_bytes, workspace_bytes)
            self._needs_bytes[facts.name] = taken_bytes
            self.operators += 1
            self._left_s = left_s = perf_counter()
            self.clock_s += begun_s - entered_s + left_s - ended_s
            if len(engine.waits) > waits:
                self.clock_s -= sum(wait.finished_s - wait.started_s for wait in engine.waits[waits:])
        return result

    def _frees_enough(self, error: BaseException, need_bytes: int) -> bool:
        """Whether the kernel, which wrote nothing, lacked memory that could be freed now."""
        missing_bytes = self._device.missing_bytes(error, need_bytes)
        with self._lock:
            return missing_bytes > 0 and self._engine.free(missing_bytes)

    def _used(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[ManagedStorage]:
        """The storages of the arguments, each once, in order."""
        used: list[ManagedStorage] = []
        by_key = self.storages.by_key
        for value in (*args, *kwargs.values()) if kwargs else args:
            kind = type(value)
            if kind in _PLAIN:
                try:
                    storage = value.untyped_storage()
                except (NotImplementedError, RuntimeError):  # it is sparse, or opaque
                    self._collect(value, used)
                    continue
                managed = by_key.get(storage._cdata) or self.storages.meet(storage)
                if managed not in used:
                    used.append(managed)
            elif kind is list or kind is tuple or isinstance(value, torch.Tensor):
                for tensor in tensors_in(value):
                    self._collect(tensor, used)
        return used

    def _collect(self, tensor: torch.Tensor, used: list[ManagedStorage]) -> None:
        for storage in _storages_of(tensor):
            managed = self.storages.meet(storage)
            if managed not in used:
                used.append(managed)

    def _unpin(self, used: list[ManagedStorage]) -> None:
        by_use = self.storages.by_use
        for managed in used:
            managed.pins -= 1
            if by_use.get(managed.key) is managed:  # else it stays, or died in the kernel
                by_use.move_to_end(managed.key)
        self._device.end_kernel()
        self._engine.end_kernel()

    # -- the schedule --------------------------------------------------------------------------

    def _number(self, touched: list[ManagedStorage], made: bool = False) -> None:
        """Number what this step touches for the first time, as the trace does.

        made   this kernel made them
        """
        step = self._step
        for managed in touched:
            if managed.step != step:
                managed.step = step
                managed.index = len(self._numbered)
                if not made and managed.kind == _ACTIVATION:
                    managed.kind = -1  # made in another step, or between steps
                self._numbered.append(managed)

    def _tensor(self, index: int) -> ManagedStorage | None:
        """The storage that is the trace's tensor ``index``: of this step, or kept from the last one."""
        if index < len(self._numbered):
            return self._numbered[index]
        managed = self._carried.get(index)
        return managed if managed is not None and managed.step != self._step else None

    def _act(self, kernel: int, name: str) -> None:
        schedule = self._schedule
        assert schedule is not None
        if kernel >= len(schedule.names) or schedule.names[kernel] != name:
            schedule = self._change(name)
            if schedule is None:
                return
        for action in schedule.before[kernel]:
            managed = self._tensor(action.tensor)
            if managed is None or not managed.movable:
                continue
            if type(action) is Evict:
                self._engine.evict(managed, action.tier, release=False)
            elif type(action) is Prefetch:
                self._engine.prefetch(managed, action.keeps_copy)
            else:
                self._engine.release(managed)

    def _change(self, name: str) -> Schedule | None:
        """Another schedule that agrees with the step so far; None where there is none."""
        seen = (*self._seen, name)
        for schedule in self._alternatives:
            if schedule.names[: len(seen)] == seen:
                self._schedule = schedule
                return schedule
        self._schedule = None
        return None

    def _need_bytes(
        self, kernel: int, name: str, used: list[ManagedStorage], call: tuple[Any, Any, Any]
    ) -> int:
        """What the kernel will take beyond what is there, as far as is known."""
        schedule = self._schedule if self._in_step else None
        if self._inferred is not None and (schedule is None or not self._has_sizes(schedule, used)):
            return self._inferred.bytes(*call)
        if schedule is None:
            return min(self._needs_bytes.get(name, 0), self._engine.budget_bytes // 4)
        return schedule.needs_bytes[kernel]

    @staticmethod
    def _has_sizes(schedule: Schedule, used: list[ManagedStorage]) -> bool:
        """Whether all of these are as large as in the trace."""
        sizes = schedule.tensor_bytes
        return all(
            managed.index < len(sizes) and sizes[managed.index] == managed.size_bytes for managed in used
        )

    def _victims(self) -> Iterator[ManagedStorage]:
        """What should leave first: what is used furthest in the future where that is known, else what was
        used least recently."""
        self.storages.bury()  # a copy that is over may have been the last to hold one
        schedule = self._schedule
        by_use = list(self.storages.by_use.values())
        if schedule is None:
            yield from by_use
            return
        kernel, step = self.kernels, self._step

        def next_use(managed: ManagedStorage) -> int:
            if managed.step == step or self._carried.get(managed.index) is managed:
                return schedule.next_use(managed.index, kernel)
            return NEVER

        yield from sorted(by_use, key=next_use, reverse=True)

    # -- recording -----------------------------------------------------------------------------

    def _bury(self, managed: ManagedStorage) -> None:
        """The storage has died: its tensor in the recording ends with the kernel before."""
        recording = self._recording
        if recording is not None and managed.step == self._step and managed.index < len(recording.tensors):
            # What the kernel itself ends was there while it ran.
            recording.tensors[managed.index].death = self.kernels + (managed.pins > 0)
        self._device.bury(managed)

    def _record(
        self,
        recording: Recording,
        facts: Operator,
        result: Any,
        used: list[ManagedStorage],
        written: list[ManagedStorage],
        made: list[ManagedStorage],
        entered_s: float,
        begun_s: float,
        ended_s: float,
    ) -> None:
        """Note the kernel. Time since the last one is the program's own, and counts for this one."""
        kernel = self.kernels
        inputs = tuple(managed.index for managed in used)
        outputs = tuple(
            dict.fromkeys(
                [managed.index for managed in written]
                + [managed.index for managed in made if managed.index not in inputs]
            )
        )
        fresh = {managed.index for managed in made if managed.birth == kernel and managed.index not in inputs}
        for managed in self._numbered[len(recording.tensors) :]:
            born = managed.index in fresh
            recording.tensors.append(
                TensorRecord(
                    managed.size_bytes,
                    managed.kind if managed.kind >= 0 else _INPUT,
                    not born,
                    kernel if born else 0,
                    None,
                    movable=managed.movable,
                )
            )
        phase = self.phases.current()
        for tensor in tensors_in(result):
            for storage in _storages_of(tensor):
                managed = self.storages.meet(storage)
                if managed.index in fresh:
                    recording.tensors[managed.index].itemsize = tensor.element_size()
        repeats = phase == 0 and facts.is_repeatable
        for index in outputs:
            recording.tensors[index].producer = kernel if repeats and index in fresh else -1
        recording.kernels.append(
            KernelRecord(
                facts.name,
                ended_s - begun_s + max(entered_s - self._left_s, 0.0),
                inputs,
                outputs,
                self._device.workspace_bytes(),
                phase,
                begun_s,
                ended_s,
            )
        )
        recording.in_memory_bytes.append(self._device.in_memory_bytes())

    def _finish(self, recording: Recording) -> None:
        """Kinds are known for sure at the end of the step."""
        for managed in self._numbered[: len(recording.tensors)]:
            if managed.kind >= 0:
                recording.tensors[managed.index].kind = managed.kind


skip_code(Clock.__torch_dispatch__.__code__)


def _storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """The storages that hold the tensor's values: two of a sparse one, none of an opaque one."""
    if tensor.layout is torch.strided:
        try:
            return [tensor.untyped_storage()]
        except (NotImplementedError, RuntimeError):
            return []
    parts: tuple[Callable[[], torch.Tensor], ...]
    if tensor.layout is torch.sparse_coo:
        parts = (tensor._indices, tensor._values)
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = (tensor.crow_indices, tensor.col_indices, tensor.values)
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = (tensor.ccol_indices, tensor.row_indices, tensor.values)
    else:
        return []
    return [part().untyped_storage() for part in parts]
