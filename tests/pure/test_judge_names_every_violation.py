"""The judge accepts legal plans and says which rule an illegal one breaks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.check import check
from penstock.core.hardware import Hardware
from penstock.core.plan import Evict, Plan
from penstock.core.pressure import resident_bytes, tier_bytes
from penstock.core.trace import Trace
from penstock.planners.room import candidates
from penstock.simulator import simulate

from .traces import Step, five_kernels, machine, machines, traces

GOOD = Evict(tensor=0, after=0, begin=1, end=4, prefetch_at=3)


def judge(*evictions: Evict, hardware: Hardware | None = None, budget: int = 200) -> list[str]:
    made = Plan(policy="test", device_budget_bytes=budget, evictions=evictions)
    return check(five_kernels(), made, hardware or machine())


def test_a_legal_plan_passes() -> None:
    assert judge(GOOD) == []
    assert judge(replace(GOOD, begin=2)) == []
    assert judge(replace(GOOD, tier="host"), hardware=machine(host_bytes=100)) == []


@pytest.mark.parametrize(
    ("evict", "words"),
    [
        (replace(GOOD, tensor=3), r"tensor 3 is evicted, but the trace has 3 tensors"),
        (replace(GOOD, tensor=-1), r"tensor -1 is evicted"),
        (replace(GOOD, tensor=2), r"outside the tensor's inactive periods: never"),
        (replace(GOOD, begin=0), r"outside the tensor's inactive periods: \[1, 4\)"),
        (replace(GOOD, begin=4), r"outside the tensor's inactive periods"),
        (replace(GOOD, end=3), r"outside the tensor's inactive periods"),
        (replace(GOOD, end=10**9), r"outside the tensor's inactive periods"),
        (replace(GOOD, after=-1), r"starts its copy after kernel -1: .* at or after kernel 0"),
        (replace(GOOD, after=1), r"starts its copy after kernel 1: .* before kernel 1"),
        (replace(GOOD, prefetch_at=0), r"prefetched at kernel 0"),
        (replace(GOOD, prefetch_at=5), r"prefetched at kernel 5"),
        (replace(GOOD, tier="tape"), r"tier 'tape': tiers are host, disk"),
        (replace(GOOD, tier="device"), r"tier 'device'"),
        (replace(GOOD, tier="host"), r"goes to host, which has no capacity"),
        (replace(GOOD, codec="half"), r"codec 'half': codecs are raw"),
    ],
)
def test_an_eviction_that_is_wrong_in_itself(evict: Evict, words: str) -> None:
    with_room = judge(evict, budget=300)
    assert len(with_room) == 1
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(with_room[0])


def test_a_link_without_a_rate() -> None:
    (sentence,) = judge(GOOD, hardware=replace(machine(), disk_write_bytes_per_s=0.0), budget=300)
    assert "the link disk_write has no rate" in sentence


def test_two_evictions_of_one_tensor_that_overlap() -> None:
    (sentence,) = judge(GOOD, replace(GOOD, begin=2))
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
    step.save(tensor)
    step.kernel("rest1", 1.0)
    step.kernel("middle", 1.0, [tensor], [tensor] if edited else [])
    step.kernel("rest2", 1.0)
    step.kernel("last", 1.0, [tensor])
    return step.trace()


def test_a_copy_that_misses_an_edit() -> None:
    made = Plan(policy="test", device_budget_bytes=100, evictions=(Evict(0, 0, 3, 4, 4),))
    (sentence,) = check(used_twice(edited=True), made, machine())
    assert "may copy the tensor before kernel 2 `middle` writes it" in sentence
    assert check(used_twice(), made, machine()) == []


def test_memory_above_the_budget() -> None:
    (sentence,) = judge(GOOD, budget=150)
    assert sentence == (
        "kernel 2 `c` needs 200 B on the device with every eviction complete, above the budget of 150 B; "
        "it is the worst of 2 such kernels"
    )
    (sentence,) = judge(budget=250)
    assert sentence.startswith("kernel 2 `c` needs 300 B")


def test_a_tier_above_its_capacity() -> None:
    (sentence,) = judge(GOOD, hardware=machine(disk_bytes=60))
    assert sentence == (
        "disk has to hold 100 B during kernel 1 `b`, above its capacity of 60 B; "
        "it is the worst of 4 such kernels"
    )


def test_a_budget_above_the_device() -> None:
    (sentence,) = judge(GOOD, hardware=machine(device_bytes=199))
    assert sentence == "the plan's device budget of 200 B exceeds the device, which has 199 B"


@given(data=st.data(), trace=traces(), hardware=machines)
@settings(max_examples=300, deadline=None)
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


small = st.integers(-2, 25)


@given(
    trace=traces(5),
    hardware=machines,
    evictions=st.lists(
        st.builds(Evict, small, small, small, small, small, st.sampled_from(["disk", "host", "x"]))
    ),
    budget=st.integers(-1, 10**7),
)
@settings(max_examples=150, deadline=None)
def test_nonsense_is_refused_without_raising(
    trace: Trace, hardware: Hardware, evictions: list[Evict], budget: int
) -> None:
    made = Plan(policy="test", device_budget_bytes=budget, evictions=tuple(evictions))
    if not check(trace, made, hardware):
        assert simulate(trace, made, hardware).peak_bytes <= budget
