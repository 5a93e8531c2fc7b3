"""Work that a thread does in order, while its owner goes on."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from penstock.errors import SampleError

logger = logging.getLogger("penstock")

STUCK_S = 600.0  # work that makes no progress for so long is given up


class Background:
    """A thread for work that is given to it. Where some of it fails, what comes after is dropped.

    what      the work, as an error that it is stuck calls it
    waiting   most that may wait
    stuck_s   when to give up
    """

    def __init__(self, what: str, waiting: int, stuck_s: float = STUCK_S) -> None:
        self._what, self._stuck_s = what, stuck_s
        self._queue: queue.Queue[Callable[[], None] | threading.Event | None] = queue.Queue(waiting)
        self._failure: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="penstock-pack", daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        """Have it done. Raises what earlier work raised, SampleError where that is stuck."""
        self._check()
        self._put(work)

    def drain(self) -> None:
        """Wait until all is done. Raises as `put` does."""
        reached = threading.Event()
        self._put(reached)
        if not reached.wait(self._stuck_s):
            raise self._stuck()
        self._check()

    def close(self) -> None:
        """Let what waits be done, and end the thread. Raises nothing. Idempotent."""
        if not self._closed:
            self._closed = True
            try:
                self._put(None)
            except SampleError as error:
                logger.warning("%s", error)
                return
        self._thread.join(self._stuck_s)

    def _put(self, item: Callable[[], None] | threading.Event | None) -> None:
        try:
            self._queue.put(item, timeout=self._stuck_s)
        except queue.Full:
            raise self._stuck() from None

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _stuck(self) -> SampleError:
        return SampleError(
            f"{self._what} has made no progress for {self._stuck_s:.0f} s: look after the disk"
        )

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            elif self._failure is None:
                try:
                    item()
                except BaseException as error:  # it is raised where the work came from
                    self._failure = error
