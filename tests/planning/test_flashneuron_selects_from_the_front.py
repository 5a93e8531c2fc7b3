"""FlashNeuron: linear selection, then compression-aware, and failure where activations are not enough."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.artifact import flashneuron_g10, own_iteration_s
from penstock.core.check import check
from penstock.core.hardware import Hardware
from penstock.core.memory_profile import minimum_bytes
from penstock.core.plan import Plan
from penstock.core.trace import Trace
from penstock.errors import InvalidArgument, SpillSpaceFull
from penstock.planners.flashneuron import flashneuron
from penstock.planners.problem import Policy, Problem, as_traced
from penstock.simulator import simulate
from penstock.units import parse_bytes
from tests.support.traces import PAGE, Step, machine, machines, traces, whole_traces


def chain(density: list[float] | None = None, size: int = 4000) -> Trace:
    """Six kernels that each make ``size`` bytes for the backward pass, with weights of 1000."""
    step = Step()
    weight = step.tensor(1000, "weight", persistent=True)
    maps: list[int] = []
    for index in range(6):
        maps.append(step.tensor(size))
        step.kernel(f"forward{index}", 1.0, [weight, *maps[-2:-1]], [maps[-1]])
    for index, tensor in enumerate(reversed(maps)):
        step.kernel(
            f"backward{index}", 1.0, [weight, tensor], [step.tensor(40, "gradient")], phase="backward"
        )
    trace = step.trace()
    if density is None:
        return trace
    full = np.ones(trace.tensors)
    full[maps] = density
    return replace(trace, tensor_density=full)


def planned(
    trace: Trace, hardware: Hardware, budget: int, compress: bool = False, policy: Policy = flashneuron_g10
) -> Plan:
    variants, runs = as_traced(trace, budget)
    made = policy(Problem(runs, hardware, budget, compress=compress))
    return Plan(
        policy="test",
        device_budget_bytes=budget,
        evictions=made.evictions,
        variants=variants,
        reason=made.reason,
    )


@pytest.mark.parametrize("policy", [flashneuron, flashneuron_g10])
@given(
    trace=st.one_of(traces(), whole_traces()),
    hardware=machines,
    fraction=st.floats(0, 1.2),
    compress=st.booleans(),
)
@settings(max_examples=100)
def test_plans_are_legal_and_a_refusal_names_a_budget_that_leads_to_one(
    policy: Policy, trace: Trace, hardware: Hardware, fraction: float, compress: bool
) -> None:
    least = minimum_bytes(trace)
    budget = least + int(fraction * (trace.peak_bytes - least))
    made = None
    while made is None:
        try:
            made = planned(trace, hardware, budget, compress, policy)
        except InvalidArgument as refused:
            assert "raise" in str(refused).lower()
            named = re.search(r"needs a device budget of ([\d.]+ \w+)", str(refused))
            following = parse_bytes(named[1]) if named else budget + budget // 8 + PAGE
            assert following > budget
            budget = following
    assert budget <= 2 * trace.peak_bytes + 2**20
    assert check(trace, made, hardware) == []
    assert {evict.tier for evict in made.evictions} <= {"disk"}
    assert simulate(trace, made, hardware).peak_bytes <= budget


def test_the_paper_leaves_room_for_what_is_not_buffered() -> None:
    # Weights of 1000 and gradients of 240: 16,000 are left for four of the six, less a byte.
    trace = chain()
    made = planned(trace, machine(4000.0), 1000 + 240 + 16_001, policy=flashneuron)
    assert [evict.tensor for evict in made.evictions] == [1, 2]


def test_a_refusal_names_the_smallest_budget_at_which_its_own_selection_is_enough() -> None:
    # One backward kernel reads three that are offloaded at once: the paper leaves no room for them.
    step = Step()
    weight = step.tensor(1000, "weight", persistent=True)
    maps: list[int] = []
    for index in range(6):
        maps.append(step.tensor(4000))
        unread = [step.tensor(6000)] if index == 5 else []
        step.kernel(f"forward{index}", 1.0, [weight, *maps[-2:-1]], [maps[-1], *unread])
    for index, tensor in enumerate(reversed(maps)):
        read = [weight, tensor, *(maps[:3] if index == 0 else [])]
        step.kernel(f"backward{index}", 1.0, read, [step.tensor(40, "gradient")], phase="backward")
    trace, hardware = step.trace(), machine(1e6)

    def message(budget: int) -> str:
        try:
            planned(trace, hardware, budget, policy=flashneuron)
        except InvalidArgument as refused:
            return str(refused)
        return ""

    budgets = range(minimum_bytes(trace), trace.peak_bytes, 97)
    budget = next(budget for budget in budgets if message(budget))
    named = re.search(r"needs a device budget of ([\d.]+ \w+)", message(budget))
    assert named is not None
    least = parse_bytes(named[1])
    assert least < trace.peak_bytes and not message(least)
    assert all(message(tried) for tried in range(budget, least - 10, 97))


def test_tensors_are_taken_from_the_beginning_until_the_rest_fits() -> None:
    trace = chain()
    # Weights of 1000, the largest kernel's own 9000: 14,000 are left for four of the six, less a byte.
    made = planned(trace, machine(4000.0), 1000 + 9000 + 12_001)
    assert [evict.tensor for evict in made.evictions] == [1, 2, 3]


def test_the_host_is_left_alone_unless_there_is_no_disk() -> None:
    trace = chain()
    with_disk = planned(trace, machine(4000.0, host_bytes=2**30), 22_001)
    assert {evict.tier for evict in with_disk.evictions} == {"disk"}
    without = planned(trace, machine(4000.0, host_bytes=2**30, disk_bytes=0), 22_001)
    assert {evict.tier for evict in without.evictions} == {"host"}


def test_phase_2_exchanges_what_does_not_compress_for_what_does() -> None:
    # The third and fourth compress; the copies of the first three take twice the forward pass.
    trace = chain(density=[1.0, 1.0, 0.1, 0.1, 1.0, 1.0])
    plain = planned(trace, machine(1000.0), 22_001)
    assert {evict.codec for evict in plain.evictions} == {"raw"}
    made = planned(trace, machine(1000.0), 22_001, compress=True)
    assert [(evict.tensor, evict.codec) for evict in made.evictions] == [(1, "raw"), (3, "csr"), (4, "csr")]


def test_phase_2_is_left_alone_where_the_copies_have_time() -> None:
    trace = chain(density=[1.0, 1.0, 1.0, 0.1, 1.0, 1.0])
    made = planned(trace, machine(1e6), 22_001, compress=True)
    assert [evict.tensor for evict in made.evictions] == [1, 2, 3]


def test_a_budget_below_what_stays_is_refused_with_what_is_needed() -> None:
    with pytest.raises(InvalidArgument, match=r"needs a device budget of .* choose a policy .* g10"):
        planned(chain(), machine(4000.0), 9_500)


def test_a_disk_that_is_too_small_is_refused() -> None:
    with pytest.raises(SpillSpaceFull, match="disk budget"):
        planned(chain(), machine(4000.0, disk_bytes=5000), 22_001)


def test_its_own_runtime_waits_for_all_copies_before_the_backward_pass() -> None:
    # Three copies of 4 s each, one after the other from the end of kernel 1 on, and reads of 4 s.
    trace = chain()
    hardware = machine(1000.0)
    problem = Problem(trace, hardware, 22_001)
    made = planned(trace, hardware, 22_001)
    own_s = own_iteration_s(problem)
    assert own_s >= simulate(trace, made, hardware).step_s
    assert own_s >= 2 + 3 * 4 + 3 * 4
    assert f"{own_s:.3f} s" in made.reason


def test_nothing_is_offloaded_where_everything_fits() -> None:
    trace = chain()
    assert planned(trace, machine(1000.0), trace.peak_bytes).evictions == ()
    assert own_iteration_s(Problem(trace, machine(1000.0), trace.peak_bytes)) == trace.ideal_s
