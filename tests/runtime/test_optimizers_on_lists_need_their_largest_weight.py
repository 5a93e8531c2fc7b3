"""The smallest budget of an optimizer on lists of tensors is what its largest weight needs, whatever the
others take together; and a trace, which is planned for any budget, says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import penstock
from tests.support.runs import HARDWARE, Bits, Step, bits, check_same, state_bits

WIDTH, LAYERS = 288, 12
WEIGHT_BYTES = WIDTH * WIDTH * 4


def build(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, **{kind: True})


def iterate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["fused", "foreach"])
def test_the_minimum_is_that_of_one_weight(kind: str, tmp_path: Path) -> None:
    def program(step: Step) -> Bits:
        model, optimizer = build(kind)
        for _ in range(4):
            with step():
                iterate(model, optimizer)
        return bits(model.parameters()) + state_bits(optimizer)

    ((budget, _),) = check_same(program, tmp_path, 0)
    needed = 4 * (WEIGHT_BYTES + WIDTH * 4)  # weight, gradient and both moments, with one bias
    assert budget <= 1.1 * needed
    model, optimizer = build(kind)
    plan = penstock.plan(penstock.trace(lambda: iterate(model, optimizer)), HARDWARE, "keep")
    assert plan.minimum_bytes <= 1.1 * needed
