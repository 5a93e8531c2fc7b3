"""The replay against times computed by hand, and against bounds that hold for any plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.check import check
from penstock.core.hardware import Hardware
from penstock.core.memory_profile import minimum_bytes
from penstock.core.plan import Evict, Plan, Recompute
from penstock.core.timeline import MemorySample, Span, Stall, Timeline
from penstock.core.trace import Trace
from penstock.planners import plan
from penstock.simulator import simulate
from tests.planning.test_plan_checker_names_every_violation import used_twice
from tests.support.traces import Step, five_kernels, gpt, machine, machines, traces


def replay(
    trace: Trace, *evictions: Evict, hardware: Hardware | None = None, budget: int = 10**9
) -> Timeline:
    made = Plan(policy="test", device_budget_bytes=budget, evictions=evictions)
    return simulate(trace, made, hardware or machine(50.0))


def on(timeline: Timeline, stream: str) -> list[tuple[int, float, float]]:
    """(index, start, end) of what ran on ``stream``."""
    return [(span.index, span.start_s, span.end_s) for span in timeline.spans if span.stream == stream]


def test_five_kernels_by_hand() -> None:
    """100 bytes take 2 s. c waits until the write of a's tensor ends; z until its read does."""
    timeline = replay(five_kernels(), Evict(0, after=0, begin=1, end=4, prefetch_at=3), budget=200)
    assert on(timeline, "compute") == [(0, 0, 1), (1, 1, 2), (2, 3, 4), (3, 4, 5), (4, 6, 7)]
    assert on(timeline, "disk_write") == [(0, 1, 3)]
    assert on(timeline, "disk_read") == [(0, 4, 6)]
    assert timeline.stalls == (Stall(2, 3, "memory", 2), Stall(5, 6, "prefetch", 4))
    assert timeline.step_s == 7
    assert timeline.peak_bytes == 200
    assert timeline.memory["disk"] == (MemorySample(0, 0), MemorySample(1, 100), MemorySample(6, 0))
    assert Span("disk_read", 4, 6, "tensor 0", 0, 100) in timeline.spans
    assert timeline.evicted_bytes == 100
    assert timeline.stall_s == 2
    assert timeline.source == "simulated"


def test_each_copy_costs_the_compute_stream_its_start() -> None:
    """A write behind a, and a read before y, take a quarter of a second each to start."""
    hardware = replace(machine(50.0), copy_overhead_s=0.25)
    evict = Evict(0, after=0, begin=1, end=4, prefetch_at=3)
    timeline = replay(five_kernels(), evict, budget=200, hardware=hardware)
    assert on(timeline, "compute") == [
        (0, 0, 1), (-1, 1, 1.25), (1, 1.25, 2.25), (2, 3, 4), (-1, 4, 4.25), (3, 4.25, 5.25), (4, 6, 7)
    ]  # fmt: skip
    assert on(timeline, "disk_write") == [(0, 1, 3)]
    assert on(timeline, "disk_read") == [(0, 4, 6)]
    assert {span.label for span in timeline.spans if span.index < 0} == {"start copies"}
    again = (Evict(0, 0, 1, 2, 2), Evict(0, 0, 3, 4, 4))  # one write, two reads
    twice = replay(used_twice(), *again, hardware=replace(machine(1000.0), copy_overhead_s=0.5))
    assert sum(end - start for index, start, end in on(twice, "compute") if index < 0) == 1.5


def test_kernels_lose_time_to_each_byte_that_is_copied() -> None:
    """Half a second for the 100 bytes of a write, and of a read."""
    hardware = replace(machine(1000.0), byte_overhead_s=0.5 / 100)
    evict = Evict(0, after=0, begin=1, end=4, prefetch_at=3)
    timeline = replay(five_kernels(), evict, budget=200, hardware=hardware)
    lost = [(start, end) for index, start, end in on(timeline, "compute") if index < 0]
    assert [end - start for start, end in lost] == [0.5, 0.5]
    assert timeline.step_s == 6
    assert replay(five_kernels(), evict, budget=200, hardware=machine(1000.0)).step_s == 5
    # It is nobody's time where kernels would have waited: the disk takes 2 s each way.
    slow = replace(machine(50.0), byte_overhead_s=0.5 / 100)
    assert replay(five_kernels(), evict, budget=200, hardware=slow).step_s == 7


def test_another_result_that_leaves_meanwhile_has_room_where_a_tensor_is_recomputed() -> None:
    """b leaves while the recomputation of a waits for c to leave: then its kernel makes b again, beside a."""
    step = Step()
    parameter = step.tensor(100, kind="weight", persistent=True)
    a, b, c = step.tensor(100), step.tensor(20), step.tensor(100)
    step.kernel("ab", 1.0, [parameter], [a, b])
    step.kernel("c", 0.1, [parameter], [c])
    step.kernel("reads a", 1.0, [a])
    step.kernel("reads b", 1.0, [b], phase="backward")
    step.kernel("reads c", 1.0, [c], phase="backward")
    trace = replace(step.trace(), tensor_recompute=np.array([-1, 0, 0, -1]))
    made = Plan(
        policy="test",
        device_budget_bytes=310,
        evictions=(Evict(b, 0, 1, 3, 3), Evict(c, 1, 2, 4, 4)),
        recomputations=(Recompute(a, 1, 2),),
    )
    assert check(trace, made, machine(50.0)) == []
    assert simulate(trace, made, machine(50.0)).peak_bytes <= 310


