"""The same promises on a CUDA device: the same bits, inside the budget, over host memory and over disk."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import penstock
from tests.support.families import FAMILIES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = 5
# Families whose inputs the loss makes on the CPU: they are moved by the test.
NAMES = [name for name in FAMILIES if name != "bf16_autocast"]


@pytest.fixture(autouse=True)
def reproducible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False


@pytest.fixture
def machine(tmp_path: Path) -> penstock.Hardware:
    return penstock.probe(tmp_path, device="cuda", time_budget_s=2)


def train(name: str, **options: object) -> tuple[list[bytes], penstock.Report | None]:
    family = FAMILIES[name]
    torch.manual_seed(7)
    model = family.make().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = penstock.offload(model, optimizer, **options) if options else None  # type: ignore[arg-type]
    found = []
    for step in range(STEPS):
        torch.manual_seed(step)
        with run.step() if run else nullcontext(), torch.device("cpu"):
            loss = family.loss(_OnCuda(model), step)
            family.backward(loss)
            found += [loss.detach().cpu().numpy().tobytes()]
            found += [p.grad.cpu().numpy().tobytes() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
    report = run.report() if run else None
    if run:
        run.close()
    return found + [p.detach().cpu().numpy().tobytes() for p in model.parameters()], report


class _OnCuda:
    """Lets the families' losses, which make their inputs on the CPU, run on the device."""

    def __init__(self, model: torch.nn.Module) -> None:
        object.__setattr__(self, "model", model)

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        return self.model(batch.cuda()).cpu()

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.model, name, value)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("share", [0.05, 0.5, 2.0])
def test_same_bits(name: str, tier: str, share: float, tmp_path: Path, machine: penstock.Hardware) -> None:
    hardware = replace(machine, host_bytes=4 << 30)
    host_budget = "1GiB" if tier == "host" else "64MiB"  # the latter is all staging
    options = {"spill_dir": tmp_path, "hardware": hardware, "host_budget": host_budget}
    expected, _ = train(name)
    _, generous = train(name, device_budget="4GiB", **options)
    assert generous is not None
    least, most = generous.minimum_bytes, generous.peak_bytes
    budget_bytes = int(least + share * (most - least))

    found, report = train(name, device_budget=budget_bytes, **options)

    assert found == expected
    assert report is not None
    if name != "dynamic":
        assert report.peak_bytes <= 1.05 * budget_bytes
