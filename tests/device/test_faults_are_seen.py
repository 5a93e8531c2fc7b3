"""Faults that are put into penstock change bits on the emulated device, or raise: it would show them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.runtime.devices.accelerator import AcceleratorDevice
from penstock.runtime.devices.cuda import TorchDriver
from penstock.runtime.devices.staging import Staging
from tests.device import probes

Patch = Callable[[Any, str, Any], None]


def memory_is_taken_on_another_stream(patch: Patch) -> None:
    resize, other = TorchDriver.resize, torch.Stream(device="emu")

    def on_another(driver: Any, storage: Any, size_bytes: int, stream: Any) -> bool:
        return resize(driver, storage, size_bytes, other if size_bytes else stream)

    patch(TorchDriver, "resize", on_another)


def blocks_are_handed_out_before_they_are_read(patch: Patch) -> None:
    copy_in = AcceleratorDevice.copy_in

    def careless(device: Any, wanted: Any) -> None:
        copy_in(device, wanted)
        if wanted.managed.slot.tier == "host":
            block = wanted.managed.slot.block
            device._copies.slab.tensor(block, block.size_bytes).fill_(0xAB)

    patch(AcceleratorDevice, "copy_in", careless)


def chunks_go_on_before_they_have_crossed(patch: Patch, out: bool) -> None:
    cross = Staging._cross_bus

    def too_early(staging: Any, chunk: Any) -> None:
        if (staging._legs[0].__name__ == "too_early") != out:
            cross(staging, chunk)
            return
        crossing = copy.copy(chunk)
        crossing.then = lambda crossed: None
        cross(staging, crossing)
        chunk.whole.ready = []  # the host still waits for these events: nobody records them again
        chunk.then(chunk)

    patch(Staging, "_cross_bus", too_early)


def chunks_are_written_before_they_are_in_their_buffer(patch: Patch) -> None:
    chunks_go_on_before_they_have_crossed(patch, out=True)


def chunks_have_arrived_before_they_have_crossed(patch: Patch) -> None:
    chunks_go_on_before_they_have_crossed(patch, out=False)


def buffers_are_handed_out_too_early(patch: Patch, leg: str) -> None:
    go = getattr(Staging, leg)

    def careless(staging: Any, chunk: Any) -> None:
        buffer = staging._slab.tensor(chunk.block, chunk.size_bytes)
        go(staging, chunk)
        buffer.fill_(0xAB)

    patch(Staging, leg, careless)


def buffers_are_handed_out_before_they_are_read(patch: Patch) -> None:
    buffers_are_handed_out_too_early(patch, "_cross_bus")


def buffers_are_handed_out_before_they_are_written(patch: Patch) -> None:
    buffers_are_handed_out_too_early(patch, "_write")


FAULTS = [
    memory_is_taken_on_another_stream,
    blocks_are_handed_out_before_they_are_read,
    chunks_are_written_before_they_are_in_their_buffer,
    chunks_have_arrived_before_they_have_crossed,
    buffers_are_handed_out_before_they_are_read,
    buffers_are_handed_out_before_they_are_written,
]
PROGRAMS = [probes.two_streams, probes.from_disk, probes.read_elsewhere]
ATTEMPTS = [(order, seed) for seed in range(4) for order in ("lazy", "stepped", "random", "newest")]


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(
    emu: Any, fault: Callable[[Patch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch.setattr)
    for order, seed in ATTEMPTS:
        emu.configure(order=order, seed=seed, host_delay_us=50)
        if not all(program(tmp_path) for program in PROGRAMS):
            return
    raise AssertionError(f"nobody saw it in {len(ATTEMPTS)} runs")
