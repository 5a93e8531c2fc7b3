"""Any accelerator as the device: storages are emptied and filled again, by copies on streams of their own.

A storage that leaves is resized to 0 bytes, and gets its bytes back before a kernel uses it; its tensors
stay. Copies go through page-locked host memory, which is a tier too. To disk they go through staging buffers
in that memory, or where there is a direct path and it is faster, by that: see
penstock.runtime.devices.direct. One file: its rules are about what follows what.

Rules that keep copies and kernels apart:

- what is copied out was made by kernels before events on the compute streams, which the copy stream waits
  for, and for the direct path the host;
- what is copied in lands in memory taken on the compute stream that the tensor's memory came from, and
  waits for an event recorded then: until it the allocator's former owner may still be using the memory;
- storages are emptied, and handed to kernels, only after the host has seen the copy complete, or once all
  streams of kernels wait for it (`join`). Where kernels ran on several streams, the stream that owns the
  memory waits for the others first; of what was made before the run it is not known, and the allocator waits
  for all of them;
- a block of host memory is used for something else only after the host has seen the copies to and from it
  complete;
- what leaves compressed is packed on a stream of its own, into memory of that stream, and emptied when the
  host has seen that complete; it is expanded on the same stream, into memory taken as for a copy.

Streams and events are made once and kept; beyond these `record_stream` is called only for tensors that
the program has called it for: each makes the pools of the allocator grow.

The budget is of reserved bytes. A tensor that was allocated before the run counts from its first use on, and
in reports from the next step on. The allocator is limited to the budget, so that fragments count too: where
the tensors would fit and the allocator still finds no room, more are evicted, and from the next step on large
tensors share one segment, and move within it (penstock.runtime.devices.compaction).
"""

from __future__ import annotations

import contextlib
import logging
import queue
import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock._native import DeviceMemory
from penstock.core.trace import Trace
from penstock.errors import BudgetTooSmall, InvalidArgument, PenstockError, SpillError
from penstock.runtime.copy_engine import ANY_BYTES, CopyEngine
from penstock.runtime.devices import Done, Moved
from penstock.runtime.devices.compaction import Compaction
from penstock.runtime.devices.copies import Copies, Events, Slot, as_bytes
from penstock.runtime.devices.driver import Driver
from penstock.runtime.devices.packing import Packing
from penstock.runtime.devices.reserved import (
    LARGE_SEGMENT_BYTES,
    SMALL_SEGMENT_BYTES,
    ReservedMemory,
    plannable,
)
from penstock.runtime.kernel_times import Timed
from penstock.runtime.schedule import LARGEST_SMALL_BYTES
from penstock.runtime.storage_methods import held_bytes
from penstock.runtime.storages import AWAY, DROPPED, RESIDENT, ManagedStorage, Storages
from penstock.storage.aligned import AlignedBuffer
from penstock.storage.spill import SpillSpace
from penstock.units import format_bytes, format_bytes_up, parse_bytes

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


