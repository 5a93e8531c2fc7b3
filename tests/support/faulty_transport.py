"""Another transport with errors on demand: for tests of what must survive them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from penstock.storage.transports.contract import FOR_EVER_S, OnComplete, Request, Transport
from penstock.storage.transports.workers import Workers


class FaultyTransport(Workers):
    """Satisfies Transport: hands requests on to ``inner``, but for those that are to fail.

    fault   asked once for each request, in the order they are submitted: gives the errno it completes
            with, before a byte is moved, or 0 to hand it on
    """

    def __init__(self, inner: Transport, fault: Callable[[Request], int]) -> None:
        self.methods = inner.methods
        self._inner = inner
        self._fault = fault
        self._errors: dict[int, deque[int]] = {}  # by request that waits for the one worker
        self._lock = threading.Lock()
        super().__init__(1, "faulty")

    def submit(self, requests: Sequence[Request], on_complete: OnComplete) -> None:
        with self._lock:
            errors = [self._fault(request) for request in requests]
            faulty = [request for request, error in zip(requests, errors, strict=True) if error]
            sound = [request for request, error in zip(requests, errors, strict=True) if not error]
            for request, error in zip(requests, errors, strict=True):
                if error:
                    self._errors.setdefault(id(request), deque()).append(error)
            super().submit(faulty, on_complete)
            self._inner.submit(sound, on_complete)

    def cancel(self, requests: Sequence[Request]) -> int:
        return self._inner.cancel(requests)  # the others fail at once

    def hurry(self, requests: Sequence[Request]) -> None:
        self._inner.hurry(requests)

    def close(self, timeout_s: float = FOR_EVER_S) -> bool:
        return super().close(timeout_s) and self._inner.close(timeout_s)

    def perform(self, request: Request, _begin: int, _end: int) -> int:
        errors = self._errors[id(request)]
        error_number = errors.popleft()
        if not errors:
            del self._errors[id(request)]
        return error_number
