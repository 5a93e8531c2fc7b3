"""What an optimal plan would do, were tensors divisible: a proven bound, and a guide for rounding."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.core.columns import FloatArray
from penstock.core.memory_profile import least_workspace_bytes
from penstock.errors import InvalidArgument, installing
from penstock.planners.optimal.lp import LPModel
from penstock.planners.optimal.program import Program
from penstock.planners.optimal.slots import EvictionCandidates, cut
from penstock.planners.problem import Problem
from penstock.simulator import ACTIONS, KEEP, MOVES, RECOMPUTE

_INFINITE = 1e20
_ROUNDING = 1e-10  # of the sum of magnitudes: far above what adding doubles loses


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """status  "optimal", "infeasible", "time limit" or "unknown"
    value   [C]
    dual    [R] what the cost rises by with the row's bound
    """

    status: str
    value: FloatArray
    dual: FloatArray


def solve(program: Program, time_limit_s: float) -> Solution:
    """By an interior point, and no further: the middle of what is optimal guides as well as a corner.

    Where there is no middle, as at the smallest of all budgets, it may fail: then by the simplex method.
    """
    began = time.perf_counter()
    solution = _run(program, "ipm", time_limit_s)
    if solution.status == "unknown":
        corner = _run(program, "simplex", time_limit_s - (time.perf_counter() - began))
        if corner.status in ("optimal", "infeasible"):
            return corner
    return solution


def _run(program: Program, method: str, time_limit_s: float) -> Solution:
    try:
        import highspy
    except ImportError as error:
        raise InvalidArgument(f"the solver HiGHS is not installed: {installing('plan')}") from error
    highs = highspy.Highs()
    for option, value in (
        ("output_flag", False),
        ("solver", method),
        ("run_crossover", "off"),
        ("random_seed", 0),
        ("time_limit", max(time_limit_s, 0.01)),
    ):
        highs.setOptionValue(option, value)
    highs.passModel(_model(highspy, program))
    highs.run()
    states = highspy.HighsModelStatus
    status = {
        states.kOptimal: "optimal",
        states.kInfeasible: "infeasible",
        states.kUnboundedOrInfeasible: "infeasible",  # time is never below zero: it cannot be unbounded
        states.kTimeLimit: "time limit",
    }.get(highs.getModelStatus(), "unknown")
    solution = highs.getSolution()
    return Solution(
        status,
        _finite(np.array(solution.col_value), program.columns),
        _finite(np.array(solution.row_dual), program.rows),
    )


def _model(highspy: Any, program: Program) -> Any:
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = program.columns, program.rows
    model.col_cost_, model.col_lower_, model.col_upper_ = program.cost, program.lower, program.upper
    model.row_lower_, model.row_upper_ = program.row_lower, program.row_upper
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = program.starts.astype(np.int32)
    model.a_matrix_.index_ = program.indices.astype(np.int32)
    model.a_matrix_.value_ = program.values
    return model


def proven(program: Program, dual: FloatArray) -> float:
    """A value that no feasible point is below, whatever ``dual`` is (Neumaier and Shcherbina, "Safe bounds
    in linear and mixed-integer programming", 2004).

    Columns without an upper bound must cost something: the duals are scaled until none of them pays.
    """
    dual = np.where((dual > 0) & (program.row_lower < -_INFINITE), 0.0, dual)
    dual = np.where((dual < 0) & (program.row_upper > _INFINITE), 0.0, dual)
    priced = program.transposed_times(dual)
    endless = program.upper > _INFINITE
    if endless.any():
        worst = float((priced[endless] / program.cost[endless]).max())
        if worst > 1:
            dual, priced = dual / (worst * (1 + 1e-12)), priced / (worst * (1 + 1e-12))
    reduced = program.cost - priced
    rows = np.where(dual > 0, dual * _known(program.row_lower), dual * _known(program.row_upper))
    upper = np.where(endless, 0.0, program.upper)
    columns = np.where(reduced > 0, reduced * program.lower, reduced * upper)
    magnitude = float(np.abs(rows).sum() + np.abs(columns).sum())
    return float(rows.sum() + columns.sum()) - _ROUNDING * magnitude


def _known(bound: FloatArray) -> FloatArray:
    result: FloatArray = np.where(np.abs(bound) < _INFINITE, bound, 0.0)
    return result


def _finite(values: FloatArray, count: int) -> FloatArray:
    """Zeros where the solver has nothing to say."""
    return np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0) if len(values) == count else np.zeros(count)


@dataclass(frozen=True, slots=True, eq=False)
class FractionalPlan:
    """What the linear program answers. P inactive periods in the trace's order.

    bound_s     no plan is faster, repeated without end: proven, however well it was solved
    fractions   [P, 6] how much of each period has which action: the columns are those of
                penstock.simulator.ACTIONS; None where nothing was solved
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
