"""One file of spill space: unlinked at birth, preallocated in steps, direct where it can be."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from penstock.errors import SpillError, SpillSpaceFull
from penstock.storage.extents import ALIGNMENT_BYTES
from penstock.storage.files import from_descriptor
from penstock.units import format_bytes, format_bytes_up

STEP_BYTES = 256 << 20

_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.EISDIR, errno.ENOENT, errno.ENOSYS)


class SpillFile:
    """An open file that no path leads to: its space is free again when the process ends, however it ends.

    file         for transports; open for reading and writing, mode 0600
    direct       it can bypass the page cache
    size_bytes   space allocated on the disk so far
    """

    def __init__(self, directory: Path) -> None:
        """Raises SpillError where ``directory`` cannot hold a file."""
        self.directory = directory
        self.size_bytes = 0
        try:
            self._open = from_descriptor(_open_unlinked(directory), f"the spill_dir {directory}")
        except OSError as error:
            raise _unusable(directory, error) from error
        self.file = self._open.file
        self.direct = self.file.direct >= 0

    def grow_to(self, size_bytes: int, most_bytes: int | None = None) -> None:
        """Have at least ``size_bytes`` allocated, and for speed somewhat more, up to ``most_bytes``.

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
                os.ftruncate(self.file.buffered, self.size_bytes)
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise _unusable(self.directory, error) from error
                full = error
        free_bytes = self.free_bytes()
        missing_bytes = max(size_bytes - self.size_bytes - free_bytes, ALIGNMENT_BYTES)
        raise SpillSpaceFull(
            f"the disk of {self.directory} is full ({full.strerror}): spilled tensors hold "
            f"{format_bytes(self.size_bytes)}, {format_bytes_up(size_bytes - self.size_bytes)} more are "
            f"needed and {format_bytes(free_bytes)} are free. Free {format_bytes_up(missing_bytes)} there, "
            "or choose a spill_dir on another disk."
        ) from full

    def free_bytes(self) -> int:
        """Bytes of the file system that are not in use."""
        status = os.fstatvfs(self.file.buffered)
        return status.f_bavail * status.f_frsize

    def close(self) -> None:
        """Give the space back. Idempotent."""
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


def _open_unlinked(directory: Path) -> int:
    if temporary := getattr(os, "O_TMPFILE", 0):
        try:
            return os.open(directory, temporary | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
    descriptor, path = tempfile.mkstemp(prefix=".penstock-", dir=directory)
    os.unlink(path)
    return descriptor


def _unusable(directory: Path, error: OSError) -> SpillError:
    unusable = SpillError(
        f"tensors cannot be spilled to {directory}: {error.strerror}. Give a spill_dir that is an "
        "existing directory on a local disk, and that you may write to."
    )
    unusable.errno = error.errno
    return unusable
