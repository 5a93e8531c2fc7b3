"""Device memory over time by kind of tensor, and when each eviction was carried out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from penstock.core.columns import KINDS, FloatArray, IntArray
from penstock.core.memory_profile import as_run, copy_sources
from penstock.core.plan import Evict, Plan
from penstock.core.timeline import Span, Timeline
from penstock.core.trace import Trace
from penstock.report.summary import READ_LINK, WRITE_LINK, copies, extra_work, kernel_spans

WORKSPACE = KINDS.index("workspace")
# From the bottom of the stack to its top, with colours.
KIND_COLOURS = {
    "weight": "#56657a",
    "optimizer_state": "#8b99ac",
    "gradient": "#c8b68a",
    "input": "#9dbb8f",
    "activation": "#e9ae7d",
    "workspace": "#d5dbe3",
}
assert set(KIND_COLOURS) == set(KINDS)
RESERVED, RESERVED_COLOUR = "reserved for copies", "#eef1f5"
SAMPLES = 1600  # of a curve, at most: about one for each pixel


@dataclass(frozen=True, slots=True)
class Eviction:
    """One eviction of a plan, with the copies that carried it out.

    written   the copy out; None where an earlier copy was still valid
    read      the copy back; None where the tensor never left
    """

    evict: Evict
    written: Span | None
    read: Span | None


def evictions(trace: Trace, plan: Plan, timeline: Timeline) -> list[Eviction]:
    """Each eviction of ``plan`` with its transfers in ``timeline``, in plan order."""
    _, ends_s = kernel_times(trace, timeline)
    writes, reads = _by_tensor(timeline, WRITE_LINK), _by_tensor(timeline, READ_LINK)
    sources = copy_sources(trace, plan.evictions)
    found: dict[int, Eviction] = {}
    for index in sorted(range(len(plan.evictions)), key=lambda index: plan.evictions[index].begin):
        evict, written = plan.evictions[index], None
        if sources[index] == index:
            since_s = ends_s[evict.after] if evict.after >= 0 else 0.0
            written = _take(writes[evict.tier, evict.tensor], since_s)
        since_s = _start_of(trace, ends_s, evict.prefetch_at)
        found[index] = Eviction(evict, written, _take(reads[evict.tier, evict.tensor], since_s))
    return [found[index] for index in range(len(plan.evictions))]


def device_bytes_by_kind(trace: Trace, plan: Plan, timeline: Timeline) -> tuple[FloatArray, IntArray]:
    """Times [N], ascending, and the bytes [N, len(KINDS)] that are on the device from each on.

    Made from the trace, the plan and the moments at which kernels and copies began and ended.
    """
    trace, _ = as_run(trace, plan)
    memory = _Memory(trace, timeline)
    for eviction in evictions(trace, plan, timeline):
        _evicted(memory, trace, eviction)
    _recomputed(memory, trace, plan, timeline)
    return memory.total()


def layers(
    trace: Trace, plan: Plan, predicted: Timeline
) -> tuple[FloatArray, list[tuple[str, str, IntArray]]]:
    """At most `SAMPLES` times [N], and from the bottom of the stack to its top what is on the device: name,
    colour and bytes [N] from each time on. Kinds that are never there are left out.

    The last layer is what the simulator counts beyond the kinds: memory that copies have been given and do
    not fill yet.
    """
    times_s, kinds = device_bytes_by_kind(trace, plan, predicted)
    stack = np.pad(kinds, ((0, 0), (0, 1)))
    if len(times_s) and predicted.memory.get("device"):
        sample_s, total = device_samples(predicted)
        grid = np.unique(np.concatenate([times_s, sample_s]))
        by_kind = kinds[np.maximum(np.searchsorted(times_s, grid, side="right") - 1, 0)]
        in_use = total[np.maximum(np.searchsorted(sample_s, grid, side="right") - 1, 0)]
        beyond = np.maximum(in_use - by_kind.sum(axis=1), 0)
        times_s, stack = thinned(grid, np.column_stack([by_kind, beyond]), SAMPLES)
    found = [
        (kind.replace("_", " "), colour, stack[:, KINDS.index(kind)]) for kind, colour in KIND_COLOURS.items()
    ]
    found.append((RESERVED, RESERVED_COLOUR, stack[:, len(KINDS)]))
    return times_s, [layer for layer in found if layer[2].any()]


def device_samples(timeline: Timeline) -> tuple[FloatArray, IntArray]:
    """Times [N], from 0 to the end of the iteration, and the device bytes [N] in use from each on."""
    samples = timeline.memory.get("device", ())
    times_s, sizes = [sample.time_s for sample in samples], [sample.size_bytes for sample in samples]
    if samples:
        times_s = [0.0, *times_s, max(timeline.step_s, times_s[-1])]
        sizes = [sizes[0], *sizes, sizes[-1]]
    return np.array(times_s, dtype=np.float64), np.array(sizes, dtype=np.int64)


def kernel_times(trace: Trace, timeline: Timeline) -> tuple[FloatArray, FloatArray]:
    """[K] when each kernel started, and [K] when it ended; those of the ideal where it is not shown."""
    starts_s, ends_s = trace.start_s[:-1].copy(), trace.start_s[1:].copy()
    for span in kernel_spans(trace, timeline):
        starts_s[span.index], ends_s[span.index] = span.start_s, span.end_s
    return starts_s, ends_s


def thinned(times_s: FloatArray, sizes: IntArray, points: int) -> tuple[FloatArray, IntArray]:
    """At most ``points`` of the samples, of each bin of time the one with the largest total.

    sizes   [N, ...] bytes from each time on. The first sample stays, and the largest of all.
    """
    if len(times_s) <= points:
        return times_s, sizes
    span_s = float(times_s[-1] - times_s[0]) or 1.0
    bins = np.minimum(((times_s - times_s[0]) / span_s * (points - 1)).astype(np.int64), points - 2)
    total = sizes.reshape(len(sizes), -1).sum(axis=1)
    order = np.lexsort((-total, bins))
    first = np.unique(bins[order], return_index=True)[1]
    kept = np.unique(np.concatenate([[0], order[first]]))
    return times_s[kept], sizes[kept]


class _Memory:
    """Bytes that come and go, by moment and kind, at first as if nothing ever left. Kernel K + k is kernel k,
    one iteration later."""

    def __init__(self, trace: Trace, timeline: Timeline) -> None:
        self.kernels = trace.kernels
        self.starts_s, self.ends_s = kernel_times(trace, timeline)
        self.step_s = max(timeline.step_s, float(self.ends_s.max(initial=0.0)))
        self.changes: list[tuple[float, int, int]] = []
        kinds, sizes = trace.tensor_kind.tolist(), trace.tensor_bytes.tolist()
        lives = zip(trace.tensor_birth.tolist(), trace.tensor_death.tolist(), kinds, sizes, strict=True)
        for birth, death, kind, size in lives if self.kernels else ():
            if birth < death:
                # Between two kernels memory is taken by the later one only when it starts, and given back by
                # the earlier one as soon as it ends.
                begin_s = self.start_of(birth) if birth else 0.0
                end_s = self.end_of(death - 1) if death < self.kernels else self.step_s
                self.between(begin_s, end_s, kind, size)
        for kernel in np.flatnonzero(trace.kernel_workspace_bytes).tolist():
            size = int(trace.kernel_workspace_bytes[kernel])
            self.between(self.start_of(kernel), self.end_of(kernel), WORKSPACE, size)

    def start_of(self, kernel: int) -> float:
        later, within = divmod(kernel, self.kernels)
        return float(self.starts_s[within]) + later * self.step_s

    def end_of(self, kernel: int) -> float:
        if kernel < 0:
            return 0.0
        later, within = divmod(kernel, self.kernels)
        return float(self.ends_s[within]) + later * self.step_s

    def at_or_after(self, since_s: float, moment_s: float) -> float:
        """A moment of the timeline, in this iteration or the next, so that it is not before another."""
        return moment_s if moment_s >= since_s - 1e-9 else moment_s + self.step_s

    def between(self, begin_s: float, end_s: float, kind: int, size: int) -> None:
        """From one moment to another; what reaches beyond the iteration goes on at its beginning."""
        for later_s in (0.0, self.step_s):
            since_s, until_s = max(begin_s - later_s, 0.0), min(end_s - later_s, self.step_s)
            if until_s > since_s:
                self.changes += [(since_s, kind, size), (until_s, kind, -size)]

    def total(self) -> tuple[FloatArray, IntArray]:
        moments, kinds, amounts = zip(*self.changes, strict=True) if self.changes else ((), (), ())
        times_s, where = np.unique(np.array(moments, dtype=np.float64), return_inverse=True)
        sizes = np.zeros((len(times_s), len(KINDS)), dtype=np.int64)
        places = (where.ravel(), np.array(kinds, dtype=np.int64))
        np.add.at(sizes, places, np.array(amounts, dtype=np.int64))
        return times_s, np.cumsum(sizes, axis=0)


def _evicted(memory: _Memory, trace: Trace, eviction: Eviction) -> None:
    """Take off what is away. What is stored compressed leaves its compressed bytes while it is copied."""
    evict, written, read = eviction.evict, eviction.written, eviction.read
    if read is None:
        return
    kind, size = int(trace.tensor_kind[evict.tensor]), int(trace.tensor_bytes[evict.tensor])
    freed_s = memory.end_of(evict.begin - 1)
    copied_s = memory.at_or_after(memory.end_of(evict.after), written.end_s) if written else freed_s
    if evict.codec == "raw":
        freed_s = max(freed_s, copied_s)
        memory.between(freed_s, memory.at_or_after(freed_s, read.start_s), kind, -size)
        return
    packed = trace.compressed_bytes(evict.tensor)
    back_s = memory.at_or_after(copied_s, read.start_s)
    memory.between(freed_s, memory.start_of(evict.end), kind, -size)
    memory.between(freed_s, copied_s, kind, packed)
    memory.between(back_s, memory.end_of(evict.end), kind, packed)


def _recomputed(memory: _Memory, trace: Trace, plan: Plan, timeline: Timeline) -> None:
    runs = defaultdict(list)
    for span in timeline.spans:
        if extra_work(trace, span) == "recompute":
            runs[span.index].append(span.start_s)
    for entry in plan.recomputations:
        # Shown under the kernel that runs again, or under the tensor.
        producer = int(trace.tensor_recompute[entry.tensor])
        due_s = memory.end_of(entry.end - 1)
        starts = [memory.at_or_after(due_s, start_s) for start_s in runs[producer] or runs[entry.tensor]]
        kind, size = int(trace.tensor_kind[entry.tensor]), int(trace.tensor_bytes[entry.tensor])
        memory.between(memory.end_of(entry.begin - 1), min(starts, default=due_s), kind, -size)


def _start_of(trace: Trace, ends_s: FloatArray, kernel: int) -> float:
    """The earliest moment at which ``kernel``, or the one it is in the next iteration, can start."""
    within = kernel % trace.kernels if kernel > trace.kernels else kernel
    return float(ends_s[within - 1]) if 0 < within <= trace.kernels else 0.0


def _by_tensor(timeline: Timeline, links: Mapping[str, str]) -> dict[tuple[str, int], list[Span]]:
    """The copies to or from each tier, by tier and tensor."""
    found: dict[tuple[str, int], list[Span]] = defaultdict(list)
    for tier, link in links.items():
        for span in copies(timeline, link):
            found[tier, span.index].append(span)
    return found


def _take(spans: list[Span], since_s: float) -> Span | None:
    """Remove and return the first span that starts at ``since_s`` or later; else, the first of all."""
    for index, span in enumerate(spans):
        if span.start_s >= since_s - 1e-9:
            return spans.pop(index)
    return spans.pop(0) if spans else None
