"""The clock of kernels: sees every operator that runs, and keeps the storages that it touches on the device.

Before a kernel: the actions that are due, the residency of every storage that it touches, room for what it
makes. After it: what it wrote is dirty, what it made is managed. Autograd's saved tensors are storages like
any other, and autograd's own checks stay on.

What is done for every operator is C++: csrc/runtime/dispatch.cpp. It asks this class where something has to
move.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._dynamo.eval_frame import skip_code
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock import _native
from penstock.capture import regions
from penstock.capture.operators import Operator, describe, tensors_in
from penstock.capture.phases import Phases
from penstock.capture.recorder import KernelRecord, TensorRecord
from penstock.capture.slices import join, slices
from penstock.codecs.bitmask import sampled_density
from penstock.core.columns import KINDS
from penstock.core.trace import Variant
from penstock.errors import BudgetTooSmall
from penstock.runtime import graphs, storage_methods, triton_kernels
from penstock.runtime.collectives import Collectives
from penstock.runtime.copy_engine import CopyEngine
from penstock.runtime.devices import Device
from penstock.runtime.eviction_order import eviction_order
from penstock.runtime.interrupts import Interrupts
from penstock.runtime.kernel_times import Launch, Timed, times_s
from penstock.runtime.output_bytes import Needs
from penstock.runtime.recompute import Recomputation
from penstock.runtime.replacing import replace
from penstock.runtime.schedule import (
    LARGEST_SMALL_BYTES,
    Drop,
    Evict,
    Note,
    Prefetch,
    Recompute,
    Schedule,
)
from penstock.runtime.storages import DROPPED, LEAVING, ManagedStorage, Storages
from penstock.runtime.variants import AS_TRACED, Cost, Costs, alternatives, as_traced, has_alternatives, named
from penstock.runtime.variants import run as run_variant

_ACTIVATION, _INPUT = KINDS.index("activation"), KINDS.index("input")
_LASTING = frozenset(KINDS.index(kind) for kind in ("weight", "gradient", "optimizer_state"))


class Recording:
    """What the clock notes of a step, for a trace.

    zeros       sample how many elements of what kernels write are zero
    timed       of kernels that were not over when their call was: the launch, and what the device says
    launched_s  when each kernel was
    """

    def __init__(self, zeros: bool = False) -> None:
        self.zeros = zeros
        self.kernels: list[KernelRecord] = []
        self.tensors: list[TensorRecord] = []
        self.in_memory_bytes: list[int] = []  # after each kernel
        self.timed: list[tuple[Launch, Timed]] = []
        self.launched_s: list[float] = []

    def take_times(self) -> None:
        """Have the kernels' times from the device, which has done all of them."""
        if not self.timed:
            return
        first, begun_s = self.timed[0][1].begun, self.launched_s[0]
        for kernel, (launch, timed), (took_s, time_s) in zip(
            self.kernels, self.timed, times_s(self.timed), strict=True
        ):
            kernel.ended_s = begun_s + first.elapsed_time(timed.ended) / 1e3
            kernel.begun_s = kernel.ended_s - took_s
            kernel.scale(time_s / max(launch.program_s + launch.call_s, 1e-9))


