"""Which tensors could leave, and when: G10's vitality analysis (section 4.2) as columns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.core.plan import Evict
from penstock.core.trace import KINDS, PHASES, BoolArray, IntArray, Trace

_ACTIVATION, _INPUT = KINDS.index("activation"), KINDS.index("input")
_BACKWARD = PHASES.index("backward")


@dataclass(frozen=True, eq=False)
class Candidates:
    """The trace's inactive periods, P of them, in its order.

    tensor, begin, end   [P] as in `InactivePeriod`; ends beyond K are in the next iteration
    ready                [P] kernel after which the copy out may start at the earliest: the last that
                         writes the tensor
    idle                 [P] kernel after which the tensor is idle: the last that uses it, but no earlier
                         than `ready`
    size_bytes           [P]
    feature_map          [P] an activation, or an input, of the forward pass that the backward pass uses
    """

    trace: Trace
    tensor: IntArray
    begin: IntArray
    end: IntArray
    ready: IntArray
    idle: IntArray
    size_bytes: IntArray

    def __len__(self) -> int:
        return len(self.tensor)

    @classmethod
    def of(cls, trace: Trace) -> Candidates:
        table = np.array(trace.inactive_periods, dtype=np.int64).reshape(-1, 4)
        tensor, begin, end, ready = table.T
        ready = np.maximum(ready, _latest_before(trace.writers.starts, trace.writers.values, tensor, begin))
        idle = np.maximum(ready, _latest_before(trace.uses.starts, trace.uses.values, tensor, begin))
        return cls(trace, tensor, begin, end, ready, idle, trace.tensor_bytes[tensor])

    @cached_property
    def feature_map(self) -> BoolArray:
        first_backward = boundary(self.trace)
        kind = self.trace.tensor_kind[self.tensor]
        crosses = (self.begin <= first_backward) & (self.end >= first_backward)
        carried = ~self.trace.tensor_persistent[self.tensor] & (self.end < self.trace.kernels)
        named = np.isin(kind, [_ACTIVATION, _INPUT])
        return np.asarray(crosses & carried & named)

    def evict(self, index: int, tier: str) -> Evict:
        """The eviction of one period: copied once idle, away to the period's end, back on demand."""
        end = int(self.end[index])
        return Evict(
            tensor=int(self.tensor[index]),
            after=int(self.idle[index]),
            begin=int(self.begin[index]),
            end=end,
            prefetch_at=end,
            tier=tier,
        )


def boundary(trace: Trace) -> int:
    """The first kernel of the backward pass; K where there is none."""
    backward = np.flatnonzero(trace.kernel_phase == _BACKWARD)
    return int(backward[0]) if len(backward) else trace.kernels


def _latest_before(starts: IntArray, values: IntArray, tensor: IntArray, kernel: IntArray) -> IntArray:
    """[P] the last entry below ``kernel`` in the list of ``tensor``, which ascends; -1 where none is."""
    lists = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    scale = int(max(values.max(initial=0), kernel.max(initial=0))) + 1
    place = np.searchsorted(lists * scale + values, tensor * scale + kernel) - 1
    inside = place >= starts[tensor]
    found: IntArray = np.where(inside, values[np.maximum(place, 0)] if len(values) else -1, -1)
    return found
