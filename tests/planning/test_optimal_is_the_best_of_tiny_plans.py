"""`optimal` against every plan there is, on traces small enough to try them all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from random import Random

import numpy as np

from penstock.core.check import check
from penstock.core.hardware import Hardware
from penstock.core.memory_profile import minimum_bytes
from penstock.core.plan import Evict, Plan, Recompute
from penstock.core.trace import Trace
from penstock.planners import plan
from penstock.planners.optimal.search import Choices, choices
from penstock.planners.problem import Problem
from penstock.simulator import DISK, HOST, MOVES, RECOMPUTE, simulate
from tests.support.traces import Step, machine

SAVED_CASES = 10
FREE_CASES = 4


def saved(random: Random) -> tuple[Trace, Hardware]:
    """Three saved tensors of unlike sizes, used in about reverse order, one of them twice; a disk."""
    step = Step()
    made: list[int] = []
    for index in range(3):
        made.append(step.tensor(int(random.lognormvariate(5, 1)) + 1))
        step.kernel(f"forward{index}", random.lognormvariate(0, 1), made[-2:-1], made[-1:])
    order = [*reversed(made)]
    order.insert(random.randrange(1, 4), random.choice(made))
    for index, tensor in enumerate(order):
        grad = step.tensor(int(random.lognormvariate(4, 1)) + 1)
        step.kernel(f"backward{index}", random.lognormvariate(0.7, 1), [tensor], [grad])
    trace = step.trace()
    return trace, machine(trace.tensor_bytes.sum() / trace.ideal_s * random.choice([0.2, 0.5, 1, 2]))


def free(random: Random) -> tuple[Trace, Hardware]:
    """A chain of three tensors, used in reverse order, that can be recomputed or go to either tier."""
    step = Step()
    made: list[int] = []
    for index in range(3):
        made.append(step.tensor(int(random.lognormvariate(5, 1)) + 1))
        step.kernel(f"forward{index}", random.lognormvariate(0, 1), made[-2:-1], made[-1:])
    for index, tensor in enumerate(reversed(made)):
        grad = step.tensor(int(random.lognormvariate(4, 1)) + 1)
        step.kernel(f"backward{index}", random.lognormvariate(0.7, 1), [tensor], [grad])
    producer = np.full(len(step.sizes), -1)
    producer[made] = np.arange(len(made))
    trace = replace(step.trace(), tensor_recompute=producer)
    rate = trace.tensor_bytes.sum() / trace.ideal_s * random.choice([0.2, 0.5, 1])
    return trace, machine(rate, host_bytes=int(trace.tensor_bytes.max()))


def every_plan(trace: Trace, hardware: Hardware, budget: int, recompute: bool) -> Iterator[Plan]:
    """Every legal plan: each period kept, recomputed, or moved, back at any moment, for the whole of it or
    a part."""
    problem = Problem(trace, hardware, budget, recompute)
    table = choices(problem)
    entries = [list(_entries(trace, table, period)) for period in range(len(table))]
    for picked in product(*entries):
        evictions = [entry for entry in picked if isinstance(entry, Evict)]
        again = [entry for entry in picked if isinstance(entry, Recompute)]
        evictions.sort(key=lambda evict: evict.after)
        again.sort(key=lambda entry: int(trace.tensor_recompute[entry.tensor]))
        made = Plan(
            policy="test",
            device_budget_bytes=budget,
            evictions=tuple(evictions),
            recomputations=tuple(again),
        )
        if not check(trace, made, hardware):
            yield made


def _entries(trace: Trace, table: Choices, period: int) -> Iterator[Evict | Recompute | None]:
    tensor, begin, end, ready = (
        int(column[period]) for column in (table.tensor, table.begin, table.end, table.ready)
    )
    yield None
    for until in range(begin + 1, end + 1) if table.allowed[:, RECOMPUTE].any() else [end]:
        if table.allowed[period, RECOMPUTE]:
            yield Recompute(tensor, begin, until)
        for action in (HOST, DISK):
            if table.allowed[period, action]:
                for after in {ready, begin - 1}:
                    for at in range(begin + 1, until + 1):
                        yield Evict(tensor, after, begin, until, at, *MOVES[action])


def ratios(
    random: Random, make: Callable[[Random], tuple[Trace, Hardware]], cases: int, recompute: bool
) -> list[float]:
    """Of random cases: the time of `optimal` over that of the best plan there is."""
    found = []
    while len(found) < cases:
        trace, hardware = make(random)
        least = minimum_bytes(trace)
        budget = least + int(random.uniform(0, 0.6) * (trace.peak_bytes - least))
        best_s = min(
            (simulate(trace, one, hardware).step_s for one in every_plan(trace, hardware, budget, recompute)),
            default=math.inf,
        )
        if budget >= trace.peak_bytes or math.isinf(best_s):
            continue
        made = plan(trace, hardware, "optimal", recompute, device_budget=budget, time_limit_s=60)
        assert not check(trace, made, hardware)
        assert made.lower_bound_s <= best_s * (1 + 1e-9)
        found.append(made.predicted_step_s / best_s)
    return found


def test_of_all_ways_to_move_saved_tensors() -> None:
    found = ratios(Random(1), saved, SAVED_CASES, recompute=False)
    assert max(found) <= 1 + 1e-9


def test_of_all_ways_to_move_tensors_or_make_them_anew() -> None:
    found = ratios(Random(2), free, FREE_CASES, recompute=True)
    assert np.mean(found) <= 1.001
    assert max(found) <= 1.01
