"""The kinds of step of a run: what was recorded of each, the plan in force, and when a new one is made.

The first steps of a kind are recorded, and planned between two steps. From then on `Drift` compares what
steps take with what the plan was made for. Where rates have drifted, a new plan is made in the background,
and taken between two steps; where kernel times have, two steps are recorded before.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from penstock.capture.phases import OPTIMIZER_STATE
from penstock.core.check import check
from penstock.core.hardware import Hardware
from penstock.core.memory_profile import minimum_bytes
from penstock.core.plan import Plan
from penstock.core.trace import Trace
from penstock.errors import InvalidArgument, InvalidPlan, PenstockError
from penstock.options import PlanOptions
from penstock.planners import plan as make_plan
from penstock.planners import refuse_below_minimum
from penstock.runtime import resident
from penstock.runtime.collectives import in_flight_bytes
from penstock.runtime.copy_engine import Moved
from penstock.runtime.drift import Drift
from penstock.runtime.joint_planning import Agreed, Joint, JointPlanning
from penstock.runtime.ranks import WAIT_S
from penstock.runtime.recording import Recording
from penstock.runtime.schedule import Schedule, schedule, unplanned
from penstock.runtime.variants import RUNNERS
from penstock.simulator import simulate
from penstock.units import format_seconds

# In a step that is recorded, planning takes no longer than so many steps of the trace, within these limits:
# more time finds plans that are faster by less than one in a hundred.
PLANNING_STEPS = 1.0
PLANNING_LIMITS_S = (0.5, 10.0)

# The first steps are slow: memory is touched for the first time, kernels are chosen. The plan is made
# again after each of the next ones but the last, whose record is compared with the prediction.
RECORDINGS = 3

# In the background it takes at least so long, if it needs it: it gets a part of the processor only.
LEAST_IN_BACKGROUND_S = 2.0

# Of steps whose kernel times have drifted, so many are recorded.
RECORDINGS_OF_DRIFT = 2

# So many steps of a kind follow a plan at least before the next one is made, twice as many each time: a
# machine that is never the same is not planned for all the time.
LEAST_STEPS, MOST_STEPS = 8, 1024

# So many kinds of step are traced and planned; what else comes is carried by least recent use.
MOST_KINDS = 8

# A step whose tensors take so much more than those of its trace is traced again.
GROWTH = 1.05

# Ranks take a new plan so many steps after it was announced: by then each of them has seen it.
STEPS_AHEAD = 2

logger = logging.getLogger("penstock")


@dataclass(eq=False)
class StepKind:
    """Steps that run the same operators in the same order.

    trace            as last recorded
    plan             in force; None where none could be made, or none was made yet
    schedule         what is carried out
    recordings_left  steps still to be recorded
    hardware         the machine that the plan was made for
    fixed            the plan is the user's own, and stays
    drift            what its steps take; None before one was timed
    recorded         the step whose kernel times have drifted; None before it was recorded
    least_steps      that follow the plan before the next one is made
    joint            where the plan is that of several ranks
    """

    trace: Trace
    plan: Plan | None
    schedule: Schedule
    recordings_left: int
    hardware: Hardware
    fixed: bool = False
    drift: Drift | None = None
    recorded: Trace | None = None
    least_steps: int = LEAST_STEPS
    steps: int = 0
    joint: Joint | None = None

    def has_grown(self, tensor_bytes: int) -> bool:
        """Whether a step whose tensors take so much is too large for the trace."""
        return tensor_bytes > GROWTH * int(self.trace.tensor_bytes.sum())


class StepKinds:
    """Every kind of step that a run has met, under the names that the user gives them, or None.

    planning        what plans may do; where they may compress, recordings sample how many zeros there are
    ranks           that plan together; None: this process plans for itself

    trace, plan     of the latest step that followed a plan; None before there is a trace
    hardware        the machine that this plan was made for
    replans         times that a step was planned again since rates or kernel times had drifted
    recorded        steps that were recorded
    mismatches      steps that ran other operators than any that was traced
    minimum_bytes   smallest device budget in which the recorded steps could have run
    refusal         why no plan could be made for the step that was recorded last; empty where one was
    """

    def __init__(
        self,
        planning: PlanOptions,
        hardware: Hardware,
        ranks: JointPlanning | None = None,
    ) -> None:
        self._options = planning
        self.hardware = hardware
        self._ranks = ranks
        self._known: dict[str | None, list[StepKind]] = {}  # the likeliest first
        self._latest: dict[str | None, StepKind] = {}  # that a step of this name has followed
        self._wanted: set[str | None] = set()  # to be recorded
        self.trace: Trace | None = None
        self.plan: Plan | None = None
        self.recorded = 0
        self.mismatches = 0
        self.minimum_bytes = 0
        self.refusal = ""
        self.replans = 0
        self._planning: _Planning | None = None
        self._steps = 0  # that have begun
        self._coming: list[_Coming] = []

    def _scheduled(self, trace: Trace, plan: Plan) -> Schedule:
        made = schedule(trace, plan, self.hardware.host_bytes)
        if unknown := {name for name in made.variants if name} - RUNNERS.keys():
            raise InvalidArgument(
                f"this plan runs kernels as {', '.join(sorted(unknown))}, which no run can choose: it "
                f"knows {', '.join(RUNNERS)}. Plan for a trace that was recorded by a run with "
                "PlanOptions(variants=True)"
            )
        return made

    def take(self, plan: Plan) -> None:
        """Follow a plan that the user gave. Raises InvalidArgument, InvalidPlan, BudgetTooSmall."""
        if plan.trace is None:
            raise InvalidArgument(
                "this plan does not say which step it is for: make it with `penstock plan`, or give "
                "penstock.plan's own result"
            )
        refuse_below_minimum(plan.trace, self.hardware.device_bytes)
        if violations := check(plan.trace, plan, self.hardware):
            raise InvalidPlan(violations)
        scheduled = self._scheduled(plan.trace, plan)
        known = StepKind(plan.trace, plan, scheduled, RECORDINGS, self.hardware, fixed=True)
        self._known[None] = [known]
        self._follow(None, known)

    def schedules(self, name: str | None) -> list[Schedule]:
        """That a step of this name may follow, the likeliest first."""
        return [kind.schedule for kind in self._known.get(name, ())]

    def recording(self, name: str | None) -> Recording | None:
        """For the step of this name that begins; None where it need not be recorded."""
        known = self._known.get(name)
        return (
            Recording(self._options.compress)
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
            self._follow(name, kind)
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
                # The step that makes the optimizer's state is not seen again. The user's own plan goes first.
                made = self._planned(trace, None, wait=not known and _makes_state(recording))
                known.insert(int(bool(known) and known[0].fixed), made)
                if self.plan is None:
                    self._follow(name, known[0])
            return False
        was_wanted = kind.recordings_left > 0
        kind.recordings_left = max(kind.recordings_left - 1, 0)
        grown = kind.has_grown(int(trace.tensor_bytes.sum()))
        if grown:
            self._wanted.discard(name)
        if kind.fixed:
            return False
        if kind.drift is not None and was_wanted and not grown:
            kind.recorded = _settled(kind.recorded, trace)
            if not kind.recordings_left:
                self._plan_again(name, kind, kind.recorded, kind.drift.measured() or kind.hardware)
                kind.recorded = None
            return False
        if kind.recordings_left or grown:
            known[0] = self._planned(trace, kind)
            self._follow(name, known[0])
            return False
        return True

    # -- what drifts ---------------------------------------------------------------------------

    def note(
        self,
        name: str | None,
        kind: StepKind,
        moved: Sequence[Moved],
        step_s: float,
        kernels_s: float,
        clock_s: float,
        operators: int,
    ) -> None:
        """A step of this kind that was not recorded is over: see `Drift.note`. Where something has drifted,
        it is planned again in the background."""
        plan = kind.plan
        if kind.fixed or kind.recordings_left or plan is None or not (plan.evictions or plan.recomputations):
            return
        if kind.joint is not None and not kind.joint.leads:  # it is told of new plans
            return
        if kind.drift is None:
            kind.drift = Drift(kind.trace, plan, kind.hardware)
        kind.drift.note(moved, step_s, kernels_s, clock_s, operators)
        kind.steps += 1
        if self._planning is not None or kind.steps < kind.least_steps:
            return
        if kind.drift.kernels_have_drifted:
            kind.recordings_left = RECORDINGS_OF_DRIFT
        elif (hardware := kind.drift.measured()) is not None:
            self._plan_again(name, kind, kind.trace, hardware)

    def _plan_again(self, name: str | None, kind: StepKind, trace: Trace, hardware: Hardware) -> None:
        """Make a plan in the background; the one in force is followed meanwhile."""
        if self._planning is None:
            self._planning = _Planning(name, kind, lambda: self._better(kind, trace, hardware))

    def _better(self, kind: StepKind, trace: Trace, hardware: Hardware) -> StepKind:
        """The kind of step with a plan for what was measured: a new one, or that in force if it is as good
        still. Called on a thread of its own. Raises PenstockError."""
        assert kind.plan is not None
        fits_all = trace if kind.joint is None else kind.joint.fitting_all(trace)
        plan = self._made(fits_all, hardware, 0, max(planning_s(trace), LEAST_IN_BACKGROUND_S)).plan
        assert plan is not None
        before = replace(kind.plan, trace=fits_all)
        if not check(fits_all, before, hardware):
            predicted = simulate(fits_all, before, hardware)
            if predicted.iteration_s <= plan.predicted_s:
                plan = replace(
                    before,
                    predicted_s=predicted.iteration_s,
                    predicted_peak_bytes=predicted.peak_bytes,
                    lower_bound_s=min(plan.lower_bound_s, predicted.iteration_s),
                )
        made = self._checked(trace, plan, hardware, 0)
        made.least_steps = min(2 * kind.least_steps, MOST_STEPS)
        return made

    def begin_step(self) -> None:
        """Take a plan that was made in the background, here or by another rank, if there is one. Called
        between two steps."""
        self._steps += 1
        planning = self._planning
        if planning is not None and not planning.is_running:
            self._planning = None
            self._was_planned(planning)
        for name, known in self._known.items():
            for kind in known:
                if kind.joint is not None and not kind.joint.leads:
                    self._listen(name, kind, kind.joint)
        for coming in [coming for coming in self._coming if coming.at_step <= self._steps]:
            self._coming.remove(coming)
            self._take(coming.name, coming.kind, coming.made)

    def _was_planned(self, planning: _Planning) -> None:
        """It was planned again in the background."""
        name, kind, made = planning.name, planning.kind, planning.made
        kind.steps, kind.least_steps, kind.drift = 0, min(2 * kind.least_steps, MOST_STEPS), None
        if made is None:
            logger.warning("no new plan could be made, and the one in force is kept: %s", planning.error)
            return
        made.joint, at_step = kind.joint, self._steps
        if made.joint is not None and kind in self._known.get(name, []):
            assert made.plan is not None
            at_step += STEPS_AHEAD
            made.joint.announce(made.trace, made.hardware, made.plan, at_step)
        self._coming.append(_Coming(name, kind, made, at_step))

    def _listen(self, name: str | None, kind: StepKind, joint: Joint) -> None:
        """Whether the rank that leads has planned again for all."""
        try:
            if (agreed := joint.announced()) is None:
                return
            made = self._agreed(kind.trace, agreed, 0)
        except PenstockError as error:
            logger.warning("the other ranks' new plan does not fit here, and the last one is kept: %s", error)
            return
        made.joint = joint
        self._coming.append(_Coming(name, kind, made, agreed.at_step))

    def _take(self, name: str | None, kind: StepKind, made: StepKind) -> None:
        known = self._known.get(name, [])
        if kind not in known:  # it was recorded again meanwhile, and planned
            return
        known[known.index(kind)] = made
        self.replans += 1
        logger.info(
            "rates or kernel times have drifted: a new plan takes %s a step, where the last one was to take "
            "%s. Planned before for %s; now for %s",
            format_seconds(_predicted_s(made)),
            format_seconds(_predicted_s(kind)),
            kind.hardware.in_numbers,
            made.hardware.in_numbers,
        )
        if self._latest.get(name) is kind:
            self._latest[name] = made
        if self.plan is kind.plan:
            self._follow(name, made)

    def close(self) -> None:
        """Wait until nothing is planned any more: no longer than planning may take."""
        if self._planning is not None:
            self._planning.join()
            self._planning = None

    # -- planning ------------------------------------------------------------------------------

    def plan_what_waits(self) -> None:
        """Plan the first step now, where its plan was to wait for the second one."""
        known = self._known.get(None, [])
        for position, kind in enumerate(known):
            latest = self._latest.get(None)
            if (latest is None or latest.plan is None) and kind.plan is None and kind.recordings_left:
                known[position] = self._planned(kind.trace, kind)
                self._follow(None, known[position])

    def latest(self, name: str | None) -> StepKind | None:
        """What the latest step of this name has followed, or the next one will; None before the first."""
        known = self._known.get(name)
        return self._latest.get(name) or (known[0] if known else None)

    def _follow(self, name: str | None, kind: StepKind) -> None:
        self._latest[name] = kind
        self.trace, self.plan, self.hardware = kind.trace, kind.plan, kind.hardware

    def _planned(self, trace: Trace, before: StepKind | None, wait: bool = False) -> StepKind:
        """This kind of step with a plan for what was just recorded; without one yet where it can wait."""
        self.minimum_bytes = max(self.minimum_bytes, minimum_bytes(trace))
        left = RECORDINGS if before is None else before.recordings_left
        hardware = self.hardware if before is None else before.hardware
        trace = _settled(None if before is None else before.trace, trace)
        if wait:
            return StepKind(trace, None, unplanned(trace), RECORDINGS, hardware)
        try:
            kind = self._made_together(trace, hardware, left, planning_s(trace))
            self.refusal = ""
        except PenstockError as error:
            if before is not None and before.plan is not None:
                logger.warning("no better plan could be made, and the one in force is kept: %s", error)
                return replace(before, recordings_left=left)
            logger.warning("no plan could be made, and least recent use decides what moves: %s", error)
            self.refusal = str(error)
            kind = StepKind(trace, None, unplanned(trace), 0, hardware)
        resident.release_free_memory()  # what the solver took
        return kind

    def _made_together(
        self, trace: Trace, hardware: Hardware, recordings_left: int, time_limit_s: float
    ) -> StepKind:
        """A kind of step with the plan of all ranks that run it. Raises PenstockError."""
        joint = None if self._ranks is None else self._ranks.join(trace, hardware)
        if joint is None:
            return self._made(trace, hardware, recordings_left, time_limit_s)

        def make(trace: Trace, hardware: Hardware) -> Plan:
            made = self._made(trace, hardware, 0, time_limit_s).plan
            assert made is not None
            return made

        agreed = joint.agree(make, time_limit_s + WAIT_S)
        if agreed is None:
            logger.warning("no plan came from the other ranks in time: this one plans for itself")
            return self._made(trace, hardware, recordings_left, time_limit_s)
        kind = self._agreed(trace, agreed, recordings_left)
        kind.joint = joint
        return kind

    def _made(self, trace: Trace, hardware: Hardware, recordings_left: int, time_limit_s: float) -> StepKind:
        """A kind of step with a plan. Raises PenstockError."""
        budget_bytes = hardware.device_bytes
        made = make_plan(
            trace,
            hardware,
            self._options.policy,
            device_budget_bytes=budget_bytes - in_flight_bytes(trace, budget_bytes),
            recompute=self._options.recompute,
            compress=len(trace.tensor_density) > 0,
            lossy=self._options.lossy,
            time_limit_s=time_limit_s,
        )
        return self._checked(trace, made, hardware, recordings_left)

    def _agreed(self, trace: Trace, agreed: Agreed, recordings_left: int) -> StepKind:
        """A kind of step with the plan of several ranks. Raises InvalidPlan."""
        assert agreed.plan is not None and agreed.hardware is not None
        return self._checked(trace.with_times(agreed.time_s), agreed.plan, agreed.hardware, recordings_left)

    def _checked(self, trace: Trace, plan: Plan, hardware: Hardware, recordings_left: int) -> StepKind:
        """A kind of step with this plan. Raises InvalidPlan."""
        plan = replace(plan, trace=trace)
        if violations := check(trace, plan, hardware):
            raise InvalidPlan(violations)
        return StepKind(trace, plan, self._scheduled(trace, plan), recordings_left, hardware)


class _Coming(NamedTuple):
    """A new plan, and the step that will be first to follow it."""

    name: str | None
    kind: StepKind
    made: StepKind
    at_step: int


class _Planning:
    """A plan that is made in the background, by a thread that ends with it.

    name, kind   for which
    made         that kind of step with a new plan; None where none could be made
    error        why
    """

    def __init__(self, name: str | None, kind: StepKind, make: Callable[[], StepKind]) -> None:
        self.name, self.kind = name, kind
        self.made: StepKind | None = None
        self.error: Exception | None = None
        self._make = make
        self._thread = threading.Thread(target=self._run, name="penstock-planning", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the system gives no thread
            self.error = error

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        if self.is_running:
            self._thread.join()

    def _run(self) -> None:
        try:
            self.made = self._make()
        except Exception as error:  # whatever it is, the plan in force is good
            self.error = error
        resident.release_free_memory()  # what the solver took


def _settled(before: Trace | None, trace: Trace) -> Trace:
    """The trace, with kernel times of which as little as possible is chance, where the same step was recorded
    before. What disturbed a kernel will not come again there, but somewhere else: kernels share the time of
    the fastest step as their own fastest times do."""
    if before is None or before.kernel_name != trace.kernel_name:
        return trace
    times_s = before.kernel_time_s, trace.kernel_time_s
    fastest_s = np.minimum(*times_s)
    step_s = min(float(kernels_s.sum()) for kernels_s in times_s)
    return trace.with_times(fastest_s * (step_s / max(float(fastest_s.sum()), 1e-9)))


def _predicted_s(kind: StepKind) -> float:
    return kind.plan.predicted_s if kind.plan is not None else 0.0


def _makes_state(recording: Recording) -> bool:
    """Whether the optimizer's state was made in this step."""
    return any(tensor.kind == OPTIMIZER_STATE and not tensor.before for tensor in recording.tensors)


def planning_s(trace: Trace) -> float:
    """How long planning this step may take in a run."""
    least_s, most_s = PLANNING_LIMITS_S
    return min(max(PLANNING_STEPS * trace.ideal_s, least_s), most_s)
