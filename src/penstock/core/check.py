"""The plan checker: every rule a plan breaks, each in one sentence. Planners never call it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from penstock.core.arguments import require_types
from penstock.core.columns import KINDS
from penstock.core.hardware import Hardware
from penstock.core.memory_profile import (
    EVERY,
    FIRST,
    copies_made,
    covered,
    resident_bytes,
    rows_of,
    tier_bytes,
    written,
)
from penstock.core.plan import CODECS, Evict, Plan, Recompute
from penstock.core.trace import InactivePeriod, Trace, within_budget
from penstock.errors import InvalidArgument
from penstock.options import LOSSY
from penstock.units import format_bytes, format_bytes_up

EVICTION_TIERS = ("host", "disk")


def check(trace: Trace, plan: Plan, hardware: Hardware) -> list[str]:
    """Every rule that ``plan`` breaks; empty when it is legal.

    Memory is checked as if every copy took no time. A legal plan can then always run within its
    budget, however slow the links are: a step that waits for memory always waits for a
    copy in progress.
    Entries that are invalid by themselves are excluded from the memory totals. Under a budget that does
    not hold everything, what no kernel reads again is taken to have left (see `Trace.released`).
    """
    require_types(trace=trace, plan=plan, hardware=hardware)
    trace = within_budget(trace, plan.device_budget_bytes, plan.lossy)
    periods: dict[int, list[InactivePeriod]] = {}
    for period in trace.inactive_periods:
        periods.setdefault(period.tensor, []).append(period)

    violations: list[str] = []
    unreachable = _unreachable(plan.evictions, hardware)
    evictions: list[Evict] = []
    recomputations: list[Recompute] = []
    for evict in plan.evictions:
        broken = list(_eviction(trace, evict, periods.get(evict.tensor, ()), unreachable))
        violations += broken
        evictions += [] if broken else [evict]
    for entry in plan.recomputations:
        broken = list(_recomputation(trace, entry, periods.get(entry.tensor, ())))
        violations += broken
        recomputations += [] if broken else [entry]
    violations += _order(trace, evictions, recomputations)
    violations += _inputs(trace, evictions, recomputations)
    broken = list(_variants(trace, plan.variants))
    violations += broken
    variants = () if broken else plan.variants
    violations += _device(trace, evictions, recomputations, variants, plan, hardware)
    violations += _tiers(trace, evictions, hardware)
    return violations


def _unreachable(evictions: Iterable[Evict], hardware: Hardware) -> dict[str, str]:
    """Why a tier cannot take copies, by its name; nothing for those that can."""
    reasons = {}
    for tier in dict.fromkeys(evict.tier for evict in evictions):
        if tier not in EVICTION_TIERS:
            reasons[tier] = f"goes to the tier {tier!r}: tiers are {', '.join(EVICTION_TIERS)}"
        elif hardware.capacity_bytes(tier) <= 0:
            reasons[tier] = f"goes to {tier}, which has no capacity: give {tier}_bytes above 0"
        else:
            try:
                hardware.evict_s(tier, 1)
                hardware.prefetch_s(tier, 1)
            except InvalidArgument as error:
                reasons[tier] = f"cannot reach {tier}: {error}"
    return reasons


def _eviction(
    trace: Trace, evict: Evict, periods: Sequence[InactivePeriod], unreachable: dict[str, str]
) -> Iterator[str]:
    """The rules an eviction obeys by itself."""
    tensor, begin, end = evict.tensor, evict.begin, evict.end
    if not 0 <= tensor < trace.tensors:
        yield f"tensor {tensor} is evicted, but the trace has {trace.tensors} tensors"
        return
    if evict.codec not in CODECS:
        yield f"{_who(evict)} uses the codec {evict.codec!r}: codecs are {', '.join(CODECS)}"
    elif evict.codec != "raw" and evict.codec != trace.codec(tensor):
        why = f"in this plan, what is compressed of this tensor is {trace.codec(tensor)}"
        if evict.codec in LOSSY and evict.codec == trace.lossy:
            why = "it is lossy, and only float32 activations that backward alone reads again may be rounded"
        yield f"{_who(evict)} uses the codec {evict.codec!r}: {why}"
    elif evict.codec != "raw" and trace.compressed_bytes(tensor) >= trace.tensor_bytes[tensor]:
        yield f"{_who(evict)} uses the codec {evict.codec!r}, which does not make the tensor smaller"
    if evict.tier in unreachable:
        yield f"{_who(evict)} {unreachable[evict.tier]}"
    period = _period(trace, periods, begin, end)
    if period is None:
        yield f"{_who(evict)} is outside the tensor's inactive periods: {_allowed(trace, evict, periods)}"
        return
    if not period.ready <= evict.after < begin:
        yield (
            f"{_who(evict)} starts its copy after kernel {evict.after}: it must be at or after kernel "
            f"{period.ready}, when the tensor is complete, and before kernel {begin}"
        )
    elif evict.codec in LOSSY and not trace.saves_for_backward(np.array(period.begin), np.array(period.end)):
        yield (
            f"{_who(evict)} uses the codec {evict.codec!r}, which is lossy: only what backward alone reads "
            "again may be rounded"
        )
    elif evict.codec != "raw" and evict.after != begin - 1:
        yield (
            f"{_who(evict)} starts its copy after kernel {evict.after}: what is compressed is so before "
            f"kernel {begin}, and its copy starts after kernel {begin - 1}"
        )
    if not begin <= evict.prefetch_at <= end:
        yield (
            f"{_who(evict)} is prefetched at kernel {evict.prefetch_at}: it must be at or after kernel "
            f"{begin} and no later than kernel {end}, which needs it"
        )


def _recomputation(trace: Trace, entry: Recompute, periods: Sequence[InactivePeriod]) -> Iterator[str]:
    """The rules a recomputation obeys by itself."""
    if not 0 <= entry.tensor < trace.tensors:
        yield f"tensor {entry.tensor} is recomputed, but the trace has {trace.tensors} tensors"
        return
    producer = int(trace.tensor_recompute[entry.tensor]) if len(trace.tensor_recompute) else -1
    if producer < 0:
        yield f"{_who(entry)}: no kernel can recompute the tensor"
    elif entry.begin <= producer:
        yield f"{_who(entry)} begins before {_kernel(trace, producer)} has made the tensor"
    if _period(trace, periods, entry.begin, entry.end) is None:
        yield f"{_who(entry)} is outside the tensor's inactive periods: {_allowed(trace, entry, periods)}"


def _period(trace: Trace, periods: Iterable[InactivePeriod], begin: int, end: int) -> InactivePeriod | None:
    """The inactive period that kernels ``[begin, end)`` lie in."""
    for period in periods:
        if period.begin <= begin < end <= period.end and begin <= trace.kernels:
            return period
    return None


def _allowed(trace: Trace, interval: Evict | Recompute, periods: Iterable[InactivePeriod]) -> str:
    if not trace.movable[interval.tensor]:
        kind = KINDS[trace.tensor_kind[interval.tensor]].replace("_", " ")
        return f"it is a tensor that stays on the device (kind: {kind})"
    return ", ".join(f"[{period.begin}, {period.end})" for period in periods) or "never"


def _order(trace: Trace, evictions: Sequence[Evict], recomputations: Sequence[Recompute]) -> Iterator[str]:
    """One tensor's eviction intervals follow each other, and each copy finds the tensor on the device."""
    count = trace.kernels
    made = dict(zip(map(id, evictions), copies_made(trace, evictions), strict=True))
    by_tensor: dict[int, list[Evict | Recompute]] = {}
    intervals: list[Evict | Recompute] = [*evictions, *recomputations]
    for interval in intervals:
        by_tensor.setdefault(interval.tensor, []).append(interval)
    for group in by_tensor.values():
        group.sort(key=lambda interval: interval.begin)
        earlier, shift = group[-1], count  # of the iteration before
        for later in group:
            end = earlier.end - shift
            if later.begin < end:
                yield f"{_who(later)} begins before the one during kernels {_span(earlier)} has ended"
            elif isinstance(later, Evict) and later.after < end and earlier.end >= shift:
                # Before the very first iteration, only what is still away after its end has left.
                left = shift == 0 or isinstance(earlier, Recompute) or earlier.prefetch_at >= count
                if made[id(later)] == EVERY or (made[id(later)] == FIRST and left):
                    yield (
                        f"{_who(later)} is copied after kernel {later.after}, "
                        f"when the tensor may be away until kernel {end}"
                    )
            earlier, shift = later, 0


