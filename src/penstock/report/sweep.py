"""Compares plans: every policy on one problem, or one policy on several machines. `verdict` says in one
sentence whether the disk is fast enough.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from typing import TypeVar

from penstock.core.hardware import Hardware
from penstock.core.memory_profile import tier_bytes
from penstock.core.plan import Plan
from penstock.core.trace import Trace
from penstock.errors import InvalidArgument, PenstockError
from penstock.planners import POLICIES, Problem, solve
from penstock.report.summary import Summary, summarise
from penstock.simulator import simulate
from penstock.units import format_rate, format_seconds

Task = TypeVar("Task")
Result = TypeVar("Result")

WORTH_KERNELS = 4000  # planning for fewer takes less time than starting a process


@dataclass(frozen=True, kw_only=True)
class PolicyResult:
    """The plan of one policy. ``reason`` says why there is none where ``summary`` is None."""

    policy: str
    summary: Summary | None = None
    reason: str = ""


def compare_policies(
    problem: Problem, names: Iterable[str] = tuple(POLICIES), known: Plan | None = None
) -> list[PolicyResult]:
    """One result for each policy, the fastest first, those without a plan at the end.

    Each summary has the best lower bound that any of the policies proved.

    known   a plan for the same problem, which is not made again
    """
    names = list(names)
    tasks = [(problem, name, known if known is not None and known.policy == name else None) for name in names]
    if known is not None and known.policy not in names:
        tasks.append((problem, known.policy, known))
    workers = workers_for(problem.trace.kernels * len(tasks))
    found = run_in_processes(_result, tasks, min(workers, len(tasks)))
    bound_s = max((entry.summary.lower_bound_s for entry in found if entry.summary), default=0.0)
    found = [
        replace(entry, summary=replace(entry.summary, lower_bound_s=bound_s)) if entry.summary else entry
        for entry in found
    ]
    return sorted(found, key=lambda entry: entry.summary.predicted_step_s if entry.summary else math.inf)


def run_in_processes(function: Callable[[Task], Result], tasks: Sequence[Task], workers: int) -> list[Result]:
    """Map ``function`` over the tasks, in order, in ``workers`` processes; with one, in this process.

    Processes are spawned, not forked, as this one may have threads.
    """
    if workers <= 1:
        return [function(task) for task in tasks]
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(function, tasks))


def workers_for(kernels: int) -> int:
    """How many processes are worth starting, for the number of kernels in all tasks together."""
    return 1 if kernels < WORTH_KERNELS else os.cpu_count() or 1


def _result(task: tuple[Problem, str, Plan | None]) -> PolicyResult:
    problem, name, made = task
    try:
        if made is None:
            made = solve(problem, name)
        timeline = simulate(problem.trace, made, problem.hardware)
    except PenstockError as error:
        return PolicyResult(policy=name, reason=str(error))
    return PolicyResult(policy=name, summary=summarise(problem.trace, made, timeline))


NEAR = 1.05  # times within this factor count as equal
MANY = 1e6  # factor that makes a resource unlimited
DISK_LINKS = ("disk_write", "disk_read")

LIMITS = ("compute", "bus", "disk write", "disk read", "host capacity")


@dataclass(frozen=True, kw_only=True, eq=False)
class Case(Problem):
    """One machine to plan for.

    disks   number of disks that ``hardware`` describes as one
    """

    label: str
    disks: float
    policy: str = "optimal"

    @property
    def batch(self) -> int | None:
        """Samples of an iteration, where the trace says so."""
        text = str(self.trace.notes.get("batch", ""))
        return int(text) if text.isdecimal() and int(text) > 0 else None


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The result for a case.

    summary      None where there is no plan; `reason` says why
    limits       the bottleneck: the resource of LIMITS that speeds this plan up most when it is doubled;
                 "compute" where the step is near its ideal time, or none does
    if_doubled_s by resource: the time of this plan with twice as much of it
    fast_disk_s  the time of this plan with an infinitely fast disk
    """

    case: Case
    plan: Plan | None = None
    summary: Summary | None = None
    limits: str = ""
    if_doubled_s: Mapping[str, float] | None = None
    fast_disk_s: float = 0.0
    reason: str = ""

    @property
    def uses_disk(self) -> bool:
        return self.summary is not None and bool(
            self.summary.written_bytes["disk"] or self.summary.read_bytes["disk"]
        )

    @property
    def disk_is_enough(self) -> bool:
        """Whether a faster disk would hardly speed this plan up."""
        return self.summary is not None and self.summary.predicted_step_s <= NEAR * self.fast_disk_s

    @property
    def sample_s(self) -> float | None:
        """Seconds a sample; None where the batch is not known."""
        batch = self.case.batch
        return None if self.summary is None or batch is None else self.summary.predicted_step_s / batch


