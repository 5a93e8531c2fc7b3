"""Fake tensors, and what traces with them, work in a run as outside of it, and take none of its budget."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import penstock
from tests.support.runs import HARDWARE, PAGED, Bits, Step, bits, check_same


@pytest.fixture
def run(tmp_path: Path) -> penstock.Offload:
    return penstock.offload(device_budget="1MiB", spill_dir=tmp_path, hardware=HARDWARE, planning=PAGED)


def test_a_model_of_fake_tensors_larger_than_the_budget(run: penstock.Offload) -> None:
    with run, run.step(), FakeTensorMode():
        model = nn.Linear(1 << 14, 1 << 14)
        model(torch.randn(4, 1 << 14)).sum().backward()
        assert model.weight.grad is not None
        assert model.weight.grad.shape == model.weight.shape


def test_fake_tensors_of_real_ones(run: penstock.Offload) -> None:
    mode = FakeTensorMode()
    with run:
        model = nn.Linear(96, 96)
        weight, x = mode.from_tensor(model.weight), mode.from_tensor(torch.randn(4, 96))
        assert (x @ weight).shape == (4, 96)  # the mode is off
        fakes = {name: mode.from_tensor(value) for name, value in model.named_parameters()}
        assert torch.func.functional_call(model, fakes, (x,)).shape == (4, 96)
    with (
        penstock.offload(device_budget="1MiB", hardware=HARDWARE),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        assert model(torch.randn(4, 96)).shape == (4, 96)


def test_training_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    def program(step: Step) -> Bits:
        model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(6)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(4):
            with step():
                model(torch.randn(8, 96)).square().mean().backward()
                exported = torch.export.export(model, (torch.randn(8, 96),))
                optimizer.step()
                optimizer.zero_grad()
        return bits(model.parameters()) + bits([exported.module()(torch.ones(8, 96))])

    check_same(program, tmp_path, 0.2)
