"""Train inside a byte budget: the user's entry."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch._dynamo  # every optimizer imports it at its first use: 70 MB of code, better now than in a step
from torch.optim.optimizer import register_optimizer_step_pre_hook

from penstock.capture.operators import tensors_in
from penstock.capture.phases import OPTIMIZER_STATE, WEIGHT
from penstock.capture.probe import device_name, probe
from penstock.capture.recorder import make_trace
from penstock.capture.roofline import measure_cpu
from penstock.checkpoint.file.transfers import use_few_buffers
from penstock.core.arguments import described, require_kinds
from penstock.core.hardware import LINKS, Hardware
from penstock.core.plan import Plan
from penstock.core.timeline import Timeline
from penstock.core.trace import Trace
from penstock.errors import (
    BudgetTooSmall,
    InvalidArgument,
    PenstockError,
    SpillError,
)
from penstock.machine import available_bytes
from penstock.options import BatchOptions, Directories, Explorers, IoOptions, MicroBatch, PlanOptions
from penstock.planners import refuse_below_minimum, require_policy
from penstock.runtime import arena, failures, joint_planning, ranks, resident, timeline
from penstock.runtime.clock import Clock
from penstock.runtime.copy_engine import CopyEngine, Moved
from penstock.runtime.devices import Device
from penstock.runtime.devices.accelerator import AcceleratorDevice
from penstock.runtime.devices.cpu import CpuDevice
from penstock.runtime.devices.drivers import device_of, driver_of
from penstock.runtime.interrupts import Interrupts
from penstock.runtime.micro_batches import (
    AUTO,
    PART,
    Blocks,
    Splitter,
    accumulate,
    choose,
    choose_order,
    data_sheet,
)
from penstock.runtime.recording import Recording
from penstock.runtime.report import NO_POLICY, Report
from penstock.runtime.requirements import require_torch
from penstock.runtime.safetensors import read_in_pieces
from penstock.runtime.schedule import Schedule
from penstock.runtime.step_kinds import StepKind, StepKinds
from penstock.simulator import simulate
from penstock.storage.autotune.rounds import ChoiceReport
from penstock.storage.autotune.tables import Tables
from penstock.storage.nvme import Url
from penstock.storage.spill import SpillSpace, as_paths
from penstock.units import counted, format_bytes, parse_bytes, parse_endurance

PROBE_S = 2.0

# The report's medians are over so many steps, the latest ones.
LAST_STEPS = 1000

logger = logging.getLogger("penstock")

_open: list[Offload] = []  # one at most: every operator of the thread belongs to it
_lingering: list[Offload] = []  # closed, with tensors that are away, or may be


def _leave_to_parent() -> None:
    """In a process made by fork: copies are the parent's. What is away is read here when it is touched."""
    for run in (*_open, *_lingering):
        run._closed = True
        run._clock.stop()
    _open.clear()


def _recompute_for_child() -> None:
    """A child runs no kernels of its parent's again."""
    for run in (*_open, *_lingering):
        run._recompute_all()


os.register_at_fork(before=_recompute_for_child, after_in_child=_leave_to_parent)


def open_run(**given: Any) -> Offload:
    """What `penstock.offload` returns, of what it was given."""
    with failures.told():
        try:
            return Offload(**given)
        except SpillError as error:
            raise error from None  # it names the system's own error


def close() -> None:
    """Close the run that is open, where there is one.

    For the first line of a notebook's cell that opens a run and may be executed again, and for a run whose
    name is lost. Raises what `Offload.close` raises.
    """
    for run in tuple(_open):
        run.close()


def _show_compiled_regions() -> Callable[[], None]:
    """What torch.compile makes from now on, the clock sees: each region is one kernel. Gives what undoes it.

    What was compiled before runs unseen, and its accesses are served one by one.
    """
    import torch._inductor.config as config

    before = config.wrap_inductor_compiled_regions
    config.wrap_inductor_compiled_regions = True

    def undo() -> None:
        config.wrap_inductor_compiled_regions = before

    return undo


