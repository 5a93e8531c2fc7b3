"""What an optimal plan would do, were tensors divisible: a lower bound, and a guide for rounding."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from penstock.core.columns import FloatArray, IntArray
from penstock.core.memory_profile import least_workspace_bytes
from penstock.core.trace import Trace
from penstock.planners.optimal.lp.candidates import EvictionCandidates
from penstock.planners.optimal.lp.model import LPModel, formulate
from penstock.planners.optimal.lp.slots import Slots, cut
from penstock.planners.optimal.lp.solver import Solution, proven, solve
from penstock.planners.problem import Problem
from penstock.simulator.actions import ACTIONS, KEEP


@dataclass(frozen=True, slots=True, eq=False)
class FractionalPlan:
    """What the linear program answers. P inactive periods in the trace's order, K kernels, S slots.

    bound_s               no plan is faster, repeated without end: proven, however well it was solved
    fractions             [P, 6] how much of each period has which action: the columns are those of
                          penstock.simulator.actions.ACTIONS
    slots                 how the kernels were grouped
    slot_s                [S] how long each slot takes, waiting included
    memory_s_per_byte     [S] what one more byte of budget at the slot's end would save
    link_s_per_byte       by link, [S] what one more byte carried in the slot would save; a link that
                          nothing uses is not there
    status                "optimal"; "time limit", "infeasible" (not even parts of tensors find room on
                          the tiers) or "unknown": then only `bound_s` means something
    seconds               spent on building and solving
    """

    bound_s: float
    fractions: FloatArray
    slots: Slots
    slot_s: FloatArray
    memory_s_per_byte: FloatArray
    link_s_per_byte: dict[str, FloatArray]
    status: str
    seconds: float


def fractional_plan(
    problem: Problem, slots: int = 200, time_limit_s: float | None = None, alone: tuple[int, ...] = ()
) -> FractionalPlan:
    """Solve the problem with tensors as water, in about ``slots`` slots of time.

    ``alone``: kernels that get a slot of their own. Raises InvalidArgument where the solver is not
    installed.
    """
    began = time.perf_counter()
    limit_s = problem.time_limit_s if time_limit_s is None else time_limit_s
    trace, budget = problem.trace, problem.budget_bytes
    fastest_s, live_bytes = fastest(trace)
    candidates = EvictionCandidates.of(
        trace, fastest_s, compress=problem.compress, recompute=problem.recompute
    )
    grid = cut(trace, candidates, fastest_s, slots, alone)
    if int(live_bytes.max(initial=0)) <= budget:
        return _kept(candidates, grid, fastest_s, began)
    model = formulate(candidates, grid, problem.hardware, fastest_s, live_bytes, budget)
    solution = solve(model.program, limit_s - (time.perf_counter() - began))
    return _read(model, solution, candidates, grid, float(fastest_s.sum()), began)


def fastest(trace: Trace) -> tuple[FloatArray, IntArray]:
    """[K] each kernel's least time, and [K] live bytes with each kernel's least workspace."""
    time_s = trace.kernel_time_s.copy()
    for kernel, variants in enumerate(trace.kernel_variants):
        time_s[kernel] = min([time_s[kernel], *(variant.time_s for variant in variants)])
    return time_s, trace.live_bytes - trace.kernel_workspace_bytes + least_workspace_bytes(trace)


def _kept(candidates: EvictionCandidates, grid: Slots, fastest_s: FloatArray, began: float) -> FractionalPlan:
    """Everything fits."""
    fractions = np.zeros((len(candidates), len(ACTIONS)))
    fractions[:, KEEP] = 1.0
    return FractionalPlan(
        bound_s=float(fastest_s.sum()),
        fractions=fractions,
        slots=grid,
        slot_s=np.asarray(
            np.bincount(grid.of_kernel, weights=fastest_s, minlength=len(grid)), dtype=np.float64
        ),
        memory_s_per_byte=np.zeros(len(grid)),
        link_s_per_byte={},
        status="optimal",
        seconds=time.perf_counter() - began,
    )


def _read(
    model: LPModel,
    solution: Solution,
    candidates: EvictionCandidates,
    grid: Slots,
    ideal_s: float,
    began: float,
) -> FractionalPlan:
    fractions = np.zeros((len(candidates), len(ACTIONS)))
    for choice in model.choices:
        size = candidates.size_bytes[choice.periods] / model.unit_bytes
        fractions[choice.periods, choice.action] = np.clip(solution.value[choice.columns] / size, 0.0, 1.0)
    fractions /= np.maximum(fractions.sum(axis=1, keepdims=True), 1.0)
    fractions[:, KEEP] = np.maximum(0.0, 1.0 - fractions.sum(axis=1))
    price = model.unit_s / model.unit_bytes
    memory = np.zeros(len(grid))
    tight = model.memory_rows >= 0
    memory[tight] = solution.dual[model.memory_rows[tight]] * price
    return FractionalPlan(
        bound_s=max(ideal_s, proven(model.program, solution.dual) * model.unit_s),
        fractions=fractions,
        slots=grid,
        slot_s=solution.value[model.slot_columns] * model.unit_s,
        memory_s_per_byte=memory,
        link_s_per_byte={link: solution.dual[rows] * price for link, rows in model.link_rows.items()},
        status=solution.status,
        seconds=time.perf_counter() - began,
    )
