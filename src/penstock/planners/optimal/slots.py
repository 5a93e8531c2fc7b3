"""The iteration as the linear program sees it: eviction candidates, and time slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.core.columns import BoolArray, FloatArray, IntArray, sum_over
from penstock.core.trace import Periods, Trace
from penstock.planners.problem import Problem


@dataclass(frozen=True, eq=False)
class EvictionCandidates(Periods):
    """The trace's inactive periods, with more columns. K kernels; kernel K + k is kernel k of the next
    iteration, kernel k - K of the previous one.

    ready                [P] kernel after which the tensor can be copied: the last that writes it, maybe
                         in the iteration before; -1 where it can be copied from the start
    version              [P] periods of one version of a tensor, between which nothing writes it, have
                         the same number: one copy serves them all
    rank                 [P] the period's place among those of its version, in time
    opened               [P] begin of the first period of its version, maybe in the iteration before
    lasting              [P] nothing ever writes the tensor: its copy stays valid from one iteration to
                         the next, and costs nothing
    packed_bytes         [P] compressed; the size where that is not less
    recompute_s          [P] time of the kernel that recomputes the tensor; infinite where none can
    recompute_until      [P] last kernel before which it can be recomputed: later, an input is gone
    wraps                a period reaches into the next iteration
    lossy                codec of lossy evictions, or empty
    """

    version: IntArray
    rank: IntArray
    opened: IntArray
    lasting: BoolArray
    packed_bytes: IntArray
    recompute_s: FloatArray
    recompute_until: IntArray
    wraps: bool
    lossy: str

    @classmethod
    def of(cls, problem: Problem) -> EvictionCandidates:
        trace = problem.trace
        tensor, begin, end = trace.periods.tensor, trace.periods.begin, trace.periods.end
        wraps = bool((end >= trace.kernels).any())
        ready, lasting = _ready(trace, tensor, trace.periods.ready, cyclic=wraps)
        version, rank, opened = _versions(tensor, begin, ready, trace.kernels)
        packed = trace.period_bytes(problem.compress)
        recompute_s = np.full(len(tensor), np.inf)
        recompute_until = np.full(len(tensor), -1, dtype=np.int64)
        if problem.recompute and len(trace.tensor_recompute):
            producer = trace.tensor_recompute[tensor]
            recompute_until = np.minimum(trace.recomputable_until[tensor], end)
            possible = (producer >= 0) & (recompute_until > begin) & (end < trace.kernels)
            recompute_s[possible] = trace.fastest_time_s[producer[possible]]
        return cls(
            tensor, begin, end, ready, trace.periods.size_bytes, version, rank, opened, lasting, packed,
            recompute_s, recompute_until, wraps, trace.lossy,
        )  # fmt: skip


def _ready(trace: Trace, tensor: IntArray, before: IntArray, *, cyclic: bool) -> tuple[IntArray, BoolArray]:
    """[P] the last kernel that writes the tensor before each period, maybe in the iteration before, and
    whether nothing ever does.

    before   [P] the last of the same iteration, -1 where there is none
    """
    last = trace.writers.last_below(tensor, np.full(len(tensor), trace.kernels))
    persistent = trace.tensor_persistent[tensor]
    carried = cyclic & persistent & (before < 0) & (last >= 0)
    ready = np.where(carried, last - trace.kernels, before)
    return ready, np.asarray(cyclic & persistent & (last < 0))


def _versions(
    tensor: IntArray, begin: IntArray, ready: IntArray, kernels: int
) -> tuple[IntArray, IntArray, IntArray]:
    """[P] the number of each period's version, its place in it, and the begin of the first one in it."""
    if len(tensor) == 0:
        return tensor.copy(), tensor.copy(), tensor.copy()
    # The writer of the iteration before is the same kernel.
    write = ready % kernels
    _, version = np.unique(np.stack([tensor, write]), axis=1, return_inverse=True)
    version = version.reshape(-1).astype(np.int64)
    # In the iteration after its writer's, a period comes later than those of the writer's own.
    order = np.lexsort((begin - ready, version))
    first = np.searchsorted(version[order], version[order])
    rank, opened = np.empty_like(version), np.empty_like(version)
    rank[order] = np.arange(len(version)) - first
    opened[order] = (begin - ready)[order[first]] + ready[order]
    return version, rank, opened


_MEMORY_SHARE = 0.3  # weight of the change of memory in a slot's share; that of time is 1
_LONG = 0.25  # of a slot's share of the time: a kernel that takes as long gets a slot of its own


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """S slots. Kernel k has two steps: 2 k, the wait for its start, and 2 k + 1, its run. A slot is a range
    of steps, and ends at the start or the end of a kernel's run, where memory is constrained. Slot S + q and
    step 2 K + s are those of the next iteration.

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
        """The slot of each kernel's wait; kernels beyond the iteration give slots beyond it."""
        steps = len(self.of_step)
        result: IntArray = self.of_step[2 * kernel % steps] + 2 * kernel // steps * len(self)
        return result


def make_slots(trace: Trace, candidates: EvictionCandidates, count: int) -> Slots:
    """About ``count`` slots with equal shares of time and of change of memory; one or two for each kernel
    where there are fewer kernels."""
    kernels, time_s = trace.kernels, trace.fastest_time_s
    ends = np.zeros(2 * kernels, dtype=np.bool_)
    looked_at = _tallest(trace, candidates, min(count, kernels)) if kernels else np.zeros(0, int)
    ends[2 * looked_at] = True
    long = time_s[looked_at] >= _LONG * float(time_s.sum()) / max(count, 1)
    ends[2 * looked_at[long] + 1] = True
    ends[-1:] = True
    return Slots(np.cumsum(ends) - ends, np.flatnonzero(ends))


def _tallest(trace: Trace, candidates: EvictionCandidates, count: int) -> IntArray:
    """The kernel with the most memory in each of ``count`` groups of consecutive kernels."""
    kernels = trace.kernels
    if count == kernels:
        return np.arange(kernels)
    change = np.abs(np.diff(trace.live_bytes, prepend=trace.live_bytes[:1])).astype(np.float64)
    share = _shares(trace.fastest_time_s) + _MEMORY_SHARE * _shares(change)
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
