"""Which tensors could leave, and when: G10's vitality analysis (section 4.2) as columns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.core.columns import KINDS, PHASES, BoolArray, IntArray
from penstock.core.plan import Evict
from penstock.core.trace import Trace

_ACTIVATION, _INPUT = KINDS.index("activation"), KINDS.index("input")
_BACKWARD = PHASES.index("backward")


@dataclass(frozen=True, eq=False)
class Candidates:
    """The trace's inactive periods, P of them, in its order.

    tensor, begin, end   [P] as in `InactivePeriod`; ends beyond K are in the next iteration
    size_bytes           [P]
    feature_map          [P] an activation, or an input, of the forward pass that the backward pass uses
    """

    trace: Trace
    tensor: IntArray
    begin: IntArray
    end: IntArray
    size_bytes: IntArray

    def __len__(self) -> int:
        return len(self.tensor)

    @classmethod
    def of(cls, trace: Trace) -> Candidates:
        tensor, begin, end, _ = trace.periods
        return cls(trace, tensor, begin, end, trace.tensor_bytes[tensor])

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
            after=int(self.begin[index]) - 1,
            begin=int(self.begin[index]),
            end=end,
            prefetch_at=end,
            tier=tier,
        )


def boundary(trace: Trace) -> int:
    """The first kernel of the backward pass; K where there is none."""
    backward = np.flatnonzero(trace.kernel_phase == _BACKWARD)
    return int(backward[0]) if len(backward) else trace.kernels
