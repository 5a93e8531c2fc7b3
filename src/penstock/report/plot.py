"""One picture of one iteration: memory over time, and what every stream did, predicted and measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.core.columns import PHASES
from penstock.core.plan import Plan
from penstock.core.timeline import Timeline
from penstock.core.trace import Trace
from penstock.errors import InvalidArgument, PenstockError, installing
from penstock.report.figure import FAINT, GRID, INK, MEASURED, STALL_COLOURS, Row, rows
from penstock.report.memory_by_kind import device_samples, layers, memory_unit
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PHASE_SHADES = dict(zip(PHASES, ("#ffffff", "#f3f6f8", "#ffffff"), strict=True))

SIZE_INCHES, DOTS_PER_INCH = (16, 10), 100
SMALLEST_GAP = 1 / 2000  # of the time axis: bars closer than this are drawn as one

Interval = tuple[float, float]


def plot(
    trace: Trace,
    plan: Plan,
    predicted: Timeline,
    measured: Timeline | None,
    path: str | Path,
    title: str = "",
) -> None:
    """Draw one iteration and write the picture to ``path``; its suffix decides the format.

    Raises PenstockError where matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise PenstockError(f"pictures need matplotlib: {installing('report')}") from error

    timelines = {"predicted": predicted} | ({"measured": measured} if measured is not None else {})
    stream_rows = rows(trace, predicted, measured)
    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, facecolor="white")
    memory, streams = figure.subplots(
        2,
        1,
        sharex=True,
        gridspec_kw={
            "height_ratios": [1.9, len(stream_rows) / 6],
            "hspace": 0.07,
            "left": 0.085,
            "right": 0.865,
            "top": 0.87,
            "bottom": 0.065,
        },
    )
    end_s = max([trace.ideal_s, *(timeline.iteration_s for timeline in timelines.values())])
    memory.set_xlim(0, end_s or 1.0)
    _draw_memory(memory, trace, plan, timelines)
    _draw_streams(streams, stream_rows, SMALLEST_GAP * end_s)
    phases = phase_intervals(trace, timelines.get("measured", predicted))
    for axes in (memory, streams):
        _shade_phases(axes, phases)
    _name_phases(memory, phases)
    figure.text(0.085, 0.945, title or "One iteration", fontsize=19, fontweight="bold", color=INK)
    figure.text(0.085, 0.912, _summary(trace, plan, timelines), fontsize=12.5, color=FAINT)
    try:
        figure.savefig(path)
    except ValueError as error:
        raise InvalidArgument(f"{path} cannot be written: {error}") from error


# -- memory ----------------------------------------------------------------------------------------


def _draw_memory(axes: Axes, trace: Trace, plan: Plan, timelines: dict[str, Timeline]) -> None:
    unit, scale = memory_unit(max(trace.peak_bytes, plan.device_budget_bytes))
    digits = 0 if unit == "MiB" else 2
    axes.stairs(
        trace.live_bytes * scale,
        trace.start_s,
        baseline=None,
        color=FAINT,
        linewidth=1.1,
        linestyle=(0, (4, 2.5)),
        label="everything in memory",
        zorder=2,
    )
    _draw_kinds(axes, trace, plan, timelines["predicted"], scale)
    if "measured" in timelines:
        times_s, sizes = device_samples(timelines["measured"])
        axes.step(
            times_s, sizes * scale, where="post", color=MEASURED, linewidth=1.3, label="measured", zorder=4
        )
    lines = [
        ("budget", plan.device_budget_bytes, INK, "-", 1.6),
        ("minimum", plan.minimum_bytes, FAINT, (0, (1, 2)), 1.4),
    ]
    top = max(trace.peak_bytes, plan.device_budget_bytes) * scale * 1.1
    axes.set_ylim(0, top)
    heights = _apart([size * scale for _, size, *_ in lines], least=0.085 * top)
    for (name, size, colour, style, width), height in zip(lines, heights, strict=True):
        axes.axhline(size * scale, color=colour, linewidth=width, linestyle=style, zorder=2.5)
        weight = "bold" if name == "budget" else "normal"
        said = f"{name}\n{size * scale:.{digits}f} {unit}"
        _beside(axes, said, 1.008, height, color=colour, fontsize=11, fontweight=weight, linespacing=1.25)
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(-0.006, 0.995),
        ncols=9,
        frameon=False,
        fontsize=10.5,
        labelcolor=INK,
        handlelength=1.4,
        columnspacing=1.4,
    )
    axes.set_ylabel(f"device memory ({unit})", color=INK, fontsize=12)
    axes.grid(axis="y", color=GRID, linewidth=0.8, zorder=0)
    _strip(axes)
    axes.tick_params(axis="x", length=0)


