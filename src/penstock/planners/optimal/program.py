"""A linear program: blocks of columns, of rows and of entries, columns over time, and the solver."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.columns import BoolArray, FloatArray, IntArray
from penstock.errors import InvalidArgument, installing

Values = FloatArray | float


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Minimise ``cost @ x`` where ``row_lower <= A @ x <= row_upper`` and ``lower <= x <= upper``.

    A has R rows and C columns; row r's entries are ``values[starts[r]:starts[r + 1]]``, in the columns
    ``indices[starts[r]:starts[r + 1]]``, each column once.
    """

    cost: FloatArray
    lower: FloatArray
    upper: FloatArray
    row_lower: FloatArray
    row_upper: FloatArray
    starts: IntArray
    indices: IntArray
    values: FloatArray

    @property
    def columns(self) -> int:
        return len(self.cost)

    @property
    def rows(self) -> int:
        return len(self.row_lower)

    def transposed_times(self, row_values: FloatArray) -> FloatArray:
        """[C] A's transpose times [R]."""
        per_entry = np.repeat(row_values, np.diff(self.starts)) * self.values
        total = np.bincount(self.indices, weights=per_entry, minlength=self.columns)
        return np.asarray(total, dtype=np.float64)


@dataclass(slots=True)
class ProgramBuilder:
    """Collects blocks; `program` puts them together."""

    columns: int = 0
    rows: int = 0
    _columns: list[tuple[FloatArray, FloatArray, FloatArray]] = field(default_factory=list)
    _rows: list[tuple[FloatArray, FloatArray]] = field(default_factory=list)
    _entries: list[tuple[IntArray, IntArray, FloatArray]] = field(default_factory=list)

    def add_columns(self, count: int, upper: Values, lower: Values = 0.0, cost: Values = 0.0) -> IntArray:
        self._columns.append((_wide(cost, count), _wide(lower, count), _wide(upper, count)))
        self.columns += count
        return np.arange(self.columns - count, self.columns)

    def add_rows(self, count: int, lower: Values, upper: Values) -> IntArray:
        self._rows.append((_wide(lower, count), _wide(upper, count)))
        self.rows += count
        return np.arange(self.rows - count, self.rows)

    def add(self, rows: IntArray, columns: IntArray, values: Values) -> None:
        """Add ``values`` to the entries at ``rows`` and ``columns``."""
        self._entries.append((rows, columns, _wide(values, len(rows))))

    def program(self) -> Program:
        rows, columns, values = (np.concatenate(parts) for parts in zip(*self._entries, strict=True))
        keys, place = np.unique(rows * self.columns + columns, return_inverse=True)
        total = np.bincount(place.reshape(-1), weights=values, minlength=len(keys))
        row_of, column_of = np.divmod(keys, self.columns)
        cost, lower, upper = (np.concatenate(parts) for parts in zip(*self._columns, strict=True))
        row_lower, row_upper = (np.concatenate(parts) for parts in zip(*self._rows, strict=True))
        return Program(
            cost=cost,
            lower=lower,
            upper=upper,
            row_lower=row_lower,
            row_upper=row_upper,
            starts=np.searchsorted(row_of, np.arange(self.rows + 1)).astype(np.int64),
            indices=column_of.astype(np.int64),
            values=np.asarray(total, dtype=np.float64),
        )


def _wide(value: npt.ArrayLike, count: int) -> FloatArray:
    result: FloatArray = np.full(count, value, dtype=np.float64)
    return result


@dataclass(frozen=True, slots=True, eq=False)
class Amounts:
    """N columns of a program, and how much of something each unit of them is.

    columns   [N]
    weight    [N] counted for each unit of the column
    upper     [N] the column's upper bound
    """

    columns: IntArray
    weight: FloatArray
    upper: FloatArray

    @property
    def most(self) -> float:
        return float(np.abs(self.weight * self.upper).sum())

    def where(self, mask: BoolArray) -> Amounts:
        return Amounts(self.columns[mask], self.weight[mask], self.upper[mask])

    def times(self, factor: FloatArray | float) -> Amounts:
        return Amounts(self.columns, np.asarray(self.weight * factor, dtype=np.float64), self.upper)

    @classmethod
    def joined(cls, parts: Sequence[Amounts]) -> Amounts:
        return cls(
            joined([part.columns for part in parts]),
            np.concatenate([np.zeros(0), *(part.weight for part in parts)]),
            np.concatenate([np.zeros(0), *(part.upper for part in parts)]),
        )


@dataclass(frozen=True, slots=True)
class Flows:
    """Adds columns and rows for ``count`` slots to a program.

    Slots given as arguments may lie in the next iteration or the one before. ``cyclic``: what is left
    after the last slot is there in the first; otherwise nothing is there before the first slot.
    """

    build: ProgramBuilder
    count: int
    cyclic: bool

    def level(self, first: IntArray, last: IntArray, amounts: Amounts) -> IntArray:
        """[count] columns: the sum of ``amounts`` over those with the slot within ``[first, last)``."""
        count, build = self.count, self.build
        within = first < last
        first, last, amounts = first[within], last[within], amounts.where(within)
        # How often slot 0, of any iteration, is within.
        at_start = (last - 1) // count - (first - 1) // count
        change = np.zeros(count)
        np.add.at(change, first % count, amounts.weight * amounts.upper)
        np.subtract.at(change, last % count, amounts.weight * amounts.upper)
        change[0] = float((at_start * amounts.weight * amounts.upper).sum())
        level = build.add_columns(count, upper=np.maximum(np.cumsum(change), 0.0) + 1e-12 * amounts.most)
        rows = build.add_rows(count, 0.0, 0.0)
        build.add(rows, level, 1.0)
        build.add(rows[1:], level[:-1], -1.0)
        build.add(np.repeat(rows[:1], len(amounts.columns)), amounts.columns, -at_start * amounts.weight)
        enters, leaves = first % count != 0, last % count != 0
        build.add(rows[first[enters] % count], amounts.columns[enters], -amounts.weight[enters])
        build.add(rows[last[leaves] % count], amounts.columns[leaves], amounts.weight[leaves])
        return level

    def stock(self, slot: IntArray, amounts: Amounts, flow: IntArray, sign: float = 1.0) -> IntArray:
        """[count] columns, none below zero: ``amounts``, each from its ``slot`` on, less ``flow``, up to
        and with each slot. With ``sign`` -1: ``flow`` less ``amounts``."""
        build = self.build
        stock = build.add_columns(self.count, upper=amounts.most)
        rows = build.add_rows(self.count, 0.0, 0.0)
        build.add(rows, stock, 1.0)
        build.add(rows[1:], stock[:-1], -1.0)
        if self.cyclic:
            build.add(rows[:1], stock[-1:], -1.0)
        build.add(rows[slot % self.count], amounts.columns, -sign * amounts.weight)
        build.add(rows, flow, sign)
        return stock

    def within(self, first: IntArray, last: IntArray, amounts: Amounts) -> IntArray:
        """[count] columns: a flow that takes in all of ``amounts``, each within slots ``[first, last]``."""
        flow = self.build.add_columns(self.count, upper=amounts.most)
        left = self.stock(first, amounts, flow)
        still_open = self.level(first, last, amounts)
        rows = self.build.add_rows(self.count, 0.0, np.inf)
        self.build.add(rows, still_open, 1.0)
        self.build.add(rows, left, -1.0)
        return flow


def joined(parts: Sequence[IntArray]) -> IntArray:
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


# -- the solver ------------------------------------------------------------------------------------

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
