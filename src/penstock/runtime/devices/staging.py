"""Between an accelerator and the disk, by way of page-locked host memory: chunk by chunk through buffers.

Each direction has buffers of its own, so that none holds up the other. A chunk goes two legs, one by the bus
and one by the disk, and has its buffer until the host has seen the second one end. While it goes the second,
others go the first, of the same copy or of the next ones: who begins a copy waits for buffers alone.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from penstock.errors import PenstockError
from penstock.runtime.devices import Done, Moved
from penstock.runtime.devices.pinned import PinnedSlab
from penstock.runtime.devices.queues import Copy, StreamQueue, failure, tell
from penstock.storage.extents import Extent
from penstock.storage.spill import SpillSpace, Transfer

logger = logging.getLogger("penstock")


class _Whole:
    """A copy that is under way in so many chunks: over with the last of them."""

    def __init__(self, copy: Copy, priority: int, chunks: int, done: Done) -> None:
        self.copy, self.priority = copy, priority
        self.error: PenstockError | None = None
        self._left, self._moved, self._done = chunks, list[Moved](), done
        self._lock = threading.Lock()

    def note(self, error: PenstockError | None, moved: Sequence[Moved]) -> None:
        with self._lock:
            self.error = self.error or error
            self._moved += moved

    def one_over(self) -> bool:
        """Whether it was the last: who began the copy has been told then."""
        with self._lock:
            self._left -= 1
            is_over = not self._left
        if is_over:
            tell(self._done, self.error, self._moved)
        return is_over


@dataclass(slots=True, eq=False)
class _Chunk:
    """Bytes of a copy from ``begin`` on, their buffer, and the legs that they have yet to go."""

    whole: _Whole
    begin: int
    size_bytes: int
    buffer: Extent
    legs: Iterator[Callable[[_Chunk, Done], None]]


class Staging:
    """One direction: out of the device, or into it.

    bus      the copies between the device and host memory in that direction
    chunks   buffers of ``chunk_bytes`` that it takes from the slab

    All but `close` and `drain` are called on one thread.
    """

    def __init__(
        self, out: bool, spill: SpillSpace, slab: PinnedSlab, bus: StreamQueue, chunk_bytes: int, chunks: int
    ) -> None:
        self._spill, self._slab, self._bus = spill, slab, bus
        self._chunk_bytes = chunk_bytes
        self._legs = (self._cross, self._write) if out else (self._read, self._cross)
        self._free: queue.SimpleQueue[Extent] = queue.SimpleQueue()
        for _ in range(chunks):
            self._free.put(slab.allocate(chunk_bytes))
        self._kept: Extent | None = None  # by `make_way`
        self._idle = threading.Condition()
        self._under_way = 0  # copies

    def make_way(self) -> None:
        """Wait for a buffer, for whatever comes next."""
        if self._kept is None:
            self._kept = self._free.get()

    def carry(self, copy: Copy, priority: int, done: Done) -> None:
        """Begin the copy, which ends on any thread. Blocks until each of its chunks has a buffer."""
        begins = range(0, copy.size_bytes, self._chunk_bytes)
        whole = _Whole(copy, priority, len(begins), done)
        with self._idle:
            self._under_way += 1
        for begin in begins:
            self.make_way()
            assert self._kept is not None
            buffer, self._kept = self._kept, None
            size_bytes = min(self._chunk_bytes, copy.size_bytes - begin)
            self._go_on(_Chunk(whole, begin, size_bytes, buffer, iter(self._legs)), None, ())

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until the copies that have begun are over. False: they are not."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._under_way, timeout_s)

    def close(self, timeout_s: float) -> None:
        """As `drain`, and nothing begins any more. A copy that hangs is not waited for for longer."""
        if not self.drain(timeout_s):
            logger.warning("a copy hangs between host memory and the disk, and is left behind")

    def _go_on(self, chunk: _Chunk, error: PenstockError | None, moved: Sequence[Moved]) -> None:
        """A leg is over: the chunk goes the next one, or has arrived, or goes no further."""
        whole = chunk.whole
        whole.note(error, moved)
        if whole.error is None and (leg := next(chunk.legs, None)) is not None:
            try:
                leg(chunk, functools.partial(self._go_on, chunk))
            except Exception as refused:
                whole.note(failure(refused), ())
            else:
                return
        self._free.put(chunk.buffer)
        if whole.one_over():
            with self._idle:
                self._under_way -= 1
                self._idle.notify_all()

    # -- legs ----------------------------------------------------------------------------------

    def _cross(self, chunk: _Chunk, over: Done) -> None:
        copy = chunk.whole.copy
        assert copy.storage is not None
        self._bus.put(
            Copy(copy.managed, copy.storage, chunk.buffer, copy.ready, over, chunk.begin, chunk.size_bytes),
            chunk.whole.priority,
        )

    def _write(self, chunk: _Chunk, over: Done) -> None:
        self._spill.write(
            self._part(chunk),
            self._slab.address(chunk.buffer),
            chunk.size_bytes,
            self._slab,
            functools.partial(self._moved, chunk, "disk_write", over),
            checksum=chunk.whole.copy.managed.lasts,
        )

    def _read(self, chunk: _Chunk, over: Done) -> None:
        self._spill.read(
            self._part(chunk),
            self._slab.address(chunk.buffer),
            chunk.size_bytes,
            self._slab,
            functools.partial(self._moved, chunk, "disk_read", over),
            priority=chunk.whole.priority,
        )

    def _moved(self, chunk: _Chunk, link: str, over: Done, transfer: Transfer) -> None:
        times = transfer.started_s, transfer.finished_s
        moved = [] if transfer.error else [chunk.whole.copy.moved(link, *times, chunk.size_bytes)]
        over(transfer.error, moved)

    def _part(self, chunk: _Chunk) -> Extent:
        whole = chunk.whole.copy.block
        size_bytes = min(whole.size_bytes - chunk.begin, self._chunk_bytes)
        return Extent(whole.offset + chunk.begin, size_bytes, whole.space)
