"""The search of `optimal`: what may be done with each inactive period, where it starts, its steps in C++."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock._native import PlanSearch
from penstock.core.columns import BoolArray, FloatArray, IntArray, Lists
from penstock.core.hardware import Hardware
from penstock.core.memory_profile import kept_unused
from penstock.core.plan import Evict, Recompute
from penstock.core.trace import Periods, Trace
from penstock.errors import InvalidArgument, SpillSpaceFull
from penstock.planners.g10 import g10
from penstock.planners.problem import Decision, Problem
from penstock.simulator import (
    ACTIONS,
    KEEP,
    MOVES,
    RECOMPUTE,
    action_of,
    coding_times_s,
    integers,
    machine_columns,
    trace_columns,
)

ActionArray = npt.NDArray[np.int8]


@dataclass(frozen=True, eq=False)
class Choices(Periods):
    """The trace's inactive periods, and what may be done in each: A actions, as in penstock.simulator.

    allowed    [P, A] what is possible; keeping always is
    cost_s     [P, A] seconds of link or of compute that each action takes; inf where not possible
    order      [P] the periods so that what makes a tensor comes before what it is made into
    parents    P lists: the tensors read when the period's is recomputed; empty where it cannot be
    """

    allowed: BoolArray
    cost_s: FloatArray
    order: IntArray
    parents: Lists


def choices(problem: Problem) -> Choices:
    """Everything that ``problem`` allows to be done with the periods of its trace."""
    trace = problem.trace
    periods = trace.periods
    tensor, end = periods.tensor, periods.end
    made_by = trace.tensor_recompute[tensor] if len(trace.tensor_recompute) else np.full(len(tensor), -1)
    makes = np.zeros(len(tensor), dtype=np.bool_)
    if problem.recompute:  # by the kernel that was the last to write the tensor
        makes = (made_by >= 0) & (made_by == periods.ready) & (end <= trace.recomputable_until[tensor])
        makes &= (end < trace.kernels) & ~trace.tensor_persistent[tensor]
    allowed, cost_s = _actions(problem, makes)
    return Choices(
        **vars(periods),
        allowed=allowed,
        cost_s=cost_s,
        order=np.lexsort((periods.begin, tensor, made_by)),
        parents=Lists.of(
            [
                np.unique(trace.inputs[int(trace.tensor_recompute[index])]).tolist() if make else []
                for index, make in zip(tensor.tolist(), makes.tolist(), strict=True)
            ]
        ),
    )


def _actions(problem: Problem, makes: BoolArray) -> tuple[BoolArray, FloatArray]:
    trace, hardware = problem.trace, problem.hardware
    tensor, size_bytes = trace.periods.tensor, trace.periods.size_bytes
    packed = trace.period_bytes(problem.compress)
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
            cost_s[smaller, action] = _round_trip_s(hardware, tier, packed[smaller]) + coding_s[smaller]
    if makes.any():
        kernel = trace.tensor_recompute[tensor[makes]]
        cost_s[makes, RECOMPUTE] = trace.kernel_time_s[kernel]
    cost_s[size_bytes == 0, 1:] = np.inf
    return np.isfinite(cost_s), cost_s


def _round_trip_s(hardware: Hardware, tier: str, size_bytes: IntArray) -> FloatArray:
    """[P] seconds there and back, when nothing else is transferred, and what the compute stream spends."""
    distinct, position = np.unique(size_bytes, return_inverse=True)
    both = [
        hardware.evict_s(tier, size) + hardware.prefetch_s(tier, size) + 2 * hardware.overhead_s(size)
        for size in distinct.tolist()
    ]
    result: FloatArray = np.array(both, dtype=np.float64)[position]
    return result


class FoundPlan(NamedTuple):
    """A plan that keeps to the budget and to every tier.

    action       [P] what happens in each period
    late         [P] bool: the copy starts only before the period, though it could earlier
    step_s       what the replay says
    columns      tensor, after, begin, end, prefetch_at, action of each eviction interval
    timed_out    the search stopped for want of time
    """

    action: ActionArray
    late: ActionArray
    step_s: float
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

    def decision(self, trace: Trace, lower_bound_s: float, reason: str) -> tuple[float, Decision]:
        """Its time, and what a policy answers with it."""
        evictions, recomputations = self.intervals(trace)
        return self.step_s, Decision(
            evictions=evictions, recomputations=recomputations, lower_bound_s=lower_bound_s, reason=reason
        )


def plan_search(problem: Problem, choices: Choices, bias: FloatArray | None = None) -> PlanSearch:
    """The means to try what can be done with a problem's periods.

    bias   [P, A] how much of each period each action has in the linear program

    Its ``repair(action, pruned)`` gives the nearest choice found that fits; None where none does. Pruned, it
    is without what would not be needed if copies took no time. Its ``improve`` gives the fields of the best
    FoundPlan near a choice that fits, after ``evaluations`` changes, or where it is as good as ``target_s``.
    A change may be worse at first by ``temperature``, a fraction of the iteration time.
    """
    return PlanSearch(*search_columns(problem, choices, bias))


def search_columns(
    problem: Problem, choices: Choices, bias: FloatArray | None = None
) -> tuple[dict[str, object], dict[str, object], dict[str, object]]:
    """What `PlanSearch` wants to know of the trace, the machine and the choices."""
    trace, hardware = problem.trace, problem.hardware
    kernels = {
        "time_s": np.ascontiguousarray(trace.kernel_time_s, dtype=np.float64),
        "workspace_bytes": integers(trace.kernel_workspace_bytes),
    }
    tiers = {"host_bytes": hardware.host_bytes, "disk_bytes": hardware.disk_bytes}
    shares = np.zeros_like(choices.cost_s) if bias is None else bias
    kept = kept_unused(problem.program or trace)
    table = {
        "tensor": choices.tensor,
        "begin": choices.begin,
        "end": choices.end,
        "ready": choices.ready,
        "size_bytes": integers(choices.size_bytes),
        "allowed": np.packbits(choices.allowed, axis=1, bitorder="little").reshape(-1),
        "cost_s": np.ascontiguousarray(choices.cost_s).reshape(-1),
        "bias": np.ascontiguousarray(shares, dtype=np.float64).reshape(-1),
        "order": integers(choices.order),
        "parent_starts": integers(choices.parents.starts),
        "parents": integers(choices.parents.values),
        "kept": integers(kept.tensor),
        "kept_begin": integers(kept.begin),
        "kept_end": integers(kept.end),
    }
    machine = machine_columns(trace, hardware, problem.budget_bytes) | tiers
    return trace_columns(trace) | kernels, machine, table


_SLIGHT = 0.03  # a fraction up to this is no reason to choose an action
_LOYALTY = 0.25  # of a tensor's size: what taking the same action as before counts for


def seeds(problem: Problem, choices: Choices, fractions: FloatArray | None) -> Iterator[ActionArray]:
    """[P] what could happen in each period, several times; none need fit.

    The linear program's fractions, rounded, where there are some; nothing at all, of which repair makes a
    greedy plan, and with recomputation a knapsack's; and G10's plan.
    """
    if fractions is not None:
        yield round_fractions(problem.trace, choices, fractions)
    yield np.zeros(len(choices), dtype=np.int8)
    with contextlib.suppress(SpillSpaceFull, InvalidArgument):  # where G10 finds no plan, others may
        yield actions_of(choices, g10(problem, as_artifact=True).evictions)


def actions_of(
    choices: Choices, evictions: Iterable[Evict], recomputations: Iterable[Recompute] = ()
) -> ActionArray:
    """[P] what happens in each period in a plan; nothing where a tensor is written and does not leave."""
    by_tensor: dict[int, list[int]] = {}
    for period, tensor in enumerate(choices.tensor.tolist()):
        by_tensor.setdefault(tensor, []).append(period)
    actions: ActionArray = np.full(len(choices), KEEP, dtype=np.int8)
    rows = [(e.tensor, e.begin, e.end, action_of(e)) for e in evictions if e.prefetch_at > e.begin]
    rows += [(r.tensor, r.begin, r.end, RECOMPUTE) for r in recomputations]
    for tensor, begin, end, action in rows:
        for period in by_tensor.get(tensor, []):
            inside = choices.begin[period] <= begin < end <= choices.end[period]
            if inside and choices.allowed[period, action]:
                actions[period] = action
    return actions


def everything_away(choices: Choices) -> ActionArray:
    """[P] for every period the cheapest action that moves the tensor."""
    moves = np.array(sorted(MOVES))
    cost_s = choices.cost_s[:, moves]
    possible = np.isfinite(cost_s).any(axis=1)
    return np.where(possible, moves[cost_s.argmin(axis=1)], KEEP).astype(np.int8)


def round_fractions(trace: Trace, choices: Choices, fractions: FloatArray) -> ActionArray:
    """[P] one action for each period, so that at any time each has about as many bytes as in ``fractions``.

    fractions   [P, A] of the linear program

    Periods are taken in the order in which they begin; what rounding adds or leaves out is carried on
    to the next. Persistent tensors, and periods that reach into the next iteration, carry their own.
    """
    actions: ActionArray = np.zeros(len(choices), dtype=np.int8)
    share = np.where(choices.allowed, fractions, 0.0).clip(0.0, 1.0)
    share[:, KEEP] = np.maximum(0.0, 1.0 - share[:, 1:].sum(axis=1))
    group = np.where(choices.end > trace.kernels, 2, np.where(trace.tensor_persistent[choices.tensor], 1, 0))
    before: dict[int, int] = {}
    for which in range(3):
        periods = np.flatnonzero(group == which)
        periods = periods[np.lexsort((-choices.size_bytes[periods], choices.begin[periods]))]
        owed = [0.0] * len(ACTIONS)
        for period in periods.tolist():
            size = float(choices.size_bytes[period])
            tensor = int(choices.tensor[period])
            parts = share[period].tolist()
            best, most = KEEP, -np.inf
            for action, part in enumerate(parts):
                owed[action] += part * size
                if part > _SLIGHT:
                    due = owed[action] + (_LOYALTY * size if before.get(tensor) == action else 0.0)
                    if due > most:
                        best, most = action, due
            owed[best] -= size
            actions[period] = best
            if best != KEEP:
                before[tensor] = best
    return actions
