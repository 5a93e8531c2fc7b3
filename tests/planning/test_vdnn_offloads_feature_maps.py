"""vDNN: every feature map, or those that convolutions read; the host first; one ahead."""

from __future__ import annotations

from itertools import pairwise

from penstock.core.hardware import Hardware
from penstock.core.memory_profile import minimum_bytes
from penstock.core.plan import Plan
from penstock.core.trace import Trace
from penstock.planners.problem import Policy, Problem, as_traced
from penstock.planners.rules import vdnn_all, vdnn_conv
from tests.support.traces import Step, machine

POLICIES = {"vdnn_all": vdnn_all, "vdnn_conv": vdnn_conv}


def planned(policy: Policy, trace: Trace, hardware: Hardware, budget: int) -> Plan:
    variants, runs = as_traced(trace, budget)
    made = policy(Problem(runs, hardware, budget))
    return Plan(
        policy="test",
        device_budget_bytes=budget,
        evictions=made.evictions,
        variants=variants,
        reason=made.reason,
    )


def network() -> Trace:
    """input -> conv -> relu -> conv -> relu, and their backward passes: tensors 0 to 4, 100 bytes each."""
    step = Step()
    maps = [step.tensor(100, "input")]
    step.kernel("load", 1.0, [], [0])
    for index, name in enumerate(["conv", "relu", "conv", "relu"]):
        maps.append(step.tensor(100))
        step.kernel(f"{name}{index}", 1.0, [maps[-2]], [maps[-1]])
    gradient = step.tensor(100, "gradient")
    step.kernel("loss", 1.0, [maps[-1]], [gradient])
    for index, tensor in enumerate(reversed(maps)):
        made = step.tensor(100, "gradient")
        step.kernel(f"backward{index}", 1.0, [tensor, gradient], [made], phase="backward")
        gradient = made
    return step.trace()


def test_all_feature_maps_go_to_the_host() -> None:
    trace = network()
    made = planned(vdnn_all, trace, machine(1000.0, host_bytes=2**30), trace.peak_bytes - 1)
    assert {evict.tensor for evict in made.evictions} == {0, 1, 2, 3}  # the last has no time to leave
    assert {evict.tier for evict in made.evictions} == {"host"}


def test_only_what_convolutions_read_leaves_where_that_is_enough() -> None:
    trace = network()
    made = planned(vdnn_conv, trace, machine(1000.0, host_bytes=2**30), trace.peak_bytes - 1)
    assert {evict.tensor for evict in made.evictions} == {0, 2}


def test_others_leave_too_where_that_is_not_enough_and_the_plan_says_so() -> None:
    trace = network()
    made = planned(vdnn_conv, trace, machine(1000.0, host_bytes=2**30), minimum_bytes(trace))
    assert {0, 2} < {evict.tensor for evict in made.evictions}
    assert "further evictions" in made.reason


def test_what_the_host_cannot_hold_goes_to_the_disk() -> None:
    trace = network()
    made = planned(vdnn_all, trace, machine(1000.0, host_bytes=250), trace.peak_bytes - 1)
    assert [evict.tier for evict in made.evictions].count("host") == 2
    assert [evict.tier for evict in made.evictions].count("disk") == 2


def test_each_map_is_prefetched_while_the_kernel_works_that_needs_the_one_before() -> None:
    trace = network()
    made = planned(vdnn_all, trace, machine(1000.0, host_bytes=2**30), trace.peak_bytes - 1)
    backward = sorted(made.evictions, key=lambda evict: evict.end)
    for earlier, later in pairwise(backward):
        assert later.prefetch_at == earlier.end


def test_nothing_is_offloaded_where_everything_fits() -> None:
    trace = network()
    assert planned(vdnn_all, trace, machine(1000.0), trace.peak_bytes).evictions == ()