def test_where_copies_cost_time_fewer_and_larger_ones_move() -> None:
    """One tensor of 8 MiB, or eight of 1 MiB, could leave for as long."""
    step = Step()
    large = step.tensor(8 << 20)
    small = [step.tensor(1 << 20) for _ in range(8)]
    for tensor in (large, *small):
        step.kernel("make", 1.0, outputs=[tensor])
    step.kernel("wait", 20.0, outputs=[step.tensor(8 << 20)])
    for tensor in (*small, large):
        step.kernel("use", 1.0, [tensor], phase="backward")
    trace = step.trace()
    hardware = replace(machine(1e9), copy_overhead_s=1e-3)
    made = plan(trace, hardware, device_budget=16 << 20, time_limit_s=2.0)
    assert [evict.tensor for evict in made.evictions] == [large]
    assert made.predicted_step_s == pytest.approx(trace.ideal_s + 2e-3)


def test_a_link_is_as_slow_as_its_copies_were() -> None:
    """Copies of 100 bytes took 8 s where 4 s were expected; reads were over in 1 s."""
    writes = [(0.0, 4.0, 100), (2.0, 8.0, 100)]
    assert machine(50.0).slowness("disk_write", writes) == 2.0
    assert machine(50.0).slowness("disk_read", [(8.0, 9.0, 100)]) == 0.5
    assert machine(50.0).slowness("disk_read", []) == 0.0
    points = {"disk_write": ((50, 25.0), (100, 50.0)), "disk_read": ((100, 50.0),)}
    scaled = replace(machine(50.0), measured_rates=points).scaled({"disk_write": 0.5, "disk_read": 2.0})
    assert scaled.measured_rates == {"disk_write": ((50, 12.5), (100, 25.0)), "disk_read": ((100, 100.0),)}
    assert plan(five_kernels(), scaled, "evict_all", device_budget=100).predicted_step_s > (
        plan(five_kernels(), machine(50.0), "evict_all", device_budget=100).predicted_step_s
    )


def test_on_demand_costs_the_whole_read() -> None:
    timeline = replay(five_kernels(), Evict(0, 0, 1, 4, prefetch_at=4), budget=200)
    assert timeline.stalls[1] == Stall(5, 7, "prefetch", 4)
    assert timeline.step_s == 8


def test_a_prefetch_before_its_copy_is_complete_is_cancelled() -> None:
    timeline = replay(five_kernels(), Evict(0, 0, 1, 4, prefetch_at=2), budget=300)
    assert on(timeline, "disk_write") == [(0, 1, 2)]  # nobody else needs the copy
    assert on(timeline, "disk_read") == []
    assert timeline.step_s == 5
    assert timeline.peak_bytes == 300


def test_a_prefetch_waits_for_memory() -> None:
    """Issued at c, which needs all there is; let in when c's tensor dies at 4 s."""
    timeline = replay(five_kernels(), Evict(0, 0, 1, 4, 2), budget=200, hardware=machine(100.0))
    assert on(timeline, "disk_write") == [(0, 1, 2)]
    assert on(timeline, "disk_read") == [(0, 3, 4)]
    assert timeline.step_s == 5
    assert timeline.peak_bytes == 200


def test_a_copy_that_is_still_true_is_not_written_again() -> None:
    evictions = (Evict(0, 0, 1, 2, 2), Evict(0, 0, 3, 4, 4))
    timeline = replay(used_twice(), *evictions, hardware=machine(1000.0))
    assert len(on(timeline, "disk_write")) == 1
    assert len(on(timeline, "disk_read")) == 2
    evictions = (Evict(0, 0, 1, 2, 2), Evict(0, 2, 3, 4, 4))
    timeline = replay(used_twice(edited=True), *evictions, hardware=machine(1000.0))
    assert len(on(timeline, "disk_write")) == 2
    assert timeline.tier_peak_bytes("disk") == 100


def three_back() -> Trace:
    """Tensors 0, 1, 2 of 100 bytes, made at once by kernel 0; kernels 3, 4, 5 need 2, 1, 0."""
    step = Step()
    made = [step.tensor(100) for _ in range(3)]
    step.kernel("make", 1.0, outputs=made)
    step.kernel("wait", 10.0)
    step.kernel("turn", 1.0)
    for tensor in reversed(made):
        step.kernel(f"use{tensor}", 1.0, [tensor])
    return step.trace()


