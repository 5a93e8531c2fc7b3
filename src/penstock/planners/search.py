"""Improve a plan by small changes, of which the simulator keeps those that do not cost time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from penstock.core.hardware import Hardware
from penstock.core.plan import Evict, Plan
from penstock.core.timeline import Timeline
from penstock.core.trace import Trace
from penstock.planners.prefetch import bring_back, kernel_starts
from penstock.planners.room import Room, candidates, fits
from penstock.simulator import simulate

TRIALS = 48
SEED = 0
GOOD_ENOUGH = 1.0005  # of the time with every tensor resident


def replay(trace: Trace, evictions: Sequence[Evict], budget_bytes: int, hardware: Hardware) -> Timeline:
    """What the simulator says of these evictions."""
    plan = Plan(policy="", device_budget_bytes=budget_bytes, evictions=tuple(evictions))
    return simulate(trace, plan, hardware)


def search(
    trace: Trace, start: tuple[Evict, ...], budget_bytes: int, hardware: Hardware
) -> tuple[Evict, ...]:
    """The best evictions found near ``start``, which fits its budget. Deterministic."""
    random = Random(SEED)
    options = candidates(trace)
    tiers = list(Room(trace, hardware).free)
    best, timeline = start, replay(trace, start, budget_bytes, hardware)
    for _ in range(TRIALS):
        if timeline.iteration_s <= trace.ideal_s * GOOD_ENOUGH or not timeline.stalls:
            break
        waits = [stall.end_s - stall.start_s for stall in timeline.stalls]
        kernel = random.choices(timeline.stalls, waits)[0].kernel
        changed = _change(best, options, tiers, kernel, random)
        if not fits(trace, changed, budget_bytes, hardware):
            continue
        clock = kernel_starts(timeline)
        trial = bring_back(trace, changed, budget_bytes, hardware, clock, early=True)
        result = replay(trace, trial, budget_bytes, hardware)
        if result.iteration_s <= timeline.iteration_s:
            best, timeline = trial, result
    return best


def _change(
    evictions: Sequence[Evict], options: Sequence[Evict], tiers: Sequence[str], kernel: int, random: Random
) -> list[Evict]:
    """One tensor moved to another tier; or one eviction more, likely one that gives ``kernel`` memory,
    and up to two fewer, likely ones that end about when ``kernel`` runs. All return on demand."""
    changed = [replace(evict, prefetch_at=evict.end) for evict in evictions]
    taken = {(evict.tensor, evict.end) for evict in changed}
    others = [option for option in options if (option.tensor, option.end) not in taken]
    near = [option for option in others if option.begin <= kernel < option.end]
    droppable = sorted(changed, key=lambda evict: abs(evict.end - kernel))
    if random.random() < 0.5:
        random.shuffle(droppable)

    draw = random.random()
    if draw < 0.7 and others:
        added = random.choice(near if near and random.random() < 0.7 else others)
        home = {evict.tensor: evict.tier for evict in changed}
        changed.append(replace(added, tier=home.get(added.tensor) or random.choice(tiers)))
    elif draw < 0.85 and len(tiers) > 1 and changed:
        moved = random.choice(changed)
        tier = random.choice([tier for tier in tiers if tier != moved.tier])
        return [replace(evict, tier=tier) if evict.tensor == moved.tensor else evict for evict in changed]
    for evict in droppable[: random.randint(0, 2)]:
        changed.remove(evict)
    return changed
