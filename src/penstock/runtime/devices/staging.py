"""Copies between an accelerator and the disk, in chunks through page-locked host buffers.

Each direction has its own buffers, so that neither blocks the other. A chunk makes two legs, one over the bus
and one to or from the disk, and holds its buffer until the second has ended. Legs of different chunks
overlap, of one copy or of several: `start` blocks for buffers only.
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
from penstock.runtime.devices.queues import Copy, StreamQueue, call_done, copy_error
from penstock.storage.extents import Extent
from penstock.storage.spill import SpillSpace, Transfer

logger = logging.getLogger("penstock")


class _StagedCopy:
    """A copy in several chunks, which ends with the last of them."""

    def __init__(self, copy: Copy, priority: int, chunks: int, done: Done) -> None:
        self.copy, self.priority = copy, priority
        self.error: PenstockError | None = None
        self._left, self._moved, self._done = chunks, list[Moved](), done
        self._lock = threading.Lock()

    def record(self, error: PenstockError | None, moved: Sequence[Moved]) -> None:
        with self._lock:
            self.error = self.error or error
            self._moved += moved

    def end_chunk(self) -> bool:
        """Count a chunk that has ended. With the last, call the copy's ``done`` and return True."""
        with self._lock:
            self._left -= 1
            is_last = not self._left
        if is_last:
            call_done(self._done, self.error, self._moved)
        return is_last


@dataclass(slots=True, eq=False)
class _Chunk:
    """Bytes of a copy from ``begin`` on, their buffer, and the legs that are left."""

    staged: _StagedCopy
    begin: int
    size_bytes: int
    buffer: Extent
    legs: Iterator[Callable[[_Chunk, Done], None]]


class Staging:
    """One direction: out of the device, or into it.

    bus      queue of the copies between the device and host memory in that direction
    chunks   number of buffers, of ``chunk_bytes`` each, to take from the slab
    on_disk_thread   called first on the thread on which a leg to or from the disk has ended

    All methods but `close` and `drain` are called on one thread.
    """

    def __init__(
        self,
        out: bool,
        spill: SpillSpace,
        slab: PinnedSlab,
        bus: StreamQueue,
        chunk_bytes: int,
        chunks: int,
        on_disk_thread: Callable[[], None],
    ) -> None:
        self._spill, self._slab, self._bus = spill, slab, bus
        self._chunk_bytes = chunk_bytes
        self._on_disk_thread = on_disk_thread
        self._legs = (self._cross_bus, self._write) if out else (self._read, self._cross_bus)
        self._free: queue.SimpleQueue[Extent] = queue.SimpleQueue()
        for _ in range(chunks):
            self._free.put(slab.allocate(chunk_bytes))
        self._next_buffer: Extent | None = None  # for the next chunk
        self._idle = threading.Condition()
        self._active = 0  # copies that have begun

    def wait_for_room(self) -> None:
        """Block until a buffer for the next chunk is free."""
        if self._next_buffer is None:
            self._next_buffer = self._free.get()

    def start(self, copy: Copy, priority: int, done: Done) -> None:
        """Start a copy, and call ``done`` at its end, on any thread. Blocks until each chunk has a buffer."""
        begins = range(0, copy.size_bytes, self._chunk_bytes)
        staged = _StagedCopy(copy, priority, len(begins), done)
        with self._idle:
            self._active += 1
        for begin in begins:
            self.wait_for_room()
            assert self._next_buffer is not None
            buffer, self._next_buffer = self._next_buffer, None
            size_bytes = min(self._chunk_bytes, copy.size_bytes - begin)
            self._next_leg(_Chunk(staged, begin, size_bytes, buffer, iter(self._legs)), None, ())

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait for the copies that have begun. False: some have not ended after ``timeout_s``."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._active, timeout_s)

    def close(self, timeout_s: float) -> None:
        """As `drain`; nothing may begin afterwards. Give up on a copy that hangs after ``timeout_s``."""
        if not self.drain(timeout_s):
            logger.warning("a copy hangs between host memory and the disk, and is left behind")

    def _next_leg(self, chunk: _Chunk, error: PenstockError | None, moved: Sequence[Moved]) -> None:
        """A leg has ended: start the chunk's next one, unless it was the last, or the copy has failed."""
        staged = chunk.staged
        staged.record(error, moved)
        if staged.error is None and (leg := next(chunk.legs, None)) is not None:
            try:
                leg(chunk, functools.partial(self._next_leg, chunk))
            except Exception as refused:
                staged.record(copy_error(refused), ())
            else:
                return
        self._free.put(chunk.buffer)
        if staged.end_chunk():
            with self._idle:
                self._active -= 1
                self._idle.notify_all()

    # -- legs ----------------------------------------------------------------------------------

    def _cross_bus(self, chunk: _Chunk, over: Done) -> None:
        copy, extent = chunk.staged.copy, (chunk.begin, chunk.size_bytes)
        assert copy.storage is not None
        self._bus.put(
            Copy(copy.managed, copy.storage, chunk.buffer, copy.ready, over, *extent, at_once=True),
            chunk.staged.priority,
        )

    def _write(self, chunk: _Chunk, over: Done) -> None:
        self._spill.write(
            self._part(chunk),
            self._slab.address(chunk.buffer),
            chunk.size_bytes,
            self._slab,
            functools.partial(self._moved, chunk, "disk_write", over),
            checksum=chunk.staged.copy.managed.persistent,
        )

    def _read(self, chunk: _Chunk, over: Done) -> None:
        self._spill.read(
            self._part(chunk),
            self._slab.address(chunk.buffer),
            chunk.size_bytes,
            self._slab,
            functools.partial(self._moved, chunk, "disk_read", over),
            priority=chunk.staged.priority,
        )

    def _moved(self, chunk: _Chunk, link: str, over: Done, transfer: Transfer) -> None:
        self._on_disk_thread()
        times = transfer.started_s, transfer.finished_s
        moved = [] if transfer.error else [chunk.staged.copy.moved(link, *times, chunk.size_bytes)]
        over(transfer.error, moved)

    def _part(self, chunk: _Chunk) -> Extent:
        block = chunk.staged.copy.block
        size_bytes = min(block.size_bytes - chunk.begin, self._chunk_bytes)
        return Extent(block.offset + chunk.begin, size_bytes, block.space)
