"""Tensors whose bytes leave memory: at the same address, with the same bytes, whoever looks."""

from __future__ import annotations

import copy
import ctypes
import io
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock import _native
from penstock.runtime import arena
from tests.runtime.paging import Away, Limits, random_bytes, tensor_of, unnamed_file

if arena.unavailable() is not None:
    pytest.skip(f"no paging here: {arena.unavailable()}", allow_module_level=True)

MIB = 1 << 20
SIZES = [4096, 5001, 100_000, MIB - 1, MIB, 3 * MIB + 5, 16 * MIB, 64 * MIB]


@pytest.fixture
def away(tmp_path: Path) -> Iterator[Away]:
    file = unnamed_file(tmp_path)
    with Limits(1 << 40):
        yield Away(file)
    os.close(file)


def vm_rss() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))


def mappings() -> int:
    with open("/proc/self/maps") as file:
        return sum(1 for _ in file)


@pytest.mark.parametrize("size", SIZES)
def test_bytes_are_there_again_at_the_same_address(away: Away, size: int) -> None:
    content = random_bytes(size)
    tensor = tensor_of(content)
    view, address = tensor.numpy(), tensor.data_ptr()
    before = _native.arena_stats()
    segment = away.write(tensor)
    assert _native.arena_state(address) == "guarded"
    assert _native.arena_leave(address, [segment])
    assert _native.arena_state(address) == "out"
    stats = _native.arena_stats()
    assert before.in_memory_bytes - stats.in_memory_bytes == size
    assert stats.in_use_bytes == before.in_use_bytes
    others = [torch.full((size,), 7, dtype=torch.uint8) for _ in range(3)]
    staging = _native.arena_stage(address)
    assert staging % 4096 == 0
    assert _native.arena_state(address) == "staged"
    assert _native.arena_stage(address) == staging
    _native.arena_unstage(staging)
    assert _native.arena_state(address) == "out"
    assert away.come_back(tensor, segment)
    assert _native.arena_state(address) == "guarded"
    assert tensor.data_ptr() == address
    assert np.array_equal(view, content)
    assert _native.arena_stats().faults == before.faults, "nobody touched it while it was out"
    assert _native.arena_leave(address, [segment]), "the copy is still valid"
    _native.arena_bring_in(address)
    assert np.array_equal(view, content)
    view[:] = 3
    assert _native.arena_state(address) == "in"
    assert _native.arena_written(address)
    assert all(bool((other == 7).all()) for other in others)


@pytest.mark.parametrize("size", [5001, 3 * MIB + 5])
def test_segments_come_from_several_files_also_those_for_direct_io(
    away: Away, size: int, tmp_path: Path
) -> None:
    content = random_bytes(size)
    tensor = tensor_of(content)
    address = tensor.data_ptr()
    (tmp_path / "first").write_bytes(b"x" * 300 + content[:4100].tobytes())
    (tmp_path / "second").write_bytes(b"y" * 77 + content[4100:].tobytes())
    first = os.open(tmp_path / "first", os.O_RDONLY)
    try:
        second = os.open(tmp_path / "second", os.O_RDONLY | os.O_DIRECT)
    except OSError:
        second = os.open(tmp_path / "second", os.O_RDONLY)
    _native.arena_lent_back(_native.arena_lend(address, guards=True))
    with pytest.raises(ValueError):
        _native.arena_leave(address, [(first, 300, 0, 4100)])
    with pytest.raises(ValueError):
        _native.arena_leave(address, [(first, 0, 0, 1 << 40)])
    assert _native.arena_leave(address, [(second, 77, 4100, size - 4100), (first, 300, 0, 4100)])
    assert np.array_equal(tensor.numpy(), content)
    os.close(first)
    os.close(second)


