"""Spill space on one or several disks, and the transfers between it and memory."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from penstock.errors import InvalidArgument, SpillError, SpillSpaceFull
from penstock.storage.extents import ALIGNMENT_BYTES, Extent, Extents
from penstock.storage.spillfile import SpillFile
from penstock.storage.transports import TRANSPORTS, Completion, Request, Transport
from penstock.units import format_bytes

# Tensors are cut into pieces of this size, so that several threads share one.
REQUEST_BYTES = 4 << 20
THREADS = 4


class Transfer(NamedTuple):
    """A write or a read that is over.

    error                  None, or what went wrong: then the destination holds anything
    started_s, finished_s  time.perf_counter() when its first piece began and its last one ended
    """

    error: SpillError | None
    started_s: float
    finished_s: float


OnDone = Callable[[Transfer], None]


class SpillEngine:
    """Extents of spill space, written from memory and read back in the background. A context manager.

    directories     where the spill files go; with several, extents alternate between them
    capacity_bytes  most bytes on disk, None for as many as the disks hold
    threads         requests carried out at once
    request_bytes   size of the pieces a transfer is cut into, a multiple of 4096
    transport       a key of penstock.storage.transports.TRANSPORTS

    direct          every file bypasses the page cache
    written_bytes, read_bytes   moved so far

    Every method may be called from any thread. Raises SpillError where a directory cannot be used.
    """

    def __init__(
        self,
        directories: Sequence[Path | str] | Path | str,
        capacity_bytes: int | None = None,
        threads: int = THREADS,
        *,
        request_bytes: int = REQUEST_BYTES,
        transport: str = "posix",
    ) -> None:
        paths = [directories] if isinstance(directories, Path | str) else list(directories)
        if not paths or threads < 1 or request_bytes < 1 or request_bytes % ALIGNMENT_BYTES:
            raise InvalidArgument(
                f"{len(paths)} directories, {threads} threads and requests of {request_bytes} bytes cannot "
                f"be used: give one or more of each, and requests in multiples of {ALIGNMENT_BYTES} bytes"
            )
        if transport not in TRANSPORTS:
            raise InvalidArgument(f"{transport!r} is no transport: give one of {', '.join(TRANSPORTS)}")
        self._files: list[SpillFile] = []
        try:
            for path in paths:
                self._files.append(SpillFile(Path(path)))
        except BaseException:
            for file in self._files:
                file.close()
            raise
        share = None if capacity_bytes is None else capacity_bytes // len(paths)
        self._extents = [Extents(share, file=index) for index in range(len(paths))]
        self.direct = all(file.direct for file in self._files)
        self.capacity_bytes = capacity_bytes
        self.request_bytes = request_bytes
        self.written_bytes = 0
        self.read_bytes = 0
        self._lock = threading.Lock()
        self._closed = False
        alignment_bytes = ALIGNMENT_BYTES if any(file.direct for file in self._files) else 1
        self._transport: Transport = TRANSPORTS[transport](threads, alignment_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes of the extents in use."""
        return sum(extents.used_bytes for extents in self._extents)

    @property
    def file_bytes(self) -> int:
        """Bytes the spill files occupy on disk."""
        return sum(file.size_bytes for file in self._files)

    @property
    def free_bytes(self) -> int:
        """Bytes the file systems have free. Two directories on one file system count it twice."""
        return sum(file.free_bytes() for file in self._files)

    def allocate(self, size_bytes: int) -> Extent:
        """Space for ``size_bytes``. Raises SpillSpaceFull where the disk, or the capacity, is full."""
        with self._lock:
            self._check_open()
            refusal: SpillSpaceFull | None = None
            for index in sorted(range(len(self._files)), key=lambda index: self._extents[index].used_bytes):
                try:
                    return self._allocate_in(index, size_bytes)
                except SpillSpaceFull as error:
                    refusal = refusal or error
            assert refusal is not None
            raise refusal

    def release(self, extent: Extent) -> None:
        """Take the space back. No transfer of the extent may be in flight."""
        with self._lock:
            self._extents[extent.file].release(extent)

    def write(self, extent: Extent, address: int, size_bytes: int, keep: object, on_done: OnDone) -> None:
        """Copy memory to the extent; ``on_done`` is called once, on a thread of the engine.

        address   of the memory; a multiple of 4096 spares a copy
        keep      what keeps the memory alive: held until the transfer is over
        """
        self._start("write", extent, address, size_bytes, keep, on_done)

    def read(self, extent: Extent, address: int, size_bytes: int, keep: object, on_done: OnDone) -> None:
        """Copy from the extent to memory; as `write`."""
        self._start("read", extent, address, size_bytes, keep, on_done)

    def close(self) -> None:
        """Wait for transfers in flight, then give the disk space back. Idempotent."""
        with self._lock:
            self._closed = True
        self._transport.close()
        for file in self._files:
            file.close()

    def __enter__(self) -> SpillEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise SpillError("the spill engine is closed: no tensor can be moved any more")

    def _allocate_in(self, index: int, size_bytes: int) -> Extent:
        extents, file = self._extents[index], self._files[index]
        extent = extents.allocate(size_bytes)
        try:
            file.grow_to(extent.end, extents.capacity_bytes)
        except BaseException:
            extents.release(extent)
            raise
        return extent

    def _start(
        self,
        kind: Literal["write", "read"],
        extent: Extent,
        address: int,
        size_bytes: int,
        keep: object,
        on_done: OnDone,
    ) -> None:
        if not 0 < size_bytes <= extent.size_bytes:
            raise InvalidArgument(f"{size_bytes} bytes do not fit an extent of {extent.size_bytes} bytes")
        self._check_open()
        descriptor = self._files[extent.file].descriptor
        step = self.request_bytes
        requests = [
            Request(
                kind, descriptor, extent.offset + begin, address + begin, min(step, size_bytes - begin), keep
            )
            for begin in range(0, size_bytes, step)
        ]
        parts = _Parts(self, extent, kind, size_bytes, len(requests), on_done)
        try:
            self._transport.submit(requests, parts.completed)
        except ValueError:
            self._check_open()
            raise

    def _count(self, kind: str, size_bytes: int) -> None:
        with self._lock:
            if kind == "write":
                self.written_bytes += size_bytes
            else:
                self.read_bytes += size_bytes

    def _error(self, completion: Completion, extent: Extent) -> SpillError:
        request, number = completion.request, completion.error_number
        full = number in (errno.ENOSPC, errno.EDQUOT)
        remedy = "Free space there" if full else "Check the disk (dmesg, smartctl)"
        error = (SpillSpaceFull if full else SpillError)(
            f"the {request.kind} of {format_bytes(request.size_bytes)} at offset {request.offset} of the "
            f"spill file in {self._files[extent.file].directory} failed: {os.strerror(number)}. {remedy}, or "
            "choose another spill_dir."
        )
        error.errno = number
        return error


class _Parts:
    """Gathers the completions of one transfer's requests."""

    def __init__(
        self, engine: SpillEngine, extent: Extent, kind: str, size_bytes: int, count: int, on_done: OnDone
    ) -> None:
        self._engine = engine
        self._extent = extent
        self._kind = kind
        self._size_bytes = size_bytes
        self._left = count
        self._on_done = on_done
        self._lock = threading.Lock()
        self._failed: Completion | None = None
        self._started_s = float("inf")
        self._finished_s = 0.0

    def completed(self, completion: Completion) -> None:
        with self._lock:
            self._left -= 1
            self._started_s = min(self._started_s, completion.started_s)
            self._finished_s = max(self._finished_s, completion.finished_s)
            if completion.error_number:
                self._failed = self._failed or completion
            if self._left:
                return
        if self._failed is None:
            error = None
            self._engine._count(self._kind, self._size_bytes)
        else:
            error = self._engine._error(self._failed, self._extent)
        self._on_done(Transfer(error, self._started_s, self._finished_s))
