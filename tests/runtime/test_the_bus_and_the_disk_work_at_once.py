"""Copies between an accelerator and the disk: neither direction, tensor nor leg waits for another one."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock._native import DEMAND
from penstock.errors import SpillError
from penstock.options import IoOptions
from penstock.runtime.storages import AWAY, RESIDENT, ManagedStorage
from penstock.storage.native import PosixTransport
from penstock.storage.paths import TRANSPORTS
from penstock.storage.spill import SpillSpace
from tests.support.checked import CheckedDriver, CheckedEvent, CheckedRun, checked_run
from tests.support.gated_transport import WAIT_S, Gate, GatedTransport

CHUNK_BYTES = 4096  # of a checked run, which has three buffers each way
ELEMENTS = CHUNK_BYTES // 4
BUDGET = 64 * CHUNK_BYTES


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate()
    monkeypatch.setitem(TRANSPORTS, "posix", lambda: GatedTransport(PosixTransport(), gate))
    return gate


@pytest.fixture
def spill(gate: Gate, tmp_path: Path) -> Iterator[SpillSpace]:
    with SpillSpace(tmp_path, IoOptions(paths=["posix direct"])) as space:
        try:
            yield space
        finally:
            gate.open()


class HeldEvent(CheckedEvent):
    """The host does not see it complete while it is held."""

    def synchronize(self) -> None:
        assert self._driver.free.wait(WAIT_S)  # type: ignore[attr-defined]
        super().synchronize()


class HeldDriver(CheckedDriver):
    """launched: copies that a stream was given"""

    def __init__(self, seed: int = 0, **options: Any) -> None:
        super().__init__(seed, **options)
        self.free = threading.Event()
        self.free.set()
        self.launched = 0
        self._one_more = threading.Condition()

    def make_event(self, timed: bool = False) -> CheckedEvent:
        return HeldEvent(self)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        super().copy(target, source, stream)
        with self._one_more:
            self.launched += 1
            self._one_more.notify_all()

    def wait_for(self, launched: int) -> None:
        with self._one_more:
            assert self._one_more.wait_for(lambda: self.launched >= launched, WAIT_S)


@pytest.fixture
def run(spill: SpillSpace, gate: Gate) -> Iterator[CheckedRun]:
    """With no host tier. The I/O path is known: nothing is measured, which would have the disk to itself."""
    with checked_run(
        spill, BUDGET, host_bytes=0, timeout_s=WAIT_S, in_flight_bytes=BUDGET, make_driver=HeldDriver
    ) as run:
        rehearsed = [full(number) for number in range(10)]
        for tensor in rehearsed:
            evict(run, tensor)
        run.engine.drain()
        assert [float(tensor.mean()) for tensor in rehearsed] == list(map(float, range(10)))
        del rehearsed
        gate.seen.clear()
        run.driver.launched = 0  # type: ignore[attr-defined]
        try:
            yield run
        finally:
            run.driver.free.set()  # type: ignore[attr-defined]
            gate.open()


def full(number: int, chunks: float = 1) -> torch.Tensor:
    return torch.full((int(chunks * ELEMENTS),), float(number))


def find(run: CheckedRun, tensor: torch.Tensor) -> ManagedStorage:
    managed = run.clock.storages.find(tensor.untyped_storage())
    assert managed is not None
    return managed


def evict(run: CheckedRun, tensor: torch.Tensor) -> ManagedStorage:
    managed = find(run, tensor)
    with run.engine.lock:
        run.engine.evict(managed, "disk", release=True)
    return managed


def prefetch(run: CheckedRun, tensor: torch.Tensor) -> None:
    with run.engine.lock:
        run.engine.prefetch(find(run, tensor))


def test_no_write_keeps_a_read_from_starting(run: CheckedRun, gate: Gate) -> None:
    away = full(1)
    evict(run, away)
    run.engine.drain()
    gate.shut_for = "write"
    leaving = [full(number, 2.5) for number in range(4)]
    for tensor in leaving:
        evict(run, tensor)
    gate.wait_for("write", 2)
    assert float(away.sum()) == ELEMENTS  # a demand
    gate.open()
    assert [float(tensor.max()) for tensor in leaving] == [0, 1, 2, 3]


def test_reads_begin_before_their_memory_is_free(run: CheckedRun, gate: Gate) -> None:
    """Who had the memory before is not over, as far as the host knows; and the next tensor does not wait for
    this one to cross the bus."""
    tensors = [full(1, 1.5), full(2)]
    for tensor in tensors:
        evict(run, tensor)
    run.engine.drain()
    gate.seen.clear()
    run.driver.free.clear()  # type: ignore[attr-defined]
    for tensor in tensors:
        prefetch(run, tensor)
    gate.wait_for("read", 3)
    run.driver.free.set()  # type: ignore[attr-defined]
    assert [(float(tensor.min()), float(tensor.max())) for tensor in tensors] == [(1, 1), (2, 2)]


def test_a_tensor_is_copied_while_the_one_before_is_written(run: CheckedRun, gate: Gate) -> None:
    gate.shut_for = "write"
    tensors = [full(1), full(2), full(3)]
    for tensor in tensors:
        evict(run, tensor)
    run.driver.wait_for(3)  # type: ignore[attr-defined]
    assert all(find(run, tensor).state not in (AWAY, RESIDENT) for tensor in tensors)
    gate.open()
    run.engine.drain()
    assert all(find(run, tensor).state == AWAY for tensor in tensors)
    assert [float(tensor.mean()) for tensor in tensors] == [1, 2, 3]


def test_chunks_are_given_to_the_stream_without_waiting_for_each(run: CheckedRun, gate: Gate) -> None:
    tensor = full(1, 2.5)
    run.driver.free.clear()  # type: ignore[attr-defined]
    evict(run, tensor)
    run.driver.wait_for(3)  # type: ignore[attr-defined]
    run.driver.free.set()  # type: ignore[attr-defined]
    run.engine.drain()
    run.driver.free.clear()  # type: ignore[attr-defined]
    prefetch(run, tensor)
    run.driver.wait_for(6)  # type: ignore[attr-defined]
    run.driver.free.set()  # type: ignore[attr-defined]
    assert float(tensor.sum()) == tensor.numel()


def test_a_write_that_fails_is_told_of_its_own_tensor(run: CheckedRun, gate: Gate) -> None:
    gate.shut_for = "write"
    first, second = full(1), full(2)
    evict(run, first), evict(run, second)
    of_first, of_second = gate.wait_for("write", 2)
    gate.let_go(of_second)
    with run.engine.lock:  # the last to begin is the first to be over
        run.engine._wait_for_copy()
    assert find(run, second).state == AWAY and find(run, first).state not in (AWAY, RESIDENT)
    gate.let_go(of_first, errno.EIO)
    run.engine.drain()
    with pytest.raises(SpillError) as failed:
        run.engine.raise_error()
    assert failed.value.errno == errno.EIO
    assert find(run, first).state == RESIDENT and not find(run, first).clean
    gate.open()
    evict(run, first)
    run.engine.drain()
    assert find(run, first).state == AWAY
    assert (float(first.mean()), float(second.mean())) == (1, 2)


def test_no_buffer_is_lost_where_chunks_fail(run: CheckedRun, gate: Gate) -> None:
    tensor = full(3, 4.5)
    for failing in range(1, 4):
        gate.seen.clear()
        gate.shut_for = "write"
        evict(run, tensor)
        held = gate.wait_for("write", 3)
        gate.let_go(held[failing - 1], errno.EIO)
        gate.open()
        run.engine.drain()
        with pytest.raises(SpillError):
            run.engine.raise_error()
    evict(run, tensor)
    run.engine.drain()
    for failing in range(1, 4):
        gate.seen.clear()
        gate.shut_for = "read"
        prefetch(run, tensor)
        held = gate.wait_for("read", 3)
        gate.let_go(held[failing - 1], errno.EIO)
        gate.open()
        run.engine.drain()
        assert run.engine.failed_prefetches == failing
        assert run.engine.prefetch_error.errno == errno.EIO  # type: ignore[union-attr]
    assert (float(tensor.min()), float(tensor.max())) == (3, 3)


def test_a_demand_overtakes_what_waits_for_a_buffer(run: CheckedRun, gate: Gate) -> None:
    """The prefetch whose turn it is has no buffer yet, and so has not begun."""
    first, second, demanded = full(1, 3), full(2), full(3)
    for tensor in (first, second, demanded):
        evict(run, tensor)
    run.engine.drain()
    managed = find(run, demanded)
    gate.seen.clear()
    gate.shut_for = "read"
    prefetch(run, first)
    gate.wait_for("read", 3)
    prefetch(run, second)
    time.sleep(0.2)  # who takes a copy before a buffer has taken it by now
    with run.engine.lock:
        assert run.engine._start_copy_in(managed, DEMAND)
    gate.open()
    assert gate.wait_for("read", 5)[3].priority == DEMAND
    assert [float(tensor.mean()) for tensor in (first, second, demanded)] == [1, 2, 3]


@pytest.mark.parametrize("kind", ["write", "read"])
def test_what_is_under_way_ends_before_the_device_is_closed(run: CheckedRun, gate: Gate, kind: str) -> None:
    tensor = full(1, 2.5)
    managed = find(run, tensor)
    if kind == "read":
        evict(run, tensor)
        run.engine.drain()
    gate.seen.clear()
    gate.shut_for = kind
    if kind == "read":
        prefetch(run, tensor)
    else:
        evict(run, tensor)
    gate.wait_for(kind, 3)
    closing = threading.Thread(target=run.device.close)
    closing.start()
    closing.join(0.2)  # who does not wait has closed by now
    assert closing.is_alive()
    gate.open()
    closing.join(WAIT_S)
    assert managed.state == (RESIDENT if kind == "read" else AWAY)
    run.engine.raise_error()
    assert not run.engine.failed_prefetches
    del tensor
