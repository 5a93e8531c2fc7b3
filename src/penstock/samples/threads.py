"""Threads that carry out calls in the background, and that no process waits for at its end."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_Call = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class DaemonThreads:
    """Like a ThreadPoolExecutor, but a disk that hangs does not keep the process from ending. Its threads end
    with it, too: an interrupt may keep the code that makes it from ever closing it."""

    def __init__(self, name: str, threads: int = 1) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._pid = os.getpid()
        self._threads = [
            threading.Thread(target=_serve, args=(self._calls,), name=name, daemon=True)
            for _ in range(threads)
        ]
        self._let_go = weakref.finalize(self, _end, self._calls, threads)
        self._let_go.atexit = False
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call it after all that were submitted before have begun."""
        future: Future[Any] = Future()
        self._calls.put((future, call, arguments))
        return future

    def cancel(self) -> None:
        """Drop what has not begun."""
        with contextlib.suppress(queue.Empty):
            while self._let_go.alive and not self.inherited and (call := self._calls.get_nowait()):
                call[0].cancel()

    @property
    def inherited(self) -> bool:
        """Whether this process was forked since: it has none of the threads, and their locks may be taken."""
        return self._pid != os.getpid()

    def close(self) -> None:
        """Let the threads end once they are done with what was submitted. Idempotent."""
        if not self.inherited:
            self._let_go()


def _end(calls: queue.SimpleQueue[_Call | None], threads: int) -> None:
    for _ in range(threads):
        calls.put(None)


def _serve(calls: queue.SimpleQueue[_Call | None]) -> None:
    while (item := calls.get()) is not None:
        future, call, arguments = item
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call(*arguments))
            except BaseException as error:
                future.set_exception(error)
        del item, future, call, arguments  # memory is reused once nobody holds it
