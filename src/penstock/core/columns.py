"""What traces are made of: columns, lists of integers, and the names that columns number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

PHASES = ("forward", "backward", "optimizer")
KINDS = ("weight", "gradient", "optimizer_state", "activation", "input", "workspace")


def sum_over(count: int, begin: IntArray, end: IntArray, value: IntArray) -> IntArray:
    """[count] at each place, the sum of the values in whose ranges ``[begin, end)`` it is."""
    change = np.zeros(count + 1, dtype=np.int64)
    np.add.at(change, begin, value)
    np.subtract.at(change, end, value)
    total: IntArray = np.cumsum(change)[:count]
    return total


@dataclass(frozen=True, slots=True, eq=False)
class Lists:
    """Lists of integers, one after the other: list i is ``values[starts[i]:starts[i + 1]]``."""

    starts: IntArray
    values: IntArray

    def __getitem__(self, index: int) -> IntArray:
        return self.values[self.starts[index] : self.starts[index + 1]]

    def __len__(self) -> int:
        return len(self.starts) - 1

    @classmethod
    def of(cls, lists: list[list[int]]) -> Lists:
        lengths = [len(entry) for entry in lists]
        return cls(
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            np.array([value for entry in lists for value in entry], dtype=np.int64),
        )

    @property
    def owners(self) -> IntArray:
        """[N] the number of the list that each entry of `values` is in."""
        return np.repeat(np.arange(len(self)), np.diff(self.starts))

    def select(self, indices: IntArray) -> tuple[IntArray, IntArray]:
        """The entries of some lists, one list after the other: [N] where in ``indices`` the list of each
        entry is, and [N] the entries."""
        lengths = np.diff(self.starts)[indices]
        row = np.repeat(np.arange(len(indices)), lengths)
        within = np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return row, self.values[self.starts[indices][row] + within]

    @classmethod
    def by_value(cls, lists: int, index: IntArray, value: IntArray, values: int) -> Lists:
        """So many lists: list i has, ascending and once each, every ``value[n]`` where ``index[n]`` is i. All
        are below ``values``."""
        scale = max(values, 1)
        keys = np.unique(index * scale + value)
        return cls(np.searchsorted(keys, np.arange(lists + 1) * scale).astype(np.int64), keys % scale)

    def last_below(self, index: IntArray, limit: IntArray) -> IntArray:
        """[N] the largest entry of list ``index[n]`` that is below ``limit[n]``; -1 where there is none.

        The lists ascend and hold no negative numbers.
        """
        found: IntArray = np.full(len(index), -1, dtype=np.int64)
        place = self._place(index, limit, "left") - 1
        inside = place >= self.starts[index]
        found[inside] = self.values[place[inside]]
        return found

    def first_above(self, index: IntArray, limit: IntArray, otherwise: int) -> IntArray:
        """[N] the smallest entry of list ``index[n]`` that is above ``limit[n]``; ``otherwise`` where there
        is none. The lists are as for `last_below`."""
        found: IntArray = np.full(len(index), otherwise, dtype=np.int64)
        place = self._place(index, limit, "right")
        inside = place < self.starts[index + 1]
        found[inside] = self.values[place[inside]]
        return found

    def _place(self, index: IntArray, limit: IntArray, side: Literal["left", "right"]) -> IntArray:
        """[N] where in `values` each limit belongs, among the entries of its list."""
        scale = int(max(self.values.max(initial=0), limit.max(initial=0))) + 1
        return np.searchsorted(self.owners * scale + self.values, index * scale + limit, side=side)
