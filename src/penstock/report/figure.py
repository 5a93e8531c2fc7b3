"""The chart of the page: device memory by kind of tensor, and below it what every stream did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.core.plan import Plan
from penstock.core.timeline import Timeline
from penstock.core.trace import Trace
from penstock.errors import PenstockError
from penstock.report.memory_by_kind import SAMPLES, device_samples, layers, memory_unit, thinned
from penstock.report.rows import FAINT, GRID, INK, MEASURED, Row
from penstock.units import format_bytes

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

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
        raise PenstockError("the page needs plotly: pip install 'penstock[report]'") from error

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
    _budget_line(chart, plan, factor)
    chart.update_xaxes(range=[0, end_s], showgrid=False, zeroline=False, linecolor=GRID)
    chart.update_xaxes(title_text="seconds", ticks="outside", tickcolor=GRID, row=2, col=1)
    chart.update_yaxes(
        title_text=f"device memory ({unit})",
        range=[0, _top(chart, trace, plan, predicted, factor)],
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


def _budget_line(chart: Figure, plan: Plan, factor: float) -> None:
    chart.add_hline(y=plan.device_budget_bytes * factor, line={"color": INK, "width": 1.6}, row=1, col=1)
    chart.add_annotation(
        text=f"<b>budget</b><br>{format_bytes(plan.device_budget_bytes)}",
        x=1.006,
        xref="paper",
        xanchor="left",
        y=plan.device_budget_bytes * factor,
        yref="y",
        showarrow=False,
        align="left",
    )
