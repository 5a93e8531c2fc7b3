"""When to bring evicted tensors back (G10 section 4.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from penstock.core.hardware import Hardware
from penstock.core.plan import Evict
from penstock.core.pressure import resident_bytes
from penstock.core.timeline import Timeline
from penstock.core.trace import FloatArray, Trace


def kernel_starts(timeline: Timeline) -> FloatArray:
    """[K + 1] when each kernel started, and the last ended."""
    spans = [span for span in timeline.spans if span.stream == "compute"]
    return np.array([span.start_s for span in spans] + [span.end_s for span in spans[-1:]])


def bring_back(
    trace: Trace,
    evictions: Sequence[Evict],
    budget_bytes: int,
    hardware: Hardware,
    clock: FloatArray,
    *,
    early: bool,
) -> tuple[Evict, ...]:
    """The same evictions with their prefetches issued ahead, where memory allows.

    Reads work in the order of issue, so they are placed in the order in which their tensors are
    needed, each at the latest moment at which it and all after it are still in time. With
    ``early`` a read is issued as soon as the one before it is under way: to issue it sooner would
    take memory and gain nothing. An eviction that would be undone at once is left out.

    clock   [K + 1] when each kernel is expected to start
    """
    order = sorted(evictions, key=lambda evict: (evict.end, evict.begin, evict.tensor))
    on_demand = [replace(evict, prefetch_at=evict.end) for evict in order]
    slack = budget_bytes - resident_bytes(trace, on_demand)
    sizes = [int(trace.tensor_bytes[evict.tensor]) for evict in order]
    reads = [hardware.prefetch_s(evict.tier, size) for evict, size in zip(order, sizes, strict=True)]
    under_way: dict[str, float] = {}  # by tier: when the read before starts
    free: dict[str, float] = {}  # by tier: when it ends

    placed = []
    latest = _latest_safe(order, reads, clock)
    for evict, size, read_s, wish_s in zip(order, sizes, reads, latest, strict=True):
        if early:
            wish_s = min(wish_s, under_way.get(evict.tier, 0.0))
        tight = np.flatnonzero(slack[evict.begin : evict.end] < size)
        possible = evict.begin + (int(tight[-1]) + 1 if len(tight) else 0)
        wish = int(np.searchsorted(clock, wish_s, side="right")) - 1
        prefetch_at = min(max(possible, wish), evict.end)
        slack[prefetch_at : evict.end] -= size
        under_way[evict.tier] = max(free.get(evict.tier, 0.0), float(clock[prefetch_at]))
        free[evict.tier] = under_way[evict.tier] + read_s
        if prefetch_at > evict.begin:
            placed.append(replace(evict, prefetch_at=prefetch_at))
    return tuple(sorted(placed, key=lambda evict: (evict.after, evict.begin, evict.tensor)))


def _latest_safe(order: Sequence[Evict], reads: Sequence[float], clock: FloatArray) -> list[float]:
    """For each eviction, in the order of need, when its read has to start at the latest."""
    latest = [0.0] * len(order)
    next_s: dict[str, float] = {}
    for index in reversed(range(len(order))):
        evict = order[index]
        deadline_s = min(float(clock[evict.end]), next_s.get(evict.tier, np.inf))
        latest[index] = next_s[evict.tier] = deadline_s - reads[index]
    return latest
