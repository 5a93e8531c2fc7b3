"""Whether the device addresses of a plan are free when its tensors take them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from penstock.core.plan import Evict, Plan, Recompute
from penstock.core.trace import Trace
from penstock.units import format_bytes


def residencies(
    trace: Trace, evictions: Sequence[Evict], recomputations: Sequence[Recompute]
) -> list[tuple[int, int, int]]:
    """(first kernel, kernel after the last, tensor) of each time that a tensor is on the device, within
    one iteration, if every copy took no time. What comes back compressed is there from its end on."""
    count = trace.kernels
    away: dict[int, list[tuple[int, int]]] = {}
    intervals = [
        (entry.tensor, entry.begin, entry.prefetch_at if entry.codec == "raw" else entry.end)
        for entry in evictions
    ]
    intervals += [(entry.tensor, entry.begin, entry.end) for entry in recomputations]
    for tensor, begin, end in intervals:
        away.setdefault(tensor, []).append((begin, min(end, count)))
        if end > count:
            away[tensor].append((0, end - count))
    found = []
    births, deaths = trace.tensor_birth.tolist(), trace.tensor_death.tolist()
    for tensor, (birth, death) in enumerate(zip(births, deaths, strict=True)):
        since = birth
        for begin, end in sorted(away.get(tensor, ())):
            if since < begin:
                found.append((since, begin, tensor))
            since = max(since, end)
        if since < death:
            found.append((since, death, tensor))
    return sorted(found)


def check_offsets(
    trace: Trace, plan: Plan, evictions: Sequence[Evict], recomputations: Sequence[Recompute]
) -> Iterator[str]:
    """Every tensor has an address while it is there, within the budget, and no other tensor has it."""
    if len(plan.offsets) != trace.tensors:
        yield f"the plan gives addresses to {len(plan.offsets)} tensors: the trace has {trace.tensors}"
        return
    size, budget = trace.tensor_bytes.tolist(), plan.device_budget_bytes
    needed = [entry for entry in residencies(trace, evictions, recomputations) if size[entry[2]] > 0]
    sound = []
    for tensor in sorted({tensor for _, _, tensor in needed}):
        offset = plan.offsets[tensor]
        if offset < 0:
            yield f"tensor {tensor} is on the device, but has the address {offset}"
        elif offset + size[tensor] > budget:
            yield (
                f"tensor {tensor} lies at bytes [{offset}, {offset + size[tensor]}), beyond the budget of "
                f"{format_bytes(budget)}"
            )
        else:
            sound.append(tensor)
    yield from _overlaps(trace, plan, needed, set(sound))


def _overlaps(
    trace: Trace, plan: Plan, needed: Sequence[tuple[int, int, int]], sound: set[int]
) -> Iterator[str]:
    size, offsets = trace.tensor_bytes.tolist(), plan.offsets
    starts: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for begin, end, tensor in needed:
        if tensor in sound:
            starts.setdefault(begin, []).append(tensor)
            ends.setdefault(end, []).append(tensor)
    there: list[tuple[int, int]] = []  # (address, tensor), ascending; they do not overlap
    told: set[tuple[int, int]] = set()
    for kernel in sorted({*starts, *ends}):
        for tensor in ends.get(kernel, ()):
            place = bisect_left(there, (offsets[tensor], tensor))
            if place < len(there) and there[place] == (offsets[tensor], tensor):
                del there[place]
        for tensor in starts.get(kernel, ()):
            offset = offsets[tensor]
            place = bisect_left(there, (offset, tensor))
            other = None
            if place < len(there) and there[place][0] < offset + size[tensor]:
                other = there[place][1]
            elif place and there[place - 1][0] + size[there[place - 1][1]] > offset:
                other = there[place - 1][1]
            if other is None:
                insort(there, (offset, tensor))
            elif (pair := (min(tensor, other), max(tensor, other))) not in told:
                told.add(pair)
                yield (
                    f"tensors {pair[0]} and {pair[1]} overlap in device memory at kernel {kernel} "
                    f"`{trace.kernel_name[kernel]}`: bytes [{offsets[pair[0]]}, "
                    f"{offsets[pair[0]] + size[pair[0]]}) and [{offsets[pair[1]]}, "
                    f"{offsets[pair[1]] + size[pair[1]]})"
                )
