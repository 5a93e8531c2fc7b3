"""The chart of one iteration, as values: device memory by kind of tensor, and below it what every stream did.

`figure` draws it in the page, `plot` as a picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.columns import PHASES, FloatArray, IntArray
from penstock.core.hardware import LINKS
from penstock.core.plan import Plan
from penstock.core.timeline import Timeline
from penstock.core.trace import Trace
from penstock.report.memory_by_kind import SAMPLES, device_samples, layers, thinned
from penstock.report.summary import CAUSE_TEXT, CAUSES, EXTRA_WORK, extra_work
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
TALL, CUT = 4.0, 2.2  # in budgets: a peak above the first is cut off at the second


@dataclass(frozen=True, slots=True)
class ChartRow:
    """One line of bars.

    source   "predicted" or "measured"
    figures  what stands at its right
    colours  of its groups of bars
    bars     (start_s, end_s, group, what, index), ascending by start; what: "k" a kernel, "t" a tensor's
             copy, "r", "c", "e" work of EXTRA_WORK, "s" a predicted stall and "m" a measured one
    """

    stream: str
    source: str
    figures: str
    figures_colour: str
    colours: tuple[str, ...]
    bars: list[tuple[float, float, int, str, int]]

    @property
    def title(self) -> str:
        """What stands at its left: the stream once, at its first row."""
        return self.stream.replace("_", " ") if self.source == "predicted" else self.source


def rows(trace: Trace, predicted: Timeline, measured: Timeline | None) -> list[ChartRow]:
    """Compute first, then every link that was used; predicted above measured."""
    timelines = {"predicted": predicted} | ({"measured": measured} if measured is not None else {})
    found = [_compute(trace, source, timeline) for source, timeline in timelines.items()]
    for link, colour in LINK_COLOURS.items():
        if not any(span.stream == link for timeline in timelines.values() for span in timeline.spans):
            continue
        for source, timeline in timelines.items():
            spans = [span for span in timeline.spans if span.stream == link]
            bars = sorted((span.start_s, span.end_s, 0, "t", span.index) for span in spans)
            busy = timeline.busy_s(link) / timeline.step_s if timeline.step_s else 0.0
            figures = f"{format_bytes(timeline.moved_bytes(link))}, {busy * 100:.0f} % busy"
            found.append(ChartRow(link, source, figures, FAINT, (colour,), bars))
    return found


def _compute(trace: Trace, source: str, timeline: Timeline) -> ChartRow:
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
    figures = f"{format_seconds(timeline.stall_s)} stalled" if timeline.stall_s else "no stall"
    colour = STALL if timeline.stall_s else FAINT
    return ChartRow("compute", source, figures, colour, tuple(COMPUTE_COLOURS.values()), sorted(bars))


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Memory over time: ``sizes`` [N], in the chart's unit, each from its time [N] on.

    style   "stacked" upon the curve before, "dashed" or "line"
    """

    name: str
    colour: str
    style: str
    times_s: FloatArray
    sizes: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chart:
    """What is drawn. Sizes are in `unit`.

    top     of the memory's axis: the in-memory peak, unless all else would be too low to see beside it
    cut     says how high the in-memory peak is where it is cut off; else empty
    """

    title: str
    unit: str
    end_s: float
    top: float
    cut: str
    budget: float
    budget_text: str
    curves: Sequence[Curve]
    rows: Sequence[ChartRow]


def chart(trace: Trace, plan: Plan, predicted: Timeline, measured: Timeline | None) -> Chart:
    timelines = [predicted] if measured is None else [predicted, measured]
    largest = max(trace.peak_bytes, plan.device_budget_bytes)
    unit, unit_bytes = ("MiB", 2**20) if largest < 2**31 else ("GiB", 2**30)
    curves: list[Curve] = []

    def add(name: str, colour: str, style: str, times_s: FloatArray, sizes: IntArray) -> None:
        curves.append(Curve(name, colour, style, times_s, sizes / unit_bytes))

    times_s, stack = layers(trace, plan, predicted)
    for name, colour, sizes in stack:
        add(name, colour, "stacked", times_s, sizes)
    add("everything in memory", FAINT, "dashed", *thinned(trace.start_s[:-1], trace.live_bytes, SAMPLES))
    if measured is not None:
        add("measured", MEASURED, "line", *thinned(*device_samples(measured), SAMPLES))
    used = max(plan.device_budget_bytes, predicted.peak_bytes)
    is_cut = trace.peak_bytes > used * TALL
    return Chart(
        title=_title(trace, plan),
        unit=unit,
        end_s=max([trace.ideal_s, *(timeline.step_s for timeline in timelines)]) or 1.0,
        top=(used * CUT if is_cut else max(used, trace.peak_bytes) * 1.06) / unit_bytes,
        cut=f"everything in memory: up to {format_bytes(trace.peak_bytes)} \u2191" if is_cut else "",
        budget=plan.device_budget_bytes / unit_bytes,
        budget_text=format_bytes(plan.device_budget_bytes),
        curves=curves,
        rows=rows(trace, predicted, measured),
    )


def _title(trace: Trace, plan: Plan) -> str:
    model, batch = trace.notes.get("model"), trace.notes.get("batch")
    of = f" of {model}" if model else ""
    of += f", batch {batch}," if model and batch else ""
    budget, peak = format_bytes(plan.device_budget_bytes), format_bytes(trace.peak_bytes)
    return f"One training step{of} within {budget}; {peak} with everything in memory"