class Clock(TorchDispatchMode):
    """Carries out a schedule while kernels run, and enforces the budget where none is followed."""

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
        variants: bool = False,
    ) -> None:
        super().__init__()
        self._costs = Costs(self._make_some_room, self._measured) if variants else None
        self._ran = AS_TRACED  # the kernel that ran last, in a step that is recorded
        self._known_costs: dict[str, Cost] = {}  # of that kernel
        self._timed: Timed | None = None  # that kernel
        self.variants: Counter[str] = Counter()  # kernels of this step that ran as another algorithm
        self._interrupts = interrupts or Interrupts()
        engine.check_interrupt = self._interrupts.check
        self._device = device
        self._engine = engine
        self._lock = engine.lock
        self.storages = Storages(device.adopt, self._bury, smallest_bytes, device.first_serial)
        self.storages.tells_all = False
        if not device.memory.in_arena:
            self.storages.adopt_results(device.device, device.memory)
        device.storages = self.storages
        engine.victims = self._victims
        engine.wait_for_others = self._wait_for_a_collective
        engine.remark = self._remark
        self._collectives = Collectives(device, engine.budget_bytes)
        self.recomputation = Recomputation(device, engine)
        self._kernels = _native.KernelClock(
            storages=self.storages,
            memory=device.memory,
            lock=engine.lock,
            prefetches=engine.prefetches,
            unpinned=engine.unpinned_later,
            tensor=torch.Tensor,
            parameter=torch.nn.Parameter,
            buffer=torch.nn.Buffer,
            storage=torch.UntypedStorage,
            overload=torch._ops.OpOverload,
            untyped_storage=torch.Tensor.untyped_storage,
            set_compiler=set_eval_frame,
            current_stream=device.current_stream,
        )
        self._kernels.activation = _ACTIVATION
        self._kernels.views_need_bytes = device.empties_storages
        self.phases = Phases(self.know)
        self._inferred = Needs() if device.infers_needs else None
        self._kernels.asks_needs = device.infers_needs
        # Where nothing is planned, so much more leaves, in the background, than room is needed for.
        self._ahead_bytes = min(64 << 20, engine.budget_bytes // 10)
        self._alternatives: tuple[Schedule, ...] = ()
        self._carried: dict[int, ManagedStorage] = {}
        self._recording: Recording | None = None
        self._resized: set[ManagedStorage] = set()  # in this step, and not used since
        self._replaced = contextlib.ExitStack()  # gives torch back what is its own
        self.rests = False

    # -- on and off ----------------------------------------------------------------------------

    def start(self) -> None:
        """See every operator of this thread from now on."""
        # What torch calls. On the class it would be one more frame of Python for every operator.
        self.__dict__["__torch_dispatch__"] = MethodType(self._kernels, self)
        self.__enter__()
        self._kernels.entered = True
        replace(self._replaced, torch.UntypedStorage, "resize_", self._resizing())
        if self._device.memory.in_arena:
            for name in ("share_memory_", "_share_fd_cpu_", "_share_filename_cpu_"):
                shared = self._sharing(getattr(torch.UntypedStorage, name))
                replace(self._replaced, torch.UntypedStorage, name, shared)
        elif self._device.empties_storages:
            for name, method in storage_methods.methods(self).items():
                replace(self._replaced, torch.UntypedStorage, name, method)
            replace(self._replaced, torch._tensor_str, "_str", self._printing(torch._tensor_str._str))
            self._replaced.enter_context(graphs.refused())
            self._replaced.enter_context(triton_kernels.seen(self))

    def stop(self) -> None:
        """See no more. Where another mode was entered since, this one lies still below it."""
        self._replaced.close()
        if self._is_innermost():
            self.__exit__(None, None, None)
        self._kernels.entered = False

    def _printing(self, text: Callable[..., str]) -> Callable[..., str]:
        """In the place of what makes the text of a tensor, and turns all modes off for it."""

        def text_of(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> str:
            with self.present(self._storages_in(tensor)):
                return text(tensor, *args, **kwargs)

        return text_of

    def _resizing(self) -> Callable[[torch.UntypedStorage, int], torch.UntypedStorage]:
        """In the place of UntypedStorage.resize_, which is no operator: FSDP2 frees gathered parameters with
        it, and allocates them again. To the run it is another storage then."""

        def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            if not self._device.has(storage):
                return storage_methods.resize(storage, size)
            # What is away on an accelerator is empty, and neither freed nor allocated by the program.
            needed = size > 0 or self._device.empties_storages
            with self._interrupts, self._lock:
                self.storages.bury()
                managed = self.storages.find(storage)
                if managed is not None:
                    managed.pins += 1
            try:
                with self._interrupts, self._lock:
                    if managed is not None:
                        self.recomputation.will_write(managed)
                        self._engine.settle(managed, needed)
                    self._engine.make_room(max(size - storage.nbytes(), 0), expected=True)
                while not self._device.resize(storage, size):
                    with self._interrupts, self._lock:
                        self._engine.make_some_room(size)
            finally:
                if managed is not None:
                    managed.pins -= 1
            with self._interrupts, self._lock:
                if managed is not None:
                    self.storages.renew(storage)
                made = self.storages.meet(storage, made=True)
                if self._recording is not None and self._kernels.in_step:
                    self._resized.add(made)
                self._kernel_over()
            return storage

        return resized

    def _sharing(self, share: Callable[..., Any]) -> Callable[..., Any]:
        """In the place of what gives a storage memory that other processes have too, and frees what it had:
        on any thread, as queues of multiprocessing do. To the run it is another storage then."""

        def shared(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
            with self._interrupts, self._lock:
                self.storages.bury()
                managed = self.storages.find(storage)
                if managed is not None and managed.movable:
                    managed.pins += 1
            if managed is None or not managed.movable:
                return share(storage, *args, **kwargs)
            try:
                with self._interrupts, self._lock:
                    try:
                        self.recomputation.will_write(managed)
                        self._engine.settle(managed, needed=True)
                    except BudgetTooSmall:  # the arena brings it in while it is copied
                        self._engine.settle(managed, needed=False)
                    self._engine.make_room(managed.size_bytes, expected=True)
                return share(storage, *args, **kwargs)
            finally:
                with self._interrupts, self._lock:
                    managed.pins -= 1
                    if managed.address and storage.data_ptr() != managed.address:
                        self.recomputation.will_write(managed)
                        self._engine.settle(managed, needed=False)  # another thread may have demanded it
                        self.storages.renew(storage)
                        self.storages.bury()
                        with contextlib.suppress(BudgetTooSmall):  # what is shared is there
                            self.storages.meet(storage)

        return shared

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._kernels(self, operator, types, args, kwargs)

    # -- steps ---------------------------------------------------------------------------------

    @property
    def kernels(self) -> int:
        """That have run in this step."""
        return self._kernels.kernels

    @property
    def operators(self) -> int:
        """That were seen in this step."""
        return self._kernels.operators

    @property
    def clock_s(self) -> float:
        """Seconds spent on operators in this step, the kernels themselves and waits excluded."""
        return self._kernels.clock_s

    def begin_step(self, known: Iterable[Schedule], recording: Recording | None) -> None:
        """A step begins.

        known       schedules it may follow, the likeliest first
        recording   where to note what happens
        """
        with self._interrupts, self._lock:
            self.recomputation.begin_step()
            schedules = tuple(known)
            first = schedules[0] if schedules else None
            self._alternatives = schedules[1:]
            self._recording = recording
            self.variants = Counter()
            self._resized.clear()
            if recording is not None:
                self._device.synchronize()  # what was launched before is no part of the step
            self._kernels.watches = recording is not None
            self.storages.tells_all = recording is not None
            self._kernels.begin_step(first)
            self._collectives.follow(first.budget_bytes if first is not None else 0)
            if first is not None:
                for tensor, tier in first.away_at_start:
                    if (managed := self._tensor(tensor)) is not None:
                        self._engine.release(managed, tier)
                self._rest_if_nothing_moves(first)
            self.phases.enter()

    def _rest_if_nothing_moves(self, schedule: Schedule) -> None:
        """Do not look at kernels in a step for which everything is there and stays, on a device that keeps
        the budget by itself if the step should turn out another."""
        self.rests = (
            self._recording is None
            and self._device.keeps_budget
            and schedule.is_still
            and self._is_innermost()
            and self.storages.all_resident()
        )
        if self.rests:
            self.__exit__(None, None, None)

    def _is_innermost(self) -> bool:
        return self._kernels.entered and _python_dispatch._get_current_dispatch_mode() is self

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
            self._land([])
            self.recomputation.end_step()
            self._kernels.in_step = False
            if not self.rests:
                self._carried = {
                    managed.index: managed
                    for managed in self._kernels.numbered()
                    if managed.storage() is not None
                }
            self.rests = False
            if self._recording is not None:
                self._finish(self._recording)
            self._recording = None
            self._kernels.watches = False

    def know(self, tensor: torch.Tensor, kind: int) -> None:
        """The tensor is a weight, a gradient, or the optimizer's."""
        for storage in self._storages_in(tensor):
            with self._interrupts, self._lock:
                self.storages.bury()
                managed = self.storages.meet(storage)
                managed.kind = kind
                managed.lasts = kind in _LASTING

    @property
    def followed(self) -> Schedule | None:
        """The schedule that the step has followed to its end; None where it did something else."""
        schedule: Schedule | None = self._kernels.schedule
        if schedule is not None and (self.rests or self.kernels == schedule.kernels):
            return schedule
        return None

    @property
    def touched_bytes(self) -> int:
        """Of all storages that the step has touched."""
        return self._kernels.touched_bytes()

    # -- what the C++ part asks ----------------------------------------------------------------

    @staticmethod
    def _describe(operator: Any) -> Operator:
        return describe(operator)

    _told = staticmethod(regions.told)

    def _has_written(self, written: list[ManagedStorage]) -> None:
        """A kernel has, of which that was not known before."""
        for managed in written:
            self._engine.will_write(managed)

    @staticmethod
    def _storages_in(values: Any) -> list[torch.UntypedStorage]:
        """The storages that hold the values of tensors: none of an opaque one."""
        found = []
        for tensor in tensors_in(values):
            with contextlib.suppress(NotImplementedError, RuntimeError):
                found.append(tensor.untyped_storage())
        return found

    def _run_slices(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """An operator on lists of tensors, in parts that fit. Ctrl-C comes before it or after it, as it does
        for the operator in one piece; only one that meets a wait ends it half done."""
        parts = slices(operator, args, kwargs or {})
        if parts is None:
            return self._kernels.run(self, operator, args, kwargs)
        with self._interrupts:
            return join(operator, [self._kernels.run(self, operator, *part) for part in parts])

    def _bring(self, used: list[ManagedStorage]) -> None:
        with self._interrupts:
            self._engine.demand(used)

    def _record_stream(self, used: list[ManagedStorage], stream: Any) -> None:
        for managed in used:
            self._device.record_stream(managed, stream)

    @contextlib.contextmanager
    def present(
        self,
        storages: Iterable[torch.UntypedStorage],
        written: Sequence[torch.UntypedStorage] = (),
        stays: bool = False,
    ) -> Iterator[None]:
        """See penstock.runtime.storage_methods.Clock. On any thread."""
        with self._interrupts:
            with self._lock:
                within = self._engine.memory.reserved_bytes  # of a kernel that does this
                self._device.begin_kernel()
                used = self._pin(storages, written)
            try:
                self._device.synchronize()  # kernels wait for what comes, and this may be none
                yield
            finally:
                with self._lock:
                    for managed in used:
                        managed.pins += stays
                    self._unpin(used, is_over=not within)

    def away_bytes(self, storage: torch.UntypedStorage) -> int:
        """See penstock.runtime.storage_methods.Clock."""
        with self._lock:
            self.storages.bury()
            managed = self.storages.find(storage)
            return managed.size_bytes if managed is not None and managed.state > LEAVING else 0

    def _pin(
        self, storages: Iterable[torch.UntypedStorage], written: Sequence[torch.UntypedStorage] = ()
    ) -> list[ManagedStorage]:
        """Bring them, to stay until `_unpin`."""
        used: list[ManagedStorage] = []
        self.storages.bury()
        for storage in storages:
            managed = self.storages.find(storage)
            if managed is not None and managed.movable and managed not in used:
                used.append(managed)
        for managed in used:
            managed.pins += 1
        try:
            if any(managed.state > LEAVING for managed in used):
                self._engine.demand(used)
            for storage in written:
                managed = self.storages.find(storage)
                if managed is not None and managed.movable:
                    self.recomputation.will_write(managed)
                    self._engine.will_write(managed)
        except BaseException:
            self._unpin(used)
            raise
        return used

    def _unpin(self, used: list[ManagedStorage], is_over: bool = True) -> None:
        for managed in used:
            managed.pins -= 1
            self.storages.move_to_end(managed)
        if is_over:
            self._kernel_over()

    def _begin_kernel(self) -> None:
        with self._interrupts:
            self._device.begin_kernel()

    def _make_ready(
        self,
        used: list[ManagedStorage],
        away: bool,
        written: list[ManagedStorage],
        need_bytes: int,
        pieces: Sequence[int] | None = None,
    ) -> None:
        """Bring what is away, give up copies of what the kernel writes, and make room: in pieces of these
        sizes, where they are known."""
        engine = self._engine
        waits = len(engine.waits)
        recompute_s = self.recomputation.recompute_s
        with self._interrupts:
            if self._recompute_before(used, written):
                away = any(managed.state > LEAVING for managed in used)
                self._device.use(used)  # others were in use meanwhile
            if away:
                engine.demand(used)
            for managed in written:
                if managed.clean or managed.guarded or managed.state or managed.writing:
                    engine.will_write(managed)
            if need_bytes or away:
                ahead_bytes = 0 if self._kernels.schedule is not None else self._ahead_bytes
                # A device that keeps the budget by itself refuses what does not fit when it is asked for.
                engine.make_room(need_bytes, ahead_bytes, expected=self._device.keeps_budget)
                if pieces:
                    self._device.make_holes(pieces)
        self._kernels.excluded_s += self.recomputation.recompute_s - recompute_s
        self._kernels.excluded_s += sum(wait.finished_s - wait.started_s for wait in engine.waits[waits:])

    def _secure(self, need_bytes: int, pieces: Sequence[int] | None) -> None:
        """A kernel is about to run that cannot run again: the device, which may refuse memory that the budget
        has, is asked before."""
        sizes = (need_bytes,) if pieces is None else pieces
        small_bytes = need_bytes - sum(sizes)
        if small_bytes > 0:  # together they may be more than one block has
            sizes = (*sizes, min(small_bytes, LARGEST_SMALL_BYTES))
        has_room = self._device.has_room
        assert has_room is not None
        with self._interrupts:
            while not has_room(sizes):
                if not (self._engine.free(need_bytes) or self._device.make_room(need_bytes)):
                    return

    def _recompute_before(self, used: list[ManagedStorage], written: list[ManagedStorage]) -> bool:
        """Make what the kernel uses and was dropped, and what can be made no more once it has run. What else
        it uses may leave meanwhile. False: there was nothing to make."""
        dropped = [managed for managed in used if managed.state == DROPPED]
        ending = [managed for managed in written if managed.recipes]
        if not dropped and not ending:
            return False
        for managed in used:
            managed.pins -= 1
        try:
            for managed in dropped:
                self.recomputation.recompute(managed)
            for managed in ending:
                self.recomputation.will_write(managed)
        finally:
            for managed in used:
                managed.pins += 1
        return True

    _state_before = staticmethod(Recomputation.state_before)

    def _note(
        self,
        operator: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        result: Any,
        before: Any,
        varies: bool,
    ) -> None:
        if varies and self._ran != AS_TRACED:
            operator = functools.partial(_run_as, self._ran, operator)
        with self._interrupts:
            schedule: Schedule | None = self._kernels.schedule
            need_bytes = schedule.needs_bytes[self.kernels] if schedule is not None else 0
            self.recomputation.note(operator, args, kwargs, result, before, need_bytes, self.storages.meet)

    def _launching(self, used: list[ManagedStorage], written: list[ManagedStorage]) -> None:
        self._collectives.launching(used, written)

    def _not_launched(self) -> None:
        self._collectives.not_launched()

    def _launched(
        self,
        facts: Operator,
        result: Any,
        used: list[ManagedStorage],
        written: list[ManagedStorage],
        made: list[ManagedStorage],
    ) -> None:
        self._collectives.launched(facts, result, used, written, made)
        self._kernels.in_flight = bool(self._collectives)

    def _land(self, used: list[ManagedStorage]) -> None:
        self._collectives.land(used)
        self._kernels.in_flight = bool(self._collectives)

    def _remark(self) -> str:
        """A program that caught an error may have forgotten the run."""
        if self._kernels.in_step:
            return ""
        return (
            " This run is still open, though none of its steps is: penstock.close() ends it, and its budget."
        )

    def _wait_for_a_collective(self) -> bool:
        with self._interrupts:
            waited = self._collectives.wait()
        self._kernels.in_flight = bool(self._collectives)
        return waited

    def _begin_measuring(self) -> None:
        self._ran = AS_TRACED
        self._device.begin_measuring()

    def _end_measuring(self) -> None:
        self._timed = self._device.end_measuring()

    # -- other algorithms ----------------------------------------------------------------------

    def _run_variant(
        self, name: str, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> Any:
        """The kernel as the plan chose; as it is where the program gave it other arguments since."""
        given = named(operator, args, kwargs)
        if name not in alternatives(operator, given):
            self._ran = AS_TRACED
            return operator(*args, **(kwargs or {}))
        result = run_variant(name, operator, given)
        self._ran = name
        self.variants[name] += 1
        return result

    def _run_otherwise(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, error: BaseException
    ) -> Any:
        """The kernel, which failed, as another algorithm, which may need less memory; None: none can run."""
        if self._costs is None or not isinstance(error, RuntimeError) or not has_alternatives(operator):
            return None
        given = named(operator, args, kwargs)
        for name in alternatives(operator, given):
            with contextlib.suppress(RuntimeError):  # as torch's errors are, of every kind
                return self._run_variant(name, operator, args, kwargs)
        return None

    def _try_variants(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any
    ) -> None:
        """Measure what the kernel that has just run could have run as instead. Nothing made is kept."""
        self._known_costs = {}
        self._workspace_bytes = self._device.workspace_bytes()
        if self._costs is not None and has_alternatives(operator):
            self._device.synchronize()  # nothing runs beside what is measured
            self._known_costs = self._costs.of(operator, named(operator, args, kwargs), result)

    def _make_some_room(self, size_bytes: int) -> None:
        with self._interrupts, self._lock:
            self._engine.make_room(size_bytes, expected=True)

    def _measured(self, call: Callable[[], Any]) -> tuple[Any, int]:
        self._device.begin_measuring()
        result = call()
        self._device.end_measuring()
        self._device.synchronize()
        return result, self._device.workspace_bytes()

    def _frees_enough(self, error: BaseException, need_bytes: int) -> bool:
        """Whether the kernel, which wrote nothing, lacked memory that could be freed now."""
        with self._interrupts, self._lock:
            return self._device.frees_enough(error, need_bytes)

    def _cannot_use(self, error: OSError) -> None:
        self._device.cannot_use(error)

    def _kernel_failed(self, error: BaseException, need_bytes: int) -> None:
        self._device.kernel_failed(error, need_bytes)

    def _kernel_over(self) -> None:
        with self._interrupts:
            self._device.end_kernel()
            self._engine.end_kernel()

    def _infer_need(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> int:
        """What a kernel will take beyond what is there that was not planned, or planned for other sizes."""
        assert self._inferred is not None
        return self._inferred.bytes(operator, args, kwargs or {})

    def _in_memory_bytes(self) -> int:
        return self._device.in_memory_bytes()

    def _note_need(self, operator: Any, taken_bytes: int, workspace_bytes: int) -> None:
        assert self._inferred is not None
        self._inferred.note(operator, taken_bytes, workspace_bytes)

    # -- the schedule --------------------------------------------------------------------------

    def _tensor(self, index: int) -> ManagedStorage | None:
        """The storage that is the trace's tensor ``index``: of this step, or kept from the last one."""
        managed = self._kernels.tensor(index)
        if managed is None:
            managed = self._carried.get(index)
            if managed is not None and managed.step == self._kernels.step:
                return None
        return managed

    def _act(self, kernel: int) -> None:
        """Do what the schedule says is to be done before the kernel."""
        engine = self._engine
        with self._interrupts:
            for action in self._kernels.schedule.before[kernel]:
                if type(action) is Note:
                    self._kernels.notes = True
                    continue
                managed = self._tensor(action.tensor)
                if managed is None or not managed.movable:
                    continue
                if type(action) is Evict:
                    if action.packs:
                        engine.wait_for_room(action.packed_bytes)
                    engine.evict(
                        managed,
                        action.tier,
                        release=action.packs > 0,
                        packs=action.packs,
                        codec=action.codec,
                        writes=action.writes,
                    )
                elif type(action) is Prefetch:
                    engine.prefetch(managed, action.keeps_copy)
                elif type(action) is Drop:
                    self.recomputation.drop(managed)
                elif type(action) is Recompute:
                    self._recompute(managed)
                else:
                    engine.release(managed)

    def _recompute(self, managed: ManagedStorage) -> None:
        begun_s = time.perf_counter()
        if managed.state == DROPPED:
            self.recomputation.recompute(managed)
        else:  # it could not be dropped
            self._engine.prefetch(managed)
        self._kernels.excluded_s += time.perf_counter() - begun_s

    def _change(self, name: str) -> None:
        """Follow another schedule that agrees with the step so far; none where there is none."""
        seen = (*self._kernels.seen(), name)
        agrees = (other for other in self._alternatives if other.names[: len(seen)] == seen)
        found = next(agrees, None)
        self._kernels.follow(found)
        self._collectives.follow(found.budget_bytes if found is not None else 0)

    def _victims(self) -> Sequence[ManagedStorage]:
        self.storages.bury()  # a copy that is over may have been the last to hold one
        kernels = self._kernels
        return eviction_order(self.storages.by_use(), kernels.schedule, kernels.kernels, self._is_numbered)

    def _is_numbered(self, managed: ManagedStorage) -> bool:
        """Whether the storage is the trace's tensor of its number."""
        return managed.step == self._kernels.step or self._carried.get(managed.index) is managed

    # -- recording -----------------------------------------------------------------------------

    def _bury(self, managed: ManagedStorage) -> None:
        """The storage has died: its tensor in the recording ends with the kernel before."""
        recording = self._recording
        with self._interrupts:
            if (
                recording is not None
                and managed.step == self._kernels.step
                and managed.index < len(recording.tensors)
            ):
                # What the kernel itself ends was there while it ran.
                recording.tensors[managed.index].death = self.kernels + managed.in_kernel
            if managed.recipes:
                self.recomputation.bury(managed)
            self._device.bury(managed)

    def _record(
        self,
        facts: Operator,
        result: Any,
        used: list[ManagedStorage],
        written: list[ManagedStorage],
        made: list[ManagedStorage],
        entered_s: float,
        begun_s: float,
        ended_s: float,
    ) -> int:
        """Note the kernel; its workspace, in bytes. Time since the last one is the program's own, and counts
        for this one."""
        recording = self._recording
        assert recording is not None
        kernel = self.kernels
        # What was resized and is written now is born now.
        resized = self._resized.intersection(used)
        self._resized -= resized
        born = {managed.index for managed in resized if managed in written}
        inputs = tuple(managed.index for managed in used if managed.index not in born)
        outputs = tuple(
            dict.fromkeys(
                [managed.index for managed in written]
                + [managed.index for managed in made if managed.index not in inputs]
            )
        )
        fresh = born | {
            managed.index for managed in made if managed.birth == kernel and managed.index not in inputs
        }
        for managed in self._kernels.numbered(len(recording.tensors)):
            is_fresh = managed.index in fresh
            recording.tensors.append(
                TensorRecord(
                    managed.size_bytes,
                    _ACTIVATION if is_fresh else managed.kind if managed.kind >= 0 else _INPUT,
                    not is_fresh,
                    kernel if is_fresh else 0,
                    None,
                    movable=managed.movable,
                )
            )
        phase = self.phases.current()
        for tensor in tensors_in(result):
            for storage in self._storages_in(tensor):
                managed = self.storages.meet(storage)
                if managed.index in fresh:
                    record = recording.tensors[managed.index]
                    record.itemsize = tensor.element_size()
                    record.float32 = tensor.dtype is torch.float32
        if recording.zeros:
            for managed in (*written, *made):
                # What set_ gives a view of may be away, or dropped: then nobody wrote to it.
                if not managed.address or managed.step != self._kernels.step or managed.state > LEAVING:
                    continue
                record = recording.tensors[managed.index]
                with contextlib.suppress(ValueError):  # another thread has given it other memory
                    loan = _native.arena_lend(managed.address)
                    try:
                        density = sampled_density(managed.address, managed.size_bytes, record.itemsize)
                    finally:
                        _native.arena_lent_back(loan)
                    record.density = max(record.density or 0.0, density)
        repeats = phase == 0 and facts.can_run_again
        for index in outputs:
            recording.tensors[index].producer = kernel if repeats and index in fresh else -1
        workspace_bytes = self._workspace_bytes
        launch = Launch(max(entered_s - self._kernels.left_s, 0.0), ended_s - begun_s)
        if self._timed is not None:
            recording.timed.append((launch, self._timed))
        recording.launched_s.append(begun_s)
        time_s = launch.program_s + launch.call_s
        costs = self._known_costs
        times_s = as_traced(costs, self._ran, time_s) if self._ran in costs else {AS_TRACED: time_s}
        recording.kernels.append(
            KernelRecord(
                facts.name,
                times_s.pop(AS_TRACED),
                inputs,
                outputs,
                costs[AS_TRACED].workspace_bytes if self._ran in costs else workspace_bytes,
                phase,
                begun_s,
                ended_s,
                variants=tuple(
                    Variant(name, time_s, costs[name].workspace_bytes) for name, time_s in times_s.items()
                ),
            )
        )
        recording.in_memory_bytes.append(self._device.in_memory_bytes())
        return workspace_bytes

    def _finish(self, recording: Recording) -> None:
        """Kinds are known for sure at the end of the step."""
        for managed in self._kernels.numbered()[: len(recording.tensors)]:
            if managed.kind >= 0:
                recording.tensors[managed.index].kind = managed.kind


skip_code(Clock.__torch_dispatch__.__code__)


def _run_as(name: str, operator: Any, *args: Any, **kwargs: Any) -> Any:
    return run_variant(name, operator, named(operator, args, kwargs))
