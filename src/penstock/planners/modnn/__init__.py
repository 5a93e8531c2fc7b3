"""moDNN's Algorithm 1 (section 5.2): one pass over the kernels in a managed space of the budget's size.

An allocation that fails makes the contiguous blocks leave whose copies delay the kernel least; where
there are none, memory is defragmented. Copies come back when waiting for another kernel
would make them late (inequality 9). A kernel runs with the algorithm of the largest gain (equation 10).

Where penstock differs from the paper:

- Copies go to the host while it has room, then to the disk, on the links that there are, both directions
  at once. moDNN has the host alone and one stream for both.
- Weights stay, as in the paper, unless a kernel does not fit otherwise.
- A defragmentation sends away only as much as is missing, what is needed last first; the paper's sends
  everything. What stays moves together. The plan has no addresses: a run's allocator decides them.
- A prefetch that a defragmentation would undo is put off instead, and none sends away what is needed
  sooner than what it brings.
"""

from __future__ import annotations

from penstock.core.memory_profile import kernels_as_run
from penstock.planners.modnn.forward import Pass
from penstock.planners.problem import Decision, Problem
from penstock.planners.variants import algorithms


def modnn(problem: Problem) -> Decision:
    """Algorithm 1; nothing leaves where everything fits with the fastest algorithms.

    Raises SpillSpaceFull where what has to leave has nowhere to go.
    """
    trace = problem.trace
    fastest = tuple(algorithms(trace, kernel)[0].variant for kernel in range(trace.kernels))
    variants = fastest if any(variant >= 0 for variant in fastest) else ()
    _, workspaces = kernels_as_run(trace, variants)
    used_bytes = trace.live_bytes - trace.kernel_workspace_bytes + workspaces
    if int(used_bytes.max(initial=0)) <= problem.budget_bytes:
        return Decision(variants=variants)
    return Pass(problem).run()
