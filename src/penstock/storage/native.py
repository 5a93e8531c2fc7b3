"""Transports that native threads carry out without the GIL: io_uring, and calls that block."""

from __future__ import annotations

import atexit
import ctypes
import logging
import threading
import time
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
    """Satisfies Transport. The native threads tell of what is over while there is nothing else to do;
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
        try:
            super().__init__(kind, self.methods, depth, piece_bytes, SLOT_BYTES, slots, threads)
        except OSError as error:
            raise TransportUnavailable(f"the system refuses it: {error.strerror}") from error
        self._teller = threading.Thread(target=self.deliver_the_rest, name=f"penstock-{kind}", daemon=True)
        self._teller.start()
        _open.add(self)

    def close(self, timeout_s: float = FOR_EVER_S) -> bool:
        deadline_s = time.monotonic() + timeout_s
        if not super().close(timeout_s):
            _keep_for_ever(self)
            return False
        if self._teller is not threading.current_thread():
            self._teller.join(max(deadline_s - time.monotonic(), 0.0))
            return not self._teller.is_alive()
        return True


class UringTransport(NativeTransport):
    """io_uring: reads and writes that the kernel carries out while no thread of ours waits for each.

    Raises TransportUnavailable where the kernel, or a container's policy, refuses io_uring.
    """

    methods: tuple[str, ...] = ("direct", "staged", "buffered")

    def __init__(self) -> None:
        super().__init__("io_uring", DEPTH, PIECE_BYTES, SLOTS, 1)


class PosixTransport(NativeTransport):
    """Blocking reads, writes and mappings on a few threads: works on every POSIX system.

    A small "buffered" transfer is carried out in `submit`, where that need not wait for the disk: copying
    takes less time than handing it over.
    """

    methods: tuple[str, ...] = ("direct", "staged", "buffered", "mapped")

    def __init__(self, threads: int = 4, piece_bytes: int = PIECE_BYTES) -> None:
        super().__init__("blocking", 1, piece_bytes, threads, threads)


class NvmeTransport(NativeTransport):
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


_open: weakref.WeakSet[NativeTransport] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # Nothing may be told to an interpreter that is being taken apart.
    for transport in list(_open):
        if not transport.close(0.0 if id(transport) in _kept else EXIT_TIMEOUT_S):
            logger.error(
                "transfers by %s did not end: the disk hangs. The process ends without them.", transport._kind
            )


_kept: set[int] = set()


def _keep_for_ever(transport: NativeTransport) -> None:
    """Its thread waits for a disk that hangs: nobody can wait for that thread, as its destructor does."""
    if id(transport) not in _kept:
        _kept.add(id(transport))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(transport))
