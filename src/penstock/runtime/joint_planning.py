"""One plan for ranks that run the same step and wait for each other in its collectives.

The model: ranks that follow one plan wait for the same copies at the same kernels, so that their waits
overlap; beyond that, a step takes as long as on the slowest rank. The recorded time of a collective includes
the wait for the other ranks: only the rank that came last shows how long the collective itself takes.

The ranks exchange their traces through the process group's store. The first of those that ran the same
kernels leads: it plans for the slowest of them, and the others follow its plan.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
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

    leads   whether this rank makes the plans, which the others follow
    """

    def __init__(self, store: Any, key: str, step: str, trace: Trace, recorded: list[str]) -> None:
        self._store, self._key, self._step, self._trace = store, key, step, trace
        self._recorded = recorded  # keys of what each rank recorded, where this one leads
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
            except PenstockError as error:
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
    """The ranks of a run that plan together; each records the same steps in the same order.

    options   what must be equal on all ranks besides the trace: budget, policy, what plans may do
    """

    def __init__(self, store: Any, options: str) -> None:
        self._rank, self._ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._options = options
        self._store = store
        self._key = f"penstock/plans/{restart_id()}/{next(_runs)}"
        self._rounds = itertools.count()
        self._is_over = False

    def join(self, trace: Trace, hardware: Hardware) -> JointStep | None:
        """Find the ranks that recorded the same step. None: this rank plans for itself."""
        if self._is_over or not collective_kernels(trace).any():
            return None
        key = f"{self._key}/{next(self._rounds)}"
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
        ranks = range(self._ranks)
        try:
            self._store.set(f"{key}/recorded/{self._rank}", files.encoded(recorded))
            self._store.set(f"{key}/step/{self._rank}", step)
            steps = [f"{key}/step/{rank}" for rank in ranks]
            if not wait_until(lambda: self._store.check(steps), WAIT_S):
                self._end(f"not all of {self._ranks} recorded a step within {WAIT_S:.0f} s")
                return None
            alike = [rank for rank in ranks if self._store.get(steps[rank]).decode() == step]
        except RuntimeError as error:  # of the store
            self._end(str(error))
            return None
        keys = [f"{key}/recorded/{rank}" for rank in alike] if alike[0] == self._rank else []
        return JointStep(self._store, f"{key}/plan/{step}", step, trace, keys)

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
        self._is_over = True
        logger.warning("this rank plans for itself, not together with the others: %s", why)


def open_joint_planning(options: str) -> JointPlanning | None:
    """None where there is no process group, or one rank."""
    store = shared_store()
    return None if store is None else JointPlanning(store, options)
