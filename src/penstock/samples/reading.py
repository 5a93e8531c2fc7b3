"""The open data files of mounted stores, and what reads them."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from penstock import _native
from penstock.core.log import log_once
from penstock.errors import InvalidArgument, SampleError
from penstock.machine import available_bytes
from penstock.samples.catalog import Directory
from penstock.samples.failures import CLOSED
from penstock.samples.layout import data_file_name
from penstock.samples.objects.cache import CacheOptions
from penstock.samples.objects.fetching import Fetched, Fetcher
from penstock.samples.order import ORDERS
from penstock.samples.places import Bytes, Place, StoreFile
from penstock.units import format_bytes

logger = logging.getLogger("penstock")

_DEPTH = 64  # reads in flight
_MOST_COPY_THREADS = 4
_CLOSE_TIMEOUT_S = 10.0  # then what is stuck is left behind

_inherited: list[object] = []  # what belongs to the parent of a forked process: not to be touched, nor ended
_left_behind: list[object] = []  # what stuck reads have by their numbers: they stay open


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a store is mounted; see `penstock.samples.mount`."""

    order: str
    cache_bytes: int
    rank: int
    world_size: int
    io: str
    verify: bool
    on_damage: str
    prefetch_bytes: int
    timeout_s: float
    copy_threads: int | None
    cache: CacheOptions | None = None

    def __post_init__(self) -> None:
        for name, choices in (
            ("order", ORDERS),
            ("io", ("auto", "buffered", "direct")),
            ("on_damage", ("raise", "skip")),
        ):
            if (value := getattr(self, name)) not in choices:
                raise InvalidArgument(f"{name}={value!r} is none of {', '.join(map(repr, choices))}")
        if not 0 <= self.rank < self.world_size:
            raise InvalidArgument(
                f"rank={self.rank} is none of world_size={self.world_size} processes: give 0 <= rank < "
                "world_size"
            )
        if not self.timeout_s > 0:
            raise InvalidArgument(f"timeout_s={self.timeout_s} must be more than 0")
        if self.copy_threads is not None and self.copy_threads < 0:
            raise InvalidArgument(f"copy_threads={self.copy_threads} must be 0 or more")


class DataFileIo(NamedTuple):
    """The I/O path for data files: "buffered" or "direct", and why it was chosen."""

    io: str
    reason: str


def choose_io(wanted: str, size_bytes: int, available_bytes: int, can_direct: bool) -> DataFileIo:
    """Choose the I/O path for data files.

    wanted           "auto", "buffered" or "direct"
    size_bytes       of all data files
    available_bytes  memory that is available without swapping
    can_direct       their file systems take direct I/O
    """
    if wanted == "buffered":
        return DataFileIo("buffered", "asked for")
    if not can_direct:
        return DataFileIo("buffered", "the file system takes no direct I/O")
    if wanted == "direct":
        return DataFileIo("direct", "asked for")
    sizes = f"{format_bytes(size_bytes)} of samples, {format_bytes(available_bytes)} of memory available"
    if 2 * size_bytes <= available_bytes:
        return DataFileIo("buffered", f"later epochs come from the page cache: {sizes}")
    return DataFileIo("direct", f"the page cache would not hold them: {sizes}")


