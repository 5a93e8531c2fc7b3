"""The plan in force for steps of one kind, and how it is made for a step that was recorded."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from penstock.core.check import check
from penstock.core.hardware import LINKS, Hardware
from penstock.core.plan import Plan
from penstock.core.trace import Trace
from penstock.errors import InvalidArgument, InvalidPlan, PenstockError
from penstock.options import PlanOptions
from penstock.planners import plan as make_plan
from penstock.planners import refuse_below_minimum
from penstock.runtime import resident
from penstock.runtime.collectives import in_flight_bytes
from penstock.runtime.devices import Device
from penstock.runtime.drift import Drift
from penstock.runtime.joint_planning import JointPlan, JointPlanning, JointStep
from penstock.runtime.ranks import WAIT_S
from penstock.runtime.report import NO_POLICY
from penstock.runtime.schedule import Schedule, schedule, unplanned
from penstock.runtime.variants import RUNNERS
from penstock.simulator import simulate

# After a recorded step planning takes no longer than this part of a step, within these limits: a plan
# that another one replaces soon, half of it. For a thousand kernels half a second finds plans that are
# within 2 % of what three seconds find, a quarter of a second within 5 %.
PLANNING_STEPS = 0.3
PLANNING_LIMITS_S = (0.5, 10.0)

# In the background it takes at least so long, if it needs it: it gets a part of the processor only.
LEAST_IN_BACKGROUND_S = 2.0

# The first steps are slow: memory is touched for the first time, kernels are chosen. So many more are
# recorded. The plan is made again before the last one, whose record is compared with the prediction: any
# earlier it would serve a single step, and save less of that than planning takes.
RECORDINGS = 3

# So many steps of a kind follow a plan at least before the next one is made, twice as many each time: a
# machine that is never the same is not planned for all the time.
LEAST_STEPS, MOST_STEPS = 8, 1024

# A step whose tensors take so much more than those of its trace is traced again.
GROWTH = 1.05

logger = logging.getLogger("penstock")


@dataclass(eq=False)
class StepKind:
    """Steps that run the same operators in the same order.

    trace            as last recorded
    plan             in force; None where none could be made
    schedule         what is carried out
    hardware         the machine that the plan was made for
    recordings_left  steps still to be recorded
    fixed            the plan is the user's own, and stays
    drift            what its steps take; None before one was timed
    in_whole_steps   the trace with kernel times as whole steps have them; None before that is known
    recorded         the step whose kernel times have drifted; None before it was recorded
    least_steps      that follow the plan before the next one is made
    in_force_s       that its steps have taken since the plan came into force
    searched         a better plan was looked for, with more time
    keeps_plan       it was planned again, and the plan before is as good
    joint            where the plan is that of several ranks
    """

    trace: Trace
    plan: Plan | None
    schedule: Schedule
    hardware: Hardware
    recordings_left: int = 0
    fixed: bool = False
    drift: Drift | None = None
    in_whole_steps: Trace | None = None
    recorded: Trace | None = None
    least_steps: int = LEAST_STEPS
    steps: int = 0
    in_force_s: float = 0.0
    searched: bool = False
    keeps_plan: bool = False
    joint: JointStep | None = None

    def has_grown(self, tensor_bytes: int) -> bool:
        """Whether a step whose tensors take so much is too large for the trace."""
        return tensor_bytes > GROWTH * int(self.trace.tensor_bytes.sum())

    def figures(self) -> dict[str, Any]:
        """What was predicted, for a report, by name."""
        rates = {link: self.hardware.rate_bytes_per_s(link) for link in LINKS}
        found: dict[str, Any] = {
            "ideal_s": self.trace.ideal_s,
            "planned_rates_bytes_per_s": {link: rate for link, rate in rates.items() if rate > 0},
        }
        if self.plan is None:
            return found | {"policy": NO_POLICY}
        predicted = simulate(self.in_whole_steps or self.trace, self.plan, self.hardware)
        return found | {
            "policy": self.plan.policy,
            "reason": self.plan.reason,
            "lossy": self.plan.lossy_text,
            "predicted_peak_bytes": predicted.peak_bytes,
            "predicted_step_s": predicted.step_s,
            "planned_step_s": self.plan.predicted_step_s,
            "predicted_stall_s": predicted.stall_s,
            "predicted_evicted_bytes": predicted.evicted_bytes,
        }


class StepPlanner:
    """Makes the plans of a run.

    options         what plans may do
    ranks           that plan together; None: this process plans for itself
    device          that tells what to plan for, and what is the least
    minimum_bytes   smallest device budget in which the recorded steps could have run
    refusal         why no plan could be made for the step that was recorded last; empty where one was
    """

    def __init__(self, options: PlanOptions, ranks: JointPlanning | None, device: Device) -> None:
        self._options, self._ranks, self._device = options, ranks, device
        self.minimum_bytes = 0
        self.refusal = ""

    def given(self, plan: Plan, hardware: Hardware) -> StepKind:
        """A kind of step with the user's own plan. Raises InvalidArgument, InvalidPlan, BudgetTooSmall."""
        if plan.trace is None:
            raise InvalidArgument(
                "this plan does not say which step it is for: make it with `penstock plan`, or give "
                "penstock.plan's own result"
            )
        trace = plan.trace.with_weights_kept() if self._options.keep_weights else plan.trace
        refuse_below_minimum(trace, hardware.device_bytes, self._device.least_budget(trace))
        kind = self._checked(trace, plan, hardware)
        return replace(kind, plan=plan, recordings_left=RECORDINGS, fixed=True)

    def recorded(self, trace: Trace, hardware: Hardware, before: StepKind | None) -> StepKind:
        """A kind of step with a plan for what was just recorded.

        before   what the step has followed; its plan stays for now where it fits, and more is to be recorded
        """
        self.minimum_bytes = max(self.minimum_bytes, self._device.least_budget(trace))
        trace = fastest(None if before is None else before.trace, trace)
        left = RECORDINGS if before is None else before.recordings_left
        joint = None if self._ranks is None else self._ranks.join(trace, hardware, left)
        if joint is not None:
            left = joint.recordings_left
        try:
            # Ranks that have recorded it all plan together: whether each could keep its plan none knows.
            if joint is None and before and before.plan is not None and (left > 1 or before.joint):
                with contextlib.suppress(InvalidPlan):
                    kept = self._checked(trace, before.plan, before.hardware)
                    return replace(kept, recordings_left=left, joint=before.joint)
            limit_s = planning_s(trace) / (1 if left <= 1 else 2)
            kind = self._made(trace, hardware, limit_s, joint)
            kind.recordings_left = left
            self.refusal = ""
        except PenstockError as error:
            if before is not None and before.plan is not None:
                logger.warning("no better plan could be made, and the one in force is kept: %s", error)
                return replace(before, recordings_left=left)
            logger.warning(
                "no plan could be made, and the least recently used tensors leave first: %s", error
            )
            self.refusal = str(error)
            kind = StepKind(trace, None, unplanned(trace), hardware)
        resident.release_free_memory()  # what the solver took
        return kind

    def again(
        self, kind: StepKind, trace: Trace, hardware: Hardware, search_s: float = LEAST_IN_BACKGROUND_S
    ) -> StepKind:
        """The kind of step with a plan for what was measured: a new one, or that in force if it is as good
        still. Called on a thread of its own. Raises PenstockError.

        search_s   time for planning, or more where steps take long
        """
        assert kind.plan is not None
        fits_all = trace if kind.joint is None else kind.joint.joint_trace(trace)
        plan = self._plan(fits_all, hardware, max(planning_s(trace), search_s))
        before, keeps_plan = replace(kind.plan, trace=fits_all), False
        if not check(fits_all, before, hardware):
            predicted = simulate(fits_all, before, hardware)
            if keeps_plan := predicted.step_s <= plan.predicted_step_s:
                plan = replace(
                    before,
                    predicted_step_s=predicted.step_s,
                    predicted_peak_bytes=predicted.peak_bytes,
                    lower_bound_s=min(plan.lower_bound_s, predicted.step_s),
                )
        made = self._checked(trace, plan, hardware)
        made.least_steps, made.joint = min(2 * kind.least_steps, MOST_STEPS), kind.joint
        made.keeps_plan = keeps_plan
        return made

    def announced(self, kind: StepKind) -> tuple[StepKind, int] | None:
        """The kind of step with the plan that the rank which leads has made again, and the step that is first
        to follow it; None where there is none. Raises PenstockError."""
        assert kind.joint is not None
        if (agreed := kind.joint.announced()) is None:
            return None
        return self._agreed(kind.trace, agreed, kind.joint), agreed.at_step

    def _made(self, trace: Trace, hardware: Hardware, limit_s: float, joint: JointStep | None) -> StepKind:
        """With a plan of this rank, or of all that recorded this step. Raises PenstockError."""
        if joint is not None:
            agreed = joint.agree(partial(self._plan, time_limit_s=limit_s), limit_s + WAIT_S)
            if agreed is not None:
                return self._agreed(trace, agreed, joint)
            logger.warning("no plan came from the other ranks in time: this one plans for itself")
        return self._checked(trace, self._plan(trace, hardware, limit_s), hardware)

    def _plan(self, trace: Trace, hardware: Hardware, time_limit_s: float) -> Plan:
        """Raises PenstockError."""
        budget_bytes = hardware.device_bytes - in_flight_bytes(trace, hardware.device_bytes)
        movable, budget_bytes = self._device.plannable(trace, budget_bytes)
        plan = make_plan(
            movable,
            hardware,
            self._options.policy,
            device_budget=budget_bytes,
            recompute=self._options.recompute,
            compress=len(trace.tensor_density) > 0,
            lossy=self._options.lossy,
            time_limit_s=time_limit_s,
        )
        return replace(plan, trace=trace, minimum_bytes=self._device.least_budget(trace))

    def _agreed(self, trace: Trace, agreed: JointPlan, joint: JointStep) -> StepKind:
        """With the plan of several ranks. Raises InvalidPlan."""
        assert agreed.plan is not None and agreed.hardware is not None
        kind = self._checked(trace.with_times(agreed.time_s), agreed.plan, agreed.hardware)
        kind.joint = joint
        return kind

    def _checked(self, trace: Trace, plan: Plan, hardware: Hardware) -> StepKind:
        """With this plan. Raises InvalidPlan."""
        plan = replace(plan, trace=trace)
        if violations := check(trace, plan, hardware):
            raise InvalidPlan(violations)
        return StepKind(trace, plan, scheduled(trace, plan, hardware.host_bytes), hardware)


