"""Plans again in the background: where rates or kernel times have drifted, and once with more time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from penstock.errors import PenstockError
from penstock.runtime import resident
from penstock.runtime.drift import Drift
from penstock.runtime.measured import MeasuredStep
from penstock.runtime.step_planner import MOST_STEPS, StepKind, StepPlanner

# Steps to record where kernel times have drifted.
RECORDINGS_OF_DRIFT = 2

# For a step whose plan has been in force for so long, a better one is looked for, once, with so much time.
# That may slow training by a few seconds.
LASTS_S, SEARCH_S = 200.0, 10.0

# Plans that are so near to the proven bound are not.
NEAR_BOUND = 1.01

DRIFTED = "rates or kernel times have drifted"
SEARCHED = "a longer search has found a better plan"

# Ranks follow a new plan this many common steps after it was announced: by then all of them have read it.
STEPS_AHEAD = 2

logger = logging.getLogger("penstock")


class NewPlan(NamedTuple):
    """A kind of step, the same kind with a new plan, how many steps all ranks have run when it is first
    followed, and why."""

    before: StepKind
    after: StepKind
    at_step: int
    why: str = DRIFTED


class Replanning:
    """Makes new plans in the background, one at a time. They come into force between two steps."""

    def __init__(self, planner: StepPlanner) -> None:
        self._planner = planner
        self._thread: _Planning | None = None
        self._ready: list[NewPlan] = []

    def add_step(self, kind: StepKind, step: MeasuredStep, step_s: float) -> None:
        """An unrecorded step of this kind has ended: plan again where something has drifted."""
        plan = kind.plan
        if kind.fixed or kind.recordings_left or plan is None or not (plan.evictions or plan.recomputations):
            return
        if kind.joint is not None and not kind.joint.leads:  # the rank that does announces new plans
            return
        if kind.drift is None:
            kind.drift = Drift(kind.trace, plan, kind.hardware)
        kind.drift.add_step(step.moved, step_s, step_s - step.stall_s, step.clock_s, step.operators)
        kind.steps += 1
        kind.in_force_s += step_s
        if kind.joint is None and (calibrated := kind.drift.calibrate(kind.trace)) is not None:
            kind.in_whole_steps, kind.hardware = calibrated
        if self._thread is not None or kind.steps < kind.least_steps:
            return
        if kind.drift.kernels_have_drifted:
            kind.recordings_left = RECORDINGS_OF_DRIFT
        elif (hardware := kind.drift.measured_hardware()) is not None or kind.drift.copies_cost_more:
            self._begin(kind, lambda: self._planner.again(kind, kind.trace, hardware or kind.hardware))
        elif kind.in_force_s >= LASTS_S and not kind.searched:
            kind.searched = True
            if plan.predicted_step_s > NEAR_BOUND * plan.lower_bound_s:
                search = partial(self._planner.again, kind, kind.trace, kind.hardware, SEARCH_S)
                self._begin(kind, search, SEARCHED)

    def recorded(self, kind: StepKind) -> None:
        """Enough steps of a kind with drifted kernel times were recorded: plan again."""
        trace, drift = kind.recorded, kind.drift
        assert trace is not None and drift is not None
        kind.recorded = None
        if self._thread is None:
            hardware = drift.measured_hardware() or kind.hardware
            self._begin(kind, lambda: self._planner.again(kind, trace, hardware))

    def _begin(self, kind: StepKind, make: Callable[[], StepKind], why: str = DRIFTED) -> None:
        """Start planning. The plan in force is followed meanwhile."""
        self._thread = _Planning(kind, make, why)
        try:
            self._thread.start()
        except RuntimeError as error:  # the system gives no thread
            self._thread.error = error

    def begin_step(self, kinds: Sequence[StepKind], common_steps: int) -> list[NewPlan]:
        """The plans that come into force with this step, made here or by another rank. Called between two
        steps.

        kinds          all known kinds of step
        common_steps   that all ranks have run
        """
        if self._thread is not None and not self._thread.is_alive():
            planned, self._thread = self._thread, None
            self._take(planned, planned.kind in kinds, common_steps)
        for kind in kinds:
            if kind.joint is not None and not kind.joint.leads:
                self._ask_leader(kind)
        due = [plan for plan in self._ready if plan.at_step <= common_steps]
        self._ready = [plan for plan in self._ready if plan.at_step > common_steps]
        return due

    def _take(self, planned: _Planning, is_known: bool, at_step: int) -> None:
        """Take the result of a planning thread."""
        kind, made = planned.kind, planned.made
        kind.steps, kind.least_steps, kind.drift = 0, min(2 * kind.least_steps, MOST_STEPS), None
        if made is None:
            logger.warning("no new plan could be made, and the one in force is kept: %s", planned.error)
            return
        if planned.why == SEARCHED:
            made.searched = True
            if made.keeps_plan:
                return
        if made.joint is not None and is_known:
            assert made.plan is not None
            at_step += STEPS_AHEAD
            made.joint.announce(made.trace, made.hardware, made.plan, at_step)
        self._ready.append(NewPlan(kind, made, at_step, planned.why))

    def _ask_leader(self, kind: StepKind) -> None:
        """Take a new plan that the leading rank has announced."""
        try:
            if (announced := self._planner.announced(kind)) is not None:
                self._ready.append(NewPlan(kind, *announced))
        except PenstockError as error:
            logger.warning("the other ranks' new plan does not fit here, and the last one is kept: %s", error)

    def close(self) -> None:
        """Wait for the planning thread, no longer than planning may take."""
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()
        self._thread = None


class _Planning(threading.Thread):
    """Makes a plan for a kind of step.

    why     it is made
    made    that kind of step with the plan; None where none could be made
    error   why
    """

    def __init__(self, kind: StepKind, make: Callable[[], StepKind], why: str) -> None:
        super().__init__(name="penstock-planning", daemon=True)
        self.kind, self._make, self.why = kind, make, why
        self.made: StepKind | None = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.made = self._make()
        except Exception as error:  # whatever it is, the plan in force is good
            self.error = error
        resident.release_free_memory()  # what the solver took
