"""No plan is faster: a lower bound on the iteration time, proven from the duals of linear programs."""

from __future__ import annotations

import time

import numpy as np

from penstock.planners.optimal.lp.fractional import FractionalPlan, fastest, fractional_plan
from penstock.planners.problem import Problem

_FIRST_SLOTS = 100
_FINER = 2.5  # each grid has so many times the slots of the one before
_WORTHWHILE = 1.3  # with fewer, it is not worth solving again
_GROWTH = 1.4  # what a finer grid may cost, over what its slots alone would make it cost
_COUNTS = 1e-3  # of the price of memory: a checkpoint with less is not looked at more closely
_NEAR = 20  # kernels on each side of a decisive one that get a slot of their own
_CLOSE_UPS = 200  # such slots, altogether


def lower_bound(problem: Problem, time_limit_s: float | None = None) -> float:
    """Seconds that no plan with this problem's actions stays below, repeated without end.

    Grids get finer while the time lasts, first where memory holds the iteration up, then all over, up to
    a slot or two for each kernel. Every one gives a bound, and the largest holds: grids are not nested,
    a finer one is not always better. Without the time for any, the bound is the sum of the kernels'
    times.

    Raises InvalidArgument where the solver is not installed.
    """
    began = time.perf_counter()
    limit_s = problem.time_limit_s if time_limit_s is None else time_limit_s
    kernels = problem.trace.kernels
    best = float(fastest(problem.trace)[0].sum())
    slots, alone, left_s = _FIRST_SLOTS, frozenset[int](), limit_s
    while left_s > 0:
        found = fractional_plan(problem, slots, left_s, tuple(sorted(alone)))
        best = max(best, found.bound_s)
        left_s = limit_s - (time.perf_counter() - began)
        finer = min(_FINER, left_s / (found.seconds * _GROWTH))
        if found.status != "optimal" or slots >= kernels or finer < _WORTHWHILE:
            break
        closer = alone | decisive(found, kernels)
        if closer == alone or alone:
            slots = round(slots * finer)
        alone = closer
    return best


def decisive(found: FractionalPlan, kernels: int) -> frozenset[int]:
    """The kernels whose memory holds the iteration up, and those near them, for a finer grid to look at."""
    price = np.abs(found.memory_s_per_byte)
    heads = found.slots.checkpoint[price > _COUNTS * price.sum()]
    reach = min(_NEAR, _CLOSE_UPS // (2 * max(len(heads), 1)))
    near = (heads[:, None] + np.arange(-reach, reach + 1)).reshape(-1)
    return frozenset(near[(near >= 0) & (near < kernels)].tolist())
