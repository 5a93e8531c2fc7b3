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
  streams of kernels wait for it (`join`). Where kernels ran on several streams, the stream that owns the
  memory waits for the others first; of what was made before the run it is not known, and the allocator waits
  for all of them;
- a block of host memory is used for something else only after the host has seen the copies to and from it
  complete;
- what leaves compressed is packed on a stream of its own, into memory of that stream, and emptied when the
  host has seen that complete; it is expanded on the same stream, into memory taken as for a copy.

Streams and events are made once and kept; beyond these `record_stream` is called only for tensors that
the program has called it for: each makes the pools of the allocator grow.

The budget is of reserved bytes, beside those of what was there before: what the run moves of that counts
from when it meets it, and is reported from the next step on. The allocator is capped at it, so that fragments
count too: where the tensors would fit and the allocator still finds no room, more leaves, and from the next
step on large tensors share one segment, and move within it (penstock.runtime.devices.compaction).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from penstock._native import DeviceMemory
from penstock.errors import BudgetTooSmall, InvalidArgument, PenstockError, SpillError
from penstock.runtime.copy_engine import ANY_BYTES, DEMAND, EVICT, CopyEngine, Done, Moved
from penstock.runtime.devices.compaction import Compaction
from penstock.runtime.devices.direct import Bounce, Paths
from penstock.runtime.devices.pinned import PinnedSlab
from penstock.runtime.devices.queues import Copy, CopyQueue, Outcome, StreamQueue
from penstock.runtime.devices.staging import Staging
from penstock.runtime.kernel_times import Timed
from penstock.runtime.schedule import LARGEST_SMALL_BYTES
from penstock.runtime.storage_methods import held_bytes
from penstock.runtime.storages import AWAY, DROPPED, RESIDENT, ManagedStorage, Storages
from penstock.storage.extents import Extent
from penstock.storage.spill import SpillSpace
from penstock.units import format_bytes, format_bytes_up, parse_bytes

logger = logging.getLogger("penstock")

CHUNK_BYTES = 8 << 20  # staged at once: large enough for full speed on bus and disk
CHUNKS = 4  # of staging, for each direction

# Asking the allocator costs as much as a kernel's launch, so it is asked once in so many times.
ASKED_EVERY = 32

# torch's caching allocators take memory in such segments, and round larger blocks up to the first: a block of
# up to 1 MiB lies in one of 2 MiB, one of less than 10 MiB in one of 20 MiB.
SMALL_SEGMENT_BYTES, LARGE_SEGMENT_BYTES = 2 << 20, 20 << 20

CLOSE_TIMEOUT_S = 5.0

AWAY_TEXT = (
    "this tensor's bytes are away, below the device: they come back when an operator of the thread that "
    "called penstock.offload uses it. Do not take its data_ptr(), and do not use it from other threads."
)


class Memory(NamedTuple):
    """What the allocator says.

    allocated_bytes   in tensors
    reserved_bytes    taken from the device, in tensors or kept for later
    small_bytes       of these in segments of small blocks
    peak_...          the most of each since the peaks were reset
    """

    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    small_bytes: int = 0
    peak_small_bytes: int = 0


