"""A linear program solved by HiGHS, and a lower bound that does not depend on how well it was solved."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.core.columns import FloatArray
from penstock.errors import InvalidArgument
from penstock.planners.optimal.lp.sparse import Program

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
    highspy = _highs()
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


def _highs() -> Any:
    try:
        import highspy
    except ImportError as error:
        raise InvalidArgument(
            "the solver HiGHS is not installed: install it with  pip install 'penstock[plan]'"
        ) from error
    return highspy
