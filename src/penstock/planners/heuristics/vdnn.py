"""vDNN (Rhu et al., MICRO 2016): offload feature maps in the forward pass, prefetch one ahead.

`vdnn_all` offloads every feature map that the backward pass needs, `vdnn_conv` those that convolutions
read. Each goes to the host, or to the disk where the host has no room, and comes back while the
kernel works that needs the one before. Unlike vDNN, kernels wait for nothing but the tensors
and the memory that they need, and tensors of other kinds leave too where the budget asks for it.
"""

from __future__ import annotations

import numpy as np

from penstock.core.columns import BoolArray
from penstock.core.trace import Trace
from penstock.planners.heuristics.prefetch import advance
from penstock.planners.heuristics.room import Room, evict_further
from penstock.planners.heuristics.vitality import Candidates, boundary
from penstock.planners.problem import Decision, Problem

TIERS = ("host", "disk")


def vdnn_all(problem: Problem) -> Decision:
    """Offload every feature map."""
    options = Candidates.of(problem.trace)
    return _offload(problem, options, options.feature_map)


def vdnn_conv(problem: Problem) -> Decision:
    """Offload the feature maps that convolutions read."""
    options = Candidates.of(problem.trace)
    read = np.zeros(problem.trace.tensors, dtype=np.bool_)
    for kernel in convolutions(problem.trace):
        read[problem.trace.inputs[kernel]] = True
    return _offload(problem, options, options.feature_map & read[options.tensor])


def convolutions(trace: Trace) -> list[int]:
    """The kernels of the forward pass that are convolutions, by their names."""
    return [kernel for kernel in range(boundary(trace)) if "conv" in trace.kernel_name[kernel].lower()]


def _offload(problem: Problem, options: Candidates, wanted: BoolArray) -> Decision:
    trace, hardware, budget_bytes = problem.trace, problem.hardware, problem.budget_bytes
    if trace.peak_bytes <= budget_bytes:
        return Decision(reason="everything fits: nothing is offloaded")
    room = Room(trace, hardware)
    taken = np.zeros(len(options), dtype=np.bool_)
    chosen = []
    for index in np.flatnonzero(wanted).tolist():
        tier = room.first(TIERS, options.evict(index, ""))
        if tier is not None:
            evict = options.evict(index, tier)
            room.take(tier, evict)
            taken[index] = True
            chosen.append(evict)
    further = evict_further(options, taken, chosen, room, budget_bytes, hardware, TIERS)
    chosen.sort(key=lambda evict: (evict.end, evict.begin, evict.tensor))
    needed = sorted({evict.end for evict in chosen})
    # The first comes back when the backward pass begins.
    ahead = dict(zip(needed, [boundary(trace), *needed], strict=False))
    latest = [ahead[evict.end] for evict in chosen] + [evict.end for evict in further]
    evictions = advance(trace, chosen + further, latest, budget_bytes)
    if not further:
        return Decision(evictions=evictions)
    return Decision(
        evictions=evictions,
        reason=f"feature maps were not enough: {len(further)} further evictions keep the budget",
    )