def cases(
    traces: Mapping[str, Trace],
    hardware: Hardware,
    budgets: Sequence[int],
    hosts: Sequence[int] = (),
    disks: Sequence[float] = (1,),
    disk_rate_bytes_per_s: float | None = None,
    **asked: object,
) -> list[Case]:
    """Every combination, in the order of the arguments; empty ones are as ``hardware`` says.

    disk_rate_bytes_per_s   of one disk, written and read
    """
    if disk_rate_bytes_per_s is not None:
        if not disk_rate_bytes_per_s > 0:
            raise InvalidArgument(f"a disk of {disk_rate_bytes_per_s} bytes a second: give a rate above zero")
        hardware = replace(
            hardware,
            disk_write_bytes_per_s=disk_rate_bytes_per_s,
            disk_read_bytes_per_s=disk_rate_bytes_per_s,
            measured_rates={
                link: points for link, points in hardware.measured_rates.items() if link not in DISK_LINKS
            },
        )
    found = []
    for (label, trace), budget, host, count in product(
        traces.items(), budgets or [hardware.device_bytes], hosts or [hardware.host_bytes], disks
    ):
        machine = replace(with_disks(hardware, count), device_bytes=budget, host_bytes=host)
        found.append(
            Case(label=label, trace=trace, hardware=machine, budget_bytes=budget, disks=count, **asked)  # type: ignore[arg-type]
        )
    return found


def with_disks(hardware: Hardware, count: float) -> Hardware:
    """The same machine with ``count`` times its disk: capacity and rates."""
    return replace(
        hardware.scaled(dict.fromkeys(DISK_LINKS, count)),
        disk_bytes=math.floor(min(hardware.disk_bytes * count, 2**62)),
    )


def sweep(asked: Sequence[Case], workers: int = 0) -> list[Cell]:
    """One cell for each case, in order. What is possible with less is possible with more: a plan for a
    machine that has less of something is taken where it is faster.

    workers   processes to plan in; 0: as many as are worth starting
    """
    workers = workers or workers_for(sum(case.trace.kernels for case in asked))
    found = run_in_processes(cell, asked, min(workers, len(asked)))
    # What comes back from another process holds a copy of its case.
    return _inherited([replace(entry, case=case) for entry, case in zip(found, asked, strict=True)])


def _inherited(cells: Sequence[Cell]) -> list[Cell]:
    """The cells, each with the faster of its own plan and the plans of cells with fewer resources."""
    found = list(cells)
    for index in sorted(range(len(cells)), key=lambda index: _resources(cells[index].case)):
        case = cells[index].case
        below = [other for other, cell in enumerate(cells) if _has_less(cell.case, case)]
        for other in below:
            if any(_has_less(cells[other].case, cells[between].case) for between in below):
                continue  # the one between has tried it
            made, own = found[other].plan, found[index]
            if made is None:
                continue
            bound_s = own.plan.lower_bound_s if own.plan else 0.0
            trial = replace(made, device_budget_bytes=case.budget_bytes, lower_bound_s=bound_s)
            if (
                own.summary is None
                or _time_s(case.trace, trial, case.hardware) < own.summary.predicted_step_s
            ):
                found[index] = _cell_of(case, trial)
    return found


def _resources(case: Case) -> tuple[int, int, float]:
    return case.budget_bytes, case.hardware.host_bytes, case.disks


def _has_less(one: Case, other: Case) -> bool:
    """Whether a plan for ``one`` can be carried out for ``other``, which has more of something."""
    fewer = all(a <= b for a, b in zip(_resources(one), _resources(other), strict=True))
    return fewer and one.trace is other.trace and _resources(one) != _resources(other)


def cell(case: Case) -> Cell:
    """Plan for the case, and find out what limits the plan."""
    try:
        made = solve(case, case.policy)
    except PenstockError as error:
        return Cell(case=case, reason=str(error))
    return _cell_of(case, made)


def _cell_of(case: Case, made: Plan) -> Cell:
    summary = summarise(case.trace, made, simulate(case.trace, made, case.hardware))
    doubled = if_doubled_s(case, made)
    fast = case.hardware.scaled(dict.fromkeys(DISK_LINKS, MANY))
    return Cell(
        case=case,
        plan=made,
        summary=summary,
        limits=limiting(summary, doubled),
        if_doubled_s=doubled,
        fast_disk_s=min(_time_s(case.trace, made, fast), summary.predicted_step_s),
    )


def limiting(summary: Summary, doubled_s: Mapping[str, float]) -> str:
    """The bottleneck of a plan: see `Cell.limits`."""
    time_s = summary.predicted_step_s
    best = min(LIMITS[1:], key=lambda name: doubled_s.get(name, time_s))
    if time_s <= NEAR * summary.ideal_s or doubled_s.get(best, time_s) >= time_s:
        return "compute"
    return best