class Driver(Protocol):
    """What an accelerator can do. Streams and events are as torch.Stream and torch.Event.

    device           with its index
    memory_manager   who gives the device its memory, for reports
    name             of the device's model
    total_bytes      of its memory
    free_bytes       of it, that nobody has taken
    """

    device: torch.device
    memory_manager: str

    @property
    def name(self) -> str: ...

    @property
    def total_bytes(self) -> int: ...

    @property
    def free_bytes(self) -> int: ...

    def make_stream(self) -> Any: ...

    def make_event(self, timed: bool = False) -> Any:
        """timed: it has `elapsed_time`, as those of torch with `enable_timing`."""
        ...

    def current_stream(self) -> Any:
        """That kernels of this thread go to."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Copy bytes, on the stream: one of the two is on the device, the other in page-locked memory."""

    def allocate(self, size_bytes: int, stream: Any) -> torch.UntypedStorage | None:
        """Memory of the stream's; None where there is none."""

    def reserve(self, size_bytes: int, stream: Any) -> int | None:
        """Keep so many bytes for later, in one segment of the stream's; its address. None: there is not so
        much, or no segments that blocks are cut from."""

    def pack(
        self,
        content: torch.Tensor,
        codec: str,
        itemsize: int,
        admits: Callable[[int], bool],
        stream: Any,
    ) -> torch.Tensor | None:
        """Bytes [N] packed on the stream, into memory of its own: penstock.runtime.devices.packing. None
        where that saves nothing, or there is no memory."""

    def unpack(
        self, packed: torch.Tensor, content: torch.Tensor, codec: str, itemsize: int, stream: Any
    ) -> bool:
        """The reverse, on the stream, into ``content``. False: they are damaged."""
        ...

    def resize(self, storage: torch.UntypedStorage, size_bytes: int, stream: Any) -> bool:
        """Empty the storage, or give an empty one memory of the stream's. False: there is none."""
        ...

    def record_stream(self, storage: torch.UntypedStorage, stream: Any) -> None:
        """When the storage is freed, its memory is handed out again after the stream has done what it has
        then."""

    def set_access_error(self, storage: torch.UntypedStorage, text: str | None) -> None:
        """Have each access to the storage raise this text, where torch can; None: no longer."""

    def page_lock(self, address: int, size_bytes: int) -> bool: ...

    def page_unlock(self, address: int) -> None: ...

    def allocated_bytes(self) -> int:
        """As in `memory`, and cheaper where that is possible."""
        ...

    def memory(self) -> Memory: ...

    def reset_peaks(self) -> None: ...

    def empty_cache(self) -> None:
        """Give back what the allocator keeps for later."""

    def limit(self, reserved_bytes: int | None) -> None:
        """Reserve no more; None: as much as there is."""

    def is_out_of_memory(self, error: BaseException) -> bool: ...

    def synchronize(self) -> None:
        """Wait for all streams."""

    def marked(self, text: str) -> contextlib.AbstractContextManager[None]:
        """Show what is done meanwhile on this thread in a profiler, by that name."""
        ...


@dataclass(slots=True)
class Slot:
    """Where a copy of a storage is: a block of the pinned slab, or an extent of the spill space.

    codec          of the copy, and bytes of an element
    packed_bytes   that it takes then; 0: it is as it was
    copies         to or from the block, under way
    is_forgotten   the block is free when they are over
    """

    tier: str
    block: Extent
    codec: tuple[str, int] = ("raw", 0)
    packed_bytes: int = 0
    copies: int = 0
    is_forgotten: bool = False


class Packed(NamedTuple):
    """Packed bytes on the device, and the codec with the bytes of an element."""

    content: torch.UntypedStorage
    codec: tuple[str, int]