class AcceleratorDevice:
    """One accelerator up to a budget, host memory and the disk below it; see penstock.runtime.devices.Device.

    host_bytes            page-locked host memory, staging included
    chunk_bytes, chunks   of staging, for each direction

    host_tier_bytes       what of host_bytes is left as a tier
    paths                 between the device and the disk
    """

    evict_links: tuple[str, ...] = ("device_to_host",)
    prefetch_links: tuple[str, ...] = ("host_to_device",)
    copies_results = True
    in_flight_bytes = ANY_BYTES  # streams order them
    admits_anywhere = False  # memory must come from the stream of the kernels
    expands_in_place = False
    empties_storages = True
    keeps_budget = False
    infers_needs = True
    unplanned_accesses = 0  # they raise
    first_serial = 0
    storages: Storages | None = None

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
        self.engine: CopyEngine | None = None
        self.memory = DeviceMemory()
        self.host_tier_bytes = host_bytes - staging_bytes
        self.tiers: tuple[str, ...] = ("host", "disk") if self.host_tier_bytes else ("disk",)
        self.place_text = f"the disk of {spill.place_text}"
        self.device = driver.device
        self.current_stream: Callable[[], Any] | None = driver.current_stream
        self._events = Events(driver)
        self._copies = Copies(driver, self._events, spill, host_bytes, chunk_bytes, chunks)
        self._streams = self._copies.streams
        self.paths = self._copies.paths
        self._packing = Packing(self, driver, self._events)
        self._compaction = Compaction(driver, self._events, self._copies, self.memory)
        self._next_opening = 0  # the step from which on the segment may be opened
        # In this step: for which kernels, by what they use and ask for.
        self._opened_for: set[tuple[int, ...]] = set()
        self._rearranged_for: set[tuple[int, ...]] = set()
        self._undivided = False  # the allocator's settings let no segment be opened, which is logged
        self._steps = 0
        self._marks: deque[tuple[float, Any]] = deque()  # events on the way: after so much of _elapsed_s
        self._begins_s = self._elapsed_s = 0.0  # of the last kernel: in its step, and in all
        self._recorded: dict[int, list[Any]] = {}  # by key: streams that the program uses it on
        self._found: set[int] = set()  # keys of those whose memory is of some stream, nobody knows which
        self._before_bytes = self._emptied_bytes = 0  # when the kernel that is measured began, and since
        self._begun: Any = None  # of the kernel that is measured: an event
        self._ended: Any = None  # of the one before
        self._was_idle = True
        self._step_begun = self._timed_event()
        self._reserved.set_limit()

    # -- which storages ------------------------------------------------------------------------

    def adopt(self, managed: ManagedStorage, storage: torch.UntypedStorage, made: bool) -> bool:
        if not self.has(storage) or not managed.size_bytes or not storage.resizable():
            return False
        managed.place = self._driver.current_stream()
        self._compaction.put(managed, storage)
        if not made:
            self._found.add(managed.key)
            managed.reports_freed = True
            self._reserved.take_over(managed.size_bytes)
            self.memory.asks_in = 0
        self.memory.known_bytes += managed.size_bytes
        return True

    def _come_below_the_limit(self) -> int:
        """Evict tensors of before the run that count now. Returns the bytes that stay reserved above the
        budget: a small tensor keeps a whole segment."""
        engine = self.engine
        assert engine is not None
        with engine.lock:
            engine.make_room(0, expected=True)
            engine.end_kernel()
            self._driver.empty_cache()
            while (over_bytes := self._reserved.over_bytes) > 0 and engine.free(over_bytes):
                self._driver.empty_cache()
        if over_bytes > 0:
            logger.warning(
                "%s stay reserved beside device_budget, since tensors that cannot leave were on the device "
                "before the run: build the model inside it, or lower smallest_bytes",
                format_bytes(over_bytes),
            )
        return over_bytes

    def on_storage_freed(self, managed: ManagedStorage) -> None:
        if not managed.movable:
            return
        self._recorded.pop(managed.key, None)
        self._found.discard(managed.key)
        if managed.state not in (AWAY, DROPPED):
            self.memory.known_bytes -= managed.size_bytes
        self._packing.drop(managed)
        self._free_copy(managed)

    def has(self, storage: torch.UntypedStorage) -> bool:
        return storage.device == self._driver.device

    def record_stream(self, managed: ManagedStorage, stream: Any) -> None:
        managed.reports_freed = managed.stays = True
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
        if memory.asks_in <= 0:
            memory.asks_in = ASKED_EVERY
            allocated_bytes = self._driver.allocated_bytes() - self._reserved.foreign_bytes
            memory.beside_bytes = max(allocated_bytes - memory.known_bytes, 0)
        memory.asks_in -= 1
        return memory.in_use_bytes()

    def prepare(
        self, managed: ManagedStorage, storage: torch.UntypedStorage, packed: bool = False, waits: bool = True
    ) -> bool:
        if packed:
            slot: Slot = managed.slot
            content = self._driver.allocate(slot.packed_bytes, managed.place)
            if content is None:
                self._on_out_of_memory(slot.packed_bytes)
                return False
            self._packing.add(managed, content, slot.codec)
            return True
        if not self._has_hole(managed.size_bytes, waits):
            return False
        self._driver.set_access_error(storage, None)
        if not self._driver.resize(storage, managed.size_bytes, managed.place):
            self._driver.set_access_error(storage, AWAY_TEXT)
            self._on_out_of_memory(managed.size_bytes)
            return False
        self._compaction.put(managed, storage)
        for stream in self._recorded.get(managed.key, ()):  # the allocator knows it of other memory
            self._driver.record_stream(storage, stream)
        self.memory.known_bytes += managed.size_bytes
        return True

    def release(self, managed: ManagedStorage, storage: torch.UntypedStorage) -> bool:
        found = managed.key in self._found
        self._found.discard(managed.key)
        for stream in self._streams:
            if found:
                self._driver.record_stream(storage, stream)
            elif stream != managed.place:  # it may still be using the memory, which its owner hands out again
                self._events.order(stream, managed.place)
        self._empty(managed, storage)
        return True

    def give_up(self, managed: ManagedStorage, storage: torch.UntypedStorage) -> None:
        if held_bytes(storage):
            self._empty(managed, storage)
        else:
            self.drop_packed(managed)

    def _empty(self, managed: ManagedStorage, storage: torch.UntypedStorage) -> None:
        self._driver.resize(storage, 0, managed.place)
        if self.memory.segment is not None:  # not before: a kernel that is being launched asks the allocator
            self.memory.segment.take(managed)
        self._driver.set_access_error(storage, AWAY_TEXT)
        self.memory.known_bytes -= managed.size_bytes
        self._emptied_bytes += managed.size_bytes

    def arrive(self, managed: ManagedStorage, storage: torch.UntypedStorage) -> bool:
        if not held_bytes(storage):  # it stays packed
            return True
        was_packed = managed.key in self._packing.packed
        if not managed.writing:
            self.drop_packed(managed)
        return managed.clean or not was_packed

    def will_write(self, managed: ManagedStorage) -> None:
        pass  # the engine takes no copy of what was written meanwhile

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
        if not self.prepare(managed, storage):
            return False
        current = self._driver.current_stream()
        if managed.place != current:  # the memory may still be in use there
            self._events.order(managed.place, current)
        return True

    def watch_writes(self, managed: ManagedStorage, storage: torch.UntypedStorage, change: int) -> None:
        pass  # writes that no kernel makes are none

    def use(self, storages: Sequence[ManagedStorage]) -> None:
        self.memory.asks_in = 0  # what a kernel makes that runs again is not known yet

    def notice(self) -> None:
        self.memory.asks_in = 0  # what others had may be free again

    def hold(self, managed: ManagedStorage, change: int, writable: bool = False) -> None:
        pass  # nothing leaves but by the engine, which asks for pins

    def is_gone(self, managed: ManagedStorage) -> bool:
        return False

    def make_room(self, size_bytes: int) -> bool:
        """Nothing more can leave, and the allocator still refuses: memory is in pieces. Have it in one by
        whatever moves what the kernel uses. False: that has been tried for this kernel."""
        assert self.engine is not None and self.storages is not None
        used = [one for one in self.storages.all() if one.in_kernel and one.state == RESIDENT]
        for managed in used:
            managed.pins -= 1
        try:
            if not self._arrange(used, size_bytes):
                return False
        finally:
            for managed in used:
                managed.pins += 1
        self.engine.demand(used)
        return True

    def _arrange(self, used: Sequence[ManagedStorage], size_bytes: int) -> bool:
        """Each way once a kernel in a step, but the last, which ends what it can end. For small tensors, of
        which the one segment has none, that is all that helps: it takes what they need."""
        is_large = size_bytes > LARGEST_SMALL_BYTES
        kernel = (size_bytes, *(managed.key for managed in used))
        if is_large and self._compaction.is_open and kernel not in self._rearranged_for:
            self._rearranged_for.add(kernel)
            if self._rearrange(used, size_bytes):
                return True
        if is_large and self._has_one_stream and kernel not in self._opened_for:
            self._opened_for.add(kernel)
            self._have_one_segment()
            return True
        if self._compaction.is_open:
            self._empty_segments()
            return True
        return False

    def _rearrange(self, used: Sequence[ManagedStorage], size_bytes: int) -> bool:
        """Have the largest that a kernel uses leave, which hardly ever moves, and holes for it and for what
        the kernel asks for."""
        assert self.engine is not None
        largest = max(used, key=lambda managed: managed.size_bytes, default=None)
        if largest is None or not self.engine.leave_now(largest):
            return False
        sizes = sorted((size_bytes, largest.size_bytes), reverse=True)
        return self._compaction.make_holes(self.engine, sizes, may_leave=True)

    def make_holes(self, sizes: Sequence[int]) -> None:
        assert self.engine is not None
        self._compaction.make_holes(self.engine, sizes, may_leave=True)

    def _has_hole(self, size_bytes: int, waits: bool) -> bool:
        """Whether it is worth asking the allocator: before it refuses, it waits for the device."""
        if not self._compaction.is_open or size_bytes <= LARGEST_SMALL_BYTES:
            return True
        assert self.engine is not None
        return self._compaction.make_holes(self.engine, (size_bytes,), may_leave=waits) or waits

    def _on_out_of_memory(self, size_bytes: int) -> None:
        self.memory.asks_in = 0
        self._compaction.on_out_of_memory(size_bytes)

    @property
    def _has_one_stream(self) -> bool:
        """Another one gets no memory of the one segment."""
        return len(self._streams) == 1 and not self._packing.is_used

    def _have_one_segment(self) -> None:
        """The allocator had memory in too many pieces: have it all in one, where it is one stream's."""
        self._reserved.measure()
        self._empty_segments()
        size_bytes = self._reserved.largest_new_segment_bytes()
        if (setting := self._driver.undivided(size_bytes)) is not None:
            if not self._undivided:
                self._undivided = True
                logger.warning(
                    "the allocator's memory stays in pieces, as %s keeps large tensors from sharing one "
                    "segment: more is evicted than need be. Take it out of PYTORCH_ALLOC_CONF or "
                    "PYTORCH_CUDA_ALLOC_CONF",
                    setting,
                )
            return
        if size_bytes < self._reserved.budget_bytes // 2 or not self._compaction.open(
            size_bytes, self._streams[0]
        ):
            logger.warning(
                "the allocator's memory stays in pieces: tensors that cannot leave are in too many of its "
                "segments"
            )

    def _empty_segments(self) -> None:
        """Let leave what can, once, and give back what is free then: the one segment, too."""
        engine = self.engine
        assert engine is not None
        self._compaction.close()
        with engine.lock:
            try:
                for managed in engine.victims():
                    engine.leave_now(managed)
            except SpillError as error:
                logger.warning("not all can leave: %s", error)
            self._driver.empty_cache()

    def has_room(self, sizes: Sequence[int]) -> bool:
        stream = self._driver.current_stream()
        taken = []  # together: the allocator keeps them for who asks next
        for size_bytes in sizes:
            taken.append(self._driver.allocate(size_bytes, stream))
            if taken[-1] is None:
                self._on_out_of_memory(size_bytes)
                return False
        return True

    def plannable(self, trace: Trace, budget_bytes: int) -> tuple[Trace, int]:
        return plannable(trace, budget_bytes, self._reserved.small_bytes)

    def budget_for(self, size_bytes: int) -> int:
        return self._reserved.budget_for(size_bytes)

    # -- copies --------------------------------------------------------------------------------

    def reserve(self, managed: ManagedStorage, tier: str) -> Slot:
        return self._copies.reserve(managed.size_bytes, tier)

    def free_slot(self, managed: ManagedStorage, slot: Slot) -> None:
        self._copies.free_slot(slot)

    def copy_out(self, managed: ManagedStorage, storage: torch.UntypedStorage, done: Done) -> None:
        slot: Slot = managed.slot
        if managed.writing:  # the host has seen the packing complete
            packed = self._packing.packed[managed.key]
            slot.codec, slot.packed_bytes = packed.codec, packed.content.nbytes()

            def written(error: PenstockError | None, moved: Sequence[Moved]) -> None:
                assert self.engine is not None
                with self.engine.lock:
                    done(error, moved)
                    if managed.state == RESIDENT:  # it came back meanwhile, from what is packed
                        self._packing.drop(managed)

            self._copies.begin(True, managed, packed.content, [], written)
        else:
            # On any thread: what it waits for is what the program has launched, not this thread.
            ready = [self._events.record(stream) for stream in self._streams]
            slot.codec, slot.packed_bytes = ("raw", 0), 0
            self._copies.begin(True, managed, storage, ready, done, joins=True)

    def copy_in(
        self, managed: ManagedStorage, storage: torch.UntypedStorage, priority: int, done: Done
    ) -> None:
        ready = [self._events.record(managed.place)]
        packed = self._packing.packed.get(managed.key)
        if packed is None:
            self._copies.begin(False, managed, storage, ready, done, joins=True, priority=priority)
        elif held_bytes(storage):
            self._packing.expand(managed, storage, ready, priority, done)
        else:
            self._copies.begin(False, managed, packed.content, ready, done, priority=priority)

    def join(self, managed: ManagedStorage) -> bool:
        return self._copies.join(managed)

    def read_copy(
        self, managed: ManagedStorage, buffer: AlignedBuffer, done: Callable[[Exception | None], None]
    ) -> bool:
        return False

    def raise_priority(self, managed: ManagedStorage) -> None:
        self._copies.raise_priority(managed)
        self._packing.raise_priority(managed)

    def pack(
        self,
        managed: ManagedStorage,
        storage: torch.UntypedStorage,
        codec: str,
        itemsize: int,
        done: Callable[[int], None],
    ) -> None:
        ready = [self._events.record(stream) for stream in self._streams]
        self._packing.pack(managed, storage, codec, itemsize, ready, done)

    def drop_packed(self, managed: ManagedStorage) -> None:
        self._packing.drop(managed)

    def packed_written(self, managed: ManagedStorage, keeps: bool) -> bool:
        if not keeps:
            self._packing.drop(managed)
        return True

    def packed_bytes(self, managed: ManagedStorage) -> int:
        return managed.slot.packed_bytes if managed.slot is not None else 0

    # -- kernels -------------------------------------------------------------------------------

    def stay_near(self, begins_s: float) -> None:
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
            assert self.engine is not None
            if self._copies.has_backlog:
                self._copies.wait_on_threads()
            with self.engine.unlocked():
                reached[-1].synchronize()
            self._events.free.extend(reached)

    def poll(self, waits: bool = False) -> None:
        if self._copies.poll():
            assert self.storages is not None
            self.storages.remove_dead()  # a copy that is over may have been the last to hold one
        elif waits:
            self._copies.wait_on_threads()

    def begin_kernel(self) -> None:
        stream = self._driver.current_stream()
        if stream not in self._streams:
            if self._compaction.is_open:  # of that memory other streams get none
                self._empty_segments()
            self._copies.add_stream(stream)

    def end_kernel(self) -> None:
        pass

    def frees_enough(self, error: BaseException, needed_bytes: int) -> bool:
        if not self._driver.is_out_of_memory(error):
            return False
        engine = self.engine
        assert engine is not None
        asked_bytes = _asked_bytes(error, needed_bytes)
        self._on_out_of_memory(asked_bytes)
        segment = self.memory.segment
        if segment is not None and asked_bytes > 0:
            if asked_bytes <= LARGEST_SMALL_BYTES:
                return self.make_room(asked_bytes)
            fits = segment.fits([asked_bytes])
            if not fits and self._compaction.make_holes(engine, [asked_bytes], may_leave=True):
                return True
        freed = engine.free(max(needed_bytes, self._reserved.budget_bytes // 16))
        return freed or self.make_room(needed_bytes)

    def cannot_use(self, error: OSError) -> None:
        raise error  # it has no arena

    def kernel_failed(self, error: BaseException, needed_bytes: int) -> None:
        if not self._driver.is_out_of_memory(error):
            return
        asked_bytes = max(needed_bytes, _asked_bytes(error, needed_bytes), 1)
        in_use_bytes, fragments_bytes = self._reserved.in_use_and_free_bytes()
        least_bytes = max(self.budget_for(asked_bytes), self._reserved.budget_bytes + SMALL_SEGMENT_BYTES)
        raise BudgetTooSmall(
            f"the device has no memory left for a kernel: {format_bytes(in_use_bytes)} are in use by tensors "
            f"that cannot leave now, {format_bytes(fragments_bytes)} are fragments of the allocator, and the "
            f"device budget is {format_bytes(self._reserved.budget_bytes)}. Raise device_budget to "
            f"{format_bytes_up(least_bytes)} or more, lower the batch size, or set "
            "PYTORCH_ALLOC_CONF=expandable_segments:True, which leaves fewer fragments.",
            least_bytes,
        ) from error

    # -- measuring -----------------------------------------------------------------------------

    def begin_step(self) -> None:
        self._steps += 1
        self._opened_for.clear()
        self._rearranged_for.clear()
        if self._packing.is_used and self._compaction.is_open:  # on a stream of its own
            self._empty_segments()
        if self._compaction.refused and not self._compaction.is_open and self._steps >= self._next_opening:
            self._next_opening = 2 * self._steps
            if self._has_one_stream and not self._undivided:
                self._have_one_segment()
        if (over_bytes := self._reserved.over_bytes) > self._reserved.above_limit_bytes:
            over_bytes = self._come_below_the_limit()
        self._reserved.allow_above(over_bytes)
        self._reserved.begin_step()
        self.memory.asks_in = 0
        self._step_begun = self._timed_event()

    def end_step(self) -> Callable[[], float]:
        # Nothing of the runtime waits for this: whoever uses memory again waits for what used it before, on
        # the device. So the next step is launched while this one runs.
        begun, ended = self._step_begun, self._timed_event()

        def took_s() -> float:
            ended.synchronize()
            return float(begun.elapsed_time(ended)) / 1e3

        return took_s

    def marked(self, text: str) -> contextlib.AbstractContextManager[None]:
        return self._driver.marked(text)

    def begin_measuring(self) -> None:
        self._reserved.measure()
        self._driver.reset_peaks()
        self._before_bytes = self._driver.memory().allocated_bytes
        self._emptied_bytes = 0
        self._was_idle = self._ended is None or self._ended.query()
        self._begun = self._timed_event()

    def end_measuring(self) -> Timed:
        # What the allocator counts is the host's doing: no kernel need be over for it.
        reached = self._begun.query()
        self._ended = self._timed_event()
        return Timed(self._begun, self._ended, self._was_idle and reached, not self._was_idle and reached)

    def _timed_event(self) -> Any:
        event = self._driver.make_event(timed=True)
        event.record(self._driver.current_stream())
        return event

    def workspace_bytes(self) -> int:
        memory = self._driver.memory()
        after_bytes = memory.allocated_bytes + self._emptied_bytes  # what left meanwhile is no workspace
        return max(0, memory.peak_allocated_bytes - max(after_bytes, self._before_bytes))

    def synchronize(self) -> None:
        for stream in self._streams:
            stream.synchronize()

    def peak_bytes(self) -> int:
        return self._reserved.measure()

    # -- the end -------------------------------------------------------------------------------

    def bring_all_back(self, storages: list[ManagedStorage]) -> bool:
        """The budget is over: everything comes back that the device has memory for, in this order. Who uses
        what does not has the memory of the device as the budget."""
        assert self.engine is not None
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
        assert self.engine is not None
        storage = managed.storage()
        if storage is None:
            return True
        over: queue.SimpleQueue[PenstockError | None] = queue.SimpleQueue()
        is_compressed = managed.key not in self._packing.packed and self.packed_bytes(managed) > 0
        try:
            for packed in (True, False) if is_compressed else (False,):  # it is fetched, and then expanded
                if not self.prepare(managed, storage, packed):
                    return False
                self.copy_in(managed, storage, 0, lambda error, _: over.put(error))
                if (error := over.get()) is not None:
                    self.give_up(managed, storage)
                    raise error
            self.engine.came_back_unasked(managed, clean=False)
            self._free_copy(managed)
        finally:
            if is_compressed or managed.state == RESIDENT:
                self.drop_packed(managed)
        return True

    def close(self) -> None:
        self._packing.close(CLOSE_TIMEOUT_S)
        self._compaction.close()
        self._reserved.end_budget()
        self._copies.close(CLOSE_TIMEOUT_S)


def _asked_bytes(error: BaseException, needed_bytes: int) -> int:
    """That the allocator was asked for, or little more; 0 where it does not say.

    It says what the segment would take. needed_bytes: of the kernel, as far as is known
    """
    found = re.search(r"ried to allocate ([\d.]+) ?([KMG]iB)", str(error))
    segment_bytes = parse_bytes(f"{found[1]}{found[2]}") if found is not None else 0
    if segment_bytes == SMALL_SEGMENT_BYTES:  # no large one is as small
        return LARGEST_SMALL_BYTES
    if segment_bytes == LARGE_SEGMENT_BYTES and needed_bytes > LARGEST_SMALL_BYTES:
        return min(needed_bytes, segment_bytes)
    if segment_bytes > LARGEST_SMALL_BYTES:
        return segment_bytes + segment_bytes // 64  # it is rounded, and by less than that
    return segment_bytes
