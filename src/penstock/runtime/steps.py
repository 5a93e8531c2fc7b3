"""The kinds of step of a run: which one a step is, what is recorded of it, and what it follows.

The first steps of a kind are recorded, and planned between two steps. From then on what they take is compared
with what the plan was made for. Where rates have drifted, a new plan is made in the background, and taken
between two steps; where kernel times have, two steps are recorded before. A plan that lasts is looked for
again, once, with more time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from penstock.core.hardware import Hardware
from penstock.core.plan import Plan
from penstock.core.trace import Trace
from penstock.options import PlanOptions
from penstock.runtime.devices import Device, Moved
from penstock.runtime.drift import with_rates_of, without_copies
from penstock.runtime.joint_planning import JointPlanning
from penstock.runtime.recording import Recording
from penstock.runtime.replanning import NewPlan, Replanning
from penstock.runtime.schedule import Schedule
from penstock.runtime.step_planner import StepKind, StepPlanner, fastest
from penstock.units import format_seconds

# So many kinds of step are traced and planned; in others the least recently used tensors leave.
MOST_KINDS = 8

logger = logging.getLogger("penstock")


class StepKinds:
    """The kinds of step that a run has had, by the names that the user gives them, or None.

    planning        what plans may do; where they may compress, recordings sample how many zeros there are
    ranks           that plan together; None: this process plans for itself
    device          that tells what to plan for, and what is the least
    measures        its rates are those that the steps have had, as soon as these are known

    planner         makes the plans, and `replanning` those in the place of others
    trace, plan     of the latest step that followed a plan; None before there is a trace
    hardware        the machine that this plan was made for
    replans         times that a step was planned again since rates or kernel times had drifted, or a
                    longer search found a better plan
    recorded        steps that were recorded
    mismatches      steps that ran other operators than any that was traced
    """

    def __init__(
        self,
        planning: PlanOptions,
        hardware: Hardware,
        ranks: JointPlanning | None,
        device: Device,
        measures: bool,
    ) -> None:
        self._measures, self._ranks = measures, ranks
        self.planner = StepPlanner(planning, ranks, device)
        self.replanning = Replanning(self.planner)
        self.planning = planning
        self.hardware = self._at_first = hardware
        self._known: dict[str | None, list[StepKind]] = {}  # the likeliest first
        self._latest: dict[str | None, StepKind] = {}  # that a step of this name has followed
        self._wanted: set[str | None] = set()  # to be recorded
        self.trace: Trace | None = None
        self.plan: Plan | None = None
        self.recorded = 0
        self.mismatches = 0
        self.replans = 0

    def follow_given(self, plan: Plan) -> None:
        """Follow the user's own plan. Raises InvalidArgument, InvalidPlan, BudgetTooSmall."""
        kind = self.planner.given(plan, self.hardware)
        self._known[None] = [kind]
        self._follow(None, kind)

    def _follow(self, name: str | None, kind: StepKind) -> None:
        self._latest[name] = kind
        self.trace, self.plan, self.hardware = kind.trace, kind.plan, kind.hardware

    def begin_step(self) -> None:
        """Follow plans that were made again meanwhile."""
        kinds = [kind for known in self._known.values() for kind in known]
        for new in self.replanning.begin_step(kinds, 0 if self._ranks is None else self._ranks.steps):
            for name, known in self._known.items():
                if new.before in known:  # else it was recorded again meanwhile, and planned
                    known[known.index(new.before)] = new.after
                    self._replaced(name, new)

    def _replaced(self, name: str | None, new: NewPlan) -> None:
        self.replans += 1
        logger.info(
            "%s: a new plan takes %s a step, where the last one was to take %s. Planned before for %s; now "
            "for %s",
            new.why,
            format_seconds(new.after.plan.predicted_step_s if new.after.plan is not None else 0.0),
            format_seconds(new.before.plan.predicted_step_s if new.before.plan is not None else 0.0),
            new.before.hardware.in_numbers,
            new.after.hardware.in_numbers,
        )
        if self._latest.get(name) is new.before:
            self._latest[name] = new.after
        if self.plan is new.before.plan:
            self._follow(name, new.after)

    def step_ran(self, has_collectives: bool) -> None:
        """The operators of a step are over."""
        if self._ranks is not None:
            self._ranks.steps += has_collectives

    def end_step(self) -> None:
        """What there was to plan for a step is planned."""
        if self._ranks is not None:
            self._ranks.end_step()

    def close(self) -> None:
        self.replanning.close()
        if self._ranks is not None:
            self._ranks.close()

    def schedules(self, name: str | None) -> list[Schedule]:
        """That a step of this name may follow, the likeliest first."""
        return [kind.schedule for kind in self._known.get(name, ())]

    def recording(self, name: str | None) -> Recording | None:
        """For the step of this name that begins; None where it need not be recorded."""
        known = self._known.get(name)
        is_wanted = not known or known[0].recordings_left or name in self._wanted
        return Recording(self.planning.compress) if is_wanted else None

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
                "a step ran other operators than those that were traced: the rest of it followed no plan, "
                "and the least recently used tensors left first; the next one like it is planned"
            )
        return kind

    def record(
        self,
        name: str | None,
        kind: StepKind | None,
        recording: Recording,
        trace: Trace,
        moved: Sequence[Moved],
        step_s: float,
    ) -> bool:
        """Plan for a step that was recorded. Whether its kind's first steps are over.

        kind    as `followed` said
        trace   of the recording, or the next step's where this one made the optimizer's state
        moved   in this step
        """
        hardware = self.hardware if kind is None else kind.hardware
        if self._measures:
            hardware = with_rates_of(hardware, moved, step_s)
            kernels = [(record.begun_s, record.ended_s, 0) for record in recording.kernels]
            trace = without_copies(trace, kernels, moved, hardware)
        known = self._known.setdefault(name, [])
        self.recorded += 1
        if kind is None:
            if len(known) < MOST_KINDS:
                self._wanted.discard(name)
                made = self.planner.recorded(trace, hardware, None)
                # The user's own plan goes first.
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
            kind.recorded = fastest(kind.recorded, trace)
            if not kind.recordings_left:
                self.replanning.recorded(kind)
            return False
        if kind.recordings_left or grown:
            known[0] = self.planner.recorded(trace, hardware, kind)
            self._follow(name, known[0])
            return False
        return True

    def figures(self, kind: StepKind) -> dict[str, Any]:
        """What was predicted for steps of this kind, for a report, by name."""
        found = kind.figures()
        first = "probed" if self._measures else "given"
        sources = {
            link: first if rate == self._at_first.rate_bytes_per_s(link) else "steps"
            for link, rate in found["planned_rates_bytes_per_s"].items()
        }
        return {**found, "planned_rates_from": sources}

    def latest(self, name: str | None) -> StepKind | None:
        """What the latest step of this name has followed, or the next one will; None before the first."""
        known = self._known.get(name)
        return self._latest.get(name) or (known[0] if known else None)
