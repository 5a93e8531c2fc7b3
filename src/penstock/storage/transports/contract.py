"""What every transport promises."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

_BUSY_RETRIES = 100
_BUSY_PAUSE_S = 1e-3

Kind = Literal["write", "read"]

FOR_EVER_S = 1e9  # as a time limit: longer than anybody waits, and not too long for any clock

# Of requests that wait, those of a lower number begin first.
DEMAND, PREFETCH, EVICT = range(3)


class TransportUnavailable(Exception):
    """This machine, or this process, cannot use the transport; says why.

    expected   most machines cannot: nothing that a user should be warned of
    """

    def __init__(self, reason: str, expected: bool = False) -> None:
        super().__init__(reason)
        self.expected = expected


class TransportBroken(ValueError):
    """The transport carries out nothing any more: says why, and what to do."""


def broken_text(error_number: int) -> str:
    """What to say where what carries out transfers has broken."""
    remedy = "Give the process more memory"
    if error_number == errno.EBADF:
        remedy = (
            "Something closed descriptors of penstock's, as os.closerange does: have it close its own only"
        )
    return f"transfers broke: {os.strerror(error_number)}. {remedy}, and run this again."


class File(NamedTuple):
    """An open file, as transports see it.

    buffered          descriptor whose reads and writes pass through the page cache
    direct            descriptor of the same file that bypasses it; -1 where the file system takes no
                      direct I/O: then every method is "buffered"
    alignment_bytes   what direct I/O demands of offsets, sizes and addresses: a power of two
    """

    buffered: int
    direct: int = -1
    alignment_bytes: int = 4096


class Request(NamedTuple):
    """Move bytes between memory and an open file. Offset, address and size may be odd.

    kind         "write" (to the file) or "read" (from it)
    size_bytes   how many, above zero; a transport cuts large requests itself
    method          how, one of the transport's `methods`
    padded       the file is the requester's from the multiple of its alignment below ``offset`` to
                 the one above the end: a write may put anything there
    keep         what keeps the memory alive: held until the request completes
    priority     DEMAND: somebody waits for it. PREFETCH: it will be waited for. EVICT: it may take its time
    """

    kind: Kind
    file: File
    offset: int
    address: int
    size_bytes: int
    method: str = "direct"
    padded: bool = False
    keep: object = None
    priority: int = DEMAND


class Completion(NamedTuple):
    """A request is over, and its memory free to be used, unless it is abandoned.

    error_number           0, or an errno; ECANCELED where it was cancelled before it began. EIO also
                           where the file ends before the request does
    started_s, finished_s  time.perf_counter() when the transport began and ended it
    abandoned              what carried it out broke: the system may use its memory, and write to the file,
                           until the process ends
    unsettled              a write that was sent to a remote drive, and lost with its connection, may land yet
                           (`Namespace.quiesce_s`), over what is written there next
    """

    request: Request
    error_number: int
    started_s: float
    finished_s: float
    abandoned: bool = False
    unsettled: bool = False


OnComplete = Callable[[Completion], None]


class Transport(Protocol):
    """Moves bytes in the background, without being polled.

    Requests begin by priority, and those of one priority in the order they came; they end in any order. A
    request that is cut into pieces lets others overtake it between two of them. What has begun is not
    recalled.

    methods   how it can move them:
           "direct"      past the page cache, straight between memory and disk where alignment
                         allows; odd heads and tails go by the one that is correct for them
           "staged"      past the page cache, through aligned buffers of the transport's own
           "buffered"    through the page cache
           "mapped"      through a mapping of the file, which must be allocated up to the request's end
           "gpu-direct"  between the memory of a GPU and the disk; the address is a device pointer
    """

    methods: tuple[str, ...]

    def submit(self, requests: Sequence[Request], on_complete: OnComplete) -> None:
        """Begin ``requests``. ``on_complete`` is called once for each, on a thread of the transport, or
        before this returns where that is quicker; of a request that is cancelled, it may be on the thread
        of who cancels.

        Raises ValueError after `close`, or where a method is unknown, before any of the requests begins;
        TransportBroken where nothing can be carried out any more.
        """

    def cancel(self, requests: Sequence[Request]) -> int:
        """Complete with ECANCELED those of ``requests`` that have not begun. Gives their number."""

    def hurry(self, requests: Sequence[Request]) -> None:
        """Make demands of those of ``requests`` that are not over."""

    def close(self, timeout_s: float = FOR_EVER_S) -> bool:
        """Wait for every request, then end the transport. Idempotent.

        False: some are still under way after ``timeout_s``. Their memory and their files stay in use.
        """


def move_fully(move: Callable[[int, int], int], size_bytes: int) -> int:
    """Call ``move(begin, end)`` until ``size_bytes`` are moved; give 0, or an errno.

    ``move`` gives how many of the bytes [begin, end) it moved, from ``begin`` on: maybe fewer than
    asked for. A busy device is tried again for 0.1 s.
    """
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
