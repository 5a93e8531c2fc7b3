"""What a plan asks of the runtime, against a slow replay of two iterations."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.core.hardware import Hardware
from penstock.core.memory_profile import minimum_bytes
from penstock.core.plan import Evict
from penstock.core.trace import Trace
from penstock.errors import SpillSpaceFull
from penstock.planners import plan
from penstock.runtime.schedule import EvictAction, PrefetchAction, ReleaseAction, schedule
from tests.support.traces import Step, machine, machines, traces

quick = settings(max_examples=60)


@given(traces(), machines, st.floats(0, 1), st.sampled_from(["evict_all", "g10"]))
@quick
def test_a_copy_is_kept_where_it_spares_another(
    trace: Trace, hardware: Hardware, share: float, policy: str
) -> None:
    least = minimum_bytes(trace)
    budget = least + int(share * (trace.peak_bytes - least))
    try:
        made = plan(trace, hardware, policy, device_budget=budget)
    except SpillSpaceFull:
        assume(False)
    count = trace.kernels
    before = schedule(trace, made).before
    for tensor in {evict.tensor for evict in made.evictions}:
        # Of three iterations: when it comes back, is written, and leaves.
        events: list[tuple[int, int, str, bool]] = []
        for turn in range(3):
            for evict in made.evictions:
                if evict.tensor == tensor:
                    events.append((evict.end + turn * count, 0, "back", False))
            events += [(w + turn * count, 1, "written", False) for w in trace.writers[tensor].tolist()]
            for kernel, actions in enumerate(before):
                for action in actions:
                    if action == ReleaseAction(tensor):
                        events.append((kernel + turn * count, 2, "leaves", False))
        events.sort()
        for evict in (evict for evict in made.evictions if evict.tensor == tensor):
            after = [what for at, order, what, _ in events if (at, order) > (evict.end, 0)]
            if not trace.tensor_persistent[tensor]:
                after = [what for at, order, what, _ in events if (at, order) > (evict.end, 0) and at < count]
            spared = next((what for what in after if what in ("written", "leaves")), "") == "leaves"
            said = {
                action.keeps_copy
                for action in before[evict.prefetch_at % count]
                if isinstance(action, PrefetchAction) and action.tensor == tensor
            }
            assert spared in said


def test_what_is_only_read_again_keeps_no_copy() -> None:
    step = Step()
    weight = step.tensor(1 << 20, "weight", persistent=True)
    saved = step.tensor(4 << 20)
    step.kernel("make", 1.0, [weight], [saved])
    peak = step.tensor(8 << 20)
    step.kernel("large", 5.0, [], [peak])
    step.kernel("use", 1.0, [saved, weight])
    step.kernel("update", 1.0, [weight], [weight])
    trace = step.trace()
    made = plan(trace, machine(), "evict_all", device_budget=minimum_bytes(trace))
    actions = [action for actions in schedule(trace, made).before for action in actions]
    assert PrefetchAction(saved, False) in actions
    assert PrefetchAction(saved, True) not in actions


@given(traces(), machines, st.floats(0, 1), st.data())
@quick
def test_a_copy_starts_when_the_plan_says_and_not_sooner(
    trace: Trace, hardware: Hardware, share: float, data: st.DataObject
) -> None:
    least = minimum_bytes(trace)
    budget = least + int(share * (trace.peak_bytes - least))
    try:
        made = plan(trace, hardware, "evict_all", device_budget=budget)
    except SpillSpaceFull:
        assume(False)
    later = [
        replace(evict, after=data.draw(st.integers(evict.after, evict.begin - 1))) for evict in made.evictions
    ]
    before = schedule(trace, replace(made, evictions=tuple(later))).before
    for evict in later:
        starts = [
            kernel
            for kernel, actions in enumerate(before)
            if EvictAction(evict.tensor, evict.tier) in actions
        ]
        assert min(evict.after + 1, evict.begin) % trace.kernels in starts
    assert sum(isinstance(action, EvictAction) for actions in before for action in actions) >= len(later)


def test_what_is_asked_back_at_once_is_not_written() -> None:
    step = Step()
    saved = step.tensor(4 << 20)
    step.kernel("make", 1.0, [], [saved])
    step.kernel("other", 1.0, [], [step.tensor(1 << 20)])
    step.kernel("use", 1.0, [saved])
    trace = step.trace()
    made = plan(trace, machine(), "evict_all", device_budget=trace.peak_bytes)
    evict = Evict(saved, after=0, begin=1, end=2, prefetch_at=1, tier="disk")
    assert not any(schedule(trace, replace(made, evictions=(evict,))).before)
    later = replace(evict, prefetch_at=2)
    assert any(schedule(trace, replace(made, evictions=(later,))).before)
