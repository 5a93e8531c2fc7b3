"""Memory of the policy `modnn`: a managed range of device memory (section 3.3), and the tiers below it."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from functools import cache

import numpy as np

from penstock.core.columns import FloatArray, IntArray
from penstock.core.hardware import LINKS, Hardware
from penstock.core.trace import Trace
from penstock.errors import SpillSpaceFull
from penstock.planners.problem import spill_full
from penstock.units import format_bytes, format_bytes_up


class ManagedSpace:
    """An allocator of the addresses from 0 to ``size_bytes``: blocks, by owner, and the gaps between them."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._blocks: list[tuple[int, int, int]] = []  # address, end, owner; ascending
        self._block_of: dict[int, tuple[int, int, int]] = {}  # by owner

    def __contains__(self, owner: int) -> bool:
        return owner in self._block_of

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Address and end of each gap, ascending."""
        since = 0
        for address, end, _ in self._blocks:
            if since < address < end:
                yield since, address
            if address < end:
                since = end
        if since < self.size_bytes:
            yield since, self.size_bytes

    @property
    def free_bytes(self) -> int:
        return sum(end - address for address, end in self.gaps())

    @property
    def largest_gap(self) -> int:
        return max((end - address for address, end in self.gaps()), default=0)

    def allocate(self, owner: int, size_bytes: int, *, exact: bool = True, high: bool = False) -> bool:
        """Take the first gap that fits; False where none does.

        exact   prefer a gap of exactly this size
        high    search from the highest address down
        """
        fitting = [(address, end) for address, end in self.gaps() if end - address >= size_bytes]
        if not fitting:
            return False
        if high:
            fitting.reverse()
        address, end = next((gap for gap in fitting if exact and gap[1] - gap[0] == size_bytes), fitting[0])
        block = (end - size_bytes, end, owner) if high else (address, address + size_bytes, owner)
        insort(self._blocks, block)
        self._block_of[owner] = block
        return True

    def free(self, owner: int) -> None:
        self._blocks.remove(self._block_of.pop(owner))

    def compact(self) -> None:
        """Move every block down, so that there is one gap."""
        address, before, self._blocks = 0, self._blocks, []
        for start, end, owner in before:
            self._block_of[owner] = (address, address + end - start, owner)
            self._blocks.append(self._block_of[owner])
            address += end - start

    def window(
        self, size_bytes: int, write_s: FloatArray, until: IntArray, hidden_s: float
    ) -> tuple[list[int], float] | None:
        """The contiguous blocks to evict for a gap of ``size_bytes`` with the least delay, and that delay.

        moDNN section 5.2.1: each block in turn is the first of a scheme, those at higher addresses follow
        until the gap is large enough, and the scheme of the least delay is taken; among equals the one
        whose blocks are needed latest. None where there is no scheme.

        write_s   by owner: seconds to copy it out; NaN where it must stay
        until     by owner: the kernel that needs it next
        hidden_s  seconds of copying that cause no delay
        """
        if not self._blocks:
            return None
        table = np.array(self._blocks, dtype=np.int64)
        start, end, owner = table.T
        cost = write_s[owner]
        stays = np.isnan(cost)
        ends = np.concatenate([end, [0]])  # of the block before, 0 before the first
        since = ends[np.arange(len(owner)) - 1]
        following = np.concatenate([start[1:], [self.size_bytes]])
        last = np.searchsorted(following, since + size_bytes)  # of the scheme that begins with each block
        barriers = np.concatenate([[0], np.cumsum(stays)])
        spent = np.concatenate([[0.0], np.cumsum(np.where(stays, 0.0, cost))])
        stop = np.minimum(last + 1, len(owner))
        valid = ~stays & (last < len(owner)) & (barriers[stop] == barriers[:-1])
        first = np.flatnonzero(valid)
        if not len(first):
            return None
        delay = np.maximum(spent[stop[first]] - spent[first] - hidden_s, 0.0)
        least = float(delay.min())
        first = first[delay <= least + 1e-12]
        needed = until[owner]
        soonest = [int(needed[begin : stop[begin]].min()) for begin in first.tolist()]
        begin = int(first[int(np.argmax(soonest))])
        return owner[begin : stop[begin]].tolist(), least


class Tiers:
    """Free space on the host and on the disk, and the transfers decided so far.

    The host comes first. A copy takes space until the kernel that needs it has run; that of a persistent
    tensor always does.
    """

    def __init__(self, trace: Trace, hardware: Hardware) -> None:
        self.trace, self.hardware = trace, hardware
        self.free: dict[str, IntArray] = {
            tier: np.full(trace.kernels, hardware.capacity_bytes(tier), dtype=np.int64)
            for tier in ("host", "disk")
            if hardware.capacity_bytes(tier) > 0
        }
        self.busy_until_s = dict.fromkeys(LINKS, 0.0)
        self._valid: dict[int, str] = {}  # by tensor: tier of its valid copy
        self._home: dict[int, tuple[str, int]] = {}  # by tensor: tier, and until when its copy has space
        self._evict_s, self._prefetch_s = cache(hardware.evict_s), cache(hardware.prefetch_s)

    def choose(self, tensor: int, after: int, end: int) -> str | None:
        """The tier for a copy made after kernel ``after`` that is needed until kernel ``end``, if any."""
        if self._keeps_tier(tensor):
            tier, until = self._home[tensor]
            return tier if self._fits(tier, tensor, until, end) else None
        return next((tier for tier in self.free if self._fits(tier, tensor, after + 1, end)), None)

    def take(self, tier: str, tensor: int, after: int, end: int) -> None:
        """Take the space that `choose` found."""
        since = self._home[tensor][1] if self._keeps_tier(tensor) else after + 1
        since, until = self._span(tensor, since, end)
        self.free[tier][since:until] -= self.trace.tensor_bytes[tensor]
        self._home[tensor] = (tier, max(until, since))
        self._valid[tensor] = tier

    def home(self, tensor: int) -> str:
        return self._home[tensor][0]

    def written(self, tensor: int) -> None:
        """A kernel writes the tensor: its copy is no longer valid."""
        self._valid.pop(tensor, None)

    def write_s(self, tier: str, tensor: int) -> float:
        """Seconds to copy the tensor out; 0 where a copy is still valid."""
        is_valid = self._valid.get(tensor) == tier
        return 0.0 if is_valid else self._evict_s(tier, int(self.trace.tensor_bytes[tensor]))

    def read_s(self, tier: str, tensor: int) -> float:
        return self._prefetch_s(tier, int(self.trace.tensor_bytes[tensor]))

    def write(self, tier: str, tensor: int, ready_s: float, now_s: float) -> float:
        """Copy the tensor out once it is complete and the link is free. Returns when its memory is free."""
        if self._valid.get(tensor) == tier:
            return now_s
        return max(now_s, self._run(self.hardware.evict_links(tier), ready_s, self.write_s(tier, tensor)))

    def read(self, tier: str, tensor: int, from_s: float) -> float:
        """Copy the tensor back. Returns when it is there."""
        return self._run(self.hardware.prefetch_links(tier), from_s, self.read_s(tier, tensor))

    def hidden_s(self, now_s: float) -> float:
        """Seconds that all links out have been idle: copying for as long causes no delay."""
        links = {link for tier in self.free for link in self.hardware.evict_links(tier)}
        return max(now_s - max((self.busy_until_s[link] for link in links), default=now_s), 0.0)

    def reading_until_s(self) -> float:
        return max(self.busy_until_s["host_to_device"], self.busy_until_s["disk_read"])

    def full(self, budget_bytes: int, tensor: int) -> SpillSpaceFull:
        """The error for a tensor, or a workspace, that no eviction can make room for."""
        what = "a workspace"
        if tensor < self.trace.tensors:
            what = f"tensor {tensor} of {format_bytes_up(int(self.trace.tensor_bytes[tensor]))}"
        why = f"the policy 'modnn' finds no room for {what} within {format_bytes(budget_bytes)}"
        return spill_full(self.hardware, why)

    def _keeps_tier(self, tensor: int) -> bool:
        """Whether the next copy goes to the tier of the last one: that is still valid, or keeps its space."""
        if tensor not in self._home:
            return False
        return tensor in self._valid or bool(self.trace.tensor_persistent[tensor])

    def _span(self, tensor: int, since: int, end: int) -> tuple[int, int]:
        """The kernels during which a copy takes room that it has not taken yet."""
        if self.trace.tensor_persistent[tensor]:
            end = self.trace.kernels
            since = 0 if tensor not in self._home else end
        else:
            end = min(end + 1, self.trace.kernels)
        return min(since, end), end

    def _fits(self, tier: str, tensor: int, since: int, end: int) -> bool:
        since, until = self._span(tensor, since, end)
        return bool((self.free[tier][since:until] >= self.trace.tensor_bytes[tensor]).all())

    def _run(self, links: tuple[str, ...], from_s: float, seconds: float) -> float:
        start_s = max(from_s, *(self.busy_until_s[link] for link in links))
        for link in links:
            self.busy_until_s[link] = start_s + seconds
        return start_s + seconds
