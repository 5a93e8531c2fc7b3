"""Small programs on the emulated device that give other numbers where copies meet kernels."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import penstock
from penstock.runtime.devices import queues
from tests.support.accelerator import wanted
from tests.support.runs import ACCELERATED, offload

DEVICE = wanted("emu")
MIB = 1 << 20
COUNT = 12


def _offload(spill_dir: Path, budget_bytes: int, **options: Any) -> penstock.Offload:
    how = {"host_budget": "96MiB", "hardware": ACCELERATED, **options}
    return offload(device=DEVICE, device_budget=budget_bytes, spill_dir=spill_dir, **how)


def two_streams(spill_dir: Path, **options: Any) -> bool:
    """Kernels over 12 MiB of tensors in 6 MiB, on two streams."""
    side, main = torch.Stream(device=DEVICE), torch.accelerator.current_stream()
    with _offload(spill_dir, 6 * MIB, **options):
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


def from_disk(spill_dir: Path) -> bool:
    """The same, with all of the host's memory for staging."""
    return two_streams(spill_dir, host_budget="64MiB")


def read_elsewhere(spill_dir: Path) -> bool:
    """A tensor with a copy is read on another stream, leaves, and another gets its memory."""
    side, main = torch.Stream(device=DEVICE), torch.accelerator.current_stream()
    with _offload(spill_dir, 40 * MIB) as run:
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


def made_before(spill_dir: Path) -> bool:
    """A tensor that was made on another stream before the run leaves, and that stream gets its memory."""
    side, main = torch.Stream(device=DEVICE), torch.accelerator.current_stream()
    with side:
        tensor = torch.full((4 * MIB,), 1.0, device=DEVICE)
    main.wait_stream(side)
    with _offload(spill_dir, 40 * MIB) as run:
        tensor.max()
        engine, managed = run._engine, run._clock.storages.find(tensor.untyped_storage())
        assert managed is not None
        with engine.lock:
            engine.evict(managed, release=False)
        engine.drain()
        value = tensor.max()
        with engine.lock:
            engine.release(managed)
        with side:
            other = torch.full((4 * MIB,), 5.0, device=DEVICE)
        side.synchronize()
        return float(value) == 1 and float(other[0]) == 5 and float(tensor[-1]) == 1


def recorded(spill_dir: Path) -> bool:
    """What the program has recorded of a stream leaves, comes back, and dies while the stream uses it."""
    side, main = torch.Stream(device=DEVICE), torch.accelerator.current_stream()
    with _offload(spill_dir, 24 * MIB) as run:
        tensor = torch.full((4 * MIB,), 1.0, device=DEVICE)
        managed = run._clock.storages.find(tensor.untyped_storage())
        assert managed is not None
        tensor.record_stream(side)
        for _ in range(3):
            with run._engine.lock:
                run._engine.evict(managed, release=True)
            run._engine.drain()
            tensor.add_(1)
        side.wait_stream(main)
        with side:
            value = tensor.max()
        del tensor, managed
        other = torch.full((4 * MIB,), 9.0, device=DEVICE)
        main.wait_stream(side)
        return float(value) == 4 and float(other[0]) == 9


def a_new_stream(spill_dir: Path) -> bool:
    """Kernels wait for copies that are under way when a new stream uses the same tensors."""
    made = torch.Event(DEVICE)
    with _offload(spill_dir, 24 * MIB) as run:
        tensors = [torch.full((MIB,), float(number), device=DEVICE) for number in range(3)]
        made.record(torch.accelerator.current_stream())
        found = [run._clock.storages.find(tensor.untyped_storage()) for tensor in tensors]
        with run._engine.lock:
            for managed in found:
                run._engine.evict(managed, release=True)
        run._engine.drain()
        first = [tensor.max() for tensor in tensors]
        side = torch.Stream(device=DEVICE)
        side.wait_event(made)
        with side:
            second = [tensor.max() for tensor in tensors]
        side.synchronize()
        with side:
            values = [float(value) for value in second]
        return values == [0, 1, 2] and [float(value) for value in first] == [0, 1, 2]


