"""How spill space is laid over several files: pure arithmetic, no file.

Bytes go round the files in stripes, as in RAID 0, so that one tensor moves at the speed of all
disks. Where a file cannot grow, the others go on without it: from there on a new zone begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

STRIPE_BYTES = 1 << 20


class Segment(NamedTuple):
    """Bytes that follow each other in one file.

    file         index of the file
    offset       first byte in the file
    begin        first byte, counted from the beginning of the range asked for
    """

    file: int
    offset: int
    begin: int
    size_bytes: int


class _Zone(NamedTuple):
    begin: int
    files: tuple[int, ...]
    bases: tuple[int, ...]  # of each of these files: where the zone begins in it


class Stripes:
    """A space of bytes numbered from 0, over ``files`` files."""

    def __init__(self, files: int, stripe_bytes: int = STRIPE_BYTES) -> None:
        self.stripe_bytes = stripe_bytes
        self._count = files
        self._zones = [_Zone(0, tuple(range(files)), (0,) * files)]

    @property
    def files(self) -> tuple[int, ...]:
        """The files that the space still grows in."""
        return self._zones[-1].files

    def segments(self, offset: int, size_bytes: int) -> list[Segment]:
        """Where the bytes [offset, offset + size_bytes) lie, in order. Neighbours in a file are joined."""
        if self._count == 1:
            return [Segment(0, offset, 0, size_bytes)] if size_bytes else []
        joined: list[Segment] = []
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
        for zone, limit in self._zone_limits():
            if zone.begin >= end:
                break
            used = min(end, limit) - zone.begin
            rows, rest = divmod(used, self.stripe_bytes * len(zone.files))
            for place, (file, base) in enumerate(zip(zone.files, zone.bases, strict=True)):
                part = min(max(rest - place * self.stripe_bytes, 0), self.stripe_bytes)
                sizes[file] = max(sizes[file], base + rows * self.stripe_bytes + part)
        return sizes

    def leave_out(self, file: int, begin: int) -> None:
        """From byte ``begin`` on, which nothing reaches yet, do without ``file``."""
        sizes = self.file_bytes(begin)
        files = tuple(other for other in self.files if other != file)
        self._zones = [zone for zone in self._zones if zone.begin < begin]
        self._zones.append(_Zone(begin, files, tuple(sizes[other] for other in files)))

    def _zone_limits(self) -> Iterator[tuple[_Zone, int]]:
        ends = [zone.begin for zone in self._zones[1:]]
        yield from zip(self._zones, [*ends, 1 << 62], strict=True)

    def _cut(self, offset: int, end: int, origin: int) -> Iterator[Segment]:
        for zone, limit in self._zone_limits():
            # One file needs no stripes.
            stripe_bytes = self.stripe_bytes if len(zone.files) > 1 else limit
            while max(offset, zone.begin) < min(end, limit):
                row, within = divmod(offset - zone.begin, stripe_bytes)
                turn, place = divmod(row, len(zone.files))
                size = min(end, limit, offset + stripe_bytes - within) - offset
                begin = zone.bases[place] + turn * stripe_bytes + within
                yield Segment(zone.files[place], begin, offset - origin, size)
                offset += size
