"""Which tier has room for a copy, and what leaves too where a policy leaves the device above its budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from penstock.core.columns import BoolArray, IntArray
from penstock.core.hardware import Hardware
from penstock.core.memory_profile import resident_bytes
from penstock.core.plan import Evict
from penstock.core.trace import Trace
from penstock.errors import SpillSpaceFull
from penstock.planners.heuristics import cyclic
from penstock.planners.heuristics.vitality import Candidates
from penstock.units import format_bytes, format_bytes_up

SPILL_TIERS = ("disk", "host")
NEGLIGIBLE = 256  # a tensor below this part of what is missing leaves only where larger ones do not do


class Room:
    """Free bytes of each tier during each kernel, as copies are given their places.

    A copy stays while a later eviction can use it again: from the first of the tensor's evictions to the
    kernel that ends the last. That of a persistent tensor that leaves more than once, or that no
    kernel writes, is taken to stay throughout.
    """

    def __init__(self, trace: Trace, hardware: Hardware) -> None:
        self.trace = trace
        self.free: dict[str, IntArray] = {
            tier: np.full(trace.kernels, hardware.capacity_bytes(tier), dtype=np.int64)
            for tier in SPILL_TIERS
            if hardware.capacity_bytes(tier) > 0
        }
        everything = int(trace.tensor_bytes.sum())
        self.ample = {tier for tier in self.free if hardware.capacity_bytes(tier) >= everything}
        self.home: dict[tuple[str, int], tuple[int, int]] = {}  # the kernels during which it is there

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers there are, the disk first."""
        return tuple(self.free)

    def fits(self, tier: str, evict: Evict) -> bool:
        """Whether ``tier`` has room for the copy that ``evict`` needs."""
        if tier in self.ample:
            return True
        if tier not in self.free:
            return False
        free, size = self.free[tier], self.trace.tensor_bytes[evict.tensor]
        return all(bool((free[part] >= size).all()) for part in self._added(tier, evict))

    def take(self, tier: str, evict: Evict) -> None:
        size = self.trace.tensor_bytes[evict.tensor]
        for part in self._added(tier, evict):
            self.free[tier][part] -= size
        self.home[tier, evict.tensor] = self._stay(tier, evict)

    def first(self, tiers: Iterable[str], evict: Evict) -> str | None:
        """The first of ``tiers`` with room; None where none has."""
        return next((tier for tier in tiers if self.fits(tier, evict)), None)

    def _stay(self, tier: str, evict: Evict) -> tuple[int, int]:
        """The kernels during which the tensor's copy is there once ``evict`` is taken."""
        known = self.home.get((tier, evict.tensor))
        begin, end = evict.after + 1, evict.end + 1  # what returns is read until then
        if self.trace.tensor_persistent[evict.tensor]:
            stays = known is not None or len(self.trace.writers[evict.tensor]) == 0
            return (0, self.trace.kernels) if stays else (begin, end)
        return (begin, end) if known is None else (min(begin, known[0]), max(end, known[1]))

    def _added(self, tier: str, evict: Evict) -> list[slice]:
        """The kernels during which the copy takes room that the tensor has not taken yet."""
        count = self.trace.kernels
        begin, end = self._stay(tier, evict)
        known = self.home.get((tier, evict.tensor))
        if known is None:
            return list(cyclic.parts(begin, end, count))
        taken = np.zeros(count, dtype=np.bool_)
        for part in cyclic.parts(*known, count):
            taken[part] = True
        wanted = np.zeros(count + 2, dtype=np.int8)
        for part in cyclic.parts(begin, end, count):
            wanted[1:-1][part] = 1
        wanted[1:-1][taken] = 0
        edges = np.flatnonzero(np.diff(wanted)).tolist()
        return [slice(low, high) for low, high in zip(edges[::2], edges[1::2], strict=True)]


def spill_full(
    trace: Trace, evictions: Iterable[Evict], budget_bytes: int, hardware: Hardware
) -> SpillSpaceFull:
    """The error for memory that is still short when no tier has room for another tensor."""
    kernel = int(
        resident_bytes(trace, [replace(evict, prefetch_at=evict.end) for evict in evictions]).argmax()
    )
    leave = int(trace.live_bytes[kernel]) - budget_bytes
    return SpillSpaceFull(
        f"{format_bytes_up(leave)} have to leave the device before kernel `{trace.kernel_name[kernel]}` to "
        f"keep within {format_bytes(budget_bytes)}, and copies stay until they are of no more use: the disk "
        f"budget of {format_bytes(hardware.disk_bytes)} and the host budget of "
        f"{format_bytes(hardware.host_bytes)} do not hold them. Raise either, or raise the device budget."
    )


def evict_further(
    options: Candidates,
    taken: BoolArray,
    evictions: Sequence[Evict],
    room: Room,
    budget_bytes: int,
    hardware: Hardware,
    tiers: Sequence[str],
) -> list[Evict]:
    """Further evictions with which no kernel needs more than ``budget_bytes``, all returning on demand: the
    tensor needed last goes first (Belady).

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
