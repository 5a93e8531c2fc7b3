"""The families of tests/support, trained on the emulated device, plainly and inside a budget."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import penstock
from tests.support.families import FAMILIES

STEPS = 4
MIB = 1 << 20
TIERS = {"host": "128MiB", "disk": "64MiB"}  # the latter is all staging


class OnDevice:
    """Lets the families' losses, which make their inputs on the CPU, run on the device."""

    def __init__(self, model: torch.nn.Module) -> None:
        object.__setattr__(self, "model", model)

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        return self.model(batch.to("emu")).cpu()

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.model, name, value)


def train(name: str, **options: Any) -> tuple[list[bytes], penstock.Report | None]:
    """The bits of each step's loss and gradients and of the weights at the end; with options, inside a run."""
    family = FAMILIES[name]
    torch.manual_seed(7)
    model = family.make().to("emu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    with penstock.offload(model, optimizer, device="emu:0", **options) if options else nullcontext() as run:
        for step in range(STEPS):
            torch.manual_seed(step)
            with run.step() if run else nullcontext():
                loss = family.loss(OnDevice(model), step)  # type: ignore[arg-type]
                family.backward(loss)
                found.append(bits(loss))
                found += [bits(p.grad) for p in model.parameters() if p.grad is not None]
                optimizer.step()
                optimizer.zero_grad()
        found += [bits(parameter) for parameter in model.parameters()]
        return found, run.report() if run else None


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().view(torch.uint8).numpy().tobytes() if tensor.dim() else tensor.item().hex().encode()


def options_of(tier: str, spill_dir: Path, hardware: penstock.Hardware) -> dict[str, Any]:
    return {
        "spill_dir": spill_dir,
        "hardware": hardware,
        "host_budget": TIERS[tier],
        "smallest_bytes": 1,
    }
