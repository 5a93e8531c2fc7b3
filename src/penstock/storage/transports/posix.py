"""Blocking reads and writes on a few threads: works wherever Python does."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence

from penstock.storage.aligned import AlignedBuffer, view_at
from penstock.storage.transports.contract import OnComplete, Request, move_fully
from penstock.storage.transports.workers import Workers

BOUNCE_BYTES = 2 << 20


class PosixTransport:
    """Satisfies Transport with ``preadv`` and ``pwrite``, which run without the GIL.

    threads           requests carried out at once
    alignment_bytes   what the files demand of addresses, offsets and sizes: 4096 where they were
                      opened for direct I/O, else 1. Memory that does not meet it is copied
                      through a buffer that each thread keeps.
    """

    def __init__(self, threads: int = 4, alignment_bytes: int = 1) -> None:
        self._alignment = alignment_bytes
        self._workers = Workers(threads, "posix", lambda: _Mover(alignment_bytes).perform)

    def submit(self, requests: Sequence[Request], on_complete: OnComplete) -> None:
        self._workers.submit(requests, on_complete)

    def cancel(self, requests: Sequence[Request]) -> int:
        return self._workers.cancel(requests)

    def close(self) -> None:
        self._workers.close()


class _Mover:
    """What one thread needs to carry out requests."""

    def __init__(self, alignment_bytes: int) -> None:
        self._alignment = alignment_bytes
        self._bounce: AlignedBuffer | None = None

    def perform(self, request: Request) -> int:
        if request.offset % self._alignment:
            return errno.EINVAL
        direct = request.size_bytes
        if request.address % self._alignment:
            direct = 0
        direct -= direct % self._alignment
        return self._move(request, request.address, 0, direct) or self._move_copied(request, direct)

    def _move_copied(self, request: Request, begin: int) -> int:
        """Move what of the request lies from ``begin`` on through the bounce buffer."""
        while begin < request.size_bytes:
            if self._bounce is None:
                self._bounce = AlignedBuffer(BOUNCE_BYTES)
            size = min(BOUNCE_BYTES, request.size_bytes - begin)
            padded = -(-size // self._alignment) * self._alignment
            if request.kind == "write":
                ctypes.memmove(self._bounce.address, request.address + begin, size)
            if error_number := self._move(request, self._bounce.address, begin, padded):
                return error_number
            if request.kind == "read":
                ctypes.memmove(request.address + begin, self._bounce.address, size)
            begin += size
        return 0

    def _move(self, request: Request, address: int, begin: int, size_bytes: int) -> int:
        """Move file bytes ``begin`` and on of the request, from or to ``address``."""
        if size_bytes == 0:
            return 0
        file, offset = request.file, request.offset + begin
        memory = view_at(address, size_bytes, writable=request.kind == "read")
        if request.kind == "write":
            return move_fully(
                lambda done, end: os.pwrite(file, memory[done:end], offset + done),
                size_bytes,
                self._alignment,
            )
        return move_fully(
            lambda done, end: os.preadv(file, [memory[done:end]], offset + done), size_bytes, self._alignment
        )