def _inputs(trace: Trace, evictions: Sequence[Evict], recomputations: Sequence[Recompute]) -> Iterator[str]:
    """What a kernel reads when it runs again is on the device, and is what it read the first time."""
    if not recomputations:
        return
    count = trace.kernels
    columns = [(entry.tensor, entry.begin, entry.end) for entry in recomputations]
    recomputed = np.array(columns, dtype=np.int64)
    producer, end = trace.tensor_recompute[recomputed[:, 0]], recomputed[:, 2]
    row, tensor = trace.inputs.select(producer)

    lasting, end = trace.tensor_persistent[tensor], end[row]
    dead = (end < trace.tensor_birth[tensor]) | (trace.tensor_death[tensor] <= end)
    dead &= ~lasting
    stale = written(trace, tensor, producer[row], np.minimum(end, count))
    stale |= written(trace, tensor, np.full(len(row), -1), end - count)

    rows = rows_of(trace, evictions)
    gone, begin, back = (
        np.concatenate([column, recomputed[:, index]])
        for index, column in enumerate((rows.tensor, rows.begin, rows.end))
    )
    away = covered(count, gone, begin, back, tensor, end % count)
    # A parent that is recomputed for the same kernel is made first.
    due: dict[tuple[int, int], int] = {}
    for index, (made, _, at) in enumerate(recomputed.tolist()):
        due.setdefault((made, at % count), index)
    late = np.array(
        [
            due.get((parent, at), -1) > index
            for parent, at, index in zip(tensor.tolist(), (end % count).tolist(), row.tolist(), strict=True)
        ],
        dtype=np.bool_,
    )
    for wrong, words in (
        (dead, "is not alive then"),
        (stale, "has been written since"),
        (away & ~dead, "is away then"),
        (late, "is recomputed for the same kernel, but later"),
    ):
        for index in np.flatnonzero(wrong).tolist():
            entry = recomputations[int(row[index])]
            again = _kernel(trace, int(producer[row[index]]))
            yield (
                f"{_who(entry)} runs {again} again before kernel {entry.end}: its input, tensor "
                f"{tensor[index]}, {words}"
            )


