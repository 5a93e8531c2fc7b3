"""The kinds of step of a run: what was recorded of each, the plan in force, and when a new one is made."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np

from penstock.capture.phases import OPTIMIZER_STATE
from penstock.core.check import check
from penstock.core.hardware import Hardware
from penstock.core.memory_profile import minimum_bytes
from penstock.core.plan import Plan
from penstock.core.trace import Trace
from penstock.errors import InvalidArgument, InvalidPlan, PenstockError
from penstock.planners import plan as make_plan
from penstock.runtime import resident
from penstock.runtime.dispatch import Recording
from penstock.runtime.schedule import Schedule, schedule, unplanned

# Planning takes no longer than so many steps of the trace, within these limits.
PLANNING_STEPS = 5.0
PLANNING_LIMITS_S = (0.5, 10.0)

# The first steps are slow: memory is touched for the first time, kernels are chosen. The plan is made
# again after each of the next ones but the last, whose record is compared with the prediction.
RECORDINGS = 3

# So many kinds of step are traced and planned; what else comes is carried by least recent use.
MOST_KINDS = 8

# A step whose tensors take so much more than those of its trace is traced again.
GROWTH = 1.05

logger = logging.getLogger("penstock")


@dataclass
class StepKind:
    """Steps that run the same operators in the same order.

    trace            as last recorded
    plan             in force; None where none could be made, or none was made yet
    schedule         what is carried out
    recordings_left  steps still to be recorded
    fixed            the plan is the user's own, and stays
    """

    trace: Trace
    plan: Plan | None
    schedule: Schedule
    recordings_left: int
    fixed: bool = False

    def has_grown(self, tensor_bytes: int) -> bool:
        """Whether a step whose tensors take so much is too large for the trace."""
        return tensor_bytes > GROWTH * int(self.trace.tensor_bytes.sum())


class StepKinds:
    """Every kind of step that a run has met, under the names that the user gives them, or None.

    compresses      plans may use bitmask-CSR, and recordings sample how many zeros there are
    lossy           codec in which what is saved for backward may leave

    trace, plan     of the latest step that followed a plan; None before there is a trace
    recorded        steps that were recorded
    mismatches      steps that ran other operators than any that was traced
    minimum_bytes   smallest device budget in which the recorded steps could have run
    """

    def __init__(self, policy: str, hardware: Hardware, compresses: bool, lossy: str | None = None) -> None:
        self._policy = policy
        self._hardware = hardware
        self._compresses = compresses
        self._lossy = lossy
        self._known: dict[str | None, list[StepKind]] = {}  # the likeliest first
        self._wanted: set[str | None] = set()  # to be recorded
        self.trace: Trace | None = None
        self.plan: Plan | None = None
        self.recorded = 0
        self.mismatches = 0
        self.minimum_bytes = 0

    def _scheduled(self, trace: Trace, plan: Plan) -> Schedule:
        return schedule(trace, plan)

    def take(self, plan: Plan) -> None:
        """Follow a plan that the user gave. Raises InvalidArgument, InvalidPlan."""
        if plan.trace is None:
            raise InvalidArgument(
                "this plan does not say which step it is for: make it with `penstock plan`, or give "
                "penstock.plan's own result"
            )
        if violations := check(plan.trace, plan, self._hardware):
            raise InvalidPlan(violations)
        known = StepKind(plan.trace, plan, self._scheduled(plan.trace, plan), RECORDINGS, fixed=True)
        self._known[None] = [known]
        self._follow(known)

    def schedules(self, name: str | None) -> list[Schedule]:
        """That a step of this name may follow, the likeliest first."""
        return [kind.schedule for kind in self._known.get(name, ())]

    def recording(self, name: str | None) -> Recording | None:
        """For the step of this name that begins; None where it need not be recorded."""
        known = self._known.get(name)
        return (
            Recording(self._compresses)
            if not known or known[0].recordings_left or name in self._wanted
            else None
        )

    def followed(self, name: str | None, schedule: Schedule | None, touched_bytes: int) -> StepKind | None:
        """The kind of the step that is over; None where it followed no plan to its end.

        schedule        what it followed
        touched_bytes   of all storages that it touched
        """
        known = self._known.get(name, [])
        kind = next((kind for kind in known if kind.schedule is schedule), None)
        if kind is not None:
            known.remove(kind)
            known.insert(0, kind)
            self._follow(kind)
            if kind.has_grown(touched_bytes):
                self._wanted.add(name)
        elif known:
            self.mismatches += 1
            if len(known) < MOST_KINDS:
                self._wanted.add(name)
            logger.info(
                "a step ran other operators than those that were traced: the rest of it was carried by least "
                "recent use, and the next one like it is traced and planned too"
            )
        return kind

    def record(self, name: str | None, kind: StepKind | None, recording: Recording, trace: Trace) -> bool:
        """Plan for a step that was recorded. Whether its kind's first steps are over.

        kind    as `followed` told
        trace   of the recording
        """
        known = self._known.setdefault(name, [])
        self.recorded += 1
        if kind is None:
            if len(known) < MOST_KINDS:
                self._wanted.discard(name)
                # The step that makes the optimizer's state is not seen again.
                known.insert(0, self._planned(trace, None, wait=not known and _makes_state(recording)))
                if self.plan is None:
                    self._follow(known[0])
            return False
        kind.recordings_left = max(kind.recordings_left - 1, 0)
        grown = kind.has_grown(int(trace.tensor_bytes.sum()))
        if grown:
            self._wanted.discard(name)
        if kind.fixed:
            return False
        if kind.recordings_left or grown:
            known[0] = self._planned(trace, kind)
            self._follow(known[0])
            return False
        return True

    def plan_what_waits(self) -> None:
        """Plan the first step now, where its plan was to wait for the second one."""
        known = self._known.get(None, [])
        for position, kind in enumerate(known):
            if self.plan is None and kind.plan is None and kind.recordings_left:
                known[position] = self._planned(kind.trace, kind)
                self._follow(known[position])

    def _follow(self, kind: StepKind) -> None:
        self.trace, self.plan = kind.trace, kind.plan

    def _planned(self, trace: Trace, before: StepKind | None, wait: bool = False) -> StepKind:
        """This kind of step with a plan for what was just recorded; without one yet where it can wait."""
        self.minimum_bytes = max(self.minimum_bytes, minimum_bytes(trace))
        left = RECORDINGS if before is None else before.recordings_left
        if before is not None and before.trace.kernel_name == trace.kernel_name:
            # What disturbed a kernel will not come again there, but somewhere else: kernels share the time of
            # the fastest step as their own fastest times do.
            times_s = before.trace.kernel_time_s, trace.kernel_time_s
            fastest_s = np.minimum(*times_s)
            step_s = min(float(kernels_s.sum()) for kernels_s in times_s)
            trace = replace(trace, kernel_time_s=fastest_s * (step_s / max(float(fastest_s.sum()), 1e-9)))
        if wait:
            return StepKind(trace, None, unplanned(trace), RECORDINGS)
        try:
            made = make_plan(
                trace,
                self._hardware,
                self._policy,
                compress=len(trace.tensor_density) > 0,
                lossy=self._lossy,
                time_limit_s=_planning_s(trace),
            )
            made = replace(made, offsets=())  # storages stay where they are
            violations = check(trace, made, self._hardware)
            if violations:
                raise InvalidPlan(violations)
            kind = StepKind(trace, made, self._scheduled(trace, made), left)
        except PenstockError as error:
            if before is not None and before.plan is not None:
                logger.warning("no better plan could be made, and the one in force is kept: %s", error)
                return replace(before, recordings_left=left)
            logger.warning("no plan could be made, and least recent use decides what moves: %s", error)
            kind = StepKind(trace, None, unplanned(trace), 0)
        resident.release_free_memory()  # what the solver took
        return kind


def _makes_state(recording: Recording) -> bool:
    """Whether the optimizer's state was made in this step."""
    return any(tensor.kind == OPTIMIZER_STATE and not tensor.before for tensor in recording.tensors)


def _planning_s(trace: Trace) -> float:
    """How long planning this step may take."""
    least_s, most_s = PLANNING_LIMITS_S
    return min(max(PLANNING_STEPS * trace.ideal_s, least_s), most_s)
