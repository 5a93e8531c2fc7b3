"""One problem, planned by one policy, checked and simulated: what the tables are made of."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from typing import Any

import artifact
import numpy as np

import penstock
from penstock.core.check import check
from penstock.errors import PenstockError

NOISE = 0.2  # kernel times off by this fraction either way, as in G10's figure 19
NOISE_SEEDS = range(8)


@dataclass(frozen=True)
class Way:
    """A policy and what it may do.

    name   in the tables
    """

    name: str
    policy: str
    recompute: bool = False
    compress: bool = False


OFFLOAD = Way("optimal", "optimal")
RECOMPUTE = Way("optimal, recompute", "optimal", recompute=True)
COMPRESS = Way("optimal, compress", "optimal", compress=True)
ALL = Way("optimal, both", "optimal", recompute=True, compress=True)


@dataclass(frozen=True)
class Outcome:
    """What one policy did.

    predicted_s       iteration time; None where the policy failed, with ``failed`` saying why
    bound_s           the lower bound that it proved; the ideal time where it proves none
    planning_s        wall time of `penstock.plan`
    noisy             predicted times over predicted_s / ideal_s with noise, minus one: one a seed
    """

    way: str
    predicted_s: float | None
    ideal_s: float
    bound_s: float = 0.0
    planning_s: float = 0.0
    moved_bytes: int = 0
    evictions: int = 0
    recomputations: int = 0
    noisy: tuple[float, ...] = ()
    failed: str = ""

    @property
    def gap(self) -> float | None:
        return None if self.predicted_s is None else self.predicted_s / self.bound_s - 1

    @property
    def of_ideal(self) -> float | None:
        return None if self.predicted_s is None else self.ideal_s / self.predicted_s


def run(
    trace: penstock.Trace,
    hardware: penstock.Hardware,
    way: Way,
    *,
    budget_bytes: int | None = None,
    time_limit_s: float = 10.0,
    noise: bool = False,
) -> Outcome:
    """Plan, plan checker and simulate. Raises AssertionError where the plan checker refuses the plan."""
    began_s = time.perf_counter()
    try:
        plan = artifact.plan(
            trace,
            hardware,
            way.policy,
            recompute=way.recompute,
            compress=way.compress,
            time_limit_s=time_limit_s,
            device_budget=budget_bytes,
        )
    except PenstockError as error:
        planning_s = time.perf_counter() - began_s
        return Outcome(way.name, None, trace.ideal_s, planning_s=planning_s, failed=str(error))
    planning_s = time.perf_counter() - began_s
    violations = check(trace, plan, hardware)
    if violations:
        raise AssertionError(f"{way.name}: {len(violations)} violations, such as: {violations[0]}")
    timeline = penstock.simulate(trace, plan, hardware)
    return Outcome(
        way=way.name,
        predicted_s=timeline.step_s,
        ideal_s=trace.ideal_s,
        bound_s=plan.lower_bound_s,
        planning_s=planning_s,
        moved_bytes=timeline.evicted_bytes,
        evictions=len(plan.evictions),
        recomputations=len(plan.recomputations),
        noisy=tuple(noisy(trace, plan, hardware, timeline.step_s)) if noise else (),
    )


def noisy(
    trace: penstock.Trace, plan: penstock.Plan, hardware: penstock.Hardware, step_s: float
) -> Iterable[float]:
    """What the plan loses where each kernel takes up to `NOISE` less or more than it was planned for.

    Relative to the ideal time under the same noise, so that slower kernels are no loss of the plan's.
    """
    for seed in NOISE_SEEDS:
        factors = np.random.default_rng(seed).uniform(1 - NOISE, 1 + NOISE, trace.kernels)
        other = replace(trace, kernel_time_s=trace.kernel_time_s * factors)
        again_s = penstock.simulate(other, plan, hardware).step_s
        yield (again_s / other.ideal_s) / (step_s / trace.ideal_s) - 1


def run_all(
    tasks: Mapping[str, tuple[Any, Sequence[Any]]], jobs: int, tell: Any
) -> dict[str, list[dict[str, Any]]]:
    """Each task's function and arguments in a pool of processes; outcomes by task, as documents."""
    results: dict[str, list[dict[str, Any]]] = {}
    with ProcessPoolExecutor(jobs) as pool:
        futures = {pool.submit(function, *arguments): key for key, (function, arguments) in tasks.items()}
        for done, future in enumerate(as_completed(futures), start=1):
            results[futures[future]] = [asdict(outcome) for outcome in future.result()]
            tell(f"{done} of {len(futures)}: {futures[future]}")
    return results
