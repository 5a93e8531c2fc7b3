"""Memory by kind adds up to what the simulator counts, and thinning it loses no peak."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.core.columns import KINDS
from penstock.report.memory_by_kind import device_bytes_by_kind, evictions, thinned
from penstock.report.summary import summarise
from tests.support.traces import gpt


@pytest.fixture
def slow(hardware: penstock.Hardware) -> penstock.Hardware:
    """A machine on which the step has to wait."""
    return replace(hardware, disk_read_bytes_per_s=1e8, disk_write_bytes_per_s=1e8)


@pytest.mark.parametrize("fraction", [0.5, 0.75, 1.0])
@pytest.mark.parametrize("policy", ["evict_all", "g10"])
def test_the_kinds_are_never_more_than_what_is_in_use(
    policy: str, fraction: float, slow: penstock.Hardware
) -> None:
    trace = gpt()
    budget = int(trace.peak_bytes * fraction)
    plan = penstock.plan(trace, slow, policy, device_budget=budget)
    timeline = penstock.simulate(trace, plan, slow)
    times_s, by_kind = device_bytes_by_kind(trace, plan, timeline)
    assert (by_kind >= 0).all() and (np.diff(times_s) > 0).all()
    total = by_kind.sum(axis=1)
    weights = KINDS.index("weight")
    inside = (times_s >= 0) & (times_s < timeline.step_s)
    assert (by_kind[inside, weights] <= trace.persistent_bytes).all()
    if fraction == 1.0:
        assert (by_kind[inside, weights] == trace.persistent_bytes).all()
    assert total.max() == timeline.peak_bytes <= budget

    samples = timeline.memory["device"]
    moments = (times_s[inside] + np.append(times_s[inside][1:], timeline.step_s)) / 2
    counted = np.array([sample.size_bytes for sample in samples])
    counted = counted[np.searchsorted([sample.time_s for sample in samples], moments, side="right") - 1]
    # What is in use beyond the kinds has been given to copies that wait for their turn.
    assert (counted >= total[inside]).all()


def test_an_eviction_has_its_copies(slow: penstock.Hardware) -> None:
    trace = gpt()
    plan = penstock.plan(trace, slow, "g10", device_budget=trace.peak_bytes * 3 // 4)
    found = evictions(trace, plan, penstock.simulate(trace, plan, slow))
    assert [eviction.evict for eviction in found] == list(plan.evictions)
    for eviction in found:
        if eviction.read is not None and eviction.written is not None:
            assert eviction.written.index == eviction.read.index == eviction.evict.tensor
            assert eviction.written.end_s <= eviction.read.start_s


def test_a_summary_adds_up(slow: penstock.Hardware) -> None:
    trace = gpt()
    plan = penstock.plan(trace, slow, "g10", device_budget=trace.peak_bytes * 3 // 4)
    timeline = penstock.simulate(trace, plan, slow)
    summary = summarise(trace, plan, timeline)
    assert sum(summary.stall_s.values()) == pytest.approx(timeline.stall_s)
    assert summary.written_bytes == {"host": 0, "disk": timeline.moved_bytes("disk_write")}
    assert summary.predicted_step_s == timeline.step_s >= summary.lower_bound_s > 0
    assert summary.gap == pytest.approx(timeline.step_s / summary.lower_bound_s - 1)
    named = dict(summary.rows())
    assert "above the bound" in named["bound"] and "disk" in named["moved"] and "prefetch" in named["stalls"]


@given(
    sizes=st.lists(st.lists(st.integers(0, 2**40), min_size=2, max_size=2), min_size=1, max_size=200),
    points=st.integers(2, 40),
)
@settings(max_examples=60)
def test_thinning_keeps_the_first_and_the_largest(sizes: list[list[int]], points: int) -> None:
    times_s, table = np.arange(float(len(sizes))), np.array(sizes)
    kept_s, kept = thinned(times_s, table, points)
    assert len(kept_s) <= max(points, 2) and kept_s[0] == 0 and (np.diff(kept_s) > 0).all()
    assert kept.sum(axis=1).max() == table.sum(axis=1).max()
    assert (table[kept_s.astype(int)] == kept).all()