def compressed(spill_dir: Path) -> bool:
    """Sparse tensors leave compressed while they are made, and stay so on the device, or leave it."""
    with _offload(spill_dir, 40 * MIB) as run:
        right = True
        for turn in range(3):
            tensors = []
            for number in range(6):
                tensor = torch.zeros(MIB // 4, device=DEVICE)
                tensor[::50] = number + 1
                tensors.append(tensor.mul_(2))
                managed = run._clock.storages.find(tensor.untyped_storage())
                codec = "fp16" if number % 2 else "csr"  # of small whole numbers, without a loss
                with run._engine.lock:
                    run._engine.evict(managed, release=True, packs=4, codec=codec, writes=turn > 0)
            others = [torch.full((MIB // 4,), 100.0, device=DEVICE) for _ in range(6)]
            if turn != 1:
                run._engine.drain()
            for number, tensor in enumerate(tensors):
                tensor.add_(1)
                right &= [*map(float, tensor[49:52])] == [1, 2.0 * number + 3, 1]
            right &= all(float(other[0]) == 100 for other in others)
        return right


def memory_changes_hands(spill_dir: Path) -> bool:
    """Blocks of a small host tier are given from one tensor to another while copies use them."""
    with _offload(spill_dir, 6 * MIB, host_budget="72MiB"):
        tensors = [torch.full((MIB // 4,), float(number), device=DEVICE) for number in range(COUNT)]
        for _ in range(3):
            for number in range(COUNT):
                tensors[number] = tensors[number] + 1
        return [float(tensor[-1]) for tensor in tensors] == [number + 3.0 for number in range(COUNT)]


def two_tiers(spill_dir: Path) -> bool:
    """Kernels wait for a copy from the host while one from disk, which began before it, is under way."""
    right = True
    with _offload(spill_dir, 40 * MIB) as run:
        engine = run._engine
        for turn in range(4):
            tensors = [torch.full((MIB,), float(turn + number), device=DEVICE) for number in range(2)]
            found = [run._clock.storages.find(tensor.untyped_storage()) for tensor in tensors]
            for managed, tier in zip(found, ("disk", "host"), strict=True):
                with engine.lock:
                    engine.evict(managed, release=True, tier=tier)
            engine.drain()
            with engine.lock:
                for managed in found:
                    engine.prefetch(managed)
            values = [tensor.max() for tensor in reversed(tensors)]
            right &= [*map(float, values)] == [turn + 1.0, float(turn)]
        return right


def moved_while_it_waits(spill_dir: Path) -> bool:
    """A tensor that comes back goes elsewhere before its copy begins, and another one gets the memory."""
    main = torch.accelerator.current_stream()
    right = True
    with mock.patch.object(queues, "STREAM_BYTES", 1), _offload(spill_dir, 64 * MIB) as run:
        engine, compaction = run._engine, run._device._compaction
        compaction.open(40 * MIB, main)
        for turn in range(4):
            tensors = [torch.full((2 * MIB,), float(turn + number), device=DEVICE) for number in range(2)]
            found = [run._clock.storages.find(tensor.untyped_storage()) for tensor in tensors]
            for managed in found:
                with engine.lock:
                    engine.evict(managed, release=True)
            engine.drain()
            with engine.lock:
                for managed in found:
                    engine.prefetch(managed)
                moved = compaction._move(compaction._segment, found[1])
                other = torch.full((2 * MIB,), 100.0, device=DEVICE)
            values = [*(tensor.max() for tensor in tensors), other.max(), other.min()]
            right &= [*map(float, values)] == [turn, turn + 1, 100, 100]
            moves.append(moved)
            del tensors, found, managed, other
    return right


moves: list[bool] = []  # whether it went elsewhere in time

Probe = Callable[[Path], bool]
PROBES: list[Probe] = [
    two_streams,
    read_elsewhere,
    made_before,
    recorded,
    a_new_stream,
    compressed,
    memory_changes_hands,
    from_disk,
    two_tiers,
    moved_while_it_waits,
]
ATTEMPTS = [
    (order, seed, probe)
    for seed, order, probe in itertools.product(range(4), ("lazy", "stepped", "newest", "random"), PROBES)
]
