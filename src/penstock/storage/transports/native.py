"""Transports that native threads carry out without the GIL: io_uring, and calls that block."""

from __future__ import annotations

import atexit
import ctypes
import functools
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Sequence

from penstock import _native
from penstock.storage.transports.contract import (
    FOR_EVER_S,
    Completion,
    OnComplete,
    Request,
    TransportBroken,
    TransportUnavailable,
    broken_text,
)

logger = logging.getLogger("penstock")

# Measured on a virtio disk: large operations cost the least processor time, and the device is busy with
# few of them; staging buffers of 1 MiB stay in the L2 cache between the copy and the write.
DEPTH = 32
PIECE_BYTES = 4 << 20
SLOT_BYTES = 1 << 20
SLOTS = 4
NVME_DEPTH = 128  # a network's latency takes more
EXIT_TIMEOUT_S = 120.0  # the longest wait for a disk when the process ends


class _NativeTransport:
    """Satisfies Transport. The native threads hand out completions while there is nothing else to do;
    otherwise a thread of Python's does.

    depth         operations of a thread in flight at most
    piece_bytes   size of an operation at most
    slots         staging buffers of `SLOT_BYTES`, in registered memory and huge pages where there are any
    threads       native threads

    Raises TransportUnavailable where the system refuses it.
    """

    methods: tuple[str, ...]

    def __init__(self, kind: str, depth: int, piece_bytes: int, slots: int, threads: int) -> None:
        self._kind = kind
        self._tokens = itertools.count(1)
        self._requests: dict[int, tuple[Request, OnComplete]] = {}
        deliver = functools.partial(_complete, self._requests)  # without the transport, which it would keep
        try:
            self._transfers = _native.Transfers(kind, depth, piece_bytes, SLOT_BYTES, slots, threads, deliver)
        except OSError as error:
            raise TransportUnavailable(f"the system refuses it: {error.strerror}") from error
        self._deliverer = threading.Thread(target=self._deliver, name=f"penstock-{kind}", daemon=True)
        self._deliverer.start()
        _open.add(self)

    def submit(self, requests: Sequence[Request], on_complete: OnComplete) -> None:
        for request in requests:
            if request.method not in self.methods:
                raise ValueError(f"there is no method {request.method!r}, only {', '.join(self.methods)}")
        tokens = [next(self._tokens) for _ in requests]
        for token, request in zip(tokens, requests, strict=True):
            self._requests[token] = (request, on_complete)
        finished = None
        try:
            finished = self._transfers.submit(tokens, requests)
        finally:
            if finished is None:
                for token in tokens:
                    del self._requests[token]
        if finished is None:
            if error_number := self._transfers.broken():
                raise TransportBroken(broken_text(error_number))
            raise ValueError("the transport is closed")
        if finished:
            _complete(self._requests, finished)

    def cancel(self, requests: Sequence[Request]) -> int:
        cancelled: int = self._transfers.cancel(self._tokens_of(requests))
        return cancelled

    def hurry(self, requests: Sequence[Request]) -> None:
        self._transfers.hurry(self._tokens_of(requests))

    def close(self, timeout_s: float = FOR_EVER_S) -> bool:
        deadline_s = time.monotonic() + timeout_s
        ended: bool = self._transfers.close(timeout_s)
        if not ended:
            _keep_for_ever(self._transfers)
            return False
        if self._deliverer is not threading.current_thread():
            self._deliverer.join(max(deadline_s - time.monotonic(), 0.0))
            return not self._deliverer.is_alive()
        return True

    def _tokens_of(self, requests: Sequence[Request]) -> list[int]:
        wanted = {id(request) for request in requests}
        return [token for token, (request, _) in self._requests.copy().items() if id(request) in wanted]

    def _deliver(self) -> None:
        while finished := self._transfers.wait():
            _complete(self._requests, finished)


class UringTransport(_NativeTransport):
    """io_uring: reads and writes that the kernel carries out while no thread of ours waits for each.

    Raises TransportUnavailable where the kernel, or a container's policy, refuses io_uring.
    """

    methods: tuple[str, ...] = ("direct", "staged", "buffered")

    def __init__(self) -> None:
        super().__init__("io_uring", DEPTH, PIECE_BYTES, SLOTS, 1)


class PosixTransport(_NativeTransport):
    """Blocking reads, writes and mappings on a few threads: works on every POSIX system.

    A small "buffered" request is carried out in `submit`, where that need not wait for the disk: copying
    takes less time than handing it over.
    """

    methods: tuple[str, ...] = ("direct", "staged", "buffered", "mapped")

    def __init__(self, threads: int = 4, piece_bytes: int = PIECE_BYTES) -> None:
        super().__init__("blocking", 1, piece_bytes, threads, threads)


class NvmeTransport(_NativeTransport):
    """NVMe over TCP: reads and writes of namespaces on other machines, whose handles `storage.nvme` opens.

    Raises TransportUnavailable where the system lacks the means.
    """

    methods: tuple[str, ...] = ("direct", "staged")

    def __init__(self) -> None:
        super().__init__("nvme", NVME_DEPTH, PIECE_BYTES, SLOTS, 1)


class NvmeSpillTransport(NvmeTransport):
    """The same for memory that may be taken away while it is written: a message that has begun cannot be
    taken back, so that the bytes are copied first. Reads are not."""

    methods: tuple[str, ...] = ("staged",)


def _complete(requests: dict[int, tuple[Request, OnComplete]], finished: _native.Finished) -> None:
    for token, error_number, started_s, finished_s, abandoned, unsettled in finished:
        request, on_complete = requests.pop(token)
        if abandoned:
            _abandoned.append(request)
        try:
            on_complete(Completion(request, error_number, started_s, finished_s, abandoned, unsettled))
        except Exception:  # the requester's fault: the other requests go on
            logger.exception("the completion of %s failed", request[:7])


# What was in flight when a ring broke, and keeps its memory: nobody knows when the kernel is done with it.
_abandoned: list[Request] = []

_open: weakref.WeakSet[_NativeTransport] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # Nothing may be delivered to an interpreter that is being taken apart.
    for transport in list(_open):
        if not transport.close(0.0 if id(transport._transfers) in _kept else EXIT_TIMEOUT_S):
            logger.error(
                "transfers by %s did not end: the disk hangs. The process ends without them.", transport._kind
            )


_kept: set[int] = set()


def _keep_for_ever(transfers: object) -> None:
    """Its thread waits for a disk that hangs: nobody can wait for that thread, as its destructor does."""
    if id(transfers) not in _kept:
        _kept.add(id(transfers))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(transfers))
