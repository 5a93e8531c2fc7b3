"""Where the search for a good plan starts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import numpy as np

from penstock.core.columns import FloatArray
from penstock.core.plan import Evict, Recompute
from penstock.core.trace import Trace
from penstock.errors import InvalidArgument, SpillSpaceFull
from penstock.planners.heuristics.g10 import algorithm_1
from penstock.planners.optimal.search.choices import ActionArray, Choices
from penstock.planners.problem import Problem
from penstock.simulator.actions import ACTIONS, KEEP, MOVES, RECOMPUTE, action_of

_SLIGHT = 0.03  # a fraction up to this is no reason to choose an action
_LOYALTY = 0.25  # of a tensor's size: what taking the same action as before counts for


def seeds(problem: Problem, choices: Choices, fractions: FloatArray | None) -> Iterator[ActionArray]:
    """[P] what could happen in each period, several times; none need fit.

    The linear program's fractions, rounded, where there are some; nothing at all, of which repair makes a
    greedy plan, and with recomputation a knapsack's; and G10's plan.
    """
    if fractions is not None:
        yield round_fractions(problem.trace, choices, fractions)
    yield np.zeros(len(choices), dtype=np.int8)
    with contextlib.suppress(SpillSpaceFull, InvalidArgument):  # where G10 finds no plan, others may
        yield of_intervals(choices, algorithm_1(problem, as_artifact=True).evictions)


def of_intervals(
    choices: Choices, evictions: Iterable[Evict], recomputations: Iterable[Recompute] = ()
) -> ActionArray:
    """[P] what happens in each period in a plan; nothing where a tensor is written and does not leave."""
    by_tensor: dict[int, list[int]] = {}
    for period, tensor in enumerate(choices.tensor.tolist()):
        by_tensor.setdefault(tensor, []).append(period)
    actions: ActionArray = np.full(len(choices), KEEP, dtype=np.int8)
    rows = [
        (e.tensor, e.begin, e.end, action_of(e.tier, e.codec)) for e in evictions if e.prefetch_at > e.begin
    ]
    rows += [(r.tensor, r.begin, r.end, RECOMPUTE) for r in recomputations]
    for tensor, begin, end, action in rows:
        assert action is not None
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


def round_fractions(trace: Trace, choices: Choices, fractions: FloatArray) -> ActionArray:
    """[P] one action for each period, so that at any time each has about as many bytes as in ``fractions``.

    fractions   [P, A] of the linear program

    Periods are taken in the order in which they begin; what rounding adds or leaves out is carried on
    to the next. Persistent tensors, and periods that reach into the next iteration, carry their own.
    """
    actions: ActionArray = np.zeros(len(choices), dtype=np.int8)
    share = np.where(choices.allowed, fractions, 0.0).clip(0.0, 1.0)
    share[:, KEEP] = np.maximum(0.0, 1.0 - share[:, 1:].sum(axis=1))
    group = np.where(choices.end > trace.kernels, 2, np.where(trace.tensor_persistent[choices.tensor], 1, 0))
    before: dict[int, int] = {}
    for which in range(3):
        periods = np.flatnonzero(group == which)
        periods = periods[np.lexsort((-choices.size_bytes[periods], choices.begin[periods]))]
        owed = [0.0] * len(ACTIONS)
        for period in periods.tolist():
            size = float(choices.size_bytes[period])
            tensor = int(choices.tensor[period])
            parts = share[period].tolist()
            best, most = KEEP, -np.inf
            for action, part in enumerate(parts):
                owed[action] += part * size
                if part > _SLIGHT:
                    due = owed[action] + (_LOYALTY * size if before.get(tensor) == action else 0.0)
                    if due > most:
                        best, most = action, due
            owed[best] -= size
            actions[period] = best
            if best != KEEP:
                before[tensor] = best
    return actions
