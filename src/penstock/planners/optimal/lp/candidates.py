"""What a plan may do with each inactive period, as columns: what a linear program needs to know of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.core.columns import BoolArray, FloatArray, IntArray
from penstock.core.trace import Trace


@dataclass(frozen=True, slots=True, eq=False)
class EvictionCandidates:
    """P rows, one for each of the trace's inactive periods, in its order. K kernels; kernel K + k is
    kernel k of the next iteration, kernel k - K of the one before.

    tensor, begin, end   [P] as in `InactivePeriod`
    ready                [P] kernel after which the tensor can be copied: the last that writes it, maybe
                         in the iteration before; -1 where it can be copied from the start
    version              [P] periods of one version of a tensor, between which nothing writes it, have
                         the same number: one copy serves them all
    rank                 [P] the period's place among those of its version, in time
    opened               [P] begin of the first period of its version, maybe in the iteration before
    lasting              [P] nothing ever writes the tensor: its copy stays valid from one iteration to
                         the next, and costs nothing
    size_bytes           [P]
    packed_bytes         [P] compressed; the size where that is not less
    recompute_s          [P] time of the kernel that recomputes the tensor; infinite where none can
    recompute_until      [P] last kernel before which it can be recomputed: later, an input is gone
    wraps                a period reaches into the next iteration
    lossy                codec of some of what leaves compressed, or empty
    """

    tensor: IntArray
    begin: IntArray
    end: IntArray
    ready: IntArray
    version: IntArray
    rank: IntArray
    opened: IntArray
    lasting: BoolArray
    size_bytes: IntArray
    packed_bytes: IntArray
    recompute_s: FloatArray
    recompute_until: IntArray
    wraps: bool
    lossy: str

    def __len__(self) -> int:
        return len(self.tensor)

    @classmethod
    def of(
        cls, trace: Trace, kernel_time_s: FloatArray, *, compress: bool, recompute: bool
    ) -> EvictionCandidates:
        """``kernel_time_s``: [K] the least time each kernel can take."""
        tensor, begin, end, before = trace.periods
        wraps = bool((end >= trace.kernels).any())
        ready, lasting = _ready(trace, tensor, before, cyclic=wraps)
        version, rank, opened = _versions(tensor, begin, ready, trace.kernels)
        size = trace.tensor_bytes[tensor]
        packed = trace.period_bytes(compress)
        recompute_s = np.full(len(tensor), np.inf)
        recompute_until = np.full(len(tensor), -1, dtype=np.int64)
        if recompute and len(trace.tensor_recompute):
            producer = trace.tensor_recompute[tensor]
            recompute_until = np.minimum(trace.recomputable_until[tensor], end)
            possible = (producer >= 0) & (recompute_until > begin) & (end < trace.kernels)
            recompute_s[possible] = kernel_time_s[producer[possible]]
        return cls(
            tensor, begin, end, ready, version, rank, opened, lasting, size, packed,
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