def test_a_demand_goes_ahead_of_queued_prefetches() -> None:
    """Reads of 1 and 0 are issued at 11 s, in the order of need; that of 2 on demand at 12 s.

    It goes before that of 0, which waits, but not before that of 1, which is under way.
    """
    evictions = (Evict(0, 0, 1, 5, 2), Evict(1, 0, 1, 4, 2), Evict(2, 0, 1, 3, 3))
    timeline = replay(three_back(), *evictions)
    assert on(timeline, "disk_read") == [(1, 11, 13), (2, 13, 15), (0, 15, 17)]
    assert timeline.stalls == (Stall(12, 15, "prefetch", 3),)
    assert timeline.step_s == 18


def test_a_link_carries_one_transfer_at_a_time_in_order() -> None:
    evictions = tuple(Evict(tensor, 0, 1, 5 - tensor, 5 - tensor) for tensor in range(3))
    timeline = replay(three_back(), *evictions)
    assert on(timeline, "disk_write") == [(0, 1, 3), (1, 3, 5), (2, 5, 7)]


def test_a_shared_bus_is_divided() -> None:
    """The disk has its 50 bytes per second of the bus, the host the other 50 while both go out."""
    hardware = Hardware(
        device_bytes=10**9,
        host_bytes=10**9,
        disk_bytes=10**9,
        device_to_host_bytes_per_s=100.0,
        host_to_device_bytes_per_s=100.0,
        disk_read_bytes_per_s=50.0,
        disk_write_bytes_per_s=50.0,
    )
    evictions = (Evict(0, 0, 1, 5, 5, "disk"), Evict(1, 0, 1, 4, 4, "host"))
    timeline = replay(three_back(), *evictions, hardware=hardware)
    assert on(timeline, "device_to_host") == [(1, 1, 3)]
    assert on(timeline, "disk_write") == [(0, 1, 3)]
    assert on(timeline, "host_to_device") == [(1, 13, 14)]
    assert on(timeline, "disk_read") == [(0, 15, 17)]
    apart = replay(three_back(), *evictions, hardware=machine(50.0, host_bytes=10**9))
    assert on(apart, "device_to_host") == [(1, 1, 1.5)]


def test_both_directions_of_a_disk_at_once_cost_rate() -> None:
    """The read of 0 and the write of 1 both start at 3 s: each takes 2 s / 0.5."""
    step = Step()
    early, late = step.tensor(100), step.tensor(100)
    step.kernel("make", 1.0, outputs=[early, late])
    step.kernel("wait", 2.0)
    step.kernel("need", 1.0, [early])
    step.kernel("more", 9.0, [late])
    evictions = (Evict(0, 0, 1, 2, 2), Evict(1, 0, 1, 3, 3))
    timeline = replay(step.trace(), *evictions, hardware=machine(50.0, duplex=0.5))
    assert on(timeline, "disk_write") == [(0, 1, 3), (1, 3, 7)]
    assert on(timeline, "disk_read")[0] == (0, 3, 7)


def test_a_plan_above_its_budget_runs_and_the_peak_shows_it() -> None:
    timeline = replay(five_kernels(), budget=1)
    assert timeline.step_s == 5
    assert timeline.peak_bytes == 300
    assert timeline.stalls == ()
    demanded = replay(five_kernels(), Evict(0, 0, 1, 4, 4), budget=1, hardware=machine(1e9))
    assert demanded.peak_bytes == 200


@given(trace=traces(), hardware=machines)
@settings(max_examples=50)
def test_keeping_everything_is_ideal(trace: Trace, hardware: Hardware) -> None:
    made = plan(trace, hardware, "keep")
    timeline = simulate(trace, made, hardware)
    assert timeline.step_s == pytest.approx(trace.ideal_s)
    assert timeline.peak_bytes == trace.peak_bytes
    assert timeline.stalls == ()


@given(trace=traces(), fraction=st.floats(0, 1), policy=st.sampled_from(["evict_all", "g10"]))
@settings(max_examples=50)
def test_with_an_infinitely_fast_disk_nothing_is_lost(trace: Trace, fraction: float, policy: str) -> None:
    hardware = machine(float("inf"))
    least = minimum_bytes(trace)
    budget = least + int(fraction * (trace.peak_bytes - least))
    made = plan(trace, hardware, policy, device_budget=budget)
    assert check(trace, made, hardware) == []
    assert made.predicted_step_s == pytest.approx(trace.ideal_s)


def test_a_faster_disk_is_never_slower_for_one_plan_of_a_gpt() -> None:
    trace = gpt()
    budget = trace.peak_bytes // 2
    made = plan(trace, machine(1e9), device_budget=budget)
    times = [simulate(trace, made, machine(rate)).step_s for rate in (2e8, 5e8, 1e9, 4e9, 1e11)]
    assert times == sorted(times, reverse=True)
    assert times[-1] == pytest.approx(trace.ideal_s, rel=0.01)
