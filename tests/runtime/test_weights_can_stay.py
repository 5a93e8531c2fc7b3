"""A run with `keep_weights` moves no weight and no gradient once they are known, and keeps every bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import penstock
from penstock.core.columns import KINDS
from penstock.core.memory_profile import held_bytes, minimum_bytes
from tests.support.runs import EVERYTHING, HARDWARE, differences, family_training, in_memory, offload

KEPT = (KINDS.index("weight"), KINDS.index("gradient"))
STEPS = 6  # one that makes the optimizer's state, one traced, three recorded, one at full speed


@pytest.mark.parametrize("family", ["gpt", "cnn"])
def test_the_bits_are_those_of_memory_and_no_weight_moves(family: str, tmp_path: Path) -> None:
    program = family_training(family, STEPS)
    expected = in_memory(program)
    options = {"hardware": HARDWARE, "smallest_bytes": EVERYTHING, "spill_dir": tmp_path}
    torch.manual_seed(7)
    with offload(device_budget="1GiB", keep_weights=True, **options) as whole:
        assert differences(expected, program(whole.step)) == []
        report, unmoved = whole.report(), whole.trace
    least, most = report.minimum_bytes, report.peak_bytes
    budget = least + (most - least) // 5
    torch.manual_seed(7)
    with offload(device_budget=budget, keep_weights=True, **options) as run:
        assert differences(expected, program(run.step)) == []
        report, made, recorded = run.report(), run.plan, run.trace
    assert made is not None and recorded is not None and unmoved is not None
    assert report.peak_bytes <= budget
    moved = [evict.tensor for evict in made.evictions]
    assert moved and not set(recorded.tensor_kind[moved].tolist()) & set(KEPT)
    assert report.minimum_bytes >= minimum_bytes(recorded)
    # without workspace: what oneDNN allocates for a convolution depends on what it has cached
    assert held_bytes(recorded).max() == held_bytes(unmoved).max()


def step_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(4, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6)))
    return model, torch.optim.SGD(model.parameters(), lr=1e-2)


def test_a_budget_without_room_for_all_weights_is_refused_with_what_they_need(tmp_path: Path) -> None:
    model, optimizer = build()
    planning = penstock.PlanOptions(smallest_bytes=EVERYTHING, keep_weights=True)
    common = {"spill_dir": tmp_path, "hardware": HARDWARE}

    def run_in(budget: int, planning: penstock.PlanOptions) -> penstock.Report:
        with penstock.offload(model, device_budget=budget, planning=planning, **common) as run:
            for _ in range(3):
                with run.step():
                    step_of(model, optimizer)
            return run.report()

    least = run_in(1 << 30, planning).minimum_bytes
    assert least >= 2 * sum(weight.nbytes for weight in model.parameters() if weight.nbytes >= EVERYTHING)
    with pytest.raises(penstock.BudgetTooSmall, match="raise the budget to") as raised:
        run_in(least - 4096, planning)
    assert raised.value.minimum_bytes == least
    assert run_in(least, planning).peak_bytes <= least
    moving = replace(planning, keep_weights=False, recompute=False, compress=False)
    assert run_in(least - 4096, moving).evicted_bytes > 0


def test_a_plan_that_moves_weights_is_refused(tmp_path: Path) -> None:
    model, optimizer = build()
    trace = penstock.trace(lambda: step_of(model, optimizer))
    budget = minimum_bytes(trace) + (1 << 20)
    hardware = replace(HARDWARE, device_bytes=budget)
    plan = penstock.plan(trace, hardware, "evict_all")
    planning = penstock.PlanOptions(keep_weights=True)
    common = {"device_budget": "1GiB", "spill_dir": tmp_path, "hardware": HARDWARE, "planning": planning}
    with pytest.raises(penstock.InvalidPlan, match=r"stays on the device \(kind: weight\)"):
        penstock.offload(model, optimizer, plan=plan, **common)
