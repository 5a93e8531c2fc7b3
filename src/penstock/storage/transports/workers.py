"""Threads that carry out requests in the order they came, for transports whose calls block."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from penstock.storage.transports.contract import Completion, OnComplete, Request

logger = logging.getLogger("penstock")

Perform = Callable[[Request], int]


class Workers:
    """The half of the transport contract that does not depend on where the bytes go.

    make_perform   called once in each thread; gives the function that carries out a request there
                   and gives 0 or an errno
    """

    def __init__(self, threads: int, name: str, make_perform: Callable[[], Perform]) -> None:
        self._make_perform = make_perform
        self._waiting: deque[tuple[Request, OnComplete]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"penstock-{name}-{index}", daemon=True)
            for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, requests: Sequence[Request], on_complete: OnComplete) -> None:
        with self._changed:
            if self._closed:
                raise ValueError("the transport is closed")
            self._waiting.extend((request, on_complete) for request in requests)
            self._changed.notify(len(requests))

    def cancel(self, requests: Sequence[Request]) -> int:
        unwanted = {id(request) for request in requests}
        with self._changed:
            cancelled = [job for job in self._waiting if id(job[0]) in unwanted]
            self._waiting = deque(job for job in self._waiting if id(job[0]) not in unwanted)
        now = time.perf_counter()
        for request, on_complete in cancelled:
            _complete(on_complete, Completion(request, errno.ECANCELED, now, now))
        return len(cancelled)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _run(self) -> None:
        perform = self._make_perform()
        while self._serve(perform):
            pass

    def _serve(self, perform: Perform) -> bool:
        # A function of its own, so that no local holds a finished request's memory while waiting.
        with self._changed:
            while not self._waiting:
                if self._closed:
                    return False
                self._changed.wait()
            request, on_complete = self._waiting.popleft()
        started_s = time.perf_counter()
        try:
            error_number = perform(request)
        except Exception:
            logger.exception("a transport failed on %s", request[:5])
            error_number = errno.EIO
        _complete(on_complete, Completion(request, error_number, started_s, time.perf_counter()))
        return True


def _complete(on_complete: OnComplete, completion: Completion) -> None:
    try:
        on_complete(completion)
    except Exception:  # the requester's fault: the other requests go on
        logger.exception("the completion of %s failed", completion.request[:5])
