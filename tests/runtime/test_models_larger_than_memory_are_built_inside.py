"""A model whose weights and optimizer state are several times the budget is made, loaded, trained in it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from tests.support.runs import HARDWARE, PAGED, Bits, bits, differences

WIDTH, LAYERS = 256, 24
MODEL_BYTES = LAYERS * (WIDTH * WIDTH + WIDTH) * 4
BUDGET_BYTES = 3 * MODEL_BYTES // 4  # weights and Adam's state are four times as much


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def iterate(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(number))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def saved_and_trained(save: Callable[[Any, Path], object], path: Path) -> Bits:
    """Save the state after a step, and give the bits of the weights after another one, in memory."""
    model, optimizer = build()
    iterate(model, optimizer, 0)
    save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    iterate(model, optimizer, 1)
    return bits(model.parameters())


def test_built_trained_saved_and_loaded(tmp_path: Path) -> None:
    model, optimizer = build()
    for number in range(5):
        iterate(model, optimizer, number)
    torch.save(model.state_dict(), tmp_path / "expected.pt")
    halfway = bits(model.parameters())
    for number in range(5, 8):
        iterate(model, optimizer, number)
    expected = bits(model.parameters())

    with penstock.offload(
        device_budget=BUDGET_BYTES, spill_dir=tmp_path, hardware=HARDWARE, planning=PAGED
    ) as run:
        model, optimizer = build()
        for number in range(5):
            with run.step():
                iterate(model, optimizer, number)
        assert differences(halfway, bits(model.parameters())) == []
        model.load_state_dict(torch.load(tmp_path / "expected.pt"))
        for number in range(5, 8):
            with run.step():
                iterate(model, optimizer, number)
        report = run.report()
        assert report.peak_bytes <= BUDGET_BYTES
        assert report.moved_bytes_by_kind["optimizer_state"] > 0
        assert report.moved_bytes_by_kind["weight"] > 0
    assert differences(expected, bits(model.parameters())) == [], "after the run they are read where they are"
    iterate(model, optimizer, 8)  # and they train on, without a budget


@pytest.mark.parametrize("writer", [penstock.save, torch.save])
def test_an_optimizer_without_state_is_loaded_inside(writer: Any, tmp_path: Path) -> None:
    """What is read from a file, which the run cannot move, takes no room of the budget."""
    expected = saved_and_trained(writer, tmp_path / "saved")
    assert (tmp_path / "saved").stat().st_size >= 4 * BUDGET_BYTES

    with penstock.offload(
        device_budget=BUDGET_BYTES, spill_dir=tmp_path, hardware=HARDWARE, planning=PAGED
    ) as run:
        model, optimizer = build()
        penstock.load(tmp_path / "saved", into={"model": model, "optimizer": optimizer})
        with run.step():
            iterate(model, optimizer, 1)
        assert differences(expected, bits(model.parameters())) == []
        assert run.report().peak_bytes <= BUDGET_BYTES


LOADS: dict[str, Callable[[Path], Any]] = {
    "penstock.load": penstock.load,
    "not mapped": functools.partial(penstock.load, mmap=False),
    "by a function": functools.partial(penstock.load, map_location=lambda storage, _: storage),
    "torch.load": torch.load,
}


@pytest.mark.parametrize("how", LOADS)
def test_a_state_larger_than_the_budget_is_loaded_inside(how: str, tmp_path: Path) -> None:
    """The optimizer keeps the tensors that are loaded as its state: they can leave like any others."""
    save = torch.save if how == "torch.load" else penstock.save
    expected = saved_and_trained(save, tmp_path / "saved")

    with penstock.offload(
        device_budget=BUDGET_BYTES, spill_dir=tmp_path, hardware=HARDWARE, planning=PAGED
    ) as run:
        model, optimizer = build()
        state = LOADS[how](tmp_path / "saved")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        del state
        with run.step():
            iterate(model, optimizer, 1)
        assert differences(expected, bits(model.parameters())) == []
        report = run.report()
        assert report.peak_bytes <= BUDGET_BYTES and report.fixed_bytes == 0


def test_what_cannot_leave_is_reported(tmp_path: Path) -> None:
    penstock.save({"w": torch.ones(WIDTH, WIDTH)}, tmp_path / "saved")
    with penstock.offload(device_budget="1MiB", spill_dir=tmp_path, hardware=HARDWARE) as run:
        mapped = penstock.load(tmp_path / "saved", mmap=True)
        with run.step():
            torch.mm(mapped["w"], mapped["w"])
        assert run.report().fixed_bytes == WIDTH * WIDTH * 4
        assert "tensors that cannot leave have 256.0 KiB of the budget" in str(run.report())
        del mapped
        with run.step():
            torch.ones(WIDTH, WIDTH).sum()
        assert run.report().fixed_bytes == 0
        assert "cannot leave" not in str(run.report())
