"""Transports whose threads are native and do not need the GIL: io_uring, blocking calls, copies, NVMe/TCP."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import weakref

from penstock import _native
from penstock.storage.transfer import FOR_EVER_S, TransportUnavailable

logger = logging.getLogger("penstock")

# Measured on a virtio disk: large operations cost the least processor time, and the device is busy with
# few of them; staging buffers of 1 MiB stay in the L2 cache between the copy and the write.
DEPTH = 32
PIECE_BYTES = 4 << 20
SLOT_BYTES = 1 << 20
SLOTS = 4
NVME_DEPTH = 128  # a network's latency takes more
EXIT_TIMEOUT_S = 120.0  # the longest wait for a disk when the process ends


class NativeTransport(_native.Transfers):
    """Satisfies Transport. The native threads call ``on_done`` when they are idle; otherwise one more does.
    They end with it: an interrupt may keep the code that makes it from ever closing it.

    depth         operations of a thread in flight at most
    piece_bytes   size of an operation at most
    slots         staging buffers of `SLOT_BYTES`, in registered memory and huge pages where there are any
    threads       native threads

    Raises TransportUnavailable where the system refuses it.
    """

    methods: tuple[str, ...]

    def __init__(self, kind: str, depth: int, piece_bytes: int, slots: int, threads: int) -> None:
        self._kind = kind
        try:
            super().__init__(kind, self.methods, depth, piece_bytes, SLOT_BYTES, slots, threads)
        except OSError as error:
            raise TransportUnavailable(f"the system refuses it: {error.strerror}") from error
        _open.add(self)

    def close(self, timeout_s: float = FOR_EVER_S) -> bool:
        ended = super().close(timeout_s)
        if not ended:
            _leak(self)
        return ended


class UringTransport(NativeTransport):
    """io_uring: reads and writes that the kernel carries out while no thread of ours waits for each.

    Raises TransportUnavailable where the kernel, or a container's policy, refuses io_uring.
    """

    methods: tuple[str, ...] = ("direct", "staged", "buffered")

    def __init__(self) -> None:
        super().__init__("io_uring", DEPTH, PIECE_BYTES, SLOTS, 1)


class PosixTransport(NativeTransport):
    """Blocking reads, writes and mappings on a few threads: works on every POSIX system.

    `submit` itself carries out a small "buffered" transfer that need not wait for the disk: copying takes
    less time than passing it to a thread.
    """

    methods: tuple[str, ...] = ("direct", "staged", "buffered", "mapped")

    def __init__(self, threads: int = 4, piece_bytes: int = PIECE_BYTES) -> None:
        super().__init__("blocking", 1, piece_bytes, threads, threads)


class CopyTransport(NativeTransport):
    """Copies to and from memory, past the caches of the processor: `File.direct` is an address. All
    processors take part, up to four: where kernels compute on all of them, each is slowed down alike."""

    methods: tuple[str, ...] = ("direct",)

    def __init__(self) -> None:
        super().__init__("blocking", 1, SLOT_BYTES, 1, min(os.cpu_count() or 1, 4))


class NvmeTransport(NativeTransport):
    """NVMe over TCP: reads and writes of namespaces on other machines, whose handles `storage.nvme` opens.

    Raises TransportUnavailable where the system lacks the means.
    """

    methods: tuple[str, ...] = ("direct", "staged")

    def __init__(self) -> None:
        super().__init__("nvme", NVME_DEPTH, PIECE_BYTES, SLOTS, 1)


class NvmeSpillTransport(NvmeTransport):
    """NVMe over TCP for memory that may be freed during a write: a message that has begun must be sent to its
    end, so the bytes are copied first. Reads are not."""

    methods: tuple[str, ...] = ("staged",)


_open: weakref.WeakSet[NativeTransport] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # No callback may run while the interpreter is finalized.
    for transport in list(_open):
        if not transport.close(0.0 if id(transport) in _leaked else EXIT_TIMEOUT_S):
            logger.error(
                "transfers by %s did not end: the disk hangs. The process ends without them.", transport._kind
            )


_leaked: set[int] = set()


def _leak(transport: NativeTransport) -> None:
    """Never destroy it: its destructor would join a thread that waits for a disk that hangs."""
    if id(transport) not in _leaked:
        _leaked.add(id(transport))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(transport))
