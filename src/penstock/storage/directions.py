"""The order in which transfers of one direction start, so that some of them can be measured.

Of several transfers in flight nobody can say what each one costs. A transfer that is measured therefore
has its direction to itself: it waits until those before it are over, and those behind it wait for it.
Nobody waits for a measurement who has to go on: a demand starts at once, and the measurement is given up.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

from penstock.storage.transports.contract import DEMAND, EVICT


class Queued(Protocol):
    """What a transfer must have.

    measured   it is to have its direction to itself. Set to False where that was given up
    queued_s   time.perf_counter() when it was added
    """

    priority: int
    measured: bool
    queued_s: float


T = TypeVar("T", bound=Queued)


class DirectionQueue(Generic[T]):
    """Transfers of one direction. For one thread at a time: the caller has a lock.

    in_flight       those that started, and are not over
    waiting_count   those that wait for their turn
    progress_s      time.perf_counter() when one was last over
    """

    def __init__(self) -> None:
        self.in_flight: set[T] = set()
        self.waiting_count = 0
        self.progress_s = 0.0
        self._waiting: tuple[deque[T], ...] = tuple(deque() for _ in range(EVICT + 1))
        self._alone: T | None = None  # it is measured, and in flight

    @property
    def is_idle(self) -> bool:
        return not self.in_flight and not self.waiting_count

    @property
    def waiting(self) -> list[T]:
        """Those that wait for their turn, in this order."""
        return [transfer for queue in self._waiting for transfer in queue]

    def add(self, transfer: T) -> list[T]:
        """Those that are to start now, ``transfer`` or others, in this order."""
        if transfer.priority == DEMAND and not self.is_idle:
            transfer.measured = False
            self.give_up_measuring()
        if not self.waiting_count and self._alone is None and not transfer.measured:  # most of them
            self.in_flight.add(transfer)
            return [transfer]
        self._waiting[transfer.priority].append(transfer)
        self.waiting_count += 1
        return self.take_ready()

    def hurry(self, transfer: T) -> list[T]:
        """Make a demand of ``transfer``. Gives those that are to start now."""
        waits = transfer in self._waiting[transfer.priority]
        if waits:
            self._waiting[transfer.priority].remove(transfer)
            self._waiting[DEMAND].append(transfer)
        transfer.priority = DEMAND
        if waits:
            self.give_up_measuring()
        return self.take_ready()

    def ended(self, transfer: T, now_s: float) -> list[T]:
        """``transfer`` is over: once for each that was given. Gives those that are to start now."""
        self.in_flight.discard(transfer)
        self.progress_s = max(self.progress_s, now_s)
        if self._alone is transfer:
            self._alone = None
        return self.take_ready() if self.waiting_count else []

    def give_up_measuring(self) -> None:
        """Have nobody wait: neither the one in flight nor those that wait are measured any more."""
        for transfer in (*([self._alone] if self._alone else ()), *self.waiting):
            transfer.measured = False
        self._alone = None

    def take_overdue(self, now_s: float, timeout_s: float) -> list[T]:
        """Where nothing was over for so long, those that have waited so long: they wait no more."""
        overdue = [each for each in self.waiting if now_s - max(each.queued_s, self.progress_s) >= timeout_s]
        for transfer in overdue:
            self._waiting[transfer.priority].remove(transfer)
        self.waiting_count -= len(overdue)
        if overdue:
            self.give_up_measuring()
        return overdue

    def take_ready(self) -> list[T]:
        """Those that are to start now, in this order."""
        ready: list[T] = []
        while self.waiting_count and self._alone is None:
            queue = next(filter(None, self._waiting))
            first = queue[0]
            if first.measured:
                if self.in_flight:
                    break
                self._alone = first
            queue.popleft()
            self.waiting_count -= 1
            self.in_flight.add(first)
            ready.append(first)
        return ready
