"""Open files for transports: one descriptor through the page cache, and one past it where that works."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import stat
import struct
from collections.abc import Callable
from typing import TypeVar

from penstock._native import Descriptor
from penstock.storage.aligned import AlignedBuffer
from penstock.storage.transfer import File

logger = logging.getLogger("penstock")

# No smaller alignment is used, even where a disk takes multiples of 512 bytes. A page that one request
# writes in part through the page cache and another in part past it could lose either part. A direct
# write of part of a file system's block (4096 bytes on ext4 and XFS) also waits for all others.
SMALLEST_ALIGNMENT_BYTES = max(4096, mmap.PAGESIZE)

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_STATX_MEMORY_ALIGN_AT = 152  # then the alignment of offsets, both 32 bits
_STATFS_BYTES = 256
_MEMORY_FILE_SYSTEMS = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}


_Self = TypeVar("_Self", bound="Closing")


class Closing:
    """A context manager that is closed at its end."""

    def close(self) -> object:
        raise NotImplementedError

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OpenFile(Closing):
    """Owns the descriptors of ``file``. A context manager.

    refusal   why it has none past the page cache; empty where it has one
    """

    def __init__(
        self,
        buffered: Descriptor | None = None,
        direct: Descriptor | None = None,
        alignment_bytes: int = SMALLEST_ALIGNMENT_BYTES,
        refusal: str = "",
    ) -> None:
        self._owned = [each for each in (buffered, direct) if each is not None]
        self.file = File(
            -1 if buffered is None else buffered.fileno(),
            -1 if direct is None else direct.fileno(),
            alignment_bytes,
        )
        self.refusal = refusal

    def close(self) -> None:
        """Close the descriptors. Idempotent. Raises OSError where what was written is lost."""
        self.file = self.file._replace(buffered=-1, direct=-1)
        with contextlib.ExitStack() as closed:
            for descriptor in self._owned:
                closed.enter_context(descriptor)

    def abandon(self) -> None:
        """Leave the descriptors open until the process ends: a transport whose disk hangs uses them."""
        self.file = self.file._replace(buffered=-1, direct=-1)
        for descriptor in self._owned:
            descriptor.release()


def open_regular(path: str | os.PathLike[str], flags: int = 0) -> Descriptor:
    """The regular file at ``path``, for reading. Raises OSError: EISDIR or EINVAL for anything else."""
    descriptor = Descriptor(path, flags | os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for its writer
    mode = os.fstat(descriptor.fileno()).st_mode
    if not stat.S_ISREG(mode):
        descriptor.close()
        error_number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(error_number, os.strerror(error_number), os.fspath(path))
    os.set_blocking(descriptor.fileno(), True)
    return descriptor


def from_descriptor(descriptor: Descriptor, name: str | None = None) -> OpenFile:
    """Make an open descriptor usable by transports, also where no path leads to its file any more.

    descriptor   open for reading, or for reading and writing. The OpenFile closes it
    name         what the log calls the file
    """
    direct, alignment_bytes, reason = open_direct(descriptor.fileno())
    if direct is None:
        _log_once(descriptor.fileno(), name or "an unlinked file", reason)
    return OpenFile(descriptor, direct, alignment_bytes, reason)


def open_direct(descriptor: int) -> tuple[Descriptor | None, int, str]:
    """A second descriptor of the same file past the page cache, its alignment, and "". Else None and why."""
    refused = None, SMALLEST_ALIGNMENT_BYTES
    if name := _memory_file_system(descriptor):
        return *refused, f"{name} keeps its files in the page cache"
    demanded_bytes = _demanded_alignment(descriptor)
    if demanded_bytes == 0:
        return *refused, "the file system takes none for this file"
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
    try:
        # Not by its path: that may lead nowhere, or to another file by now.
        direct = Descriptor(f"/proc/self/fd/{descriptor}", flags | os.O_DIRECT)
    except OSError as error:
        return *refused, os.strerror(error.errno or errno.EIO)
    if demanded_bytes is None and (error_number := _try_to_read(direct.fileno())):
        return *refused, os.strerror(error_number)
    return direct, max(demanded_bytes or 0, SMALLEST_ALIGNMENT_BYTES), ""


def _demanded_alignment(descriptor: int) -> int | None:
    """What direct I/O on the file must be aligned to; 0 where there is none, None where that is unknown.

    Linux reports it since 6.1, for some file systems.
    """
    answer = _ask("statx", _STATX_BYTES, descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN)
    if answer is None or not struct.unpack_from("=I", answer)[0] & _STATX_DIOALIGN:
        return None
    memory_bytes, offset_bytes = struct.unpack_from("=II", answer, _STATX_MEMORY_ALIGN_AT)
    return max(memory_bytes, offset_bytes) if memory_bytes and offset_bytes else 0


def _memory_file_system(descriptor: int) -> str | None:
    """The name of the file's file system if it has no disk. Such a one opens files for direct I/O all
    the same, and ignores it."""
    answer = _ask("fstatfs", _STATFS_BYTES, descriptor)
    if answer is None:
        return None
    return _MEMORY_FILE_SYSTEMS.get(ctypes.c_long.from_buffer_copy(answer).value & 0xFFFFFFFF)


def _ask(name: str, size_bytes: int, *arguments: int | bytes) -> bytes | None:
    """What a function of the C library puts into its last argument; None where it fails or is missing."""
    function: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    answer = ctypes.create_string_buffer(size_bytes)
    if function is None or function(*arguments, answer):
        return None
    return answer.raw


def _try_to_read(direct: int) -> int:
    """Read a block; give 0, or the errno."""
    block = AlignedBuffer(SMALLEST_ALIGNMENT_BYTES)
    try:
        os.preadv(direct, [block.view()], 0)
    except OSError as error:
        return error.errno or errno.EIO
    return 0


_logged: set[int] = set()


def _log_once(descriptor: int, name: str, reason: str) -> None:
    """Say once per file system that its files pass through the page cache."""
    with contextlib.suppress(OSError):
        device = os.fstat(descriptor).st_dev
        if device not in _logged:
            _logged.add(device)
            logger.warning(
                "direct I/O cannot be used on the file system of %s: %s. Its files also pass through the "
                "page cache, which costs memory and time; a local disk (ext4, xfs) does without.",
                name,
                reason,
            )
