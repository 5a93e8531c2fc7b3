"""A plan in terms of what the runtime sees: the saves and loads of autograd, one by one. Pure.

Plans speak of kernels. While a step runs at full speed nobody counts kernels; what passes by is
autograd saving storages and asking for them back. These events are the runtime's clock.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from penstock.core.plan import Plan
from penstock.core.pressure import resident_bytes
from penstock.core.trace import Trace


@dataclass(frozen=True, slots=True)
class Departure:
    """What becomes of a saved storage that the plan evicts.

    due     number of the event after which the plan counts its memory as free
    tier    where the copy goes
    stays   it is kept in memory until a load lets it go: it leaves for a later period only
    """

    due: int
    tier: str
    stays: bool


@dataclass(frozen=True)
class Schedule:
    """What to do at each save, each load, and after each event.

    departures    by save: how it leaves, absent where it stays
    save_of_load  [L] the save that each load asks for, -1 where the trace does not tell
    drops         loads after which the storage brought back is let go again
    prefetches    by event: the saves whose copies are brought back then, in the order of need
    ahead_bytes   [S + L] most device bytes the plan expects before the next event, had every
                  eviction finished
    """

    departures: dict[int, Departure]
    save_of_load: tuple[int, ...]
    drops: frozenset[int]
    prefetches: dict[int, tuple[int, ...]]
    ahead_bytes: tuple[int, ...]


def schedule(trace: Trace, plan: Plan) -> Schedule:
    """Turn a plan for this trace into what the runtime does at each event."""
    event_kernel = np.sort(np.concatenate([trace.save_kernel, trace.load_kernel]), kind="stable")
    resident = resident_bytes(trace, plan.evictions)
    bounds = np.append(event_kernel, trace.kernels)
    ahead = [int(resident[begin:end].max(initial=0)) for begin, end in pairwise(bounds)]
    for event in reversed(range(len(ahead) - 1)):
        if bounds[event] == bounds[event + 1]:  # no kernel in between: the next event's need counts
            ahead[event] = ahead[event + 1]

    saves: dict[int, list[int]] = defaultdict(list)  # by tensor, one for each version
    for save, tensor in enumerate(trace.save_tensor.tolist()):
        saves[tensor].append(save)
    loads: dict[int, list[int]] = defaultdict(list)
    for load, tensor in enumerate(trace.load_tensor.tolist()):
        loads[tensor].append(load)

    def save_for(tensor: int, kernel: int) -> int:
        """The version that a load before ``kernel`` finds: the last one saved by then."""
        earlier = [save for save in saves.get(tensor, ()) if trace.save_kernel[save] <= kernel]
        return earlier[-1] if earlier else -1

    departures: dict[int, Departure] = {}
    drops: set[int] = set()
    prefetches: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for evict in sorted(plan.evictions, key=lambda evict: evict.begin):
        save = save_for(evict.tensor, evict.begin)
        if save < 0:
            continue
        due = int(np.searchsorted(event_kernel, evict.begin, side="right")) - 1
        before = [load for load in loads[evict.tensor] if trace.load_kernel[load] < evict.begin]
        departures.setdefault(save, Departure(max(due, 0), evict.tier, stays=bool(before)))
        if before:
            drops.add(before[-1])
        drops.add(loads[evict.tensor][-1])  # nobody asks again: its memory goes with the node that did
        at = int(np.searchsorted(event_kernel, evict.prefetch_at, side="left"))
        if at < len(event_kernel):
            prefetches[at].append((evict.prefetch_at, evict.end, save))
    return Schedule(
        departures,
        tuple(
            save_for(tensor, kernel)
            for tensor, kernel in zip(trace.load_tensor.tolist(), trace.load_kernel.tolist(), strict=True)
        ),
        frozenset(drops),
        {at: tuple(save for _, _, save in sorted(entries)) for at, entries in prefetches.items()},
        tuple(ahead),
    )
