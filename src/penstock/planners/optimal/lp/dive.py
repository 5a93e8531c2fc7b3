"""From fractions to choices: the linear program again and again, each time with more of its choices fixed."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from penstock.core.columns import FloatArray
from penstock.planners.optimal.lp.model import LPModel
from penstock.planners.optimal.lp.solver import solve
from penstock.simulator.actions import ACTIONS, KEEP, MOVES, RECOMPUTE

_ROUNDS = 8
_CLEAR = 0.95  # a fraction from this on is a choice
_SHARE = 0.3  # of the others, the largest are fixed, too
_LINK = {"host": "device_to_host", "disk": "disk_write"}
_TIE = 1e-5  # what a second on a link counts for: of plans that are as fast, one that moves less


def dive(model: LPModel, time_limit_s: float) -> FloatArray:
    """[P, A] fractions of each period, nearly all of them 0 or 1: what is fixed later makes up for what was
    rounded before. Where nothing fits any longer, or the time is over, the rest keeps its fractions.
    """
    began = time.perf_counter()
    program, size = model.program, model.size
    count = len(size)
    cost, lower, upper = program.cost.copy(), program.lower.copy(), program.upper.copy()
    column = np.full((count, len(ACTIONS)), -1)
    for action, periods, columns in model.choices:
        column[periods, action] = columns
        if action != RECOMPUTE:
            cost[columns] += _TIE * 2 / model.rate(_LINK[MOVES[action][0]])
    free = np.ones(count, dtype=np.bool_)
    found = np.zeros((count, len(ACTIONS)))
    found[:, KEEP] = 1.0
    for _ in range(_ROUNDS):
        left_s = time_limit_s - (time.perf_counter() - began)
        if left_s <= 0:
            break
        solution = solve(replace(program, cost=cost, lower=lower, upper=upper), left_s)
        if solution.status != "optimal":
            break
        fractions = model.fractions(solution.value)
        found[free] = fractions[free]
        most, chosen = fractions.max(axis=1), fractions.argmax(axis=1)
        unclear = np.flatnonzero(free & (most < _CLEAR))
        if len(unclear) == 0:
            break
        unclear = unclear[np.argsort(-most[unclear], kind="stable")]
        fixed = free & (most >= _CLEAR)
        fixed[unclear[: int(np.ceil(_SHARE * len(unclear)))]] = True
        free &= ~fixed
        for period in np.flatnonzero(fixed).tolist():
            found[period] = 0.0
            found[period, chosen[period]] = 1.0
            for action in np.flatnonzero(column[period] >= 0).tolist():
                amount = size[period] if action == chosen[period] else 0.0
                lower[column[period, action]] = upper[column[period, action]] = amount
    return found
