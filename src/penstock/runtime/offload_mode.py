"""The dispatch mode of a run, its clock of kernels: sees every operator, and keeps what it touches on the
device.

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
from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any

import torch
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._dynamo.eval_frame import skip_code
from torch.utils import _python_dispatch

from penstock import _native
from penstock.capture import slices
from penstock.capture.operators import OperatorMode, describe, gives_the_same_bits, storages_in
from penstock.capture.phases import ACTIVATION, GRADIENT, OPTIMIZER_STATE, WEIGHT, Phases
from penstock.capture.regions import region_inputs
from penstock.capture.slices import extent, run_in_parts
from penstock.errors import BudgetTooSmall
from penstock.runtime.collectives import Collectives
from penstock.runtime.copy_engine import CopyEngine
from penstock.runtime.devices import Device
from penstock.runtime.interrupts import Interrupts
from penstock.runtime.output_bytes import KernelNeeds
from penstock.runtime.recompute import Recomputation
from penstock.runtime.recording import Recorder, Recording
from penstock.runtime.schedule import (
    LARGEST_SMALL_BYTES,
    DropAction,
    EvictAction,
    KeepRecipeAction,
    PrefetchAction,
    RecomputeAction,
    Schedule,
)
from penstock.runtime.storage_methods import StorageAccess
from penstock.runtime.storages import DROPPED, LEAVING, NEVER, RESIDENT, ManagedStorage, Storages
from penstock.runtime.torch_patches import (
    compiled_regions_seen,
    cuda_graphs_refused,
    triton_launches_seen,
)
from penstock.runtime.variants import AS_TRACED, Variants, run_as


class OffloadMode(OperatorMode):
    """Carries out a schedule while kernels run, and enforces the budget where none is followed.

    native   counts kernels and operators of this step, and the seconds that the clock took for them
    """

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
        keeps_weights: bool = False,
    ) -> None:
        super().__init__()
        self._stays = (WEIGHT, GRADIENT) if keeps_weights else ()
        self._interrupts = interrupts or Interrupts()
        engine.check_interrupt = self._interrupts.check
        self._device = device
        self._engine = engine
        self._lock = engine.lock
        self.storages = Storages(device.adopt, self._died, smallest_bytes, device.first_serial, device.device)
        self.storages.reports_all = False
        self.storages.part_bytes = slices.PART_BYTES if device.memory.in_arena else 0
        self.storages.divisible_bytes = slices.DIVISIBLE_BYTES
        if not device.memory.in_arena:
            self.storages.adopt_results(device.memory)
        device.storages = self.storages
        engine.eviction_order = self._eviction_order
        engine.wait_for_others = self._wait_for_a_collective
        engine.budget_hint = self._budget_hint
        self.recomputation = Recomputation(device, engine)
        self.native = self._kernels = _native.KernelClock(
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
            modes_below=torch._C._len_torch_dispatch_stack,
            set_compiler=set_eval_frame,
            current_stream=device.current_stream,
        )
        self._kernels.activation = ACTIVATION
        self._kernels.views_need_bytes = self._kernels.asks_needs = not device.memory.in_arena
        self._collectives = Collectives(device, engine.budget_bytes, self._kernels)
        self._phases = Phases(self.set_kind)
        self.variants = Variants(device, engine, self._interrupts, variants)
        self._recorder = Recorder(device, self._kernels, self.storages, self.variants, self._phases)
        self._access = StorageAccess(
            device, engine, self.storages, self.recomputation, self._interrupts, self._kernel_over
        )
        needs = KernelNeeds(device.device)
        # What csrc/runtime/dispatch.cpp calls, too:
        self._infer_need, self._note_need = needs.bytes, needs.add
        self._begin_measuring, self._end_measuring = self._recorder.begin_kernel, self._recorder.end_kernel
        self._try_variants, self._record = self._recorder.measure, self._recorder.record
        self._run_variant = self.variants.run
        self._retry_with_alternative = self.variants.retry_with_alternative
        self._before_launch = self._collectives.before_launch
        self._after_launch = self._collectives.after_launch
        self._launch_failed = self._collectives.launch_failed
        self._release_done = self._collectives.release_done
        self._cannot_use, self._kernel_failed = device.cannot_use, device.room.kernel_failed
        self._in_memory_bytes = device.in_memory_bytes
        # Where nothing is planned, so much more leaves, in the background, than room is needed for.
        self._ahead_bytes = min(64 << 20, engine.budget_bytes // 10)
        self._alternatives: tuple[Schedule, ...] = ()
        self._from_last_step: dict[int, ManagedStorage] = {}
        self._all_is_back: Callable[[], None] | None = None  # of a run that lingers
        self._replaced = contextlib.ExitStack()  # gives torch back what is its own
        self.rests = False

    # -- on and off ----------------------------------------------------------------------------

    def start(self) -> None:
        """See every operator of this thread from now on."""
        while isinstance(last := _python_dispatch._get_current_dispatch_mode(), OffloadMode):
            last.__exit__(None, None, None)  # it was stopped by an operator, inside of which it cannot exit
        # What torch calls. On the class it would be one more frame of Python for every operator.
        self.__dict__["__torch_dispatch__"] = MethodType(self._kernels, self)
        self.__enter__()
        self._kernels.entered = True
        self._access.replace_methods(self._replaced, self._recorder.resized)
        if not self._device.memory.in_arena:
            self._replaced.enter_context(cuda_graphs_refused())
            self._replaced.enter_context(compiled_regions_seen())
            self._replaced.enter_context(triton_launches_seen(self._access.present))

    def stop(self) -> None:
        """See no more. Where another mode was entered since, this one lies still below it."""
        self._replaced.close()
        if self._is_innermost():
            self.__exit__(None, None, None)
        self._kernels.entered = False

    def leave_to_parent(self) -> None:
        """In a process made by fork: see no more. What reads storages of an accelerator is refused."""
        if not self._device.memory.in_arena:
            self._access.leave_to_parent()
            self._replaced.pop_all()
        self.stop()

    def linger(self, all_is_back: Callable[[], None]) -> None:
        """After the run: see on, and call this after an operator when nothing is away any more."""
        self._all_is_back = all_is_back
        self.__dict__["__torch_dispatch__"] = self._dispatch_lingering

    def _dispatch_lingering(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = self._kernels(self, operator, types, args, kwargs)
        if self._kernels.entered and self._all_is_back is not None and self.storages.all_resident():
            self._all_is_back()
        return result

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._kernels(self, operator, types, args, kwargs)

    # -- steps ---------------------------------------------------------------------------------

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
            self.variants.counts.clear()
            self._recorder.begin_step(recording)
            self._access.let_addresses_go()
            self._kernels.begin_step(first)
            self._collectives.follow(first.budget_bytes if first is not None else 0)
            self._collectives.launched = False
            if first is not None:
                for tensor, tier in first.away_at_start:
                    if (managed := self._tensor(tensor)) is not None:
                        self._engine.release(managed, tier)
                self._rest_if_nothing_moves(first)
            self._phases.enter()

    def _rest_if_nothing_moves(self, schedule: Schedule) -> None:
        """Do not look at kernels in a step for which everything is there and stays, where the arena keeps the
        budget if the step should turn out another."""
        self.rests = (
            self._recorder.recording is None
            and self._device.memory.in_arena
            and schedule.is_still
            and self._is_innermost()
            and self.storages.all_resident()
        )
        if self.rests:
            self._collectives.launched = schedule.has_collectives
            self.__exit__(None, None, None)

    def _is_innermost(self) -> bool:
        return self._kernels.entered and _python_dispatch._get_current_dispatch_mode() is self

    def end_step(self) -> bool:
        """The step is over: what lasts keeps its number for the next one. Whether it had collectives."""
        with self._interrupts, self._lock:
            if self.rests:
                self.__enter__()
            self._phases.exit()
            self._access.let_addresses_go()
            self._device.poll()
            self.storages.remove_dead()
            self._release_done([])
            self.recomputation.end_step()
            self._kernels.in_step = False
            if not self.rests:
                self._from_last_step = {
                    managed.index: managed
                    for managed in self._kernels.numbered()
                    if managed.storage() is not None
                }
            self.rests = False
            self._recorder.end_step()
            launched, self._collectives.launched = self._collectives.launched, False
            return launched

    def renumber(self, numbers: Sequence[int]) -> None:
        """The next step touches what lasts in another order: first the tensor that was ``numbers[0]``."""
        with self._interrupts, self._lock:
            before, self._from_last_step = self._from_last_step, {}
            for new, old in enumerate(numbers):
                if (managed := before.get(old)) is not None:
                    managed.index = new
                    self._from_last_step[new] = managed

    def set_kind(self, tensors: list[torch.Tensor], kind: int) -> None:
        """The tensors are weights, gradients, or the optimizer's."""
        with self._interrupts, self._lock:
            for storage in storages_in(tensors):
                self.storages.remove_dead()
                managed = self.storages.track(storage)
                if kind == WEIGHT:
                    self._kernels.divide(self, managed)
                for part in managed.parts():
                    part.kind = kind
                    part.persistent = kind in (WEIGHT, GRADIENT, OPTIMIZER_STATE)

    @property
    def followed(self) -> Schedule | None:
        """The schedule that the step has followed to its end; None where it did something else."""
        schedule: Schedule | None = self._kernels.schedule
        if schedule is not None and (self.rests or self._kernels.kernels == schedule.kernels):
            return schedule
        return None

    # -- what the C++ part asks ----------------------------------------------------------------

    _describe = staticmethod(describe)
    _storages_in = staticmethod(storages_in)
    _extent = staticmethod(extent)
    _told = staticmethod(region_inputs)
    _state_before = staticmethod(Recomputation.state_before)

    @staticmethod
    def _makes_fakes() -> bool:
        """Whether FakeTensorMode is on. It comes below all modes of a program."""
        return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None

    def _wait_until_unused(self, resized: list[ManagedStorage], needed: bool) -> None:
        """A kernel frees the memory that they have, or has. ``needed``: it may read their bytes before."""
        with self._interrupts:
            for managed in resized:
                self._engine.wait_until_unused(managed, needed)

    def _invalidate_copies(self, written: list[ManagedStorage]) -> None:
        """A kernel has, of which that was not known before."""
        for managed in written:
            self._engine.will_write(managed)

    def _run_parts(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """An operator on lists of tensors, or on divided ones, in parts that fit. Ctrl-C comes before or
        after it; only one that meets a wait ends it half done."""

        def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return self._kernels.run(self, operator, args, kwargs)

        with self._interrupts:
            is_divided = self._is_divided if self.storages.has_divided else None
            return run_in_parts(operator, args, kwargs or {}, run, is_divided)

    def _is_divided(self, tensor: torch.Tensor) -> bool:
        managed = self.storages.find(tensor.untyped_storage())
        return managed is not None and managed.is_part

    def _divide(self, weight: ManagedStorage) -> None:
        """Divide a weight, where it fits whole: it may be away, or have a copy. The engine's lock is held."""
        with self._interrupts:
            if weight.pins or weight.recipes:
                return
            weight.pins += 1
            try:
                if weight.state > LEAVING:
                    self._engine.demand([weight])
                self._engine.will_write(weight)
            except BudgetTooSmall:
                return
            finally:
                weight.pins -= 1
            if weight.state == RESIDENT:
                if weight.slot is not None:
                    self._device.free_slot(weight, weight.slot)
                    weight.slot = None
                self.storages.divide(weight)

    def _bring(self, used: list[ManagedStorage]) -> None:
        with self._interrupts:
            self._engine.demand(used)

    def _record_stream(self, used: list[ManagedStorage], stream: Any) -> None:
        for managed in used:
            self._device.record_stream(managed, stream)

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
                self._device.will_use(used)  # others were in use meanwhile
            if away:
                engine.demand(used)
            for managed in written:
                if managed.clean or managed.guarded or managed.state or managed.writing_packed:
                    engine.will_write(managed)
            if need_bytes or away:
                ahead_bytes = 0 if self._kernels.schedule is not None else self._ahead_bytes
                # The arena refuses what does not fit when it is asked for.
                engine.make_room(need_bytes, ahead_bytes, expected=self._device.memory.in_arena)
                if pieces:
                    self._device.room.make_holes(pieces)
        self._kernels.excluded_s += self.recomputation.recompute_s - recompute_s
        self._kernels.excluded_s += sum(wait.finished_s - wait.started_s for wait in engine.waits[waits:])

    def _make_room_for_kernel(self, need_bytes: int, pieces: Sequence[int] | None) -> None:
        """A kernel is about to run that cannot run again: the device, which may refuse memory that the budget
        has, is asked before. Where the pieces are not known, it may be a large one and small ones."""
        sizes = tuple(pieces) if pieces is not None else (need_bytes,) * (need_bytes > LARGEST_SMALL_BYTES)
        small_bytes = need_bytes if pieces is None else need_bytes - sum(sizes)
        if small_bytes > 0:  # together they may be more than one block has
            sizes = (*sizes, min(small_bytes, LARGEST_SMALL_BYTES))
        room = self._device.room
        with self._interrupts:
            while not room.has(sizes):
                if not (self._engine.evict_and_wait(need_bytes) or room.make(need_bytes)):
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

    def _keep_recipe(
        self,
        operator: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        result: Any,
        before: Any,
        varies: bool,
    ) -> None:
        if not gives_the_same_bits(operator, args):
            return
        if varies and self.variants.ran != AS_TRACED:
            operator = functools.partial(run_as, self.variants.ran, operator)
        with self._interrupts:
            schedule: Schedule | None = self._kernels.schedule
            need_bytes = schedule.needs_bytes[self._kernels.kernels] if schedule is not None else 0
            self.recomputation.keep_recipe(
                operator, args, kwargs, result, before, need_bytes, self.storages.track
            )

    def _budget_hint(self) -> str:
        """A program that caught an error may have forgotten the run."""
        if self._kernels.in_step or self._all_is_back is not None:
            return ""
        return (
            " This run is still open, though none of its steps is: penstock.close() ends it, and its budget."
        )

    def _wait_for_a_collective(self) -> bool:
        with self._interrupts:
            return self._collectives.wait()

    def _frees_enough(self, error: BaseException, need_bytes: int) -> bool:
        """Whether the kernel, which wrote nothing, lacked memory that could be freed now."""
        with self._interrupts, self._lock:
            return self._device.room.frees_enough(error, need_bytes)

    def _kernel_over(self) -> None:
        with self._interrupts:
            self._device.end_kernel()
            self._engine.end_kernel()

    # -- the schedule --------------------------------------------------------------------------

    def _tensor(self, index: int) -> ManagedStorage | None:
        """The storage that is the trace's tensor ``index``: of this step, or kept from the last one."""
        managed = self._kernels.tensor(index)
        if managed is None:
            managed = self._from_last_step.get(index)
            if managed is not None and managed.step == self._kernels.step:
                return None
        return managed

    def _act(self, kernel: int) -> None:
        """Do what the schedule says is to be done before the kernel."""
        engine, schedule = self._engine, self._kernels.schedule
        with self._interrupts:
            self._device.limit_lead(schedule.begins_s[kernel])
            self._device.poll()
            for action in schedule.before[kernel]:
                if type(action) is KeepRecipeAction:
                    self._kernels.keeps_recipe = True
                    continue
                managed = self._tensor(action.tensor)
                if managed is None or not managed.movable:
                    continue
                if type(action) is EvictAction:
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
                elif type(action) is PrefetchAction:
                    engine.prefetch(managed, action.keeps_copy)
                elif type(action) is DropAction:
                    self.recomputation.drop(managed)
                elif type(action) is RecomputeAction:
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

    def _eviction_order(self) -> Sequence[ManagedStorage]:
        """What leaves first where no plan says so, or memory is short in spite of one: what is used furthest
        in the future, where that is known, else what was used least recently."""
        self.storages.remove_dead()  # a copy that is over may have been the last to hold one
        kernels, by_use = self._kernels, self.storages.by_use()
        if self._stays:
            by_use = [managed for managed in by_use if managed.kind not in self._stays]
        schedule: Schedule | None = kernels.schedule
        if schedule is None:
            return by_use

        def next_use(managed: ManagedStorage) -> int:
            is_numbered = managed.step == kernels.step or self._from_last_step.get(managed.index) is managed
            return schedule.next_use(managed.index, kernels.kernels) if is_numbered else NEVER

        return sorted(by_use, key=next_use, reverse=True)

    def _died(self, managed: ManagedStorage) -> None:
        """The storage has."""
        with self._interrupts:
            self._recorder.died(managed)
            if managed.recipes:
                self.recomputation.on_storage_freed(managed)
            self._device.on_storage_freed(managed)


skip_code(OffloadMode.__torch_dispatch__.__code__)
skip_code(OffloadMode._dispatch_lingering.__code__)
