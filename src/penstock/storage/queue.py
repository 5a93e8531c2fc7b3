"""Starts transfers, calls back at their ends, and ends waits for a disk that hangs.

Transports order the transfers by priority. This queue isolates measurements: the cost of a transfer cannot be
measured while others are in flight. A measured transfer therefore has its direction (writes or reads) to
itself: it waits for those before it, and those behind it wait for it. A demand waits for no measurement: it
starts at once, and the measurement is given up.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from time import perf_counter

from penstock.errors import SpillError
from penstock.storage.transfer import DEMAND, Kind, Transfer, TransportBroken

logger = logging.getLogger("penstock")

CLOSED = "the spill space is closed: no tensor can be moved any more"


class _Direction:
    """Writes, or reads. `alone` is the measured transfer in flight."""

    def __init__(self) -> None:
        self.alone: Transfer | None = None
        self.in_flight: set[Transfer] = set()
        self.waiting: list[Transfer] = []
        self.progress_s = 0.0  # when one ended last

    @property
    def is_idle(self) -> bool:
        return not self.in_flight and not self.waiting

    def add(self, transfer: Transfer) -> Sequence[Transfer]:
        """Add a transfer. Returns the transfers to start now, in this order."""
        if not transfer.measured and self.alone is None and not self.waiting:
            self.in_flight.add(transfer)
            transfer.began_s = transfer.asked_s
            return (transfer,)
        has_company = not self.is_idle
        self.waiting.append(transfer)
        if transfer.priority == DEMAND and has_company:
            self.give_up_measuring()
        return self.take_ready()

    def give_up_measuring(self) -> None:
        """Measure neither the transfer in flight nor the waiting ones, so that none waits for another."""
        for transfer in (*([self.alone] if self.alone else ()), *self.waiting):
            transfer.measured = False
        self.alone = None
        self.waiting.sort(key=attrgetter("priority"))

    def take_overdue(self, now_s: float, timeout_s: float) -> list[Transfer]:
        """Remove the transfers that have waited for ``timeout_s`` in which none ended."""
        overdue = [e for e in self.waiting if now_s - max(e.asked_s, self.progress_s) >= timeout_s]
        if overdue:
            self.waiting = [each for each in self.waiting if each not in overdue]
            self.give_up_measuring()
        return overdue

    def take_out(self, transfer: Transfer, now_s: float) -> list[Transfer]:
        """Remove a transfer that has ended. Returns the transfers to start now."""
        self.in_flight.discard(transfer)
        self.progress_s = now_s
        if self.alone is transfer:
            self.alone = None
        return self.take_ready() if self.waiting else []

    def take_ready(self) -> list[Transfer]:
        ready: list[Transfer] = []
        while self.alone is None and self.waiting and not (self.waiting[0].measured and self.in_flight):
            first = self.waiting.pop(0)
            if first.measured:
                self.alone = first
            first.began_s = perf_counter()
            self.in_flight.add(first)
            ready.append(first)
        return ready


class Queue:
    """The transfers of a spill space. Every method may be called from any thread.

    timeout_s   where no transfer ends for so long, those that wait for their turn fail
    check       what is wrong with a transfer that is over: asked where it failed, or is checksummed
    record        called with the lock, and the time, once for each transfer that is over
    hang_error  what a transfer fails with that waited in vain

    lock        also of what `record` changes
    hangs       `close` gave up
    """

    def __init__(
        self,
        timeout_s: float,
        check: Callable[[Transfer], SpillError | None],
        record: Callable[[Transfer, float], None],
        hang_error: Callable[[], SpillError],
    ) -> None:
        self.lock = threading.Lock()
        self.hangs = False
        self._timeout_s = timeout_s
        self._check, self._record, self._hang_error = check, record, hang_error
        self._directions: dict[Kind, _Direction] = {"write": _Direction(), "read": _Direction()}
        self._calling_back: set[Transfer] = set()  # they are over, and their callbacks run
        self._watch: threading.Timer | None = None  # while something waits for its turn
        self._idle = threading.Condition(self.lock)
        self._closed = False

    def is_idle(self, kind: Kind) -> bool:
        return self._directions[kind].is_idle

    def admit(self, transfer: Transfer) -> Sequence[Transfer]:
        """Those to `start` now: this one, unless it waits for a measurement. Called with the lock."""
        direction = self._directions[transfer.kind]
        ready = direction.add(transfer)
        if direction.waiting and self._watch is None:
            self._begin_watch()
        return ready

    def start(self, ready: Iterable[Transfer]) -> None:
        """Hand them to their transports. Called without the lock."""
        waiting = iter(ready)
        for transfer in waiting:
            asked, parts = transfer.priority, transfer.parts or (transfer,)
            try:
                transfer.path.transport.submit(parts)
                if transfer.priority != asked:  # hurried meanwhile
                    transfer.path.transport.raise_priority(parts)
            except ValueError as error:  # the transport is closed, or broken
                text = str(error) if isinstance(error, TransportBroken) else f"{CLOSED}: {error}"
                self._fail([transfer], partial(SpillError, text))
            except BaseException:  # such as an interrupt: whether the transfer began is not known
                with self.lock:
                    others = self._take_out(transfer, perf_counter())
                self.start([*waiting, *others])
                raise

    def raise_priority(self, transfer: Transfer) -> None:
        with self.lock:
            if transfer.priority == DEMAND:
                return
            for each in (transfer, *transfer.parts):
                each.priority = DEMAND
            direction = self._directions[transfer.kind]
            if transfer in direction.waiting:
                direction.give_up_measuring()
            ready = direction.take_ready()
            begun = transfer in direction.in_flight
        self.start(ready)
        if begun:
            transfer.path.transport.raise_priority(transfer.parts or (transfer,))

    def end_part(self, transfer: Transfer, part: Transfer) -> None:
        """A part of the transfer has ended; the last one ends the transfer."""
        with self.lock:
            transfer.left -= 1
            transfer.started_s = min(transfer.started_s or math.inf, part.started_s)
            transfer.finished_s = max(transfer.finished_s, part.finished_s)
            transfer.abandoned |= part.abandoned
            transfer.may_land |= part.may_land
            if not part.error_number:
                part.keep = None
            elif transfer.failed is None:
                transfer.failed, transfer.error_number = part, part.error_number
            if transfer.left:
                return
        self.end(transfer)

    def end(self, transfer: Transfer, error: SpillError | None = None) -> None:
        """A transfer has ended: call back, and start those that waited for it. Called by transports, on any
        thread.

        error   of a transfer that never began
        """
        if transfer.rehearsed and transfer.measured and error is None and not transfer.error_number:
            transfer.rehearsed, transfer.left = False, len(transfer.parts)
            for each in (transfer, *transfer.parts):
                each.method, each.keep = transfer.path.method, transfer.keep
            transfer.began_s = perf_counter()
            self.start([transfer])
            return
        if error is None and (transfer.error_number or transfer.checked):
            error = self._check(transfer)
        transfer.error = error
        if not transfer.error_number:  # after an error the memory may still be in use
            transfer.keep = None  # the callback may free the memory
        now_s = perf_counter()
        with self.lock:
            self._record(transfer, now_s)
            self._calling_back.add(transfer)
            ready = self._take_out(transfer, now_s)
        try:
            transfer.callback(transfer)
        finally:
            self._calling_back.discard(transfer)
            if self._closed:
                with self.lock:
                    self._idle.notify_all()
            if ready:
                self.start(ready)

    def close(self, timeout_s: float) -> bool:
        """Wait for all transfers. False: none has ended for ``timeout_s``; those that had not begun were
        failed."""
        with self.lock:
            self._closed = True
            watch = self._watch
        if watch is not None:
            watch.cancel()
            watch.join(timeout_s)
        directions, began_s = self._directions.values(), perf_counter()
        with self.lock:
            while self._calling_back or not all(each.is_idle for each in directions):
                progress_s = max(began_s, *(each.progress_s for each in directions))
                left_s = progress_s + timeout_s - perf_counter()
                if left_s <= 0:
                    break
                self._idle.wait(left_s)
            else:
                return True
        self.give_up()
        return False

    def give_up(self) -> None:
        """The disk hangs: fail the transfers that have not begun."""
        self.hangs = True
        with self.lock:
            waiting = [e for each in self._directions.values() for e in each.take_overdue(math.inf, 0.0)]
            in_flight = [e for each in self._directions.values() for e in each.in_flight]
        self._fail(waiting, self._hang_error)
        for transfer in in_flight:
            transfer.path.transport.cancel(transfer.parts or (transfer,))

    def _take_out(self, transfer: Transfer, now_s: float) -> list[Transfer]:
        ready = self._directions[transfer.kind].take_out(transfer, now_s)
        if self._closed:
            self._idle.notify_all()
        return ready

    def _fail(self, transfers: Sequence[Transfer], error: Callable[[], SpillError]) -> None:
        """End transfers that never began."""
        for transfer in transfers:
            transfer.started_s = transfer.finished_s = perf_counter()
            try:
                self.end(transfer, error())
            except Exception:  # of the callback: call the others back all the same
                logger.exception("what follows a transfer failed")

    def _begin_watch(self) -> None:
        """Check the waiting transfers for a timeout, soon. Called with the lock."""
        self._watch = threading.Timer(self._timeout_s / 4, self._look)
        self._watch.daemon = True
        self._watch.name = "penstock-watch"
        self._watch.start()

    def _look(self) -> None:
        with self.lock:
            now_s, self._watch = perf_counter(), None
            overdue, ready = [], []
            for direction in self._directions.values():
                overdue += direction.take_overdue(now_s, self._timeout_s)
                ready += direction.take_ready()
            if not self._closed and any(each.waiting for each in self._directions.values()):
                self._begin_watch()
        self._fail(overdue, self._hang_error)
        self.start(ready)
