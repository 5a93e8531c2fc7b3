"""A transport whose requests can be held back: for tests of what goes on meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from penstock.storage.transports.contract import FOR_EVER_S, Completion, OnComplete, Request, Transport

WAIT_S = 30.0


class Gate:
    """Shut for writes, or for reads, or for nothing.

    seen   requests so far, those that are held and the others
    held   with whom to tell, the first to come first
    """

    def __init__(self) -> None:
        self.shut_for = ""
        self.seen: list[Request] = []
        self.held: list[tuple[GatedTransport, Request, OnComplete]] = []
        self._changed = threading.Condition()

    def admits(self, transport: GatedTransport, request: Request, on_complete: OnComplete) -> bool:
        with self._changed:
            self.seen.append(request)
            if request.kind == self.shut_for:
                self.held.append((transport, request, on_complete))
            self._changed.notify_all()
            return request.kind != self.shut_for

    def wait_for(self, kind: str, count: int) -> list[Request]:
        """The requests of that kind, when there are so many. Raises where they do not come."""
        with self._changed:
            came = self._changed.wait_for(
                lambda: sum(each.kind == kind for each in self.seen) >= count, WAIT_S
            )
            assert came, f"{len(self.held)} are held, and these were all: {self.seen}"
            return [request for request in self.seen if request.kind == kind]

    def let_go(self, request: Request, error_number: int = 0) -> None:
        """Carry it out, or have it fail."""
        with self._changed:
            held = next(entry for entry in self.held if entry[1] is request)
            self.held.remove(held)
        transport, _, on_complete = held
        if error_number:
            now_s = time.perf_counter()
            on_complete(Completion(request, error_number, now_s, now_s))
        else:
            transport.inner.submit([request], on_complete)

    def open(self) -> None:
        self.shut_for = ""
        for _, request, _ in list(self.held):
            self.let_go(request)


class GatedTransport:
    """Satisfies Transport: hands requests on to ``inner``, but for those that the gate holds."""

    def __init__(self, inner: Transport, gate: Gate) -> None:
        self.methods, self.inner, self._gate = inner.methods, inner, gate

    def submit(self, requests: Sequence[Request], on_complete: OnComplete) -> None:
        if admitted := [each for each in requests if self._gate.admits(self, each, on_complete)]:
            self.inner.submit(admitted, on_complete)

    def cancel(self, requests: Sequence[Request]) -> int:
        return self.inner.cancel(requests)

    def hurry(self, requests: Sequence[Request]) -> None:
        self.inner.hurry(requests)

    def close(self, timeout_s: float = FOR_EVER_S) -> bool:
        return self.inner.close(timeout_s)
