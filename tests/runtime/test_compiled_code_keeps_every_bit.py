"""torch.compile, per block and whole: regions are kernels, and the bits are those of the compiled run."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import penstock
from tests.support.runs import (
    HARDWARE,
    PAGED,
    Bits,
    Program,
    Step,
    bits,
    budgets,
    differences,
    in_memory,
    offloaded,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler"),
]

WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = (
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(torch.nn.functional.gelu(self.up(x))).sin())  # type: ignore[no-any-return]


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def build(whole: bool) -> nn.Module:
    torch.manual_seed(3)
    model = Blocks()
    for part in [model] if whole else model.blocks:
        part.compile()
    return model


def train(model: nn.Module, step: Step, first: int, last: int) -> Bits:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: Bits = []
    for number in range(first, last):
        with step():
            x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(number))
            loss = model(x).square().mean()
            loss.backward()
            found += bits([loss, *(p.grad for p in model.parameters())])
            optimizer.step()
            optimizer.zero_grad()
    return found + bits(model.parameters())


def program(whole: bool) -> Program:
    def run(step: Step) -> Bits:
        torch._dynamo.reset()
        return train(build(whole), step, 0, 6)

    return run


@pytest.mark.parametrize("whole", [False, True], ids=["per block", "whole"])
def test_compiled_inside(whole: bool, tmp_path: Path) -> None:
    expected = in_memory(program(whole))
    for budget_bytes in (1 << 30, *budgets(program(whole), tmp_path, 0.15)):
        found, report = offloaded(program(whole), budget_bytes, tmp_path)
        assert differences(expected, found) == []
        assert report.peak_bytes <= budget_bytes
        assert report.trace_mismatches <= 1
    assert report.loaded_bytes + report.recomputed_bytes > 0


def test_regions_are_kernels(tmp_path: Path) -> None:
    torch._dynamo.reset()
    with penstock.offload(device_budget="1GiB", spill_dir=tmp_path, hardware=HARDWARE, planning=PAGED) as run:
        train(build(False), run.step, 0, 3)
        assert run.trace is not None
        names = run.trace.kernel_name
    assert sum("inductor_compiled_code" in name for name in names) == 8, "4 forward, 4 backward"
    assert not any(name.removeprefix("aten.").startswith("addmm") for name in names)


def test_compiled_before(tmp_path: Path) -> None:
    """The regions are not seen: what they touch is brought in as they touch it, with the same bits."""

    def train_later(step: Step | None) -> Bits:
        torch._dynamo.reset()
        model = build(True)
        train(model, lambda kind=None: contextlib.nullcontext(), 0, 2)
        if step is not None:
            return train(model, step, 2, 6)
        return train(model, lambda kind=None: contextlib.nullcontext(), 2, 6)

    expected = train_later(None)
    torch._dynamo.reset()
    model = build(True)
    train(model, lambda kind=None: contextlib.nullcontext(), 0, 2)
    with penstock.offload(
        model, device_budget="800KiB", spill_dir=tmp_path, hardware=HARDWARE, planning=PAGED
    ) as run:
        found = train(model, run.step, 2, 6)
        assert run.report().peak_bytes <= 800 << 10
    assert differences(expected, found) == []
