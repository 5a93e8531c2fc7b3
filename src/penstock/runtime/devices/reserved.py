"""Keeps the memory that an accelerator's caching allocator reserves within the budget."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from penstock.core.columns import sum_over
from penstock.core.memory_profile import held_bytes, least_workspace_bytes, minimum_bytes
from penstock.core.trace import Trace
from penstock.errors import InvalidArgument
from penstock.runtime.devices.driver import Driver
from penstock.runtime.schedule import LARGEST_SMALL_BYTES
from penstock.storage.aligned import align_down, align_up
from penstock.units import format_bytes

# torch's caching allocators take memory in such segments, and round larger blocks up to the first: a block of
# up to 1 MiB lies in one of 2 MiB, one of less than 10 MiB in one of 20 MiB.
SMALL_SEGMENT_BYTES, LARGE_SEGMENT_BYTES = 2 << 20, 20 << 20
LEAST_OWN_SEGMENT_BYTES = 10 << 20

# What it rounds tensors up to, and in one segment they lie one behind the other.
ROUND_BYTES = 512

# Left free beside one segment for large tensors: small ones are seldom packed as well as they could be.
SPARE_BYTES = 2 * SMALL_SEGMENT_BYTES

# Share of the budget that is lost to free blocks too small to be used.
PIECES_SHARE = 0.02


def spare_bytes(trace: Trace, budget_bytes: int, small_bytes: int) -> int:
    """Bytes of the budget that plans for the trace must leave free: for fragmentation, and for the free part
    of segments of small blocks while the step needs more than the budget. Large tensors cannot use either.

    small_bytes   peak of these segments
    """
    small = np.flatnonzero(trace.tensor_bytes <= LARGEST_SMALL_BYTES)
    death = np.minimum(trace.tensor_death[small], trace.kernels)
    used = sum_over(trace.kernels, trace.tensor_birth[small], death, trace.tensor_bytes[small])
    least_bytes = int(used[trace.live_bytes > budget_bytes].min(initial=small_bytes))
    return int(PIECES_SHARE * budget_bytes) + small_bytes - least_bytes


def plannable(trace: Trace, budget_bytes: int, small_bytes: int) -> tuple[Trace, int]:
    """The trace and the budget that plans are made for. Small tensors stay in it: large ones cannot use what
    they leave. Where the budget is too small for that, they may leave, too."""
    stays = replace(trace, tensor_movable=trace.movable & (trace.tensor_bytes > LARGEST_SMALL_BYTES))
    left_bytes = budget_bytes - spare_bytes(trace, budget_bytes, small_bytes)
    if minimum_bytes(stays) <= left_bytes:
        return stays, left_bytes
    return trace, max(left_bytes, min(budget_bytes, minimum_bytes(trace)))


def one_segment_bytes(large_bytes: int) -> int:
    """The smallest segment that can be had for so many bytes of large tensors."""
    return max(align_up(large_bytes, SMALL_SEGMENT_BYTES), LEAST_OWN_SEGMENT_BYTES) if large_bytes else 0


def budget_of(large_bytes: int, small_bytes: int) -> int:
    """In which so many bytes of large tensors fit, in one segment, beside segments of small blocks."""
    spare_bytes = SPARE_BYTES if large_bytes else 0
    return one_segment_bytes(large_bytes) + align_up(small_bytes, SMALL_SEGMENT_BYTES) + spare_bytes


def least_budget(trace: Trace, small_bytes: int) -> int:
    """The smallest budget whose segments are known to hold what each kernel of the trace cannot do without.

    small_bytes   peak of segments of small blocks, 0 where it is not known. Where small tensors leave it is
                  less: of segments that hold what a kernel needs all but one are more than half full
    """
    size_bytes = -(-trace.tensor_bytes // ROUND_BYTES) * ROUND_BYTES
    is_large, workspace_bytes = trace.tensor_bytes > LARGEST_SMALL_BYTES, least_workspace_bytes(trace)
    # Workspace may be one large tensor or many small ones.
    large_bytes, few_bytes = (
        held_bytes(replace(trace, tensor_bytes=np.where(chosen, size_bytes, 0))) + workspace
        for chosen, workspace in (
            (is_large, np.where(workspace_bytes > LARGEST_SMALL_BYTES, workspace_bytes, 0)),
            (~is_large, workspace_bytes),
        )
    )
    needed_bytes = (
        budget_of(large, min(small_bytes or 2 * few, 2 * few))
        for large, few in zip(large_bytes.tolist(), few_bytes.tolist(), strict=True)
    )
    return max(minimum_bytes(trace), *needed_bytes)


class ReservedMemory:
    """Limits the allocator to the budget, plus what was allocated before the run. A tensor of before counts
    against the budget once the run first sees it, and in reports from the next step on.

    foreign_bytes       allocated before the run, and not managed by it
    above_limit_bytes   reserved above the budget, as nothing more could be evicted
    small_bytes         peak of segments of small blocks

    Raises InvalidArgument where the device has less.
    """

    def __init__(self, driver: Driver, budget_bytes: int) -> None:
        if budget_bytes > driver.total_bytes:
            raise InvalidArgument(
                f"device_budget is {format_bytes(budget_bytes)}, and {driver.device} ({driver.name}) has "
                f"{format_bytes(driver.total_bytes)}: give less than that, as others use some of it"
            )
        driver.empty_cache()  # cached blocks are in no tensor, and would raise the limit
        before = driver.memory()
        if budget_bytes > (left_bytes := driver.free_bytes + before.reserved_bytes):
            raise InvalidArgument(
                f"device_budget is {format_bytes(budget_bytes)}, and {format_bytes(left_bytes)} of "
                f"{driver.device} ({driver.name}) are left to this process: give less, end other programs "
                "there, or raise torch's memory fraction of this one"
            )
        self._driver = driver
        self.budget_bytes = budget_bytes
        self.foreign_bytes = before.allocated_bytes
        self._reserved_for_each = before.reserved_bytes / max(before.allocated_bytes, 1)
        self.above_limit_bytes = 0
        self._beside_bytes = 0  # reserved for others when the step began
        self._peak_bytes = self.small_bytes = 0
        self._has_ended = False

    @property
    def _foreign_reserved_bytes(self) -> int:
        return int(self.foreign_bytes * self._reserved_for_each)

    @property
    def limit_bytes(self) -> int:
        return self._foreign_reserved_bytes + self.above_limit_bytes + self.budget_bytes

    @property
    def over_bytes(self) -> int:
        """Bytes reserved above the budget now."""
        own_bytes = self._driver.memory().reserved_bytes - self._foreign_reserved_bytes
        return max(own_bytes - self.budget_bytes, 0)

    def set_limit(self) -> None:
        if not self._has_ended:
            self._driver.limit(self.limit_bytes)

    def end_budget(self) -> None:
        """From now on the budget is all that the device has for this process."""
        if not self._has_ended:
            self._driver.limit(None)
        self._has_ended = True
        left_bytes = self._driver.free_bytes + self._driver.memory().reserved_bytes
        self.budget_bytes = max(left_bytes - self._foreign_reserved_bytes, 0)

    def take_over(self, size_bytes: int) -> None:
        """The run manages ``size_bytes`` more of what was allocated before it."""
        self.foreign_bytes = max(self.foreign_bytes - size_bytes, 0)
        self.set_limit()

    def allow_above(self, size_bytes: int) -> None:
        if size_bytes != self.above_limit_bytes:
            self.above_limit_bytes = size_bytes
            self.set_limit()

    def begin_step(self) -> None:
        self._beside_bytes = self._foreign_reserved_bytes + self.above_limit_bytes
        self._peak_bytes = 0
        self._driver.reset_peaks()

    def measure(self) -> int:
        """Most bytes reserved since `begin_step`."""
        memory = self._driver.memory()
        self._peak_bytes = max(self._peak_bytes, memory.peak_reserved_bytes - self._beside_bytes)
        self.small_bytes = max(self.small_bytes, memory.peak_small_bytes)
        return self._peak_bytes

    def in_use_and_free_bytes(self) -> tuple[int, int]:
        """Of what is reserved: in the run's tensors, and in none."""
        memory = self._driver.memory()
        own_bytes = max(memory.allocated_bytes - self.foreign_bytes, 0)
        return own_bytes, memory.reserved_bytes - memory.allocated_bytes

    def largest_new_segment_bytes(self, needed_bytes: int) -> int:
        """Size of a segment for large tensors: what is left next to as many segments of small blocks as there
        were at most, or more, where it fits, as some kernel needs so many bytes."""
        self.measure()
        memory = self._driver.memory()
        left_bytes = self.limit_bytes - memory.reserved_bytes
        later_bytes = self.small_bytes - memory.small_bytes + SPARE_BYTES
        size_bytes = align_down(left_bytes - later_bytes, SMALL_SEGMENT_BYTES)
        least_bytes = one_segment_bytes(needed_bytes)
        return max(size_bytes, least_bytes) if least_bytes <= left_bytes else size_bytes

    def budget_for(self, size_bytes: int, used_bytes: int) -> int:
        """A budget in which tensors of ``size_bytes`` in total fit beside large ones of ``used_bytes``, which
        may move, and what cannot leave."""
        self._driver.empty_cache()  # what stays reserved is in segments that hold tensors
        memory = self._driver.memory()
        small_bytes, large_bytes = memory.small_bytes - self.foreign_bytes, used_bytes
        if (others_bytes := memory.large_bytes - used_bytes) > 0:  # they may lie anywhere in their segments
            small_bytes += others_bytes + LARGE_SEGMENT_BYTES
        if size_bytes <= LARGEST_SMALL_BYTES:
            small_bytes += SMALL_SEGMENT_BYTES
        else:
            large_bytes += align_up(size_bytes, ROUND_BYTES)
        return budget_of(large_bytes, max(small_bytes, 0))
