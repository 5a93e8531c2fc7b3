"""Recorded kernels have the times of the plain step, where the host launches and the device follows."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch

from penstock.capture.recorder import make_trace
from penstock.core.trace import Trace
from penstock.runtime import kernel_times
from penstock.runtime.recording import Recording
from penstock.storage.spill import SpillSpace
from tests.support.checked import CheckedDriver, CheckedStream, checked_run

KERNELS = 8


class Counting(CheckedStream):
    synchronized = 0

    def synchronize(self) -> None:
        Counting.synchronized += 1
        super().synchronize()


class Timed(CheckedDriver):
    """Kernels take hours on the device, by its clock, and 10 ms of the host's to launch."""

    kernel_s = 10_000.0
    launch_s = 0.01

    def make_stream(self, name: str = "") -> CheckedStream:
        stream = Counting(self, name or f"stream {len(self._streams)}")
        self._streams.append(stream)
        return stream

    def kernel(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        time.sleep(self.launch_s)
        return super().kernel(operator, args, kwargs)


class Fast(Timed):
    kernel_s = 0.0


def recorded(spill: SpillSpace, driver: type[Timed]) -> tuple[Trace, Recording]:
    with checked_run(spill, 1 << 20, make_driver=driver) as run:
        recording = Recording()
        run.engine.begin_step()
        run.device.begin_step()
        run.clock.begin_step((), recording)
        Counting.synchronized = 0
        tensor = torch.ones(256)
        for _ in range(KERNELS - 1):
            tensor = tensor.mul(2)
        assert Counting.synchronized == 0
        run.device.synchronize()
        recording.take_times()
        run.clock.end_step()
    assert len(recording.kernels) == KERNELS
    return make_trace(recording.kernels, recording.tensors, measured=True), recording


def test_the_host_is_not_counted_where_the_device_is_slower(spill: SpillSpace) -> None:
    trace, recording = recorded(spill, Timed)
    assert trace.ideal_s == pytest.approx(KERNELS * Timed.kernel_s, rel=0.05)
    assert trace.kernel_time_s.tolist() == pytest.approx([Timed.kernel_s] * KERNELS, rel=0.05)
    spans = [(kernel.begun_s, kernel.ended_s) for kernel in recording.kernels]
    assert all(before[1] <= after[0] + 1 for before, after in itertools.pairwise(spans))


def test_the_host_is_what_counts_where_it_is_slower(spill: SpillSpace) -> None:
    trace, _ = recorded(spill, Fast)
    assert trace.kernel_time_s.min() >= Fast.launch_s / 2
    assert trace.ideal_s >= KERNELS * Fast.launch_s


class At:
    """An event."""

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s

    def elapsed_time(self, later: At) -> float:
        return (later.at_s - self.at_s) * 1e3


def test_a_program_counts_where_it_pauses() -> None:
    """Between most kernels of a recorded step the program is slowed down by the recording: on an H200 the
    sum was three times the plain step."""
    kernel = kernel_times.Timed(At(0.0), At(0.01), was_idle=False, waited=False)
    gaps_s = [5e-4] * 4 + [0.5] + [5e-4] * 4
    found = list(kernel_times.times_s([(kernel_times.Launch(gap_s, 1e-3), kernel) for gap_s in gaps_s]))
    assert [took_s for took_s, _ in found] == pytest.approx([0.01] * 9)
    steps_s = sum(step_s for _, step_s in found)
    # Until it goes on; from then on the device.
    assert steps_s == pytest.approx(0.5 + 5 * 1e-3 + 5 * 0.01)
