"""Demand paging: what kernels miss comes, what came first leaves, and nothing is lost on the way."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.artifact.paging import POLICIES, FaultCost, PagingResult, simulate_paging
from penstock.core.hardware import Hardware
from penstock.core.trace import Trace
from penstock.errors import BudgetTooSmall, InvalidArgument, SpillSpaceFull
from tests.support.traces import PAGE, Step

MIB = 1 << 20
FREE = FaultCost(fault_s=0.0, fresh_bytes_per_s=1e18)


def machine(device: int, host: int = 100, disk: int = 100, shared: bool = True) -> Hardware:
    """Capacities in MiB. The bus moves 1,000 MiB a second each way, the disk 100."""
    return Hardware(
        device_bytes=device * MIB,
        host_bytes=host * MIB,
        disk_bytes=disk * MIB,
        device_to_host_bytes_per_s=1000.0 * MIB,
        host_to_device_bytes_per_s=1000.0 * MIB,
        disk_read_bytes_per_s=100.0 * MIB,
        disk_write_bytes_per_s=100.0 * MIB,
        disk_shares_bus=shared,
    )


def weights_in_turn(count: int, size: int = 10, time_s: float = 1.0) -> Trace:
    """Kernels that use one persistent tensor of ``size`` MiB each."""
    step = Step()
    for index in range(count):
        weight = step.tensor(size * MIB, "weight", persistent=True)
        step.kernel(f"k{index}", time_s, [weight], [])
    return step.trace()


def test_a_step_that_fits_moves_nothing_in_its_second_iteration() -> None:
    trace = weights_in_turn(3)
    for policy in POLICIES:
        result = simulate_paging(trace, machine(device=30), policy)
        assert result.step_s == pytest.approx(trace.ideal_s)
        assert not any(result.moved_bytes.values())
        assert result.peak_bytes == 30 * MIB


def test_what_came_first_leaves_first() -> None:
    # Two of three fit: in turn, the one that is needed next has always just left.
    result = simulate_paging(weights_in_turn(3), machine(device=20), faults=FREE)
    assert result.faulted_bytes.tolist() == [10 * MIB] * 3
    # They start on the disk, are read once from there, and swap with host memory from then on.
    assert result.moved_bytes == {"host_to_device": 30 * MIB, "device_to_host": 30 * MIB}
    assert result.step_s == pytest.approx(3 * (1.0 + 0.01))


def test_a_full_host_leaves_the_rest_to_the_disk() -> None:
    trace = weights_in_turn(4)
    roomy = simulate_paging(trace, machine(device=20, host=40), faults=FREE)
    tight = simulate_paging(trace, machine(device=20, host=10), faults=FREE)
    none = simulate_paging(trace, machine(device=20, host=0), faults=FREE)
    assert roomy.moved_bytes.get("disk_read", 0) == 0
    assert none.moved_bytes == {"disk_read": 40 * MIB, "disk_write": 40 * MIB}
    assert none.step_s == pytest.approx(4 * (1.0 + 0.1))
    assert roomy.step_s < tight.step_s < none.step_s


def test_prefetching_hides_what_faults_would_wait_for() -> None:
    trace = weights_in_turn(6)
    on_demand = simulate_paging(trace, machine(device=40), "uvm", faults=FREE)
    ahead = simulate_paging(trace, machine(device=40), "deepum", faults=FREE, prefetch_degree=2)
    assert on_demand.step_s == pytest.approx(6 * 1.01)
    assert ahead.step_s == pytest.approx(trace.ideal_s)
    assert ahead.faulted_bytes.sum() == 0


def dying(count: int) -> Trace:
    """Each kernel makes a tensor of 10 MiB that the next one reads last."""
    step = Step()
    made = [step.tensor(10 * MIB) for _ in range(count)]
    for index, tensor in enumerate(made):
        step.kernel(f"k{index}", 1.0, made[max(index - 1, 0) : index], [tensor])
    return step.trace()


def test_only_the_driver_that_is_told_drops_the_dead() -> None:
    trace = dying(6)
    untold = simulate_paging(trace, machine(device=30), "uvm", faults=FREE)
    told = simulate_paging(trace, machine(device=30), "deepum", faults=FREE, prefetch_degree=1)
    assert untold.moved_bytes["device_to_host"] > 0
    assert not any(told.moved_bytes.values())


def test_a_workspace_is_paged_like_a_tensor() -> None:
    step = Step()
    for index in range(3):
        step.kernel(f"k{index}", 1.0, [], [], workspace_bytes=10 * MIB)
    result = simulate_paging(step.trace(), machine(device=20), faults=FREE)
    assert result.faulted_bytes.tolist() == [10 * MIB] * 3


def test_faults_cost_their_handling() -> None:
    trace = weights_in_turn(3)
    faults = FaultCost(fault_s=0.01, disk_s=0.0, group_bytes=MIB)
    result = simulate_paging(trace, machine(device=20), faults=faults)
    assert result.stall_s.tolist() == pytest.approx([0.1] * 3)  # ten groups of 10 ms, pages come within
    slower = FaultCost(fault_s=0.01, disk_s=0.01, group_bytes=MIB)
    on_disk = simulate_paging(trace, machine(device=20, host=0), faults=slower)
    assert on_disk.stall_s.tolist() == pytest.approx([0.2] * 3)


def test_measured_fault_times_take_the_place_of_the_model() -> None:
    trace = weights_in_turn(3)
    outputs, everything = trace.kernel_time_s, trace.kernel_time_s + 0.5
    result = simulate_paging(trace, machine(device=20), fault_times_s=(outputs, everything))
    assert result.stall_s.tolist() == pytest.approx([0.5] * 3)


def test_a_disk_of_its_own_does_not_slow_the_bus() -> None:
    step = Step()
    first, second = (step.tensor(20 * MIB, "weight", persistent=True) for _ in range(2))
    step.kernel("a", 1.0, [first], [])
    step.kernel("b", 1.0, [second], [])
    trace = step.trace()
    shared = simulate_paging(trace, machine(device=20, host=10, shared=True), faults=FREE)
    alone = simulate_paging(trace, machine(device=20, host=10, shared=False), faults=FREE)
    assert shared.moved_bytes["disk_read"] == pytest.approx(alone.moved_bytes["disk_read"], rel=0.02)
    assert alone.step_s <= shared.step_s


def test_what_cannot_be_paged_is_refused() -> None:
    trace = weights_in_turn(3)
    with pytest.raises(BudgetTooSmall, match="raise the budget to 10485760"):
        simulate_paging(trace, machine(device=9))
    with pytest.raises(InvalidArgument, match="uvm, deepum"):
        simulate_paging(trace, machine(device=30), "lru")
    with pytest.raises(InvalidArgument, match="prefetch_degree"):
        simulate_paging(trace, machine(device=30), "deepum", prefetch_degree=0)
    with pytest.raises(InvalidArgument, match="3 kernels"):
        simulate_paging(trace, machine(device=30), fault_times_s=(np.ones(2), np.ones(2)))
    with pytest.raises(SpillSpaceFull):
        simulate_paging(trace, machine(device=20, host=5, disk=0))
    with pytest.raises(SpillSpaceFull):
        simulate_paging(trace, machine(device=10, host=0, disk=15))


def test_prefetches_that_send_away_what_they_bring_come_to_an_end() -> None:
    # The only pages that may leave for those of two tensors are their own, which came just before.
    step = Step()
    weight = step.tensor(PAGE, "weight", persistent=True)
    for index, pages in enumerate((1, 5, 5, 1)):
        step.kernel(f"k{index}", 0.0, [] if index else [weight], [step.tensor(pages * PAGE)])
    hardware = replace(machine(device=1), device_bytes=6 * PAGE, host_bytes=3 * PAGE)
    result = simulate_paging(step.trace(), hardware, "deepum", faults=FREE, prefetch_degree=2)
    assert result.peak_bytes == 6 * PAGE
    assert result.moved_bytes == {"host_to_device": 6 * PAGE, "device_to_host": 6 * PAGE}


def test_fractions_of_bytes_are_not_waited_for() -> None:
    # The first output comes beside a weight of the disk, each of them by parts of a page.
    step = Step()
    weights = [step.tensor(PAGE, "weight", persistent=True) for _ in range(4)]
    made = [step.tensor(pages * PAGE) for pages in (5, 5, 5, 1)]
    for index, inputs in enumerate(([], [weights[3], made[0], weights[1]], [weights[3], weights[0]], [])):
        step.kernel(f"k{index}", 0.0, inputs, [made[index]])
    hardware = replace(machine(device=1, host=0), device_bytes=13 * PAGE, disk_read_bytes_per_s=2e8)
    result = simulate_paging(step.trace(), hardware, "deepum", prefetch_degree=1)
    assert result.peak_bytes == 13 * PAGE
    assert result.moved_bytes["disk_write"] == 4 * PAGE


@st.composite
def paged_steps(draw: st.DrawFn) -> tuple[Trace, int]:
    """A random step, and a device that its largest kernel fits into."""
    step = Step()
    weights = [
        step.tensor(draw(st.integers(1, 40)) * PAGE, "weight", persistent=True)
        for _ in range(draw(st.integers(1, 4)))
    ]
    alive: list[int] = []
    largest = 0
    for index in range(draw(st.integers(2, 12))):
        used = draw(st.lists(st.sampled_from(weights + alive), max_size=3, unique=True))
        made = step.tensor(draw(st.integers(1, 40)) * PAGE)
        workspace = draw(st.integers(0, 10)) * PAGE
        step.kernel(f"k{index}", draw(st.integers(0, 5)) * 1e-3, used, [made], workspace_bytes=workspace)
        largest = max(largest, sum(step.sizes[tensor] for tensor in [*used, made]) + workspace)
        alive.append(made)
    return step.trace(), largest + draw(st.integers(0, 60)) * PAGE


@settings(max_examples=60)
@given(
    case=paged_steps(), host_pages=st.integers(0, 200), policy=st.sampled_from(POLICIES), shared=st.booleans()
)
def test_any_step_runs_within_its_memory(
    case: tuple[Trace, int], host_pages: int, policy: str, shared: bool
) -> None:
    trace, device_bytes = case
    hardware = Hardware(
        device_bytes=device_bytes,
        host_bytes=host_pages * PAGE,
        disk_bytes=10_000 * PAGE,
        device_to_host_bytes_per_s=1e9,
        host_to_device_bytes_per_s=1e9,
        disk_read_bytes_per_s=2e8,
        disk_write_bytes_per_s=1e8,
        disk_shares_bus=shared,
    )
    result = simulate_paging(trace, hardware, policy)
    assert result.peak_bytes <= device_bytes + 1
    assert result.step_s >= trace.ideal_s * (1 - 1e-9)
    assert np.all(np.diff(result.start_s) >= trace.kernel_time_s - 1e-12)
    assert result.start_s[-1] == result.step_s
    assert same(result, simulate_paging(trace, hardware, policy))
    if policy == "uvm" and result.peak_bytes >= device_bytes - PAGE:
        # Every page that ever was is somewhere, and the device is full: one comes for each that leaves.
        came = result.moved_bytes.get("host_to_device", 0) + result.moved_bytes.get("disk_read", 0)
        left = result.moved_bytes.get("device_to_host", 0) + result.moved_bytes.get("disk_write", 0)
        assert abs(came - left) <= 100 + max(0, device_bytes - result.peak_bytes)


def same(one: PagingResult, other: PagingResult) -> bool:
    return (
        one.steps_s == other.steps_s
        and one.moved_bytes == other.moved_bytes
        and np.array_equal(one.start_s, other.start_s)
    )
