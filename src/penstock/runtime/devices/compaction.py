"""One segment of the allocator for all large tensors, and memory in one piece where only pieces are free.

torch's caching allocator never moves what it gave. Where tensors leave and come back all the time, free memory is
soon in pieces, and a tensor that would fit is refused. So the large tensors of a run are put into one segment of
the allocator's, which is followed block by block (csrc/runtime/device_segment.hpp). Before something is made or comes
back that no free block is large enough for, what lies in the cheapest place for it goes elsewhere: by a copy
within the device, on the stream that owns the memory and without the host; where it fits nowhere, to the tier
below.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from penstock._native import DeviceMemory, DeviceSegment
from penstock.runtime.copy_engine import CopyEngine
from penstock.runtime.storages import RESIDENT, ManagedStorage
from penstock.units import format_bytes

logger = logging.getLogger("penstock")

# Below, blocks are in the allocator's segments for small ones.
LARGEST_SMALL_BYTES = 1 << 20

# The segment is as large as the limit allows, less a little for segments of small blocks that come later.
SPARE_BYTES = 4 << 20

# Places that are cleared for one request at most.
ATTEMPTS = 4


class Driver(Protocol):
    """Of penstock.runtime.devices.accelerator.Driver, what is used here."""

    def allocate(self, size_bytes: int, stream: Any) -> torch.UntypedStorage | None: ...

    def resize(self, storage: torch.UntypedStorage, size_bytes: int, stream: Any) -> bool: ...


class Compaction:
    """Frees memory in one piece. With the engine's lock held, on the thread of the kernels.

    memory    its segment is the one that is followed
    refused   requests that the allocator refused since the segment was opened, or the run began
    moved_bytes   within the device, in all
    """

    def __init__(self, driver: Driver, memory: DeviceMemory) -> None:
        self._driver = driver
        self._memory = memory
        self._segment: DeviceSegment | None = None
        self._stream: Any = None
        self._reserve_bytes = 0
        self._clearing = False
        self.refused = 0
        self.moved_bytes = 0

    @property
    def is_open(self) -> bool:
        return self._segment is not None

    def open(self, size_bytes: int, stream: Any) -> bool:
        """Have the allocator reserve a segment of about so many bytes, in which large tensors go from now on.
        What it keeps for later was given back. False: there is not so much memory."""
        self.close()
        self._stream = stream
        for less_bytes in (0, 32 << 20, 128 << 20):
            content = self._driver.allocate(size_bytes - less_bytes, stream)
            if content is not None:
                self._reserve_bytes = size_bytes // 50
                self._segment = DeviceSegment(content.data_ptr(), size_bytes - less_bytes)
                self._memory.segment = self._segment
                self.refused = 0
                logger.debug("large tensors are in one segment of %s", format_bytes(size_bytes - less_bytes))
                return True
        return False

    def close(self) -> None:
        self._memory.segment = self._segment = None

    def make_holes(self, engine: CopyEngine, sizes: Sequence[int], *, may_leave: bool) -> bool:
        """Have free blocks for pieces of these sizes together, the largest first. False: there are none.

        may_leave   what no plan lets leave may, where nothing else helps
        """
        segment = self._segment
        if segment is None:
            return True
        if self._clearing:  # a copy back that begins meanwhile must not take the place
            return False
        import collections
        self.why = getattr(self, 'why', collections.Counter())
        # What comes early leaves room for what kernels make, and for what has to go elsewhere.
        least_bytes = sum(sizes) + (0 if may_leave else self._reserve_bytes // 4)
        attempts = 0
        while attempts < ATTEMPTS:
            if segment.free_bytes >= least_bytes and segment.fits(sizes):
                return True
            # What leaves is gone by now, as far as the plan goes: less than that much is in its way.
            if segment.free_bytes < sum(sizes) + self._reserve_bytes and engine.join_one_that_leaves():
                continue
            if segment.free_bytes < least_bytes:
                return False
            attempts += 1
            wanted = (sum(sizes), *(size_bytes for size_bytes in sizes if not segment.fits([size_bytes])))
            if any(self._clear(engine, segment, size_bytes, False) for size_bytes in wanted):
                continue
            if engine.join_one_that_leaves():
                attempts -= 1
                continue
            if not may_leave or not any(self._clear(engine, segment, size_bytes, True) for size_bytes in wanted):
                return False
        return segment.fits(sizes)

    def _clear(self, engine: CopyEngine, segment: DeviceSegment, size_bytes: int, may_leave: bool) -> bool:
        """Empty the place for one free block of so many bytes, or a part of it."""
        obstacles = segment.obstacles(size_bytes, may_leave)
        if obstacles is None:
            self.why['none', may_leave] += 1
            return False
        move, leave, free = obstacles
        held: list[tuple[int, torch.UntypedStorage]] = []  # where nothing else must go meanwhile
        self._clearing = True
        try:
            if leave:  # what is free then is looked at again
                self.n = getattr(self, 'n', 0) + 1
                if self.n % 150 == 0:
                    c = collections.Counter()
                    for m in engine.victims():
                        if m.lies_at: c[m.state, m.pins > 0, m.hold is not None, m.freeing_bytes > 0, m.clean] += m.size_bytes / 2**20
                    print('LEAVE asked', size_bytes/2**20, 'may', may_leave, 'free', segment.free_bytes/2**20, segment.largest_free_bytes/2**20, 'leave', [(m.size_bytes/2**20, m.state, m.clean, m.freeing_bytes>0) for m in leave], 'move', [m.size_bytes/2**20 for m in move], 'freeblocks', [round(x[1]/2**20,1) for x in free], {k: round(v) for k, v in c.items()}, 'pf', len(engine.prefetches), 'tails', 'alloc', self._driver.memory().allocated_bytes/2**20, 'known', self._memory.known_bytes/2**20, 'inuse', engine._device.in_memory_bytes()/2**20, 'budget', engine.budget_bytes/2**20, flush=True)
                ok = all(engine.leave_now(managed, waits=may_leave) for managed in leave)
                self.why['leave', ok, may_leave] += 1
                return ok
            for address, _ in free:
                if not self._hold(segment, held, address):
                    self.why['hold', may_leave] += 1
                    return False
            for managed in move:
                address = managed.lies_at
                if not self._move(segment, managed):
                    self.why['move', may_leave] += 1
                    return False
                if not self._hold(segment, held, address):
                    self.why['hold2', may_leave] += 1
                    return False
            self.why['ok', may_leave] += 1
            return True
        finally:
            for address, _ in held:
                segment.give_up(address)
            held.clear()
            self._clearing = False

    def _hold(
        self, segment: DeviceSegment, held: list[tuple[int, torch.UntypedStorage]], address: int
    ) -> bool:
        """Take the free block at the address. Where others are as large, the allocator gives the first."""
        strays = []
        try:
            while (free_bytes := segment.free_at(address)) > 0:
                content = self._driver.allocate(free_bytes, self._stream)
                if content is None:
                    self.refused += 1
                    return False
                taken = content.data_ptr()
                segment.hold(taken, free_bytes)
                (held if taken == address else strays).append((taken, content))
            return True
        finally:
            for taken, _ in strays:
                segment.give_up(taken)

    def _move(self, segment: DeviceSegment, managed: ManagedStorage) -> bool:
        storage = managed.storage()
        if storage is None or managed.state != RESIDENT or not segment.fits([managed.size_bytes]):
            return False
        if not self._driver.resize(storage, managed.size_bytes, managed.place):
            self.refused += 1
            return False
        self.moved_bytes += managed.size_bytes
        segment.put(managed, storage.data_ptr())
        return True
