"""No legal plan beats the lower bound, and the bound is near what the best plans reach."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.artifact import published
from penstock import Evict, Hardware, Plan, Trace, simulate
from penstock.core.check import check
from penstock.core.memory_profile import minimum_bytes
from penstock.core.plan import Recompute
from penstock.planners.optimal.lp import fractional_plan
from penstock.planners.problem import Problem
from penstock.simulator import ACTIONS, KEEP, RECOMPUTE
from tests.support.traces import (
    G10_DATA,
    Step,
    candidates,
    five_kernels,
    gpt,
    legal_plans,
    machine,
    machines,
    needs_g10_data,
    traces,
    whole_traces,
)

pytest.importorskip("highspy", reason="the bound needs the solver: pip install '.[plan]'")

GIB = 2**30
ARTIFACT = Hardware(  # G10's evaluation: the README beside the data
    device_bytes=40 * GIB,
    host_bytes=128 * GIB,
    disk_bytes=2**60,
    device_to_host_bytes_per_s=15.754 * GIB,
    host_to_device_bytes_per_s=15.754 * GIB,
    disk_read_bytes_per_s=3.2 * GIB,
    disk_write_bytes_per_s=3.2 * GIB,
)
FIGURE_11 = ("BERT-256", "VIT-1280", "Inceptionv3-1536", "ResNet152-1280", "SENet154-1024")


@st.composite
def buses(draw: st.DrawFn) -> Hardware:
    """Machines whose disk is behind the link to the host."""
    bus, disk = draw(st.sampled_from([(400, 100), (400, 300), (2000, 300), (1e5, 1e5)]))
    return Hardware(
        device_bytes=2**50,
        host_bytes=draw(st.sampled_from([0, 500 * 4096, 2**40])),
        disk_bytes=2**50,
        device_to_host_bytes_per_s=bus * 4096.0,
        host_to_device_bytes_per_s=bus * 4096.0,
        disk_read_bytes_per_s=disk * 4096.0,
        disk_write_bytes_per_s=disk * 4096.0,
    )


def bound(trace: Trace, hardware: Hardware, budget: int, slots: int = 1000) -> float:
    problem = Problem(trace, hardware, budget, recompute=True, compress=True, time_limit_s=20)
    return fractional_plan(problem, slots).bound_s


@settings(max_examples=60)
@given(data=st.data())
def test_no_legal_plan_is_faster(data: st.DataObject) -> None:
    trace = data.draw(st.one_of(traces(5), whole_traces(5)))
    hardware = data.draw(st.one_of(machines, buses()))
    plan = data.draw(legal_plans(trace, hardware))
    predicted_s = simulate(trace, plan, hardware).step_s
    slots = data.draw(st.sampled_from([2, 5, 1000]))
    assert predicted_s >= bound(trace, hardware, plan.device_budget_bytes, slots) * (1 - 1e-6)


@settings(max_examples=25)
@given(data=st.data())
def test_it_is_not_below_the_kernels_times_and_falls_with_the_budget(data: st.DataObject) -> None:
    trace = data.draw(st.one_of(traces(6), whole_traces(5)))
    hardware = data.draw(st.one_of(machines, buses()))
    least, most = minimum_bytes(trace), trace.peak_bytes
    bounds = [bound(trace, hardware, least + (most - least) * part // 4) for part in range(1, 5)]
    fastest_s = sum(
        min([time, *(variant.time_s for variant in variants)])
        for time, variants in zip(
            trace.kernel_time_s.tolist(), trace.kernel_variants or [()] * trace.kernels, strict=True
        )
    )
    assert bounds[-1] == pytest.approx(fastest_s)
    for tighter, looser in pairwise(bounds):
        assert tighter >= looser * (1 - 1e-6)


@settings(max_examples=15)
@given(trace=whole_traces(4), budget_part=st.floats(0.1, 0.9))
def test_fractions_are_shares_of_each_period(trace: Trace, budget_part: float) -> None:
    least = minimum_bytes(trace)
    budget = least + int((trace.peak_bytes - least) * budget_part)
    found = fractional_plan(Problem(trace, machine(5e6), budget, recompute=True, compress=True), 50)
    assert found.fractions.shape == (len(trace.inactive_periods), len(ACTIONS))
    assert found.fractions.min(initial=0.0) >= 0
    np.testing.assert_allclose(found.fractions.sum(axis=1), 1.0, atol=1e-9)
    if budget >= trace.peak_bytes:
        assert (found.fractions[:, KEEP] == 1).all()


def test_the_best_of_all_plans_for_five_kernels_is_near_it() -> None:
    """Brute force: every way to evict a and b, with every prefetch, and budgets that force them out."""
    trace, disk = five_kernels(), machine(50.0)
    for budget in (200, 100):
        best = min(simulate(trace, plan, disk).step_s for plan in _every_plan(trace, disk, budget))
        lower = fractional_plan(Problem(trace, disk, budget)).bound_s
        assert lower <= best * (1 + 1e-9)
        # Half a tensor at a time is what the bound allows itself.
        assert best <= 1.35 * lower


def test_what_only_recomputation_can_do_is_in_the_bound() -> None:
    """No tier at all: b is released and recomputed, for the time of its kernel."""
    trace = replace(five_kernels(), tensor_recompute=np.array([-1, 1, -1]))
    nowhere = replace(machine(), disk_bytes=0)
    problem = Problem(trace, nowhere, 200, recompute=True)
    found = fractional_plan(problem)
    assert found.bound_s == pytest.approx(6.0, rel=1e-6)
    periods = trace.inactive_periods
    (index,) = (index for index, period in enumerate(periods) if period.tensor == 1)
    assert found.fractions[index, RECOMPUTE] == pytest.approx(1.0, abs=1e-6)
    released = Plan(policy="", device_budget_bytes=200, recomputations=(Recompute(1, 2, 3),))
    assert not check(trace, released, nowhere)
    assert simulate(trace, released, nowhere).step_s == pytest.approx(6.0)


def test_what_is_compressed_and_asked_back_at_once_waits_on_the_device() -> None:
    """Asked back before they are written, a and b stay as a fifth of themselves, and need no link: both
    there and back, each would take 13 s of it."""
    trace = replace(five_kernels(), tensor_density=np.full(3, 0.05))
    slow = replace(machine(3.0), compress_bytes_per_s=1e3, expand_bytes_per_s=1e3)
    evictions = (
        Evict(0, after=0, begin=1, end=4, prefetch_at=1, tier="disk", codec="csr"),
        Evict(1, after=1, begin=2, end=3, prefetch_at=2, tier="disk", codec="csr"),
    )
    plan = Plan(policy="", device_budget_bytes=160, evictions=evictions)
    assert not check(trace, plan, slow)
    predicted_s = simulate(trace, plan, slow).step_s
    assert predicted_s == pytest.approx(5.4)
    for slots in (2, 3, 1000):
        assert bound(trace, slow, 160, slots) <= predicted_s * (1 + 1e-9)


def test_a_copy_from_the_iteration_before_serves_this_one() -> None:
    """A weight leaves after its update and, from the same copy, once more in the next iteration."""
    step = Step()
    weight, other = (step.tensor(size, "weight", persistent=True) for size in (100, 1))
    made = [step.tensor(10) for _ in range(6)]
    step.kernel("a", 1.0, outputs=[made[0]])
    step.kernel("b", 1.0, [weight, made[0]], [made[1]])
    step.kernel("c", 1.0, [made[1]], [made[2], step.tensor(100)])
    step.kernel("d", 1.0, [made[2], weight], [made[3]])
    step.kernel("update", 1.0, [made[3], weight], [weight], phase="optimizer")
    step.kernel("e", 1.0, [made[3]], [made[4], step.tensor(100)], phase="optimizer")
    step.kernel("f", 1.0, [made[4], other], [made[5]], phase="optimizer")
    trace = step.trace()
    slow = replace(machine(), disk_write_bytes_per_s=5.0)
    evictions = (Evict(weight, 4, 5, 8, 8, "disk"), Evict(weight, 1, 2, 3, 3, "disk"))
    plan = Plan(policy="", device_budget_bytes=130, evictions=evictions)
    assert not check(trace, plan, slow)
    predicted_s = simulate(trace, plan, slow).step_s
    assert predicted_s < 30.0  # twice through the link would take 40 s
    assert bound(trace, slow, 130) <= predicted_s * (1 + 1e-9)


def test_no_room_on_any_tier_is_said_and_proves_nothing() -> None:
    found = fractional_plan(Problem(five_kernels(), replace(machine(), disk_bytes=10), 200))
    assert found.status == "infeasible"
    assert found.bound_s == pytest.approx(5.0)


def test_grids_of_any_fineness_agree() -> None:
    trace, hardware = gpt(layers=6), machine(2e9, host_bytes=0, duplex=0.7)
    budget = trace.peak_bytes // 2
    bounds = [fractional_plan(Problem(trace, hardware, budget), slots).bound_s for slots in (20, 60, 1000)]
    assert bounds[2] >= max(bounds) * (1 - 1e-6)
    assert bounds[0] >= 0.9 * bounds[2]


@needs_g10_data
@pytest.mark.parametrize("name", FIGURE_11)
def test_the_published_plans_of_figure_11_are_above_it(name: str) -> None:
    published_of_ideal = dict(zip(FIGURE_11, (0.997, 0.671, 0.977, 0.984, 0.934), strict=True))[name]
    trace = published.trace(G10_DATA / f"{name}.json.gz")
    found = fractional_plan(Problem(trace, ARTIFACT, ARTIFACT.device_bytes, time_limit_s=60), 60)
    assert found.status == "optimal"
    assert trace.ideal_s <= found.bound_s <= trace.ideal_s / published_of_ideal


def _every_plan(trace: Trace, hardware: Hardware, budget: int) -> list[Plan]:
    actions: list[list[Evict | None]] = []
    for option in candidates(trace):
        actions.append([None])
        for begin in range(option.begin, option.end):
            for prefetch in range(begin, option.end + 1):
                actions[-1].append(replace(option, begin=begin, prefetch_at=prefetch))
    plans = []
    for chosen in product(*actions):
        evictions = tuple(evict for evict in chosen if evict is not None)
        plan = Plan(policy="", device_budget_bytes=budget, evictions=evictions)
        if not check(trace, plan, hardware):
            plans.append(plan)
    assert plans and math.prod(map(len, actions)) < 1000
    return plans
