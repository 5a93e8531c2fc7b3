"""Wraps, clean copies, recomputation, compression, variants and shared links against times by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock import simulator
from penstock.core.hardware import Hardware
from penstock.core.plan import Evict, Plan, Recompute
from penstock.core.timeline import MemorySample, Span, Stall, Timeline
from penstock.core.trace import Trace, Variant
from penstock.errors import InvalidArgument
from penstock.simulator import Intervals, Replay, simulate
from tests.support.traces import Step, five_kernels, machine


def replay(
    trace: Trace,
    *evictions: Evict,
    hardware: Hardware | None = None,
    budget: int = 10**9,
    recomputations: Sequence[Recompute] = (),
    variants: Sequence[int] = (),
) -> Timeline:
    made = Plan(
        policy="test",
        device_budget_bytes=budget,
        evictions=evictions,
        recomputations=tuple(recomputations),
        variants=tuple(variants),
    )
    return simulate(trace, made, hardware or machine(50.0))


def on(timeline: Timeline, stream: str) -> list[tuple[int, float, float]]:
    return [(span.index, span.start_s, span.end_s) for span in timeline.spans if span.stream == stream]


def weight_step(update: bool = True) -> Trace:
    """A weight of 100 bytes, read by kernel 1 and written by kernel 3 of 5, which take 2, 1, 8, 1, 4 s."""
    step = Step()
    weight = step.tensor(100, "weight", persistent=True)
    step.kernel("first", 2.0)
    step.kernel("read", 1.0, [weight])
    step.kernel("long", 8.0)
    step.kernel("update", 1.0, [weight], [weight] if update else [], phase="optimizer")
    step.kernel("last", 4.0, phase="optimizer")
    return step.trace()


def test_the_second_of_two_iterations_is_reported() -> None:
    """100 bytes take 2 s: written after `update`, read back while the next iteration's `first` runs."""
    timeline = replay(weight_step(), Evict(0, 3, 4, 6, prefetch_at=5))
    assert timeline.step_s == 16
    assert timeline.stalls == ()
    assert on(timeline, "disk_write") == [(0, 12, 14)]
    assert on(timeline, "disk_read") == [(0, 0, 2)]
    assert timeline.memory["device"] == (MemorySample(0, 0), MemorySample(0, 100), MemorySample(14, 0))
    demanded = replay(weight_step(), Evict(0, 3, 4, 6, prefetch_at=6))
    assert demanded.step_s == 18
    assert demanded.stalls == (Stall(2, 4, "prefetch", 1),)


def test_a_copy_under_way_at_the_end_of_the_iteration_is_cut_there() -> None:
    """At 20 bytes per second the write takes 5 s from the end of `update`, 4 s before the iteration's end."""
    timeline = replay(weight_step(), Evict(0, 3, 4, 6, prefetch_at=6), hardware=machine(20.0))
    assert timeline.step_s == 21  # the write is over at 1 s, the read that `read` demands at 7 s
    writes = [span for span in timeline.spans if span.stream == "disk_write"]
    assert [(span.start_s, span.end_s, span.size_bytes) for span in writes] == [(0, 1, 20), (17, 21, 80)]


def test_a_copy_of_the_iteration_before_serves_until_the_tensor_is_written() -> None:
    evictions = (Evict(0, 1, 2, 3, 3), Evict(0, 3, 4, 6, 6))
    timeline = replay(weight_step(), *evictions)
    assert len(on(timeline, "disk_write")) == 1
    assert len(on(timeline, "disk_read")) == 2
    assert timeline.tier_peak_bytes("disk") == 100
    assert min(sample.size_bytes for sample in timeline.memory["disk"]) == 0  # given up while it is written


def test_what_nobody_writes_is_never_copied_again() -> None:
    evictions = (Evict(0, 1, 2, 3, 3), Evict(0, 3, 4, 6, 6))
    timeline = replay(weight_step(update=False), *evictions)
    assert on(timeline, "disk_write") == []
    assert len(on(timeline, "disk_read")) == 2
    assert timeline.memory["disk"] == (MemorySample(0, 100),)


def test_a_period_may_begin_with_the_next_iteration() -> None:
    step = Step()
    weight = step.tensor(100, "weight", persistent=True)
    step.kernel("first", 3.0)
    step.kernel("second", 3.0)
    step.kernel("update", 1.0, [weight], [weight])
    trace = step.trace()
    timeline = replay(trace, Evict(0, 2, 3, 5, prefetch_at=4))
    assert on(timeline, "disk_write") == [(0, 0, 2)]
    assert on(timeline, "disk_read") == [(0, 3, 5)]
    assert timeline.step_s == 7