@dataclass
class _Measured:
    """What the steps of one kind took: the latest ones, and the last of them.

    recomputed      bytes, seconds, and how many tensors moved instead
    swapped_bytes   by the arena itself: out of memory, and back
    """

    step_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=LAST_STEPS))
    stalls_s: deque[float] = field(default_factory=lambda: deque(maxlen=LAST_STEPS))
    clock_s: deque[float] = field(default_factory=lambda: deque(maxlen=LAST_STEPS))
    last_step_s: float = 0.0
    moved: list[Moved] = field(default_factory=list)
    recomputed: tuple[int, float, int] = (0, 0.0, 0)
    swapped_bytes: tuple[int, int] = (0, 0)
    operators: int = 0


class Offload:
    """PyTorch running inside a budget. Made by `offload`; a context manager.

    trace      the iteration as last recorded, None before the first step
    plan       in force, None before the first step
    hardware   the machine the plan was made for
    timeline   measured in the last recorded step that followed a plan, None before
    """

    def __init__(
        self,
        model: torch.nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
        *,
        device_budget: int,
        spill_dir: Directories | None,
        host_budget: int | None,
        disk_budget: int | None,
        device: str | torch.device | None,
        plan: Plan | None,
        hardware: Hardware | None,
        io: IoOptions,
        planning: PlanOptions,
        batches: BatchOptions,
    ) -> None:
        _require_kinds(model, optimizer, plan, hardware)
        require_policy(planning.policy)
        if plan is not None and plan.lossy not in (None, planning.lossy):
            raise InvalidArgument(
                f"this plan rounds what is saved for backward to {plan.lossy}: say "
                f"PlanOptions(lossy={plan.lossy!r}) if that is what you want"
            )
        self._splitter = Splitter(batches, plan)
        self._io, self._planning = io, planning
        spill_dirs = as_paths(resident.default_spill_dir() if spill_dir is None else spill_dir)
        require_torch()
        if _open:
            raise InvalidArgument(
                f"another run is open, {_open[0]!r}: it has all tensors of the program, those of several "
                "models too. Close it before you begin another one: penstock.close()"
            )
        if device_budget <= 0:
            raise InvalidArgument(f"a device_budget of {device_budget} bytes is not one: give more than 0")
        for run in tuple(_lingering):
            try:
                run._settle()
            except PenstockError as error:
                logger.warning("%r cannot give back all it has: %s", run, error)
        self._processes = ranks.on_this_machine()
        remote = next((place for place in spill_dirs if isinstance(place, Url)), None)
        if remote is not None and self._processes > 1:
            raise InvalidArgument(
                f"{remote} cannot be shared by the {self._processes} processes that torchrun has started on "
                "this machine: each would overwrite what the others spill. Give a directory as spill_dir"
            )
        if disk_budget is not None:
            disk_budget //= self._processes
        self._budget_bytes = device_budget
        self._device_name = _device_of(model, device)
        on_cpu = self._device_name.type == "cpu"
        failures.listen(to_signals=on_cpu)  # on a GPU, a collective that hangs could hold them up
        if on_cpu and AUTO in (self._splitter.wanted, self._splitter.order):
            measure_cpu()  # now, while there is no budget to keep
        resident.release_free_memory()
        held_bytes = _bytes_of(model, optimizer) if on_cpu else 0
        self._resident_before_bytes = resident.resident_bytes() - held_bytes
        if on_cpu:
            _warn_if_memory_ends_before(device_budget, held_bytes)
        # Before the run has the spill space: a namespace is one run's alone.
        machine = hardware or _probe_together(spill_dirs, self._device_name, self._processes)
        self._spill = SpillSpace(
            spill_dirs,
            io,
            capacity_bytes=disk_budget,
            accelerator=device_name(str(self._device_name)),
            gpu=not on_cpu,
        )
        self._device: Device
        try:
            host_bytes = machine.host_bytes // 8 if host_budget is None else host_budget
            self._device, host_tier_bytes = _make_device(
                self._device_name,
                self._spill,
                device_budget,
                0 if on_cpu else host_bytes // self._processes,
            )
        except BaseException:
            self._spill.close()
            raise
        try:
            ranks.share_io_costs(self._spill, io.explorers)
            hardware = replace(
                machine,
                device_bytes=device_budget,
                host_bytes=host_tier_bytes,
                disk_bytes=machine.disk_bytes // self._processes if disk_budget is None else disk_budget,
            )
            self._peak_resident_known = resident.reset_peak()
            self._engine = CopyEngine(
                self._device, device_budget, in_flight_bytes=self._device.in_flight_bytes
            )
            self._engine.tier = self._device.tier
            self._device.engine = self._engine
            self._interrupts = Interrupts()
            smallest_bytes = parse_bytes(planning.smallest_bytes)
            self._clock = Clock(
                self._device, self._engine, smallest_bytes, self._interrupts, planning.variants
            )
            self._kinds = StepKinds(
                planning, hardware, joint_planning.with_ranks(f"{device_budget} {planning}")
            )
            self.timeline: Timeline | None = None
            self._in_step = False
            self._closed = False
            self._at_close: list[Callable[[], None]] = []
            self._steps = 0
            self._peak_bytes = 0
            self._measured: dict[str | None, _Measured] = {}  # the latest kind of step last
            self._swapped_before_bytes = (0, 0)
            self._time_step: Callable[[], None] | None = None
            if plan is not None:
                self._kinds.take(plan)
            for tensor, kind in _known_tensors(model, optimizer):
                self._clock.know(tensor, kind)
            resident.release_free_memory()  # what they took before
        except BaseException:
            self._device.close()
            self._spill.close()
            raise
        self._as_many_buffers: Callable[[], None] = lambda: None
        if on_cpu:
            read_in_pieces()
            self._as_many_buffers = use_few_buffers()
        self._compiled_as_before = _show_compiled_regions()
        self._warned = self._told_prefetches = False
        self._optimizer_hook = register_optimizer_step_pre_hook(self._warn_outside_a_step)
        self._clock.start()
        self._interrupts.install()
        _open.append(self)

    # -- a step --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self, kind: str | None = None) -> Iterator[None]:
        """One iteration: forward, backward and the optimizer's step go inside.

        kind   a name for this kind of step, such as "evaluation", where there are several: each has a
               plan of its own. None: it is told by the operators that run

        Raises BudgetTooSmall where a kernel's own tensors do not fit (at the end of the first step, where
        they are small ones that cannot leave and were needed at once), what the storage raises, and
        RankFailed where a collective fails since another rank has. After an error the next step can be tried.
        """
        if self._closed:
            raise InvalidArgument("this run is closed: call penstock.offload again to train on")
        if self._in_step:
            raise InvalidArgument("a step is already open: close it before the next begins")
        with failures.told(), self._device.marked(f"penstock step {kind or ''}".rstrip()):
            yield from self._step(kind)

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
            took_s = self._device.end_step()
            if recording is not None:
                self._device.synchronize()  # the times of its kernels are read
        except BudgetTooSmall as error:
            raise error from None  # it says all that the allocator's own error does
        finally:
            inspection.close()
            with self._interrupts:
                step_s = time.perf_counter() - begun_s
                followed = self._clock.followed
                self._clock.end_step()
                self._in_step = False
            self._tell_failed_prefetches()
        self._finish_step(kind, followed, recording, begun_s, step_s, took_s)

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

        Gives the mean of the losses, without its graph. In the order of layers, ``loss(part)`` and its
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
                lambda order: accumulate(parts, loss, order, blocks),
                self.hardware,
                self._budget_bytes,
                self._planning.policy,
                device=data_sheet(self._device_name),
            )
        with self._splitter.note_random():
            return accumulate(parts, loss, self._splitter.order, blocks, self._interrupts)

    def _parts(self, batch: Any, loss: Callable[[Any], torch.Tensor] | None) -> Iterator[Any]:
        def chosen_size(batch: Any, samples: int) -> int:
            if loss is None:
                raise InvalidArgument(
                    'micro_batch="auto" traces the loss of several sizes before it decides: give it, as in '
                    "run.micro_batches(batch, loss), or give micro_batch as a number"
                )
            chosen = choose(
                loss,
                batch,
                self.hardware,
                self._budget_bytes,
                self._planning.policy,
                device=data_sheet(self._device_name),
            )
            logger.info(
                "batches of %d samples are divided into micro-batches of %d; moDNN's equation 8 says %d",
                samples,
                chosen.size,
                chosen.working_set_size,
            )
            return chosen.size

        return self._splitter.parts(batch, chosen_size)

    def _finish_step(
        self,
        kind: str | None,
        followed: Schedule | None,
        recording: Recording | None,
        begun_s: float,
        step_s: float,
        took_s: Callable[[], float] | None,
    ) -> None:
        self._time_last_step()
        clock, engine = self._clock, self._engine
        measured = self._measured[kind] = self._measured.pop(kind, _Measured())
        self._steps += 1
        measured.last_step_s = step_s
        self._peak_bytes = max(self._peak_bytes, self._device.peak_bytes())
        measured.moved = engine.moved
        again = clock.recomputation
        measured.recomputed = again.recomputed_bytes, again.recompute_s, again.kept
        out_bytes, in_bytes = self._swapped_before_bytes
        now_out_bytes, now_in_bytes = self._swapped_bytes()
        measured.swapped_bytes = (now_out_bytes - out_bytes, now_in_bytes - in_bytes)
        measured.operators = clock.operators
        entry = self._kinds.followed(kind, followed, clock.touched_bytes)
        if recording is None:
            facts = kind, measured, entry, engine.moved, engine.stall_s, clock.clock_s, clock.operators
            self._time_step = functools.partial(self._note_time, took_s or (lambda: step_s), *facts)
            if took_s is None:
                self._time_last_step()
        if entry is not None:
            measured.stalls_s.append(engine.stall_s)
        if recording is None:
            measured.clock_s.append(clock.clock_s)
            return
        if not recording.kernels:
            return
        notes = {"device": str(self._device_name), "torch": str(torch.__version__), **self._splitter.notes}
        recording.take_times()
        trace = make_trace(recording.kernels, recording.tensors, measured=True, notes=notes)
        if entry is not None and not entry.has_grown(int(trace.tensor_bytes.sum())):
            self.timeline = timeline.timeline(trace, recording, engine.moved, engine.waits, begun_s, step_s)
        if self._kinds.record(kind, entry, recording, trace):
            self._spill.save_tables()  # others can use what the first steps taught
        if (
            self._device.peak_bytes() > self._budget_bytes
        ):  # by what cannot leave, and kernels ask for at once
            refuse_below_minimum(trace, self._budget_bytes)

    def _time_last_step(self) -> None:
        """Note what the step before took, which the device may have been at still when the host left it. The
        host is a step ahead at most."""
        time_step, self._time_step = self._time_step, None
        if time_step is not None:
            time_step()

    def _note_time(
        self,
        took_s: Callable[[], float],
        kind: str | None,
        measured: _Measured,
        entry: StepKind | None,
        moved: Sequence[Moved],
        stall_s: float,
        clock_s: float,
        operators: int,
    ) -> None:
        step_s = measured.last_step_s = took_s()
        if entry is not None:
            measured.step_times_s.append(step_s)
            self._kinds.note(kind, entry, moved, step_s, step_s - stall_s, clock_s, operators)

    def _tell_failed_prefetches(self) -> None:
        """Once a run, and with no lock held: a handler of the program's may wait, or touch a tensor."""
        if self._engine.failed_prefetches and not self._told_prefetches:
            self._told_prefetches = True
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
        if kind is None:
            self._kinds.plan_what_waits()
        measured, followed = self._measured.get(kind), self._kinds.latest(kind)
        if measured is None or followed is None:
            named = "" if kind is None else f" of the kind {kind!r}"
            raise PenstockError(f"nothing to report yet: run at least one step{named} to its end")
        trace, plan, hardware = followed.trace, followed.plan, followed.hardware
        predicted = simulate(trace, plan, hardware) if plan is not None else None
        times_s = list(measured.step_times_s) or [measured.last_step_s]
        moved, device = measured.moved, self._device
        swapped_out_bytes, swapped_in_bytes = measured.swapped_bytes
        peak_resident_bytes = 0
        if self._peak_resident_known:
            peak_resident_bytes = max(0, resident.peak_resident_bytes() - self._resident_before_bytes)
        return Report(
            device=str(self._device_name),
            processes=self._processes,
            policy=plan.policy if plan is not None else NO_POLICY,
            reason=plan.reason if plan is not None else self._kinds.refusal or "no plan could be made",
            lossy=plan.lossy_text if plan is not None else "",
            memory_manager=device.memory_manager,
            direct_io=self._spill.direct,
            device_budget_bytes=self._budget_bytes,
            minimum_bytes=self._kinds.minimum_bytes,
            peak_bytes=self._peak_bytes,
            predicted_peak_bytes=predicted.peak_bytes if predicted is not None else 0,
            peak_resident_bytes=peak_resident_bytes,
            step_s=statistics.median(times_s),
            predicted_step_s=predicted.iteration_s if predicted is not None else 0.0,
            stall_s=statistics.median(measured.stalls_s) if measured.stalls_s else 0.0,
            predicted_stall_s=predicted.stall_s if predicted is not None else 0.0,
            ideal_s=trace.ideal_s,
            evicted_bytes=timeline.moved_bytes(moved, device.evict_link) + swapped_out_bytes,
            predicted_evicted_bytes=predicted.evicted_bytes if predicted is not None else 0,
            loaded_bytes=timeline.moved_bytes(moved, device.prefetch_link) + swapped_in_bytes,
            recomputed_bytes=measured.recomputed[0],
            recompute_s=measured.recomputed[1],
            unrecomputed=measured.recomputed[2],
            disk_written_bytes=timeline.moved_bytes(moved, "disk_write") + swapped_out_bytes,
            endurance_bytes=None if self._io.endurance is None else parse_endurance(self._io.endurance),
            moved_bytes_by_kind=timeline.moved_bytes_by_kind(moved, device.evict_link),
            unplanned_accesses=device.unplanned_accesses,
            failed_prefetches=self._engine.failed_prefetches,
            clock_s=statistics.median(measured.clock_s) if measured.clock_s else self._clock.clock_s,
            operators=measured.operators,
            disk_bytes=self._spill.file_bytes,
            moved_bytes_by_io_path={
                path: size for path, size in self._spill.moved_bytes_by_path.items() if size
            },
            unavailable_transports=self._spill.unavailable,
            steps=self._steps,
            profiled_steps=self._kinds.recorded,
            variants=dict(self._clock.variants.counts),
            micro_batch=self._splitter.size,
            micro_batches=self._splitter.count,
            micro_batch_order=self._splitter.order,
            trace_mismatches=self._kinds.mismatches,
            rates_bytes_per_s=timeline.rates(moved),
            planned_rates_bytes_per_s={
                link: hardware.rate_bytes_per_s(link) for link in LINKS if hardware.rate_bytes_per_s(link) > 0
            },
            replans=self._kinds.replans,
        )

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Give memory and disk space back. Tensors stay as they are: what is away then comes back at once
        where the budget has room, else when it is touched. Idempotent."""
        if self._closed:
            return
        while self._at_close:
            self._at_close.pop()()
        if self._in_step:
            raise InvalidArgument("a step is open: leave it before you close the run")
        try:
            with self._interrupts:
                self._closed = True
                self._clock.stop()
                self._compiled_as_before()
                self._as_many_buffers()
                self._optimizer_hook.remove()
                _open.remove(self)
                _lingering.append(self)
                self._settle()
        finally:
            self._interrupts.remove()
            self._kinds.close()

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

    def _settle(self) -> None:
        """Bring back what is away, and give everything back. Where that does not fit, or fails, the run
        lingers: its disk space lasts as long as its tensors."""
        recomputed = self._recompute_all()
        try:
            self._engine.drain()
        except SpillError:
            if self._device.memory.in_arena:  # nobody is kept within a budget that ended
                self._device.close()
            raise
        with self._engine.lock:
            self._clock.storages.bury()
            storages = self._clock.storages.all()
        if self._device.settle(storages) and recomputed:
            self._clock.recomputation.close()
            self._device.close()
            _lingering.remove(self)
            self._spill.close()

    def __enter__(self) -> Offload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else counted(self._steps, "step")
        return (
            f"<penstock.Offload on {self._device_name}, budget {format_bytes(self._budget_bytes)}, {state}>"
        )


def _probe_together(spill_dirs: Sequence[Path | Url], device: torch.device, processes: int) -> Hardware:
    """The machine as this process gets it, where each of them uses its links at the same time."""
    together = ranks.meet(processes)
    machine = probe(spill_dirs, device=str(device), time_budget_s=PROBE_S)
    return (
        machine
        if together
        else machine.scaled({link: 1 / processes for link in LINKS if machine.rate_bytes_per_s(link)})
    )


def _warn_if_memory_ends_before(budget_bytes: int, held_bytes: int) -> None:
    """Where the system would end this process. ``held_bytes`` of the budget are in use already."""
    left_bytes = available_bytes() + held_bytes
    if budget_bytes > left_bytes:
        logger.warning(
            "device_budget is %s, and %s of memory can be had here: the system may end this process before "
            "the budget is full. Lower it, or raise the limit of the container",
            format_bytes(budget_bytes),
            format_bytes(left_bytes),
        )


def _make_device(
    name: torch.device, spill: SpillSpace, budget_bytes: int, host_bytes: int
) -> tuple[Device, int]:
    """The device, and bytes of the host tier below it."""
    if name.type == "cpu":
        return CpuDevice(spill, budget_bytes), 0
    left_bytes = available_bytes()
    if host_bytes > left_bytes:
        raise InvalidArgument(
            f"host_budget is {format_bytes(host_bytes)}, all of it page-locked, and there are "
            f"{format_bytes(left_bytes)} of memory to be had here: give less"
        )
    device = AcceleratorDevice(spill, driver_of(name), budget_bytes, host_bytes)
    return device, device.host_tier_bytes


def _known_tensors(
    model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[torch.Tensor, int]]:
    if model is not None:
        for tensor in (*model.parameters(), *model.buffers()):
            yield tensor, WEIGHT
    if optimizer is not None:
        for state in optimizer.state.values():
            if isinstance(state, dict):
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        yield value, OPTIMIZER_STATE


def _bytes_of(model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None) -> int:
    storages = {}
    for tensor in tensors_in([tensor for tensor, _ in _known_tensors(model, optimizer)]):
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def _require_kinds(model: object, optimizer: object, plan: object, hardware: object) -> None:
    given = {"plan": plan, "hardware": hardware}
    require_kinds(**{name: value for name, value in given.items() if value is not None})
    if model is not None and not isinstance(model, torch.nn.Module):
        raise InvalidArgument(
            f"model is {described(model)}: give a torch.nn.Module; of several, a torch.nn.ModuleList"
        )
    if optimizer is not None and (isinstance(optimizer, type) or not hasattr(optimizer, "param_groups")):
        raise InvalidArgument(f"optimizer is {described(optimizer)}: give a torch.optim.Optimizer")


def _device_of(model: torch.nn.Module | None, device: str | torch.device | None) -> torch.device:
    found = {parameter.device for parameter in model.parameters()} if model is not None else set()
    if device is not None:
        return device_of(device)
    if len(found) > 1:
        named = ", ".join(sorted(map(str, found)))
        raise InvalidArgument(f"the model's parameters are on {named}: put all of them on one device")
    return device_of(found.pop() if found else "cpu")
