"""The default: everything decided together, near a linear program, and checked by the simulator.

A linear program over time slots says how much of each inactive period should have which action, and proves
a bound (`penstock.planners.optimal.lp`). Its fractions are rounded, what then does not fit is
repaired, and a local search improves the plan with the simulator as the objective. G10's plan and a greedy
one are seeds, too: without a solver they are all there is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from itertools import count

import numpy as np

from penstock.core.columns import FloatArray
from penstock.core.log import log_once
from penstock.core.memory_profile import minimum_bytes, tightest_kernel
from penstock.core.plan import Plan
from penstock.core.trace import Trace
from penstock.errors import SpillSpaceFull, installing
from penstock.planners.optimal.lp import FractionalPlan, dive, fractional_plan
from penstock.planners.optimal.search import (
    ActionArray,
    Choices,
    FoundPlan,
    actions_of,
    choices,
    everything_away,
    plan_search,
    round_fractions,
    seeds,
)
from penstock.planners.problem import (
    Decision,
    Problem,
    spill_full,
    with_fastest,
    with_least_workspace,
)
from penstock.planners.rules import FreeBytes
from penstock.simulator import simulate
from penstock.units import format_bytes, format_seconds

GOOD_ENOUGH = 1.0005  # of the bound
NEAR = 1.01  # of the bound: a first plan that is no nearer is worth solving the linear program again
TEMPERATURES = (5e-5, 0.0)  # of the searches side by side, where the start is FAR from the bound or farther
FAR = 0.05
ROUNDS = 5  # at least, of the time limit; after each, all go on from the best
LITTLE_GAIN = 2e-4  # rounds that gain less
LAST_ROUNDS = (2, 6)  # so many of them in a row are the last: where the best is NEAR the bound, and elsewhere
WARMER = 3.0  # each time
_SOLVING = 0.6  # of the time limit, at most, for the linear program
_PROVING = 0.3  # of the time limit, for a bound over all kernel variants
_SEEDING = 0.3  # of what is left then
SMALLEST_LARGE = 1 << 20  # bytes; a copy of so many takes longer than starting it
WORK = 60_000_000  # changes to try, times kernels and periods
MOST_CHANGES = 20_000  # per search
_FEW_COPIES = 0.05  # of the time limit, for plans that move large tensors alone
_RESERVE_S = 0.2  # for what comes after the search


def optimal(problem: Problem) -> Decision:
    """The fastest plan found within the time limit, legal in any case, and the bound that was proven.

    The same input gives the same plan unless the time limit is reached.

    Raises SpillSpaceFull where what has to leave the device has nowhere to go.
    """
    deadline_s = time.perf_counter() + problem.time_limit_s
    bound_s = 0.0
    if problem.trace.kernel_variants:
        bound_s = _relaxed(replace(problem, time_limit_s=_PROVING * problem.time_limit_s))[0].bound_s
    tried = [with_fastest(problem.trace, problem.budget_bytes)]
    least = with_least_workspace(problem.trace, problem.budget_bytes)
    if least[0] != tried[0][0]:
        tried.append(least)
    found: list[tuple[Problem, float, Decision]] = []
    for index, (variants, trace) in enumerate(tried):
        left_s = max(deadline_s - time.perf_counter(), 0.0) / (len(tried) - index)
        program = _with_kernels_of(trace, problem.program or trace)
        chosen = replace(problem, trace=trace, program=program, time_limit_s=left_s)
        step_s, decision = _plan(chosen)
        found.append((chosen, step_s, replace(decision, variants=variants)))
    best = _prefer_host(*min(found, key=lambda one: one[1]))
    if problem.trace.kernel_variants:  # what was proven for one choice of them is nothing for the others
        best = replace(best, lower_bound_s=bound_s)
    return best


def _prefer_host(problem: Problem, step_s: float, decision: Decision) -> Decision:
    """What goes to the disk goes to the host instead where that has room and the step takes no longer.

    The largest first. Equal times are not equal: a disk wears out, and is the less predictable of the two.
    """
    room = FreeBytes(problem)
    if "host" not in room.free:
        return decision
    evictions = list(decision.evictions)
    for evict in evictions:
        if evict.tier == "host":
            room.take("host", evict)
    on_disk = [index for index, evict in enumerate(evictions) if evict.tier == "disk"]
    on_disk.sort(key=lambda index: -problem.trace.tensor_bytes[evictions[index].tensor])
    moved = [(index, other) for index in on_disk if (other := room.place(("host",), evictions[index]))]
    while moved:
        changed = list(evictions)
        for index, other in moved:
            changed[index] = other
        after = replace(decision, evictions=tuple(changed))
        if _as_run(problem, after) <= step_s:
            return after
        moved = moved[: len(moved) // 2]
    return decision


def _with_kernels_of(trace: Trace, program: Trace) -> Trace:
    """What the program does, with the kernels that were chosen for the trace."""
    return replace(
        program,
        kernel_time_s=trace.kernel_time_s,
        kernel_workspace_bytes=trace.kernel_workspace_bytes,
        kernel_variants=trace.kernel_variants,
    )


def _as_run(problem: Problem, decision: Decision) -> float:
    """The time of a step, with what a run does beside the plan."""
    plan = Plan(
        policy="optimal",
        device_budget_bytes=problem.budget_bytes,
        evictions=decision.evictions,
        recomputations=decision.recomputations,
    )
    return simulate(problem.program or problem.trace, plan, problem.hardware).step_s


def _plan(problem: Problem) -> tuple[float, Decision]:
    """The time of the best plan for a trace without variants, and the plan."""
    begun_s = time.perf_counter()
    trace = problem.trace
    if (
        trace.peak_bytes <= problem.budget_bytes
        and _as_run(problem, Decision()) <= trace.ideal_s * GOOD_ENOUGH
    ):
        return trace.ideal_s, Decision(lower_bound_s=trace.ideal_s)

    def left_s() -> float:
        return max(problem.time_limit_s - (time.perf_counter() - begun_s), 0.0)

    few, is_best = _few_copies(problem)
    if few is not None and is_best:
        reason = "nothing can be faster, and moving the largest tensors alone is enough"
        return few.decision(trace, trace.fastest_s, reason)
    options = choices(problem)
    relaxed, note = _relaxed(problem)
    bound_s = relaxed.bound_s
    starts = _starts(problem, options, relaxed, _SEEDING * left_s(), few)
    best = _search(problem, options, relaxed.fractions, starts, bound_s, max(left_s() - _RESERVE_S, 0.0))
    if best.evaluations:
        reason = f"the best of {best.evaluations} changes tried"
    elif best.step_s <= bound_s * (1 + 1e-9):
        reason = "the first plan already reaches the bound"
    else:
        reason = "the first plan, unchanged"
    if best.timed_out:
        reason += f": planning stopped after {format_seconds(problem.time_limit_s)}"
    return best.decision(trace, bound_s, f"{reason}; {note}" if note else reason)


def _few_copies(problem: Problem) -> tuple[FoundPlan | None, bool]:
    """The fastest plan that moves large tensors alone, and whether nothing can be faster.

    Where the machine's cost of a copy is not known, only one that is as fast as any can be counts.
    """
    begun_s = time.perf_counter()
    trace = problem.trace
    best: FoundPlan | None = None
    largest = int(trace.tensor_bytes.max(initial=0))
    for power in range(largest.bit_length() - 1, SMALLEST_LARGE.bit_length() - 2, -1):
        movable = trace.movable & (trace.tensor_bytes >= 1 << power)
        restricted = replace(problem, trace=replace(trace, tensor_movable=movable))
        if minimum_bytes(restricted.trace) > problem.budget_bytes:
            continue
        try:
            start = _starts(restricted, choices(restricted), FractionalPlan(trace.fastest_s), 0.0)[0]
        except SpillSpaceFull:
            continue
        if start.step_s <= trace.fastest_s * GOOD_ENOUGH:
            return start, True
        if best is None or start.step_s < best.step_s:
            best = start
        if time.perf_counter() - begun_s > _FEW_COPIES * problem.time_limit_s:
            break
    return best if problem.hardware.copy_overhead_s > 0 else None, False


def _relaxed(problem: Problem) -> tuple[FractionalPlan, str]:
    """What the linear program says, and why nothing where there is none."""
    nothing = FractionalPlan(problem.trace.fastest_s)
    if problem.time_limit_s <= 0:
        return nothing, "there was no time for a linear program"
    if find_spec("highspy") is None:
        note = f"without a solver nothing was proven: {installing('plan')}"
        log_once(f"the plan is searched for without a linear program: {note}")
        return nothing, note
    return fractional_plan(replace(problem, time_limit_s=_SOLVING * problem.time_limit_s)), ""


def _starts(
    problem: Problem,
    options: Choices,
    relaxed: FractionalPlan,
    seconds: float,
    given: FoundPlan | None = None,
) -> list[FoundPlan]:
    """The seeds as plans that fit, and the given one, the fastest first."""
    begun_s = time.perf_counter()
    trace, fractions = problem.trace, relaxed.fractions
    search = plan_search(problem, options, fractions)

    def fitted(action: ActionArray) -> None:
        tried = []
        for pruned in (True, False):
            repaired = search.repair(action, pruned)
            if repaired is not None:
                late = np.zeros_like(repaired)
                placed = search.improve(
                    repaired, late, evaluations=0, seconds=math.inf, target_s=0.0, temperature=0.0, seed=0
                )
                tried.append(FoundPlan(*placed))
        best = min(tried, key=lambda start: start.step_s, default=None)
        if best is not None and math.isfinite(best.step_s):
            found.append(best)

    found: list[FoundPlan] = []
    if given is not None:
        evictions, recomputations = given.intervals(trace)
        fitted(actions_of(options, evictions, recomputations))
    for action in seeds(problem, options, fractions):
        fitted(action)
        if found and time.perf_counter() - begun_s >= seconds:
            break
    left_s = seconds - (time.perf_counter() - begun_s)
    fastest_s = min((start.step_s for start in found), default=math.inf)
    if relaxed.model is not None and relaxed.status == "optimal" and fastest_s > relaxed.bound_s * NEAR:
        fitted(round_fractions(trace, options, dive(relaxed.model, left_s)))
    if not found:
        fitted(everything_away(options))
    if not found:
        kernel, budget = trace.kernel_name[tightest_kernel(trace)], format_bytes(problem.budget_bytes)
        why = f"no plan was found that keeps within {budget}, where kernel `{kernel}` needs the most"
        raise spill_full(problem.hardware, why)
    return sorted(found, key=lambda start: start.step_s)


def _search(
    problem: Problem,
    options: Choices,
    fractions: FloatArray | None,
    starts: Sequence[FoundPlan],
    bound_s: float,
    seconds: float,
) -> FoundPlan:
    """The best plan that several searches find that now and then go on from the best of all."""
    begun_s = time.perf_counter()
    trace = problem.trace
    target_s = bound_s * GOOD_ENOUGH
    changes = min(MOST_CHANGES, WORK // max(trace.kernels + len(options), 1)) // ROUNDS
    best = starts[0]
    means = [plan_search(problem, options, fractions) for _ in range(len(TEMPERATURES))]
    froms = [starts[min(index, len(starts) - 1)] for index in range(len(TEMPERATURES))]
    tried, without_gain, timed_out = 0, 0, seconds <= 0
    with ThreadPoolExecutor(len(TEMPERATURES)) as pool:
        for turn in count():
            left_s = seconds - (time.perf_counter() - begun_s)
            if left_s <= 0 or best.step_s <= target_s:
                break
            far = min((best.step_s / max(bound_s, 1e-12) - 1) / FAR, 1.0)
            searches = [
                pool.submit(
                    search.improve,
                    start.action,
                    start.late,
                    evaluations=changes,
                    seconds=left_s / max(ROUNDS - turn, 1),
                    target_s=target_s,
                    temperature=TEMPERATURES[index] * far * WARMER**without_gain,
                    seed=turn * len(TEMPERATURES) + index,
                )
                for index, (search, start) in enumerate(zip(means, froms, strict=True))
            ]
            results = [FoundPlan(*each.result()) for each in searches]
            before_s = best.step_s
            best = min([best, *results], key=lambda candidate: candidate.step_s)
            tried += sum(result.evaluations for result in results)
            short = any(result.timed_out for result in results)
            timed_out = timed_out or short
            without_gain = without_gain + 1 if best.step_s > before_s * (1 - LITTLE_GAIN) else 0
            # Where nothing is gained, one of them goes on from another start, by itself.
            alone = starts[1 % len(starts)] if without_gain == 1 else results[-1]
            froms = [best, best if without_gain == 0 else alone]
            if without_gain >= LAST_ROUNDS[best.step_s > bound_s * NEAR] and not short:
                break
    return best._replace(evaluations=tried, timed_out=timed_out)
