"""What is dropped on a CUDA device is made again there, with the same bits.

Written without a GPU; `make gpu` runs it on one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock
from tests.support.forced import recompute_everything

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BUDGET = 1 << 30
WIDTH, WORDS, BATCH = 256, 64, 8


@pytest.fixture(autouse=True)
def reproducible(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.narrow(F.gelu(self.wide(self.norm(x)))), 0.1, self.training)


def train(step: Callable[[], AbstractContextManager[None]], steps: int = 6) -> list[bytes]:
    torch.manual_seed(7)
    model = nn.Sequential(*(_Block() for _ in range(3))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    found = []
    for number in range(steps):
        x = torch.randn(BATCH, WORDS, WIDTH, generator=torch.Generator().manual_seed(number)).cuda()
        with step():
            model(x).square().mean().backward()
            found += [parameter.grad.cpu().numpy().tobytes() for parameter in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
    return found + [torch.cuda.get_rng_state().numpy().tobytes()]


def test_everything_that_may_be_recomputed_is(tmp_path: Path) -> None:
    expected = train(nullcontext)
    hardware = penstock.probe(tmp_path, device="cuda", time_budget_s=2)
    with penstock.offload(
        device="cuda", device_budget=BUDGET, spill_dir=tmp_path, hardware=hardware, smallest_bytes=4096
    ) as run:
        assert train(run.step) == expected
        assert run.trace is not None
        plan = recompute_everything(run.trace, BUDGET)
    assert plan.recomputations
    with penstock.offload(
        device="cuda",
        device_budget=BUDGET,
        spill_dir=tmp_path,
        hardware=hardware,
        smallest_bytes=4096,
        plan=plan,
    ) as run:
        assert train(run.step) == expected
        report = run.report()
    assert report.recomputed_bytes > 0
    assert report.peak_bytes <= BUDGET
