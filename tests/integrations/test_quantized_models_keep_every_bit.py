"""Weights in few bits, and optimizers with eight-bit state, of bitsandbytes and torchao: with the same bits.
`make test-versions` has both libraries; elsewhere these tests skip."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.runs import Bits, Step, bits, differences, in_memory, offloaded

WIDTH, LAYERS, STEPS = 256, 6, 6

Build = Callable[[], tuple[nn.Module, torch.optim.Optimizer]]


def layers() -> nn.Sequential:
    torch.manual_seed(3)
    hidden = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 8))


class Adapted(nn.Module):
    """A frozen layer, and a trained one of low rank beside it."""

    def __init__(self, frozen: nn.Module) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.frozen(x) + self.up(self.down(x))
        return found


def with_adapters(quantize: Callable[[nn.Linear], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = layers()
    for layer in list(model)[:LAYERS]:
        layer[0] = Adapted(quantize(layer[0]))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-3)


def four_bits(linear: nn.Linear) -> nn.Module:
    library = pytest.importorskip("bitsandbytes")
    made: nn.Module = library.nn.Linear4bit(WIDTH, WIDTH, compute_dtype=torch.float32, quant_type="nf4")
    made.load_state_dict(linear.state_dict())
    return made.to("cpu")


def eight_bits(linear: nn.Linear) -> nn.Module:
    library = pytest.importorskip("torchao.quantization")
    library.quantize_(linear, library.Int8WeightOnlyConfig())
    return linear


def optimized_by(module: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = layers()
    return model, pytest.importorskip(module).AdamW8bit(model.parameters(), lr=1e-3)


BUILDS: dict[str, Build] = {
    "four bits of bitsandbytes": lambda: with_adapters(four_bits),
    "eight bits of torchao": lambda: with_adapters(eight_bits),
    "AdamW of bitsandbytes": lambda: optimized_by("bitsandbytes.optim"),
    "AdamW of torchao": lambda: optimized_by("torchao.optim"),
}


def training(build: Build) -> Callable[[Step], Bits]:
    def program(step: Step) -> Bits:
        model, optimizer = build()
        found: Bits = []
        for number in range(STEPS):
            with step():
                batch = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(number))
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            found += bits([loss])
        return found + bits(weight for weight in model.parameters() if weight.requires_grad)

    return program


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.filterwarnings("ignore")  # the libraries' own
def test_a_budget_changes_no_bit(name: str, tmp_path: Path) -> None:
    program = training(BUILDS[name])
    expected = in_memory(program)
    _, generous = offloaded(program, "1GiB", tmp_path)
    budget_bytes = (generous.minimum_bytes + 2 * generous.peak_bytes) // 3
    found, report = offloaded(program, budget_bytes, tmp_path)
    assert differences(expected, found) == []
    assert report.peak_bytes <= budget_bytes < generous.peak_bytes
    assert report.loaded_bytes > 0 or report.recomputed_bytes > 0
