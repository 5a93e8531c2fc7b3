"""Another transport with errors on demand: for tests of what must survive them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from penstock.storage.paths import IoPath
from penstock.storage.transfer import FOR_EVER_S, Transfer, Transport
from penstock.storage.workers import Workers


def direct_path(transport: Transport) -> IoPath:
    """The I/O path by which a test's transport moves checkpoints."""
    return IoPath("test direct", "direct", "disk", transport)


class FaultyTransport(Workers):
    """Satisfies Transport: hands transfers on to ``inner``, but for those that are to fail.

    fault   asked once for each transfer, in the order they are submitted: gives the errno it ends
            with, before a byte is moved, or 0 to hand it on
    """

    def __init__(self, inner: Transport, fault: Callable[[Transfer], int]) -> None:
        self.methods = inner.methods
        self._inner = inner
        self._fault = fault
        self._errors: dict[Transfer, int] = {}  # of those that wait for the one worker
        self._lock = threading.Lock()
        super().__init__(1, "faulty")

    def submit(self, transfers: Sequence[Transfer]) -> None:
        with self._lock:
            errors = {transfer: self._fault(transfer) for transfer in transfers}
            self._errors.update((transfer, error) for transfer, error in errors.items() if error)
            super().submit([transfer for transfer in transfers if errors[transfer]])
            self._inner.submit([transfer for transfer in transfers if not errors[transfer]])

    def cancel(self, transfers: Sequence[Transfer]) -> int:
        return self._inner.cancel(transfers)  # the others fail at once

    def raise_priority(self, transfers: Sequence[Transfer]) -> None:
        self._inner.raise_priority(transfers)

    def close(self, timeout_s: float = FOR_EVER_S) -> bool:
        return super().close(timeout_s) and self._inner.close(timeout_s)

    def perform(self, transfer: Transfer, _begin: int, _end: int) -> int:
        return self._errors.pop(transfer)
