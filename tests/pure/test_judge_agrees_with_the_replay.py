"""The judge and the simulator count the same bytes, and what is legal runs within them without a deadlock."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.hardware import Hardware
from penstock.core.pressure import resident_bytes, tier_bytes
from penstock.core.trace import Trace
from penstock.simulator import simulate
from penstock.simulator.replay import Absences, Replay

from .traces import legal_plans, machines, traces, whole_traces

any_trace = st.one_of(traces(6), whole_traces(5))


@given(data=st.data(), trace=any_trace, hardware=machines)
@settings(max_examples=60, deadline=None)
def test_they_count_the_same(data: st.DataObject, trace: Trace, hardware: Hardware) -> None:
    plan = data.draw(legal_plans(trace, hardware))
    replay = Replay(trace, hardware, plan.device_budget_bytes)
    rows = Absences.of_plan(plan)
    judged = resident_bytes(trace, plan.evictions, plan.recomputations, plan.variants)
    assert replay.static_bytes(rows, variants=plan.variants).tolist() == judged.tolist()
    tiers = tier_bytes(trace, plan.evictions)
    for tier, occupied in replay.tier_bytes(rows).items():
        assert occupied.tolist() == tiers.get(tier, np.zeros_like(occupied)).tolist()


@given(data=st.data(), trace=any_trace, hardware=machines)
@settings(max_examples=60, deadline=None)
def test_what_is_legal_runs_within_its_budget(data: st.DataObject, trace: Trace, hardware: Hardware) -> None:
    plan = data.draw(legal_plans(trace, hardware))
    timeline = simulate(trace, plan, hardware)
    assert timeline.peak_bytes <= plan.device_budget_bytes
    for tier, occupied in tier_bytes(trace, plan.evictions).items():
        assert timeline.tier_peak_bytes(tier) <= occupied.max()
    replay = Replay(trace, hardware, plan.device_budget_bytes)
    result = replay.run(Absences.of_plan(plan), variants=plan.variants, stop_on_deadlock=True)
    assert np.isfinite(result.iteration_s)
