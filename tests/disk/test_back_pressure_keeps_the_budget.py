"""A disk slower than promised, or one that fails, costs time or an error, and never memory or bits."""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import penstock
from penstock.runtime import run as runtime
from penstock.storage.spill import SpillSpace
from penstock.storage.transports import TRANSPORTS, Request
from penstock.storage.transports.memory import MemoryTransport
from tests.support.families import iterate, small_gpt, weights

STEPS = 6


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Puts a transport with the given faults in the place of the disk."""

    def use(**faults: object) -> None:
        for name in list(TRANSPORTS):
            monkeypatch.delitem(TRANSPORTS, name)
        monkeypatch.setitem(TRANSPORTS, "faulty", lambda: MemoryTransport(**faults))  # type: ignore[arg-type]
        monkeypatch.setattr(runtime, "SpillSpace", functools.partial(SpillSpace, pinned="faulty direct"))

    yield use


def in_memory() -> list[bytes]:
    model, optimizer = small_gpt()
    for step in range(STEPS):
        iterate(model, optimizer, step)
    return weights(model)


@pytest.mark.parametrize("share", [0.0, 0.3])
@pytest.mark.parametrize(
    "faults", [{"delay_s": 0.01}, {"short_bytes": 1000}], ids=["slow", "short transfers"]
)
def test_a_slow_disk_costs_time_only(
    share: float,
    faults: dict[str, float],
    disk: Callable[..., None],
    tmp_path: Path,
    hardware: penstock.Hardware,
) -> None:
    def train(budget: int | str) -> tuple[list[bytes], penstock.Report]:
        model, optimizer = small_gpt()
        with penstock.offload(
            model, optimizer, device_budget=budget, spill_dir=tmp_path, hardware=hardware
        ) as run:
            for step in range(STEPS):
                with run.step():
                    iterate(model, optimizer, step)
            return weights(model), run.report()

    _, generous = train("1GiB")
    disk(**faults)
    least, most = generous.minimum_bytes, generous.peak_bytes
    budget_bytes = int(least + share * (most - least))

    found, report = train(budget_bytes)

    assert found == in_memory()
    assert report.evicted_bytes > 0
    assert report.peak_bytes <= budget_bytes
    if "delay_s" in faults:
        assert report.stall_s > report.predicted_stall_s


@pytest.mark.parametrize("kind", ["write", "read"])
@pytest.mark.parametrize("failing", [3, 40, 90], ids=["profiled", "recorded", "planned"])
def test_a_failing_disk_is_an_error_and_the_next_step_works(
    kind: str, failing: int, disk: Callable[..., None], tmp_path: Path, hardware: penstock.Hardware
) -> None:
    count = 0

    def fault(request: Request) -> int:
        nonlocal count
        count += request.kind == kind
        return errno.EIO if request.kind == kind and count == failing else 0

    disk(fault=fault)
    model, optimizer = small_gpt()
    errors = 0
    with penstock.offload(
        model, optimizer, device_budget="1GiB", spill_dir=tmp_path, hardware=hardware, policy="evict_all"
    ) as run:
        for step in range(STEPS):
            before = weights(model)
            while True:
                try:
                    with run.step():
                        iterate(model, optimizer, step)
                except penstock.SpillError as error:
                    assert "Input/output error" in str(error)
                    errors += 1
                    optimizer.zero_grad()
                    assert weights(model) == before
                else:
                    break
    assert errors == 1
    assert weights(model) == in_memory()
