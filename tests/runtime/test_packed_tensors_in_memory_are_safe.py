"""A tensor that is packed, and not yet written, is in memory only. Whatever happens then, its bytes are
there."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import penstock
from penstock.errors import SpillError
from penstock.runtime.storages import AWAY
from penstock.storage.native import PosixTransport
from penstock.storage.paths import TRANSPORTS
from penstock.storage.transfer import Transfer
from tests.support.faulty_transport import FaultyTransport
from tests.support.runs import HARDWARE, PAGED

ELEMENTS = 1 << 18
SIZE = ELEMENTS * 4


class Gate(FaultyTransport):
    """What is submitted begins when the gate is opened, and fails with ``error`` where that is not 0."""

    def __init__(self) -> None:
        self.opened, self.error = threading.Event(), 0
        super().__init__(PosixTransport(), lambda transfer: self.error)

    def submit(self, transfers: Sequence[Transfer]) -> None:
        def begin() -> None:
            self.opened.wait()
            super(Gate, self).submit(transfers)

        threading.Thread(target=begin, daemon=True).start()

    @contextlib.contextmanager
    def opened_at_last(self) -> Iterator[None]:
        """A run that is closed waits for what was submitted."""
        try:
            yield
        finally:
            self.opened.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setitem(TRANSPORTS, "posix", lambda: gate)
    yield gate
    gate.opened.set()


def _offload(spill_dir: Path, budget_bytes: int = 16 * SIZE, io: str = "posix direct") -> penstock.Offload:
    return penstock.offload(
        device_budget=budget_bytes,
        spill_dir=spill_dir,
        hardware=HARDWARE,
        planning=PAGED,
        io=penstock.IoOptions(paths=io),
    )


def _sparse(seed: int, elements: int = ELEMENTS) -> torch.Tensor:
    return torch.relu(torch.randn(elements, generator=torch.Generator().manual_seed(seed)) - 1)


def _pack(run: penstock.Offload, tensor: torch.Tensor) -> None:
    managed = run._clock.storages.track(tensor.untyped_storage())
    with run._engine.lock:
        before = run._device.in_memory_bytes()
        run._engine.evict(managed, release=True, packs=4)
        assert managed.state == AWAY and managed.writing_packed
        assert run._device.in_memory_bytes() == before - tensor.nbytes + managed.packed_bytes
        assert 0 < managed.packed_bytes < tensor.nbytes // 2


def test_memory_is_free_before_the_copy_is_written(gate: Gate, tmp_path: Path) -> None:
    with _offload(tmp_path) as run, gate.opened_at_last():
        tensor, other = _sparse(1), _sparse(2)
        views, expected = (tensor.numpy(), other.numpy()), (tensor.clone(), other.clone())
        _pack(run, tensor)
        _pack(run, other)
        reader, writer = os.pipe()
        if not (child := os.fork()):  # it has nobody to wait for
            os.write(writer, bytes([np.array_equal(views[0], expected[0].numpy())]))
            os._exit(0)
        assert os.read(reader, 1) == b"\1"
        os.waitpid(child, 0)
        assert np.array_equal(views[0], expected[0].numpy())  # an access that nobody planned
        assert torch.equal(other, expected[1])  # by a kernel
        gate.opened.set()
        run._engine.drain()
    assert torch.equal(tensor, expected[0]) and torch.equal(other, expected[1])


def test_what_is_written_to_meanwhile_is_not_taken_from_the_copy(gate: Gate, tmp_path: Path) -> None:
    with _offload(tmp_path) as run, gate.opened_at_last():
        tensor, other = _sparse(1), _sparse(2)
        view, expected = tensor.numpy(), (tensor.clone(), other.clone())
        _pack(run, tensor)
        _pack(run, other)
        view[7] = 3.0
        expected[0][7] = 3.0
        other.add_(1)
        expected[1].add_(1)
        gate.opened.set()
        run._engine.drain()
        for managed in (run._clock.storages.track(each.untyped_storage()) for each in (tensor, other)):
            with run._engine.lock:
                run._engine.evict(managed, release=True)
        run._engine.drain()
        assert torch.equal(tensor, expected[0]) and torch.equal(other, expected[1])


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_failed_write_leaves_the_packed_bytes(error: int, gate: Gate, tmp_path: Path) -> None:
    with _offload(tmp_path) as run, gate.opened_at_last():
        tensors = [_sparse(number) for number in range(3)]
        expected = [tensor.clone() for tensor in tensors]
        for tensor in tensors:
            _pack(run, tensor)
        gate.error = error
        gate.opened.set()
        run._engine.drain()
        with pytest.raises(SpillError) as failure:
            run._engine.raise_error()
        assert failure.value.errno == error
        assert torch.equal(tensors[0], expected[0])
        gate.error = 0
        managed = run._clock.storages.track(tensors[1].untyped_storage())
        with run._engine.lock:
            run._engine.evict(managed, release=True)  # tried again
        run._engine.drain()
        assert managed.state == AWAY and not managed.packed_bytes
        assert torch.equal(tensors[1], expected[1])
        view = tensors[2].numpy()
    assert np.array_equal(view, expected[2].numpy())  # it came back when the run was closed


@pytest.mark.parametrize("times", [1, 9], ids=["small", "large"])
@pytest.mark.parametrize("io", ["posix direct", "posix staged"])
def test_packed_bytes_leave_for_what_needs_the_memory(
    io: str, times: int, gate: Gate, tmp_path: Path
) -> None:
    """The arena writes them to its own file where nobody in Python can help, also while they are written."""
    elements = times * ELEMENTS
    with _offload(tmp_path, 4 * times * SIZE, io) as run, gate.opened_at_last():
        tensors = [_sparse(number, elements) for number in range(3)]
        values = [float(tensor.sum()) for tensor in tensors]
        for tensor in tensors:
            _pack(run, tensor)
        full = torch.ones(4 * elements - 4096)
        assert float(full.sum()) == 4 * elements - 4096
        del full
        gate.opened.set()
        run._engine.drain()
        assert [float(tensor.sum()) for tensor in tensors] == values


def test_what_is_fetched_stays_packed_until_it_is_used(tmp_path: Path) -> None:
    with _offload(tmp_path) as run:
        tensor = _sparse(1)
        expected = tensor.clone()
        _pack(run, tensor)
        run._engine.drain()
        managed = run._clock.storages.track(tensor.untyped_storage())
        assert managed.state == AWAY and not managed.packed_bytes
        before = run._device.in_memory_bytes()
        with run._engine.lock:
            run._engine.prefetch(managed)
        run._engine.drain()
        assert managed.state == AWAY and 0 < managed.packed_bytes < SIZE // 2
        assert run._device.in_memory_bytes() == before + managed.packed_bytes
        with run._engine.lock:
            run._engine.evict(managed, release=True)
        assert run._device.in_memory_bytes() == before, "it has a copy"
        with run._engine.lock:
            run._engine.prefetch(managed)
        run._engine.drain()
        assert torch.equal(tensor, expected)
        assert run._device.in_memory_bytes() == before + SIZE
