"""A plan told in saves and loads means what it meant in kernels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.check import check
from penstock.core.hardware import Hardware
from penstock.core.plan import Evict, Plan
from penstock.core.pressure import minimum_bytes, resident_bytes
from penstock.core.trace import Trace
from penstock.planners import plan
from penstock.runtime.schedule import schedule
from tests.pure.traces import five_kernels, gpt, machine, machines, traces


@st.composite
def cases(draw: st.DrawFn) -> tuple[Trace, Plan]:
    trace = draw(traces())
    hardware: Hardware = draw(machines)
    least = minimum_bytes(trace)
    budget = least + draw(st.integers(0, 8)) * (trace.peak_bytes - least) // 8
    made = plan(trace, hardware, draw(st.sampled_from(["evict_all", "g10"])), device_budget_bytes=budget)
    assert check(trace, made, hardware) == []
    return trace, made


def events(trace: Trace) -> list[int]:
    """The kernel that comes after each save and load, in order."""
    return sorted([*trace.save_kernel.tolist(), *trace.load_kernel.tolist()])


def test_by_hand() -> None:
    """Events: saves of a and b before kernels 1 and 2, loads of b and a before kernels 3 and 4."""
    trace = five_kernels()
    away = Plan(
        policy="by hand",
        device_budget_bytes=300,
        evictions=(Evict(tensor=0, after=0, begin=2, end=4, prefetch_at=3),),
    )
    made = schedule(trace, away)
    assert set(made.departures) == {0}
    departure = made.departures[0]
    assert (departure.due, departure.tier, departure.stays) == (1, "disk", False)
    assert made.save_of_load == (1, 0)
    assert made.drops == {1}, "the last load of a"
    assert made.prefetches == {2: (0,)}
    assert made.ahead_bytes == (200, 200, 200, 100)


def test_a_plan_that_keeps_everything_asks_for_nothing() -> None:
    trace = gpt(2)
    made = schedule(trace, plan(trace, machine(), "keep"))
    assert not made.departures and not made.drops and not made.prefetches
    assert max(made.ahead_bytes) == trace.peak_bytes


@settings(max_examples=150, deadline=None)
@given(cases())
def test_every_eviction_leaves_and_every_load_finds_its_save(case: tuple[Trace, Plan]) -> None:
    trace, made = case
    result = schedule(trace, made)
    leaving = {int(trace.save_tensor[save]) for save in result.departures}
    assert leaving == {evict.tensor for evict in made.evictions}
    for save, departure in result.departures.items():
        tiers = {evict.tier for evict in made.evictions if evict.tensor == trace.save_tensor[save]}
        assert departure.tier in tiers
        assert 0 <= departure.due < len(events(trace))
    for load, save in enumerate(result.save_of_load):
        assert trace.save_tensor[save] == trace.load_tensor[load]
        assert trace.save_kernel[save] <= trace.load_kernel[load]
    assert all(int(trace.load_tensor[load]) in leaving for load in result.drops)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_what_leaves_is_asked_for_before_it_is_needed(case: tuple[Trace, Plan]) -> None:
    trace, made = case
    result = schedule(trace, made)
    kernels = events(trace)
    asked = {(event, save) for event, saves in result.prefetches.items() for save in saves}
    for evict in made.evictions:
        times = [kernels[event] for event, save in asked if trace.save_tensor[save] == evict.tensor]
        assert any(evict.prefetch_at <= time <= evict.end for time in times), "at or after its kernel"


@settings(max_examples=150, deadline=None)
@given(cases())
def test_no_event_is_told_to_expect_more_than_the_budget(case: tuple[Trace, Plan]) -> None:
    trace, made = case
    ahead = schedule(trace, made).ahead_bytes
    assert len(ahead) == len(trace.save_kernel) + len(trace.load_kernel)
    assert max(ahead) <= made.device_budget_bytes
    first = events(trace)[0]
    if first < trace.kernels:
        assert max(ahead) == int(np.max(resident_bytes(trace, made.evictions)[first:]))


@pytest.mark.parametrize("policy", ["evict_all", "g10"])
def test_a_deep_model(policy: str) -> None:
    trace = gpt(4)
    least = minimum_bytes(trace)
    made = plan(trace, machine(), policy, device_budget_bytes=(least + trace.peak_bytes) // 2)
    result = schedule(trace, made)
    assert len(result.departures) == len({evict.tensor for evict in made.evictions})
    assert not any(departure.stays for departure in result.departures.values()), "each is away once"
    brought_back = [save for saves in result.prefetches.values() for save in saves]
    assert sorted(brought_back) == sorted(result.departures)