def test_a_cancelled_copy_that_nobody_needs_is_abandoned() -> None:
    trace = five_kernels()
    timeline = replay(trace, Evict(0, 0, 1, 4, prefetch_at=2), budget=300)
    assert Span("disk_write", 1, 2, "tensor 0", 0, 50) in timeline.spans
    assert timeline.memory["disk"] == (MemorySample(0, 0), MemorySample(1, 100), MemorySample(2, 0))
    assert timeline.step_s == 5


def test_recomputation_runs_the_kernel_again() -> None:
    """`make` takes 1 s and 50 bytes of workspace, and a second result, which is dead by then."""
    step = Step()
    first, second = step.tensor(100), step.tensor(30)
    step.kernel("make", 1.0, outputs=[first, second], workspace_bytes=50)
    step.kernel("other", 1.0, [second])
    step.kernel("wait", 5.0)
    step.kernel("use", 1.0, [first])
    trace = replace(step.trace(), tensor_recompute=np.array([0, -1]))
    timeline = replay(trace, recomputations=[Recompute(first, 1, 3)])
    assert timeline.step_s == 9
    assert Span("compute", 7, 8, "recompute make", 0, 100) in timeline.spans
    assert timeline.memory["device"][-3:] == (MemorySample(2, 0), MemorySample(7, 180), MemorySample(8, 100))
    assert timeline.stalls == ()


def test_what_is_recomputed_first_can_be_the_input_of_the_next() -> None:
    step = Step()
    source, middle, result = (step.tensor(100) for _ in range(3))
    step.kernel("load", 1.0, outputs=[source])
    step.kernel("middle", 2.0, [source], [middle])
    step.kernel("result", 3.0, [middle], [result])
    step.kernel("wait", 5.0)
    step.kernel("use", 1.0, [source, middle, result])
    trace = replace(step.trace(), tensor_recompute=np.array([-1, 1, 2]))
    timeline = replay(
        trace,
        Evict(source, 0, 3, 4, prefetch_at=4),
        recomputations=[Recompute(middle, 3, 4), Recompute(result, 3, 4)],
        budget=300,
    )
    names = [span.label for span in timeline.spans if span.stream == "compute"]
    assert names == ["load", "middle", "result", "wait", "recompute middle", "recompute result", "use"]
    assert timeline.step_s == 12 + 2 + 5  # the read of `source` is waited for
    assert timeline.peak_bytes == 300


def compressible() -> Trace:
    """A tensor of 800 bytes, all zero: compressed, 25 bytes of mask and 12 of row pointers. Its kernels take
    1, 5 and 1 s."""
    step = Step()
    made = step.tensor(800)
    step.kernel("make", 1.0, outputs=[made])
    step.kernel("wait", 5.0)
    step.kernel("use", 1.0, [made])
    return replace(step.trace(), tensor_density=np.array([0.0]))


def test_compression_takes_the_compute_stream_and_fewer_bytes() -> None:
    hardware = replace(machine(37.0), compress_bytes_per_s=800.0, expand_bytes_per_s=400.0)
    timeline = replay(compressible(), Evict(0, 0, 1, 2, 2, codec="csr"), hardware=hardware, budget=837)
    assert timeline.spans == (
        Span("compute", 0, 1, "make", 0),
        Span("compute", 1, 2, "compress tensor 0", 0, 800),
        Span("compute", 2, 7, "wait", 1),
        Span("disk_write", 2, 3, "tensor 0", 0, 37),
        Span("disk_read", 7, 8, "tensor 0", 0, 37),
        Span("compute", 8, 10, "expand tensor 0", 0, 800),
        Span("compute", 10, 11, "use", 2),
    )
    assert timeline.memory["device"] == tuple(
        MemorySample(*pair)
        for pair in ((0, 0), (0, 800), (1, 837), (2, 37), (3, 0), (7, 37), (8, 837), (11, 800))
    )
    assert timeline.tier_peak_bytes("disk") == 37
    assert timeline.step_s == 11


def test_a_compressed_copy_that_is_cancelled_is_expanded_all_the_same() -> None:
    hardware = replace(machine(1.0), compress_bytes_per_s=800.0, expand_bytes_per_s=400.0)
    timeline = replay(compressible(), Evict(0, 0, 1, 2, 2, codec="csr"), hardware=hardware, budget=837)
    assert on(timeline, "disk_read") == []
    assert timeline.memory["device"][:5] == (
        MemorySample(0, 0),
        MemorySample(0, 800),
        MemorySample(1, 837),
        MemorySample(2, 37),
        MemorySample(7, 837),
    )


