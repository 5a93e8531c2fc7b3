"""A transport to memory instead of a disk: for tests, with faults and delays on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from penstock.storage.aligned import align_down, align_up, view_at
from penstock.storage.transports.contract import Request, move_fully
from penstock.storage.transports.workers import Workers

PADDING = b"\xa5"


class MemoryTransport(Workers):
    """Satisfies Transport. The name of a file is its ``buffered`` descriptor, which need not be open; it
    holds what was written to it, and zeros before that. Writes fill their padding with PADDING.

    delay_s       each request takes this long at least
    fault         gives the errno a request fails with, 0 for none; asked before each request
    short_bytes   at most so many bytes are moved at once
    files         what the files hold, to be shared with other transports
    """

    methods: tuple[str, ...] = ("direct", "staged", "buffered", "mapped")

    def __init__(
        self,
        threads: int = 4,
        *,
        delay_s: float = 0.0,
        fault: Callable[[Request], int] | None = None,
        short_bytes: int | None = None,
        files: dict[int, bytearray] | None = None,
    ) -> None:
        self.delay_s = delay_s
        self.fault = fault
        self.short_bytes = short_bytes
        self._files = {} if files is None else files
        self._lock = threading.Lock()
        super().__init__(threads, "memory")

    def content(self, name: int) -> bytes:
        """All that was written to the file so far."""
        with self._lock:
            return bytes(self._files.get(name, b""))

    def perform(self, request: Request, begin: int, end: int) -> int:
        if self.delay_s:
            time.sleep(self.delay_s)
        if self.fault is not None and (error_number := self.fault(request)):
            return error_number
        if request.kind == "write" and request.padded:
            self._pad(request)

        def move(done: int, size_bytes: int) -> int:
            if self.short_bytes is not None:
                size_bytes = min(size_bytes, done + self.short_bytes)
            return self._copy(request, begin + done, begin + size_bytes)

        return move_fully(move, end - begin)

    def _pad(self, request: Request) -> None:
        low, high = request.offset, request.offset + request.size_bytes
        alignment = request.file.alignment_bytes
        with self._lock:
            for begin, end in ((align_down(low, alignment), low), (high, align_up(high, alignment))):
                self._content(request, end)[begin:end] = PADDING * (end - begin)

    def _copy(self, request: Request, begin: int, end: int) -> int:
        low, high = request.offset + begin, request.offset + end
        with self._lock:
            if request.kind == "write":
                memory = view_at(request.address + begin, end - begin, writable=False)
                self._content(request, high)[low:high] = memory
                return end - begin
            found = self._content(request, 0)[low:high]
            view_at(request.address + begin, end - begin, writable=True)[: len(found)] = found
            return len(found)

    def _content(self, request: Request, size_bytes: int) -> bytearray:
        content = self._files.setdefault(request.file.buffered, bytearray())
        if len(content) < size_bytes:
            content.extend(bytes(size_bytes - len(content)))
        return content
