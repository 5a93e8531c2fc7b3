"""What the allocator of an accelerator may reserve is the budget, beside what the run does not move."""

from __future__ import annotations

import pytest
import torch

from penstock.errors import InvalidArgument
from penstock.runtime.devices.driver import Memory
from penstock.storage.spill import SpillSpace
from tests.support.checked import CheckedDriver, CheckedStream, checked_run

BUDGET_BYTES = 64 << 10
CACHED_BYTES = 40 << 20


class Caching(CheckedDriver):
    """Its allocator keeps memory that tensors had before the run.

    limits        that were set
    before        a tensor made before the run
    """

    before_bytes = 8 << 10

    def __init__(self, seed: int = 0, *, refuses: bool = False) -> None:
        super().__init__(seed, refuses=refuses)
        self.cached_bytes = CACHED_BYTES
        self.limits: list[int | None] = []
        with self.mode:
            self.before = torch.arange(float(self.before_bytes // 4)).mul_(2)

    def memory(self) -> Memory:
        found = super().memory()
        return found._replace(
            reserved_bytes=found.reserved_bytes + self.cached_bytes,
            peak_reserved_bytes=found.peak_reserved_bytes + self.cached_bytes,
        )

    def empty_cache(self) -> None:
        self.cached_bytes = 0

    def limit(self, reserved_bytes: int | None) -> None:
        super().limit(reserved_bytes)
        self.limits.append(reserved_bytes)


def test_a_full_cache_does_not_raise_it(spill: SpillSpace) -> None:
    with checked_run(spill, BUDGET_BYTES, make_driver=Caching) as run:
        assert isinstance(run.driver, Caching)
        assert run.driver.limits == [BUDGET_BYTES + run.driver.before.nbytes]


def test_what_was_there_and_moves_counts_against_the_budget(spill: SpillSpace) -> None:
    with checked_run(spill, BUDGET_BYTES, make_driver=Caching, refuses=True) as run:
        assert isinstance(run.driver, Caching)
        run.clock.set_kind(run.driver.before, 0)
        assert run.driver.limits[-1] == BUDGET_BYTES
        run.device.begin_step()
        tensors = [torch.full((2048,), float(n)).mul_(1) for n in range(12)]  # 1.5 times the budget
        for n, tensor in enumerate(tensors):
            assert tensor.add(run.driver.before)[1].item() == n + 2
        assert run.device.meter.peak_bytes() <= BUDGET_BYTES
    assert run.driver.limits[-1] is None


class Shared(Caching):
    free_bytes = BUDGET_BYTES // 2  # other programs have the rest


def test_what_other_programs_have_is_no_budget(spill: SpillSpace) -> None:
    with (
        pytest.raises(InvalidArgument, match=r"budget is 64.00 KiB, and 40.00 KiB of .* are left to"),
        checked_run(spill, BUDGET_BYTES, make_driver=Shared),
    ):
        pass
    with checked_run(spill, BUDGET_BYTES // 2 + Caching.before_bytes, make_driver=Shared):
        pass


class Larger(Caching):
    before_bytes = 2 * BUDGET_BYTES

    def resize(self, storage: torch.UntypedStorage, size_bytes: int, stream: CheckedStream) -> bool:
        if not size_bytes:
            self.cached_bytes += storage.nbytes()
        return super().resize(storage, size_bytes, stream)


def test_what_was_there_and_is_above_it_is_below_it_when_a_step_begins(spill: SpillSpace) -> None:
    with checked_run(spill, BUDGET_BYTES, make_driver=Larger) as run:
        assert isinstance(run.driver, Larger)
        run.clock.set_kind(run.driver.before, 0)
        run.device.begin_step()
        assert run.device.meter.peak_bytes() <= BUDGET_BYTES
        assert run.driver.memory().reserved_bytes <= BUDGET_BYTES
