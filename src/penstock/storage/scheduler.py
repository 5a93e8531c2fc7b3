"""Starts transfers by priority, tells who asked when they are over, and ends waits for a disk that hangs.

A demand goes before a prefetch, and a prefetch before an eviction. Of several transfers in flight nobody
can say what each one costs. A transfer that is measured therefore has its direction (writes or reads) to
itself: it waits until those before it are over, and those behind it wait for it. A demand waits for no
measurement: it starts at once, and the measurement is given up.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from penstock.errors import SpillError
from penstock.storage.extents import Extent
from penstock.storage.io_paths import IoPath
from penstock.storage.transports import DEMAND, EVICT, Completion, Kind, Request, TransportBroken

logger = logging.getLogger("penstock")

CLOSED = "the spill space is closed: no tensor can be moved any more"


@dataclass(slots=True, eq=False)
class Transfer:
    """A write or a read of spill space: asked for, under way, or over.

    error                  None, or what went wrong: then the destination holds anything
    extent                 where in the space its bytes lie
    abandoned              it has failed, and the system may use its memory until the process ends
    unsettled              a write that may land once more, as of Completion
    started_s, finished_s  time.perf_counter() when its first piece began and its last one ended; 0 until then
    priority               DEMAND, PREFETCH or EVICT
    explores               its I/O path is not known to be the best
    measured               its cost is of interest: it has its direction to itself. Set to False where that is
                           given up
    rehearsed              it is carried out twice, and the second time is measured
    checked                its bytes are checksummed
    began_s                time.perf_counter() when it was handed to the transport
    """

    scheduler: Scheduler
    kind: Kind
    path: IoPath
    extent: Extent
    address: int
    size_bytes: int
    keep: object
    on_done: OnDone
    priority: int
    measured: bool
    explores: bool = False
    rehearsed: bool = False
    checked: bool = False
    error: SpillError | None = None
    started_s: float = 0.0
    finished_s: float = 0.0
    began_s: float = 0.0
    queued_s: float = 0.0
    requests: Sequence[Request] = ()  # none once it is over
    left: int = 0  # of several requests
    abandoned: bool = False
    unsettled: bool = False
    failed: Completion | None = None

    def hurry(self) -> None:
        """Somebody waits for it now: it is a demand from here on. Costs little where that changes nothing."""
        if self.priority != DEMAND:
            self.scheduler.hurry(self)


OnDone = Callable[[Transfer], None]


@dataclass(slots=True)
class _Direction:
    """Writes, or reads.

    alone       the one that is measured, and in flight
    waiting     by priority
    progress_s  when one was last over
    """

    alone: Transfer | None = None
    in_flight: set[Transfer] = field(default_factory=set)
    waiting: tuple[deque[Transfer], ...] = field(
        default_factory=lambda: tuple(deque() for _ in range(EVICT + 1))
    )
    progress_s: float = 0.0

    def add(self, transfer: Transfer) -> list[Transfer]:
        """Those that are to start now, ``transfer`` or others, in this order."""
        if transfer.priority == DEMAND and (self.in_flight or any(self.waiting)):
            transfer.measured = False
            self.give_up_measuring()
        transfer.queued_s = perf_counter()
        self.waiting[transfer.priority].append(transfer)
        return self.take_ready()

    def hurry(self, transfer: Transfer) -> list[Transfer]:
        """Make a demand of ``transfer``. Gives those that are to start now."""
        waits = transfer in self.waiting[transfer.priority]
        if waits:
            self.waiting[transfer.priority].remove(transfer)
            self.waiting[DEMAND].append(transfer)
            transfer.requests = [request._replace(priority=DEMAND) for request in transfer.requests]
        transfer.priority = DEMAND
        if waits:
            self.give_up_measuring()
        return self.take_ready()

    def give_up_measuring(self) -> None:
        """Have nobody wait: neither the one in flight nor those that wait are measured any more."""
        for transfer in (*([self.alone] if self.alone else ()), *(each for q in self.waiting for each in q)):
            transfer.measured = False
        self.alone = None

    def take_overdue(self, now_s: float, timeout_s: float) -> list[Transfer]:
        """Where nothing was over for so long, those that have waited so long: they wait no more."""
        overdue = [
            each
            for queue in self.waiting
            for each in queue
            if now_s - max(each.queued_s, self.progress_s) >= timeout_s
        ]
        for transfer in overdue:
            self.waiting[transfer.priority].remove(transfer)
        if overdue:
            self.give_up_measuring()
        return overdue

    def take_ready(self) -> list[Transfer]:
        """Those that are to start now, in this order."""
        ready: list[Transfer] = []
        while self.alone is None and (queue := next(filter(None, self.waiting), None)):
            first = queue[0]
            if first.measured:
                if self.in_flight:
                    break
                self.alone = first
            queue.popleft()
            self.in_flight.add(first)
            ready.append(first)
        return ready


class Scheduler:
    """Hands transfers to the transports of their I/O paths. Every method may be called from any thread.

    timeout_s   where no transfer ends for so long, those that wait for their turn fail
    check       what is wrong with a transfer that is over: called where a request failed, or the bytes are
                checksummed
    note        called with the lock, and the time, once for each transfer that is over
    hang_error  what a transfer fails with that waited in vain

    lock        also of what `note` changes
    hangs       `close` gave up
    """

    def __init__(
        self,
        timeout_s: float,
        check: Callable[[Transfer, Completion | None], SpillError | None],
        note: Callable[[Transfer, float], None],
        hang_error: Callable[[], SpillError],
    ) -> None:
        self.lock = threading.Lock()
        self.hangs = False
        self._timeout_s = timeout_s
        self._check, self._note, self._hang_error = check, note, hang_error
        self._directions: dict[Kind, _Direction] = {"write": _Direction(), "read": _Direction()}
        self._starting = threading.local()
        self._telling: set[Transfer] = set()  # they are over, and somebody is being told
        self._watch: threading.Timer | None = None  # while something waits for its turn
        self._idle = threading.Condition(self.lock)
        self._closed = False

    def is_idle(self, kind: Kind) -> bool:
        """Whether no transfer of that direction is in flight, or waits."""
        direction = self._directions[kind]
        return not direction.in_flight and not any(direction.waiting)

    def submit(self, transfer: Transfer) -> None:
        """Start the transfer when its turn comes: now, if nothing is measured."""
        direction = self._directions[transfer.kind]
        ready: Sequence[Transfer]
        with self.lock:
            if not transfer.measured and direction.alone is None and not any(direction.waiting):
                direction.in_flight.add(transfer)
                ready = (transfer,)
            else:
                ready = direction.add(transfer)
                if any(direction.waiting) and self._watch is None:
                    self._begin_watch()
        self._start(ready)

    def hurry(self, transfer: Transfer) -> None:
        """Make a demand of the transfer."""
        with self.lock:
            if transfer.priority == DEMAND:
                return
            direction = self._directions[transfer.kind]
            ready = direction.hurry(transfer)
            requests = transfer.requests if transfer in direction.in_flight else ()
        self._start(ready)
        if requests:
            transfer.path.transport.hurry(requests)

    def close(self, timeout_s: float) -> bool:
        """Wait until every transfer is over. False: none was over for so long. Those that have not begun have
        failed then."""
        with self.lock:
            self._closed = True
            watch = self._watch
        if watch is not None:
            watch.cancel()
            watch.join(timeout_s)
        with self.lock:
            began_s = perf_counter()
            while not self._is_idle():
                progress_s = max(began_s, *(each.progress_s for each in self._directions.values()))
                left_s = progress_s + timeout_s - perf_counter()
                if left_s <= 0:
                    break
                self._idle.wait(left_s)
            else:
                return True
        self.give_up()
        return False

    def give_up(self) -> None:
        """The disk hangs: end what has not begun."""
        self.hangs = True
        with self.lock:
            waiting = [e for each in self._directions.values() for e in each.take_overdue(math.inf, 0.0)]
            in_flight = [
                (transfer.path.transport, transfer.requests)
                for direction in self._directions.values()
                for transfer in direction.in_flight
            ]
        self._fail(waiting)
        for transport, requests in in_flight:
            if requests:
                transport.cancel(requests)

    def _start(self, ready: Iterable[Transfer]) -> None:
        # In a loop: a transfer may be over before its start returns, and be the turn of another.
        starting = self._starting
        if (under_way := getattr(starting, "transfers", None)) is not None:
            under_way.extend(ready)
            return
        starting.transfers = transfers = deque(ready)
        interrupt: BaseException | None = None
        while transfers:
            transfer = transfers.popleft()
            requests = transfer.requests
            transfer.left = len(requests)
            transfer.began_s = perf_counter()
            try:
                transfer.path.transport.submit(requests, self._completed)
                if transfer.priority != requests[0].priority:
                    transfer.path.transport.hurry(requests)
            except ValueError as error:  # closed meanwhile
                transfer.started_s = transfer.finished_s = transfer.began_s
                broken = isinstance(error, TransportBroken)
                self._end(transfer, None, SpillError(str(error) if broken else f"{CLOSED}: {error}"))
            except BaseException as error:  # an interrupt: whether the transfer began is not known
                interrupt = error
                with self.lock:
                    transfers.extend(self._take_out(transfer, perf_counter()))
                    self._tell_if_idle()
        starting.transfers = None
        if interrupt is not None:
            raise interrupt

    def _completed(self, completion: Completion) -> None:
        """A request is over, and with the last one its transfer. Called by transports, on any thread."""
        transfer: Transfer = completion.request.keep  # type: ignore[assignment]
        failed: Completion | None
        if len(transfer.requests) == 1:
            transfer.started_s, transfer.finished_s = completion.started_s, completion.finished_s
            transfer.abandoned = completion.abandoned
            transfer.unsettled = transfer.unsettled or completion.unsettled
            failed = completion if completion.error_number else None
        else:
            with self.lock:
                transfer.left -= 1
                transfer.started_s = min(transfer.started_s or math.inf, completion.started_s)
                transfer.finished_s = max(transfer.finished_s, completion.finished_s)
                transfer.abandoned = transfer.abandoned or completion.abandoned
                transfer.unsettled = transfer.unsettled or completion.unsettled
                if completion.error_number and transfer.failed is None:
                    transfer.failed = completion
                if transfer.left:
                    return
            failed, transfer.failed = transfer.failed, None
        if transfer.rehearsed and transfer.measured and failed is None:
            transfer.rehearsed = False
            method, priority = transfer.path.method, transfer.priority
            transfer.requests = [r._replace(method=method, priority=priority) for r in transfer.requests]
            self._start((transfer,))
            return
        self._end(transfer, failed)

    def _end(self, transfer: Transfer, failed: Completion | None, error: SpillError | None = None) -> None:
        """The transfer is over: tell who asked for it, and start who waited for it.

        failed   of its requests, if any. One that never began has an ``error`` only
        """
        transfer.requests = ()
        if failed is not None or (transfer.checked and error is None):
            error = self._check(transfer, failed)
        transfer.error = error
        if failed is None:  # what failed may still have the memory
            transfer.keep = None  # whoever is told that it is over can free the memory
        now_s = perf_counter()
        with self.lock:
            self._note(transfer, now_s)
            ready = self._take_out(transfer, now_s)
            self._telling.add(transfer)
        try:
            transfer.on_done(transfer)
        finally:
            self._telling.discard(transfer)
            if self._closed:
                with self.lock:
                    self._tell_if_idle()
            if ready:
                self._start(ready)

    def _take_out(self, transfer: Transfer, now_s: float) -> list[Transfer]:
        """The transfer is in flight no more. Gives those that are to start now."""
        direction = self._directions[transfer.kind]
        direction.in_flight.discard(transfer)
        direction.progress_s = now_s
        if direction.alone is transfer:
            direction.alone = None
        return direction.take_ready()

    def _tell_if_idle(self) -> None:
        if self._closed and self._is_idle():
            self._idle.notify_all()

    def _is_idle(self) -> bool:
        return not self._telling and self.is_idle("write") and self.is_idle("read")

    def _fail(self, transfers: Sequence[Transfer]) -> None:
        """They never began."""
        for transfer in transfers:
            transfer.started_s = transfer.finished_s = perf_counter()
            try:
                self._end(transfer, None, self._hang_error())
            except Exception:  # the requester's fault: the others are told all the same
                logger.exception("what follows a transfer failed")

    def _begin_watch(self) -> None:
        """Look after those that wait for their turn, soon. Called with the lock."""
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
            if not self._closed and any(any(each.waiting) for each in self._directions.values()):
                self._begin_watch()
        self._fail(overdue)
        self._start(ready)
