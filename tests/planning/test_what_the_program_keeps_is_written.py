"""What the program keeps and no kernel reads again is written where there is no room, as predicted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.core.memory_profile import leaves_for_good, minimum_bytes
from penstock.core.plan import Evict, Plan
from penstock.core.timeline import Stall
from penstock.core.trace import Trace, within_budget
from penstock.planners import plan
from penstock.planners.optimal.search import FoundPlan, choices, plan_search
from penstock.planners.problem import Problem
from penstock.report.summary import summarise
from penstock.runtime.schedule import EvictAction, ReleaseAction, schedule
from penstock.simulator import simulate
from tests.support.traces import PAGE, Step, machine, whole_traces

BUSY = replace(machine(100.0), disk_read_bytes_per_s=200.0)


def gradients() -> Trace:
    """Two updates of a weight of 100 bytes by a gradient of 100 bytes; then two kernels that need 100 bytes
    beside the weights. Each takes 1 s. The program keeps the gradients to the end."""
    step = Step()
    weights = [step.tensor(100, "weight", persistent=True) for _ in range(2)]
    kept = [step.tensor(100, "gradient") for _ in range(2)]
    step.kernel("backward", 1.0, outputs=kept, phase="backward")
    for weight, gradient in zip(weights, kept, strict=True):
        step.kernel("update", 1.0, inputs=[weight, gradient], outputs=[weight], phase="optimizer")
    for _ in range(2):
        step.kernel("more", 1.0, inputs=weights, workspace_bytes=100, phase="optimizer")
    trace = step.trace()
    return replace(trace, tensor_death=np.full(trace.tensors, trace.kernels))


def nothing_planned(budget_bytes: int, *evictions: Evict) -> Plan:
    return Plan(policy="test", device_budget_bytes=budget_bytes, evictions=evictions)


def left(trace: Trace, made: Plan, host_bytes: int = 0) -> list[tuple[int, int, str]]:
    """(tensor, kernel, tier) of what leaves for good."""
    return [(last.tensor, last.begin, last.tier) for last in leaves_for_good(trace, made, host_bytes)]


def written(trace: Trace, made: Plan, disk_bytes_per_s: float = 100.0) -> list[tuple[int, float, float]]:
    """(tensor, start, end) of what is written."""
    timeline = simulate(trace, made, machine(disk_bytes_per_s))
    return [(span.index, span.start_s, span.end_s) for span in timeline.spans if span.stream == "disk_write"]


def test_nothing_is_written_where_all_of_it_fits() -> None:
    assert written(gradients(), nothing_planned(500)) == []


def test_only_what_has_no_room_is_written_and_the_longest_useless_first() -> None:
    trace = gradients()
    assert left(trace, nothing_planned(400)) == [(2, 2, "disk")]
    assert written(trace, nothing_planned(400)) == [(2, 2, 3)]
    assert left(trace, nothing_planned(300)) == [(2, 2, "disk"), (3, 3, "disk")]


def test_a_kernel_waits_until_its_memory_is_written() -> None:
    """At 50 bytes per second, the first gradient is written from 2 s to 4 s; kernel 3 could start at 3 s."""
    timeline = simulate(gradients(), nothing_planned(400), machine(50.0))
    assert timeline.step_s == 6 and timeline.stalls == (Stall(3, 4, "memory", 3),)
    assert timeline.peak_bytes == 400
    assert written(gradients(), nothing_planned(300), 50.0) == [(2, 2, 4), (3, 5, 7)]


def test_the_host_has_it_as_far_as_there_is_room() -> None:
    trace, made = gradients(), nothing_planned(300)
    assert left(trace, made, 200) == [(2, 2, "host"), (3, 3, "host")]
    assert left(trace, made, 199) == [(2, 2, "host"), (3, 3, "disk")]
    timeline = simulate(trace, made, machine(host_bytes=199))
    moved = [(span.index, span.stream) for span in timeline.spans if span.stream != "compute"]
    assert moved == [(2, "device_to_host"), (3, "disk_write")]
    actions = [action for actions in schedule(trace, made, 199).before for action in actions]
    assert [action.tier for action in actions if isinstance(action, EvictAction)] == ["host", "disk"]


def test_without_a_disk_the_host_has_all_of_it() -> None:
    timeline = simulate(gradients(), nothing_planned(300), machine(host_bytes=199, disk_bytes=0))
    moved = [(span.index, span.stream) for span in timeline.spans if span.stream != "compute"]
    assert moved == [(2, "device_to_host"), (3, "device_to_host")]


def test_it_takes_no_room_that_the_plan_has_on_the_host() -> None:
    """Weight 1, of 100 bytes, is there while kernel 1 runs, and until kernel 2 has."""
    away = Evict(1, after=0, begin=1, end=2, prefetch_at=2, tier="host")
    trace, made = gradients(), nothing_planned(300, away)
    assert left(trace, made, 200) == [(2, 2, "host"), (3, 3, "host")]
    assert left(trace, made, 199) == [(2, 2, "disk"), (3, 3, "host")]


def test_what_was_on_a_tier_goes_there_again() -> None:
    step = Step()
    read, other = step.tensor(100), step.tensor(100)
    step.kernel("make", 1.0, outputs=[read])
    step.kernel("other", 1.0, outputs=[other])
    step.kernel("read", 1.0, inputs=[read])
    step.kernel("more", 1.0, inputs=[other], workspace_bytes=100)
    trace = replace(step.trace(), tensor_death=np.array([4, 4]))
    made = nothing_planned(200, Evict(0, after=0, begin=1, end=2, prefetch_at=2))
    assert left(trace, made, 1000) == [(0, 3, "disk")]


def test_it_counts_as_written_to_the_disk() -> None:
    trace = gradients()
    made = plan(trace, machine(100.0), device_budget=400)
    summary = summarise(trace, made, simulate(trace, made, machine(100.0)))
    assert summary.written_bytes["disk"] == 100
    assert made.predicted_step_s == summary.predicted_step_s


def test_a_copy_that_is_there_is_not_written_again() -> None:
    """Read once more, unwritten, after it was away: its memory is free at once."""
    step = Step()
    read, other = step.tensor(100), step.tensor(100)
    step.kernel("make", 1.0, outputs=[read])
    step.kernel("other", 1.0, outputs=[other])
    step.kernel("read", 1.0, inputs=[read])
    step.kernel("more", 1.0, inputs=[other], workspace_bytes=100)
    trace = replace(step.trace(), tensor_death=np.array([4, 4]))
    away = Evict(0, after=0, begin=1, end=2, prefetch_at=2)
    made = nothing_planned(200, away)
    assert left(trace, made) == [(0, 3, "disk")]
    assert written(trace, made, 1000.0) == [(0, 1, 1.1)]


@given(data=st.data(), trace=whole_traces(), fraction=st.floats(0, 1))
@settings(max_examples=40)
def test_a_run_does_what_is_predicted(data: st.DataObject, trace: Trace, fraction: float) -> None:
    death = [data.draw(st.integers(end, trace.kernels)) for end in trace.tensor_death.tolist()]
    trace = replace(trace, tensor_death=np.array(death))
    least = minimum_bytes(trace)
    budget = least + int(fraction * (trace.peak_bytes - least))
    made = plan(trace, machine(1e6), "g10", device_budget=budget)
    kept = [(tensor, kernel) for tensor, kernel, _ in left(trace, made)]
    carried_out = schedule(trace, made)
    for tensor, kernel in kept:
        actions = carried_out.before[kernel]
        assert ReleaseAction(tensor) in actions
        assert any(isinstance(action, EvictAction) and action.tensor == tensor for action in actions)
    moved = {evict.tensor for evict in made.evictions}
    used = trace.uses.values
    timeline = simulate(trace, made, machine(1e6))
    count = {tensor: 0 for tensor, _ in kept}
    for span in timeline.spans:
        if span.stream == "disk_write" and span.index in count:
            count[span.index] += 1
    for tensor, _ in kept:
        if tensor not in moved and tensor in used:
            assert count[tensor] == 1
    assert timeline.peak_bytes <= budget


@given(
    data=st.data(),
    trace=whole_traces(),
    fraction=st.floats(0, 1),
    tiers=st.sampled_from([(0, 1 << 40), (300 * PAGE, 1 << 40), (1 << 40, 0)]),
)
@settings(max_examples=40)
def test_the_search_counts_what_it_takes(
    data: st.DataObject, trace: Trace, fraction: float, tiers: tuple[int, int]
) -> None:
    """What the search found is what the simulator says of its plan."""
    death = [data.draw(st.integers(end, trace.kernels)) for end in trace.tensor_death.tolist()]
    program = replace(trace, tensor_death=np.array(death))
    least = minimum_bytes(program)
    budget = least + int(fraction * (program.peak_bytes - least))
    assume(budget < program.peak_bytes)
    hardware = replace(BUSY, host_bytes=tiers[0], disk_bytes=tiers[1])
    problem = Problem(within_budget(program, budget), hardware, budget, program=program)
    options = choices(problem)
    search = plan_search(problem, options)
    start = search.repair(np.zeros(len(options), dtype=np.int8), True)
    assume(start is not None)
    found = FoundPlan(
        *search.improve(
            start, np.zeros_like(start), 100, seconds=60.0, target_s=0.0, temperature=1e-3, seed=0
        )
    )
    assume(np.isfinite(found.step_s))
    evictions, recomputations = found.intervals(problem.trace)
    made = replace(nothing_planned(budget, *evictions), recomputations=recomputations)
    assert simulate(program, made, hardware).step_s == pytest.approx(found.step_s)


def test_a_plan_that_leaves_room_for_it_is_found() -> None:
    """Where the weights stay, both gradients are written and the step takes longer: the plan that is found
    is the one in which a weight leaves in time."""
    step = Step()
    weights = [step.tensor(100, "weight", persistent=True) for _ in range(3)]
    kept = [step.tensor(100, "gradient") for _ in range(2)]
    idle = step.tensor(100, "weight", persistent=True)
    step.kernel("forward", 1.0, inputs=[idle], phase="forward")
    for _ in range(6):
        step.kernel("forward", 1.0, inputs=weights, phase="forward")
    step.kernel("backward", 1.0, outputs=kept, phase="backward")
    for weight, gradient in zip(weights, kept, strict=False):
        step.kernel("update", 1.0, inputs=[weight, gradient], outputs=[weight], phase="optimizer")
    step.kernel("more", 1.0, inputs=weights, workspace_bytes=100, phase="optimizer")
    for _ in range(3):
        step.kernel("rest", 1.0, inputs=weights, phase="optimizer")
    trace = step.trace()
    trace = replace(trace, tensor_death=np.where(trace.tensor_persistent, trace.tensor_death, trace.kernels))
    made = plan(trace, machine(50.0), device_budget=600)
    assert made.predicted_step_s == trace.ideal_s
