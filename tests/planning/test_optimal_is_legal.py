"""Whatever the trace, the machine and the time limit: what `optimal` answers is legal."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.check import check
from penstock.core.hardware import Hardware
from penstock.core.memory_profile import minimum_bytes
from penstock.core.plan import Evict, Plan
from penstock.core.trace import Trace
from penstock.errors import SpillSpaceFull
from penstock.planners import Problem, plan
from penstock.planners.rules import FreeBytes
from penstock.simulator import simulate
from tests.support.traces import (
    Step,
    gpt,
    machine,
    machines,
    one_byte_less,
    small_tiers,
    traces,
    whole_traces,
)

optimal_module = import_module("penstock.planners.optimal")  # the package has a function of that name


@pytest.fixture(autouse=True)
def few_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimal_module, "MOST_CHANGES", 200)


any_machine = st.builds(
    replace,
    st.one_of(machines, small_tiers),
    copy_overhead_s=st.sampled_from([0.0, 0.3]),
    byte_overhead_s=st.sampled_from([0.0, 0.01]),
)


@settings(max_examples=100)
@given(
    trace=st.one_of(traces(), whole_traces()),
    hardware=any_machine,
    share=st.one_of(st.just(0.0), st.floats(0, 1)),
    recompute=st.booleans(),
    compress=st.booleans(),
    limit_s=st.sampled_from([0.0, 0.1, 60.0, 60.0]),
)
def test_for_every_trace(
    trace: Trace, hardware: Hardware, share: float, recompute: bool, compress: bool, limit_s: float
) -> None:
    """For budgets between the least possible and the peak; refused only where the tiers are too small."""
    least = minimum_bytes(trace)
    budget = least + int(share * (trace.peak_bytes - least))

    def legal_or_refused(hardware: Hardware) -> Plan | None:
        try:
            made = plan(
                trace,
                hardware,
                "optimal",
                recompute=recompute,
                compress=compress,
                time_limit_s=limit_s,
                device_budget=budget,
            )
        except SpillSpaceFull:
            assert hardware.disk_bytes < trace.tensor_bytes.sum() and budget < trace.peak_bytes
            return None
        sound(trace, hardware, made)
        assert made.minimum_bytes == least
        timeline = simulate(trace, made, hardware)
        assert timeline.peak_bytes == made.predicted_peak_bytes <= budget
        assert timeline.step_s == made.predicted_step_s >= timeline.busy_s("compute") - 1e-9
        for tier in ("device", "host", "disk"):
            assert timeline.tier_peak_bytes(tier) <= hardware.capacity_bytes(tier)
        return made

    if (made := legal_or_refused(hardware)) is not None and made.evictions:
        legal_or_refused(one_byte_less(trace, made, hardware))


def sound(trace: Trace, hardware: Hardware, result: Plan) -> None:
    assert check(trace, result, hardware) == []
    assert result.predicted_step_s >= result.lower_bound_s * (1 - 1e-9)


def test_an_eviction_that_shares_a_copy_needs_room_as_long_as_that_stays() -> None:
    """Another tensor has the room on the host while the weight is on the disk, and later on the host."""
    step = Step()
    weight, other = step.tensor(60, "weight", persistent=True), step.tensor(60)
    step.kernel("first", 1.0, [weight], [other])
    for name in ("second", "third"):
        step.kernel(name, 1.0)
    step.kernel("fourth", 1.0, [weight, other])
    step.kernel("fifth", 1.0)
    step.kernel("last", 1.0, [weight])
    trace, hardware = step.trace(), machine(host_bytes=100)
    early = Evict(weight, 0, 1, 3, 3, "disk")
    evictions = (early, Evict(other, 0, 1, 3, 3, "host"), Evict(weight, 3, 4, 5, 5, "host"))
    assert check(trace, Plan(policy="none", device_budget_bytes=120, evictions=evictions), hardware) == []
    room = FreeBytes(Problem(trace, hardware, 120))
    for evict in evictions[1:]:
        room.take("host", evict)
    assert not room.fits("host", early)
    moved = Plan(
        policy="none", device_budget_bytes=120, evictions=(replace(early, tier="host"), *evictions[1:])
    )
    assert "host has to hold 120 B" in check(trace, moved, hardware)[0]


def test_where_no_tier_has_room() -> None:
    trace = gpt(2)
    hardware = replace(machine(), disk_bytes=1)
    with pytest.raises(SpillSpaceFull, match="Raise"):
        plan(trace, hardware, "optimal", device_budget=minimum_bytes(trace))


def test_the_same_question_has_the_same_answer() -> None:
    trace = gpt(2)
    hardware = machine(trace.tensor_bytes.sum() / trace.ideal_s / 4, host_bytes=trace.peak_bytes // 4)
    budget = (minimum_bytes(trace) + trace.peak_bytes) // 2
    answers = [plan(trace, hardware, "optimal", time_limit_s=600, device_budget=budget) for _ in range(2)]
    assert answers[0] == answers[1]


def test_without_a_solver_the_plan_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimal_module, "find_spec", lambda name: None)
    trace = gpt(2)
    hardware = machine(trace.tensor_bytes.sum() / trace.ideal_s / 4)
    result = plan(trace, hardware, "optimal", device_budget=minimum_bytes(trace))
    sound(trace, hardware, result)
    assert "pip install '.[plan]'" in result.reason


def test_an_input_that_is_written_later_is_there_when_its_reader_runs_again() -> None:
    step = Step()
    given, made = step.tensor(100, "input"), step.tensor(100)
    step.kernel("read", 0.0, [given], [made])
    for index in range(4):
        step.kernel(f"between{index}", 1.0, outputs=[step.tensor(100 * (1 + index % 2))])
    step.kernel("use", 1.0, [made], phase="backward")
    step.kernel("write", 1.0, [given], [given], phase="backward")
    trace = replace(step.trace(), tensor_recompute=np.array([-1, 0, -1, -1, -1, -1]))
    for slack in range(0, 300, 50):
        hardware = machine(10.0, device_bytes=minimum_bytes(trace) + slack)
        sound(trace, hardware, plan(trace, hardware, "optimal", recompute=True))


def test_few_large_tensors_move_where_that_is_as_fast_as_any_plan() -> None:
    """A copy costs the processor time whatever its size."""
    step = Step()
    small = [step.tensor(1 << 20) for _ in range(24)]
    large = [step.tensor(12 << 20) for _ in range(2)]
    for tensor in large + small:
        step.kernel("make", 1.0, [], [tensor])
    peak = step.tensor(4 << 20)
    step.kernel("peak", 1.0, [], [peak])
    for tensor in small[::-1] + large[::-1]:
        step.kernel("use", 1.0, [tensor])
    trace = step.trace()
    made = plan(trace, machine(1e9), device_budget=trace.peak_bytes - (10 << 20))
    assert made.predicted_step_s <= trace.ideal_s * 1.001
    assert {evict.tensor for evict in made.evictions} <= set(large)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_what_costs_no_time_goes_to_the_host(share: float) -> None:
    trace = gpt(6)
    budget = (minimum_bytes(trace) + trace.peak_bytes) // 2
    host_bytes = int(share * trace.peak_bytes)
    result = plan(trace, machine(1e12, host_bytes=host_bytes), device_budget=budget)
    assert result.gap == pytest.approx(0)
    tiers = [evict.tier for evict in result.evictions]
    assert tiers and set(tiers) == {"host"}
    sound(trace, machine(1e12, host_bytes=host_bytes), result)


def test_the_disk_helps_a_host_that_would_be_too_slow() -> None:
    trace = gpt(6)
    budget = (minimum_bytes(trace) + trace.peak_bytes) // 2
    hardware = replace(machine(3e8, host_bytes=trace.peak_bytes), host_to_device_bytes_per_s=3e8)
    result = plan(trace, replace(hardware, device_to_host_bytes_per_s=3e8), device_budget=budget)
    assert {evict.tier for evict in result.evictions} == {"host", "disk"}
