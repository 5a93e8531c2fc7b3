"""Training with demand paging and no plan: what the planners are measured against.

Two systems, as the evaluation of G10 (MICRO 2023, sections 5 and 7.1) models them on top of unified
virtual memory (UVM), with host memory and a disk below the device:

uvm      Base UVM: pages come when a kernel faults on them and leave in the order in which they came. The
         driver does not know what is alive: what no kernel will ever read is written out like the rest.
deepum   DeepUM+ (Jung et al., ASPLOS 2023, extended to a disk): a kernel that starts makes the pages be
         prefetched that the kernel `prefetch_degree` later uses. Kernels repeat every iteration, so that
         the correlation tables know them. Prefetches spare what the kernels in between use, and pages of
         dead tensors are dropped instead of being written.

How time passes:

- Pages are of 4 KiB. Demands go before prefetches, and each kind in the order of issue; a demand does not
  overtake the prefetch of the same page.
- A kernel that finds all its pages takes its time. One that faults ends when its pages have come, and not
  before its time plus that of handling the faults: the driver serves a group of pages in
  `FaultCost.fault_s`, longer where they come from a disk. Where a trace was measured with faults, their
  measured cost takes the place of that.
- What the disk gives to and takes from the link between host and device follows Hardware.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.core.columns import FloatArray
from penstock.core.hardware import Hardware
from penstock.core.trace import Trace
from penstock.errors import BudgetTooSmall, InvalidArgument, SpillSpaceFull

from .paging_flow import Flows
from .paging_memory import DISK, HOST, NOWHERE, PAGE_BYTES, Memory

POLICIES = ("uvm", "deepum")
ITERATIONS = 2


@dataclass(frozen=True, slots=True)
class FaultCost:
    """What the driver spends on faults, besides moving pages.

    fault_s            to handle a group of faults (table 2 of G10)
    disk_s             more where the page is on a disk
    group_bytes        pages that one handling brings; with `fault_s` about 3 GB/s, which is what the
                       kernels of G10's traces reached that faulted on everything
    fresh_bytes_per_s  how fast untouched pages are mapped
    """

    fault_s: float = 45e-6
    disk_s: float = 20e-6
    group_bytes: int = 128 * 1024
    fresh_bytes_per_s: float = 1.0 / 0.814e-12


@dataclass(frozen=True, kw_only=True, eq=False)
class PagingResult:
    """What happened in the second of two iterations.

    step_s         how long it took
    steps_s        both; the first starts with the persistent tensors on the disk (on the host where that
                   has no room) and nothing else anywhere
    start_s        [K + 1] when each kernel started, and the last ended, from the start of the iteration
    stall_s        [K] by how much each kernel took longer than with everything resident
    faulted_bytes  [K] pages that each kernel found missing and not asked for
    moved_bytes    by link
    peak_bytes     the most device bytes in use
    """

    policy: str
    step_s: float
    steps_s: tuple[float, ...]
    start_s: FloatArray
    stall_s: FloatArray
    faulted_bytes: FloatArray
    moved_bytes: Mapping[str, int]
    peak_bytes: int


def simulate_paging(
    trace: Trace,
    hardware: Hardware,
    policy: str = "uvm",
    *,
    device_budget_bytes: int | None = None,
    fault_times_s: tuple[FloatArray, FloatArray] | None = None,
    faults: FaultCost = FaultCost(),
    prefetch_degree: int = 8,
) -> PagingResult:
    """Two iterations of ``trace`` with demand paging; ``policy`` is "uvm" or "deepum".

    fault_times_s   ([K], [K]) measured times of kernels that fault on all their outputs, and on
                    everything that they use, from host memory (published.fault_times_s);
                    without them `faults` decides
    """
    if policy not in POLICIES:
        raise InvalidArgument(f"there is no paging policy {policy!r}: choose from {', '.join(POLICIES)}")
    if prefetch_degree < 1:
        raise InvalidArgument(f"prefetch_degree is {prefetch_degree}: prefetch at least 1 kernel ahead")
    budget_bytes = hardware.device_bytes if device_budget_bytes is None else device_budget_bytes
    tensors = _tensors(trace)
    _check(trace, hardware, tensors, budget_bytes)
    costs = _fault_bytes_per_s(trace, tensors, fault_times_s, faults)
    return _Paging(
        trace, hardware, tensors, costs, policy == "deepum", budget_bytes, faults, prefetch_degree
    ).run()


class _Tensors(NamedTuple):
    """What is paged: the tensors of the trace, then one for the workspace of each kernel that has one."""

    size_bytes: list[float]  # whole pages
    read: list[list[int]]  # by kernel
    written: list[list[int]]  # by kernel, without what is read too
    birth: list[int]
    death: list[int]
    persistent: list[int]


def _tensors(trace: Trace) -> _Tensors:
    pages = -(-trace.tensor_bytes // PAGE_BYTES) * PAGE_BYTES
    size_bytes = [float(size) for size in pages.tolist()]
    birth, death = trace.tensor_birth.tolist(), trace.tensor_death.tolist()
    read, written = [], []
    for kernel in range(trace.kernels):
        inputs = list(dict.fromkeys(trace.inputs[kernel].tolist()))
        seen = set(inputs)
        outputs = [tensor for tensor in dict.fromkeys(trace.outputs[kernel].tolist()) if tensor not in seen]
        workspace = -(-int(trace.kernel_workspace_bytes[kernel]) // PAGE_BYTES) * PAGE_BYTES
        if workspace:
            outputs.append(len(size_bytes))
            size_bytes.append(float(workspace))
            birth.append(kernel)
            death.append(kernel + 1)
        read.append(inputs)
        written.append(outputs)
    persistent = np.flatnonzero(trace.tensor_persistent).tolist()
    return _Tensors(size_bytes, read, written, birth, death, persistent)


def _check(trace: Trace, hardware: Hardware, tensors: _Tensors, budget_bytes: int) -> None:
    for kernel in range(trace.kernels):
        used = tensors.read[kernel] + tensors.written[kernel]
        needed = int(sum(tensors.size_bytes[tensor] for tensor in used))
        if needed > budget_bytes:
            raise BudgetTooSmall(
                f"kernel {trace.kernel_name[kernel]} uses {needed} bytes of pages; the device budget is "
                f"{budget_bytes}. Paging cannot help: raise the budget to {needed} or lower the batch",
                needed,
            )
    links = [("host_bytes", "host_to_device"), ("host_bytes", "device_to_host")]
    links += [("disk_bytes", "disk_read"), ("disk_bytes", "disk_write")]
    if hardware.disk_shares_bus:
        links += [("disk_bytes", "host_to_device"), ("disk_bytes", "device_to_host")]
    for tier, link in links:
        if getattr(hardware, tier) > 0 and hardware.rate_bytes_per_s(link) <= 0:
            raise InvalidArgument(f"the hardware has {tier} but no {link}_bytes_per_s: give both or neither")


class _FaultRates(NamedTuple):
    """Bytes per second at which the driver serves faults from host memory, [K] each."""

    read: list[float]
    written: list[float]


def _fault_bytes_per_s(
    trace: Trace,
    tensors: _Tensors,
    fault_times_s: tuple[FloatArray, FloatArray] | None,
    faults: FaultCost,
) -> _FaultRates:
    if fault_times_s is None:
        rate = faults.group_bytes / faults.fault_s if faults.fault_s > 0 else float("inf")
        return _FaultRates([rate] * trace.kernels, [rate] * trace.kernels)
    for times in fault_times_s:
        if len(times) != trace.kernels:
            raise InvalidArgument(f"fault_times_s has {len(times)} times for {trace.kernels} kernels")
    resident_s = trace.kernel_time_s
    outputs_s = np.maximum(fault_times_s[0], resident_s)
    all_s = np.maximum(fault_times_s[1], outputs_s)
    rates = []
    for lists, extra_s in ((tensors.read, all_s - outputs_s), (tensors.written, outputs_s - resident_s)):
        moved = np.array([sum(tensors.size_bytes[tensor] for tensor in used) for used in lists])
        with np.errstate(divide="ignore", invalid="ignore"):
            rates.append(np.where((extra_s > 0) & (moved > 0), moved / extra_s, np.inf).tolist())
    return _FaultRates(*rates)


class _Paging:
    """The state of one run."""

    def __init__(
        self,
        trace: Trace,
        hardware: Hardware,
        tensors: _Tensors,
        costs: _FaultRates,
        correlated: bool,
        budget_bytes: int,
        faults: FaultCost,
        prefetch_degree: int,
    ) -> None:
        self.trace = trace
        self.hardware = hardware
        self.tensors = tensors
        self.costs = costs
        self.correlated = correlated
        self.faults = faults
        self.ahead = prefetch_degree
        self.used = [read + written for read, written in zip(tensors.read, tensors.written, strict=True)]
        self.memory = Memory(tensors.size_bytes, float(budget_bytes), float(hardware.host_bytes))
        self.least_free_bytes = self.memory.free_bytes
        self.budget_bytes = budget_bytes
        lasting_bytes = sum(tensors.size_bytes[tensor] for tensor in tensors.persistent)
        for tier, room_bytes in ((DISK, hardware.disk_bytes), (HOST, hardware.host_bytes)):
            if lasting_bytes <= room_bytes:
                for tensor in tensors.persistent:
                    self.memory.start_at(tier, tensor)
                break
        self.flows = Flows(
            self.memory, hardware, drops_dead=correlated, fresh_bytes_per_s=faults.fresh_bytes_per_s
        )
        self.ends_at: dict[int, list[int]] = {}
        self.begins_at: dict[int, list[int]] = {}
        lasting = set(tensors.persistent)
        for tensor, (birth, death) in enumerate(zip(tensors.birth, tensors.death, strict=True)):
            if tensor not in lasting:
                self.begins_at.setdefault(birth, []).append(tensor)
                self.ends_at.setdefault(death, []).append(tensor)

    def run(self) -> PagingResult:
        kernels = self.trace.kernels
        steps_s = []
        for _ in range(ITERATIONS):
            self.flows.moved_bytes.clear()
            self.least_free_bytes = self.memory.free_bytes
            alive = set(self.tensors.persistent)
            clock_s = 0.0
            start_s, stall_s, faulted = np.zeros(kernels + 1), np.zeros(kernels), np.zeros(kernels)
            for kernel in range(kernels):
                alive.update(self.begins_at.get(kernel, ()))
                alive.difference_update(self.ends_at.get(kernel, ()))
                start_s[kernel] = clock_s
                took_s, faulted[kernel] = self._kernel(kernel, alive)
                stall_s[kernel] = took_s - float(self.trace.kernel_time_s[kernel])
                clock_s += took_s
            start_s[kernels] = clock_s
            steps_s.append(clock_s)
        return PagingResult(
            policy=POLICIES[self.correlated],
            step_s=steps_s[-1],
            steps_s=tuple(steps_s),
            start_s=start_s,
            stall_s=np.maximum(stall_s, 0.0),
            faulted_bytes=faulted,
            moved_bytes={link: round(moved) for link, moved in self.flows.moved_bytes.items() if link},
            peak_bytes=round(self.budget_bytes - max(self.least_free_bytes, 0.0)),
        )

    def _kernel(self, kernel: int, alive: Collection[int]) -> tuple[float, float]:
        """Run one kernel: the seconds it took, and the bytes it found missing and not asked for."""
        used = self.used[kernel]
        spared: set[int] = set()
        if self.correlated:
            count = len(self.used)
            for offset in range(min(self.ahead, count)):
                spared.update(self.used[(kernel + offset) % count])
            for tensor in self.used[(kernel + self.ahead) % count]:
                self.memory.request(tensor, self.flows.prefetches)
        handled_s, faulted_bytes = self._fault(kernel)
        end_s = float(self.trace.kernel_time_s[kernel]) + handled_s
        needed = set(used)
        clock_s = 0.0
        while any(self.memory.waiting(tensor) for tensor in used):
            step_s = self.flows.step(float("inf"), alive, needed, spared)
            if step_s == 0:
                # Prefetches that the kernel waits for find nothing that they may send away.
                step_s = self.flows.step(float("inf"), alive, needed, spared, urgent=True)
            if step_s == 0:
                raise SpillSpaceFull(
                    f"at kernel {self.trace.kernel_name[kernel]} the device and the host are full, and there "
                    "is no disk: give host_bytes more, or disk_bytes"
                )
            clock_s += step_s
            self.least_free_bytes = min(self.least_free_bytes, self.memory.free_bytes)
        while clock_s < end_s:
            step_s = self.flows.step(end_s - clock_s, alive, needed, spared)
            self.least_free_bytes = min(self.least_free_bytes, self.memory.free_bytes)
            if step_s == 0:
                break
            clock_s += step_s
        return max(clock_s, end_s), faulted_bytes

    def _fault(self, kernel: int) -> tuple[float, float]:
        """Demand the pages that are missing: the seconds their handling takes, and their bytes.

        Faults on host memory and on the disk are handled side by side.
        """
        bus = self.hardware.host_to_device_bytes_per_s or float("inf")
        disk = self.hardware.disk_read_bytes_per_s
        both_s = self.faults.fault_s + self.faults.disk_s
        slower = self.faults.fault_s / both_s if self.faults.fault_s > 0 else 1.0
        asked = []
        for used, rate in (
            (self.tensors.read[kernel], self.costs.read[kernel]),
            (self.tensors.written[kernel], self.costs.written[kernel]),
        ):
            fetched = [0.0, 0.0, 0.0]
            for tensor in used:
                added = self.memory.request(tensor, self.flows.demands)
                fetched = [total + more for total, more in zip(fetched, added, strict=True)]
            asked.append((fetched, rate, min(rate * slower, disk)))
        # While the disk is read, it has its part of the link.
        busy = max((disk_rate for fetched, _, disk_rate in asked if fetched[DISK]), default=0.0)
        if self.hardware.disk_shares_bus:
            bus = bus - busy if bus > busy else bus / 2
        disk_s = sum(fetched[DISK] / rate for fetched, _, rate in asked if fetched[DISK])
        host_s = sum((fetched[HOST] + fetched[NOWHERE]) / min(rate, bus) for fetched, rate, _ in asked)
        return max(disk_s, host_s), sum(sum(fetched) for fetched, _, _ in asked)
