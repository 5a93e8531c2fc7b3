"""Threads that carry out transfers by priority, for transports whose calls block."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Sequence
from operator import attrgetter

from penstock.storage.aligned import align_down
from penstock.storage.transfer import DEMAND, EVICT, FOR_EVER_S, Transfer

logger = logging.getLogger("penstock")


class Workers:
    """The half of the transport contract that does not depend on where the bytes go, to inherit from.

    piece_bytes    larger transfers are cut into pieces of about this size, which several threads
                   carry out at once; None to leave them whole. A multiple of the files' alignment
    """

    methods: tuple[str, ...]

    def __init__(self, threads: int, name: str, piece_bytes: int | None = None) -> None:
        self._piece_bytes = piece_bytes
        self._waiting: list[_Job] = []  # of which some piece has not begun, in the order they came
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"penstock-{name}-{index}", daemon=True)
            for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def perform(self, transfer: Transfer, begin: int, end: int) -> int:
        """Carry out the bytes [begin, end) of the transfer. Gives 0, or an errno."""
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
            self._changed.notify(sum(job.pieces for job in jobs))

    def cancel(self, transfers: Sequence[Transfer]) -> int:
        with self._changed:
            cancelled = [job for job in self._waiting if job.transfer in transfers and not job.begun]
            for job in cancelled:
                self._waiting.remove(job)
                job.stop(errno.ECANCELED)
        for job in cancelled:
            job.complete()
        return len(cancelled)

    def hurry(self, transfers: Sequence[Transfer]) -> None:
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
            begin, end = job.begin_piece()
            if job.begun == job.pieces:
                self._waiting.remove(job)
        try:
            error_number = self.perform(job.transfer, begin, end)
        except Exception:
            logger.exception("a transport failed: %s", job.transfer)
            error_number = errno.EIO
        with self._changed:
            job.ended += 1
            if error_number and not job.error_number:
                if job.begun < job.pieces:  # the rest is not worth the effort
                    self._waiting.remove(job)
                job.stop(error_number)
            over = job.ended == job.pieces
        if over:
            job.complete()
        return True


class _Job:
    """A transfer under way. All but `complete` happens under the lock of the workers.

    priority   of those pieces that have not begun
    """

    def __init__(self, transfer: Transfer, piece_bytes: int | None) -> None:
        self.transfer = transfer
        self.priority = transfer.priority
        self.pieces = 1 if piece_bytes is None else max(1, -(-transfer.size_bytes // piece_bytes))
        self.begun = self.ended = self.error_number = 0
        self._started_s = 0.0

    def begin_piece(self) -> tuple[int, int]:
        if not self.begun:
            self._started_s = time.perf_counter()
        begin = self._cut_at(self.begun)
        self.begun += 1
        return begin, self._cut_at(self.begun)

    def stop(self, error_number: int) -> None:
        """Begin no further piece."""
        self.error_number = error_number
        self.ended += self.pieces - self.begun
        self.begun = self.pieces

    def complete(self) -> None:
        self.transfer.end(self.error_number, self._started_s)

    def _cut_at(self, piece: int) -> int:
        """Where a piece begins, counted from the first byte of the transfer. The pieces share no block of the
        file."""
        transfer = self.transfer
        if piece in (0, self.pieces):
            return transfer.size_bytes if piece else 0
        end = transfer.offset + transfer.size_bytes * piece // self.pieces
        return align_down(end, transfer.file.alignment_bytes) - transfer.offset
