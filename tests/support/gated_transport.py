"""A transport whose transfers can be held back: for tests of what goes on meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from penstock.storage.transfer import FOR_EVER_S, Transfer, Transport

WAIT_S = 30.0


class Gate:
    """Shut for writes, or for reads, or for nothing.

    seen   transfers so far, those that are held and the others
    held   the first to come first
    """

    def __init__(self) -> None:
        self.shut_for = ""
        self.seen: list[Transfer] = []
        self.held: list[tuple[GatedTransport, Transfer]] = []
        self._changed = threading.Condition()

    def admits(self, transport: GatedTransport, transfer: Transfer) -> bool:
        with self._changed:
            self.seen.append(transfer)
            if transfer.kind == self.shut_for:
                self.held.append((transport, transfer))
            self._changed.notify_all()
            return transfer.kind != self.shut_for

    def wait_for(self, kind: str, count: int) -> list[Transfer]:
        """The transfers of that kind, when there are so many. Raises where they do not come."""
        with self._changed:
            came = self._changed.wait_for(
                lambda: sum(each.kind == kind for each in self.seen) >= count, WAIT_S
            )
            assert came, f"{len(self.held)} are held, and these were all: {self.seen}"
            return [transfer for transfer in self.seen if transfer.kind == kind]

    def let_go(self, transfer: Transfer, error_number: int = 0) -> None:
        """Carry it out, or have it fail."""
        with self._changed:
            held = next(entry for entry in self.held if entry[1] is transfer)
            self.held.remove(held)
        if error_number:
            transfer.end(error_number)
        else:
            held[0].inner.submit([transfer])

    def open(self) -> None:
        self.shut_for = ""
        for _, transfer in list(self.held):
            self.let_go(transfer)


class GatedTransport:
    """Satisfies Transport: hands transfers on to ``inner``, but for those that the gate holds."""

    def __init__(self, inner: Transport, gate: Gate) -> None:
        self.methods, self.inner, self._gate = inner.methods, inner, gate

    def submit(self, transfers: Sequence[Transfer]) -> None:
        if admitted := [each for each in transfers if self._gate.admits(self, each)]:
            self.inner.submit(admitted)

    def cancel(self, transfers: Sequence[Transfer]) -> int:
        return self.inner.cancel(transfers)

    def raise_priority(self, transfers: Sequence[Transfer]) -> None:
        self.inner.raise_priority(transfers)

    def close(self, timeout_s: float = FOR_EVER_S) -> bool:
        return self.inner.close(timeout_s)
