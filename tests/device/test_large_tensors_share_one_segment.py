"""Where the allocator has memory in too many pieces, large tensors go into one segment and move within it."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock._native import DeviceSegment, Leaves
from penstock.runtime.devices import queues
from penstock.runtime.devices.compaction import Compaction
from penstock.runtime.devices.room import AllocatorRoom
from penstock.runtime.storages import AWAY, LEAVING, RESIDENT, ManagedStorage
from penstock.storage.spill import SpillSpace
from tests.device.test_training_on_a_device_keeps_every_bit import (
    TIERS,
    expected,
    inside,
    scheduled_at_random,
)
from tests.support.accelerator import orders, wanted
from tests.support.runs import ACCELERATED, EVERYTHING, Bits, Step, bits, differences

DEVICE = wanted("emu")
MIB = 1 << 20
WAIT_S = 60.0
WIDTHS = (640, 1536, 320, 2048, 800, 1280, 448, 1920, 640)
Configure = Callable[..., None]


class Training:
    """refused   how often the allocator had refused when each step began"""

    def __init__(
        self, steps: int = 6, also: Callable[[int, torch.Tensor], object] = lambda number, loss: None
    ) -> None:
        self.steps, self.also = steps, also
        self.refused: list[int] = []

    def __call__(self, step: Step) -> Bits:
        self.refused.clear()
        layers = [nn.Linear(*widths) for widths in itertools.pairwise(WIDTHS)]
        model = nn.Sequential(*(part for layer in layers for part in (layer, nn.GELU(), nn.Dropout(0.1))))
        model.to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        found: Bits = []
        for number in range(self.steps):
            self.refused.append(torch.accelerator.memory_stats()["num_ooms"])
            with step():
                batch = torch.randn(256, WIDTHS[0], generator=torch.Generator().manual_seed(number))
                loss = model(batch.to(DEVICE)).square().mean()
                self.also(number, loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            found += bits([loss])
        return found + bits(model.parameters())


PLAIN = Training()  # whose bits are those of all that do nothing else
OPENING = Training(3)  # the segment is opened in the second step


def in_turns(names: Sequence[str], others: Sequence[Any]) -> list[Any]:
    """Each order of work with one of the others, in turns; with all of them it is slow: make test-device."""
    return [
        pytest.param(name, other, marks=pytest.mark.slow if (first + second) % 2 and len(names) > 1 else ())
        for first, name in enumerate(names)
        for second, other in enumerate(others)
    ]


class Seen:
    """Of the segments of a run. moves   tensors that moved; opened, closed   how often"""

    def __init__(self) -> None:
        self.moves = self.opened = self.closed = 0


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """What the compaction does."""
    found = Seen()
    open_one, close, move = Compaction.open, Compaction.close, Compaction._move

    def opened(compaction: Compaction, *args: Any) -> bool:
        is_open = open_one(compaction, *args)
        found.opened += is_open
        return is_open

    def closed(compaction: Compaction) -> None:
        found.closed += compaction.is_open
        close(compaction)

    def moved(compaction: Compaction, *args: Any) -> bool:
        has_moved = move(compaction, *args)
        found.moves += has_moved
        return has_moved

    monkeypatch.setattr(Compaction, "open", opened)
    monkeypatch.setattr(Compaction, "close", closed)
    monkeypatch.setattr(Compaction, "_move", moved)
    return found


def test_nothing_is_refused_in_settled_steps(configure: Configure, seen: Seen, tmp_path: Path) -> None:
    configure(order="stepped", seed=1)
    training = Training()
    plain = expected(PLAIN)
    assert differences(plain, inside(training, 96 * MIB, "host", tmp_path)[0]) == []
    assert seen.opened == 1 and seen.moves > 0
    assert training.refused[2] > training.refused[0]
    assert training.refused[-1] == training.refused[-4]


@pytest.mark.parametrize(
    ("order", "tier_and_stream_bytes"),
    in_turns(
        orders(DEVICE, "lazy", "stepped", "random", "newest"),
        [("host", 1), ("disk", queues.STREAM_BYTES)],
    ),
)
def test_what_moves_keeps_its_bits(
    order: str,
    tier_and_stream_bytes: tuple[str, int],
    configure: Configure,
    seen: Seen,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Places are cleared at random, too, and any tensors leave at any kernel."""
    tier, stream_bytes = tier_and_stream_bytes
    monkeypatch.setattr(queues, "STREAM_BYTES", stream_bytes)
    rng, make_holes = random.Random(order), Compaction.make_holes

    def also_elsewhere(compaction: Compaction, engine: Any, sizes: Any, *, may_leave: bool) -> bool:
        segment = compaction._segment
        if segment is not None and not compaction._clearing and segment.free_bytes > 2 * MIB:
            size_bytes = rng.randrange(MIB, segment.free_bytes)
            leaves = Leaves.leaving if may_leave else Leaves.nothing
            if may_leave and rng.random() < 0.2:
                leaves = Leaves.anything
            compaction._clear(engine, segment, size_bytes, leaves)
        return make_holes(compaction, engine, sizes, may_leave=may_leave)

    monkeypatch.setattr(Compaction, "make_holes", also_elsewhere)
    configure(order="eager")
    training = Training()
    plain = expected(PLAIN)
    configure(order=order, seed=3, host_delay_us=10)
    with scheduled_at_random(2):
        assert differences(plain, inside(training, 96 * MIB, tier, tmp_path)[0]) == []
    assert seen.opened > 0 and seen.moves > 0


