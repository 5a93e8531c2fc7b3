"""One segment of the allocator for all large tensors, and memory in one piece where only pieces are free.

torch's caching allocator never moves a block. Where tensors are evicted and return all the time, free memory
is soon fragmented, and a tensor that would fit is refused. So the large tensors of a run are put into
one segment of the allocator's, which is followed block by block (csrc/runtime/device_segment.hpp). Before
something is made or comes back that no free block is large enough for, what lies in the cheapest place for it
goes elsewhere: by a copy within the device, on the stream that owns the memory and without the host; where it
fits nowhere, to the tier below.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from penstock._native import DeviceMemory, DeviceSegment, Leaves
from penstock.runtime.copy_engine import CopyEngine
from penstock.runtime.devices.copies import CopyQueues, Events
from penstock.runtime.devices.driver import Driver
from penstock.runtime.schedule import LARGEST_SMALL_BYTES
from penstock.runtime.storages import RESIDENT, ManagedStorage
from penstock.units import format_bytes

logger = logging.getLogger("penstock")

# Most places to clear for one request, many of them to enlarge a free block.
ATTEMPTS = 32

# Refusals of what should fit, after which the model of the allocator here counts as wrong.
SURPRISES = 8


class Compaction:
    """Frees contiguous memory. Called with the engine's lock held, on the thread of the kernels.

    refused       blocks that the allocator refused since the segment was opened, or the run began
    moved_bytes   within the device, in total
    """

    def __init__(self, driver: Driver, events: Events, copies: CopyQueues, memory: DeviceMemory) -> None:
        self._driver, self._events, self._copies = driver, events, copies
        self._memory = memory  # its segment is the one that is followed
        self._segment: DeviceSegment | None = None
        self._stream: Any = None
        self._clearing = False
        self._surprises = 0
        self.refused = 0
        self.moved_bytes = 0

    @property
    def is_open(self) -> bool:
        return self._segment is not None

    def open(self, size_bytes: int, stream: Any) -> bool:
        """Make the allocator reserve a segment, into which large tensors go from now on. Its cache must be
        empty. False: out of memory."""
        self.close()
        address = self._driver.reserve(size_bytes, stream)
        if address is None:
            return False
        self._stream = stream
        self._segment = DeviceSegment(address, size_bytes)
        self._memory.segment = self._segment
        self.refused = self._surprises = 0
        logger.debug("large tensors are in one segment of %s", format_bytes(size_bytes))
        return True

    def close(self) -> None:
        """Stop following the segment. Tensors stay where they are."""
        if self._segment is not None:
            self._segment.clear()
        self._memory.segment = self._segment = None

    def put(self, managed: ManagedStorage, storage: torch.UntypedStorage) -> None:
        """Memory was allocated for the storage."""
        if self._segment is not None:
            self._segment.put(managed, storage.data_ptr())

    def on_out_of_memory(self, size_bytes: int) -> None:
        """The allocator had no block of so many bytes."""
        self.refused += 1
        segment = self._segment
        if segment is None or size_bytes <= LARGEST_SMALL_BYTES or not segment.fits([size_bytes]):
            return
        self._surprises += 1
        if self._surprises >= SURPRISES:
            logger.info("the allocator refuses memory that is free: tensors move within the device no more")
            self.close()

    def make_holes(self, engine: CopyEngine, sizes: Sequence[int], *, may_leave: bool) -> bool:
        """Make free blocks of these sizes, the largest first. False: not possible.

        may_leave   tensors that no plan evicts may be evicted, where nothing else helps
        """
        if self._clearing:  # what comes back meanwhile must not take the place
            return False
        self._copies.poll()
        needed_bytes = sum(sizes)
        leaves = Leaves.leaving if may_leave else Leaves.nothing
        wait = engine.wait_for_one_that_leaves if may_leave else engine.kernels_wait_for_one_that_leaves
        attempts = 0
        while (segment := self._segment) is not None:
            if segment.fits(sizes):
                return True
            # What leaves is gone by now, as far as the plan goes.
            if segment.free_bytes < needed_bytes:
                if wait():
                    continue
                if not may_leave:
                    return False
            if attempts == ATTEMPTS:
                return False
            attempts += 1
            # In one piece, or else each.
            wanted = (needed_bytes, *(size_bytes for size_bytes in sizes if not segment.fits([size_bytes])))
            if any(self._clear(engine, segment, size_bytes, leaves) for size_bytes in wanted):
                continue
            if wait():
                attempts -= 1
            elif not may_leave or not any(
                self._clear(engine, segment, size_bytes, Leaves.anything) for size_bytes in wanted
            ):
                return False
        return True

    def _clear(self, engine: CopyEngine, segment: DeviceSegment, size_bytes: int, leaves: Leaves) -> bool:
        """Empty the place for one free block of so many bytes, or a part of it."""
        obstacles = segment.obstacles(size_bytes, leaves)
        if obstacles is None:
            return False
        move, leave, free = obstacles
        held: list[tuple[int, torch.UntypedStorage]] = []  # where nothing else must go meanwhile
        self._clearing = True
        try:
            if leave:  # what is free then is looked at again
                return all(engine.leave_now(managed) for managed in leave)
            if not all(self._hold(segment, held, address) for address, _ in free):
                return False
            for managed in move:
                address = managed.segment_address
                if not self._move(engine, segment, managed) or not self._hold(segment, held, address):
                    return False
            return True
        finally:
            for address, _ in held:
                segment.give_up(address)
            held.clear()
            self._clearing = False

    def _hold(
        self, segment: DeviceSegment, held: list[tuple[int, torch.UntypedStorage]], address: int
    ) -> bool:
        """Take the free block at the address. Of blocks of equal size the allocator returns the first."""
        strays: list[tuple[int, torch.UntypedStorage]] = []
        try:
            while (free_bytes := segment.free_at(address)) > 0:
                content = self._driver.allocate(free_bytes, self._stream)
                if content is None:
                    self.on_out_of_memory(free_bytes)
                    return False
                taken = content.data_ptr()
                segment.hold(taken, free_bytes)
                (held if taken == address else strays).append((taken, content))
            return True
        finally:
            for taken, _ in strays:
                segment.give_up(taken)

    def _move(self, engine: CopyEngine, segment: DeviceSegment, managed: ManagedStorage) -> bool:
        storage = managed.kept_alive or managed.storage()
        if storage is None or not segment.fits([managed.size_bytes]):
            return False
        if managed.copy_pending:  # a copy to or from it, which begins where it lies then

            def moved() -> Any:
                return self._events.record(managed.owner_stream) if self._resize(managed, storage) else None

            copy = engine.waitable.get(managed)
            if copy is None or not self._copies.change(copy, moved):
                return False
        elif managed.state != RESIDENT or not self._resize(managed, storage):
            return False
        segment.put(managed, storage.data_ptr())
        return True

    def _resize(self, managed: ManagedStorage, storage: torch.UntypedStorage) -> bool:
        if not self._driver.resize(storage, managed.size_bytes, managed.owner_stream):
            self.on_out_of_memory(managed.size_bytes)
            return False
        self.moved_bytes += managed.size_bytes
        return True
