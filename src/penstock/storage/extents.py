"""Where in the spill space each tensor lies: pure bookkeeping, no file.

Tensors leave memory in one order and come back in about the reverse, pass after pass. Space is
therefore given out in address order from where the last allocation ended (next fit), which makes a
pass write sequentially (FlashNeuron section 3.4).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

from penstock.errors import InvalidArgument, SpillSpaceFull
from penstock.storage.aligned import align_up
from penstock.units import format_bytes, format_bytes_up

ALIGNMENT_BYTES = 4096


class Extent(NamedTuple):
    """Spill space ``[offset, offset + size_bytes)``.

    space   which of several spaces it is of
    """

    offset: int
    size_bytes: int
    space: str = ""

    @property
    def end(self) -> int:
        return self.offset + self.size_bytes


class Extents:
    """Gives out disjoint extents of one space, in multiples of `ALIGNMENT_BYTES`.

    capacity_bytes   where the space ends; None for no end
    space            name given to every extent
    """

    def __init__(self, capacity_bytes: int | None = None, space: str = "") -> None:
        if capacity_bytes is not None and capacity_bytes < 0:
            raise InvalidArgument(f"a space of {capacity_bytes} bytes cannot be: give zero or more")
        self.capacity_bytes = capacity_bytes
        self.space = space
        self.used_bytes = 0
        self.end = 0  # of the highest byte ever given out
        # Free ranges below `end`, ascending: range i is [_starts[i], _ends[i]).
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._next = 0  # where the last allocation ended
        self._live: dict[int, int] = {}

    def allocate(self, size_bytes: int) -> Extent:
        """An extent of at least ``size_bytes``. Raises SpillSpaceFull where none fits."""
        if size_bytes <= 0:
            raise InvalidArgument(f"an extent of {size_bytes} bytes cannot be: give a size above zero")
        size = align_up(size_bytes, ALIGNMENT_BYTES)
        offset = self._take(size)
        self._next = offset + size
        self.used_bytes += size
        self._live[offset] = size
        return Extent(offset, size, self.space)

    def release(self, extent: Extent) -> None:
        """Take an extent back. Raises InvalidArgument if it was not given out, or was released."""
        if extent.space != self.space or self._live.get(extent.offset) != extent.size_bytes:
            raise InvalidArgument(f"{extent} is not in use: release an extent once, where it was allocated")
        del self._live[extent.offset]
        self.used_bytes -= extent.size_bytes
        self._give(extent.offset, extent.end)

    def free_ranges(self) -> list[tuple[int, int]]:
        """Free [start, end) below `end`, ascending, disjoint, never adjacent."""
        return list(zip(self._starts, self._ends, strict=True))

    def _take(self, size: int) -> int:
        first = bisect_right(self._ends, self._next)  # the range that holds _next, or the one after
        if first < len(self._starts) and self._starts[first] < self._next:
            if self._ends[first] - self._next >= size:
                return self._carve(first, self._next, size)
            first += 1
        for index in (*range(first, len(self._starts)), *range(min(first, len(self._starts)))):
            if self._ends[index] - self._starts[index] >= size:
                return self._carve(index, self._starts[index], size)
        return self._grow(size)

    def _carve(self, index: int, offset: int, size: int) -> int:
        start, end = self._starts.pop(index), self._ends.pop(index)
        for low, high in ((offset + size, end), (start, offset)):
            if low < high:
                self._starts.insert(index, low)
                self._ends.insert(index, high)
        return offset

    def _grow(self, size: int) -> int:
        start = self._starts[-1] if self._ends and self._ends[-1] == self.end else self.end
        if self.capacity_bytes is not None and start + size > self.capacity_bytes:
            largest = max(self.capacity_bytes - start, *(b - a for a, b in self.free_ranges()), 0)
            raise SpillSpaceFull(
                f"{format_bytes_up(size)} do not fit on disk: of the disk budget of "
                f"{format_bytes(self.capacity_bytes)}, {format_bytes(self.used_bytes)} are in use and the "
                f"largest free extent has {format_bytes(largest)}. Raise disk_budget by "
                f"{format_bytes_up(start + size - self.capacity_bytes)}, or evict less."
            )
        if start < self.end:
            self._starts.pop()
            self._ends.pop()
        self.end = start + size
        return start

    def _give(self, start: int, end: int) -> None:
        index = bisect_left(self._starts, start)
        if index < len(self._starts) and self._starts[index] == end:
            end = self._ends[index]
            del self._starts[index], self._ends[index]
        if index > 0 and self._ends[index - 1] == start:
            start = self._starts[index - 1]
            del self._starts[index - 1], self._ends[index - 1]
            index -= 1
        self._starts.insert(index, start)
        self._ends.insert(index, end)
