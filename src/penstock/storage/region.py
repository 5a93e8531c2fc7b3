"""The spill space of one medium: extents, striped over one unnamed file in each directory."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

from penstock._native import Descriptor
from penstock.errors import InvalidArgument, SpillError, SpillSpaceFull, with_errno
from penstock.options import Directories
from penstock.storage.extents import ALIGNMENT_BYTES, Extent, Extents, Stripes
from penstock.storage.files import from_descriptor
from penstock.storage.host_memory import HostMemory
from penstock.storage.nvme.url import Url, is_url, parse_url
from penstock.storage.spill_namespace import SpillNamespace
from penstock.storage.transfer import Transfer
from penstock.units import format_bytes, format_bytes_up

STEP_BYTES = 256 << 20

_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.EISDIR, errno.ENOENT, errno.ENOSYS)


class SpillFile:
    """An open file without a name: its space is freed when the process ends, however it ends.

    place        its directory
    file         for transports
    handle       its descriptor through the page cache
    direct       it can bypass the page cache
    refusal      why it cannot; empty where it can
    size_bytes   allocated on the disk so far
    begin        offset of the spill space in the file
    """

    begin = 0
    quiesce_s = 0.0

    def __init__(self, directory: Path) -> None:
        """Raises SpillError where ``directory`` cannot hold a file."""
        self.place, self.size_bytes = directory, 0
        try:
            self._open = from_descriptor(_open_unlinked(directory), f"the spill_dir {directory}")
        except OSError as error:
            raise _unusable(directory, error) from error
        self.file = self._open.file
        self.handle = self.file.buffered
        self.direct = self.file.direct >= 0
        self.refusal = self._open.refusal

    def grow_to(self, size_bytes: int, most_bytes: int | None = None) -> None:
        """Allocate at least ``size_bytes``, and for speed somewhat more, up to ``most_bytes``.

        Raises SpillSpaceFull where the disk is full.
        """
        if size_bytes <= self.size_bytes:
            return
        ahead = max(size_bytes, self.size_bytes + STEP_BYTES)
        if most_bytes is not None:
            ahead = max(size_bytes, min(ahead, most_bytes))
        for target in (ahead, size_bytes):
            try:
                self._allocate(target)
                return
            except OSError as error:
                with contextlib.suppress(OSError):  # of a disk that has died; the file goes with the run
                    os.ftruncate(self.file.buffered, self.size_bytes)
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise _unusable(self.place, error) from error
                full = error
        free_bytes = self.free_bytes()
        missing_bytes = max(size_bytes - self.size_bytes - free_bytes, ALIGNMENT_BYTES)
        raise SpillSpaceFull(
            f"the disk of {self.place} is full ({full.strerror}): spilled tensors hold "
            f"{format_bytes(self.size_bytes)}, {format_bytes_up(size_bytes - self.size_bytes)} more are "
            f"needed and {format_bytes(free_bytes)} are free. Free {format_bytes_up(missing_bytes)} there, "
            "or choose a spill_dir on another disk."
        ) from full

    def free_bytes(self) -> int:
        """Free bytes of the file system. Raises SpillError where it cannot be asked."""
        status = self._file_system()
        return status.f_bavail * status.f_frsize

    def disk_bytes(self) -> int:
        """All bytes of the file system. Raises SpillError where it cannot be asked."""
        status = self._file_system()
        return status.f_blocks * status.f_frsize

    def _file_system(self) -> os.statvfs_result:
        try:
            return os.fstatvfs(self.file.buffered)
        except OSError as error:
            raise _unusable(self.place, error) from error

    def failure(self, failed: Transfer) -> SpillError:
        """The error to raise for a transfer that failed."""
        full = failed.error_number in (errno.ENOSPC, errno.EDQUOT)
        remedy = "Free space there" if full else "Check the disk (dmesg, smartctl)"
        error = (SpillSpaceFull if full else SpillError)(
            f"the {failed.kind} of {format_bytes(failed.size_bytes)} at offset {failed.offset} of the "
            f"spill file in {self.place} failed: {os.strerror(failed.error_number)}. {remedy}, or choose "
            "another spill_dir."
        )
        return with_errno(error, failed.error_number)

    def close(self) -> None:
        """Free the space. Idempotent."""
        self._open.close()
        self.file = self._open.file

    def _allocate(self, size_bytes: int) -> None:
        try:
            os.posix_fallocate(self.file.buffered, self.size_bytes, size_bytes - self.size_bytes)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
            os.ftruncate(self.file.buffered, size_bytes)
        self.size_bytes = size_bytes


def _open_unlinked(directory: Path) -> Descriptor:
    if temporary := getattr(os, "O_TMPFILE", 0):
        try:
            return Descriptor(directory, temporary | os.O_EXCL | os.O_RDWR, 0o600)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
    descriptor, path = tempfile.mkstemp(prefix=".penstock-", dir=directory)
    os.unlink(path)
    return Descriptor.owning(descriptor)


def _unusable(directory: Path, error: OSError) -> SpillError:
    reason = error.strerror
    if error.errno == errno.ENOENT and directory.is_dir():  # such as /proc
        reason = "its file system takes no new files"
    unusable = SpillError(
        f"tensors cannot be spilled to {directory}: {reason}. Give a spill_dir that is an "
        "existing directory on a local disk, and that you may write to."
    )
    return with_errno(unusable, error.errno)


class Region:
    """Allocates extents of one medium, and grows the files, or the memory, under them.

    The place of an extent is the extent itself, with one exception. A remote drive that lost its connection
    may still carry out an old write; an extent that is written again meanwhile gets another place.

    timeout_s      of requests to a namespace

    files          one in each directory, or a namespace, or host memory
    direct         every file can bypass the page cache
    place_text     the directories, or the namespace, for messages
    written_bytes  end of what was ever written
    checksums      of the last write, and its size, by offset of the place
    """

    def __init__(
        self,
        medium: str,
        places: Sequence[Path | Url | HostMemory],
        capacity_bytes: int | None,
        timeout_s: float = 60.0,
    ) -> None:
        self.extents = Extents(capacity_bytes, space=medium)
        self.files: list[SpillFile | SpillNamespace | HostMemory] = []
        self.written_bytes = 0
        self.checksums: dict[int, tuple[int, int]] = {}
        self._places: dict[Extent, Extent] = {}  # of extents that were moved
        self._late_s: dict[Extent, float] = {}  # until when an old write to a place may still be carried out
        self._held: list[Extent] = []  # released, but not reused until then
        self._stripes = Stripes(len(places))
        self._backed_bytes = 0  # end of what is allocated in the files
        try:
            for place in places:
                if isinstance(place, Url):
                    self.files.append(SpillNamespace(place, timeout_s))
                else:
                    self.files.append(SpillFile(place) if isinstance(place, Path) else place)
        except BaseException:
            self.close()
            raise
        self.direct = all(file.direct for file in self.files)
        self.place_text = ", ".join(str(file.place) for file in self.files)

    def allocate(self, size_bytes: int) -> Extent:
        """Raises SpillSpaceFull."""
        for held in [each for each in self._held if not self._has_late_write(each)]:
            self._held.remove(held)
            self.extents.release(held)
        try:
            extent = self.extents.allocate(size_bytes)
        except SpillSpaceFull as error:
            if not self._held:
                raise
            held_bytes = sum(each.size_bytes for each in self._held)
            raise SpillSpaceFull(
                f"{error} {format_bytes(held_bytes)} are held back: old writes may land there yet."
            ) from error
        try:
            while not self._grow_files(extent.end):
                pass
        except BaseException:
            self.extents.release(extent)
            raise
        return extent

    def release(self, extent: Extent) -> None:
        """Free the extent; it is reused once no old write to it can still be carried out."""
        self._drop_place(extent)
        self._free(extent)

    def place_of(self, extent: Extent) -> Extent:
        return self._places.get(extent, extent)

    def place_to_write(self, extent: Extent) -> Extent:
        """The place for the next write of the extent. Its old content is lost.

        Raises SpillSpaceFull.
        """
        self._drop_place(extent)
        if not self._has_late_write(extent):
            return extent
        place = self._places[extent] = self.allocate(extent.size_bytes)
        return place

    def expect_late_write(self, place: Extent, for_ever: bool) -> None:
        """A write to the place may still be carried out: for ever, or for as long as its drive may take."""
        quiesce_s = math.inf if for_ever else max(file.quiesce_s for file in self.files)
        self._late_s[place] = monotonic() + quiesce_s

    def has_room(self, size_bytes: int) -> bool:
        """Whether ``size_bytes`` are free; they may be fragmented."""
        capacity_bytes = self.extents.capacity_bytes
        return capacity_bytes is None or self.extents.used_bytes + size_bytes <= capacity_bytes

    def runs(
        self, place: Extent, size_bytes: int
    ) -> list[tuple[SpillFile | SpillNamespace | HostMemory, int, int, int]]:
        """The contiguous parts of a place: file, offset in the file, offset in the place, bytes."""
        return [
            (self.files[file], self.files[file].begin + offset, begin, size)
            for file, offset, begin, size in self._stripes.segments(place.offset, size_bytes)
        ]

    def error(self, failed: Transfer) -> SpillError:
        return next(file for file in self.files if file.file == failed.file).failure(failed)

    def close(self) -> None:
        for file in self.files:
            file.close()

    def _has_late_write(self, place: Extent) -> bool:
        """Whether an old write to the place may still be carried out."""
        if self._late_s.get(place, 0.0) > monotonic():
            return True
        self._late_s.pop(place, None)
        return False

    def _drop_place(self, extent: Extent) -> None:
        place = self._places.pop(extent, extent)
        self.checksums.pop(place.offset, None)
        if place is not extent:
            self._free(place)

    def _free(self, place: Extent) -> None:
        if self._has_late_write(place):
            self._held.append(place)
        else:
            self.extents.release(place)

    def _grow_files(self, end: int) -> bool:
        """Grow the files up to ``end``. False: try again, without a file that is full."""
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


def as_paths(directories: Directories) -> list[Path | Url]:
    """One or several directories, or one namespace, as a list.

    Raises InvalidArgument where there is none, or a namespace beside others.
    """
    try:
        several = [directories] if isinstance(directories, str | os.PathLike | Url) else list(directories)
    except TypeError:
        raise InvalidArgument(f"spill_dir is {directories!r}: give a directory, or a list of them") from None
    paths = [
        place if isinstance(place, Url) else parse_url(os.fspath(place)) if is_url(place) else Path(place)
        for place in several
    ]
    if not paths:
        raise InvalidArgument("no directory to spill to was given: give one or more")
    for remote in paths if len(paths) > 1 else ():
        if isinstance(remote, Url):
            raise InvalidArgument(
                f"{remote} is given as a spill_dir with {len(paths) - 1} more: tensors are striped over "
                "directories, or spilled to one namespace. Give the one or the others"
            )
    return paths
