"""The plan checker and the simulator count the same bytes, within which what is legal runs to its end."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.check import check
from penstock.core.columns import Lists
from penstock.core.hardware import Hardware
from penstock.core.memory_profile import resident_bytes, tier_bytes
from penstock.core.plan import Evict, Plan, Recompute
from penstock.core.trace import Trace
from penstock.simulator import Intervals, Replay, simulate
from tests.support.replays import copied_bytes, static_bytes
from tests.support.traces import legal_plans, machines, traces, whole_traces

any_trace = st.one_of(traces(6), whole_traces(5))


@given(data=st.data(), trace=any_trace, hardware=machines)
@settings(max_examples=60)
def test_they_count_the_same(data: st.DataObject, trace: Trace, hardware: Hardware) -> None:
    plan = data.draw(legal_plans(trace, hardware))
    replay = Replay(trace, hardware, plan.device_budget_bytes)
    rows = Intervals.of(plan.evictions, plan.recomputations)
    checked = resident_bytes(trace, plan.evictions, plan.recomputations, plan.variants)
    assert static_bytes(replay, rows, plan.variants).tolist() == checked.tolist()
    tiers = tier_bytes(trace, plan.evictions)
    for tier, occupied in copied_bytes(replay, rows).items():
        assert occupied.tolist() == tiers.get(tier, np.zeros_like(occupied)).tolist()


@given(data=st.data(), trace=any_trace, hardware=machines)
@settings(max_examples=60)
def test_what_is_legal_runs_within_its_budget(data: st.DataObject, trace: Trace, hardware: Hardware) -> None:
    plan = data.draw(legal_plans(trace, hardware))
    timeline = simulate(trace, plan, hardware)
    assert timeline.peak_bytes <= plan.device_budget_bytes
    for tier, occupied in tier_bytes(trace, plan.evictions).items():
        assert timeline.tier_peak_bytes(tier) <= occupied.max()
    replay = Replay(trace, hardware, plan.device_budget_bytes)
    result = replay.run(
        Intervals.of(plan.evictions, plan.recomputations), variants=plan.variants, stop_on_deadlock=True
    )
    assert np.isfinite(result.iteration_s)


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
    assert np.isfinite(result.iteration_s)
