"""One picture of one iteration: memory over time, and what every stream did, predicted and measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.core.columns import KINDS, PHASES
from penstock.core.hardware import LINKS
from penstock.core.plan import Plan
from penstock.core.timeline import Span, Timeline
from penstock.core.trace import Trace
from penstock.errors import InvalidArgument, PenstockError
from penstock.report.memory_by_kind import stack_bytes
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, FAINT, GRID = "#1f2933", "#7b8794", "#e4e7eb"
MEASURED = "#0b3c5d"
PHASE_COLOURS = dict(zip(PHASES, ("#8fb8d0", "#33658a", "#b9a779"), strict=True))
PHASE_SHADES = dict(zip(PHASES, ("#ffffff", "#f3f6f8", "#ffffff"), strict=True))
OUT_OF_DEVICE, INTO_DEVICE, STALL = "#3a9188", "#8c6bb1", "#d1343c"
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
LINK_COLOURS = {
    "device_to_host": OUT_OF_DEVICE,
    "host_to_device": INTO_DEVICE,
    "disk_write": OUT_OF_DEVICE,
    "disk_read": INTO_DEVICE,
}
LINK_ORDER = ("device_to_host", "disk_write", "disk_read", "host_to_device")
assert set(LINK_ORDER) == set(LINKS)

SIZE_INCHES, DOTS_PER_INCH = (16, 10), 100
SAMPLES = 1600  # of a curve, at most: about one for each pixel
SMALLEST_GAP = 1 / 2000  # of the time axis: bars closer than this are drawn as one

Interval = tuple[float, float]


class Row(NamedTuple):
    """One line of the lower panel.

    source   "predicted" or "measured"
    bars     colour and intervals, drawn one over the other
    note     what stands at its right
    """

    stream: str
    source: str
    bars: list[tuple[str, list[Interval]]]
    note: str


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
        raise PenstockError("pictures need matplotlib: pip install 'penstock[report]'") from error

    timelines = {"predicted": predicted} | ({"measured": measured} if measured is not None else {})
    rows = _rows(trace, timelines)
    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, facecolor="white")
    memory, streams = figure.subplots(
        2,
        1,
        sharex=True,
        gridspec_kw={
            "height_ratios": [1.9, len(rows) / 6],
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
    _draw_streams(streams, rows)
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
    unit, digits = ("MiB", 0) if plan.device_budget_bytes < 2**31 else ("GiB", 2)
    scale = 1 / (2**20 if unit == "MiB" else 2**30)

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
        times_s, sizes = _curve(timelines["measured"])
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
        axes.annotate(
            f"{name}\n{size * scale:.{digits}f} {unit}",
            (1.008, height),
            xycoords=("axes fraction", "data"),
            va="center",
            color=colour,
            fontsize=11,
            fontweight="bold" if name == "budget" else "normal",
            linespacing=1.25,
        )
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
    times_s, stack = stack_bytes(trace, plan, predicted, SAMPLES)
    layers = [(kind, colour, stack[:, KINDS.index(kind)]) for kind, colour in KIND_COLOURS.items()]
    layers.append((RESERVED, RESERVED_COLOUR, stack[:, len(KINDS)]))
    below = np.zeros(len(times_s))
    for name, colour, sizes in layers:
        if sizes.any():
            above = below + sizes * scale
            axes.fill_between(
                times_s,
                below,
                above,
                step="post",
                color=colour,
                linewidth=0,
                zorder=1,
                label=name.replace("_", " "),
            )
            below = above


def _curve(timeline: Timeline) -> tuple[np.ndarray, np.ndarray]:
    """Times and device bytes in use from then on, to the end of the iteration."""
    samples = timeline.memory.get("device", ())
    times_s = [sample.time_s for sample in samples]
    sizes = [sample.size_bytes for sample in samples]
    if samples:  # what is in use before the first sample, and after the last
        times_s = [0.0, *times_s, max(timeline.iteration_s, times_s[-1])]
        sizes = [sizes[0], *sizes, sizes[-1]]
    return np.array(times_s), np.array(sizes, dtype=np.float64)


def _apart(heights: Sequence[float], least: float) -> list[float]:
    """The same heights, descending, moved down where they are closer than ``least``."""
    placed: list[float] = []
    for height in heights:
        placed.append(min(height, placed[-1] - least) if placed else height)
    return placed


# -- streams ---------------------------------------------------------------------------------------


def _rows(trace: Trace, timelines: dict[str, Timeline]) -> list[Row]:
    rows = []
    links = [
        link
        for link in LINK_ORDER
        if any(span.stream == link for timeline in timelines.values() for span in timeline.spans)
    ]
    for source, timeline in timelines.items():
        bars = [
            (colour, [interval for name, interval in phase_intervals(trace, timeline) if name == phase])
            for phase, colour in PHASE_COLOURS.items()
        ]
        stalls = [(stall.start_s, stall.end_s) for stall in timeline.stalls]
        rows.append(Row("compute", source, [*bars, (STALL, stalls)], _stall_note(timeline)))
    for link in links:
        for source, timeline in timelines.items():
            spans = [span for span in timeline.spans if span.stream == link]
            bars = [(LINK_COLOURS[link], _merged(_intervals(spans), timeline.iteration_s * SMALLEST_GAP))]
            rows.append(Row(link, source, bars, format_bytes(timeline.moved_bytes(link))))
    return rows


def _stall_note(timeline: Timeline) -> str:
    return f"{format_seconds(timeline.stall_s)} stalled" if timeline.stall_s else "no stall"


def _draw_streams(axes: Axes, rows: Sequence[Row]) -> None:
    place, places = 0.0, []
    for index, row in enumerate(rows):
        if index:
            place += 1.0 if rows[index - 1].stream == row.stream else 1.7
        places.append(place)
        for colour, intervals in row.bars:
            axes.broken_barh(
                [(begin, end - begin) for begin, end in intervals],
                (place - 0.42, 0.84),
                color=colour,
                alpha=0.5 if row.source == "predicted" and colour != STALL else 1.0,
                linewidth=0.6,  # the shortest can be seen, too
                zorder=4 if colour == STALL else 3,
            )
        axes.annotate(
            row.note,
            (1.008, place),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=10.5,
            color=STALL if row.note.endswith("stalled") else FAINT,
        )
        axes.annotate(
            row.source,
            (-0.006, place),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="center",
            fontsize=10,
            color=FAINT,
        )
    for stream, group in groupby(zip(rows, places, strict=True), key=lambda entry: entry[0].stream):
        heights = [height for _, height in group]
        axes.annotate(
            stream.replace("_", " "),
            (0.004, min(heights) - 0.72),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=11,
            fontweight="bold",
            color=INK,
        )
    axes.set_ylim(place + 0.7, -1.25)
    axes.set_yticks([])
    axes.set_xlabel("seconds", color=INK, fontsize=12)
    _strip(axes)


def _intervals(spans: Iterable[Span]) -> list[Interval]:
    return [(span.start_s, span.end_s) for span in spans]


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


def _strip(axes: Axes) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.tick_params(colors=FAINT, labelsize=11, left=False)
