"""What people do around a step: loader workers, schedulers, clipping, accumulation, several models."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import penstock
import penstock.units
from tests.support.families import FAMILIES


def word_batches(workers: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    words = torch.randint(0, 64, (48, 64), generator=torch.Generator().manual_seed(1))
    return DataLoader(
        TensorDataset(words),
        batch_size=8,
        shuffle=True,
        num_workers=workers,
        generator=torch.Generator().manual_seed(2),
    )


def word_loss(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(words).flatten(0, 1), words.roll(-1, 1).flatten())


@pytest.mark.parametrize(("pieces", "budget"), [(1, "3MiB"), (2, "2MiB")], ids=["whole", "accumulated"])
def test_workers_schedulers_clipping_and_accumulation(
    pieces: int, budget: str, tmp_path: Path, hardware: penstock.Hardware
) -> None:
    def train(budget: str | None) -> tuple[list[bytes], penstock.Report | None]:
        torch.manual_seed(0)
        model = FAMILIES["gpt"].make()
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
        run = None
        if budget:
            run = penstock.offload(
                model, optimizer, device_budget=budget, spill_dir=tmp_path, hardware=hardware
            )
        losses = []
        for (words,) in word_batches(workers=2):
            with run.step() if run else nullcontext():
                for part in words.chunk(pieces):
                    loss = word_loss(model, part) / pieces
                    loss.backward()
                    losses.append(loss.item())
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()
        report = run.report() if run else None
        if run:
            run.close()
        return [*map(float.hex, losses), *(p.detach().numpy().tobytes() for p in model.parameters())], report  # type: ignore[list-item]

    expected, _ = train(None)
    found, report = train(budget)

    assert found == expected
    assert report is not None and report.evicted_bytes + report.recomputed_bytes > 0
    assert report.peak_bytes <= penstock.units.parse_bytes(budget)


def test_two_models_train_in_turn_in_one_budget(tmp_path: Path, hardware: penstock.Hardware) -> None:
    def train(budget: int | None) -> tuple[list[bytes], penstock.Report | None]:
        torch.manual_seed(0)
        models = [FAMILIES[name].make() for name in ("gpt", "lstm")]
        pairs = [(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
        run = report = None
        if budget:
            run = penstock.offload(device_budget=budget, spill_dir=tmp_path, hardware=hardware)
        for step in range(6):
            for name, (model, optimizer) in zip(("gpt", "lstm"), pairs, strict=True):
                with run.step(name) if run else nullcontext():
                    FAMILIES[name].loss(model, step).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        if run:
            report = run.report()
            run.close()
        return [p.detach().numpy().tobytes() for model in models for p in model.parameters()], report

    expected, _ = train(None)
    found, generous = train(1 << 30)
    assert found == expected and generous is not None
    budget = (3 * generous.minimum_bytes + generous.peak_bytes) // 4
    found, report = train(budget)
    assert found == expected and report is not None
    assert report.peak_bytes <= budget
    assert report.loaded_bytes + report.recomputed_bytes > 0
