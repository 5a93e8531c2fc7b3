"""Which tensors could leave, and which tier has room for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.hardware import Hardware
from penstock.core.plan import Evict
from penstock.core.pressure import resident_bytes, tier_bytes, writes
from penstock.core.trace import IntArray, Trace
from penstock.errors import SpillSpaceFull
from penstock.units import format_bytes, format_bytes_up

SPILL_TIERS = ("disk", "host")


def candidates(trace: Trace) -> list[Evict]:
    """An eviction for each inactive period: copied once complete, back when needed, tier still open."""
    found = []
    for tensor, begin, end, ready in trace.inactive_periods:
        edits = [kernel for kernel in writes(trace, tensor) if ready < kernel < begin]
        found.append(Evict(tensor, max([ready, *edits]), begin, end, prefetch_at=end, tier=""))
    return found


def fits(trace: Trace, evictions: Sequence[Evict], budget_bytes: int, hardware: Hardware) -> bool:
    """Every tier holds what it has to, if copies take no time."""
    return int(resident_bytes(trace, evictions).max(initial=0)) <= budget_bytes and all(
        int(occupied.max(initial=0)) <= hardware.capacity_bytes(tier)
        for tier, occupied in tier_bytes(trace, evictions).items()
    )


class Room:
    """Free bytes of each tier during each kernel, as tensors are given their places.

    A tensor that leaves more than once always goes to the same tier, so that a copy that is still
    true need not be written again.
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
        self.home: dict[int, tuple[str, int]] = {}  # tensor -> tier, first kernel its copy is there

    def tiers(self, tensor: int, after: int) -> list[str]:
        """The tiers with room for a copy of ``tensor`` made after kernel ``after``."""
        tiers = [self.home[tensor][0]] if tensor in self.home else list(self.free)
        return [tier for tier in tiers if tier in self.ample or self._fits(tier, tensor, after)]

    def take(self, tier: str, tensor: int, after: int) -> None:
        since, until = self._added(tensor, after)
        self.free[tier][since:until] -= self.trace.tensor_bytes[tensor]
        self.home[tensor] = (tier, min(since, until))

    def _fits(self, tier: str, tensor: int, after: int) -> bool:
        since, until = self._added(tensor, after)
        return bool((self.free[tier][since:until] >= self.trace.tensor_bytes[tensor]).all())

    def _added(self, tensor: int, after: int) -> tuple[int, int]:
        """The kernels during which the copy takes room that the tensor has not taken yet."""
        until = self.home[tensor][1] if tensor in self.home else int(self.trace.tensor_death[tensor])
        return min(after + 1, until), until


def spill_full(
    trace: Trace, evictions: Sequence[Evict], budget_bytes: int, hardware: Hardware
) -> SpillSpaceFull:
    """The error for memory that is still short when no tier has room for another tensor."""
    kernel = int(resident_bytes(trace, evictions).argmax())
    leave = int(trace.live_bytes[kernel]) - budget_bytes
    return SpillSpaceFull(
        f"{format_bytes_up(leave)} have to leave the device before kernel `{trace.kernel_name[kernel]}` to "
        f"keep within {format_bytes(budget_bytes)}, and copies stay until their tensors die: the disk budget "
        f"of {format_bytes(hardware.disk_bytes)} and the host budget of {format_bytes(hardware.host_bytes)} "
        "do not hold them. Raise either, or raise the device budget."
    )
