"""A transport to memory instead of a disk: for tests, with faults and delays on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from penstock.storage.aligned import view_at
from penstock.storage.transports.contract import OnComplete, Request, move_fully
from penstock.storage.transports.workers import Workers


class MemoryTransport:
    """Satisfies Transport; a file is whatever was written under its number, and zeros elsewhere.

    delay_s       each request takes this long at least
    fault         gives the errno a request fails with, 0 for none; asked before each request
    short_bytes   at most so many bytes are moved at once
    """

    def __init__(
        self,
        threads: int = 4,
        alignment_bytes: int = 1,
        *,
        delay_s: float = 0.0,
        fault: Callable[[Request], int] | None = None,
        short_bytes: int | None = None,
    ) -> None:
        self.delay_s = delay_s
        self.fault = fault
        self.short_bytes = short_bytes
        self._alignment = alignment_bytes
        self._files: dict[int, bytearray] = {}
        self._lock = threading.Lock()
        self._workers = Workers(threads, "memory", lambda: self._perform)

    def submit(self, requests: Sequence[Request], on_complete: OnComplete) -> None:
        self._workers.submit(requests, on_complete)

    def cancel(self, requests: Sequence[Request]) -> int:
        return self._workers.cancel(requests)

    def close(self) -> None:
        self._workers.close()

    def content(self, file: int) -> bytes:
        """All that was written to ``file`` so far."""
        with self._lock:
            return bytes(self._files.get(file, b""))

    def _perform(self, request: Request) -> int:
        if self.delay_s:
            time.sleep(self.delay_s)
        if self.fault is not None and (error_number := self.fault(request)):
            return error_number

        def move(begin: int, end: int) -> int:
            if self.short_bytes is not None:
                end = min(end, begin + self.short_bytes)
            self._copy(request, begin, end)
            return end - begin

        return move_fully(move, request.size_bytes)

    def _copy(self, request: Request, begin: int, end: int) -> None:
        memory = view_at(request.address + begin, end - begin, writable=request.kind == "read")
        low, high = request.offset + begin, request.offset + end
        with self._lock:
            content = self._files.setdefault(request.file, bytearray())
            if len(content) < high:
                content.extend(bytes(high - len(content)))
            if request.kind == "write":
                content[low:high] = memory
            else:
                memory[:] = content[low:high]
