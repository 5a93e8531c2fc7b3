"""G10 (Zhang et al., MICRO 2023, sections 4.3 and 4.4): smart eviction, then eager prefetch.

Where the paper leaves something open, this follows the artifact that made its figures:

- An eviction's benefit is the bytes times the seconds above the budget, between the moments at which half
  of the copy out is done and half of the copy back; its cost is not divided by, for it takes the disk
  as long as the tensor is large, and large tensors would lose their preference.
- What is above the budget after Algorithm 1 is evicted by page faults: to the host while it has room, back
  on demand. Here the victims are planned, by whole tensors, so that the device always suffices.

The artifact differs from the paper in two ways (`as_artifact`); `optimal` begins from such a plan, too:

- A period counts only if it is SAFETY times as long as the copy.
- The host is used where nothing at all is left of the disk's link in any kernel that the copy would fill; so
  what is copied within one kernel goes to the host, too. In the paper, where nothing is left of it while the
  copy would run.
"""

from __future__ import annotations

import heapq

import numpy as np

from penstock.core.columns import FloatArray
from penstock.core.hardware import Hardware
from penstock.core.plan import Evict
from penstock.core.trace import Trace
from penstock.planners.problem import Decision, Problem
from penstock.planners.rules import (
    FreeBytes,
    add_cyclic,
    cyclic_slices,
    evict_further,
    eviction,
    prefetch_ahead,
    unrolled,
)

_EXACT = 1 - 1e-9  # transfers that end with a kernel, up to rounding, end with it
SAFETY = 2.5  # of a period's length over the time of one copy: there, back, and half as much again


def g10(
    problem: Problem,
    tiers: tuple[str, ...] = ("disk", "host"),
    spill: tuple[str, ...] = ("host", "disk"),
    *,
    as_artifact: bool = False,
) -> Decision:
    """Algorithm 1 over ``tiers``; what it leaves goes to the first of ``spill`` with room."""
    selection = _Selection(problem, tiers, as_artifact)
    selection.run()
    chosen = [evict for evict, _, _ in selection.chosen]
    further = evict_further(selection.room, selection.taken, chosen, spill)
    if not chosen and not further:
        return Decision()
    # Eager prefetch (section 4.4): in the order of the latest safe moments, each as early as memory allows,
    # but not before its copy is complete.
    order = sorted(selection.chosen, key=lambda entry: (entry[2], entry[0].end, entry[0].tensor))
    evictions = [evict for evict, _, _ in order] + further
    latest = [back for _, _, back in order] + [evict.end for evict in further]
    earliest = [min(away + 1, back) for _, away, back in order] + [evict.end for evict in further]
    return Decision(
        evictions=prefetch_ahead(problem.trace, evictions, latest, problem.budget_bytes, earliest)
    )


# What evicting one period would bring now, negative so that the best sorts first: bytes * seconds above the
# budget, and of the whole period. And the number of the period.
Offer = tuple[float, float, int]


class _Selection:
    """Algorithm 1, and the three states that it tracks: the periods, the memory and the links.

    resident   [K] device bytes, copies taking their time
    chosen     eviction, first kernel that finds it away, kernel at which its read starts at the latest
    """

    def __init__(self, problem: Problem, tiers: tuple[str, ...], as_artifact: bool) -> None:
        self.as_artifact = as_artifact
        self.trace, self.hardware = problem.trace, problem.hardware
        self.budget_bytes = problem.budget_bytes
        self.periods = self.trace.periods
        self.room = FreeBytes(problem)
        tiers = self.tiers = tuple(tier for tier in tiers if tier in self.room.free)
        self.traffic = Traffic(self.trace, self.hardware, tiers)
        self.resident = self.trace.live_bytes.copy()
        self.taken = np.zeros(len(self.periods), dtype=np.bool_)
        self.chosen: list[tuple[Evict, int, int]] = []
        clock = unrolled(self.trace.kernel_time_s)
        self.length_s: FloatArray = clock[self.periods.end] - clock[self.periods.begin]
        sizes = self.periods.size_bytes.tolist()
        self.write_s = {tier: [self.hardware.evict_s(tier, size) for size in sizes] for tier in tiers}
        self.read_s = {tier: [self.hardware.prefetch_s(tier, size) for size in sizes] for tier in tiers}
        self._above = self._seconds_above()

    def run(self) -> None:
        """Take the best offer until nothing is above the budget, or no offer helps.

        An offer only gets worse as others are taken: the best of the old ones is the best of all if
        it is still ahead when recomputed.
        """
        periods = range(len(self.periods)) if self.tiers else ()
        heap = [offer for index in periods if (offer := self._offer(index)) is not None]
        heapq.heapify(heap)
        while heap and self._above[-1] > 0:
            offer = self._offer(heapq.heappop(heap)[2])
            if offer is None:
                continue
            if heap and heap[0] < offer:
                heapq.heappush(heap, offer)
            else:
                self._decide(offer[2])

    def _seconds_above(self) -> FloatArray:
        above = np.where(self.resident > self.budget_bytes, self.traffic.duration_s, 0.0)
        return unrolled(above)

    def _offer(self, index: int) -> Offer | None:
        tier, begin, end = self.tiers[0], int(self.periods.begin[index]), int(self.periods.end[index])
        half_out = self.traffic.away_from(tier, begin, self.write_s[tier][index] / 2)
        half_back = self.traffic.back_from(tier, end, self.read_s[tier][index] / 2)
        if half_out >= half_back:
            return None
        size = int(self.periods.size_bytes[index])
        benefit = size * float(self._above[half_back] - self._above[half_out])
        return (-benefit, -size * float(self.length_s[index]), index) if benefit > 0 else None

    def _decide(self, index: int) -> None:
        """Give the period to a tier, or pass it over."""
        tier = self._tier(index)
        if tier is None:
            return
        evict = eviction(self.trace, index, tier)
        away = max(self.traffic.away_from(tier, evict.after + 1, self.write_s[tier][index]), evict.begin)
        back = min(self.traffic.back_from(tier, evict.end, self.read_s[tier][index]), evict.end)
        if away >= back or not self.room.fits(tier, evict):
            return
        size = int(self.periods.size_bytes[index])
        self.taken[index] = True
        self.room.take(tier, evict)
        self.traffic.write(tier, size, evict.after + 1)
        self.traffic.read(tier, size, evict.end)
        add_cyclic(self.resident, away, back, -size)
        self.chosen.append((evict, away, back))
        self._above = self._seconds_above()

    def _tier(self, index: int) -> str | None:
        """The first tier whose link the period is long enough for, and has something left of."""
        safety = SAFETY if self.as_artifact else 0.0
        tiers = [tier for tier in self.tiers if self.length_s[index] > safety * self.write_s[tier][index]]
        if len(tiers) < 2:
            return tiers[0] if tiers else None
        first, *others = tiers
        begin = int(self.periods.begin[index])
        if not self.traffic.is_full(first, begin, self.write_s[first][index], self.as_artifact):
            return first
        other = self.room.first(others, eviction(self.trace, index, others[0]))
        return other or first


