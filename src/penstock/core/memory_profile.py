"""How many bytes each kernel needs on the device and on the tiers, if every copy took no time.

Periods may wrap: kernel K + k is kernel k of the next iteration, which is like this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from penstock.core.columns import KINDS, BoolArray, FloatArray, IntArray, sum_over
from penstock.core.plan import Evict, Plan, Recompute
from penstock.core.trace import Trace, within_budget

NEVER, FIRST, EVERY = range(3)  # iterations in which an eviction writes a copy


class EvictionColumns(NamedTuple):
    """Evictions as columns, [E] each. `kind` numbers the pairs of tier and codec; `moved_bytes` is what
    the links and the tier carry."""

    tensor: IntArray
    after: IntArray
    begin: IntArray
    end: IntArray
    prefetch_at: IntArray
    kind: IntArray
    compressed: BoolArray
    moved_bytes: IntArray


def rows_of(trace: Trace, evictions: Sequence[Evict]) -> EvictionColumns:
    kinds: dict[tuple[str, str], int] = {}
    rows = [(e.tensor, e.after, e.begin, e.end, e.prefetch_at) for e in evictions]
    tensor, after, begin, end, prefetch_at = np.array(rows, dtype=np.int64).reshape(-1, 5).T
    number = [kinds.setdefault((evict.tier, evict.codec), len(kinds)) for evict in evictions]
    compressed = np.array([evict.codec != "raw" for evict in evictions], dtype=np.bool_)
    moved = np.where(compressed, trace.packed_bytes[tensor], trace.tensor_bytes[tensor])
    kind = np.array(number, dtype=np.int64)
    return EvictionColumns(tensor, after, begin, end, prefetch_at, kind, compressed, moved)


def held_bytes(trace: Trace) -> IntArray:
    """[K] device bytes that no plan can do without while each kernel runs, its workspace apart: its own
    tensors, and those it does not use but that cannot leave. What no kernel reads again has left."""
    trace = trace.released
    live, periods = trace.live_bytes - trace.kernel_workspace_bytes, trace.periods
    return live - spread(trace.kernels, periods.begin, periods.end, periods.size_bytes)


def required_bytes(trace: Trace) -> IntArray:
    """[K] device bytes that each kernel cannot do without: `held_bytes`, and the least workspace of its
    variants."""
    return held_bytes(trace) + least_workspace_bytes(trace)


def minimum_bytes(trace: Trace) -> int:
    """The smallest device budget at which the step can run, for the batch at hand: moDNN's equation 7, but
    that tensors which outlive the step may leave too. Bytes of tensors and workspace: what an allocator takes
    beside them, such as whole segments on an accelerator, is not in it."""
    floor = 0 if trace.kernels else trace.persistent_bytes
    return int(required_bytes(trace).max(initial=floor))


def tightest_kernel(trace: Trace) -> int:
    """The first kernel that needs `minimum_bytes`. The trace has at least one kernel."""
    return int(required_bytes(trace).argmax())


def needs(trace: Trace, kernel: int) -> dict[str, int]:
    """What `required_bytes` of a kernel is made of: bytes of the tensors that it uses, by kind, of those that
    cannot leave, and of its workspace."""
    used = np.union1d(trace.inputs[kernel], trace.outputs[kernel])
    found = {
        kind.replace("_", " "): int(trace.tensor_bytes[used][trace.tensor_kind[used] == number].sum())
        for number, kind in enumerate(KINDS)
        if kind != "workspace"
    }
    found["what cannot leave"] = int(held_bytes(trace)[kernel]) - sum(found.values())
    return found | {"workspace": int(least_workspace_bytes(trace)[kernel])}


def least_workspace_bytes(trace: Trace) -> IntArray:
    """[K] workspace of each kernel in the variant that needs the least."""
    least: IntArray = trace.kernel_workspace_bytes.copy()
    for kernel, variants in enumerate(trace.kernel_variants):
        least[kernel] = min([least[kernel], *(variant.workspace_bytes for variant in variants)])
    return least


def kernels_as_run(trace: Trace, variants: Sequence[int] = ()) -> tuple[FloatArray, IntArray]:
    """[K] time and [K] workspace of each kernel, in the variant that runs: -1 for the kernel as traced."""
    if not any(variant >= 0 for variant in variants):
        return trace.kernel_time_s, trace.kernel_workspace_bytes
    time_s, workspace = trace.kernel_time_s.copy(), trace.kernel_workspace_bytes.copy()
    for kernel, variant in enumerate(variants):
        if variant >= 0:
            _, time_s[kernel], workspace[kernel] = trace.kernel_variants[kernel][variant]
    return time_s, workspace


def resident_bytes(
    trace: Trace,
    evictions: Iterable[Evict],
    recomputations: Iterable[Recompute] = (),
    variants: Sequence[int] = (),
) -> IntArray:
    """[K] most device bytes while each kernel runs, or is being prepared, if every copy took no time.

    An evicted tensor is away during kernels ``[begin, prefetch_at)``, one that is recomputed during
    ``[begin, end)``. What comes back compressed takes its compressed bytes until kernel `end` has
    finished, and all of its bytes from kernel `end` on. Preparing a kernel comes before its outputs
    and its workspace take memory: first what begins to be away is compressed, with all of it and the
    largest compressed copy present; then tensors are recomputed one after the other, each with the
    workspace of the kernel that makes it and with those of its other outputs that are not there.
    """
    count = trace.kernels
    evicted = rows_of(trace, tuple(evictions))
    recomputed = np.array(
        [(entry.tensor, entry.begin, entry.end) for entry in recomputations], dtype=np.int64
    ).reshape(-1, 3)
    _, workspace = kernels_as_run(trace, variants)
    size = trace.tensor_bytes
    held = trace.live_bytes - trace.kernel_workspace_bytes
    held = held - spread(count, evicted.begin, evicted.prefetch_at, size[evicted.tensor])
    held -= spread(count, recomputed[:, 1], recomputed[:, 2], size[recomputed[:, 0]])
    csr = np.flatnonzero(evicted.compressed)
    begin, end, packed = evicted.begin[csr], evicted.end[csr], evicted.moved_bytes[csr]
    whole = size[evicted.tensor[csr]]
    held -= spread(count, evicted.prefetch_at[csr], end, whole - packed)
    held += spread(count, end, end + 1, packed)

    needed: IntArray = held + workspace
    if count == 0 or not (len(csr) or len(recomputed)):
        return needed
    before = held.copy()
    made = np.flatnonzero(~trace.tensor_persistent & (trace.tensor_birth < trace.tensor_death))
    np.subtract.at(before, trace.tensor_birth[made], size[made])
    if len(csr):
        leaving, largest = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
        np.add.at(leaving, begin % count, whole)
        np.maximum.at(largest, begin % count, packed)
        needed = np.maximum(needed, before + leaving + largest)
    if len(recomputed):
        most = np.zeros(count, dtype=np.int64)
        made_by = trace.tensor_recompute[recomputed[:, 0]]
        extra = workspace[made_by] + _transient_bytes(trace, evicted, recomputed)
        np.maximum.at(most, recomputed[:, 2] % count, extra)
        needed = np.maximum(needed, before + most)
    return needed


class Kept(NamedTuple):
    """What the program keeps beyond its last use, [N] each: it is of no use from kernel `begin` on, and given
    up before kernel `end`. What is of no use first comes first."""

    tensor: IntArray
    begin: IntArray
    end: IntArray


def kept_unused(trace: Trace) -> Kept:
    """The tensors that `Trace.released` counts as gone while the program keeps them."""
    useless = trace.released.tensor_death
    death = np.minimum(trace.tensor_death, trace.kernels)
    kept = np.flatnonzero((useless < death) & ~trace.tensor_persistent)
    kept = kept[np.argsort(useless[kept], kind="stable")]
    return Kept(kept, useless[kept], death[kept])


def leaves_for_good(trace: Trace, plan: Plan, host_bytes: int = 0, *, has_disk: bool = True) -> list[Evict]:
    """What no kernel uses again while the program keeps it, where the budget has no room for it: evictions
    that end where they begin, before the kernel from which on it is away. What has been of no use for
    longest leaves first. It goes to the tier where it has been before, else to the host while the plan leaves
    room there, or where there is no disk, else to the disk.

    Plans count all such tensors as gone (`Trace.released`). A run, and the simulator, write these, and keep
    the others. csrc/planning/memory.cpp has the same rule for the search of `optimal`.

    host_bytes   of the host tier
    """
    if trace.peak_bytes <= plan.device_budget_bytes:
        return []
    kept = kept_unused(trace)
    needed = resident_bytes(trace.released, plan.evictions, plan.recomputations, plan.variants)
    needed += sum_over(trace.kernels, kept.begin, kept.end, trace.tensor_bytes[kept.tensor])
    tiers = {evict.tensor: evict.tier for evict in plan.evictions}
    on_host = tier_bytes(trace, plan.evictions).get("host", np.zeros(trace.kernels, dtype=np.int64))
    found = []
    for tensor, begin, end in zip(*(column.tolist() for column in kept), strict=True):
        size_bytes = int(trace.tensor_bytes[tensor])
        if int(needed[begin:end].max()) > plan.device_budget_bytes:
            needed[begin:end] -= size_bytes
            fits = int(on_host[begin:end].max()) + size_bytes <= host_bytes
            tier = tiers.get(tensor, "host" if fits or not has_disk else "disk")
            if tier == "host":
                on_host[begin:end] += size_bytes
            found.append(Evict(tensor, begin - 1, begin, begin, begin, tier))
    return found


def as_run(
    trace: Trace, plan: Plan, host_bytes: int = 0, *, has_disk: bool = True
) -> tuple[Trace, list[Evict]]:
    """The iteration as a run carries out the plan: what `leaves_for_good` is dead from then on. And that."""
    if plan.lossy is not None:
        trace = trace.with_lossy(plan.lossy)
    released = within_budget(trace, plan.device_budget_bytes)
    if released is trace:
        return trace, []
    gone = leaves_for_good(trace, plan, host_bytes, has_disk=has_disk)
    death = np.where(released.tensor_birth < released.tensor_death, trace.tensor_death, released.tensor_death)
    which = [evict.tensor for evict in gone]
    death[which] = released.tensor_death[which]
    return replace(released, tensor_death=death), gone


def tier_bytes(trace: Trace, evictions: Iterable[Evict]) -> dict[str, IntArray]:
    """By tier: [K] bytes occupied during each kernel.

    A copy occupies its tier from the first time it may start until the kernel has run that is the last
    end of the evictions that it serves: the copy back may take until it starts, and others may have come by
    then.
    """
    evictions = tuple(evictions)
    rows = rows_of(trace, evictions)
    start, until = rows.after + 1, rows.end + 1
    sources, late = _sources(trace, rows)
    np.maximum.at(until, sources, rows.end + 1 + trace.kernels * late)
    copies = np.flatnonzero(sources == np.arange(len(evictions)))
    tiers = np.array([evict.tier for evict in evictions])[copies]
    occupied: dict[str, IntArray] = {}
    for tier in dict.fromkeys(tiers.tolist()):
        chosen = copies[tiers == tier]
        occupied[tier] = spread(trace.kernels, start[chosen], until[chosen], rows.moved_bytes[chosen])
    return occupied


def copy_sources(trace: Trace, evictions: Sequence[Evict]) -> list[int]:
    """For each eviction, the index of the one whose copy serves it.

    That is its own index where the tensor has to be written, and an earlier eviction's where
    that one left a copy on the same tier, with the same codec, and no kernel has written the tensor
    since. Where the plan has tensors away over the end of the iteration, the earlier one may be of the
    iteration before; if no kernel ever writes the tensor, all go back to its last eviction.
    """
    sources: list[int] = _sources(trace, rows_of(trace, evictions))[0].tolist()
    return sources


def copies_made(trace: Trace, evictions: Sequence[Evict]) -> list[int]:
    """For each eviction, in which iterations it writes a copy: NEVER, in the FIRST only or in EVERY one.

    What is served by the iteration before has no copy to serve it in the first, unless that copy is of a
    tensor that starts out away.
    """
    rows = rows_of(trace, evictions)
    sources, late = _sources(trace, rows)
    order = np.lexsort((rows.begin, rows.kind, rows.tensor))
    first = np.zeros(len(sources), dtype=np.bool_)
    first[order[_starts(rows, order)]] = True
    copied = rows.prefetch_at[sources] >= trace.kernels
    own = sources == np.arange(len(sources))
    made: list[int] = np.where(late, FIRST * (first & ~copied), EVERY * own).tolist()
    return made


def written(trace: Trace, tensor: IntArray, after: IntArray, before: IntArray) -> BoolArray:
    """[N] whether some kernel k writes the tensor, after < k < before."""
    found: BoolArray = trace.writers.last_below(tensor, before) > after
    return found


def spread(count: int, begin: IntArray, end: IntArray, value: IntArray) -> IntArray:
    """[count] sum of the values over kernels ``[begin, end)``, around the end of the iteration if need
    be, each at most once a kernel."""
    start = begin % max(count, 1)
    total = sum_over(2 * count, start, start + np.clip(end - begin, 0, count), value)
    return total[:count] + total[count:]


def _starts(rows: EvictionColumns, order: IntArray) -> BoolArray:
    """Where in ``order``, which goes by tensor and kind, another tensor or kind begins."""
    starts = np.ones(len(order), dtype=np.bool_)
    starts[1:] = (np.diff(rows.tensor[order]) != 0) | (np.diff(rows.kind[order]) != 0)
    return starts


def _sources(trace: Trace, rows: EvictionColumns) -> tuple[IntArray, BoolArray]:
    """[E] what `copy_sources` says, and whether that copy is one of the iteration before."""
    total = len(rows.tensor)
    if not total:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.bool_)
    order = np.lexsort((rows.begin, rows.kind, rows.tensor))
    tensor, after, begin = rows.tensor[order], rows.after[order], rows.begin[order]
    starts = _starts(rows, order)
    position = np.arange(total)
    group = np.cumsum(starts) - 1
    first = np.flatnonzero(starts)
    last = np.append(first[1:], total) - 1

    clean = ~starts
    follow = np.flatnonzero(clean)
    clean[follow] = ~written(trace, tensor[follow], after[follow - 1], begin[follow])
    if bool((rows.end >= trace.kernels).any()):
        again = trace.tensor_persistent[tensor[first]]
        again &= ~written(trace, tensor[first], after[last], np.full(len(first), trace.kernels))
        again &= ~written(trace, tensor[first], np.full(len(first), -1), begin[first])
        clean[first] = again

    root = np.maximum.accumulate(np.where(clean, -1, position))
    late = root < first[group]
    final = root[last]
    final = np.where(final < first, last, final)  # no kernel writes it
    root = np.where(late, final[group], root)
    sources, lates = np.empty(total, dtype=np.int64), np.zeros(total, dtype=np.bool_)
    sources[order], lates[order] = order[root], late
    return sources, lates


def _transient_bytes(trace: Trace, evicted: EvictionColumns, recomputed: IntArray) -> IntArray:
    """[R] bytes of the other outputs of the kernel that recomputes each tensor that are not there."""
    at = recomputed[:, 2] % trace.kernels
    row, tensor = trace.outputs.select(trace.tensor_recompute[recomputed[:, 0]])
    other = tensor != recomputed[row, 0]
    row, tensor, kernel = row[other], tensor[other], at[row[other]]
    there = (trace.tensor_birth[tensor] <= kernel) & (kernel < trace.tensor_death[tensor])
    # Away: raw until its prefetch, otherwise until its end.
    until = np.where(evicted.compressed, evicted.end, evicted.prefetch_at)
    gone, begin, end = (
        np.concatenate([column, recomputed[:, index]])
        for index, column in enumerate((evicted.tensor, evicted.begin, until))
    )
    there &= ~covered(trace.kernels, gone, begin, end, tensor, kernel)
    extra = np.zeros(len(recomputed), dtype=np.int64)
    np.add.at(extra, row[~there], trace.tensor_bytes[tensor[~there]])
    return extra


def covered(
    count: int, tensors: IntArray, begin: IntArray, end: IntArray, tensor: IntArray, kernel: IntArray
) -> BoolArray:
    """[N] whether one of the periods of ``tensor``, given as columns, covers ``kernel``."""
    order = np.argsort(tensors, kind="stable")
    low = np.searchsorted(tensors[order], tensor, side="left")
    high = np.searchsorted(tensors[order], tensor, side="right")
    found = np.zeros(len(tensor), dtype=np.bool_)
    for step in range(int((high - low).max(initial=0))):  # a tensor has few periods
        asked = np.flatnonzero(low + step < high)
        period = order[low[asked] + step]
        since = (kernel[asked] - begin[period]) % count
        found[asked] |= since < end[period] - begin[period]
    return found
