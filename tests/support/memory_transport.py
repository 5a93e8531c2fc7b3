"""A transport to memory instead of a disk: for tests, with faults and delays on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from penstock.storage.aligned import align_down, align_up, view_at
from penstock.storage.transfer import Transfer, move_fully
from penstock.storage.workers import Workers

PADDING = b"\xa5"


class MemoryTransport(Workers):
    """Satisfies Transport. The name of a file is its ``buffered`` descriptor, which need not be open; it
    holds what was written to it, and zeros before that. Writes fill their padding with PADDING.

    delay_s       each transfer takes this long at least
    fault         gives the errno a transfer fails with, 0 for none; asked before each transfer
    short_bytes   at most so many bytes are moved at once
    files         what the files hold, to be shared with other transports
    """

    methods: tuple[str, ...] = ("direct", "staged", "buffered", "mapped")

    def __init__(
        self,
        threads: int = 4,
        *,
        delay_s: float = 0.0,
        fault: Callable[[Transfer], int] | None = None,
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

    def perform(self, transfer: Transfer, begin: int, end: int) -> int:
        if self.delay_s:
            time.sleep(self.delay_s)
        if self.fault is not None and (error_number := self.fault(transfer)):
            return error_number
        if transfer.kind == "write" and transfer.padded:
            self._pad(transfer)

        def move(done: int, size_bytes: int) -> int:
            if self.short_bytes is not None:
                size_bytes = min(size_bytes, done + self.short_bytes)
            return self._copy(transfer, begin + done, begin + size_bytes)

        return move_fully(move, end - begin)

    def _pad(self, transfer: Transfer) -> None:
        low, high = transfer.offset, transfer.offset + transfer.size_bytes
        alignment = transfer.file.alignment_bytes
        with self._lock:
            for begin, end in ((align_down(low, alignment), low), (high, align_up(high, alignment))):
                self._content(transfer, end)[begin:end] = PADDING * (end - begin)

    def _copy(self, transfer: Transfer, begin: int, end: int) -> int:
        low, high = transfer.offset + begin, transfer.offset + end
        with self._lock:
            if transfer.kind == "write":
                memory = view_at(transfer.address + begin, end - begin, writable=False)
                self._content(transfer, high)[low:high] = memory
                return end - begin
            found = self._content(transfer, 0)[low:high]
            view_at(transfer.address + begin, end - begin, writable=True)[: len(found)] = found
            return len(found)

    def _content(self, transfer: Transfer, size_bytes: int) -> bytearray:
        content = self._files.setdefault(transfer.file.buffered, bytearray())
        if len(content) < size_bytes:
            content.extend(bytes(size_bytes - len(content)))
        return content
