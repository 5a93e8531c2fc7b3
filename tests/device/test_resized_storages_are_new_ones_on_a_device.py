"""Storages that the program frees and allocates again in a step, as FSDP2 does with gathered parameters, keep
the bits and the budget."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import penstock
from tests.support.accelerator import orders, wanted
from tests.support.gathered import Gathered
from tests.support.runs import ACCELERATED

DEVICE = wanted("emu")
WIDTH, LAYERS, STEPS = 512, 12, 6  # a weight has 1 MiB


def train(run: penstock.Offload | None) -> list[torch.Tensor]:
    program = Gathered(WIDTH, LAYERS, DEVICE)
    for number in range(STEPS):
        with contextlib.nullcontext() if run is None else run.step():
            program.step(number)
    return [weight.detach().cpu() for weight in program.weights]


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
    with penstock.offload(device=DEVICE, **options) as run:
        found = train(run)
    report = run.report()
    assert all(map(torch.equal, found, expected))
    assert (report.evicted_bytes > 0) == (budget == "20MiB")
    assert report.peak_bytes <= penstock.units.parse_bytes(budget)
