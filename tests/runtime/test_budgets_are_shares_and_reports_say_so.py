"""Budgets as shares of the memory that there is, and what reports say of what was given and measured."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import penstock
from penstock.runtime import opening
from tests.support.runs import ACCELERATED

LEFT_BYTES = 4 << 30


@pytest.fixture(autouse=True)
def left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "available_bytes", lambda: LEFT_BYTES)


@pytest.mark.parametrize(("budget", "share"), [("25%", 0.25), ("auto", 0.9)])
def test_on_a_cpu_they_are_of_what_is_available(
    budget: str, share: float, tmp_path: Path, hardware: penstock.Hardware
) -> None:
    model = torch.nn.Linear(64, 64)
    held_bytes = sum(parameter.nbytes for parameter in model.parameters())
    with penstock.offload(model, device_budget=budget, spill_dir=tmp_path, hardware=hardware) as run:
        with run.step():
            model(torch.randn(8, 64)).sum().backward()
        assert run.report().device_budget_bytes == int(share * (LEFT_BYTES + held_bytes))


def test_stalls_are_of_the_steps_that_the_time_is_of(tmp_path: Path, hardware: penstock.Hardware) -> None:
    """Recorded ones are slower, and in neither median."""
    model = torch.nn.Linear(64, 64)
    with penstock.offload(model, device_budget="64MiB", spill_dir=tmp_path, hardware=hardware) as run:
        for _ in range(8):
            with run.step():
                model(torch.randn(8, 64)).sum().backward()
        report = run.report()
        (steps,) = run._measured.values()
        assert 0 < len(steps.stalls_s) == len(steps.planned_s) == report.steps - report.profiled_steps


def test_processes_share_what_is_available() -> None:
    assert opening.device_budget_bytes("50%", torch.device("cpu"), processes=4) == LEFT_BYTES // 8


def test_budgets_that_exceed_the_memory_together_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for host_budget, times in ((LEFT_BYTES // 4, 0), (LEFT_BYTES // 2 + 4096, 1)):
        caplog.clear()
        with (
            caplog.at_level(logging.WARNING, "penstock"),
            penstock.offload(
                device_budget=LEFT_BYTES // 2,
                host_budget=host_budget,
                spill_dir=tmp_path,
                hardware=ACCELERATED,
            ),
        ):
            said = [record.message for record in caplog.records if "host_budget" in record.message]
            assert len(said) == times