def test_variants_have_their_own_time_and_workspace() -> None:
    trace = replace(
        five_kernels(), kernel_variants=((Variant("fast", 0.5, 400),), (), (), (), (Variant("slow", 3.0, 0),))
    )
    timeline = replay(trace, variants=[0, -1, -1, -1, 0])
    assert timeline.step_s == 6.5
    assert timeline.peak_bytes == 500
    assert replay(trace, variants=[-1] * 5).step_s == 5
    with pytest.raises(InvalidArgument, match="variant 2 of kernel 1"):
        replay(trace, variants=[-1, 2, -1, -1, -1])
    with pytest.raises(InvalidArgument, match="same trace"):
        replay(trace, variants=[-1])


def test_latency_passes_before_the_bytes_flow() -> None:
    slow = machine(50.0, latency_s=0.5)
    timeline = replay(five_kernels(), Evict(0, 0, 1, 4, prefetch_at=4), hardware=slow)
    assert on(timeline, "disk_write") == [(0, 1, 3.5)]
    assert on(timeline, "disk_read") == [(0, 4, 6.5)]


def test_measured_rates_take_the_place_of_rate_and_latency() -> None:
    known = replace(machine(50.0, latency_s=0.5), measured_rates={"disk_write": ((100, 50.0),)})
    timeline = replay(five_kernels(), Evict(0, 0, 1, 4, prefetch_at=4), hardware=known)
    assert on(timeline, "disk_write") == [(0, 1, 3)]


def test_rates_change_while_copies_run() -> None:
    """The host copy of 100 bytes has the bus of 100 bytes per second for 0.5 s, then half of it."""
    step = Step()
    first, second = step.tensor(100), step.tensor(100)
    step.kernel("make", 1.0, outputs=[first, second])
    step.kernel("short", 0.5)
    step.kernel("wait", 9.0)
    step.kernel("use", 1.0, [first, second])
    hardware = Hardware(
        device_bytes=10**9,
        host_bytes=10**9,
        disk_bytes=10**9,
        device_to_host_bytes_per_s=100.0,
        host_to_device_bytes_per_s=100.0,
        disk_read_bytes_per_s=400.0,
        disk_write_bytes_per_s=400.0,
    )
    evictions = (Evict(0, 0, 1, 3, 3, "host"), Evict(1, 1, 2, 3, 3, "disk"))
    timeline = replay(step.trace(), *evictions, hardware=hardware)
    assert on(timeline, "device_to_host") == [(0, 1, 2.5)]
    assert on(timeline, "disk_write") == [(1, 1.5, 3.0)]  # 50 bytes by 2.5 s, then the whole bus


def test_a_link_without_a_rate_is_refused() -> None:
    nowhere = Hardware(
        device_bytes=10**9, disk_bytes=10**9, disk_write_bytes_per_s=1.0, disk_shares_bus=False
    )
    with pytest.raises(InvalidArgument, match="disk_read has no rate"):
        replay(five_kernels(), Evict(0, 0, 1, 4, 4), hardware=nowhere)


def test_a_search_can_stop_at_a_deadlock() -> None:
    trace = five_kernels()
    rows = Intervals.of(())
    assert Replay(trace, machine(50.0), 100).run(rows).step_s == float("inf")
    going_on = Replay(trace, machine(50.0), 100).run(rows, stop_on_deadlock=False)
    assert (going_on.step_s, going_on.peak_bytes, going_on.deadlock) == (5, 300, True)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"variants": (0,) * 5}, "it runs variant 0 of kernel 0, which has 0"),
        ({"variants": (-1,) * 9 + (3,)}, "it has variants of 10 kernels, of 5"),
        ({"evictions": (Evict(99, 0, 1, 4, 4),)}, "it moves tensor 99 of 3"),
        ({"evictions": (Evict(-1, 0, 1, 4, 4),)}, "it moves tensor -1 of 3"),
        ({"recomputations": (Recompute(99, 1, 4),)}, "it moves tensor 99 of 3"),
        ({"recomputations": (Recompute(0, 1, 4),)}, "it recomputes tensors that no kernel can recompute"),
        ({"evictions": (Evict(0, 0, 1, 40, 40),)}, "row 0 ends at a kernel that the trace lacks"),
    ],
)
def test_a_plan_of_another_trace_is_refused(changes: dict[str, Any], why: str) -> None:
    trace = replace(five_kernels(), tensor_recompute=np.zeros(0, dtype=np.int64))
    with pytest.raises(InvalidArgument, match=f"{why}. Make the plan from the same trace"):
        simulate(trace, Plan(policy="none", device_budget_bytes=200, **changes), machine())


def test_a_mistake_of_the_simulators_is_not_the_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    def mistaken(*_: Any, **__: Any) -> None:
        raise IndexError

    monkeypatch.setattr(simulator, "as_run", mistaken)
    with pytest.raises(IndexError):
        simulate(five_kernels(), Plan(policy="none", device_budget_bytes=200), machine())
