"""Reads and writes of a file in pieces: their transfers and buffers, and the checksums of tensors."""

from __future__ import annotations

import copy
import errno
import queue
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from penstock.checkpoint.failures import TIMEOUT_S
from penstock.checkpoint.header import TensorEntry
from penstock.options import IoOptions
from penstock.storage.aligned import AlignedBuffer, align_down
from penstock.storage.checksum import crc32c_combine
from penstock.storage.choice import path_of_size
from penstock.storage.costs import Kind, fastest_path
from penstock.storage.files import OpenFile
from penstock.storage.paths import IoPath, shared_path
from penstock.storage.transfer import Transfer, TransportBroken

PIECE_BYTES = 4 << 20
DEPTH = 8
FEW = 4  # transfers in flight, and buffers, inside a memory budget
_CANCEL_TIMEOUT_S = 1.0  # the longest wait for cancelled transfers on a disk that hangs


class TensorPart(NamedTuple):
    """The bytes [offset, end) of the file, which belong to the tensor with the index ``entry``."""

    entry: int
    offset: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.offset


class FilePiece(NamedTuple):
    """The bytes [offset, end) of the file, moved by one request, and the parts of tensors there, in order."""

    offset: int
    end: int
    parts: tuple[TensorPart, ...]


def split(
    entries: Sequence[TensorEntry], data_offset: int, alignment_bytes: int = 4096
) -> Iterator[FilePiece]:
    """Split all tensors into pieces, in order. Each begins at a multiple of ``alignment_bytes``.

    entries       in order of `begin`, without gaps
    data_offset   where in the file the first begins
    """
    end_of_file = data_offset + (entries[-1].end if entries else 0)
    index, position = 0, data_offset
    offset = align_down(data_offset, alignment_bytes)
    while position < end_of_file:
        end = min(offset + PIECE_BYTES, end_of_file)
        parts = []
        while index < len(entries) and position < end:
            stop = min(data_offset + entries[index].end, end)
            if stop > position:
                parts.append(TensorPart(index, position, stop))
                position = stop
            if position == data_offset + entries[index].end:
                index += 1
        yield FilePiece(offset, end, tuple(parts))
        offset = end


class Checksums:
    """Combines checksums of parts, added in any order, into checksums of whole tensors.

    Every method may be called from any thread.
    """

    def __init__(self, entries: Sequence[TensorEntry]) -> None:
        self._entries = entries
        self._parts: list[list[tuple[int, int, int]]] = [[] for _ in entries]

    def add(self, part: TensorPart, crc: int) -> None:
        self._parts[part.entry].append((part.offset, part.size_bytes, crc))

    def of(self, index: int) -> int:
        """The checksum of a tensor. All its parts must have been added."""
        total = 0
        for _, size_bytes, crc in sorted(self._parts[index]):
            total = crc32c_combine(total, crc, size_bytes)
        return total

    def damaged(self, added: Collection[int] | None = None) -> list[str]:
        """Names of the tensors, of those ``added``, whose checksum differs from that of their entry."""
        return [
            entry.name
            for index, entry in enumerate(self._entries)
            if (added is None or index in added) and entry.crc32c not in (None, self.of(index))
        ]


def io_path(kind: Kind, file: Path, size_bytes: int, io: IoOptions | None) -> IoPath:
    """The I/O path by which pieces of a file of ``size_bytes`` are moved: direct, unless ``io`` says another.

    Raises InvalidArgument where that cannot be used, InvalidFile for a file of costs that is none.
    """
    if io is None:
        return shared_path()
    names, by_size = io.wanted_paths()
    piece_bytes = max(min(size_bytes, PIECE_BYTES), 1)
    if by_size:
        return shared_path(path_of_size(by_size, piece_bytes))
    learned = (
        None if io.costs is None else fastest_path(Path(io.costs), file.parent, kind, piece_bytes, names)
    )
    return shared_path(learned or (names[0] if names else None))


def run_transfers(
    opened: OpenFile,
    transfers: Iterable[Transfer],
    on_done: Callable[[Transfer], None],
    path: IoPath,
    depth: int | None = None,
) -> None:
    """Carry out ``transfers`` on ``opened`` by one I/O path, with at most ``depth`` in flight.

    depth      None: DEPTH, or FEW inside a memory budget
    transfers  iterated lazily, while earlier ones are in flight
    on_done    called on this thread with each transfer, in the order in which they end. Where none ends for
               `TIMEOUT_S`, it is called with one whose error is ETIMEDOUT, and must raise

    When this returns or raises, nothing is in flight: files can be closed and memory reused. A transfer on a
    disk that hangs is the exception: it keeps its memory, and the file stays open, until the process ends.
    """
    if depth is None:
        depth = FEW if within_budget() else DEPTH
    transport = path.transport
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
            else:  # it ends at this moment
                transfer = over.get()
        on_done(transfer)

    interrupted: KeyboardInterrupt | None = None
    try:
        in_flight = 0
        for transfer in transfers:
            transfer.on_done, transfer.method = transfer_over, path.method
            # Ctrl-C cannot come between the two: no instruction of Python does.
            both = partial(incomplete.add, transfer), partial(transport.submit, [transfer])
            try:
                any(map(partial.__call__, both))
            except TransportBroken as error:  # as those were told that were under way
                transfer.end(error.errno)
            except ValueError:  # it was not submitted
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
            except KeyboardInterrupt as error:  # the memory is still in use
                interrupted = error
        if interrupted is not None:
            raise interrupted


def keep_within_budget() -> Callable[[], None]:
    """The CPU's tensors have a budget: use few buffers, free them after use, and load into tensors that torch
    allocates. Returns a function that undoes it."""
    owner = object()
    _budgets.add(owner)
    _spare.clear()
    return partial(_budgets.discard, owner)


def within_budget() -> bool:
    """Whether the CPU's tensors have a budget."""
    return bool(_budgets)


class BufferPool:
    """Buffers of PIECE_BYTES each, allocated when first needed. Up to DEPTH are kept for the next pool, but
    none inside a memory budget.

    most_bytes   of one piece, where that is less: then the buffers are smaller, and are not kept
    pinned       for tensors of a device: page-locked where there is an accelerator, so that copies run at the
                 link's speed. torch keeps such memory for reuse, so the pool does not
    """

    def __init__(self, most_bytes: int = PIECE_BYTES, pinned: bool = False) -> None:
        self._size_bytes = min(most_bytes, PIECE_BYTES)
        self._make = PinnedBuffer if pinned and PinnedBuffer.is_available() else AlignedBuffer
        whole = self._make is AlignedBuffer and self._size_bytes == PIECE_BYTES and not within_budget()
        self._free: deque[AlignedBuffer | PinnedBuffer] = _spare if whole else deque(maxlen=DEPTH)

    def take(self) -> AlignedBuffer | PinnedBuffer:
        try:
            return self._free.pop()
        except IndexError:
            return self._make(self._size_bytes)

    def give(self, buffer: AlignedBuffer | PinnedBuffer) -> None:
        self._free.append(buffer)


_spare: deque[AlignedBuffer | PinnedBuffer] = deque(maxlen=DEPTH)
_budgets: set[object] = set()


class PinnedBuffer:
    """Page-locked memory, which begins at a page."""

    @staticmethod
    def is_available() -> bool:
        import torch

        return torch.accelerator.is_available()

    def __init__(self, size_bytes: int) -> None:
        import torch  # what a file holds is told without it

        self._data = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        self.address = self._data.data_ptr()
