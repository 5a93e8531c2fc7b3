"""What a machine keeps of stores in object stores: a folder that all its processes share.

Below ``cache_dir/penstock-samples`` each store has a folder, named by a hash of its manifest. Its small files
are whole or not there. Its data files are sparse: a chunk's bytes lie where they lie in the store, and a byte
of ``held-*.bin`` says whether they are there. What is read is compared with the store's checksums, so that
nothing depends on what a kill, or a power cut, has left behind; another process may take any of it away.

Of a store that some process has mounted nothing is evicted, but for the small files of another one. Of an
epoch's order, what was just read is needed last: not again before the next epoch. What is there already is
needed no later. So what finds no room is not kept: no choice fetches fewer bytes of an epoch, nor in chunk
order by fewer requests, and nothing is exchanged in vain. In full order exchanging would save half of the
requests and more, of a sample each, but fetch a whole chunk for most of those that are left.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import stat
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from penstock.core.log import log_once
from penstock.errors import SampleError, with_errno
from penstock.samples.layout import FILES, data_file_name
from penstock.samples.places import Bytes, lock_pages, mapped
from penstock.storage.aligned import align_down, align_up
from penstock.storage.files import open_direct
from penstock.units import format_bytes, format_bytes_up

_FOLDER = "penstock-samples"
_KEY = re.compile(r"[0-9a-f]{32}")
_OURS = re.compile(
    rf"in-use|(?:{'|'.join(map(re.escape, FILES))})(?:\.\d+\.part)?|(?:data|held)-\d{{5}}\.bin"
)
_COUNTER = struct.Struct("<q")
_COUNTED_AT_ONCE, _PLENTY = 16, 1024  # pieces
BLOCK_BYTES = 4096  # data files have whole ones
_EVICTED_AT_ONCE = 64 << 20
_LOOK_S = 2.0  # between two looks for what could be evicted, where the cache is full
_FULL = (errno.ENOSPC, errno.EDQUOT)
_OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_FOLDER_MODE, _FILE_MODE = 0o775, 0o664  # whatever the umask: who may write here chooses the samples


class CacheOptions(NamedTuple):
    """Where a machine keeps what it has fetched, and how many bytes of the disk that may take."""

    folder: str
    limit_bytes: int


class DiskCache:
    """The cache in a folder. Any number of processes and threads may use it, also after a fork."""

    def __init__(self, options: CacheOptions) -> None:
        """Raises SampleError where the folder cannot be written."""
        self.root = Path(os.path.abspath(options.folder)) / _FOLDER
        self.limit_bytes = options.limit_bytes
        self._is_full, self._looked_s = False, 0.0
        self._ahead: dict[tuple[int, int], int] = {}  # bytes by process and thread
        self._said = threading.Lock()  # taken once, by who says that it is full
        with self.checked():
            self.root.mkdir(_FOLDER_MODE, parents=True, exist_ok=True)
            self._check_owner()
            self._users = os.open(self.root / "users", _OPEN, _FILE_MODE)
            weakref.finalize(self, os.close, self._users).atexit = False
            with self._locked():
                with contextlib.suppress(BlockingIOError):  # nobody else is here: count anew
                    fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self._set_used(sum(map(_taken_bytes, self._stores())))
                fcntl.flock(self._users, fcntl.LOCK_SH)

    def __str__(self) -> str:
        return str(self.root.parent)

    def _check_owner(self) -> None:
        """Checksums find damage, but nobody who means to put other samples here. Raises SampleError."""
        folder, parent = os.lstat(self.root), os.stat(self.root.parent)
        if not stat.S_ISDIR(folder.st_mode) or folder.st_mode & stat.S_IWOTH:
            why = "everybody may write to it"
        elif parent.st_mode & stat.S_IWOTH and folder.st_uid not in (0, os.geteuid()):
            why = f"user {folder.st_uid} has made it where everybody may"
        else:
            return
        raise SampleError(
            f"the cache {self.root} cannot be trusted: {why}. Remove it or take that right away, or give "
            "another cache_dir"
        )

    @contextmanager
    def checked(self, needed_bytes: int = 0) -> Iterator[None]:
        """Raises SampleError where the disk cannot be written. ``needed_bytes``: of what is written."""
        try:
            yield
        except SampleError:
            raise
        except OSError as error:
            needs = f" ({format_bytes_up(needed_bytes)} are needed)" if needed_bytes else ""
            why = f"{error.strerror or error}{needs}"
            if error.errno in _FULL:
                remedy = "Free some of that disk"
            else:
                remedy = "Give yourself the permission to write there"
            failure = SampleError(
                f"cache_dir={str(self)!r} cannot be used: {why}. {remedy}, or give another folder"
            )
            raise with_errno(failure, error.errno) from error

    def open(self, manifest: bytes, sizes: Sequence[tuple[int, int]]) -> CachedStore:
        """The folder of the store with this manifest, in use until it is closed.

        sizes   of each data file its bytes, and its chunks

        Raises SampleError where it cannot be written.
        """
        key = hashlib.sha256(manifest).hexdigest()[:32]
        with self.checked(), self._locked():
            if (over := self._used() - self.limit_bytes) > 0:
                self._evict(over, last=key)
            (self.root / key).mkdir(_FOLDER_MODE, exist_ok=True)
            return CachedStore(self, self.root / key, sizes)

    def make_room(self, size_bytes: int) -> None:
        """Count so many bytes that are needed. Raises SampleError where they do not fit."""
        with self._locked():
            for in_use in (False, True):
                if (over := self._used() + size_bytes - self.limit_bytes) > 0:
                    self._evict(over, in_use=in_use)
            if self._used() + size_bytes > self.limit_bytes:
                raise SampleError(
                    f"cache_disk={format_bytes(self.limit_bytes)} is too small: a store's directory needs "
                    f"{format_bytes_up(self._used() + size_bytes)} with what is there. Give a larger one"
                )
            self._set_used(self._used() + size_bytes)

    def reserve(self, size_bytes: int) -> bool:
        """Whether there is room for so many bytes, which are counted from then on.

        Where there is plenty of room a thread counts more of them at once: the lock costs system calls.
        """
        thread = os.getpid(), threading.get_ident()
        if (ahead_bytes := self._ahead.get(thread, 0)) >= size_bytes:
            self._ahead[thread] = ahead_bytes - size_bytes
            return True
        if self._is_full:
            return False
        with self._locked():
            used = self._used()
            if used + _PLENTY * size_bytes <= self.limit_bytes:
                self._set_used(used + _COUNTED_AT_ONCE * size_bytes)
                self._ahead[thread] = ahead_bytes + (_COUNTED_AT_ONCE - 1) * size_bytes
                return True
            if (over := used + size_bytes - self.limit_bytes) > 0:
                if time.monotonic() - self._looked_s < _LOOK_S:
                    return False
                self._looked_s = time.monotonic()
                over -= self._evict(max(over, min(_EVICTED_AT_ONCE, self.limit_bytes)))
                used = self._used()
                if over > 0 and used + size_bytes > self.limit_bytes:
                    return False
                self._looked_s = 0.0
            self._set_used(used + size_bytes)
        return True

    def has_room(self, size_bytes: int) -> bool:
        """Whether it is worth to fetch more than is wanted now, to keep it."""
        try:
            return not self._is_full and self._used() + size_bytes <= self.limit_bytes
        except OSError as error:
            self.stop_growing(error)
            return False

    def give_back_ahead(self) -> None:
        """What the threads of this process have counted and not used: none of them goes on."""
        left = [each for each in self._ahead if each[0] == os.getpid()]
        self.give_back(sum(self._ahead.pop(each) for each in left))

    def give_back(self, size_bytes: int) -> None:
        with self._locked():
            self._set_used(self._used() - size_bytes)

    def stop_growing(self, error: OSError) -> None:
        """The disk cannot be written: the cache stays as it is. Said once in a process."""
        self._is_full = True
        if self._said.acquire(blocking=False):  # several threads find out at once
            what = "is full" if error.errno in _FULL else f"cannot be written ({error.strerror})"
            log_once(
                f"the disk of cache_dir={str(self)!r} {what}: the cache keeps what it has, and the rest "
                "comes from the server each time"
            )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Alone among all threads and processes: each opens the file for itself."""
        descriptor = os.open(self.root / "lock", _OPEN, _FILE_MODE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            _unlock(descriptor)

    def _used(self) -> int:
        data = os.pread(self._users, _COUNTER.size, 0)
        return _COUNTER.unpack(data)[0] if len(data) == _COUNTER.size else 0

    def _set_used(self, used_bytes: int) -> None:
        os.pwrite(self._users, _COUNTER.pack(max(0, used_bytes)), 0)

    def _stores(self) -> list[Path]:
        """The folders of stores, those that were in use longest ago first."""
        found = [each for each in self.root.iterdir() if _KEY.fullmatch(each.name)]
        found = [each for each in found if (each / "in-use").is_file() and not each.is_symlink()]
        return sorted(found, key=lambda each: (each / "in-use").stat().st_mtime)

    def _evict(self, wanted_bytes: int, last: str = "", in_use: bool = False) -> int:
        """Take so many bytes from stores that nobody uses, that of the key ``last`` after all others.

        in_use   of the data files of all stores: who reads them notices, and fetches again

        Returns how many there were. To be called with the lock.
        """
        freed_bytes = 0
        for folder in sorted(self._stores(), key=lambda each: each.name == last):
            if freed_bytes >= wanted_bytes:
                break
            with contextlib.suppress(OSError):
                descriptor = os.open(folder / "in-use", os.O_RDWR | os.O_CLOEXEC)
                try:
                    if not in_use:
                        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    freed_bytes += _shrink(folder, wanted_bytes - freed_bytes, all_of_it=not in_use)
                finally:
                    _unlock(descriptor)
        self._set_used(self._used() - freed_bytes)
        return freed_bytes


def _unlock(descriptor: int) -> None:
    """And close it: that alone keeps the lock where a process that was forked meanwhile has it too."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _files(folder: Path) -> list[Path]:
    """What this module has written into a store's folder, and nothing else."""
    return sorted(each for each in folder.iterdir() if _OURS.fullmatch(each.name) and not each.is_symlink())


def _taken_bytes(folder: Path) -> int:
    return sum(each.stat().st_blocks * 512 for each in _files(folder))


def _shrink(folder: Path, wanted_bytes: int, all_of_it: bool) -> int:
    """Cut data files from their end, then remove ``all_of_it``. Returns the bytes that were freed."""
    before = _taken_bytes(folder)
    for data in reversed([each for each in _files(folder) if each.name.startswith("data-")]):
        held = folder / data.name.replace("data-", "held-")
        taken = data.stat().st_blocks * 512
        left = before - _taken_bytes(folder)
        if left >= wanted_bytes:
            return left
        if taken == 0 or not held.exists():
            continue
        with open(held, "r+b") as file:
            bits = np.frombuffer(file.read(), np.uint8).copy()
            step = data.stat().st_size // max(1, len(bits))
            keeps = max(0, (taken - (wanted_bytes - left)) // max(1, step))
            there = np.append(np.flatnonzero(bits), len(bits))
            cut = int(there[min(keeps, len(there) - 1)])
            bits[max(0, cut - 1) :] = 0  # the one before leads into what is cut off
            file.seek(0)
            file.write(bits.tobytes())
        os.truncate(data, cut * step)
    if (freed := before - _taken_bytes(folder)) >= wanted_bytes or not all_of_it:
        return freed
    for each in _files(folder):
        each.unlink()
    with contextlib.suppress(OSError):  # somebody else has put something there
        folder.rmdir()
    return before


class CachedFile(NamedTuple):
    """A data file in the cache.

    cache        that it is in
    descriptor   of its bytes, of which only what `held` says are there
    direct_file  the same for direct I/O; -1 where there is none
    held         [chunks]: what of each is there, shared by all processes
    held_file    a descriptor of what `held` is a mapping of
    """

    cache: DiskCache
    descriptor: int
    direct_file: int
    held: Bytes
    held_file: int

    def keep(self, chunk: int, bit: int, begin: int, data: Bytes, give: Callable[[int], int]) -> None:
        """Write bytes of it from ``begin`` on, what ``bit`` says of a chunk, if they fit.

        give   hands them to who waits for them, and returns how many of them it has written to a descriptor
               for direct I/O, where it is given one: they are not needed again before the next epoch
        """
        # Blocks that it shares with its neighbours count for each of them.
        span = align_up(begin + data.nbytes, BLOCK_BYTES) - align_down(begin, BLOCK_BYTES)
        is_reserved = False
        try:
            is_reserved = not self.held[chunk] & bit and self.cache.reserve(span)
        except OSError as error:  # somebody has removed the folder
            self.cache.stop_growing(error)
        done = give(self.direct_file if is_reserved and span == data.nbytes else -1)
        if not is_reserved:
            return
        try:
            while done < data.nbytes:
                done += os.pwrite(self.descriptor, data.data[done:], begin + done)
            held = int(self.held[chunk])
            if not held & bit:
                # Of two that note something of a chunk at once one may be lost: that is fetched again.
                os.pwrite(self.held_file, bytes([held | bit]), chunk)
                return
        except OSError as error:
            self.cache.stop_growing(error)
        with contextlib.suppress(OSError):  # it is not kept, or somebody else has kept it: it counts once
            self.cache.give_back(span)


class CachedStore:
    """The folder of one store in the cache. It is not evicted until `close`.

    files   the data files, in order
    """

    def __init__(self, cache: DiskCache, folder: Path, sizes: Sequence[tuple[int, int]]) -> None:
        """`DiskCache.open` does this."""
        self.cache, self.folder = cache, folder
        self._opened = ExitStack()
        self._finalizer = weakref.finalize(self, _close, self._opened)
        self.files: list[CachedFile] = []
        self._opened.callback(cache.give_back_ahead)
        in_use = self._open("in-use")
        fcntl.flock(in_use, fcntl.LOCK_SH)
        os.utime(in_use)
        for number, (size_bytes, chunks) in enumerate(sizes):
            data_file = self._open(data_file_name(number))
            if os.fstat(data_file).st_size != size_bytes:
                os.ftruncate(data_file, size_bytes)
            direct, alignment_bytes, _ = open_direct(data_file)
            if direct is not None:
                self._opened.callback(direct.close)
            held_file = self._open(f"held-{number:05d}.bin")
            held = _mapped_bits(held_file, chunks, folder)
            direct_file = direct.fileno() if direct and alignment_bytes <= BLOCK_BYTES else -1
            self.files.append(CachedFile(cache, data_file, direct_file, held, held_file))

    def _open(self, name: str) -> int:
        descriptor = os.open(self.folder / name, _OPEN, _FILE_MODE)
        self._opened.callback(os.close, descriptor)
        return descriptor

    def close(self) -> None:
        """Idempotent."""
        self._finalizer()


def _close(opened: ExitStack) -> None:
    with contextlib.suppress(OSError):  # what is lost is fetched again
        opened.close()


def _mapped_bits(descriptor: int, chunks: int, path: Path) -> Bytes:
    """[chunks], shared by all processes. Written by calls, which fail where an access ends the process."""
    if os.fstat(descriptor).st_size != chunks:
        os.ftruncate(descriptor, chunks)
    os.posix_fallocate(descriptor, 0, chunks)
    bits = mapped(descriptor, chunks, ahead=False)
    lock_pages(bits.ctypes.data, bits.nbytes, os.fspath(path))
    return bits
