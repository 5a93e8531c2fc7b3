"""Train inside a byte budget: the user's entry."""

from __future__ import annotations

import contextlib
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
import torch._dynamo  # every optimizer imports it at its first use: 70 MB of code, better now than in a step

from penstock.capture.probe import probe
from penstock.core.check import check
from penstock.core.hardware import Hardware
from penstock.core.plan import Plan
from penstock.core.pressure import minimum_bytes
from penstock.core.timeline import Timeline
from penstock.core.trace import Trace
from penstock.errors import (
    BudgetTooSmall,
    DeviceUnavailable,
    InvalidArgument,
    InvalidPlan,
    PenstockError,
)
from penstock.planners import plan, require_policy
from penstock.runtime import measured, resident
from penstock.runtime.cuda import CudaDevice
from penstock.runtime.devices import CpuDevice, Device
from penstock.runtime.mover import Moved, Mover
from penstock.runtime.report import Report
from penstock.runtime.saved import Fingerprint, SavedTensors
from penstock.runtime.schedule import Schedule, schedule
from penstock.simulator import simulate
from penstock.storage.rounds import ChoiceReport
from penstock.storage.spill import Directories, SpillSpace, as_paths
from penstock.storage.tables import Tables
from penstock.units import format_bytes_up, parse_bytes

# Planning takes no longer than so many steps of the trace, within these limits.
PLANNING_STEPS = 5.0
PLANNING_LIMITS_S = (0.5, 10.0)

logger = logging.getLogger("penstock")

PROBE_S = 2.0

# The first steps are slow: memory is touched for the first time, kernels are chosen. The plan is made
# anew after each of the next ones but the last, whose record is held against the prediction.
RECORDINGS = 3


def offload(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    device_budget: int | str,
    spill_dir: Directories | None = None,
    host_budget: int | str | None = None,
    disk_budget: int | str | None = None,
    policy: str = "optimal",
    hardware: Hardware | None = None,
    page_cache_budget: int | str = 0,
    ways: str | Sequence[str] | None = None,
    way_tables: str | os.PathLike[str] | None = None,
    reexplore: float = 0.005,
    verify_spill: bool = False,
) -> Offload:
    """Train ``model`` with no more than ``device_budget`` of device memory. The same bits as without.

    Wrap each iteration in ``with run.step():``. The first one profiles with every activation moved
    out as soon as autograd saves it; then a plan is made for the budget, and carried out from the
    second one on. The model, and how the loop is written, do not change.

    device_budget   most bytes of weights, gradients, optimizer state, activations and workspace on
                    the device of the model's parameters: an integer, or text such as "600MiB". On a
                    CPU, bytes of RAM.
    spill_dir       a directory on the disk to use; one on NVMe is best. With several, on as many
                    disks, every tensor is striped over all of them. None: the system's directory
                    for temporary files. What is written there has no name, is readable by nobody
                    else, and is gone with the process, however that ends.
    host_budget     pinned host memory to use as a tier and for staging, for a model on a GPU; None
                    for an eighth of what is free
    disk_budget     most bytes on disk; None for what is free there
    policy          a key of penstock.planners.POLICIES
    hardware        rates of this machine's links, as `penstock.probe` measures them; None to
                    measure them now, in about two seconds
    page_cache_budget   most bytes to spill to the page cache only, which is memory beside the other
                    budgets; it serves small tensors faster. 0: none
    ways            how tensors move between memory and disk. None: whatever proves fastest, size by
                    size, in the first steps, and from then on while they run. A name such as
                    "io_uring direct": that way only. Several: whichever of them. `run.ways` names
                    those there are
    way_tables      a file to begin with what other runs on disks of the same kind learned of the
                    ways, and to leave there what this one learned
    reexplore       share of the transfer time to spend on trying slower ways again, since machines
                    change; 0 for none after the first steps
    verify_spill    checksum what leaves for the disk, and check it when it comes back: about 0.05
                    CPU seconds a gigabyte each

    Raises InvalidArgument, InvalidSize, DeviceUnavailable, SpillError, and BudgetTooSmall where
    weights and optimizer state alone exceed the budget.
    """
    return Offload(
        model,
        optimizer,
        device_budget_bytes=parse_bytes(device_budget),
        spill_dirs=as_paths(default_spill_dir() if spill_dir is None else spill_dir),
        host_budget_bytes=None if host_budget is None else parse_bytes(host_budget),
        disk_budget_bytes=None if disk_budget is None else parse_bytes(disk_budget),
        policy=policy,
        hardware=hardware,
        page_cache_bytes=parse_bytes(page_cache_budget),
        ways=[ways] if isinstance(ways, str) else ways,
        way_tables=None if way_tables is None else Path(way_tables),
        reexplore=reexplore,
        verify_spill=verify_spill,
    )


