"""What Perfetto and chrome://tracing open: every rule of their format is kept, and nothing is lost."""

from __future__ import annotations

import gzip
import itertools
import json
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock import cli
from penstock.core.hardware import LINKS
from penstock.core.timeline import MemorySample, Span, Stall, Timeline, chrome_trace
from tests.support.trace_processor import trace_processor
from tests.support.traces import gpt

Events = list[dict[str, Any]]


def checked(text: bytes | str) -> dict[str, Events]:
    """The events of a file by process name, after the rules of the format."""
    content = json.loads(text)
    assert set(content) == {"traceEvents", "displayTimeUnit"} and content["displayTimeUnit"] in ("ms", "ns")
    names: dict[int, str] = {}
    tracks: dict[tuple[int, int], str] = {}
    by_process: dict[int, Events] = defaultdict(list)
    by_track: dict[tuple[int, int], Events] = defaultdict(list)
    for event in content["traceEvents"]:
        assert type(event["pid"]) is int and event["pid"] > 0 and isinstance(event["name"], str)
        by_process[event["pid"]].append(event)
        if event["ph"] == "M":
            if event["name"] == "process_name":
                names[event["pid"]] = event["args"]["name"]
            elif event["name"] == "thread_name":
                tracks[event["pid"], event["tid"]] = event["args"]["name"]
            else:
                assert event["name"] in ("process_sort_index", "thread_sort_index")
                assert type(event["args"]["sort_index"]) is int
            continue
        assert math.isfinite(event["ts"]) and event["ts"] >= 0
        if event["ph"] == "C":
            assert event["args"] and all(type(value) is int for value in event["args"].values())
        else:
            assert event["ph"] == "X" and math.isfinite(event["dur"]) and event["dur"] >= 0
            assert type(event["tid"]) is int and isinstance(event["args"], dict)
            by_track[event["pid"], event["tid"]].append(event)
    assert set(by_track) <= set(tracks) and set(by_process) == set(names)
    assert len(set(tracks.items())) == len(tracks) and len(set(names.values())) == len(names)
    for events in by_track.values():  # of one track, in whole nanoseconds
        spans = sorted((round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000)) for e in events)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    return {names[process]: events for process, events in by_process.items()}


def of(events: Events, category: str) -> Events:
    return [event for event in events if event.get("cat") == category]


def assert_holds(events: Events, timeline: Timeline) -> None:
    """All of the timeline is there, in microseconds and bytes."""
    for stream in ("compute", *LINKS):
        spans = [span for span in timeline.spans if span.stream == stream]
        found = of(events, stream)
        labels = [span.label.replace("\\", "\u2216") for span in spans]  # which Perfetto cannot read
        assert sorted(event["name"] for event in found) == sorted(labels)
        busy_us = sum(event["dur"] for event in found)
        assert busy_us == pytest.approx(timeline.busy_s(stream) * 1e6, abs=1e-3 * (len(spans) + 1))
        assert sum(event["args"].get("bytes", 0) for event in found) == timeline.moved_bytes(stream)
    stalled_us = sum(event["dur"] for event in of(events, "stalls"))
    assert stalled_us == pytest.approx(timeline.stall_s * 1e6, abs=1e-3 * (len(timeline.stalls) + 1))
    for tier, samples in timeline.memory.items():
        counted = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["name"] == f"{tier} memory"]
        assert counted == [sample.size_bytes for sample in samples]
    (step,) = of(events, "step")
    assert step["dur"] == pytest.approx(timeline.step_s * 1e6, abs=1e-3)


