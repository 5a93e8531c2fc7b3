"""Below the minimum no plan exists, and the error says what would do; above it there is always one."""

from __future__ import annotations

import pickle
from itertools import pairwise

import pytest
from hypothesis import given, settings

from penstock.core.plan import Evict
from penstock.core.pressure import minimum_bytes, required_bytes, resident_bytes, tightest_kernel
from penstock.core.trace import Trace
from penstock.errors import BudgetTooSmall, InvalidArgument, InvalidPlan
from penstock.planners import POLICIES, plan

from .traces import Step, five_kernels, gpt, machine, traces


def test_every_kernel_needs_what_it_uses() -> None:
    assert required_bytes(five_kernels()).tolist() == [100, 100, 100, 100, 100]


def test_what_the_program_holds_and_workspace_count() -> None:
    step = Step()
    held, free = step.tensor(100), step.tensor(10)
    step.kernel("make", 1.0, outputs=[held, free])
    step.save(held, held_until=2)
    step.save(free)
    step.kernel("big", 1.0, workspace_bytes=7)
    step.kernel("other", 1.0)
    step.kernel("use", 1.0, inputs=[held, free])
    trace = step.trace()
    assert required_bytes(trace).tolist() == [110, 107, 0, 110]
    assert minimum_bytes(trace) == 110
    assert tightest_kernel(trace) == 0


def test_an_evicted_tensor_is_away_until_its_prefetch() -> None:
    evictions = [Evict(0, 0, 1, 4, prefetch_at=3)]
    assert resident_bytes(five_kernels(), evictions).tolist() == [100, 100, 200, 200, 100]


@given(trace=traces())
@settings(max_examples=50, deadline=None)
def test_one_byte_less_is_refused_with_the_number(trace: Trace) -> None:
    least = minimum_bytes(trace)
    for policy in (*POLICIES, "optimal"):
        with pytest.raises(BudgetTooSmall) as caught:
            plan(trace, machine(), policy, device_budget_bytes=least - 1)
        assert caught.value.minimum_bytes == least


def test_the_message_says_which_kernel_how_much_and_what_to_do() -> None:
    step = Step()
    big = step.tensor(1537 * 2**20 + 1)
    step.kernel("layer4.2.conv2", 1.0, outputs=[big])
    with pytest.raises(BudgetTooSmall) as caught:
        plan(step.trace(), machine(), device_budget_bytes=2**30)
    assert str(caught.value) == (
        "kernel `layer4.2.conv2` alone needs 1.51 GiB; the device budget is 1.00 GiB. "
        "No plan can help: raise the budget to 1.51 GiB or lower the micro-batch."
    )


def test_the_device_is_the_budget_when_none_is_given() -> None:
    made = plan(five_kernels(), machine(device_bytes=250))
    assert made.device_budget_bytes == 250
    assert made.policy == "optimal"
    with pytest.raises(InvalidArgument, match="exceeds the device"):
        plan(five_kernels(), machine(device_bytes=250), device_budget_bytes=251)


def test_optimal_keeps_what_fits_and_says_why() -> None:
    made = plan(five_kernels(), machine(), device_budget_bytes=300)
    assert (made.policy, made.evictions) == ("optimal", ())
    assert made.reason == "all of the step's 300 B fit in the budget of 300 B"
    made = plan(five_kernels(), machine(), device_budget_bytes=299)
    assert made.policy == "optimal"
    assert made.reason.startswith("the step's peak of 300 B exceeds the budget of 299 B")


def test_policies_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="choose keep, evict_all, vdnn_all, "):
        plan(five_kernels(), machine(), "best")
    with pytest.raises(InvalidArgument, match="'keep' needs 300 B on the device; the budget is 299 B"):
        plan(five_kernels(), machine(), "keep", device_budget_bytes=299)


def test_more_budget_costs_no_time() -> None:
    trace = gpt(4)
    least, most = minimum_bytes(trace), trace.peak_bytes
    times = [
        plan(trace, machine(1e9), device_budget_bytes=least + (most - least) * part // 8).predicted_s
        for part in range(9)
    ]
    assert times[-1] == pytest.approx(trace.ideal_s)
    for tight, roomy in pairwise(times):
        assert roomy <= tight * 1.02


def test_errors_travel_between_processes() -> None:
    for error in (BudgetTooSmall("too small", 7), InvalidPlan(["it breaks a rule"])):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
