"""Policies that decide what leaves the device, and `plan`, which makes a plan with one of them."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

from penstock.core.arguments import require_types
from penstock.core.hardware import Hardware
from penstock.core.memory_profile import minimum_bytes, needs, tightest_kernel
from penstock.core.plan import Plan
from penstock.core.trace import Trace, within_budget
from penstock.errors import BudgetTooSmall, InvalidArgument
from penstock.options import POLICIES as MODULES
from penstock.planners.problem import Decision, Policy, Problem, as_traced
from penstock.simulator import simulate
from penstock.units import format_bytes, format_bytes_up, parse_budget

__all__ = ["POLICIES", "Decision", "Policy", "Problem", "plan", "require_policy", "solve"]

# A policy is a function of a problem, legal for any budget of `minimum_bytes` or more. All are pure, but that
# `optimal` reads a clock: where the time limit ends it, its plan depends on the machine.
POLICIES: dict[str, Policy] = {
    name: getattr(import_module(f"penstock.planners.{module}"), name) for name, module in MODULES.items()
}

CHOOSES_VARIANTS = ("modnn", "optimal")  # others run kernels as traced, but where that does not fit
LAST_DIGITS = 1e-9  # by which the same sum differs, taken in another order


def plan(
    trace: Trace,
    hardware: Hardware,
    policy: str = "optimal",
    recompute: bool = True,
    compress: bool = True,
    time_limit_s: float = 10.0,
    *,
    device_budget: int | str | None = None,
    lossy: str | None = None,
    keep_weights: bool = False,
) -> Plan:
    """Decide what leaves the device, when, where to, in what form, and when it comes back.

    policy                a name in POLICIES
    recompute             tensors may be recomputed instead of being moved, where the trace says how
    compress              tensors may be moved as bitmask-CSR, where the trace knows their density: one of
                          a real run does (fake=False), or `Trace.with_density` assumes it
    time_limit_s          for planning; a policy that reaches it returns the best it has found
    lossy                 "fp16" or "bf16": float32 activations that are saved for backward may leave in it,
                          and come back rounded; see `Trace.with_lossy`. None: everything comes back as it was
    keep_weights          weights and their gradients stay on the device: the plan is for
                          `Trace.with_weights_kept`
    device_budget         an integer, or text such as "600MiB"; all of the device's memory when not given

    The plan carries the trace. Where the budget does not hold all of the iteration, what no kernel reads
    again is taken to leave by itself (see `Trace.released`), and is not in the plan.

    Raises BudgetTooSmall where no plan can help, SpillSpaceFull where what has to leave has nowhere
    to go, and InvalidArgument where the policy is unknown or cannot keep to the budget.
    """
    require_types(trace=trace, hardware=hardware)
    if isinstance(device_budget, str):
        device_budget = parse_budget(device_budget)
    budget = hardware.device_bytes if device_budget is None else device_budget
    if keep_weights:
        trace = trace.with_weights_kept()
    problem = Problem(trace, hardware, budget, recompute, compress, lossy, time_limit_s)
    return solve(problem, policy)


def solve(problem: Problem, policy: str = "optimal") -> Plan:
    """`plan`, asked with all of its arguments in one value."""
    trace, hardware, budget = problem.trace, problem.hardware, problem.budget_bytes
    require_policy(policy)
    hardware.require_rates()
    if not problem.time_limit_s >= 0:
        raise InvalidArgument(f"time_limit_s is {problem.time_limit_s}: give seconds, zero or more")
    if budget > hardware.device_bytes:
        raise InvalidArgument(
            f"the device budget of {format_bytes(budget)} exceeds the device, which has "
            f"{format_bytes(hardware.device_bytes)}: lower the budget"
        )
    needed = refuse_below_minimum(trace, budget)
    problem = replace(problem, compress=problem.compress and len(trace.tensor_density) > 0)
    asked = within_budget(trace, budget, problem.lossy)
    if problem.lossy is not None:
        hardware.codec_rates(problem.lossy)
    variants: tuple[int, ...] = ()
    if policy not in CHOOSES_VARIANTS:
        variants, asked = as_traced(asked, budget)
    if policy == "keep" and asked.peak_bytes > budget:
        raise InvalidArgument(
            f"the policy 'keep' needs {format_bytes_up(asked.peak_bytes)} on the device; the budget is "
            f"{format_bytes(budget)}. Choose another policy, or raise the budget"
        )
    decision = POLICIES[policy](replace(problem, trace=asked, program=trace))
    draft = Plan(
        policy=policy,
        device_budget_bytes=budget,
        evictions=decision.evictions,
        recomputations=decision.recomputations,
        variants=decision.variants or variants,
        minimum_bytes=needed,
        lower_bound_s=max(decision.lower_bound_s, trace.fastest_s),
        reason=_reason(trace, budget, decision.reason),
        trace=trace,
    )
    timeline = simulate(trace, draft, hardware)
    predicted_step_s, bound_s = timeline.step_s, draft.lower_bound_s
    if predicted_step_s < bound_s <= predicted_step_s * (1 + LAST_DIGITS):
        bound_s = predicted_step_s
    return replace(
        draft,
        predicted_step_s=predicted_step_s,
        lower_bound_s=bound_s,
        predicted_peak_bytes=timeline.peak_bytes,
    )


def refuse_below_minimum(trace: Trace, budget_bytes: int, told_bytes: int = 0) -> int:
    """The minimum. Raises BudgetTooSmall where the budget is smaller.

    told_bytes   the least that the error asks for: the device may take more than the minimum
    """
    needed = minimum_bytes(trace)
    if budget_bytes < needed:
        told_bytes = max(needed, told_bytes)
        amount = format_bytes_up(needed)
        where, of = "the step", ""
        if trace.kernels:
            kernel = tightest_kernel(trace)
            where = f"kernel `{trace.kernel_name[kernel]}` alone"
            found = needs(trace, kernel).items()
            of = f" ({', '.join(f'{part} {format_bytes(size)}' for part, size in found if size > 0)})"
        raise BudgetTooSmall(
            f"{where} needs {amount}{of}; the device budget is {format_bytes(budget_bytes)}. "
            f"No plan can help: raise the budget to {format_bytes_up(told_bytes)} or lower the micro-batch.",
            told_bytes,
        )
    return needed


def require_policy(policy: str) -> None:
    """Raise InvalidArgument unless ``policy`` is a name in POLICIES."""
    if policy not in POLICIES:
        raise InvalidArgument(f"there is no policy {policy!r}: choose {', '.join(POLICIES)}")


def _reason(trace: Trace, budget: int, more: str) -> str:
    peak = format_bytes_up(trace.peak_bytes)
    if trace.peak_bytes <= budget:
        return f"all of the step's {peak} fit in the budget of {format_bytes(budget)}"
    released = trace.released
    if released.peak_bytes <= budget:
        fits = f"the {format_bytes_up(released.peak_bytes)} that kernels still read fit"
        more = f"{fits}; {more}" if more else fits
    why = f"the step's peak of {peak} exceeds the budget of {format_bytes(budget)}"
    return f"{why}; {more}" if more else why
