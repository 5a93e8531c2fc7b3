"""A disk slower than promised, or one that fails, costs time or an error, and never memory or bits."""

from __future__ import annotations

import errno
import faulthandler
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import penstock
from penstock.runtime import arena
from penstock.storage.paths import TRANSPORTS
from penstock.storage.transfer import Transfer
from tests.support.families import iterate, small_gpt, weights
from tests.support.faulty_transport import FaultyTransport
from tests.support.runs import PAGED

STEPS = 6
BUDGET_BYTES = 300 << 10


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[Transfer], int]], None]]:
    """Lets transfers fail, or wait: the function is asked before each."""
    posix = TRANSPORTS["posix"]

    def use(fault: Callable[[Transfer], int]) -> None:
        for name in list(TRANSPORTS):
            monkeypatch.delitem(TRANSPORTS, name)
        monkeypatch.setitem(TRANSPORTS, "posix", lambda: FaultyTransport(posix(), fault))

    yield use


def in_memory(steps: int = STEPS) -> list[bytes]:
    model, optimizer = small_gpt()
    for step in range(steps):
        iterate(model, optimizer, step)
    return weights(model)


def test_a_slow_disk_costs_time_only(
    disk: Callable[..., None], tmp_path: Path, hardware: penstock.Hardware
) -> None:
    def wait(_: Transfer) -> int:
        time.sleep(0.002)
        return 0

    disk(wait)
    model, optimizer = small_gpt()
    with penstock.offload(
        device_budget=BUDGET_BYTES, spill_dir=tmp_path, hardware=hardware, planning=PAGED
    ) as run:
        for step in range(STEPS):
            with run.step():
                iterate(model, optimizer, step)
        report = run.report()
    assert weights(model) == in_memory()
    assert report.evicted_bytes + report.recomputed_bytes > 0
    assert report.peak_bytes <= BUDGET_BYTES
    assert report.stall_s > report.predicted_stall_s


@pytest.mark.parametrize("kind", ["write", "read"])
@pytest.mark.parametrize("failing", [30, 120, 200])
def test_a_failing_disk_is_an_error_and_the_next_step_works(
    kind: str, failing: int, disk: Callable[..., None], tmp_path: Path, hardware: penstock.Hardware
) -> None:
    """One transfer fails. What it was of is not lost: the step can be taken again from the weights before."""
    count = 0

    def fault(request: Transfer) -> int:
        nonlocal count
        count += request.kind == kind
        return errno.EIO if request.kind == kind and count == failing else 0

    disk(fault)
    model, optimizer = small_gpt()
    errors = step = 0
    left = 3
    with penstock.offload(
        device_budget=BUDGET_BYTES, spill_dir=tmp_path, hardware=hardware, planning=PAGED
    ) as run:
        # Until it failed, and two steps more: how many transfers a step makes varies with the disk's speed.
        while (left := left - (count >= failing)) > 0:
            assert step < 10 * STEPS, f"{count} transfers in {step} steps"
            try:
                before = [parameter.detach().clone() for parameter in model.parameters()]
            except penstock.SpillError:  # of a copy that the step before had begun: said once, nothing lost
                errors += 1
                before = [parameter.detach().clone() for parameter in model.parameters()]
            while True:
                try:
                    with run.step():
                        iterate(model, optimizer, step)
                except penstock.SpillError as error:
                    assert "Input/output error" in str(error)
                    errors += 1
                    optimizer.zero_grad()
                    with torch.no_grad():
                        for parameter, value in zip(model.parameters(), before, strict=True):
                            parameter.copy_(value)
                else:
                    break
            step += 1
    assert errors <= 1, "a prefetch that fails is read again, and needs no error"
    assert weights(model) == in_memory(step)


def test_memory_between_what_is_out_does_not_stop_a_kernel_that_fits(
    tmp_path: Path, hardware: penstock.Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages between those of what is out stay with the process. Where that is more than it may have
    beside the budget, nothing that leaves helps, and the budget decides alone."""
    monkeypatch.setattr(arena, "_SPARE_BYTES", 0)
    model, optimizer = small_gpt()
    faulthandler.dump_traceback_later(60, exit=True)  # it would wait for ever
    try:
        with penstock.offload(
            model,
            optimizer,
            device_budget=BUDGET_BYTES,
            spill_dir=tmp_path,
            hardware=hardware,
            planning=PAGED,
        ) as run:
            for step in range(STEPS):
                with run.step():
                    iterate(model, optimizer, step)
                assert run.report().peak_bytes <= BUDGET_BYTES
    finally:
        faulthandler.cancel_dump_traceback_later()
    assert weights(model) == in_memory()
