"""A disk of a given rate, for tests and benchmarks of what follows from it."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass

from penstock.storage.aligned import view_at
from penstock.storage.transports.contract import Request, move_fully
from penstock.storage.transports.workers import Workers


@dataclass
class Rate:
    """Of each direction. It may change at any time, and counts for what begins from then on."""

    bytes_per_s: float


class SlowDisk(Workers):
    """Satisfies Transport: through the page cache, one request at a time in each direction."""

    methods = ("direct",)

    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._alone = {"write": threading.Lock(), "read": threading.Lock()}
        super().__init__(4, "slow-disk")

    def perform(self, request: Request, begin: int, end: int) -> int:
        with self._alone[request.kind]:
            begun_s, seconds = time.perf_counter(), (end - begin) / self._rate.bytes_per_s
            error_number = move_fully(lambda done, size: self._move(request, begin + done, end), end - begin)
            time.sleep(max(0.0, begun_s + seconds - time.perf_counter()))
            return error_number

    def _move(self, request: Request, begin: int, end: int) -> int:
        file, offset = request.file.buffered, request.offset + begin
        if request.kind == "write":
            memory = view_at(request.address + begin, end - begin, writable=False)
            return os.pwrite(file, memory, offset)
        return os.preadv(file, [view_at(request.address + begin, end - begin, writable=True)], offset)
