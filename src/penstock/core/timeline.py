"""What happened in one iteration, simulated or measured: a pure value, the same type for both."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.core import files
from penstock.core.hardware import LINKS
from penstock.core.tables import html_table
from penstock.units import format_bytes, format_seconds


class Span(NamedTuple):
    """Something that occupied a stream from ``start_s`` to ``end_s``.

    stream   "compute" or a key of penstock.core.hardware.LINKS. A copy is on one link: one to disk on
             the disk's own, though it may cross the bus that host copies use
    label    the kernel or the tensor, for people; on the compute stream also "recompute <kernel>",
             "compress <tensor>", "expand <tensor>" and "start copies"
    index    kernel index on the compute stream, tensor index on a link and where the compute stream
             compresses or expands; -1 when unknown, and where it starts copies
    """

    stream: str
    start_s: float
    end_s: float
    label: str
    index: int  # type: ignore[assignment]  # of a kernel or tensor, not tuple.index
    size_bytes: int = 0


class Stall(NamedTuple):
    """The compute stream waited from ``start_s`` to ``end_s`` before ``kernel``.

    cause   "prefetch" (an input was not back yet) or "memory" (evictions had not finished)
    """

    start_s: float
    end_s: float
    cause: str
    kernel: int


class MemorySample(NamedTuple):
    """From ``time_s`` on, ``size_bytes`` are in use, until the next sample."""

    time_s: float
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Timeline(files.Saveable):
    """One iteration over time, from 0 to `step_s`.

    spans    compute and every link
    memory   by tier: bytes in use over time
    stalls   every wait of the compute stream
    source   "simulated" or "measured"
    """

    step_s: float
    spans: tuple[Span, ...] = ()
    memory: Mapping[str, tuple[MemorySample, ...]] = field(default_factory=dict)
    stalls: tuple[Stall, ...] = ()
    source: str = "simulated"

    def __repr__(self) -> str:
        return (
            f"<penstock.Timeline, {self.source}: {format_seconds(self.step_s)}, stalls "
            f"{format_seconds(self.stall_s)}, peak {format_bytes(self.peak_bytes)}, "
            f"evicted {format_bytes(self.evicted_bytes)}>"
        )

    def _repr_html_(self) -> str:
        """In a notebook."""
        rows = [("step", format_seconds(self.step_s), "")]
        for cause in dict.fromkeys(stall.cause for stall in self.stalls):
            stalled_s = sum(stall.end_s - stall.start_s for stall in self.stalls if stall.cause == cause)
            rows.append((f"stalls for {cause}", format_seconds(stalled_s), ""))
        for stream in dict.fromkeys(span.stream for span in self.spans):
            moved = self.moved_bytes(stream)
            busy = format_seconds(self.busy_s(stream))
            rows.append((stream.replace("_", " "), busy, format_bytes(moved) if moved else ""))
        rows += [(f"peak, {tier}", "", format_bytes(self.tier_peak_bytes(tier))) for tier in self.memory]
        return html_table(rows, ("", "time", "bytes"), f"penstock timeline, {self.source}")

    @property
    def peak_bytes(self) -> int:
        """The most device bytes in use at any moment."""
        return self.tier_peak_bytes("device")

    def tier_peak_bytes(self, tier: str) -> int:
        return max((sample.size_bytes for sample in self.memory.get(tier, ())), default=0)

    @property
    def stall_s(self) -> float:
        """Seconds the compute stream waited."""
        return sum(stall.end_s - stall.start_s for stall in self.stalls)

    def busy_s(self, stream: str) -> float:
        """Seconds ``stream`` was occupied."""
        return sum(span.end_s - span.start_s for span in self.spans if span.stream == stream)

    def moved_bytes(self, *links: str) -> int:
        """Bytes that crossed the links."""
        return sum(span.size_bytes for span in self.spans if span.stream in links)

    @property
    def evicted_bytes(self) -> int:
        """Bytes that left the device."""
        return self.moved_bytes("device_to_host", "disk_write")

    def save_chrome_trace(self, path: str | Path, *others: Timeline) -> None:
        """Write to ``path`` what https://ui.perfetto.dev and chrome://tracing open: kernels, transfers by
        link, stalls, and memory by tier. Gzipped where the name ends in ``.gz``.

        others   timelines to show below, such as the measured one below the predicted one

        Raises OSError where the file cannot be written.
        """
        files.write(msgspec.json.encode(chrome_trace([self, *others])), path)


# -- the Trace Event Format, which Perfetto and chrome://tracing open --------------------------------
# https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU

Event = dict[str, Any]


def chrome_trace(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """The object that such a file holds: a process for each timeline, in their order.

    In each, a track for the step, for stalls, for the kernels and for each link that was used, and a counter
    for the memory of each tier. Times are microseconds from the beginning of the step, to a nanosecond;
    sizes are bytes. Events of one track never overlap: transfers that did, and kernels, get a track more.
    """
    starts_ns = [_ns(span.start_s) for timeline in timelines for span in timeline.spans]
    origin_ns = min([0, *starts_ns])  # a transfer may have begun in the step before: no time is negative
    events = [
        event
        for process, timeline in enumerate(timelines, start=1)
        for event in _events(timeline, process, origin_ns)
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(timeline: Timeline, process: int, origin_ns: int) -> Iterator[Event]:
    name = "predicted" if timeline.source == "simulated" else timeline.source
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": f"penstock, {name}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    step = Span("step", 0.0, timeline.step_s, f"step, {name}", -1)
    totals = {"stall_s": timeline.stall_s, "peak_bytes": timeline.peak_bytes}
    stalls = [
        Span("stalls", stall.start_s, stall.end_s, f"stall for {stall.cause}", stall.kernel)
        for stall in timeline.stalls
    ]
    tracks = [("step", [step]), ("stalls", stalls)]
    for stream in ("compute", *LINKS):
        tracks.append((stream, [span for span in timeline.spans if span.stream == stream]))
    thread = 0  # the step's has the number of the process: to Perfetto it is the main one, and stands first
    for title, spans in tracks:
        for number, lane in enumerate(_lanes(spans), start=1):
            shown = title.replace("_", " ") + (f" ({number})" if number > 1 else "")
            place = {"pid": process, "tid": 1000 * process + thread if thread else process}
            yield {"ph": "M", "name": "thread_name", **place, "args": {"name": shown}}
            yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": thread}}
            thread += 1
            for span in lane:
                start_ns, end_ns = _ns(span.start_s), _ns(span.end_s)
                yield {
                    "ph": "X",
                    "name": _shown(span.label),
                    "cat": title,
                    "ts": (start_ns - origin_ns) / 1000,
                    "dur": (end_ns - start_ns) / 1000,
                    **place,
                    "args": totals if title == "step" else _arguments(span),
                }
    for tier, samples in timeline.memory.items():
        for time_s, size_bytes in samples:
            ts = (_ns(time_s) - origin_ns) / 1000
            counter = {"ph": "C", "name": f"{tier} memory", "ts": max(ts, 0.0), "pid": process}
            yield {**counter, "args": {"bytes": size_bytes}}


def _arguments(span: Span) -> dict[str, int]:
    of_tensor = span.stream in LINKS or span.label.startswith(("compress ", "expand "))
    index = {"tensor" if of_tensor else "kernel": span.index} if span.index >= 0 else {}
    return {**index, "bytes": span.size_bytes} if span.size_bytes else index


def _shown(name: str) -> str:
    """Perfetto undoes no escapes of JSON but that of a quote, and refuses a file where a name ends in a
    backslash: what would be escaped is replaced."""
    if name.isprintable() and "\\" not in name:
        return name
    return "".join("\u2216" if each == "\\" else each if each.isprintable() else " " for each in name)


def _lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """The spans by start, in as few lists as there are spans at a time."""
    lanes: list[list[Span]] = []
    ends: list[tuple[int, int]] = []  # of each lane: when it is free again, and its number
    for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
        if ends and ends[0][0] <= _ns(span.start_s):
            _, lane = heapq.heappop(ends)
        else:
            lane = len(lanes)
            lanes.append([])
        lanes[lane].append(span)
        heapq.heappush(ends, (_ns(span.end_s), lane))
    return lanes


def _ns(time_s: float) -> int:
    return round(time_s * 1e9)
