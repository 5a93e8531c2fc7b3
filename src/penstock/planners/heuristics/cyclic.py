"""Ranges of kernels that may reach into the next iteration, over arrays with an entry for each kernel."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.core.columns import FloatArray, IntArray


def parts(begin: int, end: int, kernels: int) -> Iterator[slice]:
    """Kernels ``[begin, end)`` as slices of one iteration. The range is no longer than an iteration."""
    if begin < kernels:
        yield slice(begin, min(end, kernels))
    if end > kernels:
        yield slice(max(begin - kernels, 0), end - kernels)


def add(values: IntArray, begin: int, end: int, amount: int) -> None:
    """Add ``amount`` to the entries of kernels ``[begin, end)``."""
    for part in parts(begin, end, len(values)):
        values[part] += amount


def highest(values: IntArray, begin: int, end: int) -> int:
    """The largest entry of kernels ``[begin, end)``; 0 where there is none."""
    return max((int(values[part].max(initial=0)) for part in parts(begin, end, len(values))), default=0)


def unrolled(values: FloatArray) -> FloatArray:
    """[2K + 1] sums of the entries before each kernel of two iterations."""
    once = np.cumsum(values)
    total = once[-1] if len(once) else 0.0
    return np.concatenate([[0.0], once, once + total])


def earliest(room: IntArray, begin: int, end: int, amount: int) -> int:
    """The first kernel from which on, up to ``end``, every kernel has ``amount`` of ``room`` left; `end`
    where the last does not."""
    first = begin
    for part in parts(begin, end, len(room)):
        tight = np.flatnonzero(room[part] < amount)
        if len(tight):
            wrapped = part.start < begin
            first = part.start + int(tight[-1]) + 1 + (len(room) if wrapped else 0)
    return first