@pytest.mark.parametrize(
    ("order", "helps"), in_turns(orders(DEVICE, "lazy", "random", "newest"), [True, False])
)
def test_what_a_kernel_uses_keeps_its_bits_where_it_is_in_the_way(
    order: str, helps: bool, configure: Configure, seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the allocator had refused a kernel's memory: its largest tensor leaves, or all do."""
    make_holes, rearrange = AllocatorRoom.make_holes, AllocatorRoom._rearrange
    rearranged: list[bool] = []

    def refused(room: AllocatorRoom, sizes: list[int]) -> None:
        if room._compaction.is_open and not room._emptied_for:
            assert room.make(max(sizes))
            room._next_opening = 0  # where it could not be opened again at once
        make_holes(room, sizes)

    def rearranges(room: AllocatorRoom, used: list[ManagedStorage], size_bytes: int) -> bool:
        rearranged.append(rearrange(room, used, size_bytes) and helps)
        return rearranged[-1]

    monkeypatch.setattr(AllocatorRoom, "make_holes", refused)
    monkeypatch.setattr(AllocatorRoom, "_rearrange", rearranges)
    configure(order="eager")
    training = Training()
    plain = expected(PLAIN)
    configure(order=order, seed=3, host_delay_us=10)
    with scheduled_at_random(2, packs=False):  # that needs another stream, and the segment is of one
        assert differences(plain, inside(training, 96 * MIB, "host", tmp_path)[0]) == []
    assert helps in rearranged and (helps or seen.opened > 1)


def test_small_tensors_get_memory_that_the_segment_took(
    configure: Configure, seen: Seen, tmp_path: Path
) -> None:
    kept: list[torch.Tensor] = []

    def keep(number: int, loss: torch.Tensor) -> None:
        if number == 3:
            kept.extend(loss.detach() + torch.zeros(128 << 10, device=DEVICE) for _ in range(24))
        if number == 5:
            kept.clear()

    configure(order="stepped", seed=1)
    training = Training(7, keep)
    plain = expected(training)
    kept.clear()
    assert differences(plain, inside(training, 96 * MIB, "host", tmp_path)[0]) == []
    assert seen.opened > 0 and seen.closed > 1


def test_a_stream_that_begins_later_gets_memory(configure: Configure, seen: Seen, tmp_path: Path) -> None:
    streams: list[torch.Stream] = []

    def beside(number: int, loss: torch.Tensor) -> None:
        if number >= 4:
            streams.append(torch.Stream(DEVICE)) if not streams else None
            streams[0].wait_stream(torch.accelerator.current_stream())
            with streams[0]:
                assert (torch.full((4 * MIB,), 1.0, device=DEVICE) + loss.detach()).sum() > 0
            torch.accelerator.current_stream().wait_stream(streams[0])

    configure(order="stepped", seed=1)
    training = Training(6, beside)
    plain = expected(training)
    streams.clear()
    assert differences(plain, inside(training, 112 * MIB, "host", tmp_path)[0]) == []
    assert seen.opened == seen.closed == 1


def test_a_large_block_is_made_by_several_moves() -> None:
    """Only a block of 7 MiB, of 9 when 3 have moved into 4, is large enough for the 8 beside 9."""
    begin, at, storages = 64 * MIB, {}, []
    segment = DeviceSegment(begin, 101 * MIB)
    address = begin
    for size, what in [(8, "moves"), (9, ""), (30, ""), (7, ""), (3, "moves"), (20, ""), (4, ""), (20, "")]:
        if what:
            storages.append(torch.UntypedStorage(1))
            at[size] = ManagedStorage(storages[-1], size * MIB, lambda key: None)
            at[size].movable = True
            segment.put(at[size], address)
        elif size >= 20:
            segment.hold(address, size * MIB)
        address += size * MIB
    assert segment.largest_free_bytes == 9 * MIB
    moves, leaves, free = segment.obstacles(16 * MIB, Leaves.nothing) or ((), (), ())
    assert (moves, leaves, free) == ([at[3]], [], [(begin + 47 * MIB, 7 * MIB)])
    segment.put(at[3], begin + 77 * MIB)
    assert segment.largest_free_bytes == 10 * MIB
    moves, leaves, free = segment.obstacles(16 * MIB, Leaves.nothing) or ((), (), ())
    assert (moves, leaves, free) == ([at[8]], [], [(begin + 8 * MIB, 9 * MIB)])
    at[8].pins += 1
    assert segment.obstacles(16 * MIB, Leaves.nothing) is None


def test_what_others_use_does_not_move(configure: Configure, tmp_path: Path) -> None:
    """Of four places of 12 MiB the first and the last are free; what lies in the third has to move for 16."""
    with penstock.offload(
        device=DEVICE, device_budget=64 * MIB, host_budget="128MiB", spill_dir=tmp_path, hardware=ACCELERATED
    ) as run:
        compaction, storages = run._device._compaction, run._clock.storages
        assert compaction.open(48 * MIB, torch.accelerator.current_stream())
        tensors = [torch.ones(3 * MIB, device=DEVICE) for _ in range(4)]
        second, third = (storages.find(tensor.untyped_storage()) for tensor in tensors[1:3])
        assert second is not None and third is not None and compaction._segment is not None
        second.pins += 1
        del tensors[0], tensors[2]
        storages.remove_dead()

        def in_the_way() -> list[ManagedStorage] | None:
            found = compaction._segment.obstacles(16 * MIB, Leaves.nothing)
            return None if found is None else found[0]

        assert in_the_way() == [third]
        third.pins += 1
        assert in_the_way() is None
        third.pins -= 1
        tensors[1].record_stream(torch.Stream(DEVICE))
        assert in_the_way() is None


@pytest.mark.parametrize("tier", TIERS)
def test_nothing_leaves_where_what_is_leaving_makes_the_room(
    tier: str, configure: Configure, tmp_path: Path
) -> None:
    """Of four tensors of 12 MiB that fill the segment two leave: one that stays moves for 24 in one piece."""
    configure(order="stepped", seed=1)
    with penstock.offload(
        device=DEVICE,
        device_budget=64 * MIB,
        host_budget=TIERS[tier],
        spill_dir=tmp_path,
        hardware=ACCELERATED,
    ) as run:
        compaction, engine, storages = run._device._compaction, run._engine, run._clock.storages
        assert compaction.open(48 * MIB, torch.accelerator.current_stream())
        tensors = [torch.ones(3 * MIB, device=DEVICE) for _ in range(4)]
        managed = [storages.find(tensor.untyped_storage()) for tensor in tensors]
        with engine.lock:
            for each in managed[::2]:
                engine.evict(each, release=True)
            assert compaction.make_holes(engine, [24 * MIB], may_leave=True)
        assert [each.state for each in managed] == [AWAY, RESIDENT, AWAY, RESIDENT]
        assert all((tensor == 1).all() for tensor in tensors)


def test_what_waits_to_come_from_the_disk_moves(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five tensors of 12 MiB the first and the third are gone, the second and the fourth come back: what
    comes later moves for 24 in one piece, what has begun to come does not."""
    read, begun, goes_on = SpillSpace.read, threading.Event(), threading.Event()

    def held(*args: Any, **options: Any) -> None:
        begun.set()
        assert goes_on.wait(WAIT_S)
        read(*args, **options)

    monkeypatch.setattr(SpillSpace, "read", held)
    configure(order="stepped", seed=1)
    with penstock.offload(
        device=DEVICE,
        device_budget=96 * MIB,
        host_budget=TIERS["disk"],
        spill_dir=tmp_path,
        hardware=ACCELERATED,
    ) as run:
        compaction, engine, storages = run._device._compaction, run._engine, run._clock.storages
        assert compaction.open(60 * MIB, torch.accelerator.current_stream())
        tensors = [torch.full((3 * MIB,), float(number), device=DEVICE) for number in range(5)]
        found = [storages.find(tensor.untyped_storage()) for tensor in tensors]
        managed = [each for each in found if each is not None]
        with engine.lock:
            for each in managed[1::2]:
                assert engine.leave_now(each)
            for each in managed[1::2]:
                engine.prefetch(each)
        assert begun.wait(WAIT_S)
        del tensors[2], tensors[0]
        storages.remove_dead()
        managed[4].pins += 1
        with engine.lock:
            has_moved = compaction.make_holes(engine, [24 * MIB], may_leave=False)
            assert compaction._segment is not None
            moves_begun = compaction._move(engine, compaction._segment, managed[1])
        managed[4].pins -= 1
        goes_on.set()
        assert has_moved and not moves_begun
        assert [tensor.unique().tolist() for tensor in tensors] == [[1], [3], [4]]


def test_a_kernel_has_a_large_block_where_it_leaves_most_room_for_another() -> None:
    """Four times 10 MiB are free, with 3, 1 and 3 in between: the one in the middle moves for least."""
    begin, storages = 64 * MIB, [torch.UntypedStorage(1) for _ in range(3)]
    segment = DeviceSegment(begin, 47 * MIB)
    address, lies = begin, []
    for size, storage in zip((3, 1, 3), storages, strict=True):
        address += 10 * MIB
        lies.append(ManagedStorage(storage, size * MIB, lambda key: None))
        lies[-1].movable = True
        segment.put(lies[-1], address)
        address += size * MIB
    first, middle, last = lies
    assert segment.obstacles(20 * MIB, Leaves.nothing) == (
        [middle], [], [(begin + 13 * MIB, 10 * MIB), (begin + 24 * MIB, 10 * MIB)]
    )  # fmt: skip
    at_begin = [(begin, 10 * MIB), (begin + 13 * MIB, 10 * MIB)]
    assert segment.obstacles(20 * MIB, Leaves.leaving) == ([first], [], at_begin)
    first.state, first.freeing_bytes = LEAVING, first.size_bytes
    assert segment.obstacles(20 * MIB, Leaves.leaving) == ([], [first], at_begin)
    first.pins = last.pins = 1
    assert segment.obstacles(20 * MIB, Leaves.leaving) == segment.obstacles(20 * MIB, Leaves.nothing)


@pytest.mark.parametrize("seed", range(5))
def test_it_is_followed_as_the_allocator_divides_it(seed: int, configure: Configure) -> None:
    """By whether the allocator, which has no memory beside it, gives a block: for each size, at any time."""
    configure(memory="66MiB", order="eager")
    rng = random.Random(seed)
    size_bytes = 64 * MIB
    torch.accelerator.empty_cache()
    segment = DeviceSegment(torch.UntypedStorage(size_bytes, device=DEVICE).data_ptr(), size_bytes)
    kept: list[torch.UntypedStorage] = []
    given = refused = 0
    for _ in range(400):
        if kept and rng.random() < 0.45:
            storage = kept.pop(rng.randrange(len(kept)))
            segment.give_up(storage.data_ptr())
            del storage
        wanted = rng.randrange(MIB + 1, rng.choice([3, 12, 40]) * MIB)
        fits = segment.fits([wanted])
        try:
            storage = torch.UntypedStorage(wanted, device=DEVICE)
        except torch.OutOfMemoryError:
            assert not fits
            refused += 1
            continue
        assert fits
        assert segment.free_at(storage.data_ptr()) >= wanted
        segment.hold(storage.data_ptr(), wanted)
        kept.append(storage)
        given += 1
    assert given > 50 and refused > 50
    for storage in kept:
        segment.give_up(storage.data_ptr())
    assert segment.free_bytes == segment.largest_free_bytes == size_bytes


@pytest.mark.parametrize("seed", range(2))
def test_kernels_that_use_nearly_all_memory_go_on(seed: int, configure: Configure, tmp_path: Path) -> None:
    """Three tensors of 20 MiB fit in 66 if the two that the kernel reads leave the third one piece."""
    configure(order="stepped", seed=seed)
    draw = random.Random(seed)
    with penstock.offload(
        device=DEVICE,
        device_budget=66 * MIB,
        host_budget="256MiB",
        spill_dir=tmp_path,
        hardware=ACCELERATED,
        planning=penstock.PlanOptions(smallest_bytes=EVERYTHING),
    ) as run:
        weight = torch.ones(20 * MIB // 4, device=DEVICE)
        others = [torch.ones(draw.randrange(2, 24) * MIB // 8, device=DEVICE) for _ in range(24)]
        for _ in range(12):
            with run.step():
                for other in others[::2]:
                    other.add_(1)
                twice = weight.mul(2)
                for other in others[1::2]:
                    other.add_(1)
                weight = twice.mul(weight).sub_(twice).add_(1)
                del twice
            assert weight.mean().item() == 1
        assert all((other == 13).all() for other in others)


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ("max_split_size_mb:32", "max_split_size_mb:32"),
        ("max_split_size_mb: 512", None),  # larger than the segment
        ("garbage_collection_threshold:0.8", "garbage_collection_threshold"),
        ("roundup_power2_divisions:4", "roundup_power2_divisions"),
        ("expandable_segments:False", None),
        ("expandable_segments: True", "expandable_segments:True"),
    ],
)
def test_settings_that_make_it_another_one_are_named(
    settings: str,
    setting: str | None,
    configure: Configure,
    seen: Seen,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    configure(order="stepped", seed=1)
    plain = expected(OPENING)
    torch._C._accelerator_setAllocatorSettings(settings)  # which the emulated allocator ignores
    try:
        assert differences(plain, inside(OPENING, 96 * MIB, "host", tmp_path)[0]) == []
    finally:
        torch._C._accelerator_setAllocatorSettings("")
    said = [record.message for record in caplog.records if "stays in pieces" in record.message]
    if setting is None:
        assert seen.opened > 0 and not said
    else:
        assert seen.opened == 0 and len(said) == 1 and f"as {setting} keeps" in said[0]