def test_every_way_to_look_finds_the_bytes(away: Away) -> None:
    content = random_bytes(2 * MIB + 100)
    tensor = tensor_of(content)
    view, memory = tensor.numpy(), memoryview(tensor.numpy())
    target = np.empty_like(content)

    def saved() -> np.ndarray:
        file = io.BytesIO()
        torch.save(tensor, file)
        file.seek(0)
        return torch.load(file).numpy()

    def moved() -> np.ndarray:
        ctypes.memmove(target.ctypes.data, tensor.data_ptr(), target.size)
        return target

    ways = {
        "numpy": view.copy,
        "memoryview": lambda: np.frombuffer(memory.tobytes(), np.uint8),
        "memmove": moved,  # holds no GIL
        "deepcopy": lambda: copy.deepcopy(tensor).numpy(),
        "save": saved,
        "clone": lambda: tensor.clone().numpy(),
        "list": lambda: np.array(tensor[:5000].tolist() + view[5000:].tolist(), np.uint8),
        "holds the GIL": lambda: np.frombuffer(ctypes.string_at(tensor.data_ptr(), content.size), np.uint8),
    }
    for name, look in ways.items():
        assert away.leave(tensor), name
        faults = _native.arena_stats().faults
        assert np.array_equal(look(), content), name
        assert _native.arena_stats().faults > faults, name
        assert (tensor.data_ptr(), "in") in _native.arena_events(), name


def test_kernels_find_the_bytes(away: Away) -> None:
    tensor = torch.randn(1 << 20)
    expected, product = torch.sin(tensor), tensor.view(1024, 1024) @ tensor.view(1024, 1024)
    assert away.leave(tensor)
    assert torch.equal(torch.sin(tensor), expected)
    assert away.leave(tensor)
    assert torch.equal(tensor.view(1024, 1024) @ tensor.view(1024, 1024), product)
    assert away.leave(tensor)
    tensor.add_(1)
    assert _native.arena_written(tensor.data_ptr())
    assert _native.arena_state(tensor.data_ptr()) == "in"
    assert not _native.arena_leave(tensor.data_ptr(), [(away.file, 0, 0, 4 << 20)])


