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
from collections.abc import Callable, Iterator
from typing import Any

from penstock.runtime.devices import Copy
from penstock.runtime.devices.pinned import PinnedSlab
from penstock.runtime.devices.queues import StreamQueue, call_then, copy_error
from penstock.storage.extents import Extent
from penstock.storage.spill import SpillSpace, Transfer

logger = logging.getLogger("penstock")


class _Chunk(Copy):
    """Bytes of a larger copy from ``begin`` on, by way of a buffer: its block.

    legs   that have not begun
    """

    at_once = True

    def __init__(
        self,
        whole: Copy,
        priority: int,
        begin: int,
        size_bytes: int,
        buffer: Extent,
        legs: Iterator[Callable[[_Chunk], None]],
        on_end: Callable[[Any], None],
    ) -> None:
        assert whole.storage is not None
        super().__init__(whole.managed, whole.storage, whole.out, priority, on_end)
        self.whole, self.ready = whole, whole.ready
        self.begin, self.size_bytes, self.block, self.legs = begin, size_bytes, buffer, legs


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
        self._lock = threading.Lock()  # of the chunks that a copy has left, and how they went
        self._idle = threading.Condition()
        self._active = 0  # copies that have begun

    def wait_for_room(self) -> None:
        """Block until a buffer for the next chunk is free."""
        if self._next_buffer is None:
            self._next_buffer = self._free.get()

    def start(self, copy: Copy, priority: int) -> None:
        """Start a copy, which ends on any thread. Blocks until each chunk has a buffer."""
        begins = range(0, copy.size_bytes, self._chunk_bytes)
        copy.left = len(begins)
        with self._idle:
            self._active += 1
        for begin in begins:
            self.wait_for_room()
            assert self._next_buffer is not None
            buffer, self._next_buffer = self._next_buffer, None
            size_bytes = min(self._chunk_bytes, copy.size_bytes - begin)
            legs = iter(self._legs)
            self._next_leg(_Chunk(copy, priority, begin, size_bytes, buffer, legs, self._next_leg))

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait for the copies that have begun. False: some have not ended after ``timeout_s``."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._active, timeout_s)

    def close(self, timeout_s: float) -> None:
        """As `drain`; nothing may begin afterwards. Give up on a copy that hangs after ``timeout_s``."""
        if not self.drain(timeout_s):
            logger.warning("a copy hangs between host memory and the disk, and is left behind")

    def _next_leg(self, chunk: _Chunk) -> None:
        """A leg has ended: start the chunk's next one, unless it was the last, or the copy has failed."""
        whole = chunk.whole
        self._record(chunk)
        if whole.error is None and (leg := next(chunk.legs, None)) is not None:
            try:
                leg(chunk)
            except Exception as refused:
                chunk.error = copy_error(refused)
                self._record(chunk)
            else:
                return
        chunk.storage = None
        self._free.put(chunk.block)
        with self._lock:
            whole.left -= 1
            is_last = not whole.left
        if is_last:
            call_then(whole)
            with self._idle:
                self._active -= 1
                self._idle.notify_all()

    def _record(self, chunk: _Chunk) -> None:
        """How a leg went."""
        whole = chunk.whole
        with self._lock:
            whole.error = whole.error or chunk.error
            whole.moved, chunk.moved = [*whole.moved, *chunk.moved], ()

    # -- legs ----------------------------------------------------------------------------------

    def _cross_bus(self, chunk: _Chunk) -> None:
        self._bus.put(chunk)

    def _write(self, chunk: _Chunk) -> None:
        self._spill.write(
            self._part(chunk),
            self._slab.address(chunk.block),
            chunk.size_bytes,
            self._slab,
            functools.partial(self._on_disk_leg_end, chunk),
            checksum=chunk.managed.persistent,
        )

    def _read(self, chunk: _Chunk) -> None:
        self._spill.read(
            self._part(chunk),
            self._slab.address(chunk.block),
            chunk.size_bytes,
            self._slab,
            functools.partial(self._on_disk_leg_end, chunk),
            priority=chunk.priority,
        )

    def _on_disk_leg_end(self, chunk: _Chunk, transfer: Transfer) -> None:
        self._on_disk_thread()
        chunk.error = transfer.error
        if transfer.error is None:
            link = f"disk_{transfer.kind}"
            chunk.moved = (chunk.moved_over(link, transfer.started_s, transfer.finished_s),)
        self._next_leg(chunk)

    def _part(self, chunk: _Chunk) -> Extent:
        block = chunk.whole.block
        size_bytes = min(block.size_bytes - chunk.begin, self._chunk_bytes)
        return Extent(block.offset + chunk.begin, size_bytes, block.space)
