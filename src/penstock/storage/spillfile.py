"""One file of spill space: unlinked at birth, preallocated in steps, direct where it can be."""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from pathlib import Path

from penstock.errors import SpillError, SpillSpaceFull
from penstock.storage.aligned import AlignedBuffer
from penstock.storage.extents import ALIGNMENT_BYTES
from penstock.units import format_bytes, format_bytes_up

logger = logging.getLogger("penstock")

STEP_BYTES = 256 << 20

_DIRECT = getattr(os, "O_DIRECT", 0)
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.EISDIR, errno.ENOENT, errno.ENOSYS)


class SpillFile:
    """An open file that no path leads to: its space is free again when the process ends, however it ends.

    descriptor   open for reading and writing, mode 0600
    direct       reads and writes bypass the page cache, and must be aligned to 4096 bytes
    size_bytes   space allocated on the disk so far
    """

    def __init__(self, directory: Path) -> None:
        """Raises SpillError where ``directory`` cannot hold a file."""
        self.directory = directory
        self.size_bytes = 0
        try:
            self.descriptor = _open_unlinked(directory)
        except OSError as error:
            raise _unusable(directory, error) from error
        try:
            self.direct = self._try_direct()
        except BaseException:
            self.close()
            raise
        if not self.direct:
            logger.warning(
                "the file system of %s takes no direct I/O: spilled tensors also pass through the page "
                "cache. Choose a spill_dir on a local disk (ext4, xfs) for full speed.",
                directory,
            )

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
                os.ftruncate(self.descriptor, self.size_bytes)
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
        status = os.fstatvfs(self.descriptor)
        return status.f_bavail * status.f_frsize

    def close(self) -> None:
        """Give the space back. Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _allocate(self, size_bytes: int) -> None:
        try:
            os.posix_fallocate(self.descriptor, self.size_bytes, size_bytes - self.size_bytes)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
            os.ftruncate(self.descriptor, size_bytes)
        self.size_bytes = size_bytes

    def _try_direct(self) -> bool:
        """Switch to direct I/O if a block can be written that way. Raises SpillSpaceFull on a full disk."""
        if not _DIRECT:
            return False
        import fcntl

        flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags | _DIRECT)
            self.grow_to(ALIGNMENT_BYTES, ALIGNMENT_BYTES)
            block = AlignedBuffer(ALIGNMENT_BYTES)
            os.pwrite(self.descriptor, block.view(), 0)
        except SpillError:
            raise
        except OSError:
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags)
            return False
        return True


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
