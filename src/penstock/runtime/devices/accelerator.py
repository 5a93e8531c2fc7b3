"""Any accelerator as the device: storages are emptied and filled again, by copies on streams of their own.

A storage that leaves is resized to 0 bytes, and gets its bytes back before a kernel uses it; its tensors
stay. Copies go through page-locked host memory, which is a tier too. To disk they go through staging buffers
in that memory, or where there is a direct path and it is faster, by that: see
penstock.runtime.devices.direct.

Rules that keep copies and kernels apart:

- what is copied out was made by kernels before events on the compute streams, which the copy stream waits
  for, and for the direct path the host;
- what is copied in lands in memory taken on the compute stream that the tensor's memory came from, and
  waits for an event recorded then: until it the allocator's former owner may still be using the memory;
- storages are emptied, and handed to kernels, only after the host has seen the copy complete, or once all
  streams of kernels wait for it (`make_kernels_wait`). Where kernels ran on several streams, the stream that
  owns the memory waits for the others first; of what was made before the run it is not known, and the
  allocator waits for all of them;
- a block of host memory is used for something else only after the host has seen the copies to and from it
  complete;
- what leaves compressed is packed on a stream of its own, into memory of that stream, and emptied when the
  host has seen that complete; it is expanded on the same stream, into memory taken as for a copy.

Streams and events are made once and kept; beyond these `record_stream` is called only for tensors that
the program has called it for: each makes the pools of the allocator grow.

The budget is of reserved bytes. A tensor that was allocated before the run counts from its first use on, and
in reports from the next step on. The allocator is limited to the budget, so that fragments count too: where
the tensors would fit and the allocator still finds no room, more are evicted, and from the next step on large
tensors share one segment, and move within it (penstock.runtime.devices.room, and .compaction).
"""

from __future__ import annotations

import contextlib
import logging
import queue
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock._native import DEMAND, DeviceMemory
from penstock.core.trace import Trace
from penstock.errors import InvalidArgument, PenstockError
from penstock.runtime.devices import Copy, Device
from penstock.runtime.devices.compaction import Compaction
from penstock.runtime.devices.copies import AcceleratorSlot, CopyQueues, Events, as_bytes
from penstock.runtime.devices.driver import Driver
from penstock.runtime.devices.meters import AllocatorMeter
from penstock.runtime.devices.packing import DevicePacking
from penstock.runtime.devices.reserved import ReservedMemory, least_budget, plannable
from penstock.runtime.devices.room import AllocatorRoom
from penstock.runtime.storage_methods import held_bytes
from penstock.runtime.storages import AWAY, COMING, DROPPED, RESIDENT, ManagedStorage
from penstock.storage.spill import SpillSpace
from penstock.units import format_bytes

logger = logging.getLogger("penstock")

CHUNK_BYTES = 8 << 20  # staged at once: large enough for full speed on bus and disk
CHUNKS = 4  # of staging, for each direction

# Where something moves, the host is at most so far ahead of the device.
LEAD_S = 1e-3
MARKS = 4  # within that time

# Asking the allocator costs as much as a kernel's launch, so it is asked once in so many times.
ASKED_EVERY = 64

CLOSE_TIMEOUT_S = 5.0

AWAY_TEXT = (
    "this tensor's bytes are away, below the device: they come back when an operator of the thread that "
    "called penstock.offload uses it. Do not take its address from C++, nor use it from other threads."
)


