"""Small programs on the emulated device that give other numbers where copies meet kernels."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import penstock
from penstock.runtime.copy_engine import CopyEngine
from penstock.runtime.devices import queues
from penstock.runtime.storage_methods import held_bytes
from penstock.runtime.storages import ManagedStorage
from tests.support import accelerator
from tests.support.accelerator import wanted
from tests.support.kvikio_stand_in import StandIn
from tests.support.runs import ACCELERATED, offload

DEVICE = wanted("emu")
MIB = 1 << 20
COUNT = 12


def _offload(spill_dir: Path, budget_bytes: int, **options: Any) -> penstock.Offload:
    how = {"host_budget": "96MiB", "hardware": ACCELERATED, **options}
    return offload(device=DEVICE, device_budget=budget_bytes, spill_dir=spill_dir, **how)


def _find(run: penstock.Offload, tensor: torch.Tensor) -> ManagedStorage:
    managed = run._clock.storages.find(tensor.untyped_storage())
    assert managed is not None
    return managed


def _evict(engine: CopyEngine, managed: ManagedStorage, **how: Any) -> None:
    with engine.lock:
        engine.evict(managed, **how)


def _keep_recipe(run: penstock.Offload, operator: Any, args: tuple[Any, ...], made: torch.Tensor) -> None:
    find = run._clock.storages.track
    run._clock.recomputation.keep_recipe(operator, args, {}, made, None, made.nbytes, find)


# The host does not see copies end but where it has to.
UNSEEN = mock.patch.object(queues, "POLLED_WITHIN_S", 60.0)


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


def directly(spill_dir: Path) -> bool:
    """The same, by the direct path."""
    emu = accelerator.load(DEVICE)
    if emu is None:
        return True
    with pytest.MonkeyPatch.context() as patch:
        StandIn(emu.alias_of).install(patch)
        return two_streams(spill_dir, host_budget="64MiB", paths="kvikio gpu-direct")


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
                moved = compaction._move(engine, compaction._segment, found[1])
                for _ in range(2):  # its copy was issued, so it stays
                    compaction._move(engine, compaction._segment, found[0])
                other = torch.full((2 * MIB,), 100.0, device=DEVICE)
            values = [*(tensor.max() for tensor in tensors), other.max(), other.min()]
            right &= [*map(float, values)] == [turn, turn + 1, 100, 100]
            moves.append(moved)
            del tensors, found, managed, other
    return right


class _Below(TorchDispatchMode):
    """Sees what the clock launches. meanwhile   what happens before the next launch"""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: Callable[[], object] | None = None

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return operator(*args, **kwargs or {})


def ended_at_a_launch(spill_dir: Path) -> bool:
    """What a kernel or a view uses is leaving, and its copy ends, or is asked for, at the launch."""
    right = True
    with _Below() as below, _offload(spill_dir, 40 * MIB) as run:
        engine = run._engine
        for how in ({}, {"packs": 4, "writes": False}):
            for use in (lambda tensor: tensor.add(0), lambda tensor: tensor.as_strided((9,), (1,))):
                tensor = torch.zeros(MIB, device=DEVICE)
                _evict(engine, _find(run, tensor), release=True, **how)
                below.meanwhile = engine.drain
                right &= float(use(tensor).max()) == 0
        for number in range(1, 5):
            tensor = torch.full((MIB,), float(number), device=DEVICE)
            managed = _find(run, tensor)
            below.meanwhile = lambda managed=managed: _evict(engine, managed, release=True)  # type: ignore[misc]
            tensor.mul_(2)
            engine.drain()
            right &= float(tensor.max()) == 2 * number
    return right


@UNSEEN
def accessed(spill_dir: Path) -> bool:
    """A tensor is printed, by no operator of the run, on a stream that is new."""
    print_whole, meanwhile = torch._tensor_str._str, lambda: None

    def printed(*args: Any, **kwargs: Any) -> str:
        meanwhile()
        return print_whole(*args, **kwargs)

    with mock.patch.object(torch._tensor_str, "_str", printed), _offload(spill_dir, 40 * MIB) as run:
        engine = run._engine
        tensor = torch.full((MIB,), 7.0, device=DEVICE)
        managed, made = _find(run, tensor), torch.accelerator.current_stream().record_event()
        _evict(engine, managed, release=True)
        engine.drain()
        torch.full((MIB,), 9.0, device=DEVICE)  # is left in its memory
        torch.accelerator.synchronize()
        tensor.max()  # which waits for what comes
        side = torch.Stream(device=DEVICE)
        side.wait_event(made)
        access = run._clock._access
        with (
            side,
            access.present([tensor.untyped_storage()], launched=True),
            torch._C._DisableTorchDispatch(),
        ):
            right = float(tensor.max()) == 7
        engine.drain()
        tensor.add_(1)
        _evict(engine, managed, release=True)
        meanwhile = engine.drain
        right &= "8." in repr(tensor)
        twice = tensor * 2
        _keep_recipe(run, torch.ops.aten.mul.Tensor, (tensor, 2), twice)
        with run._clock._access.present([twice.untyped_storage()]), engine.lock:
            run._clock.recomputation.drop(_find(run, twice))
            right &= held_bytes(twice.untyped_storage()) == twice.nbytes
        with run._clock._access.present([tensor.untyped_storage()], stays=True):
            pass
        _evict(engine, managed, release=True)
        engine.drain()
        return right and held_bytes(tensor.untyped_storage()) == tensor.nbytes


@UNSEEN
def resized(spill_dir: Path) -> bool:
    """A storage gets other memory, beside others that leave for it, while it leaves, or has just come."""
    made = torch.Event(DEVICE)
    with mock.patch.object(queues, "STREAM_BYTES", 1), _offload(spill_dir, 40 * MIB) as run:
        engine = run._engine
        tensor = torch.full((3 * MIB,), 1.0, device=DEVICE)
        others = [torch.full((MIB // 4,), 2.0, device=DEVICE) for _ in range(24)]
        tensor.untyped_storage().resize_(16 * MIB)
        engine.drain()
        right = float(tensor.max()) == 1
        for other in others:
            _evict(engine, _find(run, other), release=False)
        for other in others:
            other.untyped_storage().resize_(0)
        engine.drain()
        side = torch.Stream(device=DEVICE)
        tensor.record_stream(side)
        made.record(torch.accelerator.current_stream())
        _evict(engine, _find(run, tensor), release=True)
        engine.drain()
        torch.full((4 * MIB,), 9.0, device=DEVICE)  # is left in its memory
        torch.accelerator.synchronize()
        tensor.max()
        side.wait_event(made)
        with side:
            tensor.untyped_storage().resize_(20 * MIB)
            right &= float(tensor.min()) == 1
        return right


def made_again(spill_dir: Path) -> bool:
    """What was dropped is made again on another stream, in memory that its own still uses, from what leaves
    for it."""
    side, main = torch.Stream(device=DEVICE), torch.accelerator.current_stream()
    right = True
    with _offload(spill_dir, 44 * MIB) as run:
        engine, recomputation = run._engine, run._clock.recomputation
        for number in range(3):
            source = torch.full((3 * MIB,), float(number), device=DEVICE)
            made = source + 1
            _keep_recipe(run, torch.ops.aten.add.Tensor, (source, 1), made)
            side.wait_stream(main)
            with engine.lock:
                recomputation.drop(_find(run, made))
            other = torch.full((3 * MIB,), 100.0, device=DEVICE)
            value = other.max()
            del other
            with side:
                found = made.max()
            main.wait_stream(side)
            right &= (float(found), float(value)) == (number + 1, 100)
            kept = torch.full((3 * MIB,), 50.0, device=DEVICE)
            with engine.lock:
                recomputation.drop(_find(run, made))
            other = torch.full((3 * MIB,), 60.0, device=DEVICE)
            _evict(engine, _find(run, source), release=True)
            right &= [*map(float, (made.max(), kept.max(), other.max()))] == [number + 1, 50, 60]
            del source, made, kept, other
    return right


def in_turns(spill_dir: Path, tier: str = "host") -> bool:
    """A copy of what another stream makes waits for its turn, while copies are begun that wait for something
    else."""
    side, main = torch.Stream(device=DEVICE), torch.accelerator.current_stream()
    right = True
    with mock.patch.object(queues, "STREAM_BYTES", 1), _offload(spill_dir, 64 * MIB) as run:
        engine, bus = run._engine, run._device._copies._to_host
        for number in range(3):
            first, second, third = (torch.full((MIB,), float(number), device=DEVICE) for _ in range(3))
            _evict(engine, _find(run, third), release=True)
            engine.drain()
            with bus._reporting:  # to the host no copy is over
                _evict(engine, _find(run, first), release=False)
                side.wait_stream(main)
                with side:
                    second.add_(1)
                _evict(engine, _find(run, second), release=True, tier=tier)
                end_s = time.monotonic() + 60
                while not bus.has_backlog and time.monotonic() < end_s:
                    time.sleep(1e-3)
                with engine.lock:
                    engine.prefetch(_find(run, third))
            engine.drain()
            main.wait_stream(side)
            right &= [*map(float, (first.max(), second.max(), third.max()))] == [number, number + 1, number]
            del first, second, third
    return right


def in_turns_to_disk(spill_dir: Path) -> bool:
    return in_turns(spill_dir, "disk")


def given_back(spill_dir: Path) -> bool:
    """What left compressed is fetched and expanded when its run is closed."""
    tensors = []
    with _offload(spill_dir, 40 * MIB) as run:
        for number in range(4):
            tensors.append(torch.zeros(MIB // 4, device=DEVICE))
            tensors[-1][::50] = number + 1
            _evict(run._engine, _find(run, tensors[-1]), release=True, packs=4)
            run._engine.drain()
    return [[*map(float, tensor[49:52])] for tensor in tensors] == [[0, number + 1, 0] for number in range(4)]


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
    in_turns,
    in_turns_to_disk,
    directly,
    ended_at_a_launch,
    accessed,
    resized,
    made_again,
    given_back,
]
ATTEMPTS = [
    (order, seed, probe)
    for seed, order, probe in itertools.product(range(4), ("lazy", "stepped", "newest", "random"), PROBES)
]
