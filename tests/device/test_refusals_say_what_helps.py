"""A budget that is too small for the allocator's segments is refused with one that is large enough."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock
from penstock.errors import BudgetTooSmall
from tests.support.families import _Gpt, _Residual
from tests.support.runs import ACCELERATED, Bits, Program, Step, bits, differences, in_memory, offloaded

STEPS = 3


def _mlp() -> nn.Module:
    return nn.Sequential(*[part for _ in range(8) for part in (nn.Linear(768, 768), nn.ReLU())])


def _conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *[_Residual(32) for _ in range(4)], nn.AvgPool2d(2))


class _Bucketed(nn.Sequential):
    """Gradients are views of one tensor, as those of DistributedDataParallel with gradient_as_bucket_view. It
    has less than 10 MiB, and so a segment of 20 MiB."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = list(self.parameters())
        sizes = [weight.numel() for weight in weights]
        for weight, part in zip(weights, torch.zeros(sum(sizes), device="emu").split(sizes), strict=True):
            weight.grad = part.view_as(weight)
        return super().forward(x)


def _bucketed() -> nn.Module:
    return _Bucketed(*[part for _ in range(10) for part in (nn.Linear(480, 480), nn.ReLU())])


def _square(*shape: int) -> Callable[[nn.Module], torch.Tensor]:
    return lambda model: model(torch.randn(shape, device="emu")).square().mean()


def _words(model: nn.Module) -> torch.Tensor:
    words = torch.randint(0, 64, (4, 64), device="emu")
    return F.cross_entropy(model(words).flatten(0, 1), words.roll(-1, 1).flatten())


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], torch.Tensor]]] = {
    "mlp": (_mlp, _square(256, 768)),
    "gpt": (lambda: _Gpt(width=256, blocks=4), _words),
    "bucket": (_bucketed, _square(32, 480)),
    "conv": (_conv, _square(8, 3, 32, 32)),  # with kernels that cannot run again: batch normalization
}


def training(name: str) -> Program:
    make, loss = MODELS[name]

    def program(step: Step) -> Bits:
        with torch.device("emu"):
            model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(STEPS):
            with step():
                loss(model).backward()
                optimizer.step()
                optimizer.zero_grad()
        return bits(model.parameters())

    return program


def test_a_budget_is_there_to_the_last_byte(emu: Any, tmp_path: Path) -> None:
    """As a share of what the device has it is no exact number."""
    emu.configure(memory=3_000_000_512)
    budget_bytes = 98 << 20
    assert int(budget_bytes / 3_000_000_512 * 3_000_000_512) < budget_bytes
    with penstock.offload(
        device="emu",
        device_budget=budget_bytes,
        hardware=ACCELERATED,
        host_budget="128MiB",
        spill_dir=tmp_path,
    ):
        torch.empty(budget_bytes, dtype=torch.uint8, device="emu")
        assert torch.accelerator.memory_reserved() == budget_bytes


@pytest.mark.parametrize(
    ("name", "share"), [("mlp", 0.1), ("gpt", 0.2), ("bucket", 0.4), ("conv", 0.3), ("conv", 0.7)]
)
def test_at_most_two_refusals(emu: Any, name: str, share: float, tmp_path: Path) -> None:
    emu.configure(order="eager")
    gc.collect()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    expected = in_memory(training(name))
    peak_bytes = torch.accelerator.max_memory_allocated()
    emu.configure(order="lazy")
    budget_bytes, refusals = int(share * peak_bytes), 0
    while True:
        gc.collect()
        torch.accelerator.empty_cache()
        try:
            found, report = offloaded(
                training(name),
                budget_bytes,
                tmp_path,
                device="emu",
                hardware=ACCELERATED,
                host_budget="160MiB",
                smallest_bytes="64KiB",
            )
            break
        except BudgetTooSmall as error:
            refusals += 1
            assert refusals <= 2 and error.minimum_bytes > budget_bytes
            budget_bytes = error.minimum_bytes
    assert differences(expected, found) == []
    assert report.peak_bytes <= budget_bytes < peak_bytes
    assert report.evicted_bytes > 0