def predicted(hardware: penstock.Hardware) -> tuple[penstock.Trace, penstock.Plan, Timeline]:
    trace = gpt()
    plan = penstock.plan(trace, hardware, "g10", device_budget=trace.peak_bytes * 2 // 3)
    timeline = penstock.simulate(trace, plan, hardware)
    assert timeline.evicted_bytes and timeline.stalls
    return trace, plan, timeline


@pytest.fixture
def slow(hardware: penstock.Hardware) -> penstock.Hardware:
    return replace(hardware, disk_read_bytes_per_s=1e8, disk_write_bytes_per_s=1e8)


def test_predicted_and_measured_stand_in_one_file(slow: penstock.Hardware, tmp_path: Path) -> None:
    _, _, timeline = predicted(slow)
    early = [span._replace(start_s=span.start_s - 1e-3) for span in timeline.spans[:1]]
    measured = replace(timeline, source="measured", spans=(*early, *timeline.spans[1:]))
    timeline.save_chrome_trace(tmp_path / "step.json", measured)
    timeline.save_chrome_trace(tmp_path / "step.json.gz", measured)
    text = (tmp_path / "step.json").read_bytes()
    assert gzip.decompress((tmp_path / "step.json.gz").read_bytes()) == text
    found = checked(text)
    assert list(found) == ["penstock, predicted", "penstock, measured"]
    assert_holds(found["penstock, predicted"], timeline)
    assert_holds(found["penstock, measured"], measured)
    begins = {event["ts"] for events in found.values() for event in of(events, "step")}
    assert begins == {1000.0}, "both steps begin together, after the copy that was under way before"


def test_perfetto_shows_all_of_it(slow: penstock.Hardware, tmp_path: Path) -> None:
    """Its trace processor finds the slices in place, none inside another, the counters, and no fault."""
    _, _, timeline = predicted(slow)
    odd = [
        Span("disk_write", -2e-3, -1e-3, 'quotes " and \n and \\', 3, 1 << 50),
        Span("disk_write", -1.5e-3, 1e-3, "Grüße, 重み", 4, 5),
        Span("disk_write", -1e-3, -1e-3, "no time", -1, 6),
    ]
    measured = replace(timeline, source="measured", spans=(*odd, *timeline.spans))
    shown = {"penstock, predicted": timeline, "penstock, measured": measured}
    timeline.save_chrome_trace(tmp_path / "step.json.gz", measured)
    faults, tracks, main, slices, counters = trace_processor(
        tmp_path / "step.json.gz",
        "select name, value from stats where severity <> 'info' and value > 0",
        """select process.name as process, thread.name from thread join process using (upid)
        where thread.name is not null""",
        "select name from thread where is_main_thread and name is not null",
        """select process.name as process, thread.name as thread, s.name, ts, dur, depth,
          extract_arg(s.arg_set_id, 'args.bytes')
        from slice s join thread_track t on s.track_id = t.id
        join thread using (utid) join process using (upid)
        where s.category in ('compute', 'device_to_host', 'host_to_device', 'disk_write', 'disk_read')""",
        """select process.name as process, t.name, ts, value from counter c
        join process_counter_track t on c.track_id = t.id join process using (upid)""",
    )
    assert not faults
    links = {"compute", "disk read", "disk write", "step", "stalls"}
    assert set(tracks) == {(process, link) for process in shown for link in links} | {
        ("penstock, measured", "disk write (2)")
    }
    assert main == [("step",), ("step",)]
    origin_ns = -round(odd[0].start_s * 1e9)
    expected = [
        (
            process,
            span.stream.replace("_", " "),
            span.label.replace("\\", "\u2216").replace("\n", " "),
            origin_ns + round(span.start_s * 1e9),
            round(span.end_s * 1e9) - round(span.start_s * 1e9),
            0,
            span.size_bytes or None,
        )
        for process, timeline in shown.items()
        for span in timeline.spans
    ]
    seen = [(process, track.removesuffix(" (2)"), *rest) for process, track, *rest in slices]
    assert sorted(seen, key=str) == sorted(expected, key=str)
    assert sorted(counters) == sorted(
        (process, f"{tier} memory bytes", origin_ns + round(sample.time_s * 1e9), sample.size_bytes)
        for process, timeline in shown.items()
        for tier, samples in timeline.memory.items()
        for sample in samples
    )


times_s = st.floats(-1e-3, 100, allow_nan=False)
names = st.text(max_size=5).filter(lambda text: text.isprintable())
spans = st.builds(
    lambda stream, start_s, took_s, label, index, size: Span(
        stream, start_s, start_s + took_s, label, index, size if stream in LINKS else 0
    ),
    st.sampled_from(("compute", *LINKS)),
    times_s,
    st.floats(0, 10) | st.floats(0, 1e-8),
    names,
    st.integers(-1, 9),
    st.integers(0, 1 << 50),
)
timelines = st.builds(
    Timeline,
    step_s=st.floats(0, 100),
    spans=st.lists(spans, max_size=12).map(tuple),
    memory=st.dictionaries(
        st.sampled_from(("device", "host", "disk")),
        st.lists(st.builds(MemorySample, times_s, st.integers(0, 1 << 60)), max_size=4).map(tuple),
    ),
    stalls=st.lists(
        st.builds(
            lambda start_s, took_s, cause: Stall(start_s, start_s + took_s, cause, 0),
            st.floats(0, 9),
            st.floats(0, 9),
            st.sampled_from(("prefetch", "memory")),
        ),
        max_size=4,
    ).map(tuple),
    source=st.just("simulated"),
)


@settings(max_examples=50)
@given(timelines)
def test_any_timeline_gives_a_valid_file(timeline: Timeline) -> None:
    """Also where transfers overlap, begin before the step, take no time, or have names with quotes."""
    (events,) = checked(json.dumps(chrome_trace([timeline]))).values()
    assert_holds(events, timeline)


def test_the_commands_write_it(
    slow: penstock.Hardware,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    trace, plan, timeline = predicted(slow)
    trace.save("trace.json.gz")
    plan.save("plan.json")
    slow.save("slow.json")
    replace(timeline, source="measured").save("measured.json")
    given = ("trace.json.gz", "plan.json", "--hardware", "slow.json")
    assert cli.main(["simulate", *given, "--chrome-trace", "new/step.json"]) == 0
    assert "wrote new/step.json" in capsys.readouterr().out
    assert list(checked(Path("new/step.json").read_text())) == ["penstock, predicted"]
    shown = ("--measured", "measured.json", "--no-policies", "--chrome-trace", "both.json.gz")
    assert cli.main(["report", *given, *shown]) == 0
    assert "wrote both.json.gz" in capsys.readouterr().out
    found = checked(gzip.decompress(Path("both.json.gz").read_bytes()))
    assert list(found) == ["penstock, predicted", "penstock, measured"]
    assert_holds(found["penstock, predicted"], timeline)
