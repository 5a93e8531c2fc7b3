"""Whatever the step, the machine and the budget: a plan is legal, and its replay keeps to the budget."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.check import check
from penstock.core.hardware import Hardware
from penstock.core.memory_profile import minimum_bytes
from penstock.core.trace import Trace
from penstock.errors import SpillSpaceFull
from penstock.planners import POLICIES, plan
from penstock.simulator import simulate
from tests.support.traces import PAGE, five_kernels, gpt, machine, machines, traces

# FlashNeuron fails where its selection does not fit: see test_flashneuron_selects_from_the_front.
SHORT_S = 0.1  # plans are legal whenever they have to be ready
EVICTING = [name for name in POLICIES if name != "keep" and not name.startswith("flashneuron")]


@pytest.mark.parametrize("policy", EVICTING)
@given(trace=traces(), hardware=machines, fraction=st.floats(0, 1))
@settings(max_examples=150)
def test_any_budget_from_the_minimum_up(
    policy: str, trace: Trace, hardware: Hardware, fraction: float
) -> None:
    least = minimum_bytes(trace)
    budget = least + int(fraction * (trace.peak_bytes - least))
    made = plan(trace, hardware, policy, device_budget_bytes=budget, time_limit_s=SHORT_S)
    assert check(trace, made, hardware) == []
    timeline = simulate(trace, made, hardware)
    assert timeline.peak_bytes <= budget
    assert timeline.peak_bytes == made.predicted_peak_bytes
    assert timeline.iteration_s == made.predicted_s


@pytest.mark.parametrize("policy", EVICTING)
@given(trace=traces(), hardware=machines)
@settings(max_examples=50)
def test_the_minimum_itself(policy: str, trace: Trace, hardware: Hardware) -> None:
    least = minimum_bytes(trace)
    made = plan(trace, hardware, policy, device_budget_bytes=least, time_limit_s=SHORT_S)
    assert check(trace, made, hardware) == []
    assert made.minimum_bytes == least
    assert made.predicted_peak_bytes <= least


@pytest.mark.parametrize("policy", EVICTING)
@given(trace=traces(), disk=st.integers(0, 2000), host=st.integers(0, 2000), fraction=st.floats(0, 1))
@settings(max_examples=100)
def test_small_tiers_are_kept_to_or_refused(
    policy: str, trace: Trace, disk: int, host: int, fraction: float
) -> None:
    hardware = machine(300.0 * PAGE, disk_bytes=disk * PAGE, host_bytes=host * PAGE)
    least = minimum_bytes(trace)
    budget = least + int(fraction * (trace.peak_bytes - least))
    try:
        made = plan(trace, hardware, policy, device_budget_bytes=budget, time_limit_s=SHORT_S)
    except SpillSpaceFull:
        assert budget < trace.peak_bytes
        return
    assert check(trace, made, hardware) == []
    timeline = simulate(trace, made, hardware)
    for tier in ("device", "host", "disk"):
        assert timeline.tier_peak_bytes(tier) <= hardware.capacity_bytes(tier)


def test_a_tier_that_is_too_small_is_named_with_its_size() -> None:
    hardware = machine(disk_bytes=99)
    with pytest.raises(SpillSpaceFull, match=r"within 200 B.* kernel `a`.* disk budget of 99 B"):
        plan(five_kernels(), hardware, device_budget_bytes=200)


@pytest.mark.parametrize("shares_bus", [True, False])
def test_a_gpt_uses_the_host_where_the_disk_is_slow(shares_bus: bool) -> None:
    trace = gpt()
    fast: dict[str, Any] = {"host_to_device_bytes_per_s": 1e10, "device_to_host_bytes_per_s": 1e10}
    hardware = Hardware(
        device_bytes=2**40,
        host_bytes=trace.peak_bytes // 4,
        disk_bytes=2**40,
        disk_read_bytes_per_s=3e8,
        disk_write_bytes_per_s=3e8,
        disk_shares_bus=shares_bus,
        **fast,
    )
    made = plan(trace, hardware, device_budget_bytes=trace.peak_bytes // 2)
    assert check(trace, made, hardware) == []
    assert {evict.tier for evict in made.evictions} == {"host", "disk"}
    assert made.predicted_peak_bytes <= trace.peak_bytes // 2
