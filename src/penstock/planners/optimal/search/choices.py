"""What may be done with each inactive period, as columns: the search space of `optimal`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.core.columns import BoolArray, FloatArray, IntArray, Lists
from penstock.core.hardware import Hardware
from penstock.planners.problem import Problem
from penstock.simulator.actions import ACTIONS, KEEP, MOVES, RECOMPUTE
from penstock.simulator.replay import coding_times_s

ActionArray = npt.NDArray[np.int8]


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """P inactive periods, in the order of ``trace.periods``, and A actions: penstock.simulator.actions.

    tensor, begin, end  [P] the period; end > K where it reaches into the next iteration
    ready      [P] last kernel that writes the tensor before the period, -1 for none
    size_bytes [P] of the tensor
    allowed    [P, A] what is possible; keeping always is
    cost_s     [P, A] seconds of link or of compute that each action takes; inf where not possible
    order      [P] the periods so that what makes a tensor comes before what it is made into
    parents    P lists: the tensors read when the period's is recomputed; empty where it cannot be
    """

    tensor: IntArray
    begin: IntArray
    end: IntArray
    ready: IntArray
    size_bytes: IntArray
    allowed: BoolArray
    cost_s: FloatArray
    order: IntArray
    parents: Lists

    def __len__(self) -> int:
        return len(self.tensor)


def choices(problem: Problem) -> Choices:
    """Everything that ``problem`` allows to be done with the periods of its trace."""
    trace = problem.trace
    tensor, begin, end, ready = trace.periods
    size_bytes = trace.tensor_bytes[tensor]
    made_by = trace.tensor_recompute[tensor] if len(trace.tensor_recompute) else np.full(len(tensor), -1)
    makes = np.zeros(len(tensor), dtype=np.bool_)
    if problem.recompute:  # by the kernel that was the last to write the tensor
        makes = (made_by >= 0) & (made_by == ready) & (end <= trace.recomputable_until[tensor])
        makes &= (end < trace.kernels) & ~trace.tensor_persistent[tensor]
    allowed, cost_s = _actions(problem, tensor, size_bytes, trace.period_bytes(problem.compress), makes)
    return Choices(
        tensor=tensor,
        begin=begin,
        end=end,
        ready=ready,
        size_bytes=size_bytes,
        allowed=allowed,
        cost_s=cost_s,
        order=np.lexsort((begin, tensor, made_by)),
        parents=Lists.of(
            [
                np.unique(trace.inputs[int(trace.tensor_recompute[index])]).tolist() if make else []
                for index, make in zip(tensor.tolist(), makes.tolist(), strict=True)
            ]
        ),
    )


def _actions(
    problem: Problem, tensor: IntArray, size_bytes: IntArray, packed: IntArray, makes: BoolArray
) -> tuple[BoolArray, FloatArray]:
    trace, hardware = problem.trace, problem.hardware
    cost_s = np.full((len(tensor), len(ACTIONS)), np.inf)
    cost_s[:, KEEP] = 0.0
    compress_s, expand_s = coding_times_s(trace, hardware)
    coding_s = compress_s[tensor] + expand_s[tensor]
    for action, (tier, codec) in MOVES.items():
        if hardware.capacity_bytes(tier) <= 0:
            continue
        if codec == "raw":
            cost_s[:, action] = _round_trip_s(hardware, tier, size_bytes)
        else:
            smaller = packed < size_bytes
            both_s = _round_trip_s(hardware, tier, packed[smaller]) + coding_s[smaller]
            cost_s[smaller, action] = both_s
    if makes.any():
        kernel = trace.tensor_recompute[tensor[makes]]
        cost_s[makes, RECOMPUTE] = trace.kernel_time_s[kernel]
    cost_s[size_bytes == 0, 1:] = np.inf
    return np.isfinite(cost_s), cost_s


def _round_trip_s(hardware: Hardware, tier: str, size_bytes: IntArray) -> FloatArray:
    """[P] seconds there and back, when nothing else is transferred, and what the compute stream spends."""
    distinct, position = np.unique(size_bytes, return_inverse=True)
    both = [
        hardware.evict_s(tier, size) + hardware.prefetch_s(tier, size) + 2 * hardware.copy_overhead_s
        for size in distinct.tolist()
    ]
    result: FloatArray = np.array(both, dtype=np.float64)[position]
    return result
