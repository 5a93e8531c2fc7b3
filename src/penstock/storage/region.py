"""The spill space of one medium: extents, striped over one file in each directory."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from penstock.errors import SpillError, SpillSpaceFull
from penstock.storage.extents import Extent, Extents
from penstock.storage.scheduler import Transfer
from penstock.storage.spillfile import SpillFile
from penstock.storage.stripes import Segment, Stripes
from penstock.storage.transports import Completion, Request
from penstock.units import format_bytes


class Region:
    """Gives out extents, and has the files reach them.

    extents        which space is in use
    files          one in each directory
    direct         every file can bypass the page cache
    written_bytes  of the space: beyond, nothing was ever written
    """

    def __init__(self, medium: str, directories: Sequence[Path], capacity_bytes: int | None) -> None:
        self.extents = Extents(capacity_bytes, space=medium)
        self.files: list[SpillFile] = []
        self.written_bytes = 0
        self._stripes = Stripes(len(directories))
        self._backed_bytes = 0  # of the space: the files reach that far
        try:
            for directory in directories:
                self.files.append(SpillFile(directory))
        except BaseException:
            self.close()
            raise
        self.direct = all(file.direct for file in self.files)

    @property
    def place_text(self) -> str:
        """The directories, for messages."""
        return ", ".join(str(file.directory) for file in self.files)

    def allocate(self, size_bytes: int) -> Extent:
        """Raises SpillSpaceFull."""
        extent = self.extents.allocate(size_bytes)
        try:
            while not self._back(extent.end):
                pass
        except BaseException:
            self.extents.release(extent)
            raise
        return extent

    def has_room(self, size_bytes: int) -> bool:
        """Whether the capacity allows it, if its free space is in one piece."""
        capacity_bytes = self.extents.capacity_bytes
        return capacity_bytes is None or self.extents.used_bytes + size_bytes <= capacity_bytes

    def segments(self, extent: Extent, size_bytes: int) -> list[Segment]:
        """Where in the files the extent's first bytes lie."""
        return self._stripes.segments(extent.offset, size_bytes)

    def requests(self, transfer: Transfer, method: str) -> list[Request]:
        """What carries out the transfer, by that method: one for each file and run of stripes."""
        kind, address, priority = transfer.kind, transfer.address, transfer.priority
        files = self.files
        return [
            Request(kind, files[file].file, offset, address + begin, size, method, True, transfer, priority)
            for file, offset, begin, size in self._stripes.segments(
                transfer.extent.offset, transfer.size_bytes
            )
        ]

    def error(self, failed: Completion) -> SpillError:
        """What to raise for a request that failed."""
        request, number = failed.request, failed.error_number
        directory = next(file.directory for file in self.files if file.file == request.file)
        full = number in (errno.ENOSPC, errno.EDQUOT)
        remedy = "Free space there" if full else "Check the disk (dmesg, smartctl)"
        error = (SpillSpaceFull if full else SpillError)(
            f"the {request.kind} of {format_bytes(request.size_bytes)} at offset {request.offset} of the "
            f"spill file in {directory} failed: {os.strerror(number)}. {remedy}, or choose another spill_dir."
        )
        error.errno = number
        return error

    def close(self) -> None:
        for file in self.files:
            file.close()

    def _back(self, end: int) -> bool:
        """Have the files reach ``end``. False: another try may do, without a file that is full."""
        if end <= self._backed_bytes:
            return True
        capacity_bytes = self.extents.capacity_bytes
        for index, size_bytes in enumerate(self._stripes.file_bytes(end)):
            most_bytes = None if capacity_bytes is None else self._stripes.file_bytes(capacity_bytes)[index]
            try:
                self.files[index].grow_to(size_bytes, most_bytes)
            except SpillSpaceFull:
                if len(self._stripes.files) == 1:
                    raise
                self._stripes.leave_out(index, self._backed_bytes)
                return False
        self._backed_bytes = end
        return True
