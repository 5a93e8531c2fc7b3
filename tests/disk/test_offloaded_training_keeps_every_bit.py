"""Loss, every gradient and the weights are those of the in-memory run, bit for bit, at any budget."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import penstock
from tests.support.families import FAMILIES, Family

STEPS = 5  # one profiled, three recorded, one at full speed

Bits = list[bytes]


def bits(tensors: Iterable[torch.Tensor]) -> Bits:
    """What the tensors hold, in memory that penstock does not count."""
    return [tensor.detach().numpy().tobytes() for tensor in tensors]


def train(family: Family, **options: object) -> tuple[Bits, penstock.Report | None]:
    """Train a few steps: the bits of every loss, gradient and final weight, and the report."""
    torch.manual_seed(7)
    model = family.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = penstock.offload(model, optimizer, **options) if options else None  # type: ignore[arg-type]
    found: Bits = []
    torch.manual_seed(11)
    for step in range(STEPS):
        with run.step() if run else nullcontext():
            loss = family.loss(model, step)
            family.backward(loss)
            found += bits([loss])
            found += bits(p.grad for p in model.parameters() if p.grad is not None)
            optimizer.step()
            optimizer.zero_grad()
    report = None
    if run:
        report = run.report()
        run.close()
    return found + bits(model.parameters()), report


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("share", [0.0, 0.4, 2.0], ids=["minimum", "middle", "generous"])
def test_same_bits(name: str, share: float, tmp_path: Path, hardware: penstock.Hardware) -> None:
    family = FAMILIES[name]
    expected, _ = train(family)
    _, generous = train(family, device_budget="1GiB", spill_dir=tmp_path, hardware=hardware)
    assert generous is not None
    least, most = generous.minimum_bytes, generous.peak_bytes
    if name == "dynamic":  # steps that depart are not traced: the largest of them decides
        least, most = int(1.2 * most), 2 * most
    budget_bytes = int(least + share * (most - least))

    found, report = train(family, device_budget=budget_bytes, spill_dir=tmp_path, hardware=hardware)

    assert found == expected
    assert report is not None
    if name != "dynamic":  # it never is what was traced: everything moves out in each step
        assert report.peak_bytes <= budget_bytes
        assert report.departures == 0
        assert (report.evicted_bytes > 0) == (budget_bytes < generous.predicted_peak_bytes)


def test_any_policy_keeps_the_bits(tmp_path: Path, hardware: penstock.Hardware) -> None:
    expected, _ = train(FAMILIES["gpt"])
    found, report = train(
        FAMILIES["gpt"], device_budget="1GiB", spill_dir=tmp_path, hardware=hardware, policy="evict_all"
    )
    assert found == expected
    assert report is not None and report.evicted_bytes > 0
