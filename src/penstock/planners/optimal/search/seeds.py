"""Where the search for a good plan starts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import numpy as np

from penstock.core.columns import FloatArray
from penstock.core.plan import Evict, Recompute
from penstock.errors import InvalidArgument, SpillSpaceFull
from penstock.planners.heuristics.g10 import g10
from penstock.planners.optimal.search.choices import Choices
from penstock.planners.optimal.search.rounding import ActionArray, round_fractions
from penstock.planners.problem import Problem
from penstock.simulator.actions import KEEP, MOVES, RECOMPUTE


def seeds(problem: Problem, choices: Choices, fractions: FloatArray | None) -> Iterator[ActionArray]:
    """[P] what could happen in each period, several times; none need fit.

    The linear program's fractions, rounded, where there are some; nothing at all, of which repair makes a
    greedy plan, and with recomputation a knapsack's; and G10's plan.
    """
    if fractions is not None:
        yield round_fractions(problem.trace, choices, fractions)
    yield np.zeros(len(choices), dtype=np.int8)
    with contextlib.suppress(SpillSpaceFull, InvalidArgument):  # where G10 finds no plan, others may
        yield of_intervals(choices, g10(problem).evictions)


def of_intervals(
    choices: Choices, evictions: Iterable[Evict], recomputations: Iterable[Recompute] = ()
) -> ActionArray:
    """[P] what happens in each period in a plan."""
    numbers = {move: number for number, move in MOVES.items()}
    by_tensor: dict[int, list[int]] = {}
    for period, tensor in enumerate(choices.tensor.tolist()):
        by_tensor.setdefault(tensor, []).append(period)
    actions: ActionArray = np.full(len(choices), KEEP, dtype=np.int8)
    rows = [(e.tensor, e.begin, e.end, numbers[e.tier, e.codec]) for e in evictions]
    rows += [(r.tensor, r.begin, r.end, RECOMPUTE) for r in recomputations]
    for tensor, begin, end, action in rows:
        for period in by_tensor.get(tensor, []):
            inside = choices.begin[period] <= begin < end <= choices.end[period]
            if inside and choices.allowed[period, action]:
                actions[period] = action
    return actions


def everything_away(choices: Choices) -> ActionArray:
    """[P] for every period the cheapest action that moves the tensor."""
    moves = np.array(sorted(MOVES))
    cost_s = choices.cost_s[:, moves]
    possible = np.isfinite(cost_s).any(axis=1)
    return np.where(possible, moves[cost_s.argmin(axis=1)], KEEP).astype(np.int8)
