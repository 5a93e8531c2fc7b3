"""Where the search for a good plan starts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import numpy as np

from penstock.core.columns import FloatArray
from penstock.core.plan import Evict, Recompute
from penstock.errors import InvalidArgument, SpillSpaceFull
from penstock.planners.heuristics.g10 import g10
from penstock.planners.optimal.search.choices import KEEP, MOVES, RECOMPUTE, Choices
from penstock.planners.optimal.search.rounding import HowArray, round_fractions
from penstock.planners.problem import Problem


def seeds(problem: Problem, choices: Choices, fractions: FloatArray | None) -> Iterator[HowArray]:
    """[P] what could happen in each period, several times; none need fit.

    The rounded relaxation where there is one; nothing at all, of which repair makes a greedy plan, and with
    recomputation a knapsack's; and G10's plan.
    """
    if fractions is not None:
        yield round_fractions(problem.trace, choices, fractions)
    yield np.zeros(len(choices), dtype=np.int8)
    with contextlib.suppress(SpillSpaceFull, InvalidArgument):  # where G10 finds no plan, others may
        yield of_absences(choices, g10(problem).evictions)


def of_absences(
    choices: Choices, evictions: Iterable[Evict], recomputations: Iterable[Recompute] = ()
) -> HowArray:
    """[P] what happens in each period in a plan."""
    ways = {name: way for way, name in MOVES.items()}
    by_tensor: dict[int, list[int]] = {}
    for period, tensor in enumerate(choices.tensor.tolist()):
        by_tensor.setdefault(tensor, []).append(period)
    how: HowArray = np.full(len(choices), KEEP, dtype=np.int8)
    rows = [(e.tensor, e.begin, e.end, ways[e.tier, e.codec]) for e in evictions]
    rows += [(r.tensor, r.begin, r.end, RECOMPUTE) for r in recomputations]
    for tensor, begin, end, way in rows:
        for period in by_tensor.get(tensor, []):
            inside = choices.begin[period] <= begin < end <= choices.end[period]
            if inside and choices.allowed[period, way]:
                how[period] = way
    return how


def everything_away(choices: Choices) -> HowArray:
    """[P] every period the cheapest way to a tier that it can go."""
    moves = np.array(sorted(MOVES))
    cost_s = choices.cost_s[:, moves]
    how: HowArray = np.where(np.isfinite(cost_s).any(axis=1), moves[cost_s.argmin(axis=1)], KEEP).astype(
        np.int8
    )
    return how