def _variants(trace: Trace, variants: Sequence[int]) -> Iterator[str]:
    if variants and len(variants) != trace.kernels:
        yield f"the plan chooses variants of {len(variants)} kernels: the trace has {trace.kernels}"
        return
    for kernel, variant in enumerate(variants):
        there = len(trace.kernel_variants[kernel]) if trace.kernel_variants else 0
        if not -1 <= variant < there:
            yield f"{_kernel(trace, kernel)} runs as variant {variant}: it has {there} of them"


def _device(
    trace: Trace,
    evictions: Sequence[Evict],
    recomputations: Sequence[Recompute],
    variants: Sequence[int],
    plan: Plan,
    hardware: Hardware,
) -> Iterator[str]:
    budget = plan.device_budget_bytes
    if budget > hardware.device_bytes:
        yield (
            f"the plan's device budget of {format_bytes(budget)} exceeds the device, "
            f"which has {format_bytes(hardware.device_bytes)}"
        )
    if trace.kernels == 0:
        return
    resident = resident_bytes(trace, evictions, recomputations, variants)
    over = int((resident > budget).sum())
    if over:
        worst = int(resident.argmax())
        yield (
            f"{_kernel(trace, worst)} needs {format_bytes_up(int(resident[worst]))} on the device with every "
            f"eviction complete, above the budget of {format_bytes(budget)}{_others(over)}"
        )


def _tiers(trace: Trace, evictions: Sequence[Evict], hardware: Hardware) -> Iterator[str]:
    for tier, occupied in tier_bytes(trace, evictions).items():
        capacity = hardware.capacity_bytes(tier)
        over = int((occupied > capacity).sum())
        if over:
            worst = int(occupied.argmax())
            yield (
                f"{tier} has to hold {format_bytes_up(int(occupied[worst]))} during {_kernel(trace, worst)}, "
                f"above its capacity of {format_bytes(capacity)}{_others(over)}"
            )


def _who(interval: Evict | Recompute) -> str:
    what = "eviction" if isinstance(interval, Evict) else "recomputation"
    return f"the {what} of tensor {interval.tensor} during kernels {_span(interval)}"


def _span(interval: Evict | Recompute) -> str:
    return f"[{interval.begin}, {interval.end})"


def _kernel(trace: Trace, index: int) -> str:
    return f"kernel {index} `{trace.kernel_name[index]}`"


def _others(count: int) -> str:
    return f"; it is the worst of {count} such kernels" if count > 1 else ""
