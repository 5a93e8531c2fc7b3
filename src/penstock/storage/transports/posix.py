"""Blocking reads, writes and mappings on a few threads: works wherever Python does."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from penstock.storage.aligned import AlignedBuffer, align_down, align_up, view_at
from penstock.storage.transports.contract import Completion, OnComplete, Request, move_fully
from penstock.storage.transports.workers import Workers, complete

STAGING_BYTES = 1 << 20

# A read with odd ends costs three calls, or one and a copy. The copy is quicker up to about here.
_COPIED_READ_BYTES = 256 << 10

# About what is copied in the time that another thread takes to wake up twice.
_AT_ONCE_BYTES = 1 << 20

_NOWAIT = getattr(os, "RWF_NOWAIT", 0)

_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # Linux 5.14

# Moves the bytes [low, high) of the request's file; gives 0, or an errno.
_Move = Callable[[Request, int, int], int]


class PosixTransport:
    """Satisfies Transport with system calls that wait, all made without the GIL.

    threads         pieces of requests that are under way at once
    request_bytes   larger requests are cut into pieces of about this size

    A small "buffered" request is carried out in `submit`, where that need not wait for the disk: copying
    takes less time than handing it over.
    """

    methods: tuple[str, ...] = ("direct", "staged", "buffered", "mapped")

    def __init__(self, threads: int = 4, request_bytes: int = 4 << 20) -> None:
        self._workers = Workers(threads, "posix", self.methods, lambda: _Mover().perform, request_bytes)

    def submit(self, requests: Sequence[Request], on_complete: OnComplete) -> None:
        self._workers.check(requests)
        for_workers = [request for request in requests if not _moved_at_once(request, on_complete)]
        if for_workers:
            self._workers.submit(for_workers, on_complete)

    def cancel(self, requests: Sequence[Request]) -> int:
        return self._workers.cancel(requests)

    def hurry(self, requests: Sequence[Request]) -> None:
        self._workers.hurry(requests)

    def close(self, timeout_s: float | None = None) -> bool:
        return self._workers.close(timeout_s)


def _moved_at_once(request: Request, on_complete: OnComplete) -> bool:
    """Carry out a small request now. False: it is none, or would wait for the disk."""
    if request.method != "buffered" or request.size_bytes > _AT_ONCE_BYTES:
        return False
    started_s = time.perf_counter()
    error_number = 0
    if request.kind == "write":
        error_number = _move_buffered(request, request.offset, request.offset + request.size_bytes)
    elif not _NOWAIT or not _is_read_at_once(request):
        return False
    complete(on_complete, Completion(request, error_number, started_s, time.perf_counter()))
    return True


def _is_read_at_once(request: Request) -> bool:
    memory = view_at(request.address, request.size_bytes, writable=True)
    try:
        return os.preadv(request.file.buffered, [memory], request.offset, _NOWAIT) == request.size_bytes
    except OSError:  # not in the page cache, or not known to the file system
        return False


class _Mover:
    """What one thread needs to carry out requests."""

    def __init__(self) -> None:
        self._staging: AlignedBuffer | None = None

    def perform(self, request: Request, begin: int, end: int) -> int:
        for move, low, high in self._route(request, request.offset + begin, request.offset + end):
            if error_number := move(request, low, high):
                return error_number
        return 0

    def _route(self, request: Request, low: int, high: int) -> list[tuple[_Move, int, int]]:
        """By which calls the bytes [low, high) of the file are moved."""
        if request.method == "mapped":
            return [(_move_mapped, low, high)]
        if request.method == "buffered" or request.file.direct < 0:
            return [(_move_buffered, low, high)]
        alignment = request.file.alignment_bytes
        inner_low, inner_high = align_up(low, alignment), align_down(high, alignment)
        # A block that is shared with others is changed in the page cache, which knows its other bytes.
        shared = request.kind == "write" and not request.padded
        edges = _move_buffered if shared else self._move_staged
        inner = self._move_staged
        if request.method == "direct" and (request.address - request.offset) % alignment == 0:
            inner = _move_direct
        odd = (inner_low, inner_high) != (low, high)
        if odd and request.kind == "read" and high - low <= _COPIED_READ_BYTES:
            inner = self._move_staged
        if inner_low >= inner_high or edges == inner:
            return [(edges, low, high)]
        parts = [(edges, low, inner_low), (inner, inner_low, inner_high), (edges, inner_high, high)]
        return [part for part in parts if part[1] < part[2]]

    def _move_staged(self, request: Request, low: int, high: int) -> int:
        """Move whole blocks through the staging buffer, and copy what is wanted of them."""
        file, alignment = request.file, request.file.alignment_bytes
        if self._staging is None:
            self._staging = AlignedBuffer(max(STAGING_BYTES, alignment))
        staging, view = self._staging.address, self._staging.view()
        while low < high:
            block_low = align_down(low, alignment)
            stop = min(high, block_low + self._staging.size_bytes)
            block_high = align_up(stop, alignment)
            address, skipped = request.address + low - request.offset, low - block_low
            size = stop - low
            if request.kind == "write":
                ctypes.memset(staging, 0, skipped)  # no other tensor's bytes go to the file
                ctypes.memmove(staging + skipped, address, size)
                ctypes.memset(staging + skipped + size, 0, block_high - stop)
                error_number = _write(file.direct, view[: block_high - block_low], block_low, alignment)
            else:
                # The file may end inside the last block.
                needed_bytes = stop - block_low
                blocks = view[: block_high - block_low]
                error_number = _read(file.direct, blocks, block_low, alignment, needed_bytes)
                if not error_number:
                    ctypes.memmove(address, staging + skipped, size)
            if error_number:
                return error_number
            low = stop
        return 0


def _move_direct(request: Request, low: int, high: int) -> int:
    return _move_in_place(request, low, high, request.file.direct, request.file.alignment_bytes)


def _move_buffered(request: Request, low: int, high: int) -> int:
    return _move_in_place(request, low, high, request.file.buffered, 1)


def _move_in_place(request: Request, low: int, high: int, file: int, alignment_bytes: int) -> int:
    address = request.address + low - request.offset
    memory = view_at(address, high - low, writable=request.kind == "read")
    if request.kind == "write":
        return _write(file, memory, low, alignment_bytes)
    return _read(file, memory, low, alignment_bytes, high - low)


def _write(file: int, memory: memoryview, offset: int, alignment_bytes: int) -> int:
    return move_fully(
        lambda done, _: os.pwrite(file, memory[done:], offset + done), len(memory), alignment_bytes
    )


def _read(file: int, memory: memoryview, offset: int, alignment_bytes: int, needed_bytes: int) -> int:
    """Fill ``memory``, of which the first ``needed_bytes`` must be there."""
    return move_fully(
        lambda done, _: os.preadv(file, [memory[done:]], offset + done), needed_bytes, alignment_bytes
    )


def _move_mapped(request: Request, low: int, high: int) -> int:
    writes = request.kind == "write"
    try:
        # Touching a page of a mapping that the file does not reach would end the process.
        if os.fstat(request.file.buffered).st_size < high:
            return errno.EIO
        with _mapping(request.file.buffered, low, high, writes) as mapped:
            address = request.address + low - request.offset
            ctypes.memmove(*((mapped, address) if writes else (address, mapped)), high - low)
    except OSError as error:
        return error.errno or errno.EIO
    return 0


@contextlib.contextmanager
def _mapping(file: int, low: int, high: int, writes: bool) -> Iterator[int]:
    """The address at which byte ``low`` of the file is mapped. Raises OSError."""
    begin = align_down(low, mmap.ALLOCATIONGRANULARITY)
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writes else 0)
    with mmap.mmap(file, high - begin, flags=mmap.MAP_SHARED, prot=access, offset=begin) as mapping:
        address = int(np.frombuffer(mapping, np.uint8).ctypes.data)
        _populate(address, high - begin, writes)
        yield address + low - begin


def _populate(address: int, size_bytes: int, writes: bool) -> None:
    """Bring all pages in by one call, which gives an error where the disk fails, or is full: touching
    them would end the process instead. Raises OSError.

    Python's own madvise keeps the GIL.
    """
    if not sys.platform.startswith("linux"):
        return
    advice = _MADV_POPULATE_WRITE if writes else _MADV_POPULATE_READ
    library = ctypes.CDLL(None, use_errno=True)
    if library.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), advice) == 0:
        return
    error_number = ctypes.get_errno()
    if error_number != errno.EINVAL:  # a kernel that does not know the advice
        raise OSError(errno.EIO if error_number == errno.EFAULT else error_number, "cannot map")
