"""The chart of the page: device memory by kind of tensor, and below it what every stream did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.core.columns import KINDS
from penstock.core.plan import Plan
from penstock.core.timeline import Timeline
from penstock.core.trace import Trace
from penstock.errors import PenstockError
from penstock.report.memory_by_kind import stack_bytes, thinned
from penstock.report.plot import FAINT, GRID, INK, KIND_COLOURS, RESERVED, RESERVED_COLOUR
from penstock.report.rows import Row
from penstock.units import format_bytes

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MEASURED_COLOUR = "#0b3c5d"

TALL, CUT = 4.0, 2.2  # in budgets: a peak above the first is cut off at the second
SAMPLES = 1600  # of a curve, at most: about one for each pixel
ROW_PIXELS, MEMORY_PIXELS, REST_PIXELS = 30, 300, 116


class Sizes(NamedTuple):
    """What sizes are drawn in."""

    unit: str
    factor: float


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
        raise PenstockError("the page needs plotly: pip install 'penstock[report]'") from error

    streams_pixels = ROW_PIXELS * len(rows) + 14
    chart = make_subplots(
        rows=2,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=26 / (MEMORY_PIXELS + streams_pixels + 26),
        row_heights=[MEMORY_PIXELS, streams_pixels],
    )
    sizes = _sizes(max(trace.peak_bytes, plan.device_budget_bytes))
    for trace_ in _memory(go, trace, plan, predicted, measured, sizes):
        chart.add_trace(trace_, row=1, col=1)
    for place, row in enumerate(rows):
        for group, colour in enumerate(row.colours):
            chart.add_trace(
                go.Scatter(
                    x=[],
                    y=[],
                    name=f"{place}.{group}",
                    mode="lines",
                    fill="toself",
                    fillcolor=colour,
                    line={"width": 0.6, "color": colour},
                    opacity=1.0,
                    hoverinfo="skip",
                    showlegend=False,
                ),
                row=2,
                col=1,
            )
    end_s = max([trace.ideal_s, *(t.iteration_s for t in (predicted, measured) if t is not None)]) or 1.0
    _budget_line(chart, plan, sizes)
    chart.update_xaxes(range=[0, end_s], showgrid=False, zeroline=False, linecolor=GRID)
    chart.update_xaxes(title_text="seconds", ticks="outside", tickcolor=GRID, row=2, col=1)
    top = _top(chart, trace, plan, predicted, sizes)
    chart.update_yaxes(
        title_text=f"device memory ({sizes.unit})",
        range=[0, top],
        gridcolor=GRID,
        zeroline=False,
        fixedrange=True,
        row=1,
        col=1,
    )
    chart.update_yaxes(
        range=[len(rows) - 0.42, -0.58],
        tickvals=list(range(len(rows))),
        ticktext=[row.title for row in rows],
        showgrid=False,
        zeroline=False,
        fixedrange=True,
        row=2,
        col=1,
    )
    for place, row in enumerate(rows):
        chart.add_annotation(
            text=row.note,
            x=1.006,
            xref="paper",
            xanchor="left",
            y=place,
            yref="y2",
            showarrow=False,
            font={"size": 11.5, "color": row.note_colour},
        )
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
    go: Any, trace: Trace, plan: Plan, predicted: Timeline, measured: Timeline | None, sizes: Sizes
) -> list[Any]:
    times_s, stack = stack_bytes(trace, plan, predicted, SAMPLES)
    drawn = []
    names = {KINDS.index(kind): colour for kind, colour in KIND_COLOURS.items()}
    layers = [(KINDS[kind].replace("_", " "), colour, stack[:, kind]) for kind, colour in names.items()]
    layers.append((RESERVED, RESERVED_COLOUR, stack[:, len(KINDS)]))
    for name, colour, layer in layers:
        if layer.any():
            drawn.append(
                go.Scatter(
                    x=times_s,
                    y=_rounded(layer * sizes.factor),
                    name=name,
                    mode="lines",
                    line={"width": 0, "shape": "hv", "color": colour},
                    fillcolor=colour,
                    stackgroup="kinds",
                    hovertemplate=f"%{{y:.2f}} {sizes.unit}",
                )
            )
    live_s, live = thinned(trace.start_s[:-1], trace.live_bytes, SAMPLES)
    curves = [("everything in memory", live_s, live, {"color": FAINT, "width": 1.1, "dash": "4px,3px"})]
    if measured is not None:
        samples = measured.memory.get("device", ())
        size = np.array([sample.size_bytes for sample in samples], dtype=np.int64)
        when_s = np.array([sample.time_s for sample in samples])
        curves.append(("measured", *thinned(when_s, size, SAMPLES), {"color": MEASURED_COLOUR, "width": 1.4}))
    for name, when_s, size, line in curves:
        drawn.append(
            go.Scatter(
                x=when_s,
                y=_rounded(size * sizes.factor),
                name=name,
                mode="lines",
                line={**line, "shape": "hv"},
                hovertemplate=f"%{{y:.2f}} {sizes.unit}",
            )
        )
    return drawn


def _top(chart: Figure, trace: Trace, plan: Plan, predicted: Timeline, sizes: Sizes) -> float:
    """Of the memory's axis: the in-memory peak, unless all else would be too low to see beside it."""
    used = max(plan.device_budget_bytes, predicted.peak_bytes)
    if trace.peak_bytes <= used * TALL:
        return max(used, trace.peak_bytes) * sizes.factor * 1.06
    chart.add_annotation(
        text=f"everything in memory: up to {format_bytes(trace.peak_bytes)} \u2191",
        x=0.5,
        xref="paper",
        y=used * CUT * sizes.factor,
        yref="y",
        yanchor="top",
        showarrow=False,
        font={"size": 12, "color": FAINT},
        bgcolor="rgba(255,255,255,0.85)",
    )
    return used * CUT * sizes.factor


def _budget_line(chart: Figure, plan: Plan, sizes: Sizes) -> None:
    chart.add_hline(
        y=plan.device_budget_bytes * sizes.factor, line={"color": INK, "width": 1.6}, row=1, col=1
    )
    chart.add_annotation(
        text=f"<b>budget</b><br>{format_bytes(plan.device_budget_bytes)}",
        x=1.006,
        xref="paper",
        xanchor="left",
        y=plan.device_budget_bytes * sizes.factor,
        yref="y",
        showarrow=False,
        align="left",
    )


def _sizes(largest_bytes: int) -> Sizes:
    return Sizes("MiB", 2.0**-20) if largest_bytes < 2**31 else Sizes("GiB", 2.0**-30)


def _rounded(values: Any) -> Any:
    return np.round(values, 4)
