"""What if the machine were another: a plan for each one, and what limits it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from penstock.core.hardware import Hardware
from penstock.core.memory_profile import tier_bytes
from penstock.core.plan import Plan
from penstock.core.trace import Trace
from penstock.errors import InvalidArgument, PenstockError
from penstock.planners import Problem, solve
from penstock.report.policies import spread, workers_for
from penstock.report.summary import Summary, summarise
from penstock.simulator import simulate

NEAR = 1.05  # times this close are called the same
MANY = 1e6  # factor of a resource that is to limit nothing
DISK_LINKS = ("disk_write", "disk_read")

LIMITS = ("compute", "bus", "disk write", "disk read", "host capacity")


@dataclass(frozen=True, kw_only=True, eq=False)
class Case(Problem):
    """One machine to plan for.

    disks   how many of the disk the hardware describes, working as one
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
    """What came out for a case.

    summary      None where there is no plan; `reason` says why
    limits       what keeps the step from its ideal time: the resource of LIMITS of which twice as much
                 would help this plan most; "compute" where it is near the ideal, or none of them would
    if_doubled_s by resource: the time of this plan with twice as much of it
    fast_disk_s  the time of this plan with a disk that never keeps it waiting
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
        """Whether a faster disk would make this plan no faster, or hardly."""
        return self.summary is not None and self.summary.predicted_s <= NEAR * self.fast_disk_s

    @property
    def sample_s(self) -> float | None:
        """Seconds a sample; None where the batch is not known."""
        batch = self.case.batch
        return None if self.summary is None or batch is None else self.summary.predicted_s / batch


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
    found = spread(cell, asked, min(workers, len(asked)))
    # What comes back from another process holds a copy of its case.
    return _inherited([replace(entry, case=case) for entry, case in zip(found, asked, strict=True)])


def _inherited(cells: Sequence[Cell]) -> list[Cell]:
    """The cells, each with the best of its own plan and those of its neighbours that have less."""
    place = {id(entry): index for index, entry in enumerate(cells)}
    found = list(cells)
    for entry in sorted(cells, key=lambda entry: _means(entry.case)):
        below = [other for other in cells if other is not entry and _has_less(other.case, entry.case)]
        for other in below:
            if any(_has_less(other.case, between.case) for between in below):
                continue  # the one between has it already
            made, own = found[place[id(other)]].plan, found[place[id(entry)]]
            if made is None:
                continue
            trial = replace(made, device_budget_bytes=entry.case.budget_bytes)
            trial = replace(trial, lower_bound_s=own.plan.lower_bound_s if own.plan else 0.0)
            if (
                own.summary is None
                or _time_s(own.case.trace, trial, own.case.hardware) < own.summary.predicted_s
            ):
                found[place[id(entry)]] = _cell_of(entry.case, trial)
    return found


def _means(case: Case) -> tuple[int, int, float]:
    return case.budget_bytes, case.hardware.host_bytes, case.disks


def _has_less(one: Case, other: Case) -> bool:
    """Whether a plan for ``one`` can be carried out for ``other``, which has more of something."""
    fewer = all(a <= b for a, b in zip(_means(one), _means(other), strict=True))
    return fewer and one.trace is other.trace and _means(one) != _means(other)


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
        fast_disk_s=min(_time_s(case.trace, made, fast), summary.predicted_s),
    )


def limiting(summary: Summary, doubled_s: Mapping[str, float]) -> str:
    """The resource that limits a plan, as `Cell.limits` says."""
    time_s = summary.predicted_s
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
    evictions = list(made.evictions)
    on_disk = {evict.tensor for evict in evictions if evict.tier == "disk"}
    wait = dict.fromkeys(on_disk, math.inf)
    for evict in evictions:
        if evict.tensor in on_disk:
            wait[evict.tensor] = min(wait[evict.tensor], evict.end - evict.begin)
    waiting = sorted(on_disk, key=lambda tensor: (wait[tensor], tensor))
    fitting, failing = 0, len(waiting) + 1
    result = made
    while failing - fitting > 1:  # the most, by bisection: each more occupies more
        count = (fitting + failing) // 2
        moved = set(waiting[:count])
        trial = replace(
            made,
            evictions=tuple(
                replace(evict, tier="host") if evict.tensor in moved else evict for evict in evictions
            ),
        )
        occupied = tier_bytes(trace, trial.evictions).get("host")
        if occupied is None or int(occupied.max(initial=0)) <= host_bytes:
            fitting, result = count, trial
        else:
            failing = count
    return result


def _time_s(trace: Trace, made: Plan, hardware: Hardware) -> float:
    return simulate(trace, made, hardware).iteration_s


def disk_rates(hardware: Hardware) -> tuple[float, float]:
    """Bytes a second that the disk writes, and reads, at best."""
    return _rate(hardware, "disk_write"), _rate(hardware, "disk_read")


def _rate(hardware: Hardware, link: str) -> float:
    points = hardware.measured_rates.get(link)
    return max(rate for _, rate in points) if points else hardware.rate_bytes_per_s(link)
