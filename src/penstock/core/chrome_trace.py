"""Timelines in the Trace Event Format, which Perfetto and chrome://tracing open: a pure function.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.core.hardware import LINKS
from penstock.core.timeline import Span, Timeline

Event = dict[str, Any]

NAMES = {"simulated": "predicted"}  # of a timeline, by its source; others are called as they are


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
    name = NAMES.get(timeline.source, timeline.source)
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": f"penstock, {name}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    step = Span("step", 0.0, timeline.iteration_s, f"step, {name}", -1)
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