def if_doubled_s(case: Case, made: Plan) -> dict[str, float]:
    """By resource of LIMITS: how long the same plan takes with twice as much of it.

    More host memory changes no plan by itself: copies that went to the disk go to the host as far as
    they fit, those that are needed soonest again first.
    """
    trace, hardware = case.trace, case.hardware
    times = {"compute": _time_s(trace.scaled(0.5), made, hardware)}
    if hardware.host_bytes or hardware.disk_shares_bus:
        bus = hardware.scaled(dict.fromkeys(("device_to_host", "host_to_device"), 2))
        times["bus"] = _time_s(trace, made, bus)
    if any(evict.tier == "disk" for evict in made.evictions):
        for link in DISK_LINKS:
            times[link.replace("_", " ")] = _time_s(trace, made, hardware.scaled({link: 2}))
        if hardware.host_bytes:
            roomy = replace(hardware, host_bytes=2 * hardware.host_bytes)
            moved = to_host(trace, made, roomy.host_bytes)
            times["host capacity"] = _time_s(trace, moved, roomy)
    return times


def to_host(trace: Trace, made: Plan, host_bytes: int) -> Plan:
    """The same plan with copies moved from disk to host as far as ``host_bytes`` allow."""
    on_disk = (evict.tensor for evict in made.evictions if evict.tier == "disk")
    wait: dict[int, float] = dict.fromkeys(on_disk, math.inf)
    for evict in made.evictions:
        if evict.tensor in wait:
            wait[evict.tensor] = min(wait[evict.tensor], evict.end - evict.begin)
    waiting = sorted(wait, key=lambda tensor: (wait[tensor], tensor))

    def with_moved(count: int) -> Plan:
        moved = set(waiting[:count])
        evictions = (replace(e, tier="host") if e.tensor in moved else e for e in made.evictions)
        return replace(made, evictions=tuple(evictions))

    def occupied(count: int) -> int:
        used = tier_bytes(trace, with_moved(count).evictions).get("host")
        return 0 if used is None else int(used.max(initial=0))

    # The most that fit: each more occupies more.
    most = bisect_right(range(1, len(waiting) + 1), host_bytes, key=occupied)
    return with_moved(most)


def _time_s(trace: Trace, made: Plan, hardware: Hardware) -> float:
    return simulate(trace, made, hardware).step_s


def disk_rates(hardware: Hardware) -> tuple[float, ...]:
    """Bytes a second that the disk writes, and reads, at best."""
    return tuple(
        max(
            (rate for _, rate in hardware.measured_rates.get(link, ())),
            default=hardware.rate_bytes_per_s(link),
        )
        for link in DISK_LINKS
    )


def verdict(cells: Sequence[Cell]) -> str:
    """Whether the disk is fast enough, in one sentence: whether an infinitely fast one would hardly help."""
    planned = [cell for cell in cells if cell.summary is not None]
    if not planned:
        return "No plan fits any of these machines: raise the budget, the host memory or the disks."
    using = [cell for cell in planned if cell.uses_disk]
    if not using:
        return "The disk is not needed: device and host memory carry every one of these plans."
    aside = f", and not needed in {len(planned) - len(using)} more" if len(planned) > len(using) else ""
    enough = [cell for cell in using if cell.disk_is_enough]
    if len(enough) == len(using):
        where = "the one case that uses it" if len(using) == 1 else f"all {len(using)} cases that use it"
        return (
            f"Yes, the disk is fast enough in {where}{aside}: a faster one would save less than "
            f"{(NEAR - 1) * 100:.0f} % of the step."
        )
    if not enough:
        best = min(using, key=_slowdown)
        assert best.summary is not None
        where = "the one case that uses it" if len(using) == 1 else f"any of the {len(using)} cases"
        step, over = format_seconds(best.summary.predicted_step_s), best.summary.over_ideal
        step += "" if over is None else f", {over:.2f} x the ideal"
        return (
            f"No, the disk is not fast enough in {where}{aside}: at best, with {_disks(best.case)}, the "
            f"step takes {step}, and a disk that never kept it waiting would make it "
            f"{format_seconds(best.fast_disk_s)}."
        )
    text = f"It depends: the disk is fast enough in {len(enough)} of {len(using)} cases that use it{aside}; "
    lacking = max((cell.case for cell in using if not cell.disk_is_enough), key=attrgetter("disks"))
    more = [cell.case for cell in using if cell.case.disks > lacking.disks]
    if not more:
        return f"{text}not in all of them with {_disks(lacking)}."
    return f"{text}in all of them with {_disks(min(more, key=attrgetter('disks')))}."


def _disks(case: Case) -> str:
    """``"2 disks (6.40 GB/s)"``: the slower of its two rates."""
    count = f"{case.disks:g} disk{'' if case.disks == 1 else 's'}"
    return f"{count} ({format_rate(min(disk_rates(case.hardware)))})"


def _slowdown(cell: Cell) -> float:
    """The step time, relative to that with an infinitely fast disk."""
    assert cell.summary is not None
    return cell.summary.predicted_step_s / cell.fast_disk_s if cell.fast_disk_s else 1.0
