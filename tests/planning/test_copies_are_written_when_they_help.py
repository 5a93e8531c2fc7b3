"""`optimal` decides when each copy is written: in the iteration before, or behind others that matter more."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock import Hardware, Trace
from penstock.core.check import check
from penstock.core.plan import Plan
from penstock.core.trace import within_budget
from penstock.planners import plan
from penstock.planners.optimal.lp import dive, fractional_plan
from penstock.planners.optimal.search import FoundPlan, choices, plan_search
from penstock.planners.problem import Problem
from penstock.simulator import DISK, HOST, KEEP, simulate
from tests.support.traces import Step, gpt, machine


def weights(uses: int = 1, tail: int = 6) -> tuple[Trace, Hardware]:
    """A weight that some kernels read before a large tensor is there, and its momentum. One kernel writes
    both, and behind it there is time. A slow disk, which is read fast."""
    step = Step()
    weight, momentum = (step.tensor(100, "weight", persistent=True) for _ in range(2))
    last: list[int] = []

    def kernel(name: str, *also: int, size_bytes: int = 1, writes: tuple[int, ...] = ()) -> None:
        made = step.tensor(size_bytes)
        step.kernel(name, 1.0, [*last, *also], [made, *writes])
        last[:] = [made]

    for _ in range(uses):
        kernel("use", weight)
        kernel("more")
    kernel("big", size_bytes=200)
    kernel("back")
    kernel("update", weight, momentum, writes=(weight, momentum))
    for _ in range(tail):
        kernel("tail")
    slow = replace(machine(50.0), disk_read_bytes_per_s=1000.0, disk_write_bytes_per_s=25.0)
    return step.trace(), slow


def test_a_weight_is_written_in_the_iteration_before() -> None:
    """Written after it was read, the weight would keep the large tensor waiting for 3 s."""
    trace, slow = weights(tail=10)
    made = plan(trace, slow, device_budget=210)
    assert check(trace, made, slow) == []
    assert made.predicted_step_s == pytest.approx(trace.ideal_s + 0.2, abs=0.15)
    written = [evict for evict in made.evictions if evict.tensor == 0]
    assert any(evict.prefetch_at == evict.begin for evict in written)
    assert simulate(trace, made, slow).moved_bytes("disk_write") == 200


def test_a_copy_on_another_tier_does_not_break_it() -> None:
    """Of two periods before the update one leaves for the host and one for the disk, whose copy is written in
    the iteration before: the plan is legal with every prefetch that the search tries."""
    trace, slow = weights(uses=2)
    hardware = replace(slow, host_bytes=150)
    trace = within_budget(trace, 210)
    problem = Problem(trace, hardware, 210)
    options = choices(problem)
    action = np.zeros(len(options), dtype=np.int8)
    for period in np.flatnonzero((options.tensor <= 1) & (options.begin > 0)).tolist():
        wraps = options.end[period] >= trace.kernels
        if options.tensor[period] == 1:
            action[period] = DISK
        elif not wraps:
            action[period] = HOST if options.end[period] < 4 else DISK
    for seed in range(5):
        improved = plan_search(problem, options).improve(
            action, np.zeros_like(action), 200, seconds=60.0, target_s=0.0, temperature=0.0, seed=seed
        )
        found = FoundPlan(*improved)
        evictions, _ = found.intervals(trace)
        made = Plan(policy="", device_budget_bytes=210, evictions=evictions, trace=trace)
        assert check(trace, made, hardware) == []
        assert simulate(trace, made, hardware).step_s == pytest.approx(found.step_s)


def test_solved_again_with_choices_fixed_nearly_all_are_whole() -> None:
    pytest.importorskip("highspy", reason="the linear program needs the solver")
    trace = gpt(layers=6)
    relaxed = fractional_plan(Problem(trace, machine(2e9), trace.peak_bytes // 2))
    assert relaxed.model is not None and relaxed.fractions is not None
    whole = dive(relaxed.model, 60.0)
    np.testing.assert_allclose(whole.sum(axis=1), 1.0, atol=1e-6)
    assert (whole.max(axis=1) > 0.95).mean() > 0.9
    assert (whole.max(axis=1) > 0.95).mean() >= (relaxed.fractions.max(axis=1) > 0.95).mean()
    assert (dive(relaxed.model, 0.0)[:, KEEP] == 1).all()
