"""The chart of the page: device memory by kind of tensor, and below it what every stream did: bars with their
colours, and the words that go with each.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.core.columns import KINDS, PHASES
from penstock.core.hardware import LINKS
from penstock.core.plan import Plan
from penstock.core.timeline import Span, Timeline
from penstock.core.trace import Trace
from penstock.errors import PenstockError, installing
from penstock.report.memory_by_kind import (
    SAMPLES,
    Eviction,
    device_samples,
    evictions,
    layers,
    memory_unit,
    thinned,
)
from penstock.report.summary import CAUSE_TEXT, CAUSES, EXTRA_WORK, copies, extra_work
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

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
EXTRA_COLOURS = dict(zip(EXTRA_WORK, ("#e0a100", "#a9742f", "#c79a5b"), strict=True))
STALL_COLOURS = dict(zip(CAUSES, (STALL, "#f08c3a"), strict=True))
COMPUTE_COLOURS = {**PHASE_COLOURS, **EXTRA_COLOURS, **STALL_COLOURS}
LEGEND = {
    **PHASE_COLOURS,
    "recompute": EXTRA_COLOURS["recompute"],
    "compress, expand": EXTRA_COLOURS["compress"],
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
             copy, "r", "c", "e" work of EXTRA_WORK, "s" a predicted stall and "m" a measured one
    """

    stream: str
    source: str
    note: str
    note_colour: str
    colours: tuple[str, ...]
    bars: list[tuple[float, float, int, str, int]]


def rows(trace: Trace, predicted: Timeline, measured: Timeline | None) -> list[Row]:
    """Compute first, then every link that was used; predicted above measured."""
    timelines = {"predicted": predicted} | ({"measured": measured} if measured is not None else {})
    found = [_compute(trace, source, timeline) for source, timeline in timelines.items()]
    for link, colour in LINK_COLOURS.items():
        if not any(span.stream == link for timeline in timelines.values() for span in timeline.spans):
            continue
        for source, timeline in timelines.items():
            spans = [span for span in timeline.spans if span.stream == link]
            bars = sorted((span.start_s, span.end_s, 0, "t", span.index) for span in spans)
            busy = timeline.busy_s(link) / timeline.iteration_s if timeline.iteration_s else 0.0
            note = f"{format_bytes(timeline.moved_bytes(link))}, {busy * 100:.0f} % busy"
            found.append(Row(link, source, note, FAINT, (colour,), bars))
    return found


def _compute(trace: Trace, source: str, timeline: Timeline) -> Row:
    groups = {name: group for group, name in enumerate(COMPUTE_COLOURS)}
    bars = []
    for span in timeline.spans:
        if span.stream != "compute":
            continue
        if (work := extra_work(trace, span)) is not None:
            bars.append((span.start_s, span.end_s, groups[work], work[0], span.index))
        elif 0 <= span.index < trace.kernels:
            phase = PHASES[int(trace.kernel_phase[span.index])]
            bars.append((span.start_s, span.end_s, groups[phase], "k", span.index))
    for index, stall in enumerate(timeline.stalls):
        group = groups.get(stall.cause, groups["memory"])
        bars.append((stall.start_s, stall.end_s, group, "s" if source == "predicted" else "m", index))
    note = f"{format_seconds(timeline.stall_s)} stalled" if timeline.stall_s else "no stall"
    colour = STALL if timeline.stall_s else FAINT
    return Row("compute", source, note, colour, tuple(COMPUTE_COLOURS.values()), sorted(bars))


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
        every[eviction.evict.tensor].append((eviction.evict.begin, _eviction_text(trace, eviction)))
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
    links = {"prefetch": ("host_to_device", "disk_read"), "memory": ("device_to_host", "disk_write")}
    by_end = {
        cause: sorted(
            (span for link in of_cause for span in copies(timeline, link) if span.index >= 0), key=_end_s
        )
        for cause, of_cause in links.items()
    }
    found = []
    for stall in timeline.stalls:
        spans = by_end.get(stall.cause, [])
        slack_s = 1e-9 + 0.02 * (stall.end_s - stall.start_s)
        first = bisect_right(spans, stall.start_s, key=_end_s)
        found.append(spans[first : bisect_right(spans, stall.end_s + slack_s, key=_end_s)])
    return found


def _end_s(span: Span) -> float:
    return span.end_s


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


TALL, CUT = 4.0, 2.2  # in budgets: a peak above the first is cut off at the second
ROW_PIXELS, MEMORY_PIXELS, REST_PIXELS = 30, 300, 116


