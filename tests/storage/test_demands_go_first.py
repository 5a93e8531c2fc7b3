"""Whoever waits for the disk goes before what was asked for ahead of time, and that before evictions."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from penstock.options import IoOptions
from penstock.storage.aligned import AlignedBuffer
from penstock.storage.extents import Extent
from penstock.storage.paths import TRANSPORTS
from penstock.storage.spill import SpillSpace
from penstock.storage.transfer import DEMAND, EVICT, PREFETCH, Transfer
from tests.support.memory_transport import MemoryTransport

WAIT_S = 30
SIZE = 64 << 10


class Gate:
    """Stands before a transport in memory: what begins waits while it is shut."""

    def __init__(self) -> None:
        self.began: list[tuple[str, int]] = []  # kind and offset, in the order they began
        self._open = threading.Event()
        self._open.set()
        self._changed = threading.Condition()

    def pass_through(self, request: Transfer) -> int:
        with self._changed:
            self.began.append((request.kind, request.offset))
            self._changed.notify_all()
        assert self._open.wait(WAIT_S)
        return 0

    def shut(self) -> None:
        self.began.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def wait_until_began(self, *expected: tuple[str, int]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: set(expected) <= set(self.began), WAIT_S), self.began


class Mover:
    """A spill space, and transfers of it that are counted."""

    def __init__(self, space: SpillSpace) -> None:
        self.space = space
        self.transfers: list[Transfer] = []
        self._buffer = AlignedBuffer(SIZE)
        self._over = threading.Semaphore(0)

    def move(self, kind: str, extent: Extent, priority: int) -> Transfer:
        start = self.space.write if kind == "write" else self.space.read
        return start(extent, self._buffer.address, SIZE, self._buffer, self._on_done, priority=priority)

    def wait(self, count: int) -> None:
        for _ in range(count):
            assert self._over.acquire(timeout=WAIT_S)
        assert [transfer.error for transfer in self.transfers[-count:]] == [None] * count

    def _on_done(self, transfer: Transfer) -> None:
        self.transfers.append(transfer)
        self._over.release()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def mover(request: pytest.FixtureRequest, tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch):
    """Of as many threads as the parameter says."""
    threads = request.param
    monkeypatch.setitem(TRANSPORTS, "memory", lambda: MemoryTransport(threads, fault=gate.pass_through))
    with SpillSpace(tmp_path, IoOptions(paths=["memory direct"], reexplore=0)) as space:
        yield Mover(space)
        gate.open()


@pytest.mark.parametrize("mover", [1], indirect=True)
def test_demands_go_first_across_directions(mover: Mover, gate: Gate) -> None:
    extents = [mover.space.allocate(SIZE) for _ in range(8)]
    for extent in extents * 3:  # after some of each, nothing is measured for a while
        for kind in ("write", "read"):
            mover.move(kind, extent, DEMAND)
            mover.wait(1)
    gate.shut()
    mover.move("write", extents[0], EVICT)
    gate.wait_until_began(("write", extents[0].offset))
    asked = [
        ("write", 1, EVICT),
        ("read", 2, PREFETCH),
        ("write", 3, EVICT),
        ("read", 4, PREFETCH),
        ("read", 5, DEMAND),
        ("write", 6, DEMAND),
        ("write", 7, PREFETCH),
    ]
    pending = [mover.move(kind, extents[number], priority) for kind, number, priority in asked]
    pending[3].raise_priority()
    pending[3].raise_priority()
    gate.open()
    mover.wait(8)
    numbers = [[extent.offset for extent in extents].index(offset) for _, offset in gate.began]
    assert numbers == [0, 5, 6, 4, 2, 7, 1, 3]
    pending[3].raise_priority()  # it is over


@pytest.mark.parametrize("mover", [4], indirect=True)
@pytest.mark.parametrize("kind", ["write", "read"])
def test_a_demand_starts_beside_what_is_measured_and_the_measurement_is_discarded(
    mover: Mover, gate: Gate, kind: str
) -> None:
    extents = [mover.space.allocate(SIZE) for _ in range(4)]
    for extent in extents if kind == "read" else []:
        mover.move("write", extent, DEMAND)
        mover.wait(1)
    priority = EVICT if kind == "write" else PREFETCH
    gate.shut()
    mover.move(kind, extents[0], priority)  # nothing is known of this size: it is measured
    gate.wait_until_began((kind, extents[0].offset))
    mover.move(kind, extents[1], priority)  # so it waits
    assert gate.began == [(kind, extents[0].offset)]
    mover.move(kind, extents[2], DEMAND)
    gate.wait_until_began((kind, extents[2].offset), (kind, extents[1].offset))
    gate.open()
    mover.wait(3)
    measured = [entry for entry in mover.space.tables().entries if entry.kind == kind]
    assert measured == []
    mover.move(kind, extents[3], DEMAND)  # alone: it is measured
    mover.wait(1)
    (entry,) = [entry for entry in mover.space.tables().entries if entry.kind == kind]
    assert entry.samples == 1


@pytest.mark.parametrize("mover", [4], indirect=True)
def test_what_waits_for_a_measurement_can_be_hurried(mover: Mover, gate: Gate) -> None:
    extents = [mover.space.allocate(SIZE) for _ in range(4)]
    for extent in extents:
        mover.move("write", extent, DEMAND)
        mover.wait(1)
    gate.shut()
    pending = [mover.move("read", extent, PREFETCH) for extent in extents]
    gate.wait_until_began(("read", extents[0].offset))
    assert len(gate.began) == 1
    pending[2].raise_priority()
    gate.wait_until_began(*(("read", extent.offset) for extent in extents))
    gate.open()
    mover.wait(4)


def test_one_that_is_hurried_while_it_is_handed_over_is_a_demand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    class Late(MemoryTransport):
        def submit(self, transfers: Sequence[Transfer]) -> None:
            transfers[0].raise_priority()
            super().submit(transfers)
            order.append("submitted")

        def raise_priority(self, transfers: Sequence[Transfer]) -> None:
            super().raise_priority(transfers)
            order.append("hurried")

    monkeypatch.setitem(TRANSPORTS, "memory", Late)
    with SpillSpace(tmp_path, IoOptions(paths=["memory direct"], reexplore=0)) as space:
        mover, extent = Mover(space), space.allocate(SIZE)
        for priority in (DEMAND, EVICT):  # the first one is carried out twice
            order.clear()
            mover.move("write", extent, priority)
            mover.wait(1)
    assert order == ["hurried", "submitted", "hurried"]


@pytest.mark.parametrize("mover", [1], indirect=True)
def test_a_long_row_that_ends_at_once_needs_no_stack(mover: Mover) -> None:
    """Each transfer asks for the next when it is over, thousands of times."""
    space, extent, left = mover.space, mover.space.allocate(SIZE), [3000]
    buffer, over = AlignedBuffer(SIZE), threading.Event()

    def again(transfer: Transfer | None) -> None:
        left[0] -= 1
        if (transfer is not None and transfer.error is not None) or not left[0]:
            over.set()
        else:
            space.write(extent, buffer.address, SIZE, buffer, again, priority=DEMAND)

    again(None)
    assert over.wait(WAIT_S)
    assert left == [0]
