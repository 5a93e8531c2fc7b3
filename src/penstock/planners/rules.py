"""Policies that work through a list of tensors, and what `flashneuron` and `g10` share with them.

`evict_all` evicts every tensor that it can: without planning, in the least memory that a step can have.

vDNN (Rhu et al., MICRO 2016) offloads feature maps in the forward pass, and prefetches one ahead: `vdnn_all`
every feature map that the backward pass needs, `vdnn_conv` those that convolutions read. Each goes to the
host, or to the disk where the host has no room, and comes back while the kernel works that needs the one
before. Unlike vDNN, kernels wait for nothing but the tensors and the memory that they need, and tensors of
other kinds leave too where the budget asks for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from penstock.core.columns import KINDS, PHASES, BoolArray, FloatArray, IntArray
from penstock.core.hardware import Hardware
from penstock.core.memory_profile import resident_bytes
from penstock.core.plan import Evict
from penstock.core.trace import Trace
from penstock.errors import SpillSpaceFull
from penstock.planners.problem import Decision, Problem, spill_full
from penstock.units import format_bytes, format_bytes_up


def cyclic_slices(begin: int, end: int, kernels: int) -> Iterator[slice]:
    """Kernels ``[begin, end)`` as slices of one iteration. The range is no longer than an iteration."""
    if begin < kernels:
        yield slice(begin, min(end, kernels))
    if end > kernels:
        yield slice(max(begin - kernels, 0), end - kernels)


def during(kernels: int, begin: int, end: int) -> BoolArray:
    """[K] whether each kernel is one of ``[begin, end)``."""
    found = np.zeros(kernels, dtype=np.bool_)
    for part in cyclic_slices(begin, end, kernels):
        found[part] = True
    return found


def add_cyclic(values: IntArray, begin: int, end: int, amount: int) -> None:
    """Add ``amount`` to the entries of kernels ``[begin, end)``."""
    values[during(len(values), begin, end)] += amount


def unrolled(values: FloatArray) -> FloatArray:
    """[2K + 1] sums of the entries before each kernel of two iterations."""
    once = np.cumsum(values)
    total = once[-1] if len(once) else 0.0
    return np.concatenate([[0.0], once, once + total])


def earliest_with_room(room: IntArray, begin: int, end: int, amount: int) -> int:
    """The first kernel such that it and all kernels up to ``end`` have ``amount`` of ``room`` left; ``end``
    where the last one has not."""
    first = begin
    for part in cyclic_slices(begin, end, len(room)):
        tight = np.flatnonzero(room[part] < amount)
        if len(tight):
            wrapped = part.start < begin
            first = part.start + int(tight[-1]) + 1 + (len(room) if wrapped else 0)
    return first


_ACTIVATION, _INPUT = KINDS.index("activation"), KINDS.index("input")
_BACKWARD = PHASES.index("backward")


def feature_maps(trace: Trace) -> BoolArray:
    """[P] whether each inactive period (G10's vitality analysis, section 4.2) is of an activation, or an
    input, of the forward pass that the backward pass uses: vDNN offloads these."""
    periods, first_backward = trace.periods, boundary(trace)
    crosses = (periods.begin <= first_backward) & (periods.end >= first_backward)
    carried = ~trace.tensor_persistent[periods.tensor] & (periods.end < trace.kernels)
    return np.asarray(crosses & carried & np.isin(trace.tensor_kind[periods.tensor], [_ACTIVATION, _INPUT]))


def eviction(trace: Trace, index: int, tier: str = "") -> Evict:
    """The eviction of one inactive period: copied once idle, away to the period's end, back on demand."""
    periods = trace.periods
    begin, end = int(periods.begin[index]), int(periods.end[index])
    return Evict(int(periods.tensor[index]), begin - 1, begin, end, prefetch_at=end, tier=tier)


def boundary(trace: Trace) -> int:
    """The first kernel of the backward pass; K where there is none."""
    backward = np.flatnonzero(trace.kernel_phase == _BACKWARD)
    return int(backward[0]) if len(backward) else trace.kernels


NEGLIGIBLE = 256  # a tensor below this part of what is missing is evicted only after all larger ones


class FreeBytes:
    """Free bytes of each tier during each kernel, less the evictions taken so far.

    A copy takes space while a later eviction can reuse it: from the first of the tensor's evictions to the
    kernel that ends the last. That of a persistent tensor that is evicted more than once, or that no kernel
    writes, always does.
    """

    def __init__(self, problem: Problem) -> None:
        trace = self.trace = problem.trace
        self.hardware, self.budget_bytes = problem.hardware, problem.budget_bytes
        self.free: dict[str, IntArray] = {
            tier: np.full(trace.kernels, capacity_bytes, dtype=np.int64)
            for tier in ("disk", "host")
            if (capacity_bytes := self.hardware.capacity_bytes(tier)) > 0
        }
        everything = int(trace.tensor_bytes.sum())
        self.ample = {tier for tier in self.free if self.hardware.capacity_bytes(tier) >= everything}
        self.home: dict[tuple[str, int], tuple[int, int]] = {}  # the kernels during which it is there

    def fits(self, tier: str, evict: Evict) -> bool:
        """Whether ``tier`` has room for the copy that ``evict`` needs."""
        if tier in self.ample or tier not in self.free:
            return tier in self.ample
        needed = np.where(self._added(tier, evict), self.trace.tensor_bytes[evict.tensor], 0)
        there = during(self.trace.kernels, *self._stay(tier, evict))
        return bool((self.free[tier] >= needed)[there].all())  # what was taken may exceed it elsewhere

    def take(self, tier: str, evict: Evict) -> None:
        self.free[tier][self._added(tier, evict)] -= self.trace.tensor_bytes[evict.tensor]
        self.home[tier, evict.tensor] = self._stay(tier, evict)

    def first(self, tiers: Iterable[str], evict: Evict) -> str | None:
        """The first of ``tiers`` with room; None where none has."""
        return next((tier for tier in tiers if self.fits(tier, evict)), None)

    def place(self, tiers: Iterable[str], evict: Evict) -> Evict | None:
        """The eviction to the first of ``tiers`` with room, which it takes; None where none has."""
        tier = self.first(tiers, evict)
        if tier is None:
            return None
        self.take(tier, evict)
        return replace(evict, tier=tier)

    def full(self, evictions: Iterable[Evict]) -> SpillSpaceFull:
        """The error for memory that is still short when no tier has room for another tensor."""
        on_demand = [replace(evict, prefetch_at=evict.end) for evict in evictions]
        kernel = int(resident_bytes(self.trace, on_demand).argmax())
        leave = format_bytes_up(int(self.trace.live_bytes[kernel]) - self.budget_bytes)
        return spill_full(
            self.hardware,
            f"{leave} have to leave the device before kernel `{self.trace.kernel_name[kernel]}` to keep "
            f"within {format_bytes(self.budget_bytes)}, and copies stay until they are of no more use",
        )

    def _stay(self, tier: str, evict: Evict) -> tuple[int, int]:
        """The kernels during which the tensor's copy is there once ``evict`` is taken."""
        known = self.home.get((tier, evict.tensor))
        begin, end = evict.after + 1, evict.end + 1  # what returns is read until then
        if self.trace.tensor_persistent[evict.tensor]:
            stays = known is not None or len(self.trace.writers[evict.tensor]) == 0
            return (0, self.trace.kernels) if stays else (begin, end)
        return (begin, end) if known is None else (min(begin, known[0]), max(end, known[1]))

    def _added(self, tier: str, evict: Evict) -> BoolArray:
        """[K] whether the copy takes room during each kernel that the tensor has not taken yet."""
        added = during(self.trace.kernels, *self._stay(tier, evict))
        if (known := self.home.get((tier, evict.tensor))) is not None:
            added &= ~during(self.trace.kernels, *known)
        return added


def evict_further(
    room: FreeBytes, taken: BoolArray, evictions: Sequence[Evict], tiers: Sequence[str]
) -> list[Evict]:
    """Further evictions with which no kernel needs more than the budget, all returning on demand: the tensor
    needed last goes first (Belady).

    taken    [P] periods that are used up already, by `evictions`; further ones are marked in it
    tiers    where they go, in order of preference; `room` keeps account

    Raises SpillSpaceFull where no tier has room for what has to leave.
    """
    trace, resident = room.trace, resident_bytes(room.trace, evictions)
    further: list[Evict] = []
    for kernel in np.flatnonzero(resident > room.budget_bytes).tolist():
        missing = int(resident[kernel]) - room.budget_bytes
        if missing <= 0:
            continue
        for index in _victims(trace, taken, kernel, missing):
            if (evict := room.place(tiers, eviction(trace, index))) is None:
                continue
            taken[index] = True
            further.append(evict)
            size = int(trace.periods.size_bytes[index])
            add_cyclic(resident, evict.begin, evict.end, -size)
            missing -= size
            if missing <= 0:
                break
        else:
            raise room.full([*evictions, *further])
    return further


def _victims(trace: Trace, taken: BoolArray, kernel: int, missing: int) -> list[int]:
    """Periods that are free and cover ``kernel``: those that last longest from there first, and the
    negligible ones after all others."""
    periods, count = trace.periods, trace.kernels
    here = (periods.begin <= kernel) & (kernel < periods.end)
    wrapped = ~here & (kernel + count >= periods.begin) & (kernel + count < periods.end)
    found: IntArray = np.flatnonzero((here | wrapped) & ~taken)
    lasts = periods.end[found] - np.where(wrapped[found], count, 0)
    size = periods.size_bytes[found]
    order: list[int] = found[np.lexsort((-size, -lasts, size * NEGLIGIBLE < missing))].tolist()
    return order


def in_order(evictions: Sequence[Evict]) -> tuple[Evict, ...]:
    """As a plan lists them: in the order in which their copies may start."""
    return tuple(sorted(evictions, key=lambda evict: (evict.after, evict.begin, evict.tensor)))


def prefetch_ahead(
    trace: Trace,
    evictions: Sequence[Evict],
    latest: Sequence[int],
    budget_bytes: int,
    earliest: Sequence[int] | None = None,
) -> tuple[Evict, ...]:
    """The same evictions, which return on demand as given, prefetched ahead where memory allows (G10
    section 4.4).

    Those that come first in `evictions` get memory first. One that would come back immediately
    stays on the device, and is left out.

    latest     by eviction: the kernel at which its prefetch should be issued; later where memory is short
    earliest   by eviction: once all are placed, each is moved to the first kernel from there on from which
               memory holds it; none is where not given
    """
    slack = budget_bytes - resident_bytes(trace, evictions)
    sizes = [moved_bytes(trace, evict) for evict in evictions]
    issue = [evict.end for evict in evictions]
    for wishes in (latest, earliest or ()):
        for index, wish in enumerate(wishes):
            evict, until = evictions[index], issue[index]
            # What stays on the device has its whole size there, not that of its compressed copy.
            first = evict.begin + (evict.codec != "raw")
            issue[index] = earliest_with_room(slack, min(max(wish, first), until), until, sizes[index])
            add_cyclic(slack, issue[index], until, -sizes[index])
    placed = [
        replace(evict, prefetch_at=prefetch_at)
        for evict, prefetch_at in zip(evictions, issue, strict=True)
        if prefetch_at > evict.begin
    ]
    return in_order(placed)


def moved_bytes(trace: Trace, evict: Evict) -> int:
    """What the links and the tier carry, and what its prefetch takes on the device."""
    raw = evict.codec == "raw"
    return int(trace.tensor_bytes[evict.tensor]) if raw else trace.compressed_bytes(evict.tensor)


def latest_safe(trace: Trace, evictions: Sequence[Evict], hardware: Hardware) -> list[int]:
    """For each eviction, the last kernel at which its read can be issued and be in time, with all reads after
    it on its tier in time as well, at the pace of a device that never waits."""
    count = trace.kernels
    once = trace.start_s
    clock: FloatArray = np.concatenate([once[:-1], once[:-1] + once[-1], once + 2 * once[-1]])
    wishes = [0] * len(evictions)
    reads = [hardware.prefetch_s(evict.tier, moved_bytes(trace, evict)) for evict in evictions]
    # Each iteration is like the other: reads of the next one bound those of this one.
    order = sorted(
        [(evict.end + turn * count, index) for index, evict in enumerate(evictions) for turn in (1, 0)],
        reverse=True,
    )
    free_s: dict[str, float] = {}
    for end, index in order:
        evict = evictions[index]
        start_s = min(float(clock[end]), free_s.get(evict.tier, np.inf)) - reads[index]
        free_s[evict.tier] = start_s
        if end == evict.end:
            wishes[index] = max(int(np.searchsorted(clock, start_s, side="right")) - 1, 0)
    return wishes


WORTH_BYTES = 4096  # smaller tensors leave only where the budget asks for it


def evict_all(problem: Problem) -> Decision:
    """Every inactive period of every tensor of WORTH_BYTES or more, and of smaller ones where needed.

    Prefetches are issued at the latest moment at which all reads are still in time, or on demand
    where memory does not allow that.
    """
    trace, budget_bytes = problem.trace, problem.budget_bytes
    room = FreeBytes(problem)
    periods, over = trace.periods, trace.live_bytes - budget_bytes
    chosen = []
    for index in np.lexsort((periods.begin - periods.end, -periods.size_bytes)).tolist():
        evict, size = eviction(trace, index), int(periods.size_bytes[index])
        if size < WORTH_BYTES and not (over[during(trace.kernels, evict.begin, evict.end)] > 0).any():
            continue
        if (placed := room.place(room.free, evict)) is not None:
            chosen.append(placed)
            add_cyclic(over, evict.begin, evict.end, -size)
    if over.max(initial=0) > 0:
        raise room.full(chosen)
    chosen.sort(key=lambda evict: (evict.end, evict.begin, evict.tensor))
    wishes = latest_safe(trace, chosen, problem.hardware)
    return Decision(evictions=prefetch_ahead(trace, chosen, wishes, budget_bytes))


FITS = Decision(reason="everything fits: nothing is offloaded")


def keep(problem: Problem) -> Decision:
    """Nothing leaves."""
    return Decision()


def vdnn_all(problem: Problem) -> Decision:
    """Offload every feature map."""
    return _offload(problem, feature_maps(problem.trace))


def vdnn_conv(problem: Problem) -> Decision:
    """Offload the feature maps that convolutions read."""
    read = np.zeros(problem.trace.tensors, dtype=np.bool_)
    for kernel in convolutions(problem.trace):
        read[problem.trace.inputs[kernel]] = True
    return _offload(problem, feature_maps(problem.trace) & read[problem.trace.periods.tensor])


def convolutions(trace: Trace) -> list[int]:
    """The kernels of the forward pass that are convolutions, by their names."""
    return [kernel for kernel in range(boundary(trace)) if "conv" in trace.kernel_name[kernel].lower()]


def _offload(problem: Problem, wanted: BoolArray) -> Decision:
    trace, budget_bytes = problem.trace, problem.budget_bytes
    if trace.peak_bytes <= budget_bytes:
        return FITS
    room = FreeBytes(problem)
    taken = np.zeros(len(wanted), dtype=np.bool_)
    chosen = []
    for index in np.flatnonzero(wanted).tolist():
        if (evict := room.place(("host", "disk"), eviction(trace, index))) is not None:
            taken[index] = True
            chosen.append(evict)
    further = evict_further(room, taken, chosen, ("host", "disk"))
    chosen.sort(key=lambda evict: (evict.end, evict.begin, evict.tensor))
    needed = sorted({evict.end for evict in chosen})
    # The first comes back when the backward pass begins.
    ahead = dict(zip(needed, [boundary(trace), *needed], strict=False))
    latest = [ahead[evict.end] for evict in chosen] + [evict.end for evict in further]
    evictions = prefetch_ahead(trace, chosen + further, latest, budget_bytes)
    more = f"feature maps were not enough: {len(further)} further evictions keep the budget"
    return Decision(evictions=evictions, reason=more if further else "")
