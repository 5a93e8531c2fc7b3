"""moDNN's Algorithm 1 (section 5.2): one pass over the kernels in a managed space of the budget's size.

An allocation that fails makes the contiguous blocks leave whose copies delay the kernel least; where
there are none, memory is defragmented. Copies come back when waiting for another kernel
would make them late (inequality 9). A kernel runs with the algorithm of the largest gain (equation 10).

Where penstock differs from the paper:

- Copies go to the host while it has room, then to the disk, on the links that there are, both directions
  at once. moDNN has the host alone and one stream for both.
- Weights stay, as in the paper, unless a kernel does not fit otherwise.
- A defragmentation sends away only as much as is missing, what is needed last first; the paper's sends
  everything. What stays moves together: the plan's addresses, one for each tensor, are assigned at the
  end for all of its length.
- A prefetch that a defragmentation would undo is put off instead, and none sends away what is needed
  sooner than what it brings.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from penstock.core.memory_profile import kernels_as_run, minimum_bytes
from penstock.core.plan import Plan
from penstock.errors import SpillSpaceFull
from penstock.planners.modnn.forward import Pass
from penstock.planners.placement import place
from penstock.planners.problem import Decision, Problem
from penstock.planners.variants import algorithms
from penstock.units import format_bytes_up

PASSES = 2
WORTH_ANOTHER = 0.03  # of the budget: what addresses may exceed it by for another pass
MARGIN = 0.002  # of the budget: how much smaller the space gets at least, from pass to pass


def modnn(problem: Problem) -> Decision:
    """Algorithm 1, and an address for every tensor where the budget has room for that.

    Where the addresses need a little more than the budget, the pass is recomputed in a smaller space.
    Where they need much more, or that does not help, as at the smallest budget of all, the plan has none,
    and the reason says so.
    """
    trace, budget = problem.trace, problem.budget_bytes
    started = time.perf_counter()
    kept = _keep(problem)
    if kept is not None:
        return kept
    first: Decision | None = None
    space = budget
    for _ in range(PASSES):
        try:
            decision = Pass(replace(problem, budget_bytes=space)).run()
        except SpillSpaceFull:
            if first is None:
                raise
            break
        placed = place(trace, _draft(problem, decision), enough_bytes=budget)
        if placed.extent_bytes <= budget:
            return replace(decision, offsets=placed.offsets)
        first = first or replace(decision, reason=_without_addresses(placed.extent_bytes))
        excess = placed.extent_bytes - budget
        space -= math.ceil(1.5 * excess + MARGIN * budget)
        late = time.perf_counter() - started > problem.time_limit_s
        if late or excess > WORTH_ANOTHER * budget or space < minimum_bytes(trace):
            break
    assert first is not None
    return first


def _keep(problem: Problem) -> Decision | None:
    """Everything stays, with the fastest algorithms, where there are addresses for that."""
    trace, budget = problem.trace, problem.budget_bytes
    fastest = tuple(algorithms(trace, kernel)[0].variant for kernel in range(trace.kernels))
    decision = Decision(variants=fastest if any(variant >= 0 for variant in fastest) else ())
    _, workspaces = kernels_as_run(trace, decision.variants)
    if int((trace.live_bytes - trace.kernel_workspace_bytes + workspaces).max(initial=0)) > budget:
        return None
    placement = place(trace, _draft(problem, decision), enough_bytes=budget)
    return replace(decision, offsets=placement.offsets) if placement.extent_bytes <= budget else None


def _without_addresses(extent_bytes: int) -> str:
    return (
        "the plan keeps to the budget, but gives no addresses: with one for all of a tensor's life it would "
        f"take {format_bytes_up(extent_bytes)} of address space. Plan for a budget of that size or more to "
        "have them"
    )


def _draft(problem: Problem, decision: Decision) -> Plan:
    return Plan(
        policy="modnn",
        device_budget_bytes=problem.budget_bytes,
        evictions=decision.evictions,
        variants=decision.variants,
    )