class Traffic:
    """The seconds for which each link is still free during each kernel, if kernels never wait: the estimate
    with which G10 chooses (section 4.3).

    Transfers to the disk also use the bus where it is shared, for as long as they would take alone.
    """

    def __init__(self, trace: Trace, hardware: Hardware, tiers: tuple[str, ...]) -> None:
        self.kernels, self.hardware = trace.kernels, hardware
        # A kernel that takes no time still separates those before it from those after.
        self.duration_s = trace.kernel_time_s + 1e-12 * (trace.ideal_s or 1.0)
        links_of = (hardware.evict_links, hardware.prefetch_links)
        routes = [links(tier) for tier in tiers for links in links_of]
        self.free_s = {link: self.duration_s.copy() for links in routes for link in links}
        self.alone_s = unrolled(self.duration_s)
        self.sums_s = {link: unrolled(free) for link, free in self.free_s.items()}

    def away_from(self, tier: str, begin: int, write_s: float) -> int:
        """The first kernel that finds a copy complete which starts at kernel ``begin``. Two iterations after
        the first kernel and later is never."""
        sums = self.sums_s[self.hardware.evict_links(tier)[-1]]
        return int(np.searchsorted(sums, sums[begin] + write_s * _EXACT))

    def back_from(self, tier: str, end: int, read_s: float) -> int:
        """The last kernel at which a read can start that kernel ``end`` needs; negative for never."""
        sums = self.sums_s[self.hardware.prefetch_links(tier)[-1]]
        return int(np.searchsorted(sums, sums[end] - read_s * _EXACT, side="right")) - 1

    def is_full(self, tier: str, begin: int, write_s: float, whole: bool = False) -> bool:
        """Whether nothing is left of the links to ``tier`` in any kernel during which a copy from kernel
        ``begin`` on would run, if it ran alone.

        whole   kernels that it would fill to the end count alone: one that fills none finds the links full
        """
        link = self.hardware.evict_links(tier)[-1]
        last = int(np.searchsorted(self.alone_s, self.alone_s[begin] + write_s)) - whole
        within = cyclic_slices(begin, min(max(last, begin), begin + self.kernels), self.kernels)
        return sum(float(self.free_s[link][part].sum()) for part in within) <= 1e-9 * write_s

    def write(self, tier: str, size_bytes: int, begin: int) -> None:
        """Reserve the links to ``tier`` for a copy that starts at kernel ``begin``."""
        *bus, own = self.hardware.evict_links(tier)
        need_s = self.hardware.transfer_s(own, size_bytes)
        sums = self.sums_s[own]
        used = np.diff(np.minimum(np.maximum(sums - sums[begin], 0.0), need_s))
        self._use(own, bus, used, size_bytes, need_s)

    def read(self, tier: str, size_bytes: int, end: int) -> None:
        """Reserve the links back for a read that ends when kernel ``end`` starts, as late as can be."""
        *bus, own = self.hardware.prefetch_links(tier)
        need_s = self.hardware.transfer_s(own, size_bytes)
        sums = self.sums_s[own]
        used = -np.diff(np.minimum(np.maximum(sums[end] - sums, 0.0), need_s))
        self._use(own, bus, used, size_bytes, need_s)

    def _use(self, own: str, bus: list[str], used_s: FloatArray, size_bytes: int, need_s: float) -> None:
        folded = used_s.reshape(2, -1).sum(axis=0)
        for link in (own, *bus):
            share = self.hardware.transfer_s(link, size_bytes) / need_s if need_s > 0 else 0.0
            self.free_s[link] = np.maximum(self.free_s[link] - share * folded, 0.0)
            self.sums_s[link] = unrolled(self.free_s[link])
