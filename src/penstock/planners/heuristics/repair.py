"""What a policy leaves above the budget leaves the device too: the tensor needed last goes first (Belady)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from penstock.core.columns import BoolArray, IntArray
from penstock.core.hardware import Hardware
from penstock.core.memory_profile import resident_bytes
from penstock.core.plan import Evict
from penstock.planners.heuristics import cyclic
from penstock.planners.heuristics.room import Room, spill_full
from penstock.planners.heuristics.vitality import Candidates

NEGLIGIBLE = 256  # a tensor below this part of what is missing leaves only where larger ones do not do


def evict_further(
    options: Candidates,
    taken: BoolArray,
    evictions: Sequence[Evict],
    room: Room,
    budget_bytes: int,
    hardware: Hardware,
    tiers: Sequence[str],
) -> list[Evict]:
    """Further evictions with which no kernel needs more than ``budget_bytes``, all returning on demand.

    taken    [P] periods that are used up already, by `evictions`; further ones are marked in it
    tiers    where they go, in order of preference; `room` keeps account

    Raises SpillSpaceFull where no tier has room for what has to leave.
    """
    trace = options.trace
    resident = resident_bytes(trace, evictions)
    further: list[Evict] = []
    for kernel in np.flatnonzero(resident > budget_bytes).tolist():
        missing = int(resident[kernel]) - budget_bytes
        if missing <= 0:
            continue
        for index in _victims(options, taken, kernel, missing):
            evict = options.evict(index, "")
            tier = room.first(tiers, evict)
            if tier is None:
                continue
            room.take(tier, evict)
            taken[index] = True
            further.append(replace(evict, tier=tier))
            size = int(options.size_bytes[index])
            cyclic.add(resident, evict.begin, evict.end, -size)
            missing -= size
            if missing <= 0:
                break
        else:
            raise spill_full(trace, [*evictions, *further], budget_bytes, hardware)
    return further


def _victims(options: Candidates, taken: BoolArray, kernel: int, missing: int) -> list[int]:
    """Periods that are free and cover ``kernel``: those that last longest from there first, and the
    negligible ones after all others."""
    count = options.trace.kernels
    here = (options.begin <= kernel) & (kernel < options.end)
    wrapped = ~here & (kernel + count >= options.begin) & (kernel + count < options.end)
    found: IntArray = np.flatnonzero((here | wrapped) & ~taken)
    lasts = options.end[found] - np.where(wrapped[found], count, 0)
    small = options.size_bytes[found] * NEGLIGIBLE < missing
    order: list[int] = found[np.lexsort((-options.size_bytes[found], -lasts, small))].tolist()
    return order
