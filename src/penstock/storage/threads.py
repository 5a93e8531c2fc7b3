"""A thread pool for one task, usable while the interpreter ends."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

_MOST_THREADS = 4

Item = TypeVar("Item")


class ThreadPool:
    """Starts threads that call ``work`` with each of ``items``, in order.

    Python's executors cannot be used while the interpreter ends, and saves in the background go on then.
    """

    def __init__(self, work: Callable[[Any], None], items: Iterable[Any]) -> None:
        self._work = work
        self._waiting = deque(items)
        self._errors: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        for _ in range(min(_MOST_THREADS, len(os.sched_getaffinity(0)), len(self._waiting))):
            thread = threading.Thread(target=self._run, name="penstock-pool", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # there are too many, or the interpreter ends: `finish` does the rest
                break
            self._threads.append(thread)

    def finish(self) -> None:
        """Wait until nothing is left. Raises the first error of ``work``, after which nothing more begins."""
        try:
            self._run()
        finally:
            self.close()
        if self._errors:
            raise self._errors[0]

    def close(self) -> None:
        """Begin nothing more, and wait for what has begun."""
        self._waiting.clear()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        try:
            while True:
                try:
                    item = self._waiting.popleft()
                except IndexError:
                    return
                self._work(item)
        except BaseException as error:
            self._waiting.clear()
            self._errors.append(error)


def in_parallel(work: Callable[[Item], None], items: Iterable[Item]) -> None:
    """Call ``work`` with each item, on a few threads where there are several."""
    items = list(items)
    if len(items) < 2:
        in_order(work, items)
    else:
        ThreadPool(work, items).finish()


def in_order(work: Callable[[Item], None], items: Iterable[Item]) -> None:
    """Call ``work`` with each item, on this thread."""
    for item in items:
        work(item)
