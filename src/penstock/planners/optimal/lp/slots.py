"""The iteration cut into slots: what a linear program takes for moments."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.core.columns import FloatArray, IntArray, sum_over
from penstock.core.trace import Trace
from penstock.planners.optimal.lp.candidates import EvictionCandidates

_MEMORY_SHARE = 0.3  # how much the change of memory counts for a slot's share, against time
_LONG = 0.25  # of a slot's share of the time: a kernel that takes as long gets a slot of its own


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """S slots. Kernel k is two steps: 2 k, waiting for its start, and 2 k + 1, its run. A slot is some steps
    in a row, and ends at the start or at the end of a kernel's run. There, memory is looked at. Slot
    S + q, and step 2 K + s, are those of the next iteration.

    of_step     [2 K] slot of each step
    last_step   [S] the last step of each slot
    """

    of_step: IntArray
    last_step: IntArray

    def __len__(self) -> int:
        return len(self.last_step)

    @property
    def of_kernel(self) -> IntArray:
        """[K] slot in which each kernel ends."""
        return self.of_step[1::2]

    @property
    def checkpoint(self) -> IntArray:
        """[S] the kernel that runs at each slot's end: it starts, or it ends."""
        result: IntArray = self.last_step // 2
        return result

    def before(self, kernel: IntArray) -> IntArray:
        """The slot in which each kernel is waited for; kernels beyond the iteration give slots beyond it."""
        steps = len(self.of_step)
        result: IntArray = self.of_step[2 * kernel % steps] + 2 * kernel // steps * len(self)
        return result


def cut(
    trace: Trace,
    candidates: EvictionCandidates,
    kernel_time_s: FloatArray,
    count: int,
) -> Slots:
    """About ``count`` slots with equal shares of time and of change of memory, or, where there are no more
    kernels, one or two for each."""
    kernels = trace.kernels
    ends = np.zeros(2 * kernels, dtype=np.bool_)
    looked_at = (
        _tallest(trace, candidates, kernel_time_s, min(count, kernels)) if kernels else np.zeros(0, int)
    )
    ends[2 * looked_at] = True
    long = kernel_time_s[looked_at] >= _LONG * float(kernel_time_s.sum()) / max(count, 1)
    ends[2 * looked_at[long] + 1] = True
    ends[-1:] = True
    return Slots(np.cumsum(ends) - ends, np.flatnonzero(ends))


def _tallest(trace: Trace, candidates: EvictionCandidates, kernel_time_s: FloatArray, count: int) -> IntArray:
    """The kernel with the most memory out of each of ``count`` groups of kernels in a row."""
    kernels = trace.kernels
    if count == kernels:
        return np.arange(kernels)
    change = np.abs(np.diff(trace.live_bytes, prepend=trace.live_bytes[:1])).astype(np.float64)
    share = _shares(kernel_time_s) + _MEMORY_SHARE * _shares(change)
    until = np.cumsum(share) / share.sum()
    group = np.minimum((until * count * (1 - 1e-12)).astype(np.int64), count - 1)

    # What can only be away within a group would be seen at its one checkpoint: look where most else is.
    begin, end = candidates.begin, candidates.end
    inside = (end <= kernels) & (group[np.minimum(begin, kernels - 1)] == group[end % kernels])
    lasting = trace.live_bytes - sum_over(kernels, begin[inside], end[inside], candidates.size_bytes[inside])
    order = np.lexsort((-lasting, group))
    first = np.diff(group[order], prepend=-1) != 0
    result: IntArray = order[first]
    return result


def _shares(values: FloatArray) -> FloatArray:
    total = float(values.sum())
    result: FloatArray = values / total if total > 0 else np.full(len(values), 1.0 / len(values))
    return result
