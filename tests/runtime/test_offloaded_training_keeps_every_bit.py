"""Loss, gradients, weights and optimizer state are those of the in-memory run, bit for bit, at any budget."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import penstock
from tests.support.families import FAMILIES
from tests.support.runs import (
    HARDWARE,
    Program,
    budgets,
    differences,
    family_training,
    in_memory,
    offloaded,
)

STEPS = 6  # one that makes the optimizer's state, one traced, three recorded, one at full speed


def training(name: str) -> Program:
    return family_training(name, STEPS)


@pytest.mark.parametrize("name", FAMILIES)
def test_same_bits(name: str, tmp_path: Path) -> None:
    program = training(name)
    expected = in_memory(program)
    found, generous = offloaded(program, "1GiB", tmp_path)
    assert differences(expected, found) == []
    assert generous.evicted_bytes == generous.loaded_bytes == 0
    assert generous.unplanned_accesses == 0

    least, most = generous.minimum_bytes, generous.peak_bytes
    if name == "dynamic":  # its largest step is not the last one that was traced
        least = int(1.5 * least)
    for share in (0.0, 0.4):
        budget_bytes = int(least + share * (most - least))
        found, report = offloaded(program, budget_bytes, tmp_path)
        assert differences(expected, found) == [], f"{share}"
        assert report.peak_bytes <= budget_bytes
        assert report.evicted_bytes + report.recomputed_bytes > 0
        assert report.device_budget_bytes == budget_bytes
        if name != "dynamic":  # it runs other operators in each of its first steps
            assert report.trace_mismatches == 0, "the second step is foreseen"
            assert report.policy == "optimal"


def test_memory_is_that_of_the_prediction(tmp_path: Path) -> None:
    """Predicted and measured peak differ by the alignment of what moves alone."""
    program = training("gpt")
    (budget_bytes,) = budgets(program, tmp_path, 0.3)
    _, report = offloaded(program, budget_bytes, tmp_path)
    assert report.predicted_peak_bytes <= budget_bytes
    # The first steps follow no plan, and may fill the budget.
    assert 0.98 * report.predicted_peak_bytes <= report.peak_bytes <= budget_bytes


def test_generous_budgets_move_nothing_of_a_model_that_is_there_already(tmp_path: Path) -> None:
    family = FAMILIES["gpt"]
    torch.manual_seed(7)
    model = family.make()
    optimizer = torch.optim.AdamW(model.parameters())
    with penstock.offload(
        model, optimizer, device_budget="1GiB", spill_dir=tmp_path, hardware=HARDWARE
    ) as run:
        for number in range(4):
            with run.step():
                family.loss(model, number).backward()
                optimizer.step()
                optimizer.zero_grad()
        report = run.report()
    assert report.evicted_bytes == report.loaded_bytes == report.disk_bytes == 0
    assert report.stall_s == 0
