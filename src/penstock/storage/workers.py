"""Threads that carry out transfers by priority, for transports whose calls block."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from operator import attrgetter

from penstock.storage.aligned import align_down
from penstock.storage.transfer import DEMAND, EVICT, FOR_EVER_S, Transfer

logger = logging.getLogger("penstock")


class Workers:
    """Base class of transports: threads, priorities and ends of transfers. Subclasses implement `perform`.

    piece_bytes    larger transfers are cut into pieces of about this size, which several threads
                   carry out at once; None to leave them whole. A multiple of the files' alignment
    """

    methods: tuple[str, ...]

    def __init__(self, threads: int, name: str, piece_bytes: int | None = None) -> None:
        self._piece_bytes = piece_bytes
        self._waiting: list[_Job] = []  # of which a piece has not begun, in the order they came
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"penstock-{name}-{index}", daemon=True)
            for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def perform(self, transfer: Transfer, begin: int, end: int) -> int:
        """Move the bytes [begin, end) of the transfer. Returns 0, or an errno."""
        raise NotImplementedError

    def submit(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            if transfer.method not in self.methods:
                raise ValueError(f"there is no method {transfer.method!r}, only {', '.join(self.methods)}")
            if not DEMAND <= transfer.priority <= EVICT:
                raise ValueError(f"there is no priority {transfer.priority}, only {DEMAND} to {EVICT}")
        jobs = [_Job(transfer, self._piece_bytes) for transfer in transfers]
        with self._changed:
            if self._closed:
                raise ValueError("the transport is closed")
            self._waiting += jobs
            self._changed.notify(sum(len(job.waiting) for job in jobs))

    def cancel(self, transfers: Sequence[Transfer]) -> int:
        with self._changed:
            cancelled = [job for job in self._waiting if job.transfer in transfers and not job.started_s]
            for job in cancelled:
                self._waiting.remove(job)
        for job in cancelled:
            job.transfer.end(errno.ECANCELED)
        return len(cancelled)

    def raise_priority(self, transfers: Sequence[Transfer]) -> None:
        with self._changed:
            for job in [job for job in self._waiting if job.priority > DEMAND and job.transfer in transfers]:
                job.priority = DEMAND
                self._waiting.remove(job)
                self._waiting.append(job)

    def close(self, timeout_s: float = FOR_EVER_S) -> bool:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        deadline_s = time.monotonic() + timeout_s
        others = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in others:
            thread.join(max(deadline_s - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in others)

    def _run(self) -> None:
        while self._serve():
            pass

    def _serve(self) -> bool:
        # A function of its own, so that no local holds a transfer's memory while waiting.
        with self._changed:
            while not self._waiting:
                if self._closed:
                    return False
                self._changed.wait()
            job = min(self._waiting, key=attrgetter("priority"))
            begin, end = job.waiting.popleft()
            job.in_flight += 1
            job.started_s = job.started_s or time.perf_counter()
            if not job.waiting:
                self._waiting.remove(job)
        try:
            error_number = self.perform(job.transfer, begin, end)
        except Exception:
            logger.exception("a transport failed: %s", job.transfer)
            error_number = errno.EIO
        with self._changed:
            job.in_flight -= 1
            job.error_number = job.error_number or error_number
            if error_number and job.waiting:  # the rest is not worth the effort
                job.waiting.clear()
                self._waiting.remove(job)
            over = not job.waiting and not job.in_flight
        if over:
            job.transfer.end(job.error_number, job.started_s)
        return True


class _Job:
    """A transfer under way.

    waiting     pieces of it, [begin, end), that have not begun; they share no block of the file
    priority    of these
    in_flight   pieces that have begun and not ended
    """

    def __init__(self, transfer: Transfer, piece_bytes: int | None) -> None:
        self.transfer, self.priority = transfer, transfer.priority
        self.in_flight = self.error_number = 0
        self.started_s = 0.0
        count = 1 if piece_bytes is None else max(1, -(-transfer.size_bytes // piece_bytes))
        ends = (transfer.offset + transfer.size_bytes * piece // count for piece in range(1, count))
        edges = (align_down(end, transfer.file.alignment_bytes) - transfer.offset for end in ends)
        self.waiting = deque(pairwise((0, *edges, transfer.size_bytes)))
