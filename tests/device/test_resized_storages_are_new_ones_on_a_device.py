"""Storages that the program frees and allocates again in a step, as FSDP2 does with gathered parameters, keep
the bits and the budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import penstock
from tests.support.accelerator import orders, wanted
from tests.support.runs import ACCELERATED

DEVICE = wanted("emu")
WIDTH, LAYERS, STEPS = 512, 12, 6
BYTES = WIDTH * WIDTH * 4  # 1 MiB


def train(run: penstock.Offload | None) -> list[torch.Tensor]:
    """Each layer's weight is copied into a buffer that has memory only while it is used."""
    torch.manual_seed(0)
    weights = [(torch.randn(WIDTH, WIDTH) / WIDTH**0.5).to(DEVICE) for _ in range(LAYERS)]
    gathered = [torch.empty(WIDTH, WIDTH, device=DEVICE) for _ in range(LAYERS)]
    for buffer in gathered:
        buffer.untyped_storage().resize_(0)

    def step(number: int) -> None:
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(number)).to(DEVICE)
        for weight, buffer in zip(weights, gathered, strict=True):
            buffer.untyped_storage().resize_(BYTES)
            buffer.copy_(weight)
            x = torch.tanh(x @ buffer)
            weight.add_(x.t() @ x @ buffer, alpha=-1e-3)
        for buffer in reversed(gathered):
            x = x @ buffer
            buffer.untyped_storage().resize_(0)
        weights[0].add_(x.mean(), alpha=1e-3)

    for number in range(STEPS):
        if run is None:
            step(number)
        else:
            with run.step():
                step(number)
    return [weight.cpu() for weight in weights]


@pytest.mark.parametrize("order", orders(DEVICE, "eager", "lazy", "stepped", "random"))
@pytest.mark.parametrize("budget", ["20MiB", "40MiB"])
def test_same_bits_within_the_budget(
    configure: Callable[..., None], tmp_path: Path, order: str, budget: str
) -> None:
    configure(memory="256MiB", order=order, seed=1)
    expected = train(None)
    configure(memory=budget, order=order, seed=1)
    options = {
        "device_budget": budget,
        "host_budget": "80MiB",
        "spill_dir": tmp_path,
        "hardware": ACCELERATED,
    }
    with torch.no_grad(), penstock.offload(device=DEVICE, **options) as run:
        found = train(run)
    report = run.report()
    assert all(map(torch.equal, found, expected))
    assert (report.evicted_bytes > 0) == (budget == "20MiB")
    assert report.peak_bytes <= penstock.units.parse_bytes(budget)
