"""A plan as a list of typed actions for each kernel. Pure.

The plan's kernels are the clock's kernels: nothing is translated.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from penstock.core.columns import IntArray, Lists
from penstock.core.memory_profile import kernels_as_run, leaves_for_good
from penstock.core.plan import Plan
from penstock.core.trace import Trace
from penstock.runtime.collectives import collective_kernels
from penstock.runtime.storages import NEVER

# Smaller ones need no memory in one piece: allocators have segments of their own for them.
LARGEST_SMALL_BYTES = 1 << 20


class EvictAction(NamedTuple):
    """Start to copy the tensor to the tier; it stays readable.

    codec          in which it is compressed first, and its memory given back as soon as that is done;
                   "raw": it is not
    packs          bytes of an element, for that; else 0
    packed_bytes   that it is expected to take then
    writes         what was compressed; else it stays on the device
    """

    tensor: int
    tier: str
    codec: str = "raw"
    packs: int = 0
    packed_bytes: int = 0
    writes: bool = True


class ReleaseAction(NamedTuple):
    """Give the tensor's memory back as soon as its copy is complete."""

    tensor: int


class PrefetchAction(NamedTuple):
    """Bring the tensor back as soon as there is room.

    keeps_copy   it leaves again before it is written: its copy is worth keeping valid
    """

    tensor: int
    keeps_copy: bool = True


class KeepRecipeAction(NamedTuple):
    """Keep what it takes to run the kernel again: what it makes is dropped later."""


class DropAction(NamedTuple):
    """Give the tensor's memory back: it is recomputed before it is needed again."""

    tensor: int


class RecomputeAction(NamedTuple):
    """Run the kernel again that made the tensor."""

    tensor: int


Action = EvictAction | ReleaseAction | PrefetchAction | KeepRecipeAction | DropAction | RecomputeAction


@dataclass(frozen=True)
class Schedule:
    """What to do before each kernel of an iteration of K kernels and T tensors.

    names           [K] operators, by which it is known that the step is the one that was traced
    known           [K] how many tensors have been touched when the kernel has run
    before          [K] actions, in order
    away_at_start   tensors that are away when the iteration begins, and the tier they are on
    begins_s        [K] seconds of the step before it, where all kernels wait alike
    needs_bytes     [K] bytes that the kernel takes beyond what is there: its outputs and workspace
    pieces          [K] sizes of the larger ones of these, the largest first: each takes memory in one piece
    uses            [T] kernels that use the tensor, ascending
    persistent      [T] the tensor is there again in the next iteration
    tensor_bytes    [T] sizes in the trace
    is_still        it is planned, and nothing moves
    has_collectives some kernels are collectives
    budget_bytes    of the device, that it keeps to; 0 where nothing is planned
    variants        [K] names of what kernels run as, "" as traced; empty where all do
    """

    names: tuple[str, ...]
    known: tuple[int, ...]
    before: tuple[tuple[Action, ...], ...]
    away_at_start: tuple[tuple[int, str], ...]
    begins_s: tuple[float, ...]
    needs_bytes: tuple[int, ...]
    pieces: tuple[tuple[int, ...], ...]
    uses: tuple[tuple[int, ...], ...]
    persistent: tuple[bool, ...]
    tensor_bytes: tuple[int, ...]
    is_still: bool = False
    has_collectives: bool = False
    variants: tuple[str, ...] = ()
    budget_bytes: int = 0

    @property
    def kernels(self) -> int:
        return len(self.names)

    def next_use(self, tensor: int, kernel: int) -> int:
        """The first kernel from ``kernel`` on that uses the tensor; NEVER where none does."""
        if not 0 <= tensor < len(self.uses):
            return NEVER
        uses = self.uses[tensor]
        position = bisect_left(uses, kernel)
        if position < len(uses):
            return uses[position]
        return uses[0] + self.kernels if uses and self.persistent[tensor] else NEVER


