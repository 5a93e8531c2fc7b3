"""A managed stretch of device memory: which block is where, and which gaps are left (moDNN section 3.3)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

import numpy as np

from penstock.core.columns import FloatArray, IntArray


class ManagedSpace:
    """Blocks at addresses from 0 to ``size_bytes``, each with an owner's number, and the gaps between."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.used_bytes = 0
        self._blocks: list[tuple[int, int, int]] = []  # address, end, owner; ascending
        self._gaps: list[tuple[int, int]] = [(0, size_bytes)] if size_bytes else []  # address, end; ascending
        self._block_of: dict[int, tuple[int, int, int]] = {}  # by owner

    def __contains__(self, owner: int) -> bool:
        return owner in self._block_of

    @property
    def free_bytes(self) -> int:
        return self.size_bytes - self.used_bytes

    @property
    def largest_gap(self) -> int:
        return max((end - address for address, end in self._gaps), default=0)

    def has_gap(self, size_bytes: int) -> bool:
        return any(end - address >= size_bytes for address, end in self._gaps)

    def allocate(self, owner: int, size_bytes: int, *, exact: bool = True, high: bool = False) -> bool:
        """Take the first gap that fits; False where none does.

        exact   one of exactly the size comes before all others
        high    from the highest address down, instead of from the lowest up
        """
        found = -1
        for index in reversed(range(len(self._gaps))) if high else range(len(self._gaps)):
            length = self._gaps[index][1] - self._gaps[index][0]
            if length == size_bytes or (length > size_bytes and not exact):
                found = index
                break
            if length > size_bytes and found < 0:
                found = index
        if found < 0:
            return False
        address, end = self._gaps[found]
        block = (end - size_bytes, end, owner) if high else (address, address + size_bytes, owner)
        if end - address == size_bytes:
            del self._gaps[found]
        else:
            self._gaps[found] = (address, block[0]) if high else (block[1], end)
        insort(self._blocks, block)
        self._block_of[owner] = block
        self.used_bytes += size_bytes
        return True

    def free(self, owner: int) -> None:
        index = bisect_left(self._blocks, self._block_of.pop(owner))
        address, end, _ = self._blocks.pop(index)
        self.used_bytes -= end - address
        place = bisect_right(self._gaps, (address, end))
        if place < len(self._gaps) and self._gaps[place][0] == end:
            end = self._gaps.pop(place)[1]
        if place and self._gaps[place - 1][1] == address:
            address = self._gaps.pop(place - 1)[0]
            place -= 1
        self._gaps.insert(place, (address, end))

    def compact(self) -> None:
        """Move every block down, so that what is free is one gap."""
        address, before, self._blocks = 0, self._blocks, []
        for start, end, owner in before:
            self._block_of[owner] = (address, address + end - start, owner)
            self._blocks.append(self._block_of[owner])
            address += end - start
        self._gaps = [(address, self.size_bytes)] if address < self.size_bytes else []

    def owners(self) -> list[int]:
        """In the order of their addresses."""
        return [owner for _, _, owner in self._blocks]

    def window(
        self, size_bytes: int, write_s: FloatArray, until: IntArray, hidden_s: float
    ) -> tuple[list[int], float] | None:
        """The contiguous blocks that had best leave to make a gap of ``size_bytes``, and the delay it costs.

        moDNN section 5.2.1: each block in turn is the first of a scheme, those at higher addresses follow
        until the gap is large enough, and the scheme of the least delay is taken; among equals the one
        whose blocks are needed latest. None where there is no scheme.

        write_s   by owner: seconds to copy it out, NaN for one that must stay
        until     by owner: the kernel that needs it again
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
