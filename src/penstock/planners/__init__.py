"""Policies that decide what leaves the device, and `plan`, which makes a plan with one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.core.hardware import Hardware
from penstock.core.plan import Evict, Plan
from penstock.core.pressure import minimum_bytes, tightest_kernel
from penstock.core.trace import Trace
from penstock.errors import BudgetTooSmall, InvalidArgument, SpillSpaceFull
from penstock.planners.evict_all import evict_all
from penstock.planners.g10 import g10
from penstock.planners.keep import keep
from penstock.simulator import simulate
from penstock.units import format_bytes, format_bytes_up

__all__ = ["POLICIES", "Policy", "budget_table", "plan", "require_policy"]

Policy = Callable[[Trace, int, Hardware], tuple[Evict, ...]]

# A policy is a pure function (trace, budget_bytes, hardware) -> evictions, legal for any budget of
# `minimum_bytes` or more.
POLICIES: dict[str, Policy] = {
    "keep": keep,
    "evict_all": evict_all,
    "g10": g10,
}


def plan(
    trace: Trace, hardware: Hardware, policy: str = "auto", *, device_budget_bytes: int | None = None
) -> Plan:
    """Decide what leaves the device, when, where to, and when it comes back.

    policy                a name in POLICIES; "auto" keeps everything where that fits, or uses "g10"
    device_budget_bytes   all of the device's memory when not given

    Raises BudgetTooSmall where no plan can help, SpillSpaceFull where what has to leave has nowhere
    to go, and InvalidArgument where the policy is unknown or cannot keep to the budget.
    """
    budget = hardware.device_bytes if device_budget_bytes is None else device_budget_bytes
    require_policy(policy)
    if budget > hardware.device_bytes:
        raise InvalidArgument(
            f"the device budget of {format_bytes(budget)} exceeds the device, which has "
            f"{format_bytes(hardware.device_bytes)}: lower the budget"
        )
    needed = minimum_bytes(trace)
    if budget < needed:
        raise BudgetTooSmall(_too_small(trace, budget, needed), needed)
    name, reason = _choose(trace, policy, budget)
    draft = Plan(
        policy=name,
        device_budget_bytes=budget,
        evictions=POLICIES[name](trace, budget, hardware),
        minimum_bytes=needed,
        reason=reason,
    )
    timeline = simulate(trace, draft, hardware)
    return replace(draft, predicted_s=timeline.iteration_s, predicted_peak_bytes=timeline.peak_bytes)


def require_policy(policy: str) -> None:
    """Raise InvalidArgument unless ``policy`` is "auto" or a name in POLICIES."""
    if policy != "auto" and policy not in POLICIES:
        raise InvalidArgument(f"there is no policy {policy!r}: choose auto, {', '.join(POLICIES)}")


def budget_table(
    trace: Trace,
    hardware: Hardware,
    fractions: Sequence[float] = (0.0, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0),
    policy: str = "auto",
) -> list[tuple[int, Plan]]:
    """Plans for budgets from the smallest possible, 0.0, to the in-memory peak, 1.0, ascending.

    Budgets above the device's memory are left out, and so are those at which what has to leave
    has nowhere to go.
    """
    least = minimum_bytes(trace)
    budgets = sorted({least + round(fraction * (trace.peak_bytes - least)) for fraction in fractions})
    rows = []
    for budget in budgets:
        if budget <= hardware.device_bytes:
            try:
                rows.append((budget, plan(trace, hardware, policy, device_budget_bytes=budget)))
            except SpillSpaceFull:
                continue
    return rows


def _choose(trace: Trace, policy: str, budget: int) -> tuple[str, str]:
    """The policy's name, and why."""
    peak = format_bytes_up(trace.peak_bytes)
    fits = trace.peak_bytes <= budget
    if policy == "keep" and not fits:
        raise InvalidArgument(
            f"the policy 'keep' needs {peak} on the device; the budget is {format_bytes(budget)}. "
            "Choose another policy, or raise the budget"
        )
    if policy != "auto":
        return policy, f"{policy} was asked for"
    if fits:
        return "keep", f"all of the step's {peak} fit in the budget of {format_bytes(budget)}"
    return "g10", f"the step's peak of {peak} exceeds the budget of {format_bytes(budget)}"


def _too_small(trace: Trace, budget: int, needed: int) -> str:
    amount = format_bytes_up(needed)
    where = f"kernel `{trace.kernel_name[tightest_kernel(trace)]}` alone" if trace.kernels else "the step"
    return (
        f"{where} needs {amount}; the device budget is {format_bytes(budget)}. "
        f"No plan can help: raise the budget to {amount} or lower the micro-batch."
    )
