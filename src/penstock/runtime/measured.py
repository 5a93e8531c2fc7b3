"""Measurements of steps, in the terms of the simulator."""

from __future__ import annotations

import bisect
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.core.columns import KINDS
from penstock.core.hardware import LINKS, busy_s
from penstock.core.timeline import MemorySample, Span, Stall, Timeline
from penstock.core.trace import Trace
from penstock.runtime.copy_engine import Wait
from penstock.runtime.devices import Device, Moved
from penstock.runtime.recording import Recording

# Medians are over so many steps, the latest ones.
LAST_STEPS = 1000


class MeasuredStep(NamedTuple):
    """Measurements of one step, except its time.

    moved                          its copies, compressions and expansions
    stall_s                        time that kernels waited
    clock_s                        overhead of the runtime's clock on ``operators`` operators
    recomputed_bytes, recompute_s  of tensors that were recomputed
    unrecomputed                   tensors that were evicted, as they could not be recomputed
    swapped_out_bytes, swapped_in_bytes   moved by the arena itself, unplanned
    """

    moved: Sequence[Moved]
    stall_s: float
    clock_s: float
    operators: int
    recomputed_bytes: int
    recompute_s: float
    unrecomputed: int
    swapped_out_bytes: int
    swapped_in_bytes: int


class MeasuredSteps:
    """Measurements of the latest steps of one kind.

    planned_s, stalls_s   times and stalls of steps that followed a plan, and were not recorded
    clock_s               of steps that were not recorded
    """

    last: MeasuredStep

    def __init__(self) -> None:
        self.planned_s: deque[float] = deque(maxlen=LAST_STEPS)
        self.stalls_s: deque[float] = deque(maxlen=LAST_STEPS)
        self.clock_s: deque[float] = deque(maxlen=LAST_STEPS)
        self.last_step_s = 0.0

    def figures(self, device: Device) -> dict[str, Any]:
        """Figures for a report, by name."""
        last, moved = self.last, self.last.moved
        return {
            "step_s": statistics.median(self.planned_s or [self.last_step_s]),
            "stall_s": statistics.median(self.stalls_s or [last.stall_s]),
            "clock_s": statistics.median(self.clock_s or [last.clock_s]),
            "operators": last.operators,
            "evicted_bytes": moved_bytes(moved, *device.evict_links) + last.swapped_out_bytes,
            "loaded_bytes": moved_bytes(moved, *device.prefetch_links) + last.swapped_in_bytes,
            "disk_written_bytes": moved_bytes(moved, "disk_write") + last.swapped_out_bytes,
            "recomputed_bytes": last.recomputed_bytes,
            "recompute_s": last.recompute_s,
            "unrecomputed": last.unrecomputed,
            "moved_bytes_by_kind": moved_bytes_by_kind(moved, *device.evict_links),
            "rates_bytes_per_s": rates(moved),
        }


def rates(moved: Sequence[Moved]) -> dict[str, float]:
    """Bytes per second of each link, and of compression and expansion, while it was busy."""
    rates = {}
    for link in sorted({transfer.link for transfer in moved}):
        took_s = busy_s(
            (transfer.started_s, transfer.finished_s) for transfer in moved if transfer.link == link
        )
        if took_s > 0:
            rates[link] = moved_bytes(moved, link) / took_s
    return rates


def moved_bytes(moved: Sequence[Moved], *links: str) -> int:
    """Bytes that crossed these links."""
    return sum(transfer.size_bytes for transfer in moved if transfer.link in links)


def moved_bytes_by_kind(moved: Sequence[Moved], *links: str) -> dict[str, int]:
    """Bytes that crossed these links, by kind of tensor."""
    totals = dict.fromkeys(("weight", "gradient", "optimizer_state", "activation"), 0)
    for transfer in moved:
        if transfer.link in links:
            kind = KINDS[transfer.kind] if transfer.kind >= 0 else "activation"
            totals[kind if kind in totals else "activation"] += transfer.size_bytes
    return totals


def measured_timeline(
    trace: Trace,
    recording: Recording,
    moved: Sequence[Moved],
    waits: Sequence[Wait],
    begun_s: float,
    step_s: float,
) -> Timeline:
    """The recorded step, on the same clock and in the same terms as a simulated one."""
    kernels = [
        Span("compute", kernel.begun_s - begun_s, kernel.ended_s - begun_s, kernel.name, index)
        for index, kernel in enumerate(recording.kernels)
    ]
    copies = [
        Span(
            copy.link,
            copy.started_s - begun_s,
            copy.finished_s - begun_s,
            f"tensor {copy.tensor}",
            copy.tensor,
            copy.size_bytes,
        )
        for copy in sorted(moved, key=lambda copy: copy.started_s)
        if copy.link in LINKS
    ]
    memory = []
    for span, in_memory_bytes, workspace in zip(
        kernels, recording.in_memory_bytes, trace.kernel_workspace_bytes.tolist(), strict=True
    ):
        memory += [
            MemorySample(span.start_s, in_memory_bytes + workspace),
            MemorySample(span.end_s, in_memory_bytes),
        ]
    stalls = tuple(
        Stall(
            wait.started_s - begun_s,
            wait.finished_s - begun_s,
            wait.cause,
            bisect.bisect_left(recording.launched_s, wait.started_s),
        )
        for wait in waits
    )
    return Timeline(
        step_s=step_s,
        spans=(*kernels, *copies),
        memory={"device": tuple(memory)},
        stalls=stalls,
        source="measured",
    )
