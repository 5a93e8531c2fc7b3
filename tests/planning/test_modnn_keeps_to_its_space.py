"""moDNN's Algorithm 1: legal for every budget; schemes, prefetches and algorithms as the paper has them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.artifact import published
from penstock.core.check import check
from penstock.core.hardware import Hardware
from penstock.core.memory_profile import minimum_bytes
from penstock.core.plan import Plan
from penstock.core.trace import Trace, Variant
from penstock.errors import SpillSpaceFull
from penstock.planners.modnn import modnn
from penstock.planners.modnn_space import ManagedSpace
from penstock.planners.problem import Decision, Problem
from penstock.planners.rules import evict_all
from penstock.simulator import simulate
from tests.support.traces import (
    G10_DATA,
    PAGE,
    Step,
    gpt,
    machine,
    needs_g10_data,
)


def plan_of(trace: Trace, budget: int, decision: Decision) -> Plan:
    return Plan(
        policy="modnn",
        device_budget_bytes=budget,
        evictions=decision.evictions,
        variants=decision.variants,
    )


def test_nothing_leaves_when_everything_fits() -> None:
    trace = gpt(layers=3)
    decision = modnn(Problem(trace, machine(host_bytes=2**40), trace.peak_bytes))
    assert decision.evictions == ()


def test_the_least_budget_has_a_plan() -> None:
    trace = gpt(layers=2)
    least = minimum_bytes(trace)
    decision = modnn(Problem(trace, machine(host_bytes=2**40), least))
    assert check(trace, plan_of(trace, least, decision), machine(host_bytes=2**40)) == []
    assert decision.evictions


def test_weights_stay_while_activations_can_leave() -> None:
    trace = gpt(layers=4)
    decision = modnn(Problem(trace, machine(host_bytes=2**40), trace.peak_bytes * 6 // 10))
    assert decision.evictions
    assert not any(trace.tensor_persistent[evict.tensor] for evict in decision.evictions)


def test_copies_start_when_their_tensor_is_complete() -> None:
    trace = gpt(layers=4)
    decision = modnn(Problem(trace, machine(), trace.peak_bytes * 6 // 10))
    periods = {(period.tensor, period.end): period for period in trace.inactive_periods}
    for evict in decision.evictions:
        assert evict.after == periods[evict.tensor, evict.end].ready


def test_copies_come_back_ahead_of_their_kernel_but_no_sooner_than_needed() -> None:
    """A copy takes 3 s, kernels 1 s: it is issued three kernels or so ahead, not at once."""
    step = Step()
    away = step.tensor(30 * PAGE)
    step.kernel("make", 1.0, outputs=[away])
    step.kernel("read", 1.0, inputs=[away])
    large = step.tensor(90 * PAGE)
    step.kernel("large", 4.0, outputs=[large])
    for index in range(12):
        step.kernel(f"wait{index}", 1.0, outputs=[step.tensor(PAGE)])
    step.kernel("use", 1.0, inputs=[away], phase="backward")
    trace = step.trace()
    decision = modnn(Problem(trace, machine(disk_bytes_per_s=10.0 * PAGE), 100 * PAGE))
    (evict,) = decision.evictions
    assert evict.end - 4 <= evict.prefetch_at <= evict.end - 3


def variant_step(workspace_pages: int, reads_first: bool = True) -> Trace:
    """A kernel that can run in 1 s instead of 4 s with a workspace."""
    step = Step()
    first, second = step.tensor(40 * PAGE), step.tensor(10 * PAGE)
    step.kernel("make", 1.0, outputs=[first])
    step.kernel("read", 1.0, inputs=[first] if reads_first else [], outputs=[second])
    step.kernel("convolution", 4.0, inputs=[second], outputs=[step.tensor(10 * PAGE)])
    step.kernel("back", 1.0, inputs=[second], phase="backward")
    step.kernel("use", 1.0, inputs=[first], phase="backward")
    trace = step.trace()
    faster = Variant("winograd", 1.0, workspace_pages * PAGE)
    return replace(trace, kernel_variants=((), (), (faster,), (), ()))


def test_the_fastest_algorithm_runs_where_its_workspace_fits() -> None:
    trace = variant_step(30)
    decision = modnn(Problem(trace, machine(), 100 * PAGE))
    assert decision.variants == (-1, -1, 0, -1, -1)
    assert decision.evictions == ()


@pytest.mark.parametrize("reads_first", [True, False])
def test_a_workspace_that_costs_more_than_it_saves_is_not_taken(reads_first: bool) -> None:
    """What leaves for it leaves by a scheme, or for a defragmentation: it may not if nothing has read it."""
    trace = variant_step(30, reads_first)
    slow_disk = machine(disk_bytes_per_s=1.0 * PAGE)
    assert modnn(Problem(trace, slow_disk, 70 * PAGE)).variants == ()
    fast_disk = machine(disk_bytes_per_s=1000.0 * PAGE)
    decision = modnn(Problem(trace, fast_disk, 70 * PAGE))
    assert decision.variants == (-1, -1, 0, -1, -1)
    assert [evict.tensor for evict in decision.evictions] == [0]


def test_a_scheme_is_contiguous_and_costs_the_least() -> None:
    """The paper's figure 6: six blocks, the fourth of which must stay; for a size of 4, blocks one and two
    or five and six can leave."""
    space = ManagedSpace(12)
    for owner, size in enumerate([2, 2, 1, 3, 2, 2]):
        assert space.allocate(owner, size)
    until = np.full(6, 9, dtype=np.int64)
    cost_s = np.array([1.0, 1.0, 1.0, np.nan, 1.0, 0.5])
    scheme = space.window(4, cost_s, until, 0.0)
    assert scheme == ([4, 5], 1.5)
    assert space.window(4, np.where(until > 0, [1, 1, 1, np.nan, 2, 2], 0.0), until, 0.0) == ([0, 1], 2.0)
    assert space.window(6, cost_s, until, 0.0) is None


def test_among_schemes_that_cost_nothing_the_one_needed_latest_leaves() -> None:
    space = ManagedSpace(6)
    for owner in range(3):
        assert space.allocate(owner, 2)
    until = np.array([5, 9, 7], dtype=np.int64)
    assert space.window(2, np.full(3, 1.0), until, 10.0) == ([1], 0.0)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=60))
def test_a_managed_space_never_gives_a_byte_twice(requests: list[tuple[bool, int]]) -> None:
    space, alive = ManagedSpace(40), {}
    for owner, (frees, size) in enumerate(requests):
        if frees and alive:
            victim = sorted(alive)[size % len(alive)]
            space.free(victim)
            del alive[victim]
        elif space.allocate(owner, size):
            alive[owner] = size
        else:
            assert space.largest_gap < size
            if space.free_bytes >= size:
                space.compact()
                assert space.largest_gap >= size
        assert space.free_bytes == 40 - sum(alive.values()) >= 0
        assert {each for each in range(len(requests)) if each in space} == set(alive)


def test_it_says_when_no_tier_has_room() -> None:
    trace = gpt(layers=3)
    with pytest.raises(SpillSpaceFull, match=r"Raise either, or raise the device budget"):
        modnn(Problem(trace, machine(disk_bytes=2**20), minimum_bytes(trace)))


def test_it_is_the_same_every_time() -> None:
    trace = gpt(layers=4)
    problem = Problem(trace, machine(), trace.peak_bytes // 2)
    assert modnn(problem) == modnn(problem)


@needs_g10_data
@pytest.mark.parametrize("name", ["BERT-256", "ResNet152-1280"])
def test_published_traces_lie_between_sending_all_and_ideal(name: str) -> None:
    """The artifact's settings: 40 GiB on the device, 128 GiB on the host, 3.2 GiB/s of SSD."""
    trace = published.trace(G10_DATA / f"{name}.json.gz")
    bus, disk = 15.754 * 2**30, 3.2 * 2**30
    hardware = Hardware(
        device_bytes=40 * 2**30,
        host_bytes=128 * 2**30,
        disk_bytes=2**42,
        device_to_host_bytes_per_s=bus,
        host_to_device_bytes_per_s=bus,
        disk_read_bytes_per_s=disk,
        disk_write_bytes_per_s=disk,
    )
    problem = Problem(trace, hardware, 40 * 2**30)
    plan = plan_of(trace, 40 * 2**30, modnn(problem))
    assert check(trace, plan, hardware) == []
    all_away = replace(plan, evictions=evict_all(problem).evictions, variants=())
    sending_all_s = simulate(trace, all_away, hardware).step_s
    assert trace.ideal_s <= simulate(trace, plan, hardware).step_s < sending_all_s


def test_a_copy_keeps_its_place_until_the_kernel_that_needs_it_has_run() -> None:
    """Three activations take turns on a host that would be a page short if one were forgotten too soon."""
    step = Step()
    weights = [step.tensor(PAGE, "weight", persistent=True) for _ in range(2)]
    source = step.tensor(PAGE, "input")
    large, middle = step.tensor(303 * PAGE), step.tensor(194 * PAGE)
    small = [step.tensor(PAGE, "gradient") for _ in range(5)]
    step.kernel("forward0", 0.0, [source], [large])
    step.kernel("forward1", 0.0, [source], [middle, source])
    for read, made in zip([large, source, large, middle, small[0]], small, strict=True):
        step.kernel("backward", 0.0, [read], [made], phase="backward")
    for weight in weights:
        step.kernel("norm", 0.0, [weight], phase="optimizer")
    trace = step.trace()
    hardware = machine(host_bytes=500 * PAGE)
    budget = minimum_bytes(trace)
    decision = modnn(Problem(trace, hardware, budget))
    assert check(trace, plan_of(trace, budget, decision), hardware) == []
