"""Train inside a byte budget: steps, what a run says of itself, and its end."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo  # every optimizer imports it at its first use: 70 MB of code, better now than in a step
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from penstock.capture.compiler import regions_divided
from penstock.capture.phases import GRADIENT, OPTIMIZER_STATE, WEIGHT
from penstock.capture.recorder import make_trace, with_state_there
from penstock.capture.regions import compiled_regions_visible
from penstock.checkpoint.background import take_snapshots
from penstock.checkpoint.pieces import keep_within_budget
from penstock.core.hardware import Hardware
from penstock.core.memory_profile import minimum_bytes
from penstock.core.plan import Plan
from penstock.core.timeline import Timeline
from penstock.core.trace import Trace
from penstock.errors import BudgetTooSmall, InvalidArgument, PenstockError, SpillError
from penstock.options import Explorers, MicroBatch
from penstock.planners import refuse_below_minimum
from penstock.runtime import arena, failures, open_runs, ranks, resident
from penstock.runtime.copy_engine import CopyEngine
from penstock.runtime.devices import Device
from penstock.runtime.interrupts import Interrupts
from penstock.runtime.measured import MeasuredStep, MeasuredSteps, measured_timeline
from penstock.runtime.micro_batches import AUTO, PART, Blocks, Splitter, accumulate, choose_order, data_sheet
from penstock.runtime.offload_mode import OffloadMode
from penstock.runtime.recording import Recording
from penstock.runtime.report import Report
from penstock.runtime.safetensors import read_in_pieces
from penstock.runtime.step_planner import StepKind
from penstock.runtime.steps import StepKinds
from penstock.runtime.storages import AWAY, DROPPED, ManagedStorage
from penstock.storage.costs import Tables
from penstock.storage.files import Closing
from penstock.storage.rounds import ChoiceReport
from penstock.storage.spill import SpillSpace
from penstock.units import counted, format_bytes, parse_bytes, parse_endurance

logger = logging.getLogger("penstock")


class Offload(Closing):
    """PyTorch running inside a budget. Made by `offload`; a context manager.

    trace      the iteration as last recorded, None before the first step. After a first one that made the
               optimizer's state: as the next one will be
    plan       in force, None before the first step
    hardware   the machine the plan was made for
    timeline   measured in the last recorded step that followed a plan, None before
    """

    def __init__(
        self,
        device: Device,
        device_name: torch.device,
        spill: SpillSpace,
        kinds: StepKinds,
        splitter: Splitter,
        resident_before_bytes: int | None,
        processes: int,
    ) -> None:
        """
        resident_before_bytes   of the process, without the model; None: its peak cannot be known
        processes               of this job on this machine
        """
        self._device, self._device_name, self._spill = device, device_name, spill
        self._kinds, self._splitter = kinds, splitter
        self._resident_before_bytes, self._processes = resident_before_bytes, processes
        self._budget_bytes = budget_bytes = kinds.hardware.device_bytes
        self._engine = CopyEngine(device, budget_bytes)
        device.engine = self._engine
        self._interrupts = Interrupts()
        smallest_bytes = parse_bytes(kinds.planning.smallest_bytes)
        self._clock = OffloadMode(
            device,
            self._engine,
            smallest_bytes,
            self._interrupts,
            variants=kinds.planning.variants,
            keeps_weights=kinds.planning.keep_weights,
        )
        self.timeline: Timeline | None = None
        self._in_step = False
        self._closed = False
        self._at_close: list[Callable[[], None]] = []
        self._undo = contextlib.ExitStack()  # of what `_begin` has changed in this process
        self._steps = 0
        self._peak_bytes = 0
        self._measured: dict[str | None, MeasuredSteps] = {}  # the latest kind of step last
        self._swapped_before_bytes = (0, 0)
        self._time_step: Callable[[], None] | None = None
        self._warned = self._warned_of_prefetches = False

    def _begin(self) -> None:
        """From now on the run has every operator of this thread."""
        if self._device.memory.in_arena:
            read_in_pieces()
            self._undo.callback(keep_within_budget())
            snapshots = self._clock.recomputation.snapshots
            snapshots.folder = self._spill.folder or snapshots.folder
            self._undo.callback(take_snapshots(snapshots.take))
        self._undo.enter_context(compiled_regions_visible())
        self._undo.enter_context(regions_divided(self._engine.budget_bytes))
        self._undo.callback(register_optimizer_step_pre_hook(self._warn_outside_a_step).remove)
        self._clock.start()
        self._interrupts.install()
        open_runs.opened.append(self)

    # -- a step --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self, kind: str | None = None) -> Iterator[None]:
        """One iteration: forward, backward and the optimizer's step go inside.

        kind   a name for this kind of step, such as "evaluation", where there are several: each has a
               plan of its own. None: kinds are distinguished by their operators

        Raises BudgetTooSmall where a kernel's own tensors do not fit (at the end of the first step, where
        they are small ones that cannot leave and were needed at once), what the storage raises, and
        RankFailed where a collective fails since another rank has. After an error the next step can be tried.
        """
        if self._closed:
            raise InvalidArgument("this run is closed: call penstock.offload again to train on")
        if self._in_step:
            raise InvalidArgument("a step is already open: close it before the next begins")
        with failures.shared(), self._device.profiler_range(f"penstock step {kind or ''}".rstrip()):
            try:
                yield from self._step(kind)
            finally:
                self._kinds.end_step()

    def _step(self, kind: str | None) -> Iterator[None]:
        self._kinds.begin_step()
        recording = self._kinds.recording(kind)
        begun_s = time.perf_counter()
        self._in_step = True
        inspection = self._splitter.begin_step()
        try:
            with self._interrupts:
                self._swapped_before_bytes = self._swapped_bytes()
                self._engine.begin_step()
                self._device.begin_step()
                self._clock.begin_step(self._kinds.schedules(kind), recording)
            yield
            wait_for_end = self._device.meter.end_step()
            if recording is not None:
                self._device.synchronize()  # the times of its kernels are read
        except BudgetTooSmall as error:
            raise error from None  # it says all that the allocator's own error does
        except (RuntimeError, MemoryError) as error:
            if self._clock.rests and "allocate memory" in str(error):  # what fits in every step did not
                self._device.room.kernel_failed(error, 0)
            raise
        finally:
            inspection.close()
            with self._interrupts:
                step_s = time.perf_counter() - begun_s
                followed = self._clock.followed
                self._kinds.step_ran(self._clock.end_step())
                self._in_step = False
            self._warn_of_failed_prefetches()
        self._time_last_step()
        self._steps += 1
        self._peak_bytes = max(self._peak_bytes, self._device.meter.peak_bytes())
        steps = self._measured[kind] = self._measured.pop(kind, MeasuredSteps())
        steps.last, steps.last_step_s = self._measure(), step_s
        planned = self._kinds.followed(kind, followed, self._clock.native.touched_bytes())
        if recording is not None:
            self._finish_recording(kind, planned, recording, begun_s, step_s)
            return
        steps.clock_s.append(steps.last.clock_s)
        self._time_step = functools.partial(
            self._add_time, steps, steps.last, planned, wait_for_end or (lambda: step_s)
        )
        if wait_for_end is None:
            self._time_last_step()

    def _measure(self) -> MeasuredStep:
        clock, again, before = self._clock, self._clock.recomputation, self._swapped_before_bytes
        swapped = (after - begun for after, begun in zip(self._swapped_bytes(), before, strict=True))
        return MeasuredStep(
            self._engine.moved,
            self._engine.stall_s,
            clock.native.clock_s,
            clock.native.operators,
            again.recomputed_bytes,
            again.recompute_s,
            again.kept,
            *swapped,
        )

    def _finish_recording(
        self, kind: str | None, planned: StepKind | None, recording: Recording, begun_s: float, step_s: float
    ) -> None:
        """Plan for the step that was recorded."""
        if not recording.kernels:
            return
        notes = {"device": str(self._device_name), "torch": str(torch.__version__), **self._splitter.notes}
        recording.take_times()
        foreseen = with_state_there(recording.kernels, recording.tensors, self._device_name.type)
        if foreseen is not None and not self._kinds.schedules(kind):
            recording.kernels, recording.tensors, numbers = foreseen
            self._clock.renumber(numbers)
        trace = make_trace(recording.kernels, recording.tensors, measured=True, notes=notes)
        if self._kinds.planning.keep_weights:
            trace = trace.with_weights_kept()
        if planned is not None and not planned.has_grown(int(trace.tensor_bytes.sum())):
            engine = self._engine
            self.timeline = measured_timeline(trace, recording, engine.moved, engine.waits, begun_s, step_s)
        if self._kinds.record(kind, planned, recording, trace, self._engine.moved, step_s):
            self._spill.save_tables()  # others can use what the first steps taught
        budget_bytes = self._engine.budget_bytes
        # What cannot leave, and kernels ask for at once, or what is to stay. To the trace, what could not
        # leave at the end never could: where tensors were shared in the step, its minimum may be too high.
        too_high = self._engine.any_got_other_memory or minimum_bytes(trace) > self._device.meter.peak_bytes()
        if self._kinds.planning.keep_weights or not too_high:
            refuse_below_minimum(trace, budget_bytes, self._device.least_budget(trace))

    def _time_last_step(self) -> None:
        """Take the time of the step before, which the device may have been at still when the host left it.
        The host is a step ahead at most."""
        time_step, self._time_step = self._time_step, None
        if time_step is not None:
            time_step()

    def _add_time(
        self, steps: MeasuredSteps, step: MeasuredStep, planned: StepKind | None, took_s: Callable[[], float]
    ) -> None:
        steps.last_step_s = took_s()
        if planned is not None:
            steps.planned_s.append(steps.last_step_s)
            steps.stalls_s.append(step.stall_s)
            self._kinds.replanning.add_step(planned, step, steps.last_step_s)

    def micro_batches(self, batch: Any, loss: Callable[[Any], torch.Tensor] | None = None) -> Iterator[Any]:
        """The parts of a batch, to accumulate gradients over. Inside a step::

            for part in run.micro_batches(batch, loss):
                (loss(part) * part.weight).backward()
            optimizer.step()

        A part is of the batch's own type, and ``part.weight`` its share of the samples: gradients add up to
        those of the mean over the batch. Where `offload` was given no micro_batch, there is one part. What
        makes the results differ by more than the last bits, such as batch normalization, is logged once.

        batch   a tensor, or a tuple, list, mapping or dataclass of tensors, nested if need be, whose first
                dimension counts the samples
        loss    needed for micro_batch="auto": it is traced, without running it, for parts of several sizes

        Raises InvalidArgument where the batch cannot be divided so, and BudgetTooSmall where not even one
        sample fits.
        """

        if self._splitter.order != PART:
            raise InvalidArgument(
                f"a loop runs one part after the other, and micro_batch_order is {self._splitter.order!r}: "
                "call run.accumulate(batch, loss, blocks=model) in its place"
            )
        return self._parts(batch, loss)

    def accumulate(
        self, batch: Any, loss: Callable[[Any], torch.Tensor], blocks: Blocks | None = None
    ) -> torch.Tensor:
        """Forward and backward of the parts of a batch, in the place of the loop over `micro_batches`. Inside
        a step::

            batch_loss = run.accumulate(batch, loss, blocks=model)
            optimizer.step()

        Returns the mean of the losses, without its graph. In the order of layers, ``loss(part)`` and its
        backward run on threads, one at a time, which hand over to each other before each block and after the
        last one. The bits are those of one part after the other, unless random numbers are drawn, which is
        logged once. The loss must not keep what it needs later in a module's attributes, where the next part
        overwrites it, nor change what belongs to the process, such as a choice of kernels, across blocks.

        batch    as in `micro_batches`
        loss     of a part: a scalar
        blocks   for the order of layers: the model, whose lists of modules of one type are taken, or the
                 modules at which to hand over

        Raises InvalidArgument where the batch cannot be divided so, there are no blocks, or the parts do not
        pass the same ones; BudgetTooSmall where not even one sample fits; and what the loss raises.
        """
        parts = list(self._parts(batch, loss))
        if self._splitter.order == AUTO and len(parts) > 1:
            self._splitter.order = choose_order(
                lambda order: accumulate(parts, loss, order, blocks), **self._machine()
            )
        with self._splitter.finding_random():
            return accumulate(parts, loss, self._splitter.order, blocks, self._interrupts)

    def _parts(self, batch: Any, loss: Callable[[Any], torch.Tensor] | None) -> Iterator[Any]:
        # Ranks average what as many parts give: each would choose again by its own times.
        step = self.trace if ranks.shared_store() is None else None
        return self._splitter.parts(batch, loss, self._machine, step)

    def _machine(self) -> dict[str, Any]:
        """What the sizes and the order of parts are chosen for."""
        return {
            "hardware": self.hardware,
            "budget_bytes": self._engine.budget_bytes,
            "planning": self._kinds.planning,
            "device": data_sheet(self._device_name),
        }

    def _warn_of_failed_prefetches(self) -> None:
        """Once a run, and with no lock held: a handler of the program's may wait, or touch a tensor."""
        if self._engine.failed_prefetches and not self._warned_of_prefetches:
            self._warned_of_prefetches = True
            logger.warning(
                "a prefetch failed, and is tried again when it is needed: %s",
                self._engine.prefetch_error,
            )

    def _swapped_bytes(self) -> tuple[int, int]:
        """What the arena has moved by itself so far: out of memory, and back. None of it was planned."""
        if self._device_name.type != "cpu":
            return 0, 0
        stats = arena.stats()
        return stats.swapped_out_bytes, stats.swapped_in_bytes

    def _warn_outside_a_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not self._in_step and not self._warned:
            self._warned = True
            logger.warning(
                "%s.step() ran outside `with run.step():`. What runs there is not planned, and slow where "
                "memory is short: put each iteration inside",
                type(optimizer).__name__,
            )

    # -- what it says --------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def in_step(self) -> bool:
        """Whether a step is open."""
        return self._in_step

    @property
    def trace(self) -> Trace | None:
        return self._kinds.trace

    @property
    def plan(self) -> Plan | None:
        return self._kinds.plan

    @property
    def micro_batch(self) -> MicroBatch | None:
        """Samples in each part of a batch; "auto" until that is chosen; None where batches stay whole."""
        return self._splitter.size or self._splitter.wanted

    @property
    def hardware(self) -> Hardware:
        return self._kinds.hardware

    @property
    def io_paths(self) -> tuple[str, ...]:
        """The I/O paths of this machine between memory and disk."""
        return (*self._spill.paths, *filter(None, [self._spill.gpu_direct]))

    def io_costs(self) -> Tables:
        """What each I/O path costs, by size of tensor, as far as it is known."""
        return self._spill.tables()

    def share_io_costs(self, explorers: Explorers = "divided") -> None:
        """Share what is learned about I/O paths with the other ranks from now on, as `offload` does by itself
        where the process group was made before. Each rank calls it when it likes; nobody waits.

        Raises InvalidArgument where there is no process group.
        """
        if self._closed or not ranks.share_io_costs(self._spill, explorers):
            raise InvalidArgument(
                "there is nobody to share with: call it while the run is open, after "
                "torch.distributed.init_process_group with several ranks"
            )

    def io_report(self) -> ChoiceReport:
        """How often each I/O path was the fastest, by size of tensor (Fastensor's tables 13 and 14)."""
        return self._spill.report()

    def report(self, kind: str | None = None) -> Report:
        """Predicted against measured, so far.

        kind   of which steps, by the name that `step` was given; None: of those without a name, or where all
               have one, of the kind of the latest step. Peaks and counts are of all steps

        Raises PenstockError before the first step of this kind has ended.
        """
        self._time_last_step()
        if kind is None and self._measured and None not in self._measured:
            kind = next(reversed(self._measured))
        measured, followed = self._measured.get(kind), self._kinds.latest(kind)
        if measured is None or followed is None:
            named = "" if kind is None else f" of the kind {kind!r}"
            raise PenstockError(f"nothing to report yet: run at least one step{named} to its end")
        predicted = self._kinds.figures(followed)
        planner, splitter, spill = self._kinds.planner, self._splitter, self._spill
        endurance = spill.options.endurance
        peak_resident_bytes = 0
        if self._resident_before_bytes is not None:
            peak_resident_bytes = max(0, resident.peak_resident_bytes() - self._resident_before_bytes)
        return Report(
            device=str(self._device_name),
            processes=self._processes,
            reason=predicted.pop("reason", "") or planner.refusal or "no plan could be made",
            memory_manager=self._device.memory_manager,
            direct_io=spill.direct,
            device_budget_bytes=self._budget_bytes,
            minimum_bytes=max(planner.minimum_bytes, self._clock.native.least_bytes),
            peak_bytes=self._peak_bytes,
            peak_resident_bytes=peak_resident_bytes,
            endurance_bytes=None if endurance is None else parse_endurance(endurance),
            unplanned_accesses=self._device.meter.unplanned_accesses,
            failed_prefetches=self._engine.failed_prefetches,
            disk_bytes=spill.file_bytes,
            host_bytes=spill.host_bytes,
            fixed_bytes=self._device.memory.unmanaged_bytes,
            moved_bytes_by_io_path={path: size for path, size in spill.moved_bytes_by_path.items() if size},
            unavailable_transports=spill.unavailable,
            steps=self._steps,
            profiled_steps=self._kinds.recorded,
            variants=dict(self._clock.variants.counts),
            micro_batch=splitter.size,
            micro_batches=splitter.count,
            micro_batch_order=splitter.order,
            trace_mismatches=self._kinds.mismatches,
            replans=self._kinds.replans,
            **predicted,
            **measured.figures(self._device),
        )

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Give memory and disk space back. Tensors stay as they are: what is away then comes back at once
        where the budget has room, or on an accelerator its memory, else when it is touched. Idempotent."""
        if self._closed:
            return
        while self._at_close:
            self._at_close.pop()()
        if self._in_step:
            raise InvalidArgument("a step is open: leave it before you close the run")
        self._clock.recomputation.snapshots.finish()
        try:
            with self._interrupts:
                self._closed = True
                if self._device.memory.in_arena:
                    self._clock.stop()
                self._undo.close()
                open_runs.opened.remove(self)
                open_runs.lingering.append(self)
                try:
                    self._give_back()
                finally:
                    if self._sees_operators:  # nobody else could bring back what is away
                        self._clock.linger(self._all_is_back)
        finally:
            if not self._sees_operators:
                self._interrupts.remove()
            self._kinds.close()

    @property
    def _sees_operators(self) -> bool:
        """Of a closed run: what is away comes back by operators, and by the methods that are in the places of
        torch's."""
        return not self._device.memory.in_arena and self in open_runs.lingering

    def at_close(self, call: Callable[[], None]) -> None:
        """Call this when the run is about to close; of several, the latest first."""
        self._at_close.append(call)

    def _recompute_all(self) -> bool:
        """Make what was dropped again. False: some of it cannot be made now."""
        try:
            self._clock.recomputation.recompute_all()
        except Exception as error:
            logger.warning("tensors cannot be recomputed now, and are when they are touched: %s", error)
            return False
        return True

    def _give_back(self) -> None:
        """Bring back what is away, and give everything back. Where that does not fit, or fails, the run
        lingers: its disk space lasts as long as its tensors."""
        with _disable_current_modes():
            _drop_failed_backward()
        self._bring_back()

    def _all_is_back(self) -> None:
        try:
            with self._interrupts:
                self._bring_back()
        except PenstockError as error:
            logger.warning("%r cannot give back all it has: %s", self, error)

    def _bring_back(self) -> None:
        recomputed = self._recompute_all()
        try:
            self._engine.drain()
        except SpillError:
            if self._device.memory.in_arena:  # nobody is kept within a budget that ended
                self._device.close()
            raise
        on_accelerator = not self._device.memory.in_arena  # there nothing moves meanwhile
        with _disable_current_modes(), self._engine.lock if on_accelerator else contextlib.nullcontext():
            is_back = self._device.bring_all_back(self._storages())
        if is_back and recomputed:
            self._clock.stop()
            self._clock.recomputation.close()
            self._device.close()
            open_runs.lingering.remove(self)
            self._spill.close()
            self._interrupts.remove()

    def _storages(self) -> list[ManagedStorage]:
        """All, weights first, then gradients and the optimizer's state."""
        with self._engine.lock:
            self._clock.storages.remove_dead()
            return sorted(self._clock.storages.all(), key=_importance)

    def take_over(self, other: Offload) -> None:
        """Have the tensors of a closed run on the same accelerator, where some of them did not fit. What has
        room in neither budget raises, and stays with the other run."""
        taken: list[tuple[ManagedStorage, ManagedStorage]] = []
        with _disable_current_modes(), other._engine.lock, self._engine.lock:
            storages = sorted(other._storages(), key=lambda managed: managed.state == AWAY)
            if any(managed.state == DROPPED for managed in storages):
                raise InvalidArgument(f"{other!r} has tensors that cannot be recomputed now: delete them")
            try:
                for managed in storages:
                    storage = managed.storage()
                    if storage is None or not managed.movable:
                        continue
                    was_away = managed.state == AWAY
                    _bring(managed, other, makes_room=self)
                    managed.pins += 1  # it is the other's no more
                    own = self._clock.storages.track(storage, made=was_away)
                    own.kind, own.persistent = managed.kind, managed.persistent
                    if was_away:
                        own.owner_stream = managed.owner_stream
                    taken.append((managed, own))
            except BaseException:
                self._engine.drain()
                for managed, own in sorted(taken, key=lambda pair: pair[1].state == AWAY):
                    _bring(own, self, makes_room=other)  # for it those leave that are there
                    managed.pins -= 1
                raise
            other._clock.stop()
        other._bring_back()

    def __repr__(self) -> str:
        state = "closed" if self._closed else counted(self._steps, "step")
        budget = format_bytes(self._budget_bytes)
        return f"<penstock.Offload on {self._device_name}, budget {budget}, {state}>"


def _importance(managed: ManagedStorage) -> int:
    kinds = (WEIGHT, GRADIENT, OPTIMIZER_STATE)
    return kinds.index(managed.kind) if managed.kind in kinds else len(kinds)


def _bring(managed: ManagedStorage, owner: Offload, makes_room: Offload) -> None:
    """Bring back what is away, below the budget of another run. The locks of both are held."""
    while managed.state == AWAY and not owner._device.bring_back(managed):
        makes_room._engine.make_some_room(managed.size_bytes)


def _drop_failed_backward() -> None:
    """Autograd keeps what was ready to run as a backward of this thread failed, and all that it saved, until
    the next one."""
    with torch.inference_mode(False), torch.enable_grad():
        torch.zeros((), device="cpu", requires_grad=True).backward()  # type: ignore[no-untyped-call]
