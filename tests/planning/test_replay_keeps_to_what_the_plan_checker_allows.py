"""Random legal plans: the replay stays within the memory that the plan checker counted, and its links."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.hardware import LINKS, Hardware
from penstock.core.memory_profile import resident_bytes, tier_bytes
from penstock.core.plan import Evict, Plan
from penstock.core.trace import Trace
from penstock.simulator import KEEP, Intervals, Replay, simulate
from tests.support.replays import copied_bytes, static_bytes
from tests.support.traces import PAGE, legal_plans, machines, traces, whole_traces

any_trace = st.one_of(traces(), whole_traces())

buses = st.builds(
    Hardware,
    device_bytes=st.just(2**40),
    host_bytes=st.just(2**40),
    disk_bytes=st.just(2**40),
    device_to_host_bytes_per_s=st.sampled_from([100.0 * PAGE, 2000.0 * PAGE]),
    host_to_device_bytes_per_s=st.sampled_from([100.0 * PAGE, 2000.0 * PAGE]),
    disk_read_bytes_per_s=st.sampled_from([80.0 * PAGE, 1500.0 * PAGE]),
    disk_write_bytes_per_s=st.sampled_from([80.0 * PAGE, 1500.0 * PAGE]),
    device_to_host_latency_s=st.sampled_from([0.0, 0.05]),
    disk_read_latency_s=st.sampled_from([0.0, 0.1]),
    compress_bytes_per_s=st.sampled_from([1000.0 * PAGE, 1e6 * PAGE]),
    expand_bytes_per_s=st.sampled_from([1000.0 * PAGE, 1e6 * PAGE]),
    disk_shares_bus=st.booleans(),
    duplex=st.sampled_from([0.5, 1.0]),
)
any_machine = st.one_of(machines, buses)


@given(data=st.data(), trace=any_trace, hardware=any_machine)
@settings(max_examples=60)
def test_memory_by_the_static_rule(data: st.DataObject, trace: Trace, hardware: Hardware) -> None:
    plan = data.draw(legal_plans(trace, hardware))
    replay = Replay(trace, hardware, plan.device_budget_bytes)
    intervals = Intervals.of(plan.evictions, plan.recomputations)
    needed = resident_bytes(trace, plan.evictions, plan.recomputations, plan.variants)
    assert static_bytes(replay, intervals, plan.variants).tolist() == needed.tolist()
    occupied = copied_bytes(replay, intervals)
    for tier, checked in tier_bytes(trace, plan.evictions).items():
        assert (occupied[tier] >= checked).all()


@given(data=st.data(), trace=any_trace, hardware=any_machine)
@settings(max_examples=100)
def test_a_legal_plan_runs_within_its_memory(data: st.DataObject, trace: Trace, hardware: Hardware) -> None:
    plan = data.draw(legal_plans(trace, hardware))
    replay = Replay(trace, hardware, plan.device_budget_bytes)
    intervals = Intervals.of(plan.evictions, plan.recomputations)
    result = replay.run(intervals, variants=plan.variants)
    assert not result.deadlock
    assert result.peak_bytes <= plan.device_budget_bytes
    for tier, occupied in copied_bytes(replay, intervals).items():
        assert result.tier_peak_bytes[tier] <= occupied.max(initial=0)
    timeline = simulate(trace, plan, hardware)
    assert timeline.iteration_s == result.iteration_s
    assert timeline.peak_bytes == result.peak_bytes
    assert simulate(trace, plan, hardware) == timeline


@given(data=st.data(), trace=any_trace, hardware=any_machine)
@settings(max_examples=60)
def test_streams_do_one_thing_at_a_time(data: st.DataObject, trace: Trace, hardware: Hardware) -> None:
    plan = data.draw(legal_plans(trace, hardware))
    timeline = simulate(trace, plan, hardware)
    tiny = 1e-9 * (1 + timeline.iteration_s)
    for stream in ("compute", *LINKS):
        spans = [span for span in timeline.spans if span.stream == stream]
        assert all(before.end_s <= after.start_s + tiny for before, after in pairwise(spans))
        assert all(-tiny <= span.start_s <= span.end_s <= timeline.iteration_s + tiny for span in spans)
        if stream != "compute":
            rate = hardware.rate_bytes_per_s(stream)
            for span in spans:
                # Where the iteration's end cuts a copy, its bytes are rounded.
                assert span.size_bytes <= rate * (span.end_s - span.start_s + tiny) + 1
    chosen = plan.variants or (-1,) * trace.kernels
    kernels_s = sum(
        float(trace.kernel_time_s[kernel]) if variant < 0 else trace.kernel_variants[kernel][variant].time_s
        for kernel, variant in enumerate(chosen)
    )
    assert timeline.iteration_s >= kernels_s - tiny
    wraps = any(entry.end >= trace.kernels for entry in (*plan.evictions, *plan.recomputations))
    if wraps:
        assert timeline.iteration_s == pytest.approx(timeline.busy_s("compute") + timeline.stall_s)


@given(data=st.data(), trace=any_trace)
@settings(max_examples=40)
def test_moves_cost_nothing_on_links_without_end(data: st.DataObject, trace: Trace) -> None:
    endless = float("inf")
    hardware = Hardware(
        device_bytes=2**50,
        host_bytes=2**50,
        disk_bytes=2**50,
        device_to_host_bytes_per_s=endless,
        host_to_device_bytes_per_s=endless,
        disk_read_bytes_per_s=endless,
        disk_write_bytes_per_s=endless,
        compress_bytes_per_s=endless,
        expand_bytes_per_s=endless,
    )
    plan = data.draw(legal_plans(trace, hardware))
    plan = replace(plan, recomputations=(), variants=())
    least = int(resident_bytes(trace, plan.evictions).max(initial=0))
    timeline = simulate(trace, replace(plan, device_budget_bytes=least), hardware)
    assert timeline.iteration_s == pytest.approx(trace.ideal_s)
    assert timeline.stalls == ()


@given(data=st.data(), trace=any_trace, hardware=any_machine)
@settings(max_examples=30)
def test_rows_that_are_kept_count_for_nothing(data: st.DataObject, trace: Trace, hardware: Hardware) -> None:
    plan = data.draw(legal_plans(trace, hardware))
    intervals = Intervals.of(plan.evictions, plan.recomputations)
    replay = Replay(trace, hardware, plan.device_budget_bytes)
    doubled = Intervals(*(np.repeat(column, 2) for column in intervals))
    doubled.action[1::2] = KEEP
    assert static_bytes(replay, doubled).tolist() == static_bytes(replay, intervals).tolist()
    once, twice = replay.run(intervals), replay.run(doubled)
    assert once.iteration_s == twice.iteration_s
    assert once.start_s.tolist() == twice.start_s.tolist()


def test_a_plan_is_not_a_plan_of_another_trace() -> None:
    from penstock.errors import InvalidArgument
    from tests.support.traces import five_kernels, machine

    for evict in (
        Evict(99, 0, 1, 2, 2),
        Evict(0, 0, 1, 99, 99),
        Evict(0, 0, 77, 78, 78),
        Evict(0, -5, 1, 2, 2),
    ):
        plan = Plan(policy="test", device_budget_bytes=10**9, evictions=(evict,))
        with pytest.raises(InvalidArgument, match="same trace"):
            simulate(five_kernels(), plan, machine(50.0))
