"""Delayed precision reduction: what is saved for backward leaves in 2 bytes an element, and comes back
rounded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock import codecs
from penstock.errors import InvalidArgument
from tests.support.runs import (
    EVERYTHING,
    HARDWARE,
    Bits,
    Step,
    bits,
    budgets,
    family_training,
    in_memory,
    offload,
    offloaded,
)

LAYERS, BATCH, WIDTH = 8, 256, 128
RATES = {"fp16": (4e9, 4e9), "bf16": (4e9, 4e9)}
SLOW = replace(
    HARDWARE, disk_read_bytes_per_s=1e7, disk_write_bytes_per_s=1e7, measured_codecs=RATES
)  # so that it is worth it

Seen = dict[int, tuple[torch.Tensor, torch.Tensor]]


class _Saves(torch.autograd.Function):
    """Twice its input; backward shows what it saved, and gives on what does not depend on it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: Seen, layer: int) -> torch.Tensor:
        saved = x.sin()
        ctx.save_for_backward(saved)
        ctx.seen, ctx.layer = seen, layer
        seen[layer] = (saved.numpy().copy(), saved)  # type: ignore[assignment]
        del saved
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (saved,) = ctx.saved_tensors
        ctx.seen[ctx.layer] = (ctx.seen[ctx.layer][0], (saved * 1).numpy())
        return grads[0] * 2, None, None


def _training(seen: Seen | None) -> Any:
    def program(step: Step) -> Bits:
        torch.manual_seed(3)
        linear = nn.Linear(WIDTH, WIDTH)
        optimizer = torch.optim.SGD(linear.parameters(), lr=1e-3)
        found: Bits = []
        for number in range(5):
            with step():
                x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(number))
                x = linear(x)
                for layer in range(LAYERS):
                    kept: Any = {} if seen is None else seen
                    x = _Saves.apply(x, kept, layer)
                    kept[layer] = (kept[layer][0], None)
                found += bits([x])
                x.sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return found + bits(linear.parameters())

    return program


@pytest.mark.parametrize("codec", ["fp16", "bf16"])
def test_backward_reads_the_rounded_values_and_all_else_keeps_its_bits(codec: str, tmp_path: Path) -> None:
    seen: Any = {}
    expected = in_memory(_training(None))
    (budget_bytes,) = budgets(_training({}), tmp_path, 0.1, hardware=SLOW)
    found, report = offloaded(_training(seen), budget_bytes, tmp_path, hardware=SLOW, lossy=codec)
    assert found == expected, "no gradient of this program depends on what is saved"
    assert report.peak_bytes <= budget_bytes
    assert codec in report.lossy and "rounded" in str(report)
    rounded = 0
    for before, after in seen.values():
        before, after = torch.from_numpy(before), torch.from_numpy(after)
        stashed = codecs.decode(codec, codecs.encode(codec, before), like=before)
        assert torch.equal(after, before) or torch.equal(after, stashed)
        rounded += not torch.equal(after, before)
    assert rounded > LAYERS // 2


def test_plans_are_lossy_only_where_the_user_says_so(tmp_path: Path) -> None:
    program = family_training("dense", 4)
    expected = in_memory(program)
    (budget_bytes,) = budgets(program, tmp_path, 0.3, hardware=SLOW)
    found, report = offloaded(program, budget_bytes, tmp_path, hardware=SLOW)
    assert found == expected and not report.lossy
    torch.manual_seed(7)
    options: Any = {"device_budget": budget_bytes, "spill_dir": tmp_path, "smallest_bytes": EVERYTHING}
    options |= {"recompute": False}
    with offload(hardware=SLOW, lossy="fp16", **options) as run:
        program(run.step)
        plan, trace = run.plan, run.trace
    assert plan is not None and trace is not None and plan.lossy == "fp16"
    assert penstock.check(trace, plan, run.hardware) == []
    plan.save(tmp_path / "plan.json")
    again = penstock.Plan.load(tmp_path / "plan.json")
    assert again == plan and "lossy (fp16)" in repr(again)
    with pytest.raises(InvalidArgument, match="rounds what is saved for backward"):
        offload(hardware=SLOW, plan=again, **options)
    with pytest.raises(InvalidArgument, match="choose fp16 or bf16"):
        offload(hardware=SLOW, lossy="fp8", **options)
    torch.manual_seed(7)
    with offload(hardware=SLOW, plan=again, lossy="fp16", **options) as run:
        program(run.step)
        assert run.plan == again
    with pytest.raises(InvalidArgument, match="how fast"):
        penstock.plan(trace, HARDWARE, device_budget=budget_bytes, lossy="fp16")


def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    datasets = pytest.importorskip("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]


def _learn(step: Step) -> Bits:
    """Share of held-out digits that a small network reads right, after training."""
    images, labels = _digits()
    held = 360
    torch.manual_seed(0)
    hidden = [part for _ in range(5) for part in (nn.Linear(128, 128), nn.Tanh())]
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), *hidden, nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(60):
        with step():
            nn.functional.cross_entropy(model(images[held:]), labels[held:]).backward()
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        return [repr(float((model(images[:held]).argmax(1) == labels[:held]).float().mean())).encode()]


@pytest.mark.parametrize("codec", ["fp16", "bf16"])
def test_digits_are_learned_as_well(codec: str, tmp_path: Path) -> None:
    exact = float(in_memory(_learn)[0])
    (budget_bytes,) = budgets(_learn, tmp_path, 0.4, hardware=SLOW)
    options: Any = {"hardware": SLOW, "lossy": codec, "policy": "flashneuron"}
    (learned,), report = offloaded(_learn, budget_bytes, tmp_path, **options)
    accuracy = float(learned)
    print(f"\n{codec}: {accuracy:.2%} of held-out digits, {exact:.2%} without; {report.lossy}")
    assert int(report.lossy.split()[1]) >= 2
    assert exact > 0.9
    assert accuracy > exact - 0.01
