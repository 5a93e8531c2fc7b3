"""Addresses: two blocks in use at one moment never share a byte, and all fit in the extent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.check import check
from penstock.core.memory_profile import resident_bytes
from penstock.core.plan import Evict, Plan, Recompute
from penstock.core.trace import Trace
from penstock.errors import InvalidArgument
from penstock.planners.occupancy import occupancy
from penstock.planners.placement import METHODS, Placement, place
from tests.support.traces import PAGE, Step, five_kernels, gpt, legal_plans, machine, traces, whole_traces

slow = settings(max_examples=30)
keep = Plan(policy="keep", device_budget_bytes=2**50)


def overlaps(trace: Trace, plan: Plan, placement: Placement) -> list[tuple[int, int]]:
    """Pairs of tensors or workspaces (numbers from the trace's tensor count on) that share a byte and
    a moment."""
    blocks = occupancy(trace, plan)
    offsets = [*placement.offsets, *placement.workspace_offsets]
    rows = [
        (block, since, until, offsets[block], offsets[block] + int(blocks.size_bytes[block]))
        for block, since, until in zip(
            blocks.block.tolist(), blocks.start.tolist(), blocks.end.tolist(), strict=True
        )
        if block < len(offsets)
    ]
    assert all(low >= 0 and high <= placement.extent_bytes for *_, low, high in rows)
    return [
        (one[0], other[0])
        for one in rows
        for other in rows
        if one[0] < other[0]
        and max(one[1], other[1]) < min(one[2], other[2])
        and max(one[3], other[3]) < min(one[4], other[4])
    ]


@slow
@given(data=st.data(), method=st.sampled_from(sorted(METHODS)))
def test_whatever_a_legal_plan_does(data: st.DataObject, method: str) -> None:
    trace = data.draw(st.one_of(traces(), whole_traces()))
    hardware = machine(host_bytes=2**40)
    plan = data.draw(legal_plans(trace, hardware))
    placement = place(trace, plan, method)
    assert overlaps(trace, plan, placement) == []
    assert placement.extent_bytes >= placement.peak_bytes
    assert placement.fragmentation >= 0
    assert all(offset % 256 == 0 for offset in placement.offsets if offset >= 0)
    roomy = replace(plan, offsets=placement.offsets, device_budget_bytes=2**50)
    assert check(trace, roomy, hardware) == []


@slow
@given(data=st.data())
def test_the_peak_is_what_the_plan_checker_counts_at_most(data: st.DataObject) -> None:
    trace = data.draw(st.one_of(traces(), whole_traces()))
    plan = data.draw(legal_plans(trace, machine(host_bytes=2**40)))
    resident = resident_bytes(trace, plan.evictions, plan.recomputations, plan.variants)
    peak = occupancy(trace, plan).peak_bytes
    assert peak <= resident.max(initial=0)
    if not any(evict.codec == "csr" for evict in plan.evictions):
        assert peak == resident.max(initial=0)


def test_two_tensors_recomputed_for_one_kernel_are_counted_like_the_plan_checker_does() -> None:
    """While the first is recomputed, with a workspace of 200 pages, the second has its room already."""
    step = Step()
    weight = step.tensor(PAGE, "weight", persistent=True)
    first, second = step.tensor(10 * PAGE), step.tensor(4 * PAGE)
    step.kernel("large workspace", 1.0, [weight], [first], workspace_bytes=200 * PAGE)
    step.kernel("make", 1.0, [weight], [second])
    step.kernel("wait", 1.0, [weight])
    step.kernel("use", 1.0, [weight, first, second], phase="backward")
    trace = replace(step.trace(), tensor_recompute=np.array([-1, 0, 1]))
    again = (Recompute(first, 2, 3), Recompute(second, 2, 3))
    plan = Plan(policy="test", device_budget_bytes=2**50, recomputations=again)
    assert check(trace, plan, machine()) == []
    resident = resident_bytes(trace, (), again)
    assert occupancy(trace, plan).peak_bytes == resident.max() == 215 * PAGE


@slow
@given(trace=st.one_of(traces(), whole_traces()))
def test_the_best_needs_no_more_than_first_fit_as_they_come(trace: Trace) -> None:
    assert place(trace, keep, "best").extent_bytes <= place(trace, keep, "exact_fit").extent_bytes


def test_a_gap_of_exactly_the_size_is_taken_first() -> None:
    step = Step()
    large, between, small, last = (step.tensor(size * PAGE) for size in (3, 1, 2, 1))
    step.kernel("make", 1.0, outputs=[large, between, small, last])
    step.kernel("use", 1.0, inputs=[between, last])
    new = step.tensor(2 * PAGE)
    step.kernel("again", 1.0, inputs=[between, last], outputs=[new])
    placement = place(step.trace(), keep, "exact_fit", alignment_bytes=1)
    assert placement.offsets[new] == placement.offsets[small]
    assert placement.fragmentation == 0


def test_what_leaves_lies_above_what_stays() -> None:
    trace = gpt(layers=3)
    chosen = [
        period
        for period in trace.inactive_periods
        if period.end - period.begin > 10 and not trace.tensor_persistent[period.tensor]
    ]
    evictions = tuple(
        Evict(period.tensor, period.begin - 1, period.begin, period.end, period.end) for period in chosen
    )
    plan = Plan(policy="some", device_budget_bytes=2**50, evictions=evictions)
    placement = place(trace, plan, "two_ended")
    leaves = {evict.tensor for evict in evictions}
    weights = [tensor for tensor in range(trace.tensors) if trace.tensor_persistent[tensor]]
    assert min(placement.offsets[tensor] for tensor in leaves) >= max(
        placement.offsets[tensor] + int(trace.tensor_bytes[tensor]) for tensor in weights
    )


def test_a_returning_tensor_keeps_its_address_free_of_others() -> None:
    trace = five_kernels()
    plan = Plan(policy="some", device_budget_bytes=400, evictions=(Evict(0, 0, 1, 4, 4),))
    first, second, third = place(trace, plan, alignment_bytes=1).offsets
    assert abs(second - third) >= 100  # together in kernel 2
    assert first in (second, third)  # gone by then
    assert place(trace, plan, alignment_bytes=1).extent_bytes == 200


def test_a_sibling_that_is_made_again_needs_room_too() -> None:
    step = Step()
    source, sibling = step.tensor(PAGE, "input"), step.tensor(8 * PAGE)
    kept = step.tensor(PAGE)
    step.kernel("make", 1.0, inputs=[source], outputs=[kept, sibling])
    step.kernel("middle", 1.0, inputs=[kept, sibling], outputs=[step.tensor(PAGE)])
    step.kernel("pause", 1.0, inputs=[source])
    step.kernel("end", 1.0, inputs=[kept, source], phase="backward")
    trace = replace(step.trace(), tensor_recompute=replace_all(step.trace(), {kept: 0, sibling: 0}))
    plan = Plan(policy="some", device_budget_bytes=2**30, recomputations=(Recompute(kept, 2, 3),))
    blocks = occupancy(trace, plan)
    assert blocks.in_use.tolist() == [10 * PAGE, 11 * PAGE, PAGE, 10 * PAGE, 2 * PAGE]


def replace_all(trace: Trace, values: dict[int, int]):  # type: ignore[no-untyped-def]
    links = trace.tensor_birth * 0 - 1
    for tensor, kernel in values.items():
        links[tensor] = kernel
    return links


def test_it_is_the_same_every_time() -> None:
    trace = gpt(layers=4)
    assert place(trace, keep) == place(trace, keep)


def test_names_and_alignments_are_checked() -> None:
    with pytest.raises(InvalidArgument, match="there is no placement 'worst': choose two_ended"):
        place(five_kernels(), keep, "worst")
    with pytest.raises(InvalidArgument, match="alignment_bytes is 0"):
        place(five_kernels(), keep, alignment_bytes=0)
