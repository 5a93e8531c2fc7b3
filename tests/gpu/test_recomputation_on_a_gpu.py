"""What is dropped on a CUDA device is made again there, with the same bits.

`make gpu` runs it on one, `make gpu-rehearsal` on the emulated accelerator.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock
from tests.support.accelerator import wanted
from tests.support.forced import recompute_everything
from tests.support.runs import PAGED

pytestmark = pytest.mark.usefixtures("reproducible")

DEVICE = wanted("cuda")

BUDGET = 1 << 30
WIDTH, WORDS, BATCH = 256, 64, 8


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)
        self.convolution = nn.Conv2d(WORDS, WORDS, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.convolution(x.view(BATCH, WORDS, 16, -1)).view_as(x)
        return x + F.dropout(self.narrow(F.gelu(self.wide(self.norm(x)))), 0.1, self.training)


def train(step: Callable[[], AbstractContextManager[None]], steps: int = 6) -> list[bytes]:
    torch.manual_seed(7)
    model = nn.Sequential(*(_Block() for _ in range(3))).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    found = []
    for number in range(steps):
        x = torch.randn(BATCH, WORDS, WIDTH, generator=torch.Generator().manual_seed(number)).to(DEVICE)
        with step():
            model(x).square().mean().backward()
            found += [parameter.grad.cpu().numpy().tobytes() for parameter in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
    return found + [torch.get_device_module(DEVICE).get_rng_state().numpy().tobytes()]


def test_everything_that_may_be_recomputed_is(tmp_path: Path, machine: penstock.Hardware) -> None:
    expected = train(nullcontext)
    with penstock.offload(
        device=DEVICE, device_budget=BUDGET, spill_dir=tmp_path, hardware=machine, planning=PAGED
    ) as run:
        assert train(run.step) == expected
        assert run.trace is not None
        plan = recompute_everything(run.trace, BUDGET)
    assert plan.recomputations
    with penstock.offload(
        device=DEVICE, device_budget=BUDGET, spill_dir=tmp_path, hardware=machine, planning=PAGED, plan=plan
    ) as run:
        assert train(run.step) == expected
        report = run.report()
    assert report.recomputed_bytes > 0
    assert report.peak_bytes <= BUDGET
