"""io_uring: reads and writes that the kernel carries out while no thread of ours waits for each."""

from __future__ import annotations

import atexit
import itertools
import logging
import threading
import weakref
from collections.abc import Sequence

from penstock.storage.transports.contract import (
    Completion,
    OnComplete,
    Request,
    TransportUnavailable,
)

try:
    from penstock import _native
except ImportError:  # not built: not Linux
    _native = None  # type: ignore[assignment]

logger = logging.getLogger("penstock")

# Measured on a virtio disk: large operations cost the least processor time, and the device is busy with
# few of them; staging buffers of 1 MiB stay in the L2 cache between the copy and the write.
DEPTH = 32
PIECE_BYTES = 4 << 20
SLOT_BYTES = 1 << 20
SLOTS = 4


class UringTransport:
    """Satisfies Transport with io_uring: a native thread drives the ring without the GIL. It hands out
    completions while there is nothing else to do; otherwise a thread of Python's does.

    depth         operations in flight at most
    piece_bytes   size of an operation at most
    slot_bytes    size of a staging buffer, and of the operations on it
    slots         staging buffers, in registered memory on huge pages where the system gives them

    registered    whether the system registered the staging buffers; else it pins them at each use

    Raises TransportUnavailable where the kernel, or a container's policy, refuses io_uring.
    """

    ways: tuple[str, ...] = ("direct", "staged", "buffered")

    def __init__(
        self,
        depth: int = DEPTH,
        piece_bytes: int = PIECE_BYTES,
        slot_bytes: int = SLOT_BYTES,
        slots: int = SLOTS,
    ) -> None:
        if not hasattr(_native, "Transfers"):
            raise TransportUnavailable("penstock was built without it: it is Linux's")
        self._tokens = itertools.count(1)
        self._requests: dict[int, tuple[Request, OnComplete]] = {}
        complete_all = weakref.WeakMethod(self._complete_all)

        def deliver(finished: list[tuple[int, int, float, float, bool]]) -> None:
            if (method := complete_all()) is not None:
                method(finished)

        try:
            self._transfers = _native.Transfers(depth, piece_bytes, slot_bytes, slots, deliver)
        except OSError as error:
            raise TransportUnavailable(f"the system refuses it: {error.strerror}") from error
        self.registered: bool = self._transfers.registered
        self._deliverer = threading.Thread(target=self._deliver, name="penstock-io_uring", daemon=True)
        self._deliverer.start()
        _open.add(self)

    def submit(self, requests: Sequence[Request], on_complete: OnComplete) -> None:
        batch = []
        for request in requests:
            token = next(self._tokens)
            self._requests[token] = (request, on_complete)
            file = request.file
            batch.append(
                (
                    token,
                    request.kind == "write",
                    request.way,
                    request.padded,
                    file.buffered,
                    file.direct,
                    file.alignment_bytes,
                    request.offset,
                    request.address,
                    request.size_bytes,
                )
            )
        accepted = False
        try:
            accepted = self._transfers.submit(batch)
        finally:
            if not accepted:
                for token, *_ in batch:
                    del self._requests[token]
        if not accepted:
            raise ValueError("the transport is closed")

    def cancel(self, requests: Sequence[Request]) -> int:
        unwanted = {id(request) for request in requests}
        tokens = [token for token, (request, _) in self._requests.copy().items() if id(request) in unwanted]
        cancelled: int = self._transfers.cancel(tokens)
        return cancelled

    def close(self) -> None:
        self._transfers.close()
        if self._deliverer is not threading.current_thread():
            self._deliverer.join()

    def _deliver(self) -> None:
        while finished := self._transfers.wait():
            self._complete_all(finished)

    def _complete_all(self, finished: list[tuple[int, int, float, float, bool]]) -> None:
        for one in finished:
            self._complete(*one)

    def _complete(
        self, token: int, error_number: int, started_s: float, finished_s: float, abandoned: bool
    ) -> None:
        request, on_complete = self._requests.pop(token)
        if abandoned:
            _abandoned.append(request)
        try:
            on_complete(Completion(request, error_number, started_s, finished_s))
        except Exception:  # the requester's fault: the other requests go on
            logger.exception("the completion of %s failed", request[:7])


# The memory of what was in flight when a ring broke: nobody knows when the kernel is done with it.
_abandoned: list[Request] = []

_open: weakref.WeakSet[UringTransport] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # Nothing may be delivered to an interpreter that is being taken apart.
    for transport in list(_open):
        transport.close()
