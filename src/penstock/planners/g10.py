"""G10 (sections 4.3 and 4.4): evict by benefit over cost, then prefetch as early as memory allows.

Three things go beyond the paper. Inactive periods of about the same ratio are taken longest first:
their copies are made early and needed late. A period is worth less where its copy would be complete
late. And Algorithm 1 runs several times, with either tier first and with such choices made either
way; the simulator picks the best, and a short search improves it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np

from penstock.core.hardware import Hardware
from penstock.core.plan import Evict
from penstock.core.trace import FloatArray, Trace
from penstock.planners.prefetch import bring_back
from penstock.planners.room import Room, candidates, spill_full
from penstock.planners.search import GOOD_ENOUGH, replay, search

ALIKE = (1.05, 4.0)  # ratios within this factor count as the same


def g10(trace: Trace, budget_bytes: int, hardware: Hardware) -> tuple[Evict, ...]:
    """The plan with the least predicted time among those of Algorithm 1, improved."""
    best: tuple[Evict, ...] = ()
    best_s = math.inf
    tiers = tuple(Room(trace, hardware).free)
    orders = dict.fromkeys((tiers, tiers[::-1]))
    for order, punctual, alike in product(orders, (False, True), ALIKE):
        chosen = _Selection(trace, budget_bytes, hardware, order, alike).run(punctual)
        plan = bring_back(trace, chosen, budget_bytes, hardware, trace.start_s, early=True)
        iteration_s = replay(trace, plan, budget_bytes, hardware).iteration_s
        if iteration_s < best_s:
            best, best_s = plan, iteration_s
        if best_s <= trace.ideal_s * GOOD_ENOUGH:
            break
    return search(trace, best, budget_bytes, hardware)


class _Offer(NamedTuple):
    """What one eviction would bring now. Offers sort best first.

    usable    first kernel at which the copy is complete and its memory free
    write_s   how long the copy takes, 0 when the tensor has one already
    """

    rank: int
    idle_s: float  # negative: longer first
    option: int
    tier: str
    usable: int
    write_s: float


class _Selection:
    """Algorithm 1: the periods not taken, and the three states it tracks.

    over   [K] bytes above the budget, negative where there is room, if copies took no time
    late   [K] the same when each copy takes its turn on the link
    free   by link: [K + 1] seconds for which the link is still free before each kernel starts
    """

    def __init__(
        self, trace: Trace, budget_bytes: int, hardware: Hardware, tiers: Sequence[str], alike: float
    ) -> None:
        self.trace, self.hardware, self.budget_bytes = trace, hardware, budget_bytes
        self.tiers, self.alike = tiers, alike
        self.room = Room(trace, hardware)
        self.options = candidates(trace)
        self.siblings: dict[int, list[int]] = {}
        for index, option in enumerate(self.options):
            self.siblings.setdefault(option.tensor, []).append(index)
        self.over = trace.live_bytes - budget_bytes
        self.late = self.over.copy()
        # A kernel that takes no time still has to fit.
        self.duration_s = trace.kernel_time_s + 1e-9 * (trace.ideal_s or 1.0)
        starts = np.concatenate([[0.0], np.cumsum(self.duration_s)])
        self.free = {link: starts.copy() for tier in tiers for link in hardware.evict_links(tier)}
        sizes = [int(trace.tensor_bytes[option.tensor]) for option in self.options]
        self.write_s = {tier: [hardware.evict_s(tier, size) for size in sizes] for tier in tiers}
        self.read_s = {tier: [hardware.prefetch_s(tier, size) for size in sizes] for tier in tiers}
        self.taken: dict[int, tuple[Evict, int]] = {}  # option -> eviction, usable

    def run(self, punctual: bool) -> list[Evict]:
        """Take periods until memory suffices; with ``punctual``, first those that are free in time."""
        for by_time in (True, False) if punctual else (False,):
            self._greedy(by_time)
        if self.over.max(initial=0) > 0:
            chosen = [evict for evict, _ in self.taken.values()]
            raise spill_full(self.trace, chosen, self.budget_bytes, self.hardware)
        return self._needed()

    def _greedy(self, by_time: bool) -> None:
        """Take the best offer until nothing is over the budget, or no offer helps.

        An offer only gets worse as others are taken, unless its tensor gains a copy. So the best
        of the old offers is the best of all if it is still ahead when made anew.
        """
        mass = np.maximum(self.late if by_time else self.over, 0).astype(np.float64)
        offers = [self._offer(option, mass, by_time) for option in range(len(self.options))]
        heap = [offer for offer in offers if offer]
        heapq.heapify(heap)
        while heap and mass.any():
            offer = self._offer(heapq.heappop(heap).option, mass, by_time)
            if offer is None:
                continue
            if heap and heap[0] < offer:
                heapq.heappush(heap, offer)
                continue
            evict = self._take(offer)
            pressure = self.late if by_time else self.over
            mass[evict.begin : evict.end] = np.maximum(pressure[evict.begin : evict.end], 0)
            for sibling in self.siblings[evict.tensor]:
                if renewed := self._offer(sibling, mass, by_time):
                    heapq.heappush(heap, renewed)

    def _offer(self, index: int, mass: FloatArray, by_time: bool) -> _Offer | None:
        """Benefit over cost: bytes * seconds above the budget, per second on the links."""
        option = self.options[index]
        if index in self.taken:
            return None
        size = int(self.trace.tensor_bytes[option.tensor])
        copied = option.tensor in self.room.home
        found: tuple[int, float, str] | None = None
        for tier in sorted(self.room.tiers(option.tensor, option.after), key=self.tiers.index):
            write_s = 0.0 if copied else self.write_s[tier][index]
            usable = option.begin if copied else self._usable(option, tier, write_s)
            if found is None or usable < found[0]:
                found = (usable, write_s, tier)
            if usable == option.begin:
                break
        if found is None:
            return None
        usable, write_s, tier = found
        since = usable if by_time else option.begin
        benefit = np.minimum(mass[since : option.end], size) @ self.duration_s[since : option.end]
        if benefit <= 0:
            return None
        cost_s = write_s + self.read_s[tier][index]
        ratio = math.log(benefit / max(cost_s, 1e-12)) / math.log(self.alike)
        idle_s = self.trace.start_s[option.end] - self.trace.start_s[option.begin]
        return _Offer(-round(ratio), -float(idle_s), index, tier, usable, write_s)

    def _usable(self, option: Evict, tier: str, write_s: float) -> int:
        """The first kernel of the period that finds the copy complete; its end where none does."""
        done = option.begin
        for link in self.hardware.evict_links(tier):
            free = self.free[link]
            done = max(done, int(np.searchsorted(free, free[option.after + 1] + write_s)))
        return min(done, option.end)

    def _take(self, offer: _Offer) -> Evict:
        option = self.options[offer.option]
        size = self.trace.tensor_bytes[option.tensor]
        for link in self.hardware.evict_links(offer.tier):
            free = self.free[link][option.after + 1 :]
            free[:] = free[0] + np.maximum(free - free[0] - offer.write_s, 0)
        self.room.take(offer.tier, option.tensor, option.after)
        evict = replace(option, tier=offer.tier)
        self.taken[offer.option] = (evict, offer.usable)
        self.over[option.begin : option.end] -= size
        self.late[offer.usable : option.end] -= size
        return evict

    def _needed(self) -> list[Evict]:
        """What was taken, without what later choices have made unnecessary."""
        kept = []
        for evict, usable in reversed(self.taken.values()):
            size = self.trace.tensor_bytes[evict.tensor]
            over, late = self.over[evict.begin : evict.end], self.late[usable : evict.end]
            if over.max() + size <= 0 and late.max(initial=-size) + size <= 0:
                over += size
                late += size
            else:
                kept.append(evict)
        return kept