def scheduled(trace: Trace, plan: Plan, host_bytes: int) -> Schedule:
    """What a run carries out. Raises InvalidArgument where it cannot run what the plan chose."""
    made = schedule(trace, plan, host_bytes)
    if unknown := {name for name in made.variants if name} - RUNNERS.keys():
        raise InvalidArgument(
            f"this plan runs kernels as {', '.join(sorted(unknown))}, which no run can choose: it "
            f"knows {', '.join(RUNNERS)}. Plan for a trace that was recorded by a run with "
            "PlanOptions(variants=True)"
        )
    return made


def fastest(before: Trace | None, trace: Trace) -> Trace:
    """The trace, with kernel times of which as little as possible is chance, where the same step was recorded
    before. What disturbed a kernel will not come again there, but somewhere else: kernels share the time of
    the fastest step as their own fastest times do."""
    if before is None or before.kernel_name != trace.kernel_name:
        return trace
    times_s = before.kernel_time_s, trace.kernel_time_s
    fastest_s = np.minimum(*times_s)
    step_s = min(float(kernels_s.sum()) for kernels_s in times_s)
    return trace.with_times(fastest_s * (step_s / max(float(fastest_s.sum()), 1e-9)))


def planning_s(trace: Trace) -> float:
    """How long planning this step may take in a run."""
    least_s, most_s = PLANNING_LIMITS_S
    return min(max(PLANNING_STEPS * trace.ideal_s, least_s), most_s)
