"""Which tier has room for a copy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from penstock.core.columns import IntArray
from penstock.core.hardware import Hardware
from penstock.core.memory_profile import resident_bytes
from penstock.core.plan import Evict
from penstock.core.trace import Trace
from penstock.errors import SpillSpaceFull
from penstock.planners.heuristics import cyclic
from penstock.units import format_bytes, format_bytes_up

SPILL_TIERS = ("disk", "host")


class Room:
    """Free bytes of each tier during each kernel, as copies are given their places.

    A copy stays while a later eviction can use it again: from the first of the tensor's evictions to the
    kernel that ends the last. That of a persistent tensor that leaves more than once, or that nobody
    writes, is taken to stay throughout.
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
