"""The host launches, and goes on: also where a step is recorded, and when a step ends. It stays near
where tensors move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import penstock
from penstock.runtime.devices.reserved import PIECES_SHARE
from tests.support.runs import ACCELERATED

MIB = 1 << 20
KERNELS = 64


def train(emu: Any, steps: int, spill_dir: Path) -> list[dict[str, int]]:
    """Kernels that all fit. What was counted in each step."""
    emu.configure(order="lazy")
    counted = []
    with penstock.offload(
        device="emu", device_budget=64 * MIB, spill_dir=spill_dir, hardware=ACCELERATED, host_budget="96MiB"
    ) as run:
        tensor = torch.ones(MIB // 4, device="emu")
        for _ in range(steps):
            before = emu.counters()
            with run.step():
                for _ in range(KERNELS):
                    tensor = tensor.mul(0.5)
            after = emu.counters()
            counted.append({name: after[name] - before[name] for name in after})
            if len(counted) == steps:
                counted[-1]["left"] = after["launched"] - after["executed"]
        report = run.report()
        assert report.steps == steps and report.step_s > 0
    return counted


def test_a_recorded_step_does_not_at_each_kernel(emu: Any, tmp_path: Path) -> None:
    counted = train(emu, 1, tmp_path)
    # A question whether an event was reached waits for it on this device, one time in eight.
    assert counted[0]["synchronized"] < KERNELS


def test_a_step_does_not_at_its_end(emu: Any, tmp_path: Path) -> None:
    counted = train(emu, 8, tmp_path)
    assert counted[-1]["left"] >= KERNELS


def test_plans_leave_memory_for_pieces(emu: Any, tmp_path: Path) -> None:
    emu.configure(order="eager")
    budget_bytes = 64 * MIB
    with penstock.offload(
        device="emu",
        device_budget=budget_bytes,
        spill_dir=tmp_path,
        hardware=ACCELERATED,
        host_budget="96MiB",
    ) as run:
        kept = [torch.ones(MIB, device="emu") for _ in range(14)]
        for _ in range(4):
            with run.step():
                for tensor in kept:
                    tensor.mul_(1.0)
                large = torch.cat(kept[:4])
                del large
        assert run.plan is not None
        assert run.plan.device_budget_bytes == budget_bytes - int(PIECES_SHARE * budget_bytes)
        assert run.report().predicted_peak_bytes <= run.plan.device_budget_bytes


def test_a_planned_step_is_not_far_ahead(emu: Any, tmp_path: Path) -> None:
    emu.configure("4GiB", machine="h100-pcie5", computes=False)
    with penstock.offload(
        device="emu",
        device_budget="1GiB",
        host_budget="2GiB",
        spill_dir=tmp_path,
        hardware=ACCELERATED,
        planning=penstock.PlanOptions(recompute=False),
    ) as run:
        kept = [torch.zeros(4096, 4096, device="emu") for _ in range(24)]
        for _ in range(8):
            with run.step():
                for tensor in kept:
                    torch.mm(tensor, tensor)
                    tensor.mul_(1.0)
        launched_s = emu.now_s()
        torch.accelerator.synchronize()
        ahead_s = emu.now_s() - launched_s
        report = run.report()
    assert report.evicted_bytes > 0
    assert ahead_s < report.step_s / 5
