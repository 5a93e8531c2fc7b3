"""The chart of the page, by plotly, and the words that go with each of its bars."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.core.columns import KINDS, PHASES
from penstock.core.plan import Plan
from penstock.core.timeline import Span, Timeline
from penstock.core.trace import Trace
from penstock.errors import PenstockError, installing
from penstock.report.chart import FAINT, GRID, INK, Chart
from penstock.report.memory_by_kind import Eviction, evictions
from penstock.report.summary import CAUSE_TEXT, copies
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MOST_EVICTIONS = 5  # of one tensor that are put in words
ROW_PIXELS, MEMORY_PIXELS, GAP_PIXELS, REST_PIXELS = 30, 300, 26, 90


def figure(chart: Chart) -> Figure:
    """Memory on top, and empty streams below: the page's script draws the bars of what is in view.

    The trace of the bars of colour group g in row r is the one named ``"r.g"``.
    Raises PenstockError where plotly is not installed.
    """
    try:
        import plotly.graph_objects as go
        from plotly.subplots import make_subplots
    except ModuleNotFoundError as error:
        raise PenstockError(f"the page needs plotly: {installing('report')}") from error

    heights = [MEMORY_PIXELS, ROW_PIXELS * len(chart.rows) + 14]
    pixels = sum(heights) + GAP_PIXELS
    drawn = make_subplots(
        rows=2, cols=1, shared_xaxes=True, vertical_spacing=GAP_PIXELS / pixels, row_heights=heights
    )
    for curve in chart.curves:
        styles: dict[str, dict[str, Any]] = {
            "stacked": {"line": {"width": 0}, "fillcolor": curve.colour, "stackgroup": "kinds"},
            "dashed": {"line": {"width": 1.1, "dash": "4px,3px"}},
            "line": {"line": {"width": 1.4}},
        }
        line = go.Scatter(
            x=curve.times_s,
            y=np.round(curve.sizes, 4),
            name=curve.name,
            mode="lines",
            line_shape="hv",
            line_color=curve.colour,
            hovertemplate=f"%{{y:.2f}} {chart.unit}",
            **styles[curve.style],
        )
        drawn.add_trace(line, row=1, col=1)
    bars = {"x": [], "y": [], "mode": "lines", "fill": "toself", "hoverinfo": "skip", "showlegend": False}
    for place, row in enumerate(chart.rows):
        for group, colour in enumerate(row.colours):
            outline = {"width": 0.6, "color": colour}
            bar = go.Scatter(name=f"{place}.{group}", fillcolor=colour, line=outline, opacity=1.0, **bars)
            drawn.add_trace(bar, row=2, col=1)

    beside = {"x": 1.006, "xref": "paper", "xanchor": "left", "showarrow": False}
    said = f"<b>budget</b><br>{chart.budget_text}"
    drawn.add_hline(y=chart.budget, line={"color": INK, "width": 1.6}, row=1, col=1)
    drawn.add_annotation(text=said, y=chart.budget, yref="y", align="left", **beside)
    if chart.cut:
        drawn.add_annotation(
            text=chart.cut,
            x=0.5,
            xref="paper",
            y=chart.top,
            yref="y",
            yanchor="top",
            showarrow=False,
            font={"size": 12, "color": FAINT},
            bgcolor="rgba(255,255,255,0.85)",
        )
    titles = []
    for place, row in enumerate(chart.rows):
        titles.append(f"<b>{row.title}</b>" if row.source == "predicted" else row.title)
        font = {"size": 11.5, "color": row.figures_colour}
        drawn.add_annotation(text=row.figures, y=place, yref="y2", font=font, **beside)
    drawn.update_xaxes(range=[0, chart.end_s], showgrid=False, zeroline=False, linecolor=GRID)
    drawn.update_xaxes(title_text="seconds", ticks="outside", tickcolor=GRID, row=2, col=1)
    drawn.update_yaxes(zeroline=False, fixedrange=True)
    memory = {"title_text": f"device memory ({chart.unit})", "range": [0, chart.top], "gridcolor": GRID}
    drawn.update_yaxes(**memory, row=1, col=1)
    streams = {"range": [len(titles) - 0.42, -0.58], "tickvals": list(range(len(titles))), "ticktext": titles}
    drawn.update_yaxes(**streams, showgrid=False, row=2, col=1)
    drawn.update_layout(
        template="none",
        height=pixels + REST_PIXELS,
        margin={"l": 128, "r": 142, "t": 44, "b": 46},
        font={"family": "system-ui, -apple-system, 'Segoe UI', sans-serif", "size": 12.5, "color": INK},
        paper_bgcolor="white",
        plot_bgcolor="white",
        hovermode="x unified",
        hoverlabel={"bgcolor": "rgba(255,255,255,0.96)", "bordercolor": GRID, "font": {"size": 12}},
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        legend_font_size=12,
        dragmode="zoom",
    )
    return drawn


def kernel_texts(trace: Trace) -> list[list[str]]:
    """[K] lines that say what a kernel is."""
    used = np.zeros(trace.kernels, dtype=np.int64)  # bytes of the tensors that each uses
    np.add.at(used, trace.uses.values, trace.tensor_bytes[trace.uses.owners])
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
    by_end: dict[str, list[Span]] = {}
    for cause, of_cause in links.items():
        spans = [span for link in of_cause for span in copies(timeline, link) if span.index >= 0]
        by_end[cause] = sorted(spans, key=attrgetter("end_s"))
    found = []
    for stall in timeline.stalls:
        spans = by_end.get(stall.cause, [])
        slack_s = 1e-9 + 0.02 * (stall.end_s - stall.start_s)
        first = bisect_right(spans, stall.start_s, key=attrgetter("end_s"))
        found.append(spans[first : bisect_right(spans, stall.end_s + slack_s, key=attrgetter("end_s"))])
    return found


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
