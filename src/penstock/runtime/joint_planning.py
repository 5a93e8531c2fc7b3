"""One plan for ranks that run the same step and wait for each other in its collectives.

The model: ranks that carry out one plan wait for the same copies at the same places, so that their waits
fall together; beyond that the step takes what it takes on the slowest of them. What a rank records of a
collective includes that it waited for the others: only the rank that came last shows how long the collective
itself takes.

The ranks exchange what they recorded through the process group's store. The first of those that ran the same
kernels plans, for the slowest of them; the others carry its plan out.
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
from penstock.core.job import attempt
from penstock.core.plan import Plan
from penstock.core.trace import Trace
from penstock.errors import InvalidFile, PenstockError
from penstock.runtime.collectives import collective_kernels
from penstock.runtime.ranks import WAIT_S, shared_store, wait_until

logger = logging.getLogger("penstock")

_runs = itertools.count()


@dataclass(frozen=True)
class _Recorded:
    """A step as a rank has recorded it, with columns of its trace, and the machine it would plan for."""

    kernel_time_s: FloatArray
    kernel_workspace_bytes: IntArray
    tensor_bytes: IntArray
    tensor_birth: IntArray
    tensor_death: IntArray
    tensor_movable: BoolArray
    hardware: Hardware


@dataclass(frozen=True)
class Agreed:
    """A plan for several ranks; or why there is none.

    step      digest of the step that it is for
    time_s    [K] kernel times that it was made for
    error     why there is none
    at_step   first step that follows it; 0: the next one
    """

    step: str
    time_s: FloatArray = field(default_factory=lambda: np.zeros(0))
    hardware: Hardware | None = None
    plan: Plan | None = None
    error: str = ""
    at_step: int = 0


def _waits(trace: Trace) -> BoolArray:
    """[K] kernels whose times include that the rank waits for others: collectives, and what first touches the
    results of one, before which the program has waited for it."""
    waits = collective_kernels(trace)
    for kernel in np.flatnonzero(waits).tolist():
        for tensor in trace.outputs[kernel].tolist():
            uses = trace.uses[tensor]
            later = uses[np.searchsorted(uses, kernel, side="right") :]
            waits[later[:1]] = True
    return waits


def _joint_trace(trace: Trace, every: Sequence[_Recorded]) -> Trace:
    """A step that takes as long as that of several ranks which wait for each other, and as much memory as
    any of them: sharding leaves some a little less, and storages that a collective used may live a little
    longer.

    Kernels take what they take on the slowest rank, but where a rank waits for others, what they take on the
    one that waited least.
    """
    times_s = np.stack([recorded.kernel_time_s for recorded in every])
    waits = _waits(trace)
    slowest = int(times_s[:, ~waits].sum(axis=1).argmax())
    return replace(
        trace.with_times(np.where(waits, times_s.min(axis=0), times_s[slowest])),
        kernel_workspace_bytes=np.max([recorded.kernel_workspace_bytes for recorded in every], axis=0),
        tensor_bytes=np.max([recorded.tensor_bytes for recorded in every], axis=0),
        tensor_birth=np.min([recorded.tensor_birth for recorded in every], axis=0),
        tensor_death=np.max([recorded.tensor_death for recorded in every], axis=0),
        tensor_movable=np.all([recorded.tensor_movable for recorded in every], axis=0),
    )


def _slowest(machines: Sequence[Hardware]) -> Hardware:
    """A machine that has no more than any of these, and is no faster."""
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
    )


class Joint:
    """A step that several ranks have recorded, and plan together.

    leads   whether this rank makes the plans, and tells the others; they carry them out
    """

    def __init__(self, store: Any, key: str, step: str, trace: Trace, recorded: list[str]) -> None:
        self._store, self._key, self._step, self._trace = store, key, step, trace
        self._recorded = recorded  # keys of what each rank recorded, where this one leads
        self.leads = bool(recorded)
        self._announced = 0

    def agree(self, make: Callable[[Trace, Hardware], Plan], limit_s: float) -> Agreed | None:
        """The plan of all these ranks, which ``make`` makes on the one that leads. None: none came within the
        limit. Raises PenstockError where none could be made."""
        if self.leads:
            try:
                every = [
                    files.decoded(_Recorded, self._store.get(key), "the record of another rank")
                    for key in self._recorded
                ]
                self._trace = _joint_trace(self._trace, every)
                hardware = _slowest([recorded.hardware for recorded in every])
                plan = make(self._trace, hardware)
            except PenstockError as error:
                self._store.set(self._key, files.encoded(Agreed(self._step, error=str(error))))
                raise
            return self._tell(self._key, self._trace, hardware, plan)
        if not wait_until(lambda: self._store.check([self._key]), limit_s):
            return None
        return self._read(self._key)

    def fitting_all(self, trace: Trace) -> Trace:
        """What to plan for on the rank that leads, where it has recorded the step again."""
        return self._trace.with_times(trace.kernel_time_s)

    def announce(self, trace: Trace, hardware: Hardware, plan: Plan, at_step: int) -> None:
        """Tell the others of a plan that was made again, and of the step that will be first to follow it."""
        self._tell(f"{self._key}/{self._announced}", trace, hardware, plan, at_step)
        self._announced += 1

    def announced(self) -> Agreed | None:
        """A plan that the rank which leads has announced since this was asked last."""
        key = f"{self._key}/{self._announced}"
        try:
            if not self._store.check([key]):
                return None
        except RuntimeError:  # its server has ended, and with it all that could be announced
            return None
        self._announced += 1
        return self._read(key)

    def _tell(self, key: str, trace: Trace, hardware: Hardware, plan: Plan, at_step: int = 0) -> Agreed:
        agreed = Agreed(self._step, trace.kernel_time_s, hardware, replace(plan, trace=None), at_step=at_step)
        self._store.set(key, files.encoded(agreed))
        return agreed

    def _read(self, key: str) -> Agreed:
        agreed = files.decoded(Agreed, self._store.get(key), "the plan of another rank")
        if agreed.error:
            raise PenstockError(agreed.error)
        if agreed.step != self._step or len(agreed.time_s) != self._trace.kernels or agreed.plan is None:
            raise InvalidFile("the plan of another rank is for another step: start all ranks again")
        return agreed


class JointPlanning:
    """The ranks of a run that plan together; each records the same steps in the same order.

    options   what else has to be equal for a plan to fit all: budget, policy, liberties
    """

    def __init__(self, store: Any, options: str) -> None:
        self._rank, self._ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._options = options
        self._store = store
        self._key = f"penstock/plans/{attempt()}/{next(_runs)}"
        self._rounds = itertools.count()
        self._is_over = False

    def join(self, trace: Trace, hardware: Hardware) -> Joint | None:
        """Meet the ranks that recorded this step. None: this one plans for itself."""
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
        return Joint(self._store, f"{key}/plan/{step}", step, trace, keys)

    def _digest(self, trace: Trace) -> str:
        """Of what has to be equal in the ranks' traces for one plan to fit them."""
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


def with_ranks(options: str) -> JointPlanning | None:
    """The ranks of the process group; None where there is none, or one rank."""
    store = shared_store()
    return None if store is None else JointPlanning(store, options)
