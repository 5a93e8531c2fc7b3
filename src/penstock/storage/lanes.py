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
        self._changed = threading.Condition()

    def add(self, start: Start, alone: bool) -> None:
        """Call ``start`` when its turn has come: now, or on the thread that calls `finished`.

        alone   the transfer is measured
        """
        with self._changed:
            self._waiting.append((start, alone))
        self._start_those_whose_turn_it_is()

    def finished(self) -> None:
        """A transfer is over; called once for each that was started."""
        self._end_one()
        self._start_those_whose_turn_it_is()

    def drain(self) -> None:
        """Wait until every transfer is over."""
        with self._changed:
            while self._waiting or self._in_flight:
                self._changed.wait()

    def _end_one(self) -> None:
        with self._changed:
            self._in_flight = max(self._in_flight - 1, 0)
            self._alone = False
            self._changed.notify_all()

    def _start_those_whose_turn_it_is(self) -> None:
        # One thread at a time, in a loop: a transfer may be over before its start returns.
        with self._changed:
            if self._starting:
                return
            self._starting = True
        try:
            while (start := self._next()) is not None:
                start()
        except BaseException:  # an interrupt: whether the transfer began is not known
            with self._changed:
                self._starting = False
            self._end_one()
            raise

    def _next(self) -> Start | None:
        with self._changed:
            if self._waiting and not self._alone and not (self._waiting[0][1] and self._in_flight):
                start, self._alone = self._waiting.popleft()
                self._in_flight += 1
                return start
            self._starting = False
            return None
