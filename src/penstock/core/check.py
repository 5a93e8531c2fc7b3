"""The judge: every rule a plan breaks, each in one sentence. Planners never call it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from penstock.core.hardware import Hardware
from penstock.core.plan import Evict, Plan
from penstock.core.pressure import copy_sources, resident_bytes, tier_bytes, writes
from penstock.core.trace import InactivePeriod, Trace
from penstock.errors import InvalidArgument
from penstock.units import format_bytes, format_bytes_up

EVICTION_TIERS = ("host", "disk")
CODECS = ("raw",)


def check(trace: Trace, plan: Plan, hardware: Hardware) -> list[str]:
    """Every rule that ``plan`` breaks; empty when it is legal.

    Memory is judged as if every copy took no time. A legal plan can then always run within its
    budget, however slow the links are: whoever waits for memory waits for a copy under way.
    Evictions that are wrong in themselves are left out of the sums.
    """
    periods: dict[int, list[InactivePeriod]] = {}
    for period in trace.inactive_periods:
        periods.setdefault(period.tensor, []).append(period)

    violations: list[str] = []
    sound: list[Evict] = []
    for evict in plan.evictions:
        broken = list(_eviction(trace, evict, periods.get(evict.tensor, []), hardware))
        violations += broken
        if not broken:
            sound.append(evict)
    violations += _order(trace, sound)
    violations += _device(trace, sound, plan, hardware)
    violations += _tiers(trace, sound, hardware)
    return violations


def _eviction(
    trace: Trace, evict: Evict, periods: Sequence[InactivePeriod], hardware: Hardware
) -> Iterator[str]:
    """The rules an eviction obeys by itself."""
    if not 0 <= evict.tensor < trace.tensors:
        yield f"tensor {evict.tensor} is evicted, but the trace has {trace.tensors} tensors"
        return
    who = _who(evict)
    if evict.codec not in CODECS:
        yield f"{who} uses the codec {evict.codec!r}: codecs are {', '.join(CODECS)}"
    if evict.tier not in EVICTION_TIERS:
        yield f"{who} goes to the tier {evict.tier!r}: tiers are {', '.join(EVICTION_TIERS)}"
    elif hardware.capacity_bytes(evict.tier) <= 0:
        yield f"{who} goes to {evict.tier}, which has no capacity: give {evict.tier}_bytes above 0"
    else:
        try:
            size_bytes = int(trace.tensor_bytes[evict.tensor])
            hardware.evict_s(evict.tier, size_bytes)
            hardware.prefetch_s(evict.tier, size_bytes)
        except InvalidArgument as error:
            yield f"{who} cannot reach {evict.tier}: {error}"

    within = [period for period in periods if period.begin <= evict.begin < period.end == evict.end]
    if not within:
        allowed = ", ".join(f"[{period.begin}, {period.end})" for period in periods) or "never"
        yield f"{who} is outside the tensor's inactive periods: {allowed}"
        return
    if not within[0].ready <= evict.after < evict.begin:
        yield (
            f"{who} starts its copy after kernel {evict.after}: it must be at or after kernel "
            f"{within[0].ready}, when the tensor is complete, and before kernel {evict.begin}"
        )
        return
    stale = [kernel for kernel in writes(trace, evict.tensor) if evict.after < kernel < evict.begin]
    if stale:
        yield f"{who} may copy the tensor before {_kernel(trace, stale[-1])} writes it"
    if not evict.begin <= evict.prefetch_at <= evict.end:
        yield (
            f"{who} is prefetched at kernel {evict.prefetch_at}: it must be at or after kernel "
            f"{evict.begin} and no later than kernel {evict.end}, which needs it"
        )


def _order(trace: Trace, evictions: Sequence[Evict]) -> Iterator[str]:
    """One tensor's evictions follow each other, and each finds the tensor on the device."""
    by_tensor: dict[int, list[Evict]] = {}
    sources = copy_sources(trace, evictions)
    written = {id(evict) for index, evict in enumerate(evictions) if sources[index] == index}
    for evict in evictions:
        by_tensor.setdefault(evict.tensor, []).append(evict)
    for group in by_tensor.values():
        group.sort(key=lambda evict: evict.begin)
        for earlier, later in pairwise(group):
            if later.begin < earlier.end:
                yield f"{_who(later)} begins before the one during kernels {_span(earlier)} has ended"
            elif id(later) in written and later.after < earlier.end:
                yield (
                    f"{_who(later)} is copied after kernel {later.after}, "
                    f"when the tensor may be away until kernel {earlier.end}"
                )


def _device(trace: Trace, evictions: Sequence[Evict], plan: Plan, hardware: Hardware) -> Iterator[str]:
    budget = plan.device_budget_bytes
    if budget > hardware.device_bytes:
        yield (
            f"the plan's device budget of {format_bytes(budget)} exceeds the device, "
            f"which has {format_bytes(hardware.device_bytes)}"
        )
    if trace.kernels == 0:
        return
    resident = resident_bytes(trace, evictions)
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


def _who(evict: Evict) -> str:
    return f"the eviction of tensor {evict.tensor} during kernels {_span(evict)}"


def _span(evict: Evict) -> str:
    return f"[{evict.begin}, {evict.end})"


def _kernel(trace: Trace, index: int) -> str:
    return f"kernel {index} `{trace.kernel_name[index]}`"


def _others(count: int) -> str:
    return f"; it is the worst of {count} such kernels" if count > 1 else ""