def schedule(trace: Trace, plan: Plan, host_bytes: int = 0) -> Schedule:
    """What a plan for this trace asks of the runtime.

    host_bytes   of the host tier
    """
    trace = trace.with_lossy(plan.lossy)
    count = trace.kernels
    before: list[list[Action]] = [[] for _ in range(count)]
    away: list[tuple[int, str]] = []
    times = Counter(evict.tensor for evict in plan.evictions)
    for evict in sorted(plan.evictions, key=lambda evict: (evict.after, evict.begin)):
        if evict.codec == "raw" and evict.prefetch_at <= evict.begin and times[evict.tensor] == 1:
            continue  # asked back when it begins to be away, it stays, and nothing needs a copy
        start = min(evict.after + 1, evict.begin)
        action = EvictAction(evict.tensor, evict.tier)
        if evict.codec != "raw":
            itemsize = min(int(trace.tensor_itemsize[evict.tensor]), 8)
            packed_bytes = trace.compressed_bytes(evict.tensor)
            writes = evict.prefetch_at > evict.begin
            action = EvictAction(evict.tensor, evict.tier, evict.codec, itemsize, packed_bytes, writes)
        before[start % count].append(action)
    # What is asked back when it begins to be away is only written, and stays, with a copy from then on; or
    # only compressed, and stays so.
    leaving = [evict for evict in plan.evictions if evict.prefetch_at > evict.begin]
    for evict in sorted(leaving, key=lambda evict: evict.begin):
        before[evict.begin % count].append(ReleaseAction(evict.tensor))
        if evict.end >= count and evict.prefetch_at >= count:
            away.append((evict.tensor, evict.tier))
    begins: dict[int, list[int]] = {}
    for evict in plan.evictions:
        begins.setdefault(evict.tensor, []).append(evict.begin)
    for last in leaves_for_good(trace, plan, host_bytes):
        before[last.begin] += [EvictAction(last.tensor, last.tier), ReleaseAction(last.tensor)]
        begins.setdefault(last.tensor, []).append(last.begin)
    for evict in sorted(leaving, key=lambda evict: (evict.prefetch_at, evict.end)):
        keeps_copy = _leaves_unwritten(trace, evict.tensor, evict.end, begins[evict.tensor])
        before[evict.prefetch_at % count].append(PrefetchAction(evict.tensor, keeps_copy))
    for producer in sorted({int(trace.tensor_recompute[entry.tensor]) for entry in plan.recomputations}):
        before[producer].append(KeepRecipeAction())
    for entry in plan.recomputations:
        before[entry.begin % count].append(DropAction(entry.tensor))
    for entry in plan.recomputations:
        before[entry.end % count].append(RecomputeAction(entry.tensor))
    _, workspace = kernels_as_run(trace, plan.variants)
    made = unplanned(replace(trace, kernel_workspace_bytes=workspace), before, away)
    variants = tuple(
        trace.kernel_variants[kernel][variant].name if variant >= 0 else ""
        for kernel, variant in enumerate(plan.variants)
    )
    longer = max(plan.predicted_step_s / trace.ideal_s, 1.0) if trace.ideal_s > 0 else 1.0
    is_still = not made.away_at_start and not any(made.before) and not any(variants)
    return replace(
        made,
        is_still=is_still,
        has_collectives=bool(collective_kernels(trace).any()),
        begins_s=tuple(longer * begin_s for begin_s in made.begins_s),
        variants=variants if any(variants) else (),
        budget_bytes=plan.device_budget_bytes,
    )


def _leaves_unwritten(trace: Trace, tensor: int, kernel: int, begins: Sequence[int]) -> bool:
    """Whether the tensor, which is back for ``kernel``, leaves again with no kernel having written to it."""
    count = trace.kernels
    later = [begin for begin in begins if begin > kernel]
    if trace.tensor_persistent[tensor]:
        later += [begin + count for begin in begins]
    following = min((begin for begin in later if begin > kernel), default=None)
    if following is None:
        return False
    writers = trace.writers[tensor].tolist()
    return not any(
        kernel <= writer + turn < following for writer in writers for turn in (0, count, 2 * count)
    )


def unplanned(
    trace: Trace, before: Sequence[Sequence[Action]] = (), away: Sequence[tuple[int, str]] = ()
) -> Schedule:
    """What is known of an iteration for which nothing is planned, or the actions given."""
    count = trace.kernels
    born = np.zeros(count, dtype=np.int64)
    made, maker = _entries(trace.outputs)
    read, reader = _entries(trace.inputs)
    # What was there before, and dies, has birth 0 too: its first kernel reads it, or is a later one.
    fresh = ~trace.tensor_persistent[made] & (trace.tensor_birth[made] == maker)
    fresh &= ~np.isin(maker * trace.tensors + made, reader * trace.tensors + read)
    np.add.at(born, maker[fresh], trace.tensor_bytes[made[fresh]])
    pieces: list[list[int]] = [[] for _ in range(count)]
    made_bytes = trace.tensor_bytes[made[fresh]]
    makers = [*zip(maker[fresh].tolist(), made_bytes.tolist(), strict=True)]
    for kernel, size_bytes in (*makers, *enumerate(trace.kernel_workspace_bytes.tolist())):
        if size_bytes > LARGEST_SMALL_BYTES:
            pieces[kernel].append(size_bytes)
    first = np.full(trace.tensors, count, dtype=np.int64)
    uses = trace.uses
    used = np.flatnonzero(np.diff(uses.starts) > 0)
    first[used] = uses.values[uses.starts[used]]
    known = np.searchsorted(np.sort(first), np.arange(count), side="right")
    return Schedule(
        names=trace.kernel_name,
        known=tuple(known.tolist()),
        before=tuple(tuple(actions) for actions in before) or ((),) * count,
        away_at_start=tuple(away),
        begins_s=tuple((np.cumsum(trace.kernel_time_s) - trace.kernel_time_s).tolist()),
        needs_bytes=tuple((born + trace.kernel_workspace_bytes).tolist()),
        pieces=tuple(tuple(sorted(sizes, reverse=True)) for sizes in pieces),
        uses=tuple(tuple(uses[tensor].tolist()) for tensor in range(trace.tensors)),
        persistent=tuple(trace.tensor_persistent.tolist()),
        tensor_bytes=tuple(trace.tensor_bytes.tolist()),
    )


def _entries(lists: Lists) -> tuple[IntArray, IntArray]:
    """The tensors of all kernels, and the kernel of each."""
    return lists.values, np.repeat(np.arange(len(lists.starts) - 1), np.diff(lists.starts))
