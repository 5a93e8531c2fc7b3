"""What every transport promises."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

_BUSY_RETRIES = 100
_BUSY_PAUSE_S = 1e-3


class Request(NamedTuple):
    """Move bytes between memory and an open file.

    kind         "write" (to the file) or "read" (from it)
    file         descriptor of the file
    offset       first byte in the file, a multiple of the transport's alignment
    address      of the memory, any alignment
    size_bytes   how many, above zero; the file is the requester's up to the next multiple of the
                 transport's alignment, and a write may put anything there
    keep         what keeps the memory alive: held until the request completes
    """

    kind: Literal["write", "read"]
    file: int
    offset: int
    address: int
    size_bytes: int
    keep: object = None


class Completion(NamedTuple):
    """A request is over, and its memory free to be used.

    error_number           0, or an errno; ECANCELED where it was cancelled before it began
    started_s, finished_s  time.perf_counter() when the transport began and ended it
    """

    request: Request
    error_number: int
    started_s: float
    finished_s: float


OnComplete = Callable[[Completion], None]


class Transport(Protocol):
    """Moves bytes in the background, in any order, without being polled."""

    def submit(self, requests: Sequence[Request], on_complete: OnComplete) -> None:
        """Begin ``requests``. ``on_complete`` is called once for each, on a thread of the transport.

        Raises ValueError after `close`, before any of the requests begins.
        """

    def cancel(self, requests: Sequence[Request]) -> int:
        """Complete with ECANCELED those of ``requests`` that have not begun. Gives their number."""

    def close(self) -> None:
        """Wait for every request, then end the transport. Idempotent."""


def move_fully(move: Callable[[int, int], int], size_bytes: int, alignment_bytes: int = 1) -> int:
    """Call ``move(begin, end)`` until ``size_bytes`` are moved; give 0, or an errno.

    ``move`` gives how many of the bytes [begin, end) it moved, from ``begin`` on: maybe fewer than
    asked for. Where it must begin at a multiple of ``alignment_bytes``, a remainder is moved again.
    A busy device is tried again for 0.1 s.
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
        if done + moved < size_bytes:
            moved = moved // alignment_bytes * alignment_bytes
        if moved <= 0:  # the file ends here, or the device gave up
            return errno.EIO
        done += moved
    return 0