def figure(
    trace: Trace, plan: Plan, predicted: Timeline, measured: Timeline | None, rows: Sequence[Row]
) -> Figure:
    """Memory on top, and empty streams below: the page's script draws the bars of what is in view.

    The trace of the bars of colour group g in row r is the one named ``"r.g"``.
    Raises PenstockError where plotly is not installed.
    """
    try:
        import plotly.graph_objects as go
        from plotly.subplots import make_subplots
    except ModuleNotFoundError as error:
        raise PenstockError(f"the page needs plotly: {installing('report')}") from error

    streams_pixels = ROW_PIXELS * len(rows) + 14
    chart = make_subplots(
        rows=2,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=26 / (MEMORY_PIXELS + streams_pixels + 26),
        row_heights=[MEMORY_PIXELS, streams_pixels],
    )
    unit, factor = memory_unit(max(trace.peak_bytes, plan.device_budget_bytes))
    for trace_ in _memory(go, trace, plan, predicted, measured, unit, factor):
        chart.add_trace(trace_, row=1, col=1)
    bars = {"x": [], "y": [], "mode": "lines", "fill": "toself", "hoverinfo": "skip", "showlegend": False}
    for place, row in enumerate(rows):
        for group, colour in enumerate(row.colours):
            line = {"width": 0.6, "color": colour}
            bar = go.Scatter(name=f"{place}.{group}", fillcolor=colour, line=line, opacity=1.0, **bars)
            chart.add_trace(bar, row=2, col=1)
    end_s = max([trace.ideal_s, *(t.iteration_s for t in (predicted, measured) if t is not None)]) or 1.0
    height, said = plan.device_budget_bytes * factor, format_bytes(plan.device_budget_bytes)
    chart.add_hline(y=height, line={"color": INK, "width": 1.6}, row=1, col=1)
    _at_the_right(chart, f"<b>budget</b><br>{said}", height, "y", align="left")
    chart.update_xaxes(range=[0, end_s], showgrid=False, zeroline=False, linecolor=GRID)
    chart.update_xaxes(title_text="seconds", ticks="outside", tickcolor=GRID, row=2, col=1)
    chart.update_yaxes(zeroline=False, fixedrange=True)
    top = _top(chart, trace, plan, predicted, factor)
    chart.update_yaxes(title_text=f"device memory ({unit})", range=[0, top], gridcolor=GRID, row=1, col=1)
    titles = [
        f"<b>{row.stream.replace('_', ' ')}</b>" if row.source == "predicted" else row.source for row in rows
    ]
    chart.update_yaxes(
        range=[len(rows) - 0.42, -0.58],
        tickvals=list(range(len(rows))),
        ticktext=titles,
        showgrid=False,
        row=2,
        col=1,
    )
    for place, row in enumerate(rows):
        _at_the_right(chart, row.note, place, "y2", font={"size": 11.5, "color": row.note_colour})
    chart.update_layout(
        template="none",
        height=MEMORY_PIXELS + streams_pixels + REST_PIXELS,
        margin={"l": 128, "r": 142, "t": 44, "b": 46},
        font={"family": "system-ui, -apple-system, 'Segoe UI', sans-serif", "size": 12.5, "color": INK},
        paper_bgcolor="white",
        plot_bgcolor="white",
        hovermode="x unified",
        hoverlabel={"bgcolor": "rgba(255,255,255,0.96)", "bordercolor": GRID, "font": {"size": 12}},
        legend={
            "orientation": "h",
            "y": 1.0,
            "yanchor": "bottom",
            "x": 0,
            "xanchor": "left",
            "traceorder": "normal",
            "font": {"size": 12},
        },
        dragmode="zoom",
    )
    return chart


def _memory(
    go: Any,
    trace: Trace,
    plan: Plan,
    predicted: Timeline,
    measured: Timeline | None,
    unit: str,
    factor: float,
) -> list[Any]:
    times_s, stack = layers(trace, plan, predicted)
    drawn: list[tuple[str, Any, Any, dict[str, Any]]] = []
    for name, colour, size in stack:
        style = {"line": {"width": 0, "color": colour}, "fillcolor": colour, "stackgroup": "kinds"}
        drawn.append((name, times_s, size, style))
    live = thinned(trace.start_s[:-1], trace.live_bytes, SAMPLES)
    dashed = {"line": {"color": FAINT, "width": 1.1, "dash": "4px,3px"}}
    drawn.append(("everything in memory", *live, dashed))
    if measured is not None:
        curve = thinned(*device_samples(measured), SAMPLES)
        drawn.append(("measured", *curve, {"line": {"color": MEASURED, "width": 1.4}}))
    return [
        go.Scatter(
            x=when_s,
            y=np.round(size * factor, 4),
            name=name,
            mode="lines",
            line_shape="hv",
            hovertemplate=f"%{{y:.2f}} {unit}",
            **style,
        )
        for name, when_s, size, style in drawn
    ]


def _top(chart: Figure, trace: Trace, plan: Plan, predicted: Timeline, factor: float) -> float:
    """Of the memory's axis: the in-memory peak, unless all else would be too low to see beside it."""
    used = max(plan.device_budget_bytes, predicted.peak_bytes)
    if trace.peak_bytes <= used * TALL:
        return max(used, trace.peak_bytes) * factor * 1.06
    chart.add_annotation(
        text=f"everything in memory: up to {format_bytes(trace.peak_bytes)} \u2191",
        x=0.5,
        xref="paper",
        y=used * CUT * factor,
        yref="y",
        yanchor="top",
        showarrow=False,
        font={"size": 12, "color": FAINT},
        bgcolor="rgba(255,255,255,0.85)",
    )
    return used * CUT * factor


def _at_the_right(chart: Figure, text: str, height: float, axis: str, **style: Any) -> None:
    chart.add_annotation(
        text=text, x=1.006, xref="paper", xanchor="left", y=height, yref=axis, showarrow=False, **style
    )