class AcceleratorDevice(Device):
    """One accelerator up to a budget, host memory and the disk below it; see penstock.runtime.devices.Device.

    host_bytes            page-locked host memory, staging included
    chunk_bytes, chunks   of staging, for each direction

    host_tier_bytes       what of host_bytes is left as a tier
    paths                 between the device and the disk
    streams               that kernels ran on
    """

    evict_links: tuple[str, ...] = ("device_to_host",)
    prefetch_links: tuple[str, ...] = ("host_to_device",)
    first_serial = 0
    room: AllocatorRoom
    meter: AllocatorMeter

    def __init__(
        self,
        spill: SpillSpace,
        driver: Driver,
        budget_bytes: int,
        host_bytes: int,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        chunks: int = CHUNKS,
    ) -> None:
        self._reserved = ReservedMemory(driver, budget_bytes)
        staging_bytes = 2 * chunk_bytes * chunks
        if host_bytes < staging_bytes:
            raise InvalidArgument(
                f"host_budget is {format_bytes(host_bytes)}: transfers between an accelerator and disk need "
                f"{format_bytes(staging_bytes)} of host memory for staging. Give that, or more."
            )
        self._driver = driver
        self.memory_manager = driver.memory_manager
        self.memory = DeviceMemory()
        self.host_tier_bytes = host_bytes - staging_bytes
        self.tiers: tuple[str, ...] = ("host", "disk") if self.host_tier_bytes else ("disk",)
        self.place_text = f"the disk of {spill.place_text}"
        self.device = driver.device
        self.current_stream: Callable[[], Any] | None = driver.current_stream
        self._events = Events(driver)
        self._copies = CopyQueues(driver, self._events, spill, host_bytes, chunk_bytes, chunks)
        self.streams = self._copies.streams
        self.paths = self._copies.paths
        self._packing = DevicePacking(self, driver, self._events)
        self._compaction = Compaction(driver, self._events, self._copies, self.memory)
        self.room = AllocatorRoom(self, driver, self._reserved, self._compaction)
        self.meter = AllocatorMeter(driver, self._reserved)
        self._marks: deque[tuple[float, Any]] = deque()  # events on the way: after so much of _elapsed_s
        self._begins_s = self._elapsed_s = 0.0  # of the last kernel: in its step, and in all
        self._recorded: dict[int, list[Any]] = {}  # by key: streams that the program uses it on
        self._found: set[int] = set()  # keys of those whose memory is of some stream, nobody knows which
        self._reserved.set_limit()

    # -- which storages ------------------------------------------------------------------------

    def adopt(self, managed: ManagedStorage, storage: torch.UntypedStorage, made: bool) -> bool:
        if not self.has(storage) or not managed.size_bytes or not storage.resizable():
            return False
        managed.owner_stream = self._driver.current_stream()
        self._compaction.put(managed, storage)
        if not made:
            self._found.add(managed.key)
            managed.reports_freed = True
            self._reserved.take_over(managed.size_bytes)
            self.memory.recount_in = 0
        self.memory.managed_bytes += managed.size_bytes
        return True

    def on_storage_freed(self, managed: ManagedStorage) -> None:
        if not managed.movable:
            return
        self._recorded.pop(managed.key, None)
        self._found.discard(managed.key)
        if managed.state not in (AWAY, DROPPED):
            self.memory.managed_bytes -= managed.size_bytes
        self._packing.drop(managed)
        self._free_copy(managed)

    def has(self, storage: torch.UntypedStorage) -> bool:
        return storage.device == self._driver.device

    def record_stream(self, managed: ManagedStorage, stream: Any) -> None:
        managed.reports_freed = managed.fixed_in_segment = True
        recorded = self._recorded.setdefault(managed.key, [])
        if stream not in recorded:
            recorded.append(stream)

    def resize(self, storage: torch.UntypedStorage, size_bytes: int) -> bool:
        self.begin_kernel()
        return self._driver.resize(storage, size_bytes, self._driver.current_stream())

    def _free_copy(self, managed: ManagedStorage) -> None:
        managed.clean = False
        if managed.slot is not None:
            self.free_slot(managed, managed.slot)
            managed.slot = None

    # -- memory --------------------------------------------------------------------------------

    def in_memory_bytes(self) -> int:
        memory = self.memory
        if memory.recount_in <= 0:
            memory.recount_in = ASKED_EVERY
            allocated_bytes = self._driver.allocated_bytes() - self._reserved.foreign_bytes
            memory.unmanaged_bytes = max(allocated_bytes - memory.managed_bytes, 0)
        memory.recount_in -= 1
        return memory.in_use_bytes()

    def prepare_copy_in(
        self, managed: ManagedStorage, storage: torch.UntypedStorage, packed: bool = False, waits: bool = True
    ) -> bool:
        if packed:
            slot: AcceleratorSlot = managed.slot
            content = self._driver.allocate(slot.packed_bytes, managed.owner_stream)
            if content is None:
                self.room.on_out_of_memory(slot.packed_bytes)
                return False
            self._packing.add(managed, content, slot.codec)
            return True
        if not self.room.has_hole(managed.size_bytes, waits):
            return False
        self._driver.set_access_error(storage, None)
        if not self._driver.resize(storage, managed.size_bytes, managed.owner_stream):
            self._driver.set_access_error(storage, AWAY_TEXT)
            self.room.on_out_of_memory(managed.size_bytes)
            return False
        self._compaction.put(managed, storage)
        for stream in self._recorded.get(managed.key, ()):  # the allocator knows it of other memory
            self._driver.record_stream(storage, stream)
        self.memory.managed_bytes += managed.size_bytes
        return True

    def release(self, managed: ManagedStorage, storage: torch.UntypedStorage) -> bool:
        if managed.state == AWAY:
            self._packing.drop(managed)
            return True
        found = managed.key in self._found
        self._found.discard(managed.key)
        for stream in self.streams:
            if found:
                self._driver.record_stream(storage, stream)
            elif stream != managed.owner_stream:  # it may still use what the owner hands out again
                self._events.order(stream, managed.owner_stream)
        self._empty(managed, storage)
        return True

    def cancel_copy_in(self, managed: ManagedStorage, storage: torch.UntypedStorage) -> None:
        if held_bytes(storage):
            self._empty(managed, storage)
        else:
            self._packing.drop(managed)

    def _empty(self, managed: ManagedStorage, storage: torch.UntypedStorage) -> None:
        self._driver.resize(storage, 0, managed.owner_stream)
        if self.memory.segment is not None:  # not before: a kernel that is being launched asks the allocator
            self.memory.segment.take(managed)
        self._driver.set_access_error(storage, AWAY_TEXT)
        self.memory.managed_bytes -= managed.size_bytes
        self.meter.emptied_bytes += managed.size_bytes

    def finish_copy_in(self, managed: ManagedStorage, storage: torch.UntypedStorage) -> bool:
        if not held_bytes(storage):  # it stays packed
            return True
        was_packed = managed.key in self._packing.packed
        if not managed.writing_packed:
            self._packing.drop(managed)
        return managed.clean or not was_packed

    def drop(self, managed: ManagedStorage, storage: torch.UntypedStorage) -> bool:
        return self.release(managed, storage)

    def fill(
        self, managed: ManagedStorage, storage: torch.UntypedStorage, made: torch.UntypedStorage
    ) -> bool:
        segment = self.memory.segment
        if segment is not None:  # nothing else knows of it
            segment.hold(made.data_ptr(), made.nbytes())
        try:
            if not self.prepare_write(managed, storage):
                return False
        finally:
            if segment is not None:
                segment.give_up(made.data_ptr())
        as_bytes(storage).copy_(as_bytes(made))
        return True

    def prepare_write(self, managed: ManagedStorage, storage: torch.UntypedStorage) -> bool:
        if not self.prepare_copy_in(managed, storage):
            return False
        current = self._driver.current_stream()
        if managed.owner_stream != current:  # the memory may still be in use there
            self._events.order(managed.owner_stream, current)
        return True

    def will_use(self, storages: Sequence[ManagedStorage]) -> None:
        self.memory.recount_in = 0  # what a kernel makes that runs again is not known yet

    def report_unasked_moves(self) -> None:
        self.memory.recount_in = 0  # what others had may be free again

    def plannable(self, trace: Trace, budget_bytes: int) -> tuple[Trace, int]:
        return plannable(trace, budget_bytes, self._reserved.small_bytes)

    def least_budget(self, trace: Trace) -> int:
        return least_budget(trace, self._reserved.small_bytes)

    # -- copies --------------------------------------------------------------------------------

    def reserve(self, managed: ManagedStorage, tier: str) -> AcceleratorSlot:
        return self._copies.reserve(managed.size_bytes, tier)

    def free_slot(self, managed: ManagedStorage, slot: AcceleratorSlot) -> None:
        self._copies.free_slot(slot)

    def copy_out(self, copy: Copy) -> None:
        slot: AcceleratorSlot = copy.managed.slot
        if copy.managed.writing_packed:  # the host has seen the packing complete
            packed = self._packing.packed[copy.managed.key]
            copy.storage, copy.size_bytes = packed.content, packed.content.nbytes()
            copy.ready, copy.on_end = [], self._on_packed_written
            slot.codec, slot.packed_bytes = packed.codec, copy.size_bytes
            self._copies.begin(copy)
        else:
            # On any thread: what it waits for is what the program has launched, not this thread.
            copy.ready = [self._events.record(stream) for stream in self.streams]
            slot.codec, slot.packed_bytes = ("raw", 0), 0
            self._copies.begin(copy, kernels_may_wait=True)

    def _on_packed_written(self, copy: Copy) -> None:
        managed = copy.managed
        with self.engine.lock:
            self.engine.on_copy_end(copy)
            if managed.state != COMING and not managed.packed_bytes:
                self._packing.drop(managed)

    def copy_in(self, copy: Copy) -> None:
        managed, storage = copy.managed, copy.storage
        assert storage is not None
        copy.ready = [self._events.record(managed.owner_stream)]
        packed = self._packing.packed.get(managed.key)
        if packed is None:
            self._copies.begin(copy, kernels_may_wait=True)
        elif held_bytes(storage):
            self._packing.expand(copy)
        else:
            copy.storage, copy.size_bytes = packed.content, packed.content.nbytes()
            self._copies.begin(copy)

    def make_kernels_wait(self, copy: Copy) -> bool:
        return self._copies.make_kernels_wait(copy)

    def raise_priority(self, managed: ManagedStorage) -> None:
        self._copies.raise_priority(managed)
        self._packing.raise_priority(managed)

    def pack(self, copy: Copy) -> None:
        copy.ready = [self._events.record(stream) for stream in self.streams]
        self._packing.pack(copy)

    # -- kernels -------------------------------------------------------------------------------

    def limit_lead(self, begins_s: float) -> None:
        """Far ahead of the device the host sees no copy end. Then what leaves is in the way of what is made,
        and kernels wait for the copies whose memory only another copy needs."""
        passed_s = begins_s - self._begins_s
        self._begins_s = begins_s
        self._elapsed_s += passed_s if passed_s >= 0 else begins_s  # of the next step
        if self._marks and self._elapsed_s < self._marks[-1][0] + LEAD_S / MARKS:
            return
        self._marks.append((self._elapsed_s, self._events.record(self._driver.current_stream())))
        reached = []
        while self._marks[0][0] <= self._elapsed_s - LEAD_S:
            reached.append(self._marks.popleft()[1])
        if reached:
            if self._copies.has_backlog:
                self._copies.wait_on_threads()
            with self.engine.unlocked():
                reached[-1].synchronize()
            self._events.free.extend(reached)

    def poll(self, waits: bool = False) -> None:
        if self._copies.poll():
            self.storages.remove_dead()  # a copy that is over may have been the last to hold one
        elif waits:
            self._copies.wait_on_threads()

    def begin_kernel(self) -> None:
        stream = self._driver.current_stream()
        if stream not in self.streams:
            self.room.on_new_stream()
            self._copies.add_stream(stream)

    # -- steps ---------------------------------------------------------------------------------

    @property
    def packs(self) -> bool:
        """Anything was packed."""
        return self._packing.is_used

    def begin_step(self) -> None:
        self.room.begin_step()
        self.memory.recount_in = 0
        self.meter.begin_step()

    def profiler_range(self, text: str) -> contextlib.AbstractContextManager[None]:
        return self._driver.profiler_range(text)

    def synchronize(self) -> None:
        for stream in self.streams:
            stream.synchronize()

    # -- the end -------------------------------------------------------------------------------

    def bring_all_back(self, storages: list[ManagedStorage]) -> bool:
        """The budget is over: everything comes back that the device has memory for, in this order. Who uses
        what does not has the memory of the device as the budget."""
        self._reserved.end_budget()
        self._compaction.close()
        left_bytes, reason = 0, "the device has no memory for them"
        for managed in storages:
            if managed.state != AWAY:
                self._free_copy(managed)
                continue
            try:
                is_back = self.bring_back(managed)
            except PenstockError as error:
                is_back, reason = False, str(error)
            if not is_back:
                left_bytes += managed.size_bytes
        if left_bytes:
            self.engine.budget_bytes = self.memory.budget_bytes = self._reserved.budget_bytes
            logger.warning(
                "%s of tensors stay below the device, and come back when they are used: %s",
                format_bytes(left_bytes),
                reason,
            )
        return not left_bytes

    def bring_back(self, managed: ManagedStorage) -> bool:
        storage = managed.storage()
        if storage is None:
            return True
        over: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        is_compressed = managed.key not in self._packing.packed and managed.slot.packed_bytes > 0
        try:
            for packed in (True, False) if is_compressed else (False,):  # it is fetched, and then expanded
                if not self.prepare_copy_in(managed, storage, packed):
                    return False
                self.copy_in(Copy(managed, storage, False, DEMAND, over.put))
                if (error := over.get().error) is not None:
                    self.cancel_copy_in(managed, storage)
                    raise error
            self.engine.came_back_unasked(managed, clean=False)
            self._free_copy(managed)
        finally:
            if is_compressed or managed.state == RESIDENT:
                self._packing.drop(managed)
        return True

    def close(self) -> None:
        self._packing.close(CLOSE_TIMEOUT_S)
        self._compaction.close()
        self._reserved.end_budget()
        self._copies.close(CLOSE_TIMEOUT_S)
