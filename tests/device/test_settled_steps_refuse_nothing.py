"""Once plans are in force, the allocator has room for whatever a step asks for.

Tensors are as large as those of real models, of which a kernel takes several MiB: nothing is computed.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock
from penstock.runtime import step_planner
from tests.support.families import Family, _backward_twice, _Gpt, _images, _Residual, _words, device_of
from tests.support.runs import ACCELERATED, Bits, Step, offloaded

ROOMY_BYTES = 1 << 30  # more than any of these models needs
STEPS = 10
SETTLED = 4  # steps, the last ones
ORDERS = ("lazy", "stepped", "random", "newest")


def _loss(model: nn.Module, step: int) -> torch.Tensor:
    words = _words(step, 8, 256).to(device_of(model))
    return F.cross_entropy(model(words).flatten(0, 1), words.roll(-1, 1).flatten())


def _autocast_loss(model: nn.Module, step: int) -> torch.Tensor:
    with torch.autocast("emu", torch.bfloat16):
        return _loss(model, step)


def _gpt(**how: Any) -> Callable[[], nn.Module]:
    return lambda: _Gpt(width=512, heads=8, **how)


def _cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), _Residual(64), _Residual(64), nn.AvgPool2d(2))


def _image_loss(model: nn.Module, step: int) -> torch.Tensor:
    return model(_images(step, 256).to(device_of(model))).square().mean()


LARGE = {
    "gpt": Family(_gpt(), _loss),
    "tied_embeddings": Family(_gpt(tied=True), _loss),
    "dropout": Family(_gpt(dropout=0.1), _loss),
    "bf16_autocast": Family(_gpt(), _autocast_loss),
    "checkpoint_inside": Family(_gpt(checkpointed=True), _loss),
    "retain_graph": Family(_gpt(), _loss, _backward_twice),
    "cnn": Family(_cnn, _image_loss),
}


# Each order once, and all of them with each family where slow ones run.
CASES = [
    pytest.param(name, order, marks=() if number % 9 == 0 else pytest.mark.slow)
    for number, (name, order) in enumerate(itertools.product(LARGE, ORDERS))
]


@pytest.mark.parametrize(("name", "order"), CASES)
def test_nothing_is_refused(
    emu: Any, name: str, order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_planner, "PLANNING_LIMITS_S", (1.0, 10.0))
    family = LARGE[name]
    refused: list[tuple[int, int]] = []  # after each step: requests, and times that the cache was emptied

    def program(step: Step, steps: int = STEPS) -> Bits:
        with torch.device("emu"):
            model = family.make()
        optimizer = torch.optim.AdamW(model.parameters())
        for number in range(steps):
            with step():
                family.backward(family.loss(model, number))
                optimizer.step()
                optimizer.zero_grad()
            statistics = torch.accelerator.memory_stats()
            refused.append((statistics["num_ooms"], statistics["num_alloc_retries"]))
        return []

    def inside(budget_bytes: int, steps: int) -> penstock.Report:
        gc.collect()
        torch.accelerator.empty_cache()
        emu.configure(order=order, seed=1, computes=False)
        torch.accelerator.reset_accumulated_memory_stats()
        options: dict[str, Any] = {"device": "emu:0", "hardware": ACCELERATED, "host_budget": "1GiB"}
        _, report = offloaded(lambda step: program(step, steps), budget_bytes, tmp_path, **options)
        assert emu.high_water_bytes() <= budget_bytes
        return report

    plain = inside(ROOMY_BYTES, 2)
    refused.clear()
    report = inside((plain.minimum_bytes + plain.predicted_peak_bytes) // 2, STEPS)
    assert report.evicted_bytes + report.recomputed_bytes > 0
    assert refused[0] > (0, 0)  # in the step that is recorded
    assert refused[-1] == refused[-SETTLED - 1]
