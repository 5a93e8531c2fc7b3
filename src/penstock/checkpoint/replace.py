"""Atomic replacement of a file: the new one takes its place complete and durable, or leaves no trace."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from penstock._native import Descriptor
from penstock.checkpoint.failures import cannot_write
from penstock.core.files import lock, remove_unlocked, sync_folder
from penstock.errors import PenstockError
from penstock.storage import files

# Errors of operations that a system or file system does not support.
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.EISDIR, errno.ENOENT, errno.ENOSYS, errno.ENOTTY)

_SUFFIX = ".penstock"
_TOKEN_BYTES = 8
_NAME_BYTES = 255 - len(f"..{_SUFFIX}") - 2 * _TOKEN_BYTES  # most that are left of the file's own name
_HIDDEN = re.compile(rb"\.(.*)\.[0-9a-f]{%d}%s" % (2 * _TOKEN_BYTES, re.escape(_SUFFIX).encode()), re.DOTALL)


@contextlib.contextmanager
def replacing(path: Path, size_bytes: int, needed_bytes: int) -> Iterator[Replacement]:
    """A `Replacement`, whose errors, and those of the system in the context, are CheckpointErrors.

    needed_bytes   of the new file, for messages
    """
    replacement = None
    try:
        with Replacement(path, size_bytes) as replacement:
            yield replacement
    except PenstockError:
        raise
    except OSError as error:
        if replacement is None:
            raise cannot_write(path, error, needed_bytes) from error
        raise cannot_write(replacement.path, error, needed_bytes, None, replacement.committed) from error


class Replacement(files.Closing):
    """A new file at ``path``, invisible until it is committed. A context manager.

    A symbolic link stays, and the file that it leads to is replaced. Mode, and where allowed the owner,
    of a file that is there are kept; a new one gets what the umask leaves. The file has no name until
    `commit`, or, where the file system has no such files, a hidden one. What a killed process leaves
    under a hidden name is removed by the next Replacement of the same file.

    size_bytes   how many are allocated now, so that a full disk shows at once
    committed    the new file is at `path`

    Raises OSError where no file can be written at ``path``.
    """

    def __init__(self, path: str | os.PathLike[str], size_bytes: int) -> None:
        self.path = Path(os.path.realpath(path))
        self.committed = False
        self._hidden: Path | None = None
        self.opened = files.OpenFile()  # none yet
        there = _existing(self.path)
        remove_stale(self.path.parent, _cut(self.path.name).__eq__)
        try:
            self.opened = files.from_descriptor(self._create(there), os.fspath(self.path))
            self.file = self.opened.file
            if there is not None:
                _copy_owner_and_mode(self.file.buffered, there)
            _allocate(self.file.buffered, size_bytes)
        except BaseException:
            self.close()
            raise

    def commit(self, size_bytes: int) -> None:
        """Cut the file to ``size_bytes``, make it durable, and rename it to `path`."""
        descriptor = self.file.buffered
        os.ftruncate(descriptor, size_bytes)
        os.fsync(descriptor)
        if self._hidden is None:
            self._hidden = _hidden(self.path)
            # The descriptor in place of a directory makes Python follow the link; it is not looked at.
            os.link(_by_descriptor(descriptor), self._hidden, src_dir_fd=descriptor, follow_symlinks=True)
        replaced = _keep_allocated(self.path)
        try:
            os.replace(self._hidden, self.path)
            self.committed, self._hidden = True, None
            sync_folder(self.path.parent)
        finally:
            _free_in_background(replaced)

    def close(self) -> None:
        """Remove the file unless it was committed."""
        if self._hidden is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._hidden)
            self._hidden = None
        with contextlib.suppress(OSError):  # what counts is durable, and an earlier error says more
            self.opened.close()

    def _create(self, there: os.stat_result | None) -> Descriptor:
        flags, mode = os.O_RDWR, 0o666 if there is None else 0o600
        descriptor = _create_nameless(self.path.parent, flags, mode)
        if descriptor is not None:
            lock(descriptor.fileno())
            return descriptor
        self._hidden = _hidden(self.path)
        descriptor = Descriptor(self._hidden, flags | os.O_CREAT | os.O_EXCL, mode)
        lock(descriptor.fileno())
        if os.fstat(descriptor.fileno()).st_nlink == 0:  # removed as stale before it was locked
            return self._create(there)
        return descriptor


def _existing(path: Path) -> os.stat_result | None:
    """Status of the file at ``path``, if any. Raises OSError where it cannot be replaced by a file."""
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(there.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(there.st_mode):
        raise OSError(errno.EINVAL, "It is not a regular file", os.fspath(path))
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
    return there


def _create_nameless(directory: Path, flags: int, mode: int) -> Descriptor | None:
    try:
        descriptor = Descriptor(directory, flags | os.O_TMPFILE, mode)
    except OSError as error:
        if error.errno in _NOT_SUPPORTED and directory.is_dir():
            return None
        raise
    # Without /proc it could not be given a name.
    return descriptor if os.path.exists(_by_descriptor(descriptor.fileno())) else None


def _copy_owner_and_mode(descriptor: int, there: os.stat_result) -> None:
    mode = stat.S_IMODE(there.st_mode)
    own = os.fstat(descriptor)
    if (own.st_uid, own.st_gid) != (there.st_uid, there.st_gid):
        try:
            os.fchown(descriptor, there.st_uid, there.st_gid)
        except PermissionError:  # another group may do no more than everybody
            mode = mode & ~0o070 | (mode & 0o007) << 3
    os.fchmod(descriptor, mode)


def _by_descriptor(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


def _hidden(path: Path) -> Path:
    return path.with_name(f".{_cut(path.name)}.{secrets.token_hex(_TOKEN_BYTES)}{_SUFFIX}")


def _cut(name: str) -> str:
    return os.fsdecode(os.fsencode(name)[:_NAME_BYTES])


def remove_stale(directory: Path, is_wanted: Callable[[str], bool]) -> None:
    """Remove what killed processes left in ``directory`` of files whose names, cut to `_NAME_BYTES`, are
    wanted. A live writer holds a lock on its own."""
    with contextlib.suppress(OSError), os.scandir(directory) as found:
        for name in [entry.name for entry in found]:
            match = _HIDDEN.fullmatch(os.fsencode(name))
            if match is not None and is_wanted(os.fsdecode(match[1])):
                remove_unlocked(directory / name)


def _allocate(descriptor: int, size_bytes: int) -> None:
    """Reserve space. Where that is not supported, writing finds out whether there is enough."""
    error_number = _fallocate(descriptor, size_bytes)
    if error_number == errno.ENOSPC and _freeing:
        for thread in list(_freeing):
            thread.join()
        error_number = _fallocate(descriptor, size_bytes)
    if error_number and error_number not in _NOT_SUPPORTED:
        raise OSError(error_number, os.strerror(error_number))


def _fallocate(descriptor: int, size_bytes: int) -> int:
    """Returns 0, or an errno. Unlike posix_fallocate it writes no blocks where it is not supported."""
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if fallocate is None or size_bytes == 0:
        return 0
    while fallocate(descriptor, 0, ctypes.c_long(0), ctypes.c_long(size_bytes)):
        if (error_number := ctypes.get_errno()) != errno.EINTR:
            return error_number
    return 0


_freeing: list[threading.Thread] = []  # that free the space of replaced files


def _keep_allocated(path: Path) -> Descriptor | None:
    """What keeps the space of the file at ``path`` allocated; None where there is no file.

    Freeing a gigabyte takes about a tenth of a second, which would delay the caller.
    """
    try:
        return Descriptor(path, os.O_PATH | os.O_NOFOLLOW)
    except (OSError, AttributeError):
        return None


def _free_in_background(descriptor: Descriptor | None) -> None:
    if descriptor is None:
        return
    thread = threading.Thread(target=descriptor.close, name="penstock-free", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is ending, or there are too many threads
        descriptor.close()
    else:
        _freeing[:] = [thread, *(each for each in _freeing if each.is_alive())]
