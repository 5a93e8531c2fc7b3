"""What an optimal plan would do, were tensors divisible: a lower bound, and a guide for rounding."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from penstock.core.columns import FloatArray
from penstock.core.memory_profile import least_workspace_bytes
from penstock.planners.optimal.lp.candidates import EvictionCandidates
from penstock.planners.optimal.lp.model import LPModel
from penstock.planners.optimal.lp.slots import cut
from penstock.planners.optimal.lp.solver import proven, solve
from penstock.planners.problem import Problem
from penstock.simulator.actions import ACTIONS, KEEP


@dataclass(frozen=True, slots=True, eq=False)
class FractionalPlan:
    """What the linear program answers. P inactive periods in the trace's order.

    bound_s     no plan is faster, repeated without end: proven, however well it was solved
    fractions   [P, 6] how much of each period has which action: the columns are those of
                penstock.simulator.actions.ACTIONS; None where nothing was solved
    status      "optimal"; "time limit", "infeasible" (not even parts of tensors find room on the tiers) or
                "unknown": then only `bound_s` means something
    model       None where everything fits
    """

    bound_s: float
    fractions: FloatArray | None
    status: str
    model: LPModel | None = None


def fractional_plan(problem: Problem, slots: int = 200) -> FractionalPlan:
    """Solve the problem with tensors as water, in about ``slots`` slots of time.

    Raises InvalidArgument where the solver is not installed.
    """
    began = time.perf_counter()
    trace, budget = problem.trace, problem.budget_bytes
    live_bytes = trace.live_bytes - trace.kernel_workspace_bytes + least_workspace_bytes(trace)
    candidates = EvictionCandidates.of(
        trace, trace.fastest_time_s, compress=problem.compress, recompute=problem.recompute
    )
    fractions = np.zeros((len(candidates), len(ACTIONS)))
    if int(live_bytes.max(initial=0)) <= budget:  # everything fits
        fractions[:, KEEP] = 1.0
        return FractionalPlan(trace.fastest_s, fractions, "optimal")
    grid = cut(trace, candidates, trace.fastest_time_s, slots)
    model = LPModel(candidates, grid, problem.hardware, trace.fastest_time_s, live_bytes, budget)
    solution = solve(model.program, problem.time_limit_s - (time.perf_counter() - began))
    bound_s = max(trace.fastest_s, proven(model.program, solution.dual) * model.unit_s)
    return FractionalPlan(bound_s, model.fractions(solution.value), solution.status, model)
