"""A disk of a given rate, for tests and benchmarks of what follows from it."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass

from penstock.storage.aligned import view_at
from penstock.storage.transfer import Transfer, move_fully
from penstock.storage.workers import Workers


@dataclass
class Rate:
    """Of each direction. It may change at any time, and counts for what begins from then on."""

    bytes_per_s: float


class SlowDisk(Workers):
    """Satisfies Transport: through the page cache, one transfer at a time in each direction."""

    methods = ("direct",)

    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._alone = {"write": threading.Lock(), "read": threading.Lock()}
        super().__init__(4, "slow-disk")

    def perform(self, transfer: Transfer, begin: int, end: int) -> int:
        with self._alone[transfer.kind]:
            begun_s, seconds = time.perf_counter(), (end - begin) / self._rate.bytes_per_s
            error_number = move_fully(lambda done, size: self._move(transfer, begin + done, end), end - begin)
            time.sleep(max(0.0, begun_s + seconds - time.perf_counter()))
            return error_number

    def _move(self, transfer: Transfer, begin: int, end: int) -> int:
        file, offset = transfer.file.buffered, transfer.offset + begin
        if transfer.kind == "write":
            memory = view_at(transfer.address + begin, end - begin, writable=False)
            return os.pwrite(file, memory, offset)
        return os.preadv(file, [view_at(transfer.address + begin, end - begin, writable=True)], offset)
