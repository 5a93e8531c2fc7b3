"""Whatever the step, the machine and the budget: a plan is legal, and its replay keeps to the budget."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import artifact
from penstock.core.check import check
from penstock.core.hardware import LINKS, Hardware
from penstock.core.memory_profile import minimum_bytes
from penstock.core.plan import Plan
from penstock.core.timeline import Timeline
from penstock.core.trace import Trace
from penstock.errors import SpillSpaceFull
from penstock.planners import plan
from penstock.simulator import simulate
from tests.support.traces import (
    five_kernels,
    gpt,
    machine,
    machines,
    one_byte_less,
    small_tiers,
    traces,
    whole_traces,
)

# FlashNeuron, which fails where its selection does not fit, and `optimal` have files of their own.
EVICTING = ["evict_all", "vdnn_all", "vdnn_conv", "modnn", "g10", "g10_artifact", "g10_host", "g10_gds"]


@given(
    trace=st.one_of(traces(), whole_traces()),
    hardware=st.one_of(machines, small_tiers),
    fraction=st.floats(0, 1),
)
@settings(max_examples=120)
def test_any_budget_from_the_minimum_up(trace: Trace, hardware: Hardware, fraction: float) -> None:
    least = minimum_bytes(trace)
    for policy in EVICTING:
        for budget in {least, least + int(fraction * (trace.peak_bytes - least))}:
            made = legal_or_refused(trace, hardware, policy, budget)
            if made is not None and made.evictions:
                legal_or_refused(trace, one_byte_less(trace, made, hardware), policy, budget)


def legal_or_refused(trace: Trace, hardware: Hardware, policy: str, budget: int) -> Plan | None:
    """The plan, if there is room on the tiers for what has to leave."""
    try:
        made = artifact.plan(trace, hardware, policy, recompute=True, device_budget=budget)
    except SpillSpaceFull as full:
        assert hardware.disk_bytes < trace.tensor_bytes.sum() and budget < trace.peak_bytes
        assert policy != "modnn" or "the policy 'modnn' finds no room" in str(full)
        return None
    assert check(trace, made, hardware) == []
    assert made.minimum_bytes == minimum_bytes(trace) and made.recomputations == ()
    timeline = simulate(trace, made, hardware)
    assert timeline.peak_bytes == made.predicted_peak_bytes <= budget
    assert timeline.step_s == made.predicted_step_s
    for tier in ("device", "host", "disk"):
        assert timeline.tier_peak_bytes(tier) <= hardware.capacity_bytes(tier)
    if not made.variants:
        kernels_take_their_time(trace, timeline)
    return made


def kernels_take_their_time(trace: Trace, timeline: Timeline) -> None:
    slack = 1e-9 * (1 + timeline.step_s)
    assert timeline.step_s >= trace.ideal_s - slack
    assert timeline.busy_s("compute") == pytest.approx(trace.ideal_s)
    for link in LINKS:
        assert timeline.busy_s(link) <= timeline.step_s + slack
        spans = [(span.start_s, span.end_s) for span in timeline.spans if span.stream == link]
        assert all(earlier[1] <= later[0] for earlier, later in pairwise(sorted(spans)))
    last_kernel_s = max(span.end_s for span in timeline.spans if span.stream == "compute")
    assert last_kernel_s == pytest.approx(trace.ideal_s + timeline.stall_s)


def test_a_tier_that_is_too_small_is_named_with_its_size() -> None:
    hardware = machine(disk_bytes=99)
    with pytest.raises(SpillSpaceFull, match=r"within 200 B.* kernel `a`.* disk budget of 99 B"):
        plan(five_kernels(), hardware, device_budget=200)


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
    made = plan(trace, hardware, device_budget=trace.peak_bytes // 2)
    assert check(trace, made, hardware) == []
    assert {evict.tier for evict in made.evictions} == {"host", "disk"}
    assert made.predicted_peak_bytes <= trace.peak_bytes // 2
