"""Evict whatever can leave: the plan of those who do not plan, and the least memory there is."""

from __future__ import annotations

from dataclasses import replace

from penstock.core.hardware import Hardware
from penstock.core.plan import Evict
from penstock.core.pressure import resident_bytes
from penstock.core.trace import Trace
from penstock.planners.prefetch import bring_back
from penstock.planners.room import Room, candidates, spill_full

WORTH_BYTES = 4096  # smaller tensors leave only where the budget asks for it


def evict_all(trace: Trace, budget_bytes: int, hardware: Hardware) -> tuple[Evict, ...]:
    """Every inactive period of every tensor of WORTH_BYTES or more, and of smaller ones where needed.

    Prefetches are issued at the latest moment at which all reads are still in time, or on demand
    where memory does not allow that.
    """
    room = Room(trace, hardware)
    options = candidates(trace)
    options.sort(key=lambda option: (-trace.tensor_bytes[option.tensor], option.begin - option.end))
    over = resident_bytes(trace, ()) - budget_bytes
    chosen = []
    for option in options:
        size = int(trace.tensor_bytes[option.tensor])
        if size < WORTH_BYTES and over[option.begin : option.end].max() <= 0:
            continue
        for tier in room.tiers(option.tensor, option.after)[:1]:
            room.take(tier, option.tensor, option.after)
            chosen.append(replace(option, tier=tier))
            over[option.begin : option.end] -= size
    if over.max(initial=0) > 0:
        raise spill_full(trace, chosen, budget_bytes, hardware)
    return bring_back(trace, chosen, budget_bytes, hardware, trace.start_s, early=False)
