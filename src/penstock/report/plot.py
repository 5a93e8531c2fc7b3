"""The chart as a picture, by matplotlib."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.plan import Plan
from penstock.core.timeline import Timeline
from penstock.core.trace import Trace
from penstock.errors import InvalidArgument, PenstockError, installing
from penstock.report.chart import FAINT, GRID, INK, LEGEND, STALL_COLOURS, Chart, chart
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMALLEST_GAP = 1 / 2000  # of the time axis: bars closer than this are drawn as one

Interval = tuple[float, float]


def plot(trace: Trace, plan: Plan, predicted: Timeline, measured: Timeline | None, path: str | Path) -> None:
    """Draw one iteration and write the picture to ``path``; its suffix decides the format.

    Raises PenstockError where matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ModuleNotFoundError as error:
        raise PenstockError(f"pictures need matplotlib: {installing('report')}") from error

    shown = chart(trace, plan, predicted, measured)
    picture = Figure(figsize=(16, 10), dpi=100, facecolor="white")
    memory, streams = picture.subplots(
        2, 1, sharex=True, gridspec_kw={"height_ratios": [1.9, len(shown.rows) / 6], "hspace": 0.07}
    )
    picture.subplots_adjust(left=0.095, right=0.865, top=0.87, bottom=0.1)
    memory.set_xlim(0, shown.end_s)
    _draw_memory(memory, shown)
    _draw_streams(streams, shown)
    heading = picture.text(0.095, 0.945, shown.title, fontsize=19, fontweight="bold", color=INK)
    heading.set_parse_math(False)  # a model may be called anything
    picture.text(0.095, 0.912, _summary(plan, predicted, measured), fontsize=12.5, color=FAINT)
    patches = [Patch(color=colour, label=name) for name, colour in LEGEND.items()]
    picture.legend(handles=patches, loc="lower left", bbox_to_anchor=(0.09, 0.005), **_LEGEND_STYLE)
    try:
        picture.savefig(path)
    except ValueError as error:
        raise InvalidArgument(f"{path} cannot be written: {error}") from error


def _draw_memory(axes: Axes, shown: Chart) -> None:
    below: Any = 0.0
    for curve in shown.curves:
        if curve.style == "stacked":
            above = below + curve.sizes
            axes.fill_between(
                curve.times_s, below, above, step="post", color=curve.colour, linewidth=0, label=curve.name
            )
            below = above
        else:
            axes.step(
                curve.times_s,
                curve.sizes,
                where="post",
                color=curve.colour,
                linewidth=1.2,
                linestyle=(0, (4, 2.5)) if curve.style == "dashed" else "-",
                label=curve.name,
            )
    axes.axhline(shown.budget, color=INK, linewidth=1.6)
    _beside(axes, f"budget\n{shown.budget_text}", shown.budget, color=INK, fontsize=11, fontweight="bold")
    if shown.cut:
        axes.annotate(shown.cut, (0.5, 0.98), xycoords="axes fraction", ha="center", va="top", color=FAINT)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.006, 0.995), **_LEGEND_STYLE)
    axes.set_ylim(0, shown.top)
    axes.set_ylabel(f"device memory ({shown.unit})", color=INK, fontsize=12)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    _strip(axes)
    axes.tick_params(axis="x", length=0)


def _draw_streams(axes: Axes, shown: Chart) -> None:
    for place, row in enumerate(shown.rows):
        for group, colour in enumerate(row.colours):
            intervals = merged((bar[:2] for bar in row.bars if bar[2] == group), SMALLEST_GAP * shown.end_s)
            is_stall = colour in STALL_COLOURS.values()
            axes.broken_barh(
                [(begin, end - begin) for begin, end in intervals],
                (place - 0.36, 0.72),
                color=colour,
                alpha=0.5 if row.source == "predicted" and not is_stall else 1.0,
                linewidth=0.6,  # the shortest can be seen, too
                zorder=4 if is_stall else 3,
            )
        _beside(axes, row.figures, place, fontsize=10.5, color=row.figures_colour)
    axes.set_yticks(range(len(shown.rows)), [row.title for row in shown.rows])
    axes.set_ylim(len(shown.rows) - 0.42, -0.58)
    axes.set_xlabel("seconds", color=INK, fontsize=12)
    _strip(axes)


_LEGEND_STYLE = {
    "ncols": 9,
    "frameon": False,
    "fontsize": 10.5,
    "labelcolor": INK,
    "handlelength": 1.4,
    "columnspacing": 1.4,
}


def merged(intervals: Iterable[Interval], gap_s: float) -> list[Interval]:
    """Overlapping intervals, and those with no more than ``gap_s`` between them, as one each."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1] + gap_s:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _summary(plan: Plan, predicted: Timeline, measured: Timeline | None) -> str:
    timelines = {"predicted": predicted} | ({} if measured is None else {"measured": measured})
    peaks = ", ".join(f"{format_bytes(each.peak_bytes)} {source}" for source, each in timelines.items())
    steps = ", ".join(f"{format_seconds(each.step_s)} {source}" for source, each in timelines.items())
    return f"peak: {peaks}   |   one step: {steps}   |   policy {plan.policy}"


def _beside(axes: Axes, text: str, height: float, **style: Any) -> None:
    """Text at the right of the axes, at a height of the data."""
    axes.annotate(text, (1.008, height), xycoords=("axes fraction", "data"), va="center", **style)


def _strip(axes: Axes) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.tick_params(colors=FAINT, labelsize=11, left=False)
