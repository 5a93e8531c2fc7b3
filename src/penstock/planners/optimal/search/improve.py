"""The search for a better plan: a thin layer over the C++ that makes changes and replays them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock._native import PlanSearch
from penstock.core.columns import FloatArray, IntArray
from penstock.core.plan import Evict, Recompute
from penstock.core.trace import Trace
from penstock.planners.optimal.search.choices import ActionArray, Choices
from penstock.planners.problem import Problem
from penstock.simulator.actions import MOVES, RECOMPUTE
from penstock.simulator.replay import machine_columns, trace_columns


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A plan that keeps to the budget and to every tier.

    action       [P] what happens in each period
    late         [P] bool: the copy starts only before the period, though it could earlier
    iteration_s  what the replay says
    columns      tensor, after, begin, end, prefetch_at, action of each eviction interval
    timed_out    the search stopped for want of time
    """

    action: ActionArray
    late: ActionArray
    iteration_s: float
    columns: tuple[IntArray, ...]
    evaluations: int
    timed_out: bool

    def intervals(self, trace: Trace) -> tuple[tuple[Evict, ...], tuple[Recompute, ...]]:
        """The same as parts of a Plan, each in the order that a Plan asks for."""
        evictions, recomputations = [], []
        for tensor, after, begin, end, prefetch_at, action in zip(
            *(column.tolist() for column in self.columns), strict=True
        ):
            if action == RECOMPUTE:
                recomputations.append(Recompute(tensor, begin, end))
            else:
                tier, codec = MOVES[action]
                codec = codec if codec == "raw" else trace.codec(tensor)
                evictions.append(Evict(tensor, after, begin, end, prefetch_at, tier, codec))
        evictions.sort(key=lambda evict: evict.after)
        return tuple(evictions), tuple(recomputations)


class Improver:
    """What can be done with a problem's periods, and the means to try it. One thread works at a time."""

    def __init__(self, problem: Problem, choices: Choices, bias: FloatArray | None = None) -> None:
        """bias: [P, A] how much of each period each action has in the linear program."""
        self._search = PlanSearch(*search_columns(problem, choices, bias))

    def repaired(self, action: ActionArray, *, pruned: bool = True) -> ActionArray | None:
        """The nearest choice found that fits; None where none was.

        pruned   without what would not be needed if copies took no time
        """
        return self._search.repair(action, pruned)

    def improved(
        self,
        action: ActionArray,
        late: ActionArray,
        *,
        evaluations: int,
        seconds: float,
        target_s: float,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Candidate:
        """The best found near a choice that fits, with all its prefetches placed.

        late          [P] as in Candidate
        evaluations   how many changes are tried, of all that time allows
        target_s      an iteration time that is good enough
        temperature   how much worse a change may be at first, as a fraction of the iteration time
        """
        found = self._search.improve(action, late, evaluations, seconds, target_s, temperature, seed)
        return Candidate(*found)


def search_columns(
    problem: Problem, choices: Choices, bias: FloatArray | None = None
) -> tuple[dict[str, object], dict[str, object], dict[str, object]]:
    """What `PlanSearch` wants to know of the trace, the machine and the choices."""
    trace, hardware = problem.trace, problem.hardware
    kernels = {
        "time_s": np.ascontiguousarray(trace.kernel_time_s, dtype=np.float64),
        "workspace_bytes": _integers(trace.kernel_workspace_bytes),
    }
    tiers = {"host_bytes": hardware.host_bytes, "disk_bytes": hardware.disk_bytes}
    shares = np.zeros_like(choices.cost_s) if bias is None else bias
    table = {
        "tensor": choices.tensor,
        "begin": choices.begin,
        "end": choices.end,
        "ready": choices.ready,
        "size_bytes": _integers(choices.size_bytes),
        "allowed": np.packbits(choices.allowed, axis=1, bitorder="little").reshape(-1),
        "cost_s": np.ascontiguousarray(choices.cost_s).reshape(-1),
        "bias": np.ascontiguousarray(shares, dtype=np.float64).reshape(-1),
        "order": _integers(choices.order),
        "parent_starts": _integers(choices.parents.starts),
        "parents": _integers(choices.parents.values),
    }
    machine = machine_columns(trace, hardware, problem.budget_bytes) | tiers
    return trace_columns(trace) | kernels, machine, table


def _integers(values: IntArray) -> IntArray:
    return np.ascontiguousarray(values, dtype=np.int64)
