"""The record of a transfer between memory and a file, and the contract of transports."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from penstock._native import DEMAND, EVICT, PREFETCH

if TYPE_CHECKING:
    from penstock.errors import SpillError
    from penstock.storage.extents import Extent
    from penstock.storage.paths import IoPath
    from penstock.storage.queue import Queue

__all__ = ["DEMAND", "EVICT", "FOR_EVER_S", "PREFETCH", "File", "Kind", "OnDone", "Transfer", "Transport"]

logger = logging.getLogger("penstock")

_BUSY_RETRIES = 100
_BUSY_PAUSE_S = 1e-3

Kind = Literal["write", "read"]

FOR_EVER_S = 1e9  # as a time limit: longer than anybody waits, and not too long for any clock


class TransportUnavailable(Exception):
    """This machine, or this process, cannot use the transport; says why.

    expected   most machines cannot: nothing that a user should be warned of
    """

    def __init__(self, reason: str, expected: bool = False) -> None:
        super().__init__(reason)
        self.expected = expected


class TransportBroken(ValueError):
    """The transport is broken, by an errno: its text says why, and what to do."""

    def __init__(self, error_number: int) -> None:
        self.errno = error_number
        remedy = "Give the process more memory"
        if error_number == errno.EBADF:
            culprit = "Something closed descriptors of penstock's, as os.closerange does"
            remedy = f"{culprit}: have it close its own only"
        super().__init__(f"transfers broke: {os.strerror(error_number)}. {remedy}, and run this again.")


class File(NamedTuple):
    """An open file, as transports see it.

    buffered          descriptor whose reads and writes pass through the page cache
    direct            descriptor of the same file that bypasses it; -1 where the file system takes no
                      direct I/O: then every method is "buffered". Of host memory, its address
    alignment_bytes   what direct I/O demands of offsets, sizes and addresses: a power of two
    """

    buffered: int
    direct: int = -1
    alignment_bytes: int = 4096


class Transfer:
    """One transfer between memory and an open file. Offset, address and size may be unaligned.

    size_bytes   above zero; a transport cuts large transfers itself
    method       one of the transport's `methods`
    padded       the file is the requester's from the multiple of its alignment below ``offset`` to
                 the one above the end: a write may put anything there
    keep         reference that keeps the memory alive until the transfer ends
    priority     DEMAND: a kernel waits for it. PREFETCH: one will. EVICT: the least urgent
    on_done      called once with the transfer when it has ended, on any thread

    After its end its memory can be reused, unless it is abandoned:

    error_number           0, or an errno; ECANCELED where it was cancelled before it began. EIO also
                           where the file ends before the transfer does
    started_s, finished_s  time.perf_counter() when the transport began and ended it
    abandoned              the transport broke: the kernel may use its memory, and write to the file, until
                           the process ends
    may_land              a write to a remote drive whose connection was lost: it may still be carried out
                           (`Namespace.quiesce_s`), and overwrite what is written there next

    Of those of a SpillSpace:

    extent     where in the space its bytes lie
    callback   called last, when the queue has processed its end
    error      None, or why it failed: then the content of the destination is undefined
    parts      transfers that carry it out, where it lies in several files
    left       number of parts that have not ended
    failed     the first part that failed
    explores   its I/O path is not known to be the best
    measured   its cost is measured: it has its direction to itself. False where that is given up
    rehearsed  it is carried out twice, and the second one is measured
    checked    its bytes are checksummed
    asked_s    time.perf_counter() when it was asked for
    began_s    when it was handed to the transport, 0 before
    """

    error_number = 0
    started_s = finished_s = 0.0
    abandoned = may_land = False

    extent: Extent
    path: IoPath
    queue: Queue
    callback: OnDone
    error: SpillError | None = None
    parts: Sequence[Transfer] = ()
    left = 0
    failed: Transfer | None = None
    explores = measured = rehearsed = checked = False
    asked_s = began_s = 0.0

    def __init__(
        self,
        kind: Kind,
        file: File,
        offset: int,
        address: int,
        size_bytes: int,
        method: str = "direct",
        padded: bool = False,
        keep: object = None,
        priority: int = DEMAND,
        on_done: OnDone = lambda transfer: None,
    ) -> None:
        self.kind: Kind = kind
        self.file, self.offset, self.address, self.size_bytes = file, offset, address, size_bytes
        self.method, self.padded, self.keep, self.priority = method, padded, keep, priority
        self.on_done = on_done

    def raise_priority(self) -> None:
        """Raise its priority to DEMAND. Cheap where it has that already."""
        if self.priority != DEMAND:
            self.queue.raise_priority(self)

    def end(self, error_number: int = 0, started_s: float = 0.0, abandoned: bool = False) -> None:
        """End the transfer. Called by transports, which must not use it afterwards."""
        self.error_number, self.abandoned = error_number, abandoned
        self.finished_s = time.perf_counter()
        self.started_s = started_s or self.finished_s
        try:
            self.on_done(self)
        except Exception as error:  # of the callback: the other transfers go on
            log_failed(self, error)

    def __repr__(self) -> str:
        return f"{self.kind} of {self.size_bytes} bytes at {self.offset} of {self.file} ({self.method})"


OnDone = Callable[[Transfer], None]


def log_failed(transfer: Transfer, error: BaseException) -> None:
    logger.error("what follows a transfer failed: %s", transfer, exc_info=error)


class Transport(Protocol):
    """Moves bytes in the background, without being polled.

    Transfers begin by priority, and those of one priority in the order they came; they end in any order. One
    that is cut into pieces lets others overtake it between two of them. What has begun is not recalled.

    methods   how it can move them:
           "direct"      past the page cache, straight between memory and disk where alignment
                         allows; odd heads and tails go by the one that is correct for them
           "staged"      past the page cache, through aligned buffers of the transport's own
           "buffered"    through the page cache
           "mapped"      through a mapping of the file, which must be allocated up to the transfer's end
           "gpu-direct"  between the memory of a GPU and the disk; the address is a device pointer
    """

    methods: tuple[str, ...]

    def submit(self, transfers: Sequence[Transfer], /) -> None:
        """Start transfers. ``on_done`` of each is called once, on a thread of the transport, or before this
        returns where that is quicker; of a cancelled one, maybe on the thread that cancels.

        Raises ValueError after `close`, or where a method is unknown, before any of them begins;
        TransportBroken where nothing can be carried out any more.
        """

    def cancel(self, transfers: Sequence[Transfer], /) -> int:
        """End with ECANCELED those that have not begun. Returns their number."""
        ...

    def raise_priority(self, transfers: Sequence[Transfer], /) -> None:
        """Raise the priority of those that have not ended to DEMAND."""

    def close(self, timeout_s: float = FOR_EVER_S) -> bool:
        """Wait for every transfer, then end the transport. Idempotent.

        False: some are still under way after ``timeout_s``. Their memory and their files stay in use.
        """
        ...


def move_fully(move: Callable[[int, int], int], size_bytes: int) -> int:
    """Call ``move(begin, end)``, which returns how many of these bytes it moved, until all are. Returns 0, or
    an errno. A busy device is retried for 0.1 s."""
    done = busy = 0
    while done < size_bytes:
        try:
            moved = move(done, size_bytes)
        except (BlockingIOError, InterruptedError):
            busy += 1
            if busy > _BUSY_RETRIES:
                return errno.EAGAIN
            time.sleep(_BUSY_PAUSE_S)
            continue
        except OSError as error:
            return error.errno or errno.EIO
        if moved <= 0:  # the file ends here, or the device gave up
            return errno.EIO
        done += moved
    return 0
