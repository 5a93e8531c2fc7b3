"""When to bring evicted tensors back (G10 section 4.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from penstock.core.columns import FloatArray
from penstock.core.hardware import Hardware
from penstock.core.memory_profile import resident_bytes
from penstock.core.plan import Evict
from penstock.core.trace import Trace
from penstock.planners.heuristics import cyclic


def in_order(evictions: Sequence[Evict]) -> tuple[Evict, ...]:
    """As a plan lists them: in the order in which their copies may start."""
    return tuple(sorted(evictions, key=lambda evict: (evict.after, evict.begin, evict.tensor)))


def advance(
    trace: Trace,
    evictions: Sequence[Evict],
    latest: Sequence[int],
    budget_bytes: int,
    earliest: Sequence[int] | None = None,
) -> tuple[Evict, ...]:
    """The same evictions, which return on demand as given, prefetched ahead where memory allows.

    Those that come first in `evictions` get memory first. One that would come back immediately
    stays on the device, and is left out.

    latest     by eviction: the kernel at which its prefetch should be issued; later where memory is short
    earliest   by eviction: once all are placed, each is moved to the first kernel from there on from which
               memory holds it; none is where not given
    """
    slack = budget_bytes - resident_bytes(trace, evictions)
    sizes = [moved_bytes(trace, evict) for evict in evictions]
    issue = [evict.end for evict in evictions]
    for wishes in (latest, earliest or ()):
        for index, wish in enumerate(wishes):
            evict, until = evictions[index], issue[index]
            # What stays on the device has its whole size there, not that of its compressed copy.
            first = evict.begin + (evict.codec != "raw")
            issue[index] = cyclic.earliest(slack, min(max(wish, first), until), until, sizes[index])
            cyclic.add(slack, issue[index], until, -sizes[index])
    placed = [
        replace(evict, prefetch_at=prefetch_at)
        for evict, prefetch_at in zip(evictions, issue, strict=True)
        if prefetch_at > evict.begin
    ]
    return in_order(placed)


def moved_bytes(trace: Trace, evict: Evict) -> int:
    """What the links and the tier carry, and what its prefetch takes on the device."""
    raw = evict.codec == "raw"
    return int(trace.tensor_bytes[evict.tensor]) if raw else trace.compressed_bytes(evict.tensor)


def latest_safe(trace: Trace, evictions: Sequence[Evict], hardware: Hardware) -> list[int]:
    """For each eviction, the last kernel at which its read can be issued and be in time, with all reads after
    it on its tier in time as well, at the pace of a device that never waits."""
    count = trace.kernels
    once = trace.start_s
    clock: FloatArray = np.concatenate([once[:-1], once[:-1] + once[-1], once + 2 * once[-1]])
    wishes = [0] * len(evictions)
    reads = [hardware.prefetch_s(evict.tier, moved_bytes(trace, evict)) for evict in evictions]
    # Each iteration is like the other: reads of the next one bound those of this one.
    order = sorted(
        [(evict.end + turn * count, index) for index, evict in enumerate(evictions) for turn in (1, 0)],
        reverse=True,
    )
    free_s: dict[str, float] = {}
    for end, index in order:
        evict = evictions[index]
        start_s = min(float(clock[end]), free_s.get(evict.tier, np.inf)) - reads[index]
        free_s[evict.tier] = start_s
        if end == evict.end:
            wishes[index] = max(int(np.searchsorted(clock, start_s, side="right")) - 1, 0)
    return wishes