def default_spill_dir() -> str:
    """The system's directory for temporary files, or /var/tmp where that one is in RAM."""
    directory = tempfile.gettempdir()
    if resident.is_in_memory(directory) and os.access("/var/tmp", os.W_OK):
        return "/var/tmp"
    return directory


class Offload:
    """A model being trained inside a budget. Made by `offload`; a context manager.

    trace      the iteration as last recorded, None before the first step
    plan       in force, None before the first step
    hardware   the machine the plan was made for
    timeline   measured in the last recorded step that followed a plan, None before
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        device_budget_bytes: int,
        spill_dirs: Sequence[Path],
        host_budget_bytes: int | None,
        disk_budget_bytes: int | None,
        policy: str,
        hardware: Hardware | None,
        page_cache_bytes: int,
        ways: Sequence[str] | None,
        way_tables: Path | None,
        reexplore: float,
        verify_spill: bool,
    ) -> None:
        require_policy(policy)
        self._model = model
        self._optimizer = optimizer
        self._policy = policy
        self._budget_bytes = device_budget_bytes
        self._device_name = _device_of(model)
        fixed_bytes = sum(
            {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in self._fixed()}.values()
        )
        if fixed_bytes > device_budget_bytes:
            raise BudgetTooSmall(
                f"weights, buffers and optimizer state alone take {format_bytes_up(fixed_bytes)}; the device "
                f"budget is {format_bytes_up(device_budget_bytes)}. Only activations move: raise the budget.",
                fixed_bytes,
            )
        on_cpu = self._device_name.type == "cpu"
        resident.release_free_memory()
        self._resident_before_bytes = resident.resident_bytes() - (fixed_bytes if on_cpu else 0)
        self._spill = SpillSpace(
            spill_dirs,
            disk_budget_bytes,
            page_cache_bytes=page_cache_bytes,
            ways=ways,
            tables_path=way_tables,
            reexplore=reexplore,
            verify=verify_spill,
            gpu=not on_cpu,
        )
        try:
            machine = hardware or probe(spill_dirs, device=str(self._device_name), time_budget_s=PROBE_S)
            disk_bytes = machine.disk_bytes if disk_budget_bytes is None else disk_budget_bytes
            self._device: Device
            if on_cpu:
                self._device, host_tier_bytes = CpuDevice(self._spill, device_budget_bytes, fixed_bytes), 0
            else:
                host_bytes = machine.host_bytes // 8 if host_budget_bytes is None else host_budget_bytes
                self._device = CudaDevice(self._spill, self._device_name, host_bytes, fixed_bytes)
                host_tier_bytes = self._device.host_tier_bytes
            self.hardware = replace(
                machine, device_bytes=device_budget_bytes, host_bytes=host_tier_bytes, disk_bytes=disk_bytes
            )
        except BaseException:
            self._spill.close()
            raise
        self._peak_resident_known = resident.reset_peak()
        self._mover = Mover(self._device, device_budget_bytes)
        self._saved = SavedTensors(self._mover, self._device_name, self._device.is_movable)
        self.trace: Trace | None = None
        self.plan: Plan | None = None
        self.timeline: Timeline | None = None
        self._schedule: Schedule | None = None
        self._fingerprints: tuple[Fingerprint, ...] = ()
        self._recordings_left = 0  # planned steps still to be recorded
        self._refusal: BudgetTooSmall | None = None
        self._in_step = False
        self._closed = False
        self._steps = 0
        self._profiled_steps = 0
        self._departures = 0
        self._peak_bytes = 0
        self._minimum_bytes = 0
        self._step_times_s: list[float] = []
        self._recorded_times_s: list[float] = []
        self._last_moved: list[Moved] = []
        self._stalls_s: list[float] = []

    # -- a step --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """One iteration: forward, backward and the optimizer's step go inside.

        Raises BudgetTooSmall at the end of the first step, where no plan can keep the budget, and
        what the storage raises while the step runs. After an error the next step can be tried.
        """
        if self._closed:
            raise InvalidArgument("this run is closed: call penstock.offload again to train on")
        if self._in_step:
            raise InvalidArgument("a step is already open: close it before the next begins")
        if self._refusal is not None:
            raise self._refusal
        following = self._schedule
        recorder = None
        if following is None or self._recordings_left:
            recorder = Recorder(self._device, costs=costs_of_recording(self._device))
        self._saved.begin_step(
            schedule=following,
            expected=self._fingerprints,
            default_tier=self._device.default_tier,
            fixed=self._fixed(),
            recorder=recorder,
        )
        self._mover.begin_step()
        self._device.begin_step()
        if recorder is not None:
            recorder.know(self._model.parameters(), "weight")
            recorder.know(self._model.buffers(), "weight")
            recorder.know(self._optimizer_state(), "optimizer_state")
        self._in_step = True
        try:
            begun_s = time.perf_counter()
            with self._saved, recorder or contextlib.nullcontext():
                yield
            self._device.synchronize()
            step_s = time.perf_counter() - begun_s
        finally:
            self._in_step = False
            self._mover.drain()
        self._finish_step(following, recorder, begun_s, step_s)

    def _finish_step(
        self, followed: Schedule | None, recorder: Recorder | None, begun_s: float, step_s: float
    ) -> None:
        self._steps += 1
        self._peak_bytes = max(self._peak_bytes, self._device.peak_bytes())
        departed = self._saved.departed
        if followed is not None and not departed:
            (self._recorded_times_s if recorder else self._step_times_s).append(step_s)
            self._last_moved = self._mover.moved
            self._stalls_s.append(self._mover.stall_s)
        if departed:
            self._note_departure()
            return
        if recorder is None:
            return
        trace = recorder.trace(
            measured=True, notes={"device": str(self._device_name), "torch": str(torch.__version__)}
        )
        if followed is not None:
            self._recordings_left -= 1
            self.timeline = measured.timeline(trace, recorder, self._mover, begun_s, step_s)
        else:
            self._profiled_steps += 1
            self._recordings_left = RECORDINGS
        self._fingerprints = tuple(self._saved.fingerprints)
        if followed is None or self._recordings_left:
            self._make_plan(trace)
        else:  # the first steps are over: others can use what they taught
            self._spill.save_tables()

    def _make_plan(self, trace: Trace) -> None:
        self._minimum_bytes = max(self._minimum_bytes, minimum_bytes(trace))
        if self.trace is not None and self.trace.kernel_name == trace.kernel_name:
            # A kernel is as fast as it has been seen to be: what disturbed it will not come again there.
            fastest_s = np.minimum(self.trace.kernel_time_s, trace.kernel_time_s)
            trace = replace(trace, kernel_time_s=fastest_s)
        try:
            made = plan(trace, self.hardware, self._policy, time_limit_s=_planning_s(trace))
        except PenstockError as error:
            if self._schedule is not None:  # the budget is at the edge, and the plan in force keeps it
                logger.warning("no better plan could be made, and the one in force is kept: %s", error)
                return
            if isinstance(error, BudgetTooSmall):
                self._refusal = error
            raise
        violations = check(trace, made, self.hardware)
        if violations:
            raise InvalidPlan(violations)
        self.trace, self.plan, self._schedule = trace, made, schedule(trace, made)
        resident.release_free_memory()  # what the solver took

    def _note_departure(self) -> None:
        self._schedule = None
        self._departures += 1
        if self._departures == 1:
            logger.warning(
                "the step was not the one that was traced: the rest of it ran with everything moved out, and "
                "the next step is profiled again. A model that changes from step to step is exact, but slow."
            )

    def _fixed(self) -> Iterator[torch.Tensor]:
        """Weights, buffers and optimizer state: they stay on the device."""
        yield from self._model.parameters()
        yield from self._model.buffers()
        yield from self._optimizer_state()

    def _optimizer_state(self) -> Iterator[torch.Tensor]:
        for state in self._optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    # -- what it says --------------------------------------------------------------------------

    @property
    def ways(self) -> tuple[str, ...]:
        """The ways there are to move a tensor between memory and disk."""
        return (*self._spill.ways, *filter(None, [self._spill.gpu_direct]))

    def way_tables(self) -> Tables:
        """What the ways cost, by size of tensor, as far as it is known."""
        return self._spill.tables()

    def way_report(self) -> ChoiceReport:
        """How often each way was the fastest, by size of tensor (Fastensor's tables 13 and 14)."""
        return self._spill.report()

    def report(self) -> Report:
        """Predicted against measured, so far. Raises PenstockError before the first step has ended."""
        if self.trace is None or self.plan is None:
            raise PenstockError("nothing to report yet: run at least one step to its end")
        predicted = simulate(self.trace, self.plan, self.hardware)
        times_s = self._step_times_s or self._recorded_times_s[-1:]
        on_cpu = self._device_name.type == "cpu"
        evict_link, prefetch_link = (
            ("disk_write", "disk_read") if on_cpu else ("device_to_host", "host_to_device")
        )
        peak_resident_bytes = 0
        if self._peak_resident_known:
            peak_resident_bytes = max(0, resident.peak_resident_bytes() - self._resident_before_bytes)
        return Report(
            device=str(self._device_name),
            policy=self.plan.policy,
            reason=self.plan.reason,
            memory_manager=self._device.memory_manager,
            direct_io=self._spill.direct,
            device_budget_bytes=self._budget_bytes,
            minimum_bytes=self._minimum_bytes,
            peak_bytes=self._peak_bytes or peak_resident_bytes,
            predicted_peak_bytes=predicted.peak_bytes,
            peak_resident_bytes=peak_resident_bytes,
            step_s=statistics.median(times_s) if times_s else 0.0,
            predicted_step_s=predicted.iteration_s,
            stall_s=statistics.median(self._stalls_s) if self._stalls_s else 0.0,
            predicted_stall_s=predicted.stall_s,
            ideal_s=self.trace.ideal_s,
            evicted_bytes=measured.moved_bytes(self._last_moved, evict_link),
            predicted_evicted_bytes=predicted.evicted_bytes,
            loaded_bytes=measured.moved_bytes(self._last_moved, prefetch_link),
            disk_bytes=self._spill.file_bytes,
            moved_bytes_by_way={way: moved for way, moved in self._spill.moved_bytes_by_way.items() if moved},
            unavailable_transports=self._spill.unavailable,
            steps=self._steps,
            profiled_steps=self._profiled_steps,
            departures=self._departures,
            rates_bytes_per_s=measured.rates(self._last_moved),
        )

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Give memory and disk space back. Tensors of the model stay as they are. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._mover.drain()
        self._spill.close()
        self._device.close()

    def __enter__(self) -> Offload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _planning_s(trace: Trace) -> float:
    """How long planning this step may take."""
    least_s, most_s = PLANNING_LIMITS_S
    return min(max(PLANNING_STEPS * trace.ideal_s, least_s), most_s)


def _device_of(model: torch.nn.Module) -> torch.device:
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        named = ", ".join(sorted(map(str, devices))) or "none"
        raise InvalidArgument(f"the model's parameters are on {named}: put all of them on one device")
    device = devices.pop()
    if device.type not in ("cpu", "cuda"):
        raise DeviceUnavailable(f"the model is on {device}: penstock trains on cpu and cuda devices")
    return device
