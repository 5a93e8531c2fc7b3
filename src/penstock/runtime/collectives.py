"""Collectives in flight: what they read and write stays on the device until they are done."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from penstock._native import KernelClock
from penstock.capture.operators import COLLECTIVES, Operator
from penstock.core.columns import BoolArray
from penstock.core.memory_profile import minimum_bytes
from penstock.core.trace import Trace
from penstock.runtime.devices import Device
from penstock.runtime.storages import ManagedStorage

# The default timeout of process groups.
TIMEOUT_S = 1800.0
_POLL_S = 1e-4

# Gloo's Work of these is completed by `wait` alone, and must not be waited for twice. That of reduce_scatter,
# whose `wait` writes the results, never says that it is. Gloo has the tensors of CPUs.
_COMPLETED_BY_WAIT, _NEVER_COMPLETED = ("send", "recv"), ("reduce_scatter",)

_BUDGET_SHARE = 8  # collectives in flight get one part in eight of the budget, at most


@dataclass(eq=False)
class _InFlight:
    """A collective in flight.

    storages   that it reads and writes
    writes     that it writes: the program uses them only after it has waited for the collective
    work       a torch.distributed.Work whose `is_completed` can be relied on; None where there is none
    is_silent  its work is completed only when the program waits for it
    """

    storages: list[ManagedStorage]
    writes: list[ManagedStorage]
    work: Any
    is_silent: bool = False

    @property
    def is_done(self) -> bool:
        """False also where that is not known."""
        if self.work is not None and self.work.is_completed():
            return True
        return bool(self.writes) and all(managed.storage() is None for managed in self.writes)


def collective_kernels(trace: Trace) -> BoolArray:
    """[K] whether a kernel is a collective."""
    names = tuple(f"{namespace}::" for namespace in COLLECTIVES)
    return np.array([name.startswith(names) for name in trace.kernel_name], dtype=np.bool_)


def in_flight_bytes(trace: Trace, budget_bytes: int) -> int:
    """Bytes that a plan leaves free for collectives in flight: those of the largest one in the trace, or as
    many as the step can spare."""
    largest = max(
        (
            int(trace.tensor_bytes[np.union1d(trace.inputs[kernel], trace.outputs[kernel])].sum())
            for kernel in np.flatnonzero(collective_kernels(trace)).tolist()
        ),
        default=0,
    )
    return max(min(largest, budget_bytes // _BUDGET_SHARE, budget_bytes - minimum_bytes(trace)), 0)


class Collectives:
    """The collectives in flight. The engine's lock is held.

    allowed_bytes   most that they may hold on the device when memory is short; beyond it `after_launch` waits
    launched        whether this step has launched one
    """

    def __init__(self, device: Device, budget_bytes: int, kernels: KernelClock) -> None:
        self._device, self._kernels = device, kernels
        self._budget_bytes = budget_bytes
        self._flights: list[_InFlight] = []
        self._held: list[ManagedStorage] = []  # for the one that is being launched
        self.allowed_bytes = 0
        self.launched = False

    def follow(self, planned_bytes: int) -> None:
        """A plan that uses ``planned_bytes`` of the budget is in force; 0: none is."""
        budget_bytes = self._budget_bytes
        self.allowed_bytes = budget_bytes - planned_bytes if planned_bytes else budget_bytes // _BUDGET_SHARE

    @property
    def _bytes(self) -> int:
        return sum(managed.size_bytes for flight in self._flights for managed in flight.storages)

    def before_launch(self, used: list[ManagedStorage], written: list[ManagedStorage]) -> None:
        """Hold the storages of a collective that is to be launched. Its threads access them by system calls,
        which fail on an evicted or protected page; an instruction would fault and bring it back."""
        for managed in used:
            self._device.change_pins(managed, +1, managed in written)
            self._held.append(managed)

    def launch_failed(self) -> None:
        """The launch failed: release its storages."""
        while self._held:
            self._device.change_pins(self._held.pop(), -1)

    def after_launch(
        self,
        operator: Operator,
        result: Any,
        used: Iterable[ManagedStorage],
        written: list[ManagedStorage],
        made: list[ManagedStorage],
    ) -> None:
        """A collective has returned.

        used, written   storages of its arguments
        made            of its results. What it allocated is held already
        """
        self.launched = True
        used = list(dict.fromkeys(used))
        fresh = [managed for managed in made if managed not in used]
        flight = _InFlight(used + fresh, written or fresh, _work_of(result))
        if _is_of_cpu(flight.storages):
            flight.is_silent = any(name in operator.name for name in _COMPLETED_BY_WAIT)
            if any(name in operator.name for name in _NEVER_COMPLETED):
                flight.work = None
        for managed in flight.storages:
            managed.pins += 1
        self._held.clear()  # they are held until it is done
        self._flights.append(flight)
        self._kernels.in_flight = True
        while (size_bytes := self._bytes) > self.allowed_bytes:
            self._device.poll()
            if self._device.in_memory_bytes() + size_bytes <= self._budget_bytes or not self.wait():
                break

    def release_done(self, used: list[ManagedStorage]) -> None:
        """Release the collectives that are done: also those whose results the next kernel uses."""
        for flight in self._flights[:]:
            if flight.is_done or any(managed in used for managed in flight.writes):
                self._flights.remove(flight)
                for managed in flight.storages:
                    managed.pins -= 1
                    self._device.change_pins(managed, -1)
        self._kernels.in_flight = bool(self._flights)

    def wait(self) -> bool:
        """Wait until a collective is done. False: none has a Work that tells, or all take too long."""
        deadline_s = time.monotonic() + TIMEOUT_S
        waitable = [flight for flight in self._flights if flight.work is not None and not flight.is_silent]
        before = len(self._flights)
        while waitable and time.monotonic() < deadline_s:
            self.release_done([])
            if len(self._flights) < before:
                return True
            time.sleep(_POLL_S)
        return False


def _is_of_cpu(used: list[ManagedStorage]) -> bool:
    return any(storage.device.type == "cpu" for managed in used if (storage := managed.storage()) is not None)


def _work_of(result: Any) -> Any:
    """The torch.distributed.Work among the results of a collective of torch.ops.c10d."""
    for value in result if isinstance(result, tuple) else (result,):
        if isinstance(value, torch.ScriptObject):
            return torch.distributed.Work.unbox(value)
    return None
