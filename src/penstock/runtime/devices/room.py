"""Room on an accelerator: what the budget has, its allocator may have in pieces only, and refuse.

Nothing more can leave then: memory is had in one piece by whatever moves what the kernel uses.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from penstock.errors import BudgetTooSmall, SpillError
from penstock.runtime.devices import Room
from penstock.runtime.devices.compaction import Compaction
from penstock.runtime.devices.driver import Driver
from penstock.runtime.devices.reserved import (
    LARGE_SEGMENT_BYTES,
    ROUND_BYTES,
    SMALL_SEGMENT_BYTES,
    ReservedMemory,
)
from penstock.runtime.schedule import LARGEST_SMALL_BYTES
from penstock.runtime.storages import AWAY, DROPPED, RESIDENT, ManagedStorage
from penstock.storage.aligned import align_up
from penstock.units import format_bytes, format_bytes_up, parse_bytes

if TYPE_CHECKING:
    from penstock.runtime.devices.accelerator import AcceleratorDevice

logger = logging.getLogger("penstock")

# How often all leaves for a kernel in a step.
TRIES = 4


class AllocatorRoom(Room):
    """See penstock.runtime.devices.Room. Called with the engine's lock held, on the thread of the kernels."""

    def __init__(
        self, device: AcceleratorDevice, driver: Driver, reserved: ReservedMemory, compaction: Compaction
    ) -> None:
        self._device, self._driver = device, driver
        self._reserved, self._compaction = reserved, compaction
        self._steps = 0
        self._next_opening = 0  # the step from which on the segment may be opened
        self._needed_bytes = 0  # most that a kernel had to have in large tensors
        # In this step: for which kernels, by what they use and ask for.
        self._emptied_for: Counter[tuple[int, ...]] = Counter()
        self._rearranged_for: set[tuple[int, ...]] = set()
        self._undivided = False  # the allocator's settings let no segment be opened, which is logged

    def begin_step(self) -> None:
        self._steps += 1
        self._emptied_for.clear()
        self._rearranged_for.clear()
        compaction = self._compaction
        if compaction.is_open and self._device.packs:  # on a stream of its own
            self._empty_segments()
        if compaction.refused and not compaction.is_open and self._steps >= self._next_opening:
            self._next_opening = 2 * self._steps
            if self._has_one_stream and not self._undivided:
                self._have_one_segment()
        if (over_bytes := self._reserved.over_bytes) > self._reserved.above_limit_bytes:
            over_bytes = self._come_below_the_limit()
        self._reserved.allow_above(over_bytes)

    def on_new_stream(self) -> None:
        if self._compaction.is_open:  # of that memory other streams get none
            self._empty_segments()

    def _come_below_the_limit(self) -> int:
        """Evict tensors of before the run that count now. Returns the bytes that stay reserved above the
        budget: a small tensor keeps a whole segment."""
        engine = self._device.engine
        with engine.lock:
            engine.make_room(0, expected=True)
            engine.end_kernel()
            self._driver.empty_cache()
            while (over_bytes := self._reserved.over_bytes) > 0 and engine.evict_and_wait(over_bytes):
                self._driver.empty_cache()
        if over_bytes > 0:
            logger.warning(
                "%s stay reserved beside device_budget, since tensors that cannot leave were on the device "
                "before the run: build the model inside it, or lower smallest_bytes",
                format_bytes(over_bytes),
            )
        return over_bytes

    # -- in one piece --------------------------------------------------------------------------

    def make(self, size_bytes: int) -> bool:
        used = [one for one in self._device.storages.all() if one.in_kernel and one.state == RESIDENT]
        for managed in used:
            managed.pins -= 1
        try:
            if not self._arrange(used, size_bytes):
                return False
        finally:
            for managed in used:
                managed.pins += 1
        self._device.engine.demand(used)
        return True

    def _arrange(self, used: Sequence[ManagedStorage], size_bytes: int) -> bool:
        """What a kernel uses is rearranged once in a step, and all leaves a few times: where small tensors
        ended the one segment, it is opened again. These have nothing of it, and where they find no memory all
        has to leave."""
        is_large = size_bytes > LARGEST_SMALL_BYTES
        kernel = (size_bytes, *(managed.key for managed in used))
        needed_bytes = _large_bytes(used) + is_large * align_up(size_bytes, ROUND_BYTES)
        self._needed_bytes = max(self._needed_bytes, needed_bytes)
        if is_large and self._compaction.is_open and kernel not in self._rearranged_for:
            self._rearranged_for.add(kernel)
            if self._rearrange(used, size_bytes):
                return True
        self._emptied_for[kernel] += 1
        tries = self._emptied_for[kernel] <= TRIES
        if tries and is_large and self._has_one_stream:
            self._have_one_segment()
        elif tries or self._compaction.is_open:
            self._empty_segments()
        else:
            return False
        return True

    def _rearrange(self, used: Sequence[ManagedStorage], size_bytes: int) -> bool:
        """Have the largest that a kernel uses leave, which hardly ever moves, and holes for it and for what
        the kernel asks for."""
        engine = self._device.engine
        largest = max(used, key=lambda managed: managed.size_bytes, default=None)
        if largest is None or not engine.leave_now(largest):
            return False
        sizes = sorted((size_bytes, largest.size_bytes), reverse=True)
        return self._compaction.make_holes(engine, sizes, may_leave=True)

    def make_holes(self, sizes: Sequence[int]) -> None:
        self._compaction.make_holes(self._device.engine, sizes, may_leave=True)

    def has_hole(self, size_bytes: int, waits: bool) -> bool:
        """Whether it is worth asking the allocator: before it refuses, it waits for the device."""
        if not self._compaction.is_open or size_bytes <= LARGEST_SMALL_BYTES:
            return True
        return self._compaction.make_holes(self._device.engine, (size_bytes,), may_leave=waits) or waits

    def has(self, sizes: Sequence[int]) -> bool:
        stream = self._driver.current_stream()
        taken = []  # together: the allocator keeps them for who asks next
        for size_bytes in sizes:
            taken.append(self._driver.allocate(size_bytes, stream))
            if taken[-1] is None:
                self.on_out_of_memory(size_bytes)
                return False
        return True

    def on_out_of_memory(self, size_bytes: int) -> None:
        self._device.memory.recount_in = 0
        self._compaction.on_out_of_memory(size_bytes)

    @property
    def _has_one_stream(self) -> bool:
        """Another one gets no memory of the one segment."""
        return len(self._device.streams) == 1 and not self._device.packs

    def _have_one_segment(self) -> None:
        """The allocator had memory in too many pieces: have it all in one, where it is one stream's."""
        self._reserved.measure()
        self._empty_segments()
        size_bytes = self._reserved.largest_new_segment_bytes(self._needed_bytes)
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
        half_bytes = self._reserved.budget_bytes // 2
        is_too_small = size_bytes < min(self._needed_bytes or half_bytes, half_bytes)
        if is_too_small or not self._compaction.open(size_bytes, self._device.streams[0]):
            logger.warning(
                "the allocator's memory stays in pieces: tensors that cannot leave are in too many of its "
                "segments"
            )

    def _empty_segments(self) -> None:
        """Let leave what can, once, and give back what is free then: the one segment, too."""
        engine = self._device.engine
        self._compaction.close()
        with engine.lock:
            try:
                for managed in engine.eviction_order():
                    engine.leave_now(managed)
            except SpillError as error:
                logger.warning("not all can leave: %s", error)
            self._driver.empty_cache()

    # -- kernels that were refused memory ------------------------------------------------------

    def frees_enough(self, error: BaseException, needed_bytes: int) -> bool:
        if not self._driver.is_out_of_memory(error):
            return False
        engine, segment = self._device.engine, self._device.memory.segment
        asked_bytes = _asked_bytes(error, needed_bytes)
        self.on_out_of_memory(asked_bytes)
        if segment is not None and asked_bytes > 0:
            if asked_bytes <= LARGEST_SMALL_BYTES:
                return self.make(asked_bytes)
            fits = segment.fits([asked_bytes])
            if not fits and self._compaction.make_holes(engine, [asked_bytes], may_leave=True):
                return True
        freed = engine.evict_and_wait(max(needed_bytes, self._reserved.budget_bytes // 16))
        return freed or self.make(needed_bytes)

    def kernel_failed(self, error: BaseException, needed_bytes: int) -> None:
        if not self._driver.is_out_of_memory(error):
            return
        asked_bytes = max(needed_bytes, _asked_bytes(error, needed_bytes), 1)
        in_use_bytes, fragments_bytes = self._reserved.in_use_and_free_bytes()
        least_bytes = self.budget_for(asked_bytes)
        raise BudgetTooSmall(
            f"the device has no memory left for a kernel: {format_bytes(in_use_bytes)} are in use by tensors "
            f"that cannot leave now, {format_bytes(fragments_bytes)} are fragments of the allocator, and the "
            f"device budget is {format_bytes(self._reserved.budget_bytes)}. Raise device_budget to "
            f"{format_bytes_up(least_bytes)} or more, lower the batch size, or set "
            "PYTORCH_ALLOC_CONF=expandable_segments:True, which leaves fewer fragments.",
            least_bytes,
        ) from error

    def budget_for(self, size_bytes: int) -> int:
        movable = (one for one in self._device.storages.all() if one.movable)
        there = (one for one in movable if one.state not in (AWAY, DROPPED))
        found_bytes = self._reserved.budget_for(size_bytes, _large_bytes(there))
        if found_bytes > self._reserved.budget_bytes:
            return found_bytes
        # The kernel makes more by itself, of which nobody knows: a segment is for any of that.
        return self._reserved.budget_bytes + LARGE_SEGMENT_BYTES


def _large_bytes(storages: Iterable[ManagedStorage]) -> int:
    sizes = (one.size_bytes for one in storages if one.size_bytes > LARGEST_SMALL_BYTES)
    return sum(align_up(size_bytes, ROUND_BYTES) for size_bytes in sizes)


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