def _draw_kinds(axes: Axes, trace: Trace, plan: Plan, predicted: Timeline, scale: float) -> None:
    """What the plan keeps on the device, kind upon kind."""
    times_s, stack = layers(trace, plan, predicted)
    below = np.zeros(len(times_s))
    for name, colour, sizes in stack:
        above = below + sizes * scale
        axes.fill_between(times_s, below, above, step="post", color=colour, linewidth=0, zorder=1, label=name)
        below = above


def _apart(heights: Sequence[float], least: float) -> list[float]:
    """The same heights, descending, moved down where they are closer than ``least``."""
    placed: list[float] = []
    for height in heights:
        placed.append(min(height, placed[-1] - least) if placed else height)
    return placed


# -- streams ---------------------------------------------------------------------------------------


def _draw_streams(axes: Axes, rows: Sequence[Row], gap_s: float) -> None:
    place, places = 0.0, []
    for index, row in enumerate(rows):
        if index:
            place += 1.0 if rows[index - 1].stream == row.stream else 1.7
        places.append(place)
        for number, colour in enumerate(row.colours):
            is_stall = colour in STALL_COLOURS.values()
            intervals = _merged(((bar[0], bar[1]) for bar in row.bars if bar[2] == number), gap_s)
            axes.broken_barh(
                [(begin, end - begin) for begin, end in intervals],
                (place - 0.42, 0.84),
                color=colour,
                alpha=0.5 if row.source == "predicted" and not is_stall else 1.0,
                linewidth=0.6,  # the shortest can be seen, too
                zorder=4 if is_stall else 3,
            )
        _beside(axes, row.note, 1.008, place, fontsize=10.5, color=row.note_colour)
        _beside(axes, row.source, -0.006, place, ha="right", fontsize=10, color=FAINT)
    for stream, group in groupby(zip(rows, places, strict=True), key=lambda entry: entry[0].stream):
        above = min(height for _, height in group) - 0.72
        _beside(axes, stream.replace("_", " "), 0.004, above, fontsize=11, fontweight="bold", color=INK)
    axes.set_ylim(place + 0.7, -1.25)
    axes.set_yticks([])
    axes.set_xlabel("seconds", color=INK, fontsize=12)
    _strip(axes)


def _merged(intervals: Iterable[Interval], gap_s: float) -> list[Interval]:
    """Overlapping intervals, and those with no more than ``gap_s`` between them, as one each."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1] + gap_s:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


# -- phases ----------------------------------------------------------------------------------------


def phase_intervals(trace: Trace, timeline: Timeline) -> list[tuple[str, Interval]]:
    """The phases in order, each from its first kernel to the first of the next phase."""
    kernels = [
        span for span in timeline.spans if span.stream == "compute" and 0 <= span.index < trace.kernels
    ]
    runs = [
        (PHASES[phase], next(group).start_s)
        for phase, group in groupby(kernels, key=lambda span: int(trace.kernel_phase[span.index]))
    ]
    ends = [*runs[1:], ("", timeline.iteration_s)]
    return [(name, (begin, end)) for (name, begin), (_, end) in zip(runs, ends, strict=True)]


def _shade_phases(axes: Axes, phases: Sequence[tuple[str, Interval]]) -> None:
    for name, (begin, end) in phases:
        axes.axvspan(begin, end, color=PHASE_SHADES[name], linewidth=0, zorder=-1)
    for (_, (begin, _)), (_, (following, _)) in pairwise(phases):
        if following > begin:
            axes.axvline(following, color=GRID, linewidth=1.0, zorder=0)


def _name_phases(axes: Axes, phases: Sequence[tuple[str, Interval]]) -> None:
    """Name each phase once, where it lasts longest."""
    longest: dict[str, Interval] = {}
    for name, (begin, end) in phases:
        if name not in longest or end - begin > longest[name][1] - longest[name][0]:
            longest[name] = (begin, end)
    narrow = 0.07 * axes.get_xlim()[1]
    for name, (begin, end) in longest.items():
        fits = end - begin > narrow
        axes.annotate(
            name,
            ((begin + end) / 2 if fits else end, 0.975),
            xycoords=("data", "axes fraction"),
            ha="center" if fits else "right",
            va="top",
            fontsize=11,
            color=FAINT,
        )


def _summary(trace: Trace, plan: Plan, timelines: dict[str, Timeline]) -> str:
    steps = ", ".join(
        f"{format_seconds(timeline.iteration_s)} {source}" for source, timeline in timelines.items()
    )
    peaks = ", ".join(
        f"{format_bytes(timeline.peak_bytes)} {source}" for source, timeline in timelines.items()
    )
    return f"peak: {peaks}   |   one step: {steps}   |   policy {plan.policy}"


def _beside(axes: Axes, text: str, x: float, y: float, **style: Any) -> None:
    """Text at ``x``, a fraction of the width, and the height ``y`` of the data."""
    axes.annotate(text, (x, y), xycoords=("axes fraction", "data"), va="center", **style)


def _strip(axes: Axes) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.tick_params(colors=FAINT, labelsize=11, left=False)