class EpochReader:
    """Owns the open data files, the reader of this process, and the epoch in progress.

    feed                 the batches of the epoch in progress
    epochs               how many have begun
    epoch_size           samples of the last one; None: none has begun
    epoch_is_in_parent   this process was forked during an epoch, and has begun none since
    """

    def __init__(self, directories: Sequence[Directory], options: Options, buffers: int) -> None:
        """``buffers``: number of chunks that it keeps in memory.

        Raises SampleError where a data file cannot be opened, InvalidFile for one of another size.
        """
        if not hasattr(_native, "SampleReader"):
            raise SampleError("sample stores are read with means that only Linux has: mount this one there")
        self._directories, self._options, self._buffers = directories, options, buffers
        self._files: list[list[StoreFile]] = []
        self._lock = threading.Lock()
        self._fetcher: Fetcher | None = None
        self._reader: _native.SampleReader | None = None  # None: before its first use, and after the last
        self.feed: _native.SampleFeed | None = None
        self.epochs = 0
        self.epoch_size: int | None = None
        self.epoch_is_in_parent = self.is_closed = self._looked_for_io_uring = False
        try:
            for directory in directories:
                self._files.append([])
                for number, data_file in enumerate(directory.manifest.data_files):
                    wanted_bytes = data_file.chunks * directory.manifest.chunk_bytes
                    self._files[-1].append(directory.place.open(data_file_name(number), wanted_bytes))
            self.io_path = self._choose_io()
        except BaseException:
            self.close()
            raise

    def reader(self) -> _native.SampleReader:
        """What reads, made at first need: none of its threads survives a fork. SampleError once closed."""
        if self._reader is not None:  # the usual case
            return self._reader
        with self._lock:
            if self.is_closed:
                raise SampleError(CLOSED)
            if self._reader is None:
                fetched = {
                    (partition, number): opened.fetched
                    for partition, files in enumerate(self._files)
                    for number, opened in enumerate(files)
                    if opened.fetched is not None
                }
                reader = _native.SampleReader(
                    [self._partition(number) for number in range(len(self._directories))],
                    buffers=self._buffers,
                    direct=self.io_path.io == "direct",
                    verify=self._options.verify,
                    copy_threads=_copy_threads(self._options.copy_threads),
                    depth=_DEPTH,
                    fetched=[(*which, *_held(each)) for which, each in fetched.items()],
                )
                try:
                    self._fetcher = Fetcher(reader, fetched) if fetched else None
                except RuntimeError as error:
                    raise SampleError(
                        f"no thread can be started to fetch samples: {error}. Allow this process more threads"
                    ) from error
                self._reader = reader
            return self._reader

    def counters(self) -> dict[str, int]:
        """What this process has read so far; `requests` and `fetched_bytes` from object stores."""
        counted, fetcher = self.reader().counters(), self._fetcher
        if fetcher is not None:
            counted |= {"requests": fetcher.requests, "fetched_bytes": fetcher.fetched_bytes}
        return counted

    def begin(self, order: _native.SampleOrder, ahead: int) -> None:
        """Begin an epoch; the one before ends. Raises SampleError or SampleFailure once closed."""
        reader, size = self.reader(), order.size
        feed, self.feed = self.feed, None
        if feed is not None:
            feed.close()
        self.feed = reader.feed(order, ahead, self._options.prefetch_bytes, self._options.on_damage == "skip")
        self.epoch_size, self.epoch_is_in_parent = size, False
        self.epochs += 1

    def warn_without_io_uring(self) -> None:
        """After a read: log once if it had to do without io_uring."""
        reader, looked = self._reader, self._looked_for_io_uring
        self._looked_for_io_uring = True
        if not looked and reader is not None and reader.counters()["io_uring"] == 0:
            log_once(
                "io_uring is refused here, as containers often do: threads read samples by plain reads, "
                "which costs some speed. A seccomp profile that allows io_uring helps."
            )

    def after_fork(self) -> None:
        """In a forked child: the files are shared; the parent's reader, and its feed, are its own."""
        self._lock = threading.Lock()
        _inherited.append((self._reader, self.feed, self._fetcher))
        self.epoch_is_in_parent = self.epoch_is_in_parent or self.feed is not None
        self._reader = self.feed = self._fetcher = None

    def close(self) -> None:
        """Close all files and release all memory. Idempotent."""
        with self._lock:
            self.is_closed = True
            reader, feed = self._reader, self.feed
            self._reader = self.feed = None
            if feed is not None:
                feed.close()
            opened, self._files = self._files, []
            if reader is not None:
                _left_behind.append(opened)  # until it is known that nobody reads: Ctrl-C may end the wait
                if not reader.close(_CLOSE_TIMEOUT_S):
                    logger.warning(
                        "a read did not end within %g s after its store was closed: its memory and file are "
                        "left behind. Look at the disk's health (dmesg)",
                        _CLOSE_TIMEOUT_S,
                    )
                    return
                _left_behind[:] = [each for each in _left_behind if each is not opened]
            closing: list[StoreFile | Place] = [each for files in opened for each in files]
            closing += [directory.place for directory in self._directories]
            if self._fetcher is None:
                _close_all(closing)
            else:
                self._fetcher.close(partial(_close_all, closing))

    def _choose_io(self) -> DataFileIo:
        """For what lies on this machine: what lies on others never passes through the page cache."""
        local = [number for number, each in enumerate(self._directories) if not each.place.is_remote]
        if not local:
            if any(opened.fetched is not None for files in self._files for opened in files):
                return DataFileIo("buffered", "samples lie in an object store: what is kept of it is read so")
            return DataFileIo("direct", "samples lie on another machine, which no page cache stands before")
        can_direct = all(opened.target().direct >= 0 for number in local for opened in self._files[number])
        size_bytes = sum(self._directories[number].manifest.size_bytes for number in local)
        return choose_io(self._options.io, size_bytes, available_bytes(), can_direct)

    def _partition(self, number: int) -> tuple[object, ...]:
        directory = self._directories[number]
        data_files = [
            (data_file.samples, data_file.chunks, data_file.size_bytes, *opened.target())
            for data_file, opened in zip(directory.manifest.data_files, self._files[number], strict=True)
        ]
        chunks = directory.chunks.view(np.uint8).reshape(-1, 16)
        chunk_bytes = directory.manifest.chunk_bytes
        return directory.entries, directory.sums, chunks, directory.large, chunk_bytes, data_files


def _held(file: Fetched) -> tuple[Bytes, int]:
    """What is here of a file that is fetched, and the descriptor of that."""
    return (np.empty(0, np.uint8), -1) if file.kept is None else (file.kept.held, file.kept.held_file)


def _close_all(closing: Sequence[StoreFile | Place]) -> None:
    for each in closing:
        each.close()


def _copy_threads(wanted: int | None) -> int:
    """Besides the one that assembles, on a machine of few cores others only take its time."""
    if wanted is not None:
        return wanted
    cores = len(os.sched_getaffinity(0))
    return 0 if cores <= 2 else min(_MOST_COPY_THREADS, cores // 2)
