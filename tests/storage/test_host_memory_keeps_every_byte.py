"""Host memory as a place to spill to: bytes come back, its size holds, and it is given back."""

from __future__ import annotations

import errno
import os
import random
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import SpillError
from penstock.options import IoOptions
from penstock.storage import host_memory
from penstock.storage.aligned import AlignedBuffer
from penstock.storage.extents import Extent
from penstock.storage.host_memory import HostMemory
from penstock.storage.spill import SpillSpace
from penstock.storage.transfer import Transfer

WAIT_S = 30
PAGE = 4096
MIB = 1 << 20
CAPACITY = 4 * MIB


def move(space: SpillSpace, kind: str, extent: Extent, buffer: AlignedBuffer, shift: int = 0) -> Transfer:
    over = threading.Semaphore(0)
    ended: list[Transfer] = []

    def on_done(transfer: Transfer) -> None:
        ended.append(transfer)
        over.release()

    getattr(space, kind)(extent, buffer.address + shift, buffer.size_bytes - shift, buffer, on_done)
    assert over.acquire(timeout=WAIT_S)
    return ended[0]


def filled(data: bytes, shift: int) -> AlignedBuffer:
    buffer = AlignedBuffer(len(data) + shift)
    buffer.view()[shift:] = data
    return buffer


def content(space: SpillSpace, extent: Extent, size_bytes: int) -> bytes:
    """As the arena reads it: by the descriptor."""
    pieces = space.segments(extent, size_bytes)
    return b"".join(os.pread(file, size, offset) for file, offset, _, size in pieces)


@settings(max_examples=30, deadline=None)
@given(
    moves=st.lists(
        st.tuples(st.integers(1, CAPACITY // 3), st.sampled_from([0, 1, 16, 64]), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    seed=st.integers(0, 99),
)
def test_bytes_come_back_and_the_capacity_holds(
    tmp_path_factory: pytest.TempPathFactory, moves: list[tuple[int, int, bool]], seed: int
) -> None:
    """size, shift of the memory from a line of the cache, and whether the oldest is released first"""
    draw = random.Random(seed)
    with SpillSpace(tmp_path_factory.getbasetemp(), host_bytes=CAPACITY) as space:
        held: dict[Extent, bytes] = {}
        for size, shift, releases in moves:
            if releases and held:
                first = next(iter(held))
                del held[first]
                space.release(first)
            extent = space.try_allocate_host(size)
            if extent is None:
                continue
            held[extent] = draw.randbytes(size)
            assert sum(each.size_bytes for each in held) <= CAPACITY
            assert move(space, "write", extent, filled(held[extent], shift), shift).error is None
            for other, data in held.items():
                assert content(space, other, len(data)) == data
                back = AlignedBuffer(len(data) + shift)
                assert move(space, "read", other, back, shift).error is None
                assert bytes(back.view()[shift:]) == data
        assert 0 < space.host_bytes <= CAPACITY
        assert space.used_bytes == space.file_bytes == 0, "nothing is on disk"
        for extent in held:
            space.release(extent)
        assert space.try_allocate_host(CAPACITY) is not None, "all of it is free again"


def test_what_does_not_fit_gets_no_place(tmp_path: Path) -> None:
    with SpillSpace(tmp_path, host_bytes=CAPACITY) as space:
        assert space.try_allocate_host(CAPACITY + PAGE) is None
        taken = space.try_allocate_host(CAPACITY)
        assert taken is not None and space.try_allocate_host(1) is None
        space.release(taken)
        assert space.try_allocate_host(1) is not None
    with SpillSpace(tmp_path) as space:
        assert not space.has_host and space.try_allocate_host(1) is None and space.host_bytes == 0


def test_memory_that_the_system_refuses_is_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with SpillSpace(tmp_path, host_bytes=CAPACITY) as space:
        monkeypatch.setattr(host_memory, "advise", lambda *_: errno.ENOMEM)
        assert space.try_allocate_host(PAGE) is None
        monkeypatch.undo()
        assert space.try_allocate_host(PAGE) is not None
    monkeypatch.setattr(host_memory, "_bind", refuse)
    refused = r"4.00 MiB of NUMA node 0 cannot become a tier: Cannot allocate memory\. Lower host_budget"
    with pytest.raises(SpillError, match=refused):
        HostMemory(CAPACITY, 0)


def test_older_systems_take_it_in_small_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "advise", lambda *_: errno.EINVAL)
    data = random.Random(1).randbytes(MIB)
    with SpillSpace(tmp_path, host_bytes=CAPACITY) as space:
        extent = space.try_allocate_host(MIB)
        assert extent is not None
        assert move(space, "write", extent, filled(data, 0)).error is None
        assert content(space, extent, MIB) == data


def test_checksums_find_what_was_changed_there(tmp_path: Path) -> None:
    data = random.Random(1).randbytes(MIB)
    with SpillSpace(tmp_path, IoOptions(verify=True), host_bytes=CAPACITY) as space:
        extent = space.try_allocate_host(MIB)
        assert extent is not None
        assert move(space, "write", extent, filled(data, 0)).error is None
        file, offset, *_ = space.segments(extent, MIB)[0]
        os.pwrite(file, b"other", offset + 5000)
        error = move(space, "read", extent, AlignedBuffer(MIB)).error
        assert error is not None and "came back from host memory other than they were written" in str(error)


def test_it_is_private_and_given_back(tmp_path: Path) -> None:
    def mapped() -> list[str]:
        return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:penstock" in line]

    before = len(mapped()), len(os.listdir("/proc/self/fd"))
    with SpillSpace(tmp_path, host_bytes=CAPACITY) as space:
        space.try_allocate_host(MIB)
        assert len(mapped()) == before[0] + 1
        (file, *_), *_ = space.segments(space.try_allocate_host(PAGE), PAGE)  # type: ignore[arg-type]
        assert os.fstat(file).st_nlink == 0 and not os.get_inheritable(file)
    assert (len(mapped()), len(os.listdir("/proc/self/fd"))) == before
