"""Allocation of the spill space, and its striping over files. Pure bookkeeping: no file is touched.

Tensors leave memory in one order and come back in about the reverse, pass after pass. Space is
therefore given out in address order from where the last allocation ended (next fit), which makes a
pass write sequentially (FlashNeuron section 3.4).

Of several files, bytes go round in stripes, as in RAID 0, so that one tensor moves at the speed of all
disks. Where a file cannot grow, the others go on without it: from there on a new zone begins.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from penstock.errors import InvalidArgument, SpillSpaceFull
from penstock.storage.aligned import align_up
from penstock.units import format_bytes, format_bytes_up

ALIGNMENT_BYTES = 4096
STRIPE_BYTES = 1 << 20


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
    """Allocates disjoint extents of one space, in multiples of `ALIGNMENT_BYTES`.

    capacity_bytes   where the space ends; None for no end
    space            name given to every extent

    end    of the highest byte ever allocated
    free   [start, end) below, ascending, disjoint, never adjacent
    """

    def __init__(self, capacity_bytes: int | None = None, space: str = "") -> None:
        self.capacity_bytes = capacity_bytes
        self.space = space
        self.used_bytes = self.end = 0
        self.free: list[tuple[int, int]] = []
        self._next = 0  # where the last allocation ended
        self._live: dict[int, int] = {}

    def allocate(self, size_bytes: int) -> Extent:
        """At least ``size_bytes``. Raises SpillSpaceFull where none fits."""
        if size_bytes <= 0:
            raise InvalidArgument(f"an extent of {size_bytes} bytes cannot be: give a size above zero")
        size = align_up(size_bytes, ALIGNMENT_BYTES)
        offset = self._take(size)
        self._next = offset + size
        self.used_bytes += size
        self._live[offset] = size
        return Extent(offset, size, self.space)

    def release(self, extent: Extent) -> None:
        """Free an extent. Raises InvalidArgument if it was not allocated, or was released."""
        if extent.space != self.space or self._live.get(extent.offset) != extent.size_bytes:
            raise InvalidArgument(f"{extent} is not in use: release an extent once, where it was allocated")
        del self._live[extent.offset]
        self.used_bytes -= extent.size_bytes
        self._give(extent.offset, extent.end)

    def _take(self, size: int) -> int:
        first = bisect_left(self.free, (self._next,))  # the range before it may hold `_next`
        if first and self.free[first - 1][1] - self._next >= size:
            return self._carve(first - 1, self._next, size)
        for index in (*range(first, len(self.free)), *range(first)):
            start, end = self.free[index]
            if end - start >= size:
                return self._carve(index, start, size)
        return self._grow(size)

    def _carve(self, index: int, offset: int, size: int) -> int:
        start, end = self.free[index]
        rest = ((start, offset), (offset + size, end))
        self.free[index : index + 1] = [each for each in rest if each[0] < each[1]]
        return offset

    def _grow(self, size: int) -> int:
        start = self.free[-1][0] if self.free and self.free[-1][1] == self.end else self.end
        if self.capacity_bytes is not None and start + size > self.capacity_bytes:
            largest = max(self.capacity_bytes - start, *(b - a for a, b in self.free), 0)
            raise SpillSpaceFull(
                f"{format_bytes_up(size)} do not fit on disk: of the disk budget of "
                f"{format_bytes(self.capacity_bytes)}, {format_bytes(self.used_bytes)} are in use and the "
                f"largest free extent has {format_bytes(largest)}. Raise disk_budget by "
                f"{format_bytes_up(start + size - self.capacity_bytes)}, or evict less."
            )
        if start < self.end:
            self.free.pop()
        self.end = start + size
        return start

    def _give(self, start: int, end: int) -> None:
        index = bisect_left(self.free, (start,))
        if index < len(self.free) and self.free[index][0] == end:
            end = self.free.pop(index)[1]
        if index and self.free[index - 1][1] == start:
            index -= 1
            start = self.free.pop(index)[0]
        self.free.insert(index, (start, end))


class FileSegment(NamedTuple):
    """Bytes that follow each other in one file.

    file     index of the file
    offset   first byte in the file
    begin    first byte, counted from the beginning of the range asked for
    """

    file: int
    offset: int
    begin: int
    size_bytes: int


class _Zone(NamedTuple):
    """[begin, end) of the space, and where in each of its files that begins."""

    begin: int
    end: int
    files: tuple[int, ...]
    bases: tuple[int, ...]


class Stripes:
    """A space of bytes numbered from 0, over ``files`` files."""

    def __init__(self, files: int, stripe_bytes: int = STRIPE_BYTES) -> None:
        self.stripe_bytes = stripe_bytes
        self._count = files
        self._zones = [_Zone(0, 1 << 62, tuple(range(files)), (0,) * files)]

    @property
    def files(self) -> tuple[int, ...]:
        """The files that the space still grows in."""
        return self._zones[-1].files

    def segments(self, offset: int, size_bytes: int) -> list[FileSegment]:
        """Where the bytes [offset, offset + size_bytes) lie, in order. Neighbours in a file are joined."""
        if self._count == 1:
            return [FileSegment(0, offset, 0, size_bytes)] if size_bytes else []
        joined: list[FileSegment] = []
        for part in self._cut(offset, offset + size_bytes, offset):
            last = joined[-1] if joined else None
            if last and last.file == part.file and last.offset + last.size_bytes == part.offset:
                joined[-1] = last._replace(size_bytes=last.size_bytes + part.size_bytes)
            else:
                joined.append(part)
        return joined

    def file_bytes(self, end: int) -> list[int]:
        """The size that each file must have for the bytes [0, end)."""
        sizes = [0] * self._count
        for zone in self._zones:
            if zone.begin >= end:
                break
            used = min(end, zone.end) - zone.begin
            rows, rest = divmod(used, self.stripe_bytes * len(zone.files))
            for place, (file, base) in enumerate(zip(zone.files, zone.bases, strict=True)):
                part = min(max(rest - place * self.stripe_bytes, 0), self.stripe_bytes)
                sizes[file] = max(sizes[file], base + rows * self.stripe_bytes + part)
        return sizes

    def leave_out(self, file: int, begin: int) -> None:
        """From byte ``begin`` on, which nothing reaches yet, do without ``file``."""
        sizes = self.file_bytes(begin)
        files = tuple(other for other in self.files if other != file)
        kept = [zone._replace(end=min(zone.end, begin)) for zone in self._zones if zone.begin < begin]
        self._zones = [*kept, _Zone(begin, 1 << 62, files, tuple(sizes[other] for other in files))]

    def _cut(self, offset: int, end: int, origin: int) -> Iterator[FileSegment]:
        for zone in self._zones:
            # One file needs no stripes.
            stripe_bytes = self.stripe_bytes if len(zone.files) > 1 else zone.end
            while max(offset, zone.begin) < min(end, zone.end):
                row, within = divmod(offset - zone.begin, stripe_bytes)
                turn, place = divmod(row, len(zone.files))
                size = min(end, zone.end, offset + stripe_bytes - within) - offset
                begin = zone.bases[place] + turn * stripe_bytes + within
                yield FileSegment(zone.files[place], begin, offset - origin, size)
                offset += size
