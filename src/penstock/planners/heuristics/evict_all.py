"""Evict whatever can leave: no planning, and the least memory that a step can have."""

from __future__ import annotations

import numpy as np

from penstock.planners.heuristics import cyclic
from penstock.planners.heuristics.prefetch import advance, latest_safe
from penstock.planners.heuristics.room import Room, spill_full
from penstock.planners.heuristics.vitality import Candidates
from penstock.planners.problem import Decision, Problem

WORTH_BYTES = 4096  # smaller tensors leave only where the budget asks for it


def evict_all(problem: Problem) -> Decision:
    """Every inactive period of every tensor of WORTH_BYTES or more, and of smaller ones where needed.

    Prefetches are issued at the latest moment at which all reads are still in time, or on demand
    where memory does not allow that.
    """
    trace, budget_bytes = problem.trace, problem.budget_bytes
    room = Room(trace, problem.hardware)
    options = Candidates.of(trace)
    over = trace.live_bytes - budget_bytes
    chosen = []
    for index in np.lexsort((options.begin - options.end, -options.size_bytes)).tolist():
        evict, size = options.evict(index, ""), int(options.size_bytes[index])
        if size < WORTH_BYTES and cyclic.highest(over, evict.begin, evict.end) <= 0:
            continue
        tier = room.first(room.tiers, evict)
        if tier is not None:
            room.take(tier, evict)
            chosen.append(options.evict(index, tier))
            cyclic.add(over, evict.begin, evict.end, -size)
    if over.max(initial=0) > 0:
        raise spill_full(trace, chosen, budget_bytes, problem.hardware)
    chosen.sort(key=lambda evict: (evict.end, evict.begin, evict.tensor))
    wishes = latest_safe(trace, chosen, problem.hardware)
    return Decision(evictions=advance(trace, chosen, wishes, budget_bytes))
