"""EIO and ENOSPC at every transfer of an accelerator, and a disk that hangs.

The error is raised, nothing is lost, and the next step works.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from penstock.errors import BudgetTooSmall, SpillError, SpillSpaceFull
from penstock.options import IoOptions
from penstock.storage.native import PosixTransport
from penstock.storage.paths import TRANSPORTS
from penstock.storage.spill import SpillSpace
from penstock.storage.transfer import Transfer
from tests.support.checked import CheckedRun, checked_run
from tests.support.faulty_transport import FaultyTransport

TENSORS, ELEMENTS = 8, 3000  # 12,000 bytes: three staging buffers each
BUDGET = 4 * ELEMENTS * 4


class Disk:
    """Which of its transfers fails, and how. hang: those from it on never begin until it is set."""

    def __init__(self) -> None:
        self.fails, self.error = -1, 0
        self.count = itertools.count()
        self.hang: threading.Event | None = None

    def fault(self, request: Transfer) -> int:
        if next(self.count) == self.fails:
            return self.error
        if self.hang is not None:
            self.hang.wait()
        return 0


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setitem(TRANSPORTS, "posix", lambda: FaultyTransport(PosixTransport(), disk.fault))
    return disk


@pytest.fixture
def spill(disk: Disk, tmp_path: Path) -> Iterator[SpillSpace]:
    with SpillSpace(tmp_path, IoOptions(paths=["posix direct"])) as space:
        yield space
        if disk.hang is not None:
            disk.hang.set()


def step(run: CheckedRun, tensors: list[torch.Tensor]) -> None:
    run.engine.begin_step()
    run.device.begin_step()
    run.clock.begin_step([], None)
    try:
        for tensor in tensors:
            tensor.add_(0)
    finally:
        run.clock.end_step()


def make(run: CheckedRun) -> list[torch.Tensor]:
    return [torch.full((ELEMENTS,), float(index)) for index in range(TENSORS)]


def transfers(spill: SpillSpace, disk: Disk) -> int:
    """Of two steps without a fault."""
    with checked_run(spill, BUDGET, host_bytes=0) as run:
        tensors = make(run)
        for _ in range(2):
            step(run, tensors)
    return next(disk.count)


@pytest.mark.slow
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_failed_transfer_loses_nothing(error: int, spill: SpillSpace, disk: Disk) -> None:
    count = transfers(spill, disk)
    assert count > 40
    raised = 0
    for failing in range(count):
        disk.count, disk.fails, disk.error = itertools.count(), failing, error
        with checked_run(spill, BUDGET, host_bytes=0, seed=failing) as run:
            tensors: list[torch.Tensor] = []
            try:
                tensors = make(run)
                step(run, tensors)
                step(run, tensors)
            except SpillError as failure:
                raised += 1
                assert isinstance(failure, SpillSpaceFull) == (error == errno.ENOSPC)
                assert failure.errno == error and "spill file in" in str(failure)
            with contextlib.suppress(SpillError):  # of a copy that was still under way
                step(run, tensors)
            step(run, tensors)
            values = [(float(tensor.min()), float(tensor.max())) for tensor in tensors]
            assert values == [(index, index) for index in range(len(tensors))]
            del tensors
    assert raised > count // 10
    assert spill.used_bytes == 0


def test_a_full_spill_space_is_an_error_and_the_next_step_works(tmp_path: Path) -> None:
    with (
        SpillSpace(tmp_path, capacity_bytes=3 * 12288) as spill,
        checked_run(spill, BUDGET, host_bytes=0) as run,
    ):
        tensors = [torch.full((ELEMENTS,), float(index)) for index in range(6)]
        with pytest.raises(SpillSpaceFull, match="disk budget"):
            tensors += [torch.full((ELEMENTS,), float(index)) for index in range(6, 12)]
        step(run, tensors)
        assert [float(tensor.max()) for tensor in tensors] == list(map(float, range(len(tensors))))


def test_a_disk_that_hangs_is_named(tmp_path: Path, spill: SpillSpace, disk: Disk) -> None:
    disk.hang = threading.Event()
    with checked_run(spill, BUDGET, host_bytes=0, timeout_s=0.2) as run:
        with pytest.raises(SpillError, match="does not answer") as hung:
            make(run)
        assert str(tmp_path) in str(hung.value)
        disk.hang.set()  # it answers again
        run.engine._timeout_s = 60.0  # and may be slow
        tensors = make(run)
        step(run, tensors)
        assert [float(tensor.max()) for tensor in tensors] == list(map(float, range(TENSORS)))


def test_a_kernel_that_finds_no_memory_runs_again_when_others_have_left(tmp_path: Path) -> None:
    """What fake tensors cannot foresee: the allocator refuses it, other tensors leave, and it runs again."""
    with SpillSpace(tmp_path) as spill, checked_run(spill, 64 << 10, refuses=True) as run:
        tensors = [torch.arange(1000.0) + index for index in range(15)]  # 60,000 bytes
        for tensor in tensors:
            found = (tensor > -1).nonzero()  # 8,000 bytes, where 1,000 were to be expected
            assert found.shape == (1000, 1) and int(found.sum()) == 499500
        assert run.driver.refused > 0
        assert [float(tensor[0]) for tensor in tensors] == list(map(float, range(15)))


def test_a_kernel_that_can_never_fit_names_the_numbers(tmp_path: Path) -> None:
    with SpillSpace(tmp_path) as spill, checked_run(spill, 16 << 10, refuses=True) as run:
        kept = torch.arange(1000.0)
        with pytest.raises(BudgetTooSmall, match=r"device budget is 16.* KiB") as refused:
            torch.cat([kept] * 5)
        assert refused.value.minimum_bytes >= 24000
        mask = torch.ones(6000, dtype=torch.bool)
        with pytest.raises(BudgetTooSmall, match="Raise device_budget"):
            mask.nonzero()
        assert float(kept.sum()) == 499500
        with pytest.raises(BudgetTooSmall), run.engine.lock:
            run.engine.make_room(1 << 30)
