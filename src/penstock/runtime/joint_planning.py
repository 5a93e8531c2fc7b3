"""One plan for ranks that run the same step and wait for each other in its collectives.

The model: ranks that follow one plan wait for the same copies at the same kernels, so that their waits
overlap; beyond that, a step takes as long as on the slowest rank. The recorded time of a collective includes
the wait for the other ranks: only the rank that came last shows how long the collective itself takes.

The ranks exchange their traces through the process group's store. The first of those that ran the same
kernels leads: it plans for the slowest of them, and the others follow its plan.

Which ranks plan for a step depends on each one's earlier steps. So each says when a step with collectives is
over, whether it plans for it or not, and none waits for a trace that does not come.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch.distributed

from penstock.core import files
from penstock.core.columns import BoolArray, FloatArray, IntArray
from penstock.core.hardware import CODERS, LINKS, Hardware
from penstock.core.job import restart_id
from penstock.core.plan import Plan
from penstock.core.trace import Trace
from penstock.errors import InvalidFile, PenstockError
from penstock.runtime.collectives import collective_kernels
from penstock.runtime.ranks import WAIT_S, shared_store, wait_until

logger = logging.getLogger("penstock")

_runs = itertools.count()


@dataclass(frozen=True)
class _Recorded:
    """What one rank has recorded: columns of its trace, and the machine it would plan for."""

    kernel_time_s: FloatArray
    kernel_workspace_bytes: IntArray
    tensor_bytes: IntArray
    tensor_birth: IntArray
    tensor_death: IntArray
    tensor_movable: BoolArray
    hardware: Hardware


@dataclass(frozen=True)
class JointPlan:
    """A plan for several ranks, as the leading rank publishes it; or why it could make none.

    step      digest of the step that it is for
    time_s    [K] kernel times that it was made for
    error     why there is no plan
    at_step   first step that follows it; 0: the next one
    """

    step: str
    time_s: FloatArray = field(default_factory=lambda: np.zeros(0))
    hardware: Hardware | None = None
    plan: Plan | None = None
    error: str = ""
    at_step: int = 0


def _waiting_kernels(trace: Trace) -> BoolArray:
    """[K] kernels whose times include waits for other ranks: collectives, and the first kernel that uses the
    results of one."""
    waits = collective_kernels(trace)
    for kernel in np.flatnonzero(waits).tolist():
        for tensor in trace.outputs[kernel].tolist():
            uses = trace.uses[tensor]
            later = uses[np.searchsorted(uses, kernel, side="right") :]
            waits[later[:1]] = True
    return waits


def _joint_trace(trace: Trace, every: Sequence[_Recorded]) -> Trace:
    """A trace for all ranks together. It needs as much memory as the rank that needs most: shards can differ
    in size, and storages that a collective used may live a little longer.

    Kernels take as long as on the slowest rank; those that wait for other ranks, as on the rank that waited
    least.
    """
    times_s = np.stack([recorded.kernel_time_s for recorded in every])
    waits = _waiting_kernels(trace)
    slowest = int(times_s[:, ~waits].sum(axis=1).argmax())
    return replace(
        trace.with_times(np.where(waits, times_s.min(axis=0), times_s[slowest])),
        kernel_workspace_bytes=np.max([recorded.kernel_workspace_bytes for recorded in every], axis=0),
        tensor_bytes=np.max([recorded.tensor_bytes for recorded in every], axis=0),
        tensor_birth=np.min([recorded.tensor_birth for recorded in every], axis=0),
        tensor_death=np.max([recorded.tensor_death for recorded in every], axis=0),
        tensor_movable=np.all([recorded.tensor_movable for recorded in every], axis=0),
    )


def _slowest_machine(machines: Sequence[Hardware]) -> Hardware:
    """A machine with the least memory and the lowest rates of these."""
    first = machines[0]
    factors = {
        link: min(rates) / first.rate_bytes_per_s(link)
        for link in (*LINKS, *CODERS)
        if min(rates := [machine.rate_bytes_per_s(link) for machine in machines]) > 0
    }
    return replace(
        first.scaled(factors),
        host_bytes=min(machine.host_bytes for machine in machines),
        disk_bytes=min(machine.disk_bytes for machine in machines),
        copy_overhead_s=max(machine.copy_overhead_s for machine in machines),
        byte_overhead_s=max(machine.byte_overhead_s for machine in machines),
    )


class JointStep:
    """A step that several ranks have recorded, and plan together.

    leads             whether this rank makes the plans, which the others follow
    recordings_left   steps that these ranks are still to record: as many as any of them wants
    """

    def __init__(
        self, store: Any, key: str, step: str, trace: Trace, recorded: list[str], recordings_left: int
    ) -> None:
        self._store, self._key, self._step, self._trace = store, key, step, trace
        self._recorded = recorded  # keys of what each rank recorded, where this one leads
        self.recordings_left = recordings_left
        self.leads = bool(recorded)
        self._announced = 0

    def agree(self, make: Callable[[Trace, Hardware], Plan], limit_s: float) -> JointPlan | None:
        """The plan of these ranks: the leading one makes it with ``make``, and publishes it. None: it did not
        within ``limit_s``. Raises PenstockError where it could make none."""
        if self.leads:
            try:
                every = [
                    files.decoded(_Recorded, self._store.get(key), "the record of another rank")
                    for key in self._recorded
                ]
                self._trace = _joint_trace(self._trace, every)
                hardware = _slowest_machine([recorded.hardware for recorded in every])
                plan = make(self._trace, hardware)
            except Exception as error:
                self._store.set(self._key, files.encoded(JointPlan(self._step, error=str(error))))
                raise
            return self._publish(self._key, self._trace, hardware, plan)
        if not wait_until(lambda: self._store.check([self._key]), limit_s):
            return None
        return self._read(self._key)

    def joint_trace(self, trace: Trace) -> Trace:
        """The trace of all ranks, with the kernel times that this one, which leads, has recorded since."""
        return self._trace.with_times(trace.kernel_time_s)

    def announce(self, trace: Trace, hardware: Hardware, plan: Plan, at_step: int) -> None:
        """Publish a new plan, and the first step that is to follow it."""
        self._publish(f"{self._key}/{self._announced}", trace, hardware, plan, at_step)
        self._announced += 1

    def announced(self) -> JointPlan | None:
        """The next plan that the leading rank has announced, if there is one."""
        key = f"{self._key}/{self._announced}"
        try:
            if not self._store.check([key]):
                return None
        except RuntimeError:  # its server has ended, and with it all that could be announced
            return None
        self._announced += 1
        return self._read(key)

    def _publish(self, key: str, trace: Trace, hardware: Hardware, plan: Plan, at_step: int = 0) -> JointPlan:
        agreed = JointPlan(
            self._step, trace.kernel_time_s, hardware, replace(plan, trace=None), at_step=at_step
        )
        self._store.set(key, files.encoded(agreed))
        return agreed

    def _read(self, key: str) -> JointPlan:
        agreed = files.decoded(JointPlan, self._store.get(key), "the plan of another rank")
        if agreed.error:
            raise PenstockError(agreed.error)
        if agreed.step != self._step or len(agreed.time_s) != self._trace.kernels or agreed.plan is None:
            raise InvalidFile("the plan of another rank is for another step: start all ranks again")
        return agreed


class JointPlanning:
    """The ranks of a run that plan together.

    options   what must be equal on all ranks besides the trace: budget, policy, what plans may do
    steps     that ran collectives, and thus on all ranks
    """

    def __init__(self, store: Any, options: str) -> None:
        self._rank, self._ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._options = options
        self._store = store
        self._key = f"penstock/plans/{restart_id()}/{next(_runs)}"
        self.steps = self._said = 0
        self._is_over = self._differed = False

    def end_step(self) -> None:
        """Tell the others that this rank has recorded all that it plans for in the steps so far."""
        if self._said < self.steps and not self._is_over:
            self._say(self.steps)

    def close(self) -> None:
        """This rank plans no more with the others."""
        if not self._is_over:
            self._is_over = True
            self._say(sys.maxsize)

    def _say(self, steps: int) -> None:
        self._said = steps
        with contextlib.suppress(RuntimeError):  # its server has ended, and with it all who could ask
            self._store.set(f"{self._key}/ended/{self._rank}", str(steps))

    def join(self, trace: Trace, hardware: Hardware, recordings_left: int) -> JointStep | None:
        """Find the ranks that recorded the same step. None: this rank plans for itself.

        recordings_left   steps like this one that this rank is still to record
        """
        if self._is_over or not collective_kernels(trace).any():
            return None
        key = f"{self._key}/{self.steps}"
        step = self._digest(trace)
        recorded = _Recorded(
            trace.kernel_time_s,
            trace.kernel_workspace_bytes,
            trace.tensor_bytes,
            trace.tensor_birth,
            trace.tensor_death,
            trace.tensor_movable,
            hardware,
        )
        try:
            self._store.set(f"{key}/recorded/{self._rank}", files.encoded(recorded))
            self._store.set(f"{key}/step/{self._rank}", f"{step} {recordings_left}")
            self.end_step()
            if not wait_until(self._all_have_ended, WAIT_S):
                self._store.delete_key(f"{key}/step/{self._rank}")  # who comes later need not wait for a plan
                self._end(f"not all of {self._ranks} ended the step within {WAIT_S:.0f} s")
                return None
            steps = {rank: f"{key}/step/{rank}" for rank in range(self._ranks)}
            said = {
                rank: self._store.get(step_key).decode().split()
                for rank, step_key in steps.items()
                if self._store.check([step_key])
            }
        except RuntimeError as error:  # of the store
            self._end(str(error))
            return None
        alike = {rank: int(left) for rank, (other, left) in said.items() if other == step}
        if len(alike) < self._ranks and not self._differed:
            self._differed = True
            logger.info(
                "this rank plans for a step with %d of %d others: %d ran other operators, and %d had nothing "
                "to plan",
                len(alike) - 1,
                self._ranks - 1,
                len(said) - len(alike),
                self._ranks - len(said),
            )
        if len(alike) == 1:
            return None
        keys = [f"{key}/recorded/{rank}" for rank in alike] if min(alike) == self._rank else []
        return JointStep(
            self._store, f"{key}/plan/{step}", step, trace, keys, recordings_left=max(alike.values())
        )

    def _all_have_ended(self) -> bool:
        """Whether all ranks have ended this step."""
        keys = [f"{self._key}/ended/{rank}" for rank in range(self._ranks)]
        return self._store.check(keys) and all(
            int(ended) >= self.steps for ended in self._store.multi_get(keys)
        )

    def _digest(self, trace: Trace) -> str:
        """Hash of what must be equal on all ranks for one plan to fit them."""
        found = hashlib.sha256(self._options.encode())
        found.update("\n".join(trace.kernel_name).encode())
        for values in (
            trace.inputs.starts,
            trace.inputs.values,
            trace.outputs.starts,
            trace.outputs.values,
            trace.tensor_persistent,
        ):
            found.update(np.ascontiguousarray(values).tobytes())
        return found.hexdigest()

    def _end(self, why: str) -> None:
        self.close()
        logger.warning("this rank plans for itself, not together with the others: %s", why)


def open_joint_planning(options: str) -> JointPlanning | None:
    """None where there is no process group, or one rank."""
    store = shared_store()
    return None if store is None else JointPlanning(store, options)
