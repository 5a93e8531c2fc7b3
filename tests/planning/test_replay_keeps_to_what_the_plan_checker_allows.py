"""The plan checker and the replay count the same bytes, in which legal plans run, and keep to their links."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.check import check
from penstock.core.columns import Lists
from penstock.core.hardware import LINKS, Hardware
from penstock.core.memory_profile import resident_bytes, tier_bytes
from penstock.core.plan import Evict, Plan, Recompute
from penstock.core.timeline import Timeline
from penstock.core.trace import Trace
from penstock.errors import InvalidArgument
from penstock.simulator import KEEP, Intervals, Replay, simulate
from tests.support.replays import copied_bytes, static_bytes
from tests.support.traces import PAGE, five_kernels, legal_plans, machine, machines, traces, whole_traces

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
@settings(max_examples=100)
def test_legal_plans(data: st.DataObject, trace: Trace, hardware: Hardware) -> None:
    plan = data.draw(legal_plans(trace, hardware))
    replay = Replay(trace, hardware, plan.device_budget_bytes)
    rows = Intervals.of(plan.evictions, plan.recomputations)
    both_count_the_same(trace, plan, replay, rows)
    kept_rows_count_for_nothing(replay, rows)
    result = replay.run(rows, variants=plan.variants, stop_on_deadlock=True)
    timeline = simulate(trace, plan, hardware)
    assert not result.deadlock and np.isfinite(result.step_s)
    assert timeline.step_s == result.step_s
    assert timeline.peak_bytes == result.peak_bytes <= plan.device_budget_bytes
    for tier, occupied in copied_bytes(replay, rows).items():
        assert timeline.tier_peak_bytes(tier) <= occupied.max(initial=0)
        assert result.tier_peak_bytes[tier] <= occupied.max(initial=0)
    assert simulate(trace, plan, hardware) == timeline
    streams_do_one_thing_at_a_time(trace, plan, hardware, timeline)


def both_count_the_same(trace: Trace, plan: Plan, replay: Replay, rows: Intervals) -> None:
    checked = resident_bytes(trace, plan.evictions, plan.recomputations, plan.variants)
    assert static_bytes(replay, rows, plan.variants).tolist() == checked.tolist()
    tiers = tier_bytes(trace, plan.evictions)
    for tier, occupied in copied_bytes(replay, rows).items():
        assert occupied.tolist() == tiers.get(tier, np.zeros_like(occupied)).tolist()


def kept_rows_count_for_nothing(replay: Replay, rows: Intervals) -> None:
    doubled = Intervals(*(np.repeat(column, 2) for column in rows))
    doubled.action[1::2] = KEEP
    assert static_bytes(replay, doubled).tolist() == static_bytes(replay, rows).tolist()
    once, twice = replay.run(rows), replay.run(doubled)
    assert once.step_s == twice.step_s
    assert once.start_s.tolist() == twice.start_s.tolist()


def streams_do_one_thing_at_a_time(trace: Trace, plan: Plan, hardware: Hardware, timeline: Timeline) -> None:
    tiny = 1e-9 * (1 + timeline.step_s)
    for stream in ("compute", *LINKS):
        spans = [span for span in timeline.spans if span.stream == stream]
        assert all(before.end_s <= after.start_s + tiny for before, after in pairwise(spans))
        assert all(-tiny <= span.start_s <= span.end_s <= timeline.step_s + tiny for span in spans)
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
    assert timeline.step_s >= kernels_s - tiny
    wraps = any(entry.end >= trace.kernels for entry in (*plan.evictions, *plan.recomputations))
    if wraps:
        assert timeline.step_s == pytest.approx(timeline.busy_s("compute") + timeline.stall_s)


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
    assert timeline.step_s == pytest.approx(trace.ideal_s)
    assert timeline.stalls == ()


def test_results_of_one_kernel_are_made_again_in_the_room_of_both() -> None:
    """The second needs no room for the first, which is there by then."""
    trace = Trace(
        kernel_name=tuple(f"kernel{number}" for number in range(9)),
        kernel_time_s=np.array([0, 0, 0, 0.5, 0, 0, 0, 0, 0]),  # the eviction is over before kernel 4
        kernel_workspace_bytes=np.zeros(9, np.int64),
        kernel_phase=np.array([0, 0, 0, 1, 1, 1, 1, 1, 2]),
        inputs=Lists.of([[2], [4, 2, 0], [4, 5], [5], [4, 0, 7], [3], [2], [6], [1]]),
        outputs=Lists.of([[3, 4], [5], [6], [7], [7], [8], [9], [10], []]),
        tensor_bytes=np.full(11, 4096),
        tensor_kind=np.array([0, 0, 4, 3, 3, 3, 3, 1, 1, 1, 1]),
        tensor_persistent=np.arange(11) < 2,
        tensor_birth=np.array([0, 0, 0, 0, 0, 1, 2, 3, 5, 6, 7]),
        tensor_death=np.array([9, 9, 7, 6, 5, 4, 8, 5, 6, 7, 8]),
        tensor_recompute=np.array([-1, -1, -1, 0, 0, -1, -1, -1, -1, -1, -1]),
    )
    hardware = Hardware(
        device_bytes=1 << 50,
        disk_bytes=1 << 50,
        disk_read_bytes_per_s=2e5,
        disk_write_bytes_per_s=2e5,
        device_to_host_bytes_per_s=8e5,
        host_to_device_bytes_per_s=8e5,
    )
    plan = Plan(
        policy="by hand",
        device_budget_bytes=7 * 4096,
        evictions=(Evict(tensor=0, after=0, begin=2, end=4, prefetch_at=4),),
        recomputations=(Recompute(tensor=3, begin=1, end=4), Recompute(tensor=4, begin=3, end=4)),
    )
    assert check(trace, plan, hardware) == []
    result = Replay(trace, hardware, plan.device_budget_bytes).run(
        Intervals.of(plan.evictions, plan.recomputations)
    )
    assert not result.deadlock
    assert np.isfinite(result.step_s)


def test_a_plan_is_not_a_plan_of_another_trace() -> None:
    for evict in (
        Evict(99, 0, 1, 2, 2),
        Evict(0, 0, 1, 99, 99),
        Evict(0, 0, 77, 78, 78),
        Evict(0, -5, 1, 2, 2),
    ):
        plan = Plan(policy="test", device_budget_bytes=10**9, evictions=(evict,))
        with pytest.raises(InvalidArgument, match="same trace"):
            simulate(five_kernels(), plan, machine(50.0))
