"""What is noted of the kernels and storages of a step, for a trace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch

from penstock import _native
from penstock.capture.operators import Operator, gives_the_same_bits, storages_in, tensors_in
from penstock.capture.phases import ACTIVATION, FORWARD, INPUT, Phases
from penstock.capture.recorder import KernelRecord, TensorRecord
from penstock.codecs.bitmask import sampled_density
from penstock.runtime.devices import Device
from penstock.runtime.kernel_times import Launch, Timed, times_s
from penstock.runtime.storages import LEAVING, ManagedStorage, Storages
from penstock.runtime.variants import AS_TRACED, Variants


class Recording:
    """The record of one step.

    zeros       sample how many elements of what kernels write are zero
    timed       of kernels that were not over when their call was: the launch, and what the device says
    launched_s  when each kernel was
    """

    def __init__(self, zeros: bool = False) -> None:
        self.zeros = zeros
        self.kernels: list[KernelRecord] = []
        self.tensors: list[TensorRecord] = []
        self.in_memory_bytes: list[int] = []  # after each kernel
        self.timed: list[tuple[Launch, Timed]] = []
        self.launched_s: list[float] = []

    def take_times(self) -> None:
        """Have the kernels' times from the device, which has done all of them."""
        if not self.timed:
            return
        first, begun_s = self.timed[0][1].begun, self.launched_s[0]
        for kernel, (launch, timed), (took_s, time_s) in zip(
            self.kernels, self.timed, times_s(self.timed), strict=True
        ):
            kernel.ended_s = begun_s + first.elapsed_time(timed.ended) / 1e3
            kernel.begun_s = kernel.ended_s - took_s
            kernel.scale(time_s / max(launch.program_s + launch.call_s, 1e-9))


class Recorder:
    """Notes the kernels of a step that is recorded.

    recording   of the step that runs; None where it is not recorded
    """

    def __init__(
        self,
        device: Device,
        kernels: _native.KernelClock,
        storages: Storages,
        variants: Variants,
        phases: Phases,
    ) -> None:
        self._device, self._kernels, self._storages = device, kernels, storages
        self._variants, self._phases = variants, phases
        self.recording: Recording | None = None
        self._resized: set[ManagedStorage] = set()  # in this step, and not used since
        # Of the kernel that ran last:
        self._timed: Timed | None = None
        self._workspace_bytes = 0
        self._repeats = False

    def begin_step(self, recording: Recording | None) -> None:
        """A step begins, which is recorded there."""
        self.recording = recording
        self._resized.clear()
        if recording is not None:
            self._device.synchronize()  # what was launched before is no part of the step
        self._kernels.is_recording = self._storages.reports_all = recording is not None

    def end_step(self) -> None:
        """The step is over: kinds are known for sure."""
        if self.recording is not None:
            for managed in self._kernels.numbered()[: len(self.recording.tensors)]:
                if managed.kind >= 0:
                    self.recording.tensors[managed.index].kind = managed.kind
        self.recording = None
        self._kernels.is_recording = False

    def resized(self, managed: ManagedStorage) -> None:
        """The program has given a storage other memory."""
        if self.recording is not None and self._kernels.in_step:
            self._resized.add(managed)

    def died(self, managed: ManagedStorage) -> None:
        """The storage has: its tensor in the recording ends with the kernel before."""
        if (
            self.recording is not None
            and managed.step == self._kernels.step
            and managed.index < len(self.recording.tensors)
        ):
            # What the kernel itself ends was there while it ran.
            self.recording.tensors[managed.index].death = self._kernels.kernels + managed.in_kernel

    def begin_kernel(self) -> None:
        self._variants.ran = AS_TRACED
        self._device.meter.begin_kernel()

    def end_kernel(self) -> None:
        self._timed = self._device.meter.end_kernel()

    def measure(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any
    ) -> None:
        """The kernel has run: its workspace, whether it can run again, and what it could have run as."""
        self._workspace_bytes = self._device.meter.workspace_bytes()
        self._repeats = gives_the_same_bits(operator, args)
        self._variants.measure(operator, args, kwargs, result)

    def record(
        self,
        facts: Operator,
        result: Any,
        used: list[ManagedStorage],
        written: list[ManagedStorage],
        made: list[ManagedStorage],
        entered_s: float,
        begun_s: float,
        ended_s: float,
    ) -> int:
        """Note the kernel; its workspace, in bytes. Time since the last one is the program's own, and counts
        for this one. The engine's lock is held."""
        recording = self.recording
        assert recording is not None
        kernel = self._kernels.kernels
        # What was resized and is written now is born now.
        resized = self._resized.intersection(used)
        self._resized -= resized
        born = {managed.index for managed in resized if managed in written}
        inputs = tuple(managed.index for managed in used if managed.index not in born)
        new = [managed for managed in made if managed.index not in inputs]
        outputs = tuple(dict.fromkeys(managed.index for managed in (*written, *new)))
        fresh = born | {managed.index for managed in new if managed.birth == kernel}
        for managed in self._kernels.numbered(len(recording.tensors)):
            is_fresh = managed.index in fresh
            recording.tensors.append(
                TensorRecord(
                    managed.size_bytes,
                    ACTIVATION if is_fresh else managed.kind if managed.kind >= 0 else INPUT,
                    not is_fresh,
                    kernel if is_fresh else 0,
                    None,
                    movable=managed.movable,
                )
            )
        phase = self._phases.current()
        for tensor in tensors_in(result):
            for storage in storages_in(tensor):
                for managed in self._storages.track(storage).parts():
                    if managed.index in fresh:
                        recording.tensors[managed.index].itemsize = tensor.element_size()
                        recording.tensors[managed.index].float32 = tensor.dtype is torch.float32
        if recording.zeros:
            self._sample_zeros(recording, (*written, *made))
        repeats = phase == FORWARD and self._repeats
        # No kernel makes one part of a tensor.
        fresh -= {managed.index for managed in (*written, *made) if managed.is_part}
        for index in outputs:
            recording.tensors[index].producer = kernel if repeats and index in fresh else -1
        launch = Launch(max(entered_s - self._kernels.left_s, 0.0), ended_s - begun_s)
        if self._timed is not None:
            recording.timed.append((launch, self._timed))
        recording.launched_s.append(begun_s)
        variants = self._variants.algorithms_of_last_kernel(
            launch.program_s + launch.call_s, self._workspace_bytes
        )
        traced = variants.pop(AS_TRACED)
        recording.kernels.append(
            KernelRecord(
                facts.name,
                traced.time_s,
                inputs,
                outputs,
                traced.workspace_bytes,
                phase,
                begun_s,
                ended_s,
                variants=tuple(variants.values()),
            )
        )
        recording.in_memory_bytes.append(self._device.in_memory_bytes())
        return self._workspace_bytes

    def _sample_zeros(self, recording: Recording, written: Iterable[ManagedStorage]) -> None:
        for managed in written:
            # What set_ gives a view of may be away, or dropped: then nobody wrote to it.
            if not managed.address or managed.step != self._kernels.step or managed.state > LEAVING:
                continue
            record = recording.tensors[managed.index]
            with contextlib.suppress(ValueError):  # another thread has given it other memory
                loan = _native.arena_lend(managed.address)
                try:
                    density = sampled_density(managed.address, managed.size_bytes, record.itemsize)
                finally:
                    _native.arena_lent_back(loan)
                record.density = max(record.density or 0.0, density)
