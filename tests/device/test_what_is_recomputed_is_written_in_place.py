"""What runs again writes to the memory of what was dropped: that is taken once, and every bit is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import penstock
from tests.support.accelerator import wanted
from tests.support.forced import recompute_everything
from tests.support.runs import ACCELERATED, EVERYTHING, bits

DEVICE = wanted("emu")
GENEROUS = 1 << 30
SIDE = 1024
STEPS = 6  # the last is not recorded: that resets the peak at each kernel

IN_PLACE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "add": lambda x: x + 1.5,
    "cast": lambda x: x.to(torch.float64),
    "transposed clone": lambda x: x.t().clone(),
    "contiguous": lambda x: x.t().contiguous(),
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "softmax": lambda x: x.softmax(-1),
    "product": lambda x: x @ x.t(),
    "linear": lambda x: torch.addmm(x[0], x, x.t(), beta=0.5),
    "cat": lambda x: torch.cat((x[:100], x[300:])),
}
COPIED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "layer norm": lambda x: F.layer_norm(x, (SIDE,)),
    "dropout": lambda x: F.dropout(x, 0.5),
}


@pytest.mark.parametrize("name", [*IN_PLACE, *COPIED])
def test_a_kernel_has_its_result_once(name: str, tmp_path: Path) -> None:
    kernel = (IN_PLACE | COPIED)[name]
    weight = torch.linspace(-3, 3, SIDE * SIDE, device=DEVICE).view(SIDE, SIDE)

    def train(run: penstock.Offload) -> tuple[list[bytes], int]:
        torch.manual_seed(3)
        with run.step():
            made = kernel(weight)
            middle = weight.sum() * 2  # it is dropped before the second
            torch.accelerator.reset_peak_memory_stats()
            before = torch.accelerator.memory_allocated()
            middle = middle * 2
            found = made.sum() + middle
            taken = torch.accelerator.max_memory_allocated() - before
            return bits([made, found]), taken

    options = {
        "device": DEVICE,
        "device_budget": GENEROUS,
        "host_budget": "96MiB",
        "spill_dir": tmp_path,
        "hardware": ACCELERATED,
        "planning": penstock.PlanOptions(smallest_bytes=EVERYTHING, recompute=True),
    }
    with penstock.offload(**options) as run:
        expected, _ = train(run)
        trace = run.trace
    assert trace is not None
    plan = recompute_everything(trace, GENEROUS, least_bytes=SIDE * SIDE // 2)
    assert plan.recomputations
    with penstock.offload(**options, plan=plan) as run:
        for _ in range(STEPS):
            found, taken = train(run)
            assert found == expected
        report = run.report()
    assert report.recomputed_bytes > 0 and report.unrecomputed == 0
    result_bytes = max(int(trace.tensor_bytes[each.tensor]) for each in plan.recomputations)
    assert result_bytes <= taken < (2.1 if name in COPIED else 1.1) * result_bytes
