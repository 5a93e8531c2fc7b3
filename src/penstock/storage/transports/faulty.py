"""Another transport with errors on demand: for tests of what must survive them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from penstock.storage.transports.contract import OnComplete, Request, Transport
from penstock.storage.transports.workers import Workers


class FaultyTransport:
    """Satisfies Transport: hands requests on to ``inner``, but for those that are to fail.

    fault   asked once for each request, in the order they are submitted: gives the errno it completes
            with, before a byte is moved, or 0 to hand it on
    """

    def __init__(self, inner: Transport, fault: Callable[[Request], int]) -> None:
        self.ways = inner.ways
        self._inner = inner
        self._fault = fault
        self._errors: deque[int] = deque()  # of the requests that wait for the one worker, in order
        self._lock = threading.Lock()
        self._workers = Workers(1, "faulty", inner.ways, lambda: self._fail)

    def submit(self, requests: Sequence[Request], on_complete: OnComplete) -> None:
        with self._lock:
            errors = [self._fault(request) for request in requests]
            faulty = [request for request, error in zip(requests, errors, strict=True) if error]
            sound = [request for request, error in zip(requests, errors, strict=True) if not error]
            self._errors.extend(error for error in errors if error)
            self._workers.submit(faulty, on_complete)
            self._inner.submit(sound, on_complete)

    def cancel(self, requests: Sequence[Request]) -> int:
        return self._inner.cancel(requests)  # the others fail at once

    def close(self) -> None:
        self._workers.close()
        self._inner.close()

    def _fail(self, _request: Request, _begin: int, _end: int) -> int:
        return self._errors.popleft()
