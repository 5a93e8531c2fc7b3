"""A linear program under construction: blocks of columns, of rows, and of entries, all as arrays."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from penstock.core.columns import FloatArray, IntArray

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
class Builder:
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
