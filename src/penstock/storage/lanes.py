"""The order in which transfers of one direction start, so that some of them can be measured.

Of several transfers in flight nobody can say what each one costs. A transfer that is measured therefore
has its direction to itself: it waits until those before it are over, and those behind it wait for it.
All others start at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

Start = Callable[[], None]


class Lane:
    """Transfers of one direction. Any thread may use it."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Start, bool]] = deque()
        self._in_flight = 0
        self._alone = False  # a transfer that is measured is in flight
        self._starting = False  # some thread is at it
        self._lock = threading.Lock()
        self._empty = threading.Condition(self._lock)

    def add(self, start: Start, alone: bool) -> None:
        """Call ``start`` when its turn has come: now, or on the thread that calls `finished`.

        alone   the transfer is measured
        """
        with self._lock:
            self._waiting.append((start, alone))
        self._start_those_whose_turn_it_is()

    def finished(self) -> None:
        """A transfer is over; called once for each that was started."""
        if self._end_one():
            self._start_those_whose_turn_it_is()

    def drain(self) -> None:
        """Wait until every transfer is over."""
        with self._lock:
            while self._waiting or self._in_flight:
                self._empty.wait()

    def _end_one(self) -> bool:
        """Whether others wait for their turn."""
        with self._lock:
            self._in_flight = max(self._in_flight - 1, 0)
            self._alone = False
            if not self._in_flight and not self._waiting:
                self._empty.notify_all()
            return bool(self._waiting)

    def _start_those_whose_turn_it_is(self) -> None:
        # One thread at a time, in a loop: a transfer may be over before its start returns.
        while (start := self._next()) is not None:
            try:
                start()
            except BaseException:  # an interrupt: whether the transfer began is not known
                self._end_one()
                raise
            finally:
                self._starting = False

    def _next(self) -> Start | None:
        with self._lock:
            if self._starting or not self._waiting or self._alone:
                return None
            start, alone = self._waiting[0]
            if alone and self._in_flight:
                return None
            self._waiting.popleft()
            self._alone = alone
            self._in_flight += 1
            self._starting = True
            return start
