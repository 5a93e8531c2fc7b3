"""The choice of a micro-batch: the least predicted time per sample, legal, with its warnings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.core.check import check
from penstock.core.memory_profile import minimum_bytes
from penstock.core.plan import Plan
from penstock.core.trace import Trace, Variant
from penstock.errors import BudgetTooSmall, InvalidArgument
from penstock.planners.microbatch import (
    accumulating,
    choose_micro_batch,
    interpolated,
    working_set_bytes,
)
from tests.support.traces import PAGE, Step, gpt, machine, traces, whole_traces

slow = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])


def step(batch: int, fixed_s: float = 0.0, name: str = "conv") -> Trace:
    """Three layers whose activations take a page for each sample, an optimizer of one second."""
    made = Step()
    weight = made.tensor(10 * PAGE, "weight", persistent=True)
    saved = [made.tensor(batch * PAGE, "input")]
    for layer in range(3):
        new = made.tensor(batch * PAGE)
        made.kernel(f"{name}{layer}", fixed_s + 0.1 * batch, [saved[-1], weight], [new])
        saved.append(new)
    gradient = made.tensor(10 * PAGE, "gradient")
    for layer in reversed(range(3)):
        edited = [gradient] if layer < 2 else []
        made.kernel(
            f"{name}{layer}.backward",
            fixed_s + 0.1 * batch,
            [saved[layer + 1], weight, *edited],
            [gradient],
            phase="backward",
        )
    made.kernel("optimizer", 1.0, [gradient, weight], [weight], phase="optimizer")
    return made.trace()


def test_the_optimizer_runs_once_and_the_fastest_size_wins() -> None:
    sizes = {size: step(size, fixed_s=0.5) for size in (1, 2, 4, 8, 16)}
    chosen = choose_micro_batch(sizes, machine(), 16, 60 * PAGE, "keep")
    assert (chosen.size, chosen.count) == (8, 2)
    assert chosen.predicted_s_per_sample == pytest.approx((2 * 6 * (0.5 + 0.8) + 1.0) / 16)
    rows = {row.size: row for row in chosen.table}
    assert list(rows) == [1, 2, 4, 8, 16]
    assert rows[16].reason and rows[16].predicted_s == 0
    assert rows[8].peak_bytes == accumulating(sizes[8]).peak_bytes
    assert all(row.s_per_sample >= chosen.predicted_s_per_sample for row in chosen.table if not row.reason)


def test_a_whole_batch_that_fits_is_not_divided() -> None:
    chosen = choose_micro_batch({4: step(4), 8: step(8)}, machine(), 8, 60 * PAGE, "keep")
    assert (chosen.size, chosen.count, chosen.warnings) == (8, 1, ())


def test_gradients_stay_from_part_to_part() -> None:
    whole = step(4)
    part = accumulating(whole)
    assert part.live_bytes[0] == whole.live_bytes[0] + 10 * PAGE
    assert accumulating(part) is part


def test_batch_statistics_are_warned_of_only_where_the_batch_is_divided() -> None:
    sizes = {size: step(size, name="aten::native_batch_norm") for size in (4, 8, 16)}
    divided = choose_micro_batch(sizes, machine(), 16, 60 * PAGE, "keep")
    assert divided.count == 2
    (warning,) = divided.warnings
    assert "`aten::native_batch_norm0`" in warning and "statistics of 8 samples, not of 16" in warning
    assert choose_micro_batch(sizes, machine(), 8, 60 * PAGE, "keep").warnings == ()


def test_sizes_in_between_are_interpolated_and_said_to_be() -> None:
    sizes = {4: step(4), 16: step(16)}
    chosen = choose_micro_batch(sizes, machine(), 16, 60 * PAGE, "keep", sizes=[4, 8, 16])
    assert chosen.size == 8
    assert [row.interpolated for row in chosen.table] == [False, True, False]
    assert "Trace a micro-batch of 8" in chosen.warnings[0]


@given(size=st.integers(2, 16))
def test_interpolation_is_exact_where_all_is_linear(size: int) -> None:
    between, true = interpolated({2: step(2), 16: step(16)}, size), step(size)
    assert np.array_equal(between.tensor_bytes, true.tensor_bytes)
    assert np.allclose(between.kernel_time_s, true.kernel_time_s)
    assert not between.measured


def test_only_like_traces_are_interpolated() -> None:
    with pytest.raises(InvalidArgument, match="run different kernels: trace the size 8 instead"):
        interpolated({4: step(4), 16: step(16, name="other")}, 8)
    with pytest.raises(InvalidArgument, match=r"a micro-batch of 32 is not between sizes .*: 4, 16"):
        interpolated({4: step(4), 16: step(16)}, 32)


def test_moDNN_takes_the_largest_whose_working_set_fits() -> None:
    sizes = {size: step(size) for size in (1, 2, 4, 8)}
    budget = working_set_bytes(accumulating(sizes[4]))
    chosen = choose_micro_batch(sizes, machine(), 8, budget, "keep")
    assert chosen.working_set_size == 4


def test_the_working_set_counts_each_tensor_of_a_window_once() -> None:
    made = Step()
    weight = made.tensor(5, "weight", persistent=True)
    first, second, third = made.tensor(10, "input"), made.tensor(20), made.tensor(40)
    made.kernel("a", 1.0, [first, weight], [second], workspace_bytes=3)
    made.kernel("b", 1.0, [second, weight], [third], workspace_bytes=7)
    made.kernel("c", 1.0, [third, first])
    trace = made.trace()
    assert working_set_bytes(trace, share=0.01) == 5 + 60 + 7
    assert working_set_bytes(trace, share=0.5) == 5 + 70 + 7
    assert working_set_bytes(trace, share=1.0) == 5 + 70 + 7
    least_workspace = replace(trace, kernel_variants=((), (Variant("implicit", 5.0, 0),), ()))
    assert minimum_bytes(trace) == 5 + 67
    assert minimum_bytes(least_workspace) == 5 + 60
    assert working_set_bytes(least_workspace, share=0.01) == 5 + 60 + 7  # the fastest algorithm's workspace


@slow
@given(trace=st.one_of(traces(), whole_traces()), share=st.sampled_from([0.1, 0.15, 0.5, 1.0]))
def test_the_working_set_is_between_one_kernel_and_everything(trace: Trace, share: float) -> None:
    working_set = working_set_bytes(trace, share)
    assert minimum_bytes(trace) <= working_set
    everything = int(trace.tensor_bytes.sum() + trace.kernel_workspace_bytes.max(initial=0))
    variants = max((entry.workspace_bytes for row in trace.kernel_variants for entry in row), default=0)
    assert working_set <= everything + variants


@slow
@given(trace=st.one_of(traces(), whole_traces()))
def test_accumulating_makes_a_trace_that_can_be_planned(trace: Trace) -> None:
    part = accumulating(trace)
    assert part.ideal_s == trace.ideal_s
    assert minimum_bytes(part) >= minimum_bytes(trace)
    assert check(part, Plan(policy="keep", device_budget_bytes=part.peak_bytes), machine()) == []


def test_sizes_must_divide_the_batch() -> None:
    with pytest.raises(InvalidArgument, match="none of the sizes 3, 5 divides the batch of 16"):
        choose_micro_batch({3: step(3), 5: step(5)}, machine(), 16, 60 * PAGE)
    with pytest.raises(InvalidArgument, match="the batch has 0 samples"):
        choose_micro_batch({1: step(1)}, machine(), 0, 60 * PAGE)


def test_nothing_that_fits_is_an_error_that_says_what_would() -> None:
    sizes = {4: step(4), 8: step(8)}
    with pytest.raises(BudgetTooSmall, match="even parts of 4 need") as raised:
        choose_micro_batch(sizes, machine(), 8, 5 * PAGE)
    assert raised.value.minimum_bytes == minimum_bytes(accumulating(sizes[4]))


def test_policies_plan_the_parts() -> None:
    sizes = {size: gpt(layers=2, unit_bytes=size * PAGE, unit_s=size * 1e-3) for size in (2, 4)}
    budget = (sizes[4].peak_bytes + minimum_bytes(sizes[4])) // 2
    hardware = machine(device_bytes=budget)
    chosen = choose_micro_batch(sizes, hardware, 4, budget, "evict_all")
    part = sizes[chosen.size] if chosen.count == 1 else accumulating(sizes[chosen.size])
    assert check(part, chosen.plan, hardware) == []
    assert chosen.plan.policy == "evict_all"
