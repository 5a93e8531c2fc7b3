"""The streams of the page's chart: bars with their colours, and the words that go with each."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from penstock.core.columns import KINDS, PHASES
from penstock.core.hardware import LINKS
from penstock.core.plan import Plan
from penstock.core.timeline import Span, Timeline
from penstock.core.trace import Trace
from penstock.report.memory_by_kind import Eviction, evictions
from penstock.report.summary import AGAIN, CAUSE_TEXT, CAUSES, again, copies
from penstock.units import format_bytes, format_seconds

INK, FAINT, GRID, MEASURED = "#1f2933", "#7b8794", "#e4e7eb", "#0b3c5d"
OUT_OF_DEVICE, INTO_DEVICE, STALL = "#3a9188", "#8c6bb1", "#d1343c"
LINK_COLOURS = {
    "device_to_host": OUT_OF_DEVICE,
    "disk_write": OUT_OF_DEVICE,
    "disk_read": INTO_DEVICE,
    "host_to_device": INTO_DEVICE,
}
assert set(LINK_COLOURS) == set(LINKS)
PHASE_COLOURS = dict(zip(PHASES, ("#9cc3dc", "#33658a", "#7d8f69"), strict=True))
AGAIN_COLOURS = dict(zip(AGAIN, ("#e0a100", "#a9742f", "#c79a5b"), strict=True))
STALL_COLOURS = dict(zip(CAUSES, (STALL, "#f08c3a"), strict=True))
COMPUTE_COLOURS = {**PHASE_COLOURS, **AGAIN_COLOURS, **STALL_COLOURS}
LEGEND = {
    **PHASE_COLOURS,
    "recompute": AGAIN_COLOURS["recompute"],
    "compress, expand": AGAIN_COLOURS["compress"],
    **{f"stall for {CAUSE_TEXT[cause]}": colour for cause, colour in STALL_COLOURS.items()},
    "out of the device": OUT_OF_DEVICE,
    "into the device": INTO_DEVICE,
}
MOST_EVICTIONS = 5  # of one tensor that are put in words


@dataclass(frozen=True, slots=True)
class Row:
    """One line of bars.

    source   "predicted" or "measured"
    note     what stands at its right
    colours  of its groups of bars
    bars     (start_s, end_s, group, what, index), ascending by start; what: "k" a kernel, "t" a tensor's
             copy, "r", "c", "e" work of AGAIN, "s" a predicted stall and "m" a measured one
    """

    stream: str
    source: str
    title: str
    note: str
    note_colour: str
    colours: tuple[str, ...]
    bars: list[tuple[float, float, int, str, int]]


def rows(trace: Trace, predicted: Timeline, measured: Timeline | None) -> list[Row]:
    """Compute first, then every link that was used; predicted above measured."""
    timelines = {"predicted": predicted} | ({"measured": measured} if measured is not None else {})
    found = []
    for source, timeline in timelines.items():
        found.append(_compute(trace, source, timeline, both=measured is not None))
    for link, colour in LINK_COLOURS.items():
        if not any(span.stream == link for timeline in timelines.values() for span in timeline.spans):
            continue
        for source, timeline in timelines.items():
            spans = [span for span in timeline.spans if span.stream == link]
            bars = sorted((span.start_s, span.end_s, 0, "t", span.index) for span in spans)
            busy = timeline.busy_s(link) / timeline.iteration_s if timeline.iteration_s else 0.0
            note = f"{format_bytes(timeline.moved_bytes(link))}, {busy * 100:.0f} % busy"
            title = _title(link, source, measured is not None)
            found.append(Row(link, source, title, note, FAINT, (colour,), bars))
    return found


def _compute(trace: Trace, source: str, timeline: Timeline, both: bool) -> Row:
    groups = {name: group for group, name in enumerate(COMPUTE_COLOURS)}
    bars = []
    for span in timeline.spans:
        if span.stream != "compute":
            continue
        if (work := again(trace, span)) is not None:
            bars.append((span.start_s, span.end_s, groups[work], work[0], span.index))
        elif 0 <= span.index < trace.kernels:
            phase = PHASES[int(trace.kernel_phase[span.index])]
            bars.append((span.start_s, span.end_s, groups[phase], "k", span.index))
    for index, stall in enumerate(timeline.stalls):
        group = groups.get(stall.cause, groups["memory"])
        bars.append((stall.start_s, stall.end_s, group, "s" if source == "predicted" else "m", index))
    note = f"{format_seconds(timeline.stall_s)} stalled" if timeline.stall_s else "no stall"
    colour = STALL if timeline.stall_s else FAINT
    title = _title("compute", source, both)
    return Row("compute", source, title, note, colour, tuple(COMPUTE_COLOURS.values()), sorted(bars))


def _title(stream: str, source: str, both: bool) -> str:
    name = f"<b>{stream.replace('_', ' ')}</b>"
    if not both:
        return name
    return name if source == "predicted" else "measured"


def kernel_texts(trace: Trace) -> list[list[str]]:
    """[K] lines that say what a kernel is."""
    used = _used_bytes(trace)
    return [
        [
            f"kernel {index} {name}",
            f"{PHASES[int(trace.kernel_phase[index])]}, {format_seconds(float(trace.kernel_time_s[index]))}",
            f"its tensors {format_bytes(used[index])}"
            + (f", workspace {format_bytes(workspace)}" if workspace else ""),
        ]
        for index, (name, workspace) in enumerate(
            zip(trace.kernel_name, trace.kernel_workspace_bytes.tolist(), strict=True)
        )
    ]


def tensor_texts(trace: Trace, plan: Plan, timeline: Timeline) -> dict[int, list[str]]:
    """By tensor that leaves: lines that say what it is, and where it is when."""
    texts: dict[int, list[str]] = {}
    every: dict[int, list[tuple[int, list[str]]]] = defaultdict(list)
    for eviction in evictions(trace, plan, timeline):
        lines = _eviction_text(trace, eviction)
        every[eviction.evict.tensor].append((eviction.evict.begin, lines))
    for entry in plan.recomputations:
        producer = _kernel(trace, int(trace.tensor_recompute[entry.tensor]))
        text = [f"released during {_span(trace, entry.begin, entry.end)}", f"recomputed by {producer}"]
        every[entry.tensor].append((entry.begin, text))
    for tensor, entries in every.items():
        texts[tensor] = tensor_text(trace, tensor)
        entries.sort(key=lambda entry: entry[0])
        for _, lines in entries[:MOST_EVICTIONS]:
            texts[tensor] += lines
        if len(entries) > MOST_EVICTIONS:
            texts[tensor].append(f"and away {len(entries) - MOST_EVICTIONS} more times")
    return texts


def tensor_text(trace: Trace, tensor: int) -> list[str]:
    """What a tensor is."""
    kind = KINDS[int(trace.tensor_kind[tensor])].replace("_", " ")
    size = format_bytes(int(trace.tensor_bytes[tensor]))
    made = trace.writers[tensor]
    by = f"made by {_kernel(trace, int(made[0]))}" if len(made) else "never written"
    if trace.tensor_persistent[tensor]:
        by = "kept between iterations" + (f", written by {_kernel(trace, int(made[0]))}" if len(made) else "")
    return [f"tensor {tensor}: {kind}, {size}", by]


def _eviction_text(trace: Trace, eviction: Eviction) -> list[str]:
    evict, lines = eviction.evict, []
    form = " compressed" if evict.codec != "raw" else ""
    if eviction.read is None:
        return [f"was to leave for {evict.tier}, but was needed before its copy was complete"]
    if eviction.written is not None:
        lines.append(f"to {evict.tier}{form}: {_when(eviction.written)}")
    else:
        lines.append(f"to {evict.tier}: nothing to write, its copy is still valid")
    lines.append(f"away during {_span(trace, evict.begin, evict.end)}")
    asked = "on demand" if evict.prefetch_at == evict.end else f"asked at {evict.prefetch_at}"
    lines.append(f"back: {_when(eviction.read)}, {asked}")
    return lines


def stall_texts(trace: Trace, timeline: Timeline) -> list[list[str]]:
    """For each stall: what waited, how long, for what."""
    found = []
    for stall, waited in zip(timeline.stalls, copies_waited_for(timeline), strict=True):
        cause = CAUSE_TEXT.get(stall.cause, stall.cause)
        lines = [
            f"{format_seconds(stall.end_s - stall.start_s)} stall for {cause}",
            f"before {_kernel(trace, stall.kernel)}",
        ]
        if waited:
            largest = max(waited, key=lambda span: span.size_bytes)
            size = format_bytes(sum(span.size_bytes for span in waited))
            many = f"{len(waited)} copies, {size}, the largest of " if len(waited) > 1 else ""
            direction = "to come back" if stall.cause == "prefetch" else "to leave"
            lines.append(f"for {many}{tensor_text(trace, largest.index)[0]}, {direction}")
        found.append(lines)
    return found


def copies_waited_for(timeline: Timeline) -> list[list[Span]]:
    """For each stall, the copies that ended while it lasted, the last of them about when it did."""
    copies_in = copies(timeline, "host_to_device") + copies(timeline, "disk_read")
    copies_out = copies(timeline, "device_to_host") + copies(timeline, "disk_write")
    by_end = {
        cause: sorted((span for span in spans if span.index >= 0), key=lambda span: span.end_s)
        for cause, spans in (("prefetch", copies_in), ("memory", copies_out))
    }
    ends_s = {cause: np.array([span.end_s for span in spans]) for cause, spans in by_end.items()}
    found = []
    for stall in timeline.stalls:
        slack_s = 1e-9 + 0.02 * (stall.end_s - stall.start_s)
        ends = ends_s.get(stall.cause, np.zeros(0))
        first = int(np.searchsorted(ends, stall.start_s, side="right"))
        last = int(np.searchsorted(ends, stall.end_s + slack_s, side="right"))
        found.append(by_end[stall.cause][first:last] if last > first else [])
    return found


def _used_bytes(trace: Trace) -> list[int]:
    """[K] bytes of the tensors that each kernel uses."""
    used = np.zeros(trace.kernels, dtype=np.int64)
    np.add.at(used, trace.uses.values, trace.tensor_bytes[trace.uses.owners])
    result: list[int] = used.tolist()
    return result


def _kernel(trace: Trace, index: int) -> str:
    if not trace.kernels:
        return f"kernel {index}"
    within = index % trace.kernels
    next_one = ", next iteration" if index >= trace.kernels else ""
    return f"kernel {within} {trace.kernel_name[within]}{next_one}"


def _span(trace: Trace, begin: int, end: int) -> str:
    return f"kernels [{begin}, {end}), needed by {_kernel(trace, end)}"


def _when(span: Span) -> str:
    return (
        f"{format_seconds(span.start_s)} to {format_seconds(span.end_s)} ({format_bytes(span.size_bytes)} in "
        f"{format_seconds(span.end_s - span.start_s)})"
    )
