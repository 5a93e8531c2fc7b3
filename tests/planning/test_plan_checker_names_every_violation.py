"""The plan checker accepts legal plans and says which rule an illegal one breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from penstock.core.check import check
from penstock.core.hardware import Hardware
from penstock.core.memory_profile import resident_bytes, tier_bytes
from penstock.core.plan import Evict, Plan, Recompute
from penstock.core.trace import InactivePeriod, Trace
from penstock.simulator import simulate
from tests.support.traces import (
    Step,
    candidates,
    five_kernels,
    legal_plans,
    machine,
    machines,
    traces,
    whole_traces,
)

GOOD = Evict(tensor=0, after=0, begin=1, end=4, prefetch_at=3)


def violations(*evictions: Evict, hardware: Hardware | None = None, budget: int = 200) -> list[str]:
    made = Plan(policy="test", device_budget_bytes=budget, evictions=evictions)
    return check(five_kernels(), made, hardware or machine())


def test_a_legal_plan_passes() -> None:
    assert violations(GOOD) == []
    assert violations(replace(GOOD, begin=2)) == []
    assert violations(replace(GOOD, tier="host"), hardware=machine(host_bytes=100)) == []


@pytest.mark.parametrize(
    ("evict", "words"),
    [
        (replace(GOOD, tensor=3), r"tensor 3 is evicted, but the trace has 3 tensors"),
        (replace(GOOD, tensor=-1), r"tensor -1 is evicted"),
        (replace(GOOD, tensor=2), r"outside the tensor's inactive periods: never"),
        (replace(GOOD, begin=0), r"outside the tensor's inactive periods: \[1, 4\)"),
        (replace(GOOD, begin=4), r"outside the tensor's inactive periods"),
        (replace(GOOD, end=10**9), r"outside the tensor's inactive periods"),
        (replace(GOOD, after=-1), r"starts its copy after kernel -1: .* at or after kernel 0"),
        (replace(GOOD, after=1), r"starts its copy after kernel 1: .* before kernel 1"),
        (replace(GOOD, prefetch_at=0), r"prefetched at kernel 0"),
        (replace(GOOD, prefetch_at=5), r"prefetched at kernel 5"),
        (replace(GOOD, tier="tape"), r"tier 'tape': tiers are host, disk"),
        (replace(GOOD, tier="device"), r"tier 'device'"),
        (replace(GOOD, tier="host"), r"goes to host, which has no capacity"),
        (replace(GOOD, codec="half"), r"codec 'half': codecs are raw, csr"),
    ],
)
def test_an_eviction_that_is_wrong_in_itself(evict: Evict, words: str) -> None:
    with_room = violations(evict, budget=300)
    assert len(with_room) == 1
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(with_room[0])


def test_a_link_without_a_rate() -> None:
    (sentence,) = violations(GOOD, hardware=replace(machine(), disk_write_bytes_per_s=0.0), budget=300)
    assert "the link disk_write has no rate" in sentence


def test_two_evictions_of_one_tensor_that_overlap() -> None:
    (sentence,) = violations(GOOD, replace(GOOD, begin=2))
    assert "tensor 0 during kernels [2, 4) begins before the one during kernels [1, 4) has ended" in sentence


def test_a_second_copy_made_while_the_tensor_is_away() -> None:
    trace = used_twice()
    first = Evict(tensor=0, after=0, begin=1, end=2, prefetch_at=2)
    made = Plan(policy="test", device_budget_bytes=100, evictions=(first, Evict(0, 0, 3, 4, 4, tier="host")))
    (sentence,) = check(trace, made, machine(host_bytes=100))
    assert "copied after kernel 0, when the tensor may be away until kernel 2" in sentence
    clean = replace(made, evictions=(first, Evict(0, 0, 3, 4, 4)))
    assert check(trace, clean, machine()) == []


def used_twice(edited: bool = False) -> Trace:
    """A tensor used by kernels 0, 2 and 4, and away in between; kernel 2 may write it."""
    step = Step()
    tensor = step.tensor(100)
    step.kernel("make", 1.0, outputs=[tensor])
    step.kernel("rest1", 1.0)
    step.kernel("middle", 1.0, [tensor], [tensor] if edited else [])
    step.kernel("rest2", 1.0)
    step.kernel("last", 1.0, [tensor])
    return step.trace()


def test_a_copy_that_misses_an_edit() -> None:
    made = Plan(policy="test", device_budget_bytes=100, evictions=(Evict(0, 0, 3, 4, 4),))
    (sentence,) = check(used_twice(edited=True), made, machine())
    assert "starts its copy after kernel 0: it must be at or after kernel 2" in sentence
    assert check(used_twice(), made, machine()) == []


def test_memory_above_the_budget() -> None:
    (sentence,) = violations(GOOD, budget=150)
    assert sentence == (
        "kernel 2 `c` needs 200 B on the device with every eviction complete, above the budget of 150 B; "
        "it is the worst of 2 such kernels"
    )
    (sentence,) = violations(budget=250)
    assert sentence.startswith("kernel 2 `c` needs 300 B")


def test_a_tier_above_its_capacity() -> None:
    (sentence,) = violations(GOOD, hardware=machine(disk_bytes=60))
    assert sentence == (
        "disk has to hold 100 B during kernel 1 `b`, above its capacity of 60 B; "
        "it is the worst of 4 such kernels"
    )


def test_a_budget_above_the_device() -> None:
    (sentence,) = violations(GOOD, hardware=machine(device_bytes=199))
    assert sentence == "the plan's device budget of 200 B exceeds the device, which has 199 B"


@given(data=st.data(), trace=traces(), hardware=machines)
@settings(max_examples=120)
def test_what_is_legal_keeps_to_its_budget_however_odd(
    data: st.DataObject, trace: Trace, hardware: Hardware
) -> None:
    tiers = ["disk"] + ["host"] * (hardware.host_bytes > 2**30)
    evictions = []
    for option in candidates(trace):
        if data.draw(st.booleans()):
            begin = data.draw(st.integers(option.begin, option.end - 1))
            evictions.append(
                replace(
                    option,
                    after=data.draw(st.integers(option.after, begin - 1)),
                    begin=begin,
                    prefetch_at=data.draw(st.integers(begin, option.end)),
                    tier=data.draw(st.sampled_from(tiers)),
                )
            )
    budget = int(resident_bytes(trace, evictions).max())
    made = Plan(policy="test", device_budget_bytes=budget, evictions=tuple(evictions))
    if refused := check(trace, made, hardware):
        assert all("when the tensor may be away" in sentence for sentence in refused)
        return
    timeline = simulate(trace, made, hardware)
    assert timeline.peak_bytes <= budget
    for tier, occupied in tier_bytes(trace, evictions).items():
        assert timeline.tier_peak_bytes(tier) <= occupied.max()


Mutation = Callable[[Evict, InactivePeriod], Evict]
MUTATIONS: dict[str, tuple[Mutation, str]] = {
    "of no tensor": (lambda evict, _: replace(evict, tensor=10**6), "but the trace has"),
    "to no tier": (lambda evict, _: replace(evict, tier="tape"), "goes to the tier 'tape'"),
    "in no form": (lambda evict, _: replace(evict, codec="zip"), "uses the codec 'zip'"),
    "while it is used": (
        lambda evict, period: replace(evict, begin=period.begin - 1, after=period.begin - 2),
        "outside the tensor's inactive periods",
    ),
    "after it is needed": (
        lambda evict, period: replace(evict, end=period.end + 1),
        "outside the tensor's inactive periods",
    ),
    "copied too late": (lambda evict, _: replace(evict, after=evict.begin), "starts its copy after"),
    "copied too early": (
        lambda evict, period: replace(evict, after=period.ready - 1),
        "starts its copy after",
    ),
    "prefetched too late": (lambda evict, _: replace(evict, prefetch_at=evict.end + 1), "prefetched at"),
    "prefetched too early": (lambda evict, _: replace(evict, prefetch_at=evict.begin - 1), "prefetched at"),
}


@given(data=st.data(), trace=st.one_of(traces(4), whole_traces(4)), hardware=machines)
@settings(max_examples=40, suppress_health_check=[HealthCheck.filter_too_much])
def test_one_eviction_gone_wrong(data: st.DataObject, trace: Trace, hardware: Hardware) -> None:
    legal = data.draw(legal_plans(trace, hardware))
    assume(legal.evictions)
    index = data.draw(st.integers(0, len(legal.evictions) - 1))
    evict = legal.evictions[index]
    (period,) = (
        period
        for period in trace.inactive_periods
        if period.tensor == evict.tensor and period.begin <= evict.begin < evict.end <= period.end
    )
    for name, (mutate, words) in MUTATIONS.items():
        wrong = mutate(evict, period)
        evictions = (*legal.evictions[:index], wrong, *legal.evictions[index + 1 :])
        sentences = check(trace, replace(legal, evictions=evictions), hardware)
        assert any(words in sentence and str(wrong.tensor) in sentence for sentence in sentences), name


@given(data=st.data(), trace=whole_traces(4), hardware=machines)
@settings(max_examples=50)
def test_one_number_gone_wrong(data: st.DataObject, trace: Trace, hardware: Hardware) -> None:
    legal = data.draw(legal_plans(trace, hardware))
    assert check(trace, legal, hardware) == []
    budget = legal.device_budget_bytes
    (sentence,) = check(trace, replace(legal, device_budget_bytes=budget - 1), hardware)
    assert "on the device with every eviction complete, above the budget" in sentence
    (sentence,) = check(trace, legal, replace(hardware, device_bytes=budget - 1))
    assert "exceeds the device" in sentence
    for tier, occupied in tier_bytes(trace, legal.evictions).items():
        full = replace(hardware, host_bytes=2**50) if tier == "disk" else hardware
        (sentence,) = check(trace, legal, replace(full, **{f"{tier}_bytes": int(occupied.max()) - 1}))
        assert sentence.startswith(f"{tier} has to hold" if occupied.max() > 1 else "the eviction")
    if legal.evictions:
        twice = (*legal.evictions, data.draw(st.sampled_from(legal.evictions)))
        assert any(
            "begins before" in line for line in check(trace, replace(legal, evictions=twice), hardware)
        )
    others = [tensor for tensor in range(trace.tensors) if trace.tensor_recompute[tensor] < 0]
    made = Recompute(data.draw(st.sampled_from(others)), 0, 1)
    sentences = check(trace, replace(legal, recomputations=(*legal.recomputations, made)), hardware)
    assert any("no kernel can recompute the tensor" in sentence for sentence in sentences)


small = st.one_of(st.integers(-2, 25), st.just(10**40))


@given(
    trace=st.one_of(traces(5), whole_traces(4)),
    hardware=machines,
    evictions=st.lists(
        st.builds(
            Evict,
            *[small] * 5,
            st.sampled_from(["disk", "host", "x"]),
            st.sampled_from(["raw", "raw", "csr", "y"]),
        )
    ),
    recomputations=st.lists(st.builds(Recompute, small, small, small)),
    variants=st.lists(small, max_size=3),
    budget=st.integers(-1, 10**7),
)
@settings(max_examples=80)
def test_nonsense_is_refused_without_raising(
    trace: Trace,
    hardware: Hardware,
    evictions: list[Evict],
    recomputations: list[Recompute],
    variants: list[int],
    budget: int,
) -> None:
    made = Plan(
        policy="test",
        device_budget_bytes=budget,
        evictions=tuple(evictions),
        recomputations=tuple(recomputations),
        variants=tuple(variants),
    )
    if not check(trace, made, hardware):
        assert simulate(trace, made, hardware).peak_bytes <= budget
