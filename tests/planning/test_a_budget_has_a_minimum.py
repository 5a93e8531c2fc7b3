"""Below the minimum no plan exists, and the error says what would do; above it there is always one."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.check import check
from penstock.core.columns import KINDS
from penstock.core.memory_profile import minimum_bytes, required_bytes, resident_bytes, tightest_kernel
from penstock.core.plan import Evict
from penstock.core.trace import Trace, Variant
from penstock.errors import BudgetTooSmall, InvalidArgument, InvalidPlan
from penstock.planners import POLICIES, plan
from penstock.simulator import simulate
from tests.support.traces import Step, five_kernels, gpt, machine, traces, whole_traces


def test_every_kernel_needs_what_it_uses() -> None:
    assert required_bytes(five_kernels()).tolist() == [100, 100, 100, 100, 100]


def test_what_cannot_move_and_workspace_count() -> None:
    step = Step()
    held, free = step.tensor(100), step.tensor(10)
    step.kernel("make", 1.0, outputs=[held, free])
    step.kernel("big", 1.0, workspace_bytes=7)
    step.kernel("other", 1.0)
    step.kernel("use", 1.0, inputs=[held, free])
    trace = replace(step.trace(), tensor_movable=np.array([False, True]))
    assert {period.tensor for period in trace.inactive_periods} == {free}
    assert required_bytes(trace).tolist() == [110, 107, 100, 110]
    assert minimum_bytes(trace) == 110
    assert tightest_kernel(trace) == 0


def test_a_variant_with_less_workspace_lowers_it_for_every_policy() -> None:
    step = Step()
    saved, made = step.tensor(100), step.tensor(100)
    step.kernel("make", 1.0, outputs=[saved])
    step.kernel("convolution", 1.0, outputs=[made], workspace_bytes=80)
    step.kernel("other", 1.0, inputs=[made], workspace_bytes=30)
    step.kernel("use", 1.0, inputs=[saved], phase="backward")
    traced = step.trace()
    variants = (Variant("implicit", 4.0, 0), Variant("tiled", 2.0, 20))
    trace = replace(traced, kernel_variants=((), variants, (Variant("slow", 9.0, 0),), ()))
    assert minimum_bytes(traced) == 180 and minimum_bytes(trace) == 100
    for policy in ("evict_all", "g10", "modnn", "optimal"):
        made_of = plan(trace, machine(), policy, device_budget=130)
        assert check(trace, made_of, machine()) == []
        assert made_of.variants == (-1, 1, -1, -1), policy
        assert made_of.predicted_peak_bytes <= 130
        assert plan(trace, machine(), policy, device_budget=100).variants == (-1, 0, 0, -1)
    assert plan(trace, machine(), "g10", device_budget=180).variants == ()


def lingering() -> Trace:
    """As `five_kernels`, with tensors that nobody uses any more: 0 lives on to the end, 2 for one kernel
    more; 3, 50 bytes, is there from before the iteration, 4, 7 bytes, from before it and after it."""
    trace = five_kernels()
    return replace(
        trace,
        tensor_bytes=np.array([100, 100, 100, 50, 7]),
        tensor_kind=np.append(trace.tensor_kind, [KINDS.index("gradient"), KINDS.index("input")]),
        tensor_persistent=np.array([False, False, False, False, True]),
        tensor_birth=np.array([0, 1, 2, 0, 0]),
        tensor_death=np.array([5, 4, 4, 2, 5]),
    )


def test_what_nobody_reads_again_leaves_first() -> None:
    trace = lingering()
    assert trace.live_bytes.tolist() == [157, 257, 307, 307, 107]
    released = trace.released
    assert released.live_bytes.tolist() == five_kernels().live_bytes.tolist()
    assert released.inactive_periods == trace.inactive_periods
    assert released.released is released
    stays = replace(trace, tensor_movable=np.array([True, True, False, True, False]))
    assert stays.released.live_bytes.tolist() == [107, 207, 307, 307, 107]


def test_it_is_no_part_of_the_minimum_and_of_no_plan() -> None:
    trace = lingering()
    made = plan(trace, machine(), device_budget=306)
    assert made.minimum_bytes == minimum_bytes(trace) == 100
    assert made.evictions == () and made.predicted_peak_bytes == 300
    assert "the 300 B that kernels still read fit" in made.reason
    assert check(trace, made, machine()) == []
    assert plan(trace, machine(), device_budget=307).predicted_peak_bytes == 307
    tight = plan(trace, machine(), device_budget=200)
    assert {evict.tensor for evict in tight.evictions} == {0}
    assert check(trace, tight, machine()) == [] and tight.predicted_peak_bytes == 200


@given(data=st.data(), trace=whole_traces(), fraction=st.floats(0, 1))
@settings(max_examples=40)
def test_every_policy_relies_on_it(data: st.DataObject, trace: Trace, fraction: float) -> None:
    """Tensors that live on after their last use, by any number of kernels."""
    death = [data.draw(st.integers(end, trace.kernels)) for end in trace.tensor_death.tolist()]
    trace = replace(trace, tensor_death=np.array(death))
    least = minimum_bytes(trace)
    assert least == minimum_bytes(trace.released)
    budget = least + int(fraction * (trace.peak_bytes - least))
    for policy in ("evict_all", "vdnn_all", "modnn", "g10", "optimal"):
        hardware = machine(1e6)
        made = plan(trace, hardware, policy, time_limit_s=0.1, device_budget=budget)
        assert check(trace, made, hardware) == []
        assert made.predicted_peak_bytes == simulate(trace, made, hardware).peak_bytes <= budget


def test_an_evicted_tensor_is_away_until_its_prefetch() -> None:
    evictions = [Evict(0, 0, 1, 4, prefetch_at=3)]
    assert resident_bytes(five_kernels(), evictions).tolist() == [100, 100, 200, 200, 100]


@given(trace=traces())
@settings(max_examples=50)
def test_one_byte_less_is_refused_with_the_number(trace: Trace) -> None:
    least = minimum_bytes(trace)
    for policy in (*POLICIES, "optimal"):
        with pytest.raises(BudgetTooSmall) as caught:
            plan(trace, machine(), policy, device_budget=least - 1)
        assert caught.value.minimum_bytes == least


def test_the_message_says_which_kernel_how_much_and_what_to_do() -> None:
    step = Step()
    big = step.tensor(1537 * 2**20 + 1)
    step.kernel("layer4.2.conv2", 1.0, outputs=[big])
    with pytest.raises(BudgetTooSmall) as caught:
        plan(step.trace(), machine(), device_budget=2**30)
    assert str(caught.value) == (
        "kernel `layer4.2.conv2` alone needs 1.51 GiB (activation 1.50 GiB); the device budget is 1.00 GiB. "
        "No plan can help: raise the budget to 1.51 GiB or lower the micro-batch."
    )


def test_the_device_is_the_budget_when_none_is_given() -> None:
    made = plan(five_kernels(), machine(device_bytes=250))
    assert made.device_budget_bytes == 250
    assert made.policy == "optimal"
    with pytest.raises(InvalidArgument, match="exceeds the device"):
        plan(five_kernels(), machine(device_bytes=250), device_budget=251)


def test_optimal_keeps_what_fits_and_says_why() -> None:
    made = plan(five_kernels(), machine(), device_budget=300)
    assert (made.policy, made.evictions) == ("optimal", ())
    assert made.reason == "all of the step's 300 B fit in the budget of 300 B"
    made = plan(five_kernels(), machine(), device_budget=299)
    assert made.policy == "optimal"
    assert made.reason.startswith("the step's peak of 300 B exceeds the budget of 299 B")


def test_policies_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="choose keep, evict_all, vdnn_all, "):
        plan(five_kernels(), machine(), "best")
    with pytest.raises(InvalidArgument, match="'keep' needs 300 B on the device; the budget is 299 B"):
        plan(five_kernels(), machine(), "keep", device_budget=299)


def test_more_budget_costs_no_time() -> None:
    trace = gpt(4)
    least, most = minimum_bytes(trace), trace.peak_bytes
    times = [
        plan(trace, machine(1e9), device_budget=least + (most - least) * part // 8).predicted_step_s
        for part in range(9)
    ]
    assert times[-1] == pytest.approx(trace.ideal_s)
    for tight, roomy in pairwise(times):
        assert roomy <= tight * 1.02


def test_errors_travel_between_processes() -> None:
    for error in (BudgetTooSmall("too small", 7), InvalidPlan(["it breaks a rule"])):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
