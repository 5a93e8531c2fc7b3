"""The I/O queue of a checkpoint, with a bounded number of transfers in flight, and its buffer pool."""

from __future__ import annotations

import copy
import errno
import functools
import queue
from collections import deque
from collections.abc import Callable, Iterable

from penstock.storage.aligned import AlignedBuffer
from penstock.storage.files import OpenFile
from penstock.storage.paths import shared_transport
from penstock.storage.transfer import Transfer

PIECE_BYTES = 4 << 20
DEPTH = 8
FEW = 4  # transfers in flight, and buffers, while memory is short
TIMEOUT_S = 120.0  # the longest wait for the next to end: then the disk hangs
_CANCEL_TIMEOUT_S = 1.0  # the longest wait for what was cancelled on a disk that hangs


def carry_out(
    opened: OpenFile,
    transfers: Iterable[Transfer],
    on_done: Callable[[Transfer], None],
    depth: int | None = None,
) -> None:
    """Carry out ``transfers`` on ``opened``, with at most ``depth`` in flight.

    depth      None: DEPTH, or FEW while memory is short
    transfers  taken one by one, each while the previous ones are in flight
    on_done    called on this thread with each that is over, in the order in which they end. Where none
               ends for `TIMEOUT_S`, it is called with one whose error is ETIMEDOUT, and has to raise

    When this returns or raises, nothing is in flight: files can be closed and memory be used, whatever
    happened. Only what a disk that hangs does not give back stays in use until the process ends: its
    transfer keeps the memory, and the file stays open.
    """
    if depth is None:
        depth = FEW if _short else DEPTH
    transport = shared_transport()
    over: queue.SimpleQueue[Transfer] = queue.SimpleQueue()
    incomplete: set[Transfer] = set()
    hangs = False

    def transfer_over(transfer: Transfer) -> None:
        incomplete.discard(transfer)
        over.put(transfer)

    def await_one() -> None:
        nonlocal hangs
        try:
            transfer = over.get(timeout=TIMEOUT_S)
        except queue.Empty:
            if late := list(incomplete):
                hangs = True
                transfer = copy.copy(late[0])
                transfer.error_number = errno.ETIMEDOUT
            else:  # it comes at this moment
                transfer = over.get()
        on_done(transfer)

    interrupted: KeyboardInterrupt | None = None
    try:
        in_flight = 0
        for transfer in transfers:
            incomplete.add(transfer)
            transfer.on_done = transfer_over
            try:
                transport.submit([transfer])
            except ValueError:  # nothing has begun
                incomplete.discard(transfer)
                raise
            in_flight += 1
            while in_flight >= depth:
                await_one()
                in_flight -= 1
        for _ in range(in_flight):
            await_one()
    finally:
        while incomplete:
            try:
                transport.cancel(list(incomplete))
                over.get(timeout=_CANCEL_TIMEOUT_S if hangs else TIMEOUT_S)
            except queue.Empty:
                opened.abandon()
                break
            except KeyboardInterrupt as error:  # the memory is in use all the same
                interrupted = error
        if interrupted is not None:
            raise interrupted


def use_few_buffers() -> Callable[[], None]:
    """For who keeps a budget of memory, until the call that this gives: few buffers, which do not stay."""
    owner = object()
    _short.add(owner)
    _spare.clear()
    return functools.partial(_short.discard, owner)


class BufferPool:
    """Buffers of PIECE_BYTES each, allocated when first needed. Up to DEPTH stay for the next pool, unless
    memory is short.

    most_bytes   of one piece, where that is less: then the buffers are smaller, and are not kept
    pinned       for tensors of a device: page-locked where there is an accelerator, so that copies run at the
                 link's speed. torch keeps such memory for reuse, so the pool does not
    """

    def __init__(self, most_bytes: int = PIECE_BYTES, pinned: bool = False) -> None:
        self._size_bytes = min(most_bytes, PIECE_BYTES)
        self._make = PinnedBuffer if pinned and _has_accelerator() else AlignedBuffer
        whole = self._make is AlignedBuffer and self._size_bytes == PIECE_BYTES and not _short
        self._free: deque[AlignedBuffer | PinnedBuffer] = _spare if whole else deque(maxlen=DEPTH)

    def take(self) -> AlignedBuffer | PinnedBuffer:
        try:
            return self._free.pop()
        except IndexError:
            return self._make(self._size_bytes)

    def give(self, buffer: AlignedBuffer | PinnedBuffer) -> None:
        self._free.append(buffer)


_spare: deque[AlignedBuffer | PinnedBuffer] = deque(maxlen=DEPTH)
_short: set[object] = set()


class PinnedBuffer:
    """Page-locked memory, which begins at a page."""

    def __init__(self, size_bytes: int) -> None:
        import torch  # here, since looking at a checkpoint does without

        self._data = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        self.address = self._data.data_ptr()


def _has_accelerator() -> bool:
    import torch

    return torch.accelerator.is_available()
