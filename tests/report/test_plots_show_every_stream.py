"""The picture of an iteration has its words, and a row for each stream."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import pytest

import penstock
from penstock.report.chart import rows
from penstock.report.plot import merged, plot
from penstock.units import format_bytes
from tests.support.traces import gpt


@pytest.fixture
def slow(hardware: penstock.Hardware) -> penstock.Hardware:
    """A machine on which the step has to wait."""
    return replace(hardware, disk_read_bytes_per_s=1e8, disk_write_bytes_per_s=1e8)


@pytest.fixture
def trace() -> penstock.Trace:
    return replace(gpt(), notes={"model": "$x^ dollars$"})


@pytest.mark.parametrize("is_measured", [False, True], ids=["predicted", "measured"])
def test_a_picture_is_written(
    is_measured: bool, trace: penstock.Trace, slow: penstock.Hardware, tmp_path: Path
) -> None:
    plan = penstock.plan(trace, slow, device_budget=trace.peak_bytes * 3 // 4)
    predicted = penstock.simulate(trace, plan, slow)
    measured = penstock.simulate(trace.scaled(1.1), plan, slow) if is_measured else None
    plot(trace, plan, predicted, measured, tmp_path / "picture.png")
    assert matplotlib.image.imread(tmp_path / "picture.png").shape == (1000, 1600, 4)
    plot(trace, plan, predicted, measured, tmp_path / "picture.svg")
    texts = re.findall("<!-- (.+) -->", (tmp_path / "picture.svg").read_text())
    assert any(text.startswith("One training step of $x^ dollars$ within ") for text in texts)
    assert {"everything in memory", "disk write", "disk read", "forward", "backward"} <= set(texts)
    (headline,) = [text for text in texts if text.startswith("peak: ")]
    assert f"{format_bytes(predicted.peak_bytes)} predicted" in headline
    assert ("measured" in headline) == is_measured == any(text == "measured" for text in texts)


def test_a_picture_of_an_unknown_kind_is_refused(
    trace: penstock.Trace, hardware: penstock.Hardware, tmp_path: Path
) -> None:
    plan = penstock.plan(trace, hardware)
    with pytest.raises(penstock.InvalidArgument, match="xyz"):
        plot(trace, plan, penstock.simulate(trace, plan, hardware), None, tmp_path / "picture.xyz")


def test_streams_have_rows_for_what_was_predicted_and_measured(
    trace: penstock.Trace, slow: penstock.Hardware
) -> None:
    plan = penstock.plan(trace, slow, device_budget=trace.peak_bytes * 3 // 4)
    timeline = penstock.simulate(trace, plan, slow)
    found = rows(trace, timeline, timeline)
    assert [(row.stream, row.source) for row in found] == [
        (stream, source)
        for stream in ("compute", "disk_write", "disk_read")
        for source in ("predicted", "measured")
    ]
    assert found[0].figures.endswith("stalled")


def test_bars_closer_than_a_gap_are_one() -> None:
    assert merged([(2.0, 3.0), (0.0, 1.0), (1.05, 1.5)], gap_s=0.1) == [(0.0, 1.5), (2.0, 3.0)]
