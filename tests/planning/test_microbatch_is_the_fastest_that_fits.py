"""The choice of a micro-batch: the least predicted time, between equations 7 and 8 of moDNN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.memory_profile import minimum_bytes
from penstock.core.trace import Trace, Variant
from penstock.errors import BudgetTooSmall, InvalidArgument
from penstock.planners.microbatch import choose_micro_batch, rounded_sizes, working_set_bytes
from tests.support.traces import PAGE, Step, gpt, machine, traces, whole_traces

slow = settings(max_examples=40)


def step(batch: int, fixed_s: float = 0.0) -> Trace:
    """Three layers whose activations take a page for each sample, and a gradient that is there already."""
    made = Step()
    weight = made.tensor(10 * PAGE, "weight", persistent=True)
    saved = [made.tensor(batch * PAGE, "input")]
    for layer in range(3):
        new = made.tensor(batch * PAGE)
        made.kernel(f"conv{layer}", fixed_s + 0.1 * batch, [saved[-1], weight], [new])
        saved.append(new)
    gradient = made.tensor(10 * PAGE, "gradient", persistent=True)
    for layer in reversed(range(3)):
        made.kernel(
            f"conv{layer}.backward",
            fixed_s + 0.1 * batch,
            [saved[layer + 1], weight, gradient],
            [gradient],
            phase="backward",
        )
    return made.trace()


def slower_when_small(size: int) -> Trace:
    return step(size, fixed_s=0.5)


def counted(trace_of: Callable[[int], Trace]) -> tuple[Callable[[int], Trace], list[int]]:
    asked: list[int] = []

    def ask(size: int) -> Trace:
        asked.append(size)
        return trace_of(size)

    return ask, asked


def test_the_fastest_size_that_fits_wins() -> None:
    chosen = choose_micro_batch(slower_when_small, machine(), 16, 60 * PAGE, "keep")
    assert (chosen.size, chosen.count) == (8, 2)
    assert chosen.predicted_s == pytest.approx(2 * 6 * (0.5 + 0.8))
    rows = {row.size: row for row in chosen.table}
    assert rows[16].reason and rows[16].predicted_s == 0
    assert rows[8].peak_bytes == step(8).peak_bytes
    assert all(row.predicted_s >= chosen.predicted_s for row in chosen.table if not row.reason)


def test_a_whole_batch_that_fits_is_not_divided() -> None:
    chosen = choose_micro_batch(slower_when_small, machine(), 8, 60 * PAGE, "keep")
    assert (chosen.size, chosen.count) == (8, 1)


def test_sizes_are_rounded_as_in_the_paper() -> None:
    assert rounded_sizes(1) == [1]
    assert rounded_sizes(40) == [1, 2, 4, 8, 16, 32, 40]
    assert rounded_sizes(300) == [1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 300]


def test_of_sizes_that_make_as_many_parts_the_smallest_is_taken() -> None:
    # 320 samples would fit, but two parts of 256 take as long as 320 and 192, in less memory.
    chosen = choose_micro_batch(slower_when_small, machine(), 512, step(320).peak_bytes, "keep")
    assert (chosen.size, chosen.count) == (256, 2)


def test_few_sizes_are_traced_and_each_once() -> None:
    trace_of, asked = counted(slower_when_small)
    choose_micro_batch(trace_of, machine(), 4096, step(1000).peak_bytes, "keep")
    assert len(asked) == len(set(asked)) <= 24


def test_sizes_that_cannot_be_traced_are_left_out() -> None:
    def trace_of(size: int) -> Trace:
        if size < 4:
            raise InvalidArgument(f"{size} samples have no variance")
        return step(size)

    chosen = choose_micro_batch(trace_of, machine(), 16, step(4).peak_bytes, "keep")
    assert (chosen.size, [row.size for row in chosen.table if not row.reason]) == (4, [4])
    with pytest.raises(InvalidArgument, match="have no variance"):
        choose_micro_batch(trace_of, machine(), 2, 60 * PAGE)


def test_a_policy_that_moves_nothing_gets_smaller_parts() -> None:
    whole = step(1000)
    chosen = choose_micro_batch(step, machine(), 4096, whole.peak_bytes // 2, "keep")
    assert step(chosen.size).peak_bytes <= whole.peak_bytes // 2
    assert chosen.size < chosen.working_set_size


def test_moDNN_takes_the_largest_whose_working_set_fits() -> None:
    budget = working_set_bytes(step(4))
    chosen = choose_micro_batch(step, machine(), 8, budget, "evict_all")
    assert chosen.working_set_size == 4
    assert all(row.least_bytes <= budget for row in chosen.table)


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


def test_nothing_that_fits_is_an_error_that_names_equation_7() -> None:
    least = replace(step(1), kernel_variants=((Variant("implicit", 5.0, 0),),) * 6)
    greedy = replace(least, kernel_workspace_bytes=least.kernel_workspace_bytes + 9 * PAGE)
    needed = minimum_bytes(step(1))
    with pytest.raises(BudgetTooSmall, match="even one sample at a time needs") as raised:
        choose_micro_batch(lambda size: greedy if size == 1 else step(size), machine(), 8, needed - 1)
    assert raised.value.minimum_bytes == needed
    with pytest.raises(InvalidArgument, match="the batch has 0 samples"):
        choose_micro_batch(step, machine(), 0, 60 * PAGE)


def test_policies_plan_the_parts() -> None:
    def trace_of(size: int) -> Trace:
        return gpt(layers=2, unit_bytes=size * PAGE, unit_s=size * 1e-3)

    whole = trace_of(4)
    budget = (whole.peak_bytes + minimum_bytes(whole)) // 2
    hardware = machine(device_bytes=budget)
    chosen = choose_micro_batch(trace_of, hardware, 4, budget, "evict_all")
    assert {row.size for row in chosen.table} <= {1, 2, 4}
    assert all(row.peak_bytes <= budget for row in chosen.table)
