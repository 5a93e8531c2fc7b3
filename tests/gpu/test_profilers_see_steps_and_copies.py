"""NVTX ranges around steps and copies on a CUDA device.

`make gpu` runs it on one, `make gpu-rehearsal` on the emulated accelerator.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import penstock
from penstock.runtime.devices.cuda import CudaDriver
from penstock.runtime.devices.drivers import DRIVERS
from tests.support.accelerator import wanted

DEVICE = wanted("cuda")
LAYER = 4 << 20  # bytes of weights


@pytest.fixture
def nvtx(monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]) -> None:
    """Elsewhere than on CUDA the device is marked as CUDA's driver does, and NVTX does nothing."""
    if DEVICE == "cuda":
        if not hasattr(torch._C, "_nvtx"):
            pytest.skip("needs a torch with NVTX")
        return
    record_property("not rehearsed", "NVTX itself")
    monkeypatch.setattr(DRIVERS[DEVICE], "profiler_range", CudaDriver.profiler_range)
    monkeypatch.setattr(DRIVERS[DEVICE], "_has_nvtx", True, raising=False)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda text: 0)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: 0)


@pytest.mark.usefixtures("nvtx")
def test_ranges_are_opened_and_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a thread are nested, and none stays open."""
    push, pop = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop
    opened: dict[str, list[str]] = defaultdict(list)
    seen: set[str] = set()

    def pushed(text: str) -> int:
        opened[threading.current_thread().name].append(text)
        seen.add(text.partition(":")[0])
        return push(text)

    def popped() -> int:
        opened[threading.current_thread().name].pop()
        return pop()

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", pushed)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", popped)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(24))).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    budget = 24 * 2 * LAYER  # of four: weights, gradients and two of AdamW
    with penstock.offload(
        model, optimizer, device_budget=budget, host_budget=1 << 30, spill_dir=tmp_path
    ) as run:
        for _ in range(4):
            with run.step():
                model(torch.ones(8, 1024, device=DEVICE)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert run.report().evicted_bytes > 0
    assert "penstock step" in seen
    assert any(name.startswith("penstock-") and name.endswith("-out") for name in seen)
    assert not any(opened.values())
