"""Values come back from files as they were, and files that are something else are refused."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import gzip
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core import files
from penstock.core.check import check
from penstock.core.columns import Lists
from penstock.core.hardware import Hardware
from penstock.core.plan import Evict, Plan
from penstock.core.timeline import Timeline
from penstock.core.trace import Trace
from penstock.errors import InvalidFile
from penstock.planners import plan
from penstock.simulator import simulate
from tests.support.traces import gpt, legal_plans, machine, machines, whole_traces


def made() -> tuple[Trace, Hardware, Plan, Timeline]:
    trace, hardware = gpt(2), dataclasses.replace(machine(), measured_rates={"disk_read": ((4096, 1e8),)})
    decided = plan(trace, hardware, "g10", device_budget=trace.peak_bytes // 2)
    return trace, hardware, decided, simulate(trace, decided, hardware)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace(tmp_path: Path, name: str) -> None:
    trace = made()[0]
    trace.save(tmp_path / name)
    assert_equal(trace, Trace.load(tmp_path / name))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def assert_equal(trace: Trace, loaded: Trace) -> None:
    for field in dataclasses.fields(Trace):
        before, after = getattr(trace, field.name), getattr(loaded, field.name)
        if isinstance(before, Lists):
            assert (before.starts == after.starts).all() and (before.values == after.values).all()
        elif isinstance(before, np.ndarray):
            assert (before == after).all() and before.dtype == after.dtype
        else:
            assert before == after
    assert loaded.inactive_periods == trace.inactive_periods


@given(data=st.data(), trace=whole_traces(4), hardware=machines)
@settings(max_examples=30)
def test_every_action(
    data: st.DataObject, trace: Trace, hardware: Hardware, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("values")
    trace.save(folder / "trace.json.gz")
    loaded = Trace.load(folder / "trace.json.gz")
    assert_equal(trace, loaded)
    drawn = data.draw(legal_plans(trace, hardware))
    drawn = dataclasses.replace(drawn, lower_bound_s=1 / 3)
    drawn.save(folder / "plan.json")
    assert Plan.load(folder / "plan.json") == drawn
    assert check(loaded, drawn, hardware) == check(trace, drawn, hardware)


def test_hardware_plan_and_timeline(tmp_path: Path) -> None:
    _, hardware, decided, timeline = made()
    for value in (hardware, decided, timeline):
        value.save(tmp_path / "value.json")
        assert type(value).load(tmp_path / "value.json") == value


def test_what_a_dead_disk_has_left_goes_with_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hardware, path = made()[1], tmp_path / "hardware.json"
    kept = [tmp_path / name for name in (".hardware.json.bak", ".hardware.json.1", ".other.json.7.0")]
    for each in kept:
        each.write_text("the user's own")

    def dead(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        for name in ("fsync", "unlink"):
            patch.setattr(os, name, dead)
        with pytest.raises(OSError, match="Input/output"):
            hardware.save(path)
    (left,) = files.drafts(path)
    with left.open() as file:  # as if its writer lived
        fcntl.flock(file, fcntl.LOCK_EX)
        hardware.save(path)
        assert files.drafts(path) == [left]
    hardware.save(path)
    assert files.drafts(path) == [] and Hardware.load(path) == hardware
    assert {*tmp_path.iterdir()} == {path, *kept}


def test_a_plan_made_from_a_file_is_the_same(tmp_path: Path) -> None:
    trace, hardware, decided, _ = made()
    trace.save(tmp_path / "trace.json.gz")
    again = plan(
        Trace.load(tmp_path / "trace.json.gz"),
        hardware,
        "g10",
        device_budget=decided.device_budget_bytes,
    )
    assert again == decided


def test_fields_that_are_not_known_are_ignored(tmp_path: Path) -> None:
    """Such as the addresses that plans had."""
    decided = made()[2]
    decided.save(tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    document["value"]["offsets"] = [0, 256]
    (tmp_path / "plan.json").write_text(json.dumps(document))
    assert Plan.load(tmp_path / "plan.json") == decided


def test_a_plan_carries_its_trace(tmp_path: Path) -> None:
    trace, hardware, decided, _ = made()
    decided.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert decided.trace is trace and again.trace is not None
    assert again.trace.inactive_periods == trace.inactive_periods
    assert again.trace.live_bytes.tolist() == trace.live_bytes.tolist()
    assert check(again.trace, again, hardware) == []
    without = dataclasses.replace(decided, trace=None)
    assert without == again and "trace" not in repr(again)
    without.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").trace is None


@pytest.mark.parametrize("kind", [Trace, Plan])
def test_a_file_of_an_earlier_version_says_how_to_make_it_anew(tmp_path: Path, kind: type) -> None:
    trace, _, decided, _ = made()
    value = trace if kind is Trace else decided
    path = tmp_path / "old.json"
    value.save(path)
    path.write_text(re.sub(r"/\d", "/1", path.read_text(), count=1))
    with pytest.raises(InvalidFile, match=r"old\.json was made by an earlier version.*`penstock trace`"):
        kind.load(path)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not json",
        b"[]",
        b"3",
        b"{}",
        b'{"schema": "penstock.plan/3"}',
        b'{"schema": "penstock.plan/3", "value": 3}',
        b'{"schema": "penstock.plan/3", "value": {"policy": 3, "device_budget_bytes": 1}}',
        b'{"schema": "penstock.plan/4", "value": {"policy": "x", "device_budget_bytes": 1}}',
        b'{"schema": "penstock.trace/2", "value": {}}',
        gzip.compress(b"x" * 1000, mtime=0)[:20],
        gzip.compress(b"x" * 1000, mtime=0)[:-8] + b"damaged!",
        b"\xff\xfe",
        b'{"sch\xe5ma": "penstock.plan/3", "value": {}}',
    ],
)
def test_a_file_that_is_something_else_is_refused_by_name(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(data)
    with pytest.raises(InvalidFile, match=r"plan\.json"):
        Plan.load(path)


def test_a_truncated_plan_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    Plan(policy="test", device_budget_bytes=1, evictions=(Evict(0, 0, 1, 4, 3),)).save(path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(InvalidFile):
            Plan.load(path)