class AcceleratorDevice:
    """One accelerator up to a budget, host memory and the disk below it; see penstock.runtime.devices.Device.

    host_bytes            page-locked host memory, staging included
    chunk_bytes, chunks   of staging, for each direction

    host_tier_bytes       what of host_bytes is left as a tier
    paths                 between the device and the disk
    """

    evict_link = "device_to_host"
    prefetch_link = "host_to_device"
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
        if budget_bytes > driver.total_bytes:
            raise InvalidArgument(
                f"device_budget is {format_bytes(budget_bytes)}, and {driver.device} ({driver.name}) has "
                f"{format_bytes(driver.total_bytes)}: give less than that, as others use some of it"
            )
        driver.empty_cache()  # what is kept there is nobody's, and would raise the limit
        before = driver.memory()
        if budget_bytes > (left_bytes := driver.free_bytes + before.reserved_bytes):
            raise InvalidArgument(
                f"device_budget is {format_bytes(budget_bytes)}, and other programs leave "
                f"{format_bytes(left_bytes)} of {driver.device} ({driver.name}): give less, or end them"
            )
        staging_bytes = 2 * chunk_bytes * chunks
        if host_bytes < staging_bytes:
            raise InvalidArgument(
                f"host_budget is {format_bytes(host_bytes)}: transfers between an accelerator and disk need "
                f"{format_bytes(staging_bytes)} of host memory for staging. Give that, or more."
            )
        self._spill = spill
        self._driver = driver
        self._budget_bytes = budget_bytes
        self.memory_manager = driver.memory_manager
        self.engine: CopyEngine | None = None
        self.memory = DeviceMemory()
        self.host_tier_bytes = host_bytes - staging_bytes
        self.tier = "host" if self.host_tier_bytes else "disk"
        self.place_text = f"the disk of {spill.place_text}"
        self.paths = Paths(spill, driver.device)
        self._slab = PinnedSlab(host_bytes, driver.page_lock, driver.page_unlock)
        self._free_events: list[Any] = []
        self._streams: list[Any] = [driver.current_stream()]  # that kernels ran on
        self.device = driver.device
        self.current_stream: Callable[[], Any] | None = driver.current_stream
        self._to_host, self._from_host = (
            StreamQueue(
                f"penstock-host-{name}",
                link,
                driver.make_stream(),
                functools.partial(self._issue, name == "out"),
                self._free_events.append,
                driver.marked,
            )
            for name, link in (("out", self.evict_link), ("in", self.prefetch_link))
        )
        self._staged_out, self._staged_in = (
            Staging(out, spill, self._slab, bus, chunk_bytes, chunks)
            for out, bus in ((True, self._to_host), (False, self._from_host))
        )
        self._to_disk, self._from_disk = (
            CopyQueue(
                f"penstock-disk-{name}",
                functools.partial(self._move_disk, move, staged),
                driver.marked,
                staged.make_way,
            )
            for name, move, staged in (
                ("out", self.paths.write, self._staged_out),
                ("in", self.paths.read, self._staged_in),
            )
        )
        # By key: the copy of it as it is to or from the host, and the event after which that is over.
        self._issued: dict[int, tuple[Copy, Any]] = {}
        self._joined: set[Any] = set()  # of these events, those that streams of kernels wait for
        self._copies = threading.Lock()  # both, and how many copies use a block of the slab
        self._recorded: dict[int, list[Any]] = {}  # by key: streams that the program uses it on
        self._found: set[int] = set()  # keys of those whose memory is of some stream, nobody knows which
        self._packed: dict[int, Packed] = {}  # by key: on the device, or being fetched to it
        self._coded: dict[int, tuple[str, int]] = {}  # by key: how it is to be packed
        self._packs = False  # anything ever
        carry_packing = functools.partial(self._carry_packing, driver.make_stream())
        self._packing = CopyQueue("penstock-packing", carry_packing, driver.marked)
        self._compaction = Compaction(driver, self.memory)
        self._next_opening = 0  # the step from which on the segment may be opened
        self._steps = 0
        self._foreign_bytes = before.allocated_bytes  # of what was there, and is not ours to move
        self._foreign_reserve = before.reserved_bytes / max(before.allocated_bytes, 1)  # for each of these
        self._kept_bytes = 0  # above the limit, in segments with what was there: nothing more could leave
        self._beside_bytes = 0  # of these two, reserved when the step began
        self._peak_bytes = self._fragments_bytes = self._before_bytes = self._emptied_bytes = 0
        self._small_bytes = 0  # most in segments of small blocks, ever
        self._begun: Any = None  # of the kernel that is measured: an event
        self._ended: Any = None  # of the one before
        self._was_idle = True
        self._step_begun = self._timed_event()
        self._driver.limit(self._limit_bytes)

    # -- which storages ------------------------------------------------------------------------

    def adopt(self, managed: ManagedStorage, storage: torch.UntypedStorage, made: bool) -> bool:
        if not self.has(storage) or not managed.size_bytes or not storage.resizable():
            return False
        managed.place = self._driver.current_stream()
        self._compaction.put(managed, storage)
        if not made:
            self._found.add(managed.key)
            managed.noted = True
            self._foreign_bytes = max(self._foreign_bytes - managed.size_bytes, 0)
            self._driver.limit(self._limit_bytes)
            self.memory.asks_in = 0
        self.memory.known_bytes += managed.size_bytes
        return True

    @property
    def _limit_bytes(self) -> int:
        return self._foreign_reserved_bytes + self._kept_bytes + self._budget_bytes

    @property
    def _foreign_reserved_bytes(self) -> int:
        return int(self._foreign_bytes * self._foreign_reserve)

    @property
    def _over_bytes(self) -> int:
        own_bytes = self._driver.memory().reserved_bytes - self._foreign_reserved_bytes
        return max(own_bytes - self._budget_bytes, 0)

    def _come_below_the_limit(self) -> int:
        """What was there before, and counts now, may be above it. A small tensor keeps a whole segment: bytes
        that stay above it for that."""
        engine = self.engine
        assert engine is not None
        with engine.lock:
            engine.make_room(0, expected=True)
            engine.end_kernel()
            self._driver.empty_cache()
            while (over_bytes := self._over_bytes) > 0 and engine.free(over_bytes):
                self._driver.empty_cache()
        if over_bytes > 0:
            logger.warning(
                "%s stay reserved beside device_budget, since tensors that cannot leave were on the device "
                "before the run: build the model inside it, or lower smallest_bytes",
                format_bytes(over_bytes),
            )
        return over_bytes

    def bury(self, managed: ManagedStorage) -> None:
        if not managed.movable:
            return
        self._recorded.pop(managed.key, None)
        self._found.discard(managed.key)
        if managed.state not in (AWAY, DROPPED):
            self.memory.known_bytes -= managed.size_bytes
        self.drop_packed(managed)
        self._forget_copy(managed)

    def has(self, storage: torch.UntypedStorage) -> bool:
        return storage.device == self._driver.device

    def record_stream(self, managed: ManagedStorage, stream: Any) -> None:
        managed.noted = managed.stays = True
        recorded = self._recorded.setdefault(managed.key, [])
        if stream not in recorded:
            recorded.append(stream)

    def resize(self, storage: torch.UntypedStorage, size_bytes: int) -> bool:
        self.begin_kernel()
        return self._driver.resize(storage, size_bytes, self._driver.current_stream())

    def _forget_copy(self, managed: ManagedStorage) -> None:
        managed.clean = False
        if managed.slot is not None:
            self.forget(managed, managed.slot)
            managed.slot = None

    # -- memory --------------------------------------------------------------------------------

    def in_memory_bytes(self) -> int:
        memory = self.memory
        if memory.asks_in <= 0:
            memory.asks_in = ASKED_EVERY
            allocated_bytes = self._driver.allocated_bytes() - self._foreign_bytes
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
                self._was_refused(slot.packed_bytes)
                return False
            self._packed[managed.key] = Packed(content, slot.codec)
            self.memory.known_bytes += slot.packed_bytes
            return True
        if not self._has_hole(managed.size_bytes, waits):
            return False
        self._driver.set_access_error(storage, None)
        if not self._driver.resize(storage, managed.size_bytes, managed.place):
            self._driver.set_access_error(storage, AWAY_TEXT)
            self._was_refused(managed.size_bytes)
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
                event = self._record(stream)
                managed.place.wait_event(event)
                self._free_events.append(event)
        self._empty(managed, storage)
        return True

    def give_up(self, managed: ManagedStorage, storage: torch.UntypedStorage) -> None:
        if held_bytes(storage):
            self._empty(managed, storage)
        else:
            self.drop_packed(managed)

    def _empty(self, managed: ManagedStorage, storage: torch.UntypedStorage) -> None:
        if self.memory.segment is not None:
            self.memory.segment.take(managed)
        self._driver.resize(storage, 0, managed.place)
        self._driver.set_access_error(storage, AWAY_TEXT)
        self.memory.known_bytes -= managed.size_bytes
        self._emptied_bytes += managed.size_bytes

    def arrive(self, managed: ManagedStorage, storage: torch.UntypedStorage) -> bool:
        if not held_bytes(storage):  # it stays packed
            return True
        was_packed = managed.key in self._packed
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
        current = self._driver.current_stream()
        if not self.prepare(managed, storage):
            return False
        if managed.place != current:  # the memory may still be in use there
            event = self._record(managed.place)
            current.wait_event(event)
            self._free_events.append(event)
        self._bytes(storage).copy_(self._bytes(made))
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
        """Nothing more can leave, and the allocator still refuses. The one segment takes what it needs for
        small tensors: it is given back, and what the kernel uses comes back to others."""
        if not self._compaction.is_open:
            return False
        assert self.engine is not None and self.storages is not None
        used = [one for one in self.storages.all() if one.in_kernel and one.state == RESIDENT]
        for managed in used:
            managed.pins -= 1
        try:
            self._empty_segments()
        finally:
            for managed in used:
                managed.pins += 1
        self.engine.demand(used)
        return True

    def make_holes(self, sizes: Sequence[int]) -> None:
        assert self.engine is not None
        self._compaction.make_holes(self.engine, sizes, may_leave=True)

    def _has_hole(self, size_bytes: int, waits: bool) -> bool:
        """Whether it is worth asking the allocator: before it refuses, it waits for the device."""
        if not self._compaction.is_open or size_bytes <= LARGEST_SMALL_BYTES:
            return True
        assert self.engine is not None
        return self._compaction.make_holes(self.engine, (size_bytes,), may_leave=waits) or waits

    def _was_refused(self, size_bytes: int) -> None:
        self.memory.asks_in = 0
        self._compaction.was_refused(size_bytes)

    def _have_one_segment(self) -> None:
        """The allocator had memory in too many pieces: have it all in one, where it is one stream's."""
        if len(self._streams) > 1 or self._packs:  # another stream gets no memory of it
            return
        self._note_peak()
        self._empty_segments()
        memory = self._driver.memory()
        later_bytes = self._small_bytes - memory.small_bytes + 2 * SMALL_SEGMENT_BYTES
        left_bytes = self._limit_bytes - memory.reserved_bytes - later_bytes
        size_bytes = left_bytes // SMALL_SEGMENT_BYTES * SMALL_SEGMENT_BYTES
        if size_bytes < self._budget_bytes // 2 or not self._compaction.open(size_bytes, self._streams[0]):
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
                    engine.leave_now(managed, waits=True)
            except SpillError as error:
                logger.warning("not all can leave: %s", error)
            self._driver.empty_cache()

    def has_room(self, sizes: Sequence[int]) -> bool:
        stream = self._driver.current_stream()
        taken = []  # together: the allocator keeps them for who asks next
        for size_bytes in sizes:
            taken.append(self._driver.allocate(size_bytes, stream))
            if taken[-1] is None:
                self._was_refused(size_bytes)
                return False
        return True

    def budget_for(self, size_bytes: int) -> int:
        self._driver.empty_cache()  # what stays reserved is in segments that tensors are in
        kept_bytes = self._driver.memory().reserved_bytes - self._foreign_reserved_bytes
        return max(kept_bytes, 0) + _segments_bytes(size_bytes)

    # -- copies --------------------------------------------------------------------------------

    def reserve(self, managed: ManagedStorage, tier: str) -> Slot:
        block = self._slab.try_allocate(managed.size_bytes) if tier == "host" else None
        if block is not None:
            return Slot("host", block)
        return Slot("disk", self.paths.allocate(managed.size_bytes))

    def forget(self, managed: ManagedStorage, slot: Slot) -> None:
        if slot.tier == "host":
            with self._copies:
                slot.is_forgotten = True
                if not slot.copies:
                    self._slab.release(slot.block)
        else:
            self._spill.release(slot.block)

    def copy_out(self, managed: ManagedStorage, storage: torch.UntypedStorage, done: Done) -> None:
        slot: Slot = managed.slot
        ready = []
        if managed.writing:  # the host has seen the packing complete
            packed = self._packed[managed.key]
            storage = packed.content
            slot.codec, slot.packed_bytes = packed.codec, packed.content.nbytes()
            done = functools.partial(self._note_written, managed, done)
        else:
            # On any thread: what it waits for is what the program has launched, not this thread.
            ready = [self._record(stream) for stream in self._streams]
            slot.codec, slot.packed_bytes = ("raw", 0), 0
        if slot.tier == "host":
            self._give(self._to_host, managed, storage, ready, done)
        else:
            self._to_disk.put(EVICT, Copy(managed, storage, slot.block, ready, done))

    def _note_written(
        self, managed: ManagedStorage, done: Done, error: PenstockError | None, moved: Sequence[Moved]
    ) -> None:
        assert self.engine is not None
        with self.engine.lock:
            done(error, moved)
            if managed.state == RESIDENT:  # it came back meanwhile, from what is packed
                self.drop_packed(managed)

    # -- packing -------------------------------------------------------------------------------

    def pack(
        self,
        managed: ManagedStorage,
        storage: torch.UntypedStorage,
        codec: str,
        itemsize: int,
        done: Callable[[int], None],
    ) -> None:
        self._packs = True
        ready = [self._record(stream) for stream in self._streams]

        def on_done(error: PenstockError | None, _: Sequence[Moved]) -> None:
            if error is not None:
                logger.warning("a tensor leaves as it is: %s", error)
            # Nothing here may keep the memory: `done` may give it up, and others count on that.
            done(self._packed[managed.key].content.nbytes() if managed.key in self._packed else 0)

        self._coded[managed.key] = codec, itemsize
        self._packing.put(EVICT, Copy(managed, storage, managed.slot.block, ready, on_done))

    def _carry_packing(self, stream: Any, copy: Copy, priority: int, done: Done) -> None:
        done(*self._pack_or_expand(copy, stream))

    def _pack_or_expand(self, copy: Copy, stream: Any) -> Outcome:
        """Pack what is there, or expand what is packed."""
        for event in copy.ready:
            stream.wait_event(event)
        copy.wait()  # for the host's clock, too
        self._free_events.extend(copy.ready)
        managed, content = copy.managed, self._bytes(copy.storage)
        codec = self._coded.pop(managed.key, None)
        if codec is not None:
            self._pack(managed, content, codec, stream)
            return None, []
        packed = self._packed[managed.key]
        whole = self._driver.unpack(self._bytes(packed.content), content, *packed.codec, stream)
        self._complete(stream)
        if whole:
            return None, []
        return SpillError(
            f"{packed.content.nbytes()} compressed bytes on {self.place_text} are damaged: check the disk "
            "(dmesg, smartctl), or choose another spill_dir"
        ), []

    def _pack(
        self, managed: ManagedStorage, content: torch.Tensor, codec: tuple[str, int], stream: Any
    ) -> None:
        engine = self.engine
        assert engine is not None
        admitted_bytes = 0

        def admits(size_bytes: int) -> bool:
            nonlocal admitted_bytes
            with engine.lock:
                if engine.fits(size_bytes):
                    admitted_bytes = size_bytes
                    self.memory.known_bytes += size_bytes
            return admitted_bytes > 0

        made = None
        try:
            made = self._driver.pack(content, *codec, admits, stream)
            self._complete(stream)
        finally:
            with engine.lock:
                if made is not None:
                    self._packed[managed.key] = Packed(made.untyped_storage(), codec)
                else:
                    self.memory.known_bytes -= admitted_bytes

    def drop_packed(self, managed: ManagedStorage) -> None:
        packed = self._packed.pop(managed.key, None)
        if packed is not None:
            self.memory.known_bytes -= packed.content.nbytes()

    def packed_written(self, managed: ManagedStorage, keeps: bool) -> bool:
        if not keeps:
            self.drop_packed(managed)
        return True

    def packed_bytes(self, managed: ManagedStorage) -> int:
        return managed.slot.packed_bytes if managed.slot is not None else 0

    # -- copies back -----------------------------------------------------------------------------

    def copy_in(
        self, managed: ManagedStorage, storage: torch.UntypedStorage, priority: int, done: Done
    ) -> None:
        ready = [self._record(managed.place)]
        packed = self._packed.get(managed.key)
        if packed is not None and held_bytes(storage):
            self._packing.put(priority, Copy(managed, storage, managed.slot.block, ready, done))
            return
        source = storage if packed is None else packed.content
        if managed.slot.tier == "host":
            self._give(self._from_host, managed, source, ready, done)
        else:
            self._from_disk.put(priority, Copy(managed, source, managed.slot.block, ready, done))

    def _give(
        self,
        waiting: StreamQueue,
        managed: ManagedStorage,
        storage: torch.UntypedStorage,
        ready: list[Any],
        done: Done,
    ) -> None:
        """To or from the host."""
        slot: Slot = managed.slot

        def over(error: PenstockError | None, moved: Sequence[Moved]) -> None:
            with self._copies:
                if self._issued.get(managed.key) == (copy, event):
                    del self._issued[managed.key]
                self._joined.discard(event)
                self._copy_over(slot)
            self._free_events.extend(ready)
            done(error, moved)

        with self._copies:  # until `event` is known
            slot.copies += 1
            copy = Copy(managed, storage, slot.block, ready, over)
            try:
                event = waiting.put(copy)
            except BaseException:
                self._copy_over(slot)
                raise
            if managed.key not in self._packed:  # else it is a copy of what is packed
                self._issued[managed.key] = copy, event

    def _copy_over(self, slot: Slot) -> None:
        slot.copies -= 1
        if slot.is_forgotten and not slot.copies:
            self._slab.release(slot.block)

    def join(self, managed: ManagedStorage) -> bool:
        with self._copies:
            issued = self._issued.pop(managed.key, None)
            if issued is None:
                return False
            copy, event = issued
            self._joined.add(event)
            copy.storage = None  # who frees the memory from now on frees it behind the copy
            for stream in {*self._streams, managed.place}:
                stream.wait_event(event)
        return True

    def hurry(self, managed: ManagedStorage) -> None:
        self._from_disk.hurry(managed, DEMAND)
        self._packing.hurry(managed, DEMAND)

    def _record(self, stream: Any) -> Any:
        try:
            event = self._free_events.pop()
        except IndexError:
            event = self._driver.make_event()
        event.record(stream)
        return event

    def _issue(self, out: bool, copy: Copy, stream: Any) -> Any:
        """Between the device and the host; the event after which it is over."""
        content = self._bytes(copy.storage)[copy.begin : copy.begin + copy.size_bytes]
        host = self._slab.tensor(copy.block, copy.size_bytes)
        self._driver.copy(*((host, content) if out else (content, host)), stream)
        return self._record(stream)

    def _move_disk(
        self,
        move: Callable[[Copy, int, Bounce, Done], None],
        staged: Staging,
        copy: Copy,
        priority: int,
        done: Done,
    ) -> None:
        def over(error: PenstockError | None, moved: Sequence[Moved]) -> None:
            self._free_events.extend(copy.ready)
            done(error, moved)

        move(copy, priority, staged, over)

    def _complete(self, stream: Any) -> None:
        """Wait, on the host, for all that the stream was given."""
        complete = self._record(stream)
        complete.synchronize()
        self._free_events.append(complete)

    def _bytes(self, storage: torch.UntypedStorage | None) -> torch.Tensor:
        """The storage as bytes. A tensor of its own: versions that autograd checks stay as they are."""
        assert storage is not None
        view = torch.empty(0, dtype=torch.uint8, device=self._driver.device)
        return view.set_(storage, 0, (storage.nbytes(),), (1,))  # type: ignore[call-overload, no-any-return]

    # -- kernels -------------------------------------------------------------------------------

    def begin_kernel(self) -> None:
        stream = self._driver.current_stream()
        if stream not in self._streams:
            if self._compaction.is_open:  # of that memory other streams get none
                self._empty_segments()
            with self._copies:
                self._streams.append(stream)
                for event in self._joined:
                    stream.wait_event(event)

    def end_kernel(self) -> None:
        pass

    def frees_enough(self, error: BaseException, needed_bytes: int) -> bool:
        if not self._driver.is_out_of_memory(error):
            return False
        engine = self.engine
        assert engine is not None
        memory = self._driver.memory()
        self._fragments_bytes = max(self._fragments_bytes, memory.reserved_bytes - memory.allocated_bytes)
        asked_bytes = _asked_bytes(error)
        self._was_refused(asked_bytes)
        segment = self.memory.segment
        if segment is not None and asked_bytes > 0:
            if asked_bytes <= LARGEST_SMALL_BYTES:
                return self.make_room(needed_bytes)
            asked_bytes += asked_bytes // 64  # what it says is rounded, and by less than that
            fits = segment.fits([asked_bytes])
            if not fits and self._compaction.make_holes(engine, [asked_bytes], may_leave=True):
                return True
        return engine.free(max(needed_bytes, self._budget_bytes // 16)) or self.make_room(needed_bytes)

    def cannot_use(self, error: OSError) -> None:
        raise error  # it has no arena

    def kernel_failed(self, error: BaseException, needed_bytes: int) -> None:
        if not self._driver.is_out_of_memory(error):
            return
        asked_bytes = max(needed_bytes, _asked_bytes(error), 1)
        memory = self._driver.memory()
        in_use_bytes = max(memory.allocated_bytes - self._foreign_bytes, 0)
        fragments_bytes = memory.reserved_bytes - memory.allocated_bytes
        least_bytes = max(self.budget_for(asked_bytes), self._budget_bytes + SMALL_SEGMENT_BYTES)
        raise BudgetTooSmall(
            f"the device has no memory left for a kernel: {format_bytes(in_use_bytes)} are in use by tensors "
            f"that cannot leave now, {format_bytes(fragments_bytes)} are fragments of the allocator, and the "
            f"device budget is {format_bytes(self._budget_bytes)}. Raise device_budget to "
            f"{format_bytes_up(least_bytes)} or more, lower the batch size, or set "
            "PYTORCH_ALLOC_CONF=expandable_segments:True, which leaves fewer fragments.",
            least_bytes,
        ) from error

    # -- measuring -----------------------------------------------------------------------------

    def begin_step(self) -> None:
        self._steps += 1
        if self._packs and self._compaction.is_open:  # on a stream of its own
            self._empty_segments()
        if self._compaction.refused and not self._compaction.is_open and self._steps >= self._next_opening:
            self._next_opening = 2 * self._steps
            self._have_one_segment()
        if (over_bytes := self._over_bytes) > self._kept_bytes:
            over_bytes = self._come_below_the_limit()
        if over_bytes != self._kept_bytes:
            self._kept_bytes = over_bytes
            self._driver.limit(self._limit_bytes)
        self._beside_bytes = self._foreign_reserved_bytes + self._kept_bytes
        self._peak_bytes = 0
        self.memory.asks_in = 0
        self._driver.reset_peaks()
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
        self._note_peak()
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
        self._note_peak()
        return self._peak_bytes

    @property
    def fragments_bytes(self) -> int:
        """Most reserved bytes that no tensor had, when the allocator was at its peak or found no room."""
        self._note_peak()
        return self._fragments_bytes

    def _note_peak(self) -> None:
        memory = self._driver.memory()
        self._peak_bytes = max(self._peak_bytes, memory.peak_reserved_bytes - self._beside_bytes)
        self._small_bytes = max(self._small_bytes, memory.peak_small_bytes)
        fragments_bytes = memory.peak_reserved_bytes - memory.peak_allocated_bytes
        self._fragments_bytes = max(self._fragments_bytes, fragments_bytes)

    # -- the end -------------------------------------------------------------------------------

    def settle(self, storages: list[ManagedStorage]) -> bool:
        """The budget is over: everything comes back that the device has memory for."""
        self._driver.limit(None)
        self._compaction.close()
        over: queue.SimpleQueue[Any] = queue.SimpleQueue()
        left_bytes = 0
        for managed in storages:
            storage = managed.storage()
            if storage is None or managed.state != AWAY:
                self._forget_copy(managed)
                continue
            error: object = "no memory"
            stages = (
                [False] if managed.key in self._packed or not self.packed_bytes(managed) else [True, False]
            )
            for packed in stages:  # what is compressed is fetched first, and then expanded
                error = "no memory"
                if not self.prepare(managed, storage, packed):
                    break
                self.copy_in(managed, storage, 0, lambda error, _: over.put(error))
                if (error := over.get()) is not None:
                    self.give_up(managed, storage)
                    break
            if error is None and self.engine is not None:
                self.drop_packed(managed)
                self.engine.note_arrived(managed, clean=False)
                self._forget_copy(managed)
            if error is not None:
                left_bytes += managed.size_bytes
                logger.warning(
                    "a tensor of %s stays below the device: %s", format_bytes(managed.size_bytes), error
                )
        return not left_bytes

    def close(self) -> None:
        first = self._packing, self._to_disk, self._from_disk
        for waiting in (*first, self._staged_out, self._staged_in, self._to_host, self._from_host):
            waiting.close(CLOSE_TIMEOUT_S)
        self._compaction.close()
        self._driver.limit(None)
        self._slab.close()


def _segments_bytes(size_bytes: int) -> int:
    """That the allocator may have to reserve for tensors of so many bytes together, whatever their sizes."""
    if size_bytes <= LARGEST_SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    whole_bytes = -(-size_bytes // SMALL_SEGMENT_BYTES) * SMALL_SEGMENT_BYTES
    return whole_bytes + LARGE_SEGMENT_BYTES + SMALL_SEGMENT_BYTES


def _asked_bytes(error: BaseException) -> int:
    """That the allocator says it was asked for; 0 where it does not say."""
    found = re.search(r"ried to allocate ([\d.]+) ?([KMG]iB)", str(error))
    return parse_bytes(f"{found[1]}{found[2]}") if found is not None else 0
