"""What kernels and steps take, on each device: see penstock.runtime.devices.Meter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock import _native
from penstock._native import DeviceMemory
from penstock.runtime import arena
from penstock.runtime.devices import Meter
from penstock.runtime.devices.driver import Driver
from penstock.runtime.devices.reserved import ReservedMemory
from penstock.runtime.kernel_times import Timed


class ArenaMeter(Meter):
    def __init__(self, memory: DeviceMemory, faults_before: int) -> None:
        self._memory, self._faults_before = memory, faults_before
        self._peak_bytes = 0

    @property
    def unplanned_accesses(self) -> int:
        return int(arena.stats().faults - self._faults_before)

    def begin_step(self) -> None:
        self._peak_bytes = 0
        _native.arena_own_faults()
        _native.arena_reset_peak()

    def peak_bytes(self) -> int:
        peak_bytes = arena.stats().peak_in_memory_bytes + self._memory.unmanaged_bytes
        self._peak_bytes = max(self._peak_bytes, peak_bytes)
        return self._peak_bytes

    def begin_kernel(self) -> None:
        self.peak_bytes()
        _native.arena_reset_peak()

    def workspace_bytes(self) -> int:
        stats = arena.stats()  # not in use: a copy that ends releases what died before
        return stats.peak_new_bytes - stats.new_bytes


class AllocatorMeter(Meter):
    """emptied_bytes   of what has left since the kernel began that is measured: it is no workspace"""

    unplanned_accesses = 0  # they raise

    def __init__(self, driver: Driver, reserved: ReservedMemory) -> None:
        self._driver, self._reserved = driver, reserved
        self.emptied_bytes = 0
        self._before_bytes = 0  # when the kernel that is measured began
        self._begun: Any = None  # of the kernel that is measured: an event
        self._ended: Any = None  # of the one before
        self._was_idle = True
        self._step_begun = self._timed_event()

    def begin_step(self) -> None:
        self._reserved.begin_step()
        self._step_begun = self._timed_event()

    def end_step(self) -> Callable[[], float]:
        # Nothing of the runtime waits for this: whoever uses memory again waits for what used it before, on
        # the device. So the next step is launched while this one runs.
        begun, ended = self._step_begun, self._timed_event()

        def took_s() -> float:
            ended.synchronize()
            return float(begun.elapsed_time(ended)) / 1e3

        return took_s

    def peak_bytes(self) -> int:
        return self._reserved.measure()

    def begin_kernel(self) -> None:
        self._reserved.measure()
        self._driver.reset_peaks()
        self._before_bytes = self._driver.memory().allocated_bytes
        self.emptied_bytes = 0
        self._was_idle = self._ended is None or self._ended.query()
        self._begun = self._timed_event()

    def end_kernel(self) -> Timed:
        # What the allocator counts is the host's doing: no kernel need be over for it.
        reached = self._begun.query()
        self._ended = self._timed_event()
        return Timed(self._begun, self._ended, self._was_idle and reached, not self._was_idle and reached)

    def _timed_event(self) -> Any:
        event = self._driver.make_event(timed=True)
        event.record(self._driver.current_stream())
        return event

    def workspace_bytes(self) -> int:
        memory = self._driver.memory()
        after_bytes = memory.allocated_bytes + self.emptied_bytes
        return max(0, memory.peak_allocated_bytes - max(after_bytes, self._before_bytes))
