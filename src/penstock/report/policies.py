"""Every policy on the same problem: what each would take, or why it cannot."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from penstock.core.plan import Plan
from penstock.errors import PenstockError
from penstock.planners import POLICIES, Problem, solve
from penstock.report.summary import Summary, summarise
from penstock.simulator import simulate

Task = TypeVar("Task")
Result = TypeVar("Result")

WORTH_KERNELS = 4000  # planning for fewer is over before a process has started


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One policy's answer. ``reason`` says why there is no plan where ``summary`` is None."""

    policy: str
    summary: Summary | None = None
    reason: str = ""


def compare_policies(
    problem: Problem, names: Iterable[str] | None = None, known: Plan | None = None, workers: int = 0
) -> list[Candidate]:
    """One candidate for each policy, fastest first, those that cannot at the end.

    Each summary carries the best bound that any of the policies proved: it holds for all.

    known   a plan for the same problem, which need not be made again
    workers processes to plan in; 0: as many as are worth starting
    """
    names = list(names if names is not None else POLICIES)
    tasks = [(problem, name, known if known is not None and known.policy == name else None) for name in names]
    if known is not None and known.policy not in names:
        tasks.append((problem, known.policy, known))
    workers = workers or workers_for(problem.trace.kernels * len(tasks))
    found = spread(_candidate, tasks, min(workers, len(tasks)))
    bound_s = max((entry.summary.lower_bound_s for entry in found if entry.summary), default=0.0)
    found = [
        replace(entry, summary=replace(entry.summary, lower_bound_s=bound_s)) if entry.summary else entry
        for entry in found
    ]
    return sorted(found, key=lambda entry: (entry.summary is None, _time_s(entry)))


def spread(function: Callable[[Task], Result], tasks: Sequence[Task], workers: int) -> list[Result]:
    """``function`` of each task, in order, in so many processes; with one, in this process.

    The processes start afresh rather than as copies of this one, which may have threads.
    """
    if workers <= 1:
        return [function(task) for task in tasks]
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(function, tasks))


def workers_for(kernels: int) -> int:
    """How many processes are worth starting to plan for so many kernels, over all tasks."""
    return 1 if kernels < WORTH_KERNELS else os.cpu_count() or 1


def _candidate(task: tuple[Problem, str, Plan | None]) -> Candidate:
    problem, name, made = task
    try:
        if made is None:
            made = solve(problem, name)
        timeline = simulate(problem.trace, made, problem.hardware)
    except PenstockError as error:
        return Candidate(policy=name, reason=str(error))
    return Candidate(policy=name, summary=summarise(problem.trace, made, timeline))


def _time_s(entry: Candidate) -> float:
    return entry.summary.predicted_s if entry.summary else 0.0