def test_four_threads_find_the_bytes_at_once(away: Away) -> None:
    content = random_bytes(8 * MIB)
    tensor = tensor_of(content)
    for _ in range(10):
        assert away.leave(tensor)
        away.end = 0
        barrier, right = threading.Barrier(4), []

        def look(part: int, barrier: threading.Barrier = barrier, right: list[bool] = right) -> None:
            barrier.wait()
            mine = slice(part * 2 * MIB, (part + 1) * 2 * MIB)
            right.append(bool(np.array_equal(tensor.numpy()[mine], content[mine])))

        threads = [threading.Thread(target=look, args=(part,)) for part in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert right == [True] * 4


@pytest.mark.parametrize("size", [50_000, 4 * MIB])
def test_a_write_is_never_lost(away: Away, size: int) -> None:
    """A thread counts up in a tensor while another moves it out as often as it can."""
    tensor = torch.zeros(size // 8, dtype=torch.int64)
    view, stop = tensor.numpy(), threading.Event()
    left = rounds = 0

    def count() -> None:
        nonlocal rounds
        while not stop.is_set():
            view[rounds % 3] += 1
            view[-1] += 1
            rounds += 1
            time.sleep(1e-6 * (rounds % 97))

    thread = threading.Thread(target=count)
    thread.start()
    for _ in range(3000):
        away.end = 0
        _native.arena_bring_in(tensor.data_ptr())
        left += away.leave(tensor)
        if left == 100:
            break
    stop.set()
    thread.join()
    assert left > 0
    assert view[-1] == rounds
    assert view[:3].sum() == rounds
    assert view[3:-1].sum() == 0


def test_a_block_may_be_freed_in_any_state(away: Away) -> None:
    base = _native.arena_stats()
    for size in (5001, 3 * MIB):
        for state in ("in", "guarded", "out", "staged"):
            tensor = tensor_of(random_bytes(size))
            if state != "in":
                segment = away.write(tensor)
            if state in ("out", "staged"):
                assert _native.arena_leave(tensor.data_ptr(), [segment])
            if state == "staged":
                staging = _native.arena_stage(tensor.data_ptr())
            assert _native.arena_state(tensor.data_ptr()) == state
            address = tensor.data_ptr()
            del tensor
            if state == "staged":
                assert not _native.arena_arrive(staging), "the block is gone"
            with pytest.raises(ValueError):
                _native.arena_state(address)
            again = torch.zeros(size, dtype=torch.uint8)
            assert int(again.sum()) == 0
    stats = _native.arena_stats()
    del again
    assert (stats.out_bytes, stats.swap_used_bytes) == (base.out_bytes, base.swap_used_bytes)
    assert _native.arena_stats().in_memory_bytes == base.in_memory_bytes


def test_resident_bytes_fall_when_tensors_leave(away: Away) -> None:
    tensors = [tensor_of(random_bytes(8 * MIB)) for _ in range(8)]
    tensors += [tensor_of(random_bytes(500_000)) for _ in range(40)]
    full = vm_rss()
    for tensor in tensors:
        assert away.leave(tensor)
    _native.arena_trim()
    assert full - vm_rss() >= 80 * MIB
    for tensor in tensors:
        assert torch.equal(tensor[:100], tensor_of(random_bytes(tensor.numel()))[:100])


@pytest.mark.parametrize("size", [4096, 100_000, 3 * MIB])
def test_nobody_gets_the_addresses_of_a_read_that_was_abandoned(away: Away, size: int) -> None:
    """The system may still write there: a ring whose descriptors were closed does not say when it ends."""
    content = random_bytes(size)
    tensor = tensor_of(content)
    address, segment = tensor.data_ptr(), away.write(tensor)
    assert _native.arena_leave(address, [segment])
    before = _native.arena_stats().in_memory_bytes
    abandoned = _native.arena_stage(address)
    _native.arena_abandon(abandoned)
    assert _native.arena_state(address) == "out"
    assert _native.arena_stats().in_memory_bytes == before
    others = []
    for _ in range(50):
        staging = _native.arena_stage(address)
        assert not abandoned - size < staging < abandoned + size
        _native.arena_unstage(staging)
        others.append(torch.full((size,), 7, dtype=torch.uint8))
        assert not abandoned - size < others[-1].data_ptr() < abandoned + size
    assert away.come_back(tensor, segment)
    assert np.array_equal(tensor.numpy(), content)
    with pytest.raises(ValueError):
        _native.arena_abandon(abandoned)


@pytest.mark.parametrize("size", [MIB, 3 * MIB, 16 * MIB])
def test_what_comes_back_writable_is_not_taken_for_its_copy(away: Away, size: int) -> None:
    content = random_bytes(size)
    tensor = tensor_of(content)
    address, segment = tensor.data_ptr(), away.write(tensor)
    assert _native.arena_leave(address, [segment])
    staging = _native.arena_stage(address)
    ctypes.memmove(staging, content.ctypes.data, size)
    assert _native.arena_arrive(staging, False)
    assert _native.arena_state(address) == "in"
    assert np.array_equal(tensor.numpy(), content)
    before = _native.arena_stats().faults
    tensor.numpy()[7] ^= 255
    assert _native.arena_stats().faults == before  # nobody had to be asked
    assert not _native.arena_leave(address, [segment])  # the copy is of no use any more
    assert away.leave(tensor)
    content[7] ^= 255
    assert np.array_equal(tensor.numpy(), content)


@pytest.mark.slow
def test_ten_thousand_rounds_leave_no_trace(away: Away) -> None:
    tensors = [tensor_of(random_bytes(size, size)) for size in (9000, 300_000, 2 * MIB, 5 * MIB)]
    segments = [away.write(tensor) for tensor in tensors]

    def rounds(count: int) -> tuple[int, int]:
        for _ in range(count):
            for tensor, segment in zip(tensors, segments, strict=True):
                assert _native.arena_leave(tensor.data_ptr(), [segment])
            between = torch.empty(3 * MIB, dtype=torch.uint8)
            between[::4096] = 1
            for tensor in tensors:
                if tensor.numel() < MIB:
                    _native.arena_bring_in(tensor.data_ptr())
                else:  # the bytes do not matter here
                    staging = _native.arena_stage(tensor.data_ptr())
                    assert _native.arena_arrive(staging)
        return mappings(), vm_rss()

    maps, resident = rounds(500)
    more_maps, more_resident = rounds(10_000)
    assert more_maps <= maps + 16
    assert more_resident <= resident + 4 * MIB


def test_unknown_addresses_are_refused_and_ignored_where_kernels_touch(away: Away) -> None:
    tensor = torch.zeros(MIB)
    for call in (
        _native.arena_lend,
        _native.arena_unguard,
        _native.arena_written,
        _native.arena_stage,
        _native.arena_arrive,
        _native.arena_unstage,
        _native.arena_bring_in,
        _native.arena_state,
    ):
        for address in (0, 4096, tensor.data_ptr() + 4096):
            with pytest.raises(ValueError):
                call(address)
    _native.arena_touch([0, 12345, tensor.data_ptr()])
