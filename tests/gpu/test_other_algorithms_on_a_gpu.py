"""Micro-batches and kernel variants on a CUDA device: the bits of plain PyTorch that does the same.

`make gpu` runs it on one, `make gpu-rehearsal` on the emulated accelerator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import penstock
from tests.support.accelerator import NOT_REHEARSED, wanted
from tests.support.runs import offload

DEVICE = wanted("cuda")

BUDGET = 256 << 20
SAMPLES = 24


@pytest.fixture(autouse=True)
def reproducible(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    yield


def train(
    split: Callable[..., Any], step: Callable[[], AbstractContextManager[None]], steps: int = 4
) -> list[bytes]:
    """Some steps of a convolution; the bits of every gradient."""
    torch.manual_seed(7)
    layers = torch.nn.Conv2d(3, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 8, 3)
    model = torch.nn.Sequential(*layers).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []

    def loss(part: torch.Tensor) -> torch.Tensor:
        return F.softplus(model(part)).mean()

    for number in range(steps):
        x = torch.randn(SAMPLES, 3, 32, 32, generator=torch.Generator().manual_seed(number)).to(DEVICE)
        with step():
            for part in split(x, loss):
                (loss(part) * part.weight).backward()
            found += [parameter.grad.cpu().numpy().tobytes() for parameter in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
    return found


def by_hand(size: int) -> Callable[..., Iterator[torch.Tensor]]:
    def split(x: torch.Tensor, _: object) -> Iterator[torch.Tensor]:
        for part in x.split(size):
            part.weight = len(part) / len(x)  # type: ignore[attr-defined]
            yield part

    return split


@pytest.mark.parametrize("size", [8, 10, "auto"])
def test_parts_give_the_bits_of_plain_pytorch(
    size: int | str, tmp_path: Path, machine: penstock.Hardware
) -> None:
    with (
        torch.backends.cudnn.flags(enabled=True, deterministic=True),
        penstock.offload(
            device=DEVICE,
            device_budget=BUDGET,
            spill_dir=tmp_path,
            hardware=machine,
            batches=penstock.BatchOptions(micro_batch=size),
        ) as run,
    ):
        found = train(run.micro_batches, run.step)
        chosen = run.report().micro_batch
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        assert train(by_hand(chosen), nullcontext) == found


@pytest.mark.skipif(DEVICE != "cuda", reason=NOT_REHEARSED + "cuDNN and its variants")
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("without cuDNN", {"enabled": False}),
        ("deterministic cuDNN", {"enabled": True, "deterministic": True}),
    ],
)
def test_variants_give_the_bits_of_their_settings(
    name: str, flags: dict[str, bool], tmp_path: Path, machine: penstock.Hardware
) -> None:
    options: dict[str, Any] = {
        "device": DEVICE, "device_budget": BUDGET, "spill_dir": tmp_path, "hardware": machine,
    }  # fmt: skip
    with offload(variants=True, **options) as run:
        train(run.micro_batches, run.step)
        trace = run.trace
    assert trace is not None
    names = [[variant.name for variant in variants] for variants in trace.kernel_variants]
    chosen = tuple(found.index(name) if name in found else -1 for found in names)
    assert sum(variant >= 0 for variant in chosen) == 4
    plan = penstock.plan(replace(trace, kernel_variants=()), machine, "keep", device_budget=BUDGET)
    with offload(**options, plan=replace(plan, variants=chosen, trace=trace)) as run:
        found = train(run.micro_batches, run.step)
        assert run.report().variants == {name: 4}
    with torch.backends.cudnn.flags(**flags):
        assert train(by_hand(SAMPLES), nullcontext) == found
