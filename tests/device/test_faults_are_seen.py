"""Faults that are put into penstock change bits on the emulated device, or raise: it would show them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.runtime.devices.accelerator import AcceleratorDevice
from penstock.runtime.devices.cuda import TorchDriver
from penstock.runtime.devices.queues import StreamQueue
from tests.support.accelerator import orders, wanted
from tests.support.runs import ACCELERATED

DEVICE = wanted("emu")
MIB = 1 << 20
COUNT = 12

Patch = Callable[[Any, str, Any], None]


def run(spill_dir: Path) -> bool:
    """Kernels over 12 MiB of tensors in 6 MiB, on two streams. Whether all numbers are right."""
    side, main = torch.Stream(device=DEVICE), torch.accelerator.current_stream()
    with penstock.offload(
        device=DEVICE, device_budget=6 * MIB, spill_dir=spill_dir, hardware=ACCELERATED, host_budget="96MiB"
    ):
        tensors = [torch.full((MIB // 4,), float(number), device=DEVICE) for number in range(COUNT)]
        for turn in range(4):
            for tensor in tensors:
                tensor.mul_(2).sub_(tensor, alpha=0.5)
            side.wait_stream(main)
            with side:
                for tensor in tensors[turn % 2 :: 2]:
                    tensor.add_(1)
            main.wait_stream(side)
        side.wait_stream(main)
        with side:  # what it reads leaves without a copy, and the program waits at the end only
            read = [tensor.max() for _ in range(2) for tensor in tensors]
        main.wait_stream(side)
        return [float(value) for value in read] == [number + 2.0 for number in range(COUNT)] * 2


def read_elsewhere(spill_dir: Path) -> bool:
    """A tensor with a copy is read on another stream, leaves, and another gets its memory. Was it read
    first?"""
    side, main = torch.Stream(device=DEVICE), torch.accelerator.current_stream()
    with penstock.offload(
        device=DEVICE, device_budget=40 * MIB, spill_dir=spill_dir, hardware=ACCELERATED, host_budget="96MiB"
    ) as run:
        tensor = torch.full((4 * MIB,), 1.0, device=DEVICE)
        engine, managed = run._engine, run._clock.storages.find(tensor.untyped_storage())
        assert managed is not None
        with engine.lock:
            engine.evict(managed, release=False)
        engine.drain()
        side.wait_stream(main)
        with side:
            value = tensor.max()
        with engine.lock:
            engine.release(managed)
        other = torch.full((4 * MIB,), 5.0, device=DEVICE)
        main.synchronize()
        main.wait_stream(side)
        return float(value) == 1 and float(other[0]) == 5


def copies_do_not_wait_for_kernels(patch: Patch) -> None:
    put = StreamQueue.put

    def careless(queue: Any, copy: Any) -> Any:
        copy.ready = []
        return put(queue, copy)

    patch(StreamQueue, "put", careless)


def copies_count_as_complete_when_they_begin(patch: Patch) -> None:
    issue = AcceleratorDevice._issue

    def too_early(device: Any, out: bool, copy: Any, stream: Any) -> Any:
        over = device._record(stream)
        device._free_events.append(issue(device, out, copy, stream))
        return over

    patch(AcceleratorDevice, "_issue", too_early)


def kernels_do_not_wait_for_copies(patch: Patch) -> None:
    patch(
        AcceleratorDevice, "join", lambda device, managed: device._issued.pop(managed.key, None) is not None
    )


def memory_is_taken_on_another_stream(patch: Patch) -> None:
    resize, other = TorchDriver.resize, torch.Stream(device=DEVICE)

    def on_another(driver: Any, storage: Any, size_bytes: int, stream: Any) -> bool:
        return resize(driver, storage, size_bytes, other if size_bytes else stream)

    patch(TorchDriver, "resize", on_another)


def streams_that_use_memory_are_forgotten(patch: Patch) -> None:
    def release(device: Any, managed: Any, storage: Any) -> bool:
        device._empty(managed, storage)
        return True

    patch(AcceleratorDevice, "release", release)


def blocks_are_handed_out_before_they_are_read(patch: Patch) -> None:
    copy_in = AcceleratorDevice.copy_in

    def careless(device: Any, managed: Any, storage: Any, priority: int, done: Any) -> None:
        copy_in(device, managed, storage, priority, done)
        if managed.slot.tier == "host":
            block = managed.slot.block
            device._slab.tensor(block, block.size_bytes).fill_(0xAB)

    patch(AcceleratorDevice, "copy_in", careless)


FAULTS = [
    copies_do_not_wait_for_kernels,
    copies_count_as_complete_when_they_begin,
    kernels_do_not_wait_for_copies,
    memory_is_taken_on_another_stream,
    streams_that_use_memory_are_forgotten,
    blocks_are_handed_out_before_they_are_read,
]
ATTEMPTS = [(order, seed) for seed in range(4) for order in ("lazy", "stepped", "random", "newest")]


@pytest.mark.parametrize("order", orders(DEVICE, "lazy", "stepped", "random", "newest"))
def test_without_a_fault_all_is_right(configure: Callable[..., None], order: str, tmp_path: Path) -> None:
    for seed in range(3):
        configure(order=order, seed=seed)
        assert run(tmp_path)
        assert read_elsewhere(tmp_path)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(
    emu: Any, fault: Callable[[Patch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch.setattr)
    for order, seed in ATTEMPTS:
        emu.configure(order=order, seed=seed, host_delay_us=50)
        if not run(tmp_path) or not read_elsewhere(tmp_path):
            return
    raise AssertionError(f"nobody saw it in {len(ATTEMPTS)} runs")
