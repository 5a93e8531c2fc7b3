"""G10's choices (sections 4.3 and 4.4), and plans that are legal on every trace and machine."""

from __future__ import annotations

from benchmarks.artifact import g10_artifact, g10_gds, g10_host
from penstock.core.hardware import Hardware
from penstock.core.memory_profile import minimum_bytes
from penstock.core.plan import Plan
from penstock.core.trace import Trace
from penstock.planners.g10 import g10
from penstock.planners.problem import Policy, Problem, as_traced
from penstock.simulator import simulate
from tests.support.traces import Step, gpt, machine

POLICIES = {"g10": g10, "g10_artifact": g10_artifact, "g10_host": g10_host, "g10_gds": g10_gds}


def planned(policy: Policy, trace: Trace, hardware: Hardware, budget: int) -> Plan:
    variants, runs = as_traced(trace, budget)
    made = policy(Problem(runs, hardware, budget))
    return Plan(policy="test", device_budget_bytes=budget, evictions=made.evictions, variants=variants)


def between(trace: Trace, fraction: float) -> int:
    least = minimum_bytes(trace)
    return least + int(fraction * (trace.peak_bytes - least))


def pyramid(sizes: list[int], kernel_s: float = 1.0) -> Trace:
    """Tensors made one after the other and used in reverse, each kernel as long as the other."""
    step = Step()
    made = []
    for index, size in enumerate(sizes):
        made.append(step.tensor(size))
        step.kernel(f"forward{index}", kernel_s, made[-2:-1], made[-1:])
    for index, tensor in enumerate(reversed(made)):
        step.kernel(f"backward{index}", kernel_s, [tensor], [step.tensor(1, "gradient")], phase="backward")
    return step.trace()


def test_nothing_leaves_where_everything_fits() -> None:
    trace = pyramid([100, 100, 100])
    assert planned(g10, trace, machine(1e9), trace.peak_bytes).evictions == ()


def test_the_largest_benefit_goes_first() -> None:
    # Any of the large tensors is enough. The first is away for longest above the budget.
    trace = pyramid([100, 10, 100, 10, 100, 10])
    made = planned(g10, trace, machine(1000.0), trace.peak_bytes - 90)
    assert [evict.tensor for evict in made.evictions] == [0]


def test_the_disk_is_first_and_the_host_takes_what_the_disk_has_no_time_for() -> None:
    sizes = [100] * 8 + [10]
    trace = pyramid(sizes)
    calm = planned(g10, trace, machine(50.0, host_bytes=2**40), trace.peak_bytes - 90)
    assert {evict.tier for evict in calm.evictions} == {"disk"}
    pressed = planned(g10, trace, machine(50.0, host_bytes=2**40), trace.peak_bytes - 450)
    assert {evict.tier for evict in pressed.evictions} == {"disk", "host"}


def test_what_is_copied_within_a_kernel_goes_to_the_disk_by_the_paper_and_to_the_host_by_the_artifact() -> (
    None
):
    trace, hardware = pyramid([100] * 8 + [10]), machine(200.0, host_bytes=2**40)
    for policy, tier in ((g10, "disk"), (g10_artifact, "host")):
        made = planned(policy, trace, hardware, trace.peak_bytes - 90)
        assert {evict.tier for evict in made.evictions} == {tier}


def test_the_artifact_alone_passes_over_periods_that_are_short_for_their_copies() -> None:
    # 15 s away, for copies of 6.7 s each way: what Algorithm 1 leaves returns on demand.
    trace, hardware = pyramid([100] * 8 + [10]), machine(15.0)
    for policy, prefetch_at in ((g10, 11), (g10_artifact, 17)):
        made = planned(policy, trace, hardware, trace.peak_bytes - 90)
        assert [(evict.tensor, evict.prefetch_at) for evict in made.evictions] == [(0, prefetch_at)]


def test_the_direct_variant_knows_no_host() -> None:
    trace = pyramid([100] * 8 + [10])
    made = planned(g10_gds, trace, machine(50.0, host_bytes=2**40), trace.peak_bytes - 450)
    assert {evict.tier for evict in made.evictions} == {"disk"}


def test_prefetches_are_eager_where_memory_allows() -> None:
    # Kernel 7 is the last that needs the 200 bytes which leave no room. A read takes one kernel.
    trace = pyramid([100, 10, 10, 10, 10, 10, 200])
    made = planned(g10, trace, machine(100.0), trace.peak_bytes - 80)
    (evict,) = made.evictions
    assert (evict.tensor, evict.begin, evict.prefetch_at, evict.end) == (0, 2, 8, 13)


def test_what_algorithm_1_leaves_returns_on_demand() -> None:
    # The disk is far too slow for any period: Algorithm 1 takes none.
    trace = pyramid([100, 100, 100, 100])
    made = planned(g10, trace, machine(1.0), trace.peak_bytes - 150)
    assert made.evictions
    assert all(evict.prefetch_at == evict.end for evict in made.evictions)
    assert [evict.tensor for evict in made.evictions] == [0, 1]  # needed last


def test_a_captured_step_runs_at_full_speed_on_a_fast_disk() -> None:
    trace = gpt()
    budget = trace.persistent_bytes + int(0.45 * (trace.peak_bytes - trace.persistent_bytes))
    rate = 8 * (trace.peak_bytes - budget) / trace.ideal_s
    made = planned(g10, trace, machine(rate), budget)
    assert simulate(trace, made, machine(rate)).step_s <= 1.05 * trace.ideal_s


def test_plans_are_the_same_every_time() -> None:
    trace = gpt()
    budget, hardware = between(trace, 0.3), machine(3e9, host_bytes=2**30)
    assert planned(g10, trace, hardware, budget) == planned(g10, trace, hardware, budget)
