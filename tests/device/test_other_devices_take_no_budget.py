"""What lies on the host, or on no device, takes nothing of the device's budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from tests.support.runs import ACCELERATED, Bits, Step, bits, differences, in_memory, offloaded

MIB = 1 << 20
ACCELERATOR: dict[str, Any] = {"device": "emu", "hardware": ACCELERATED, "host_budget": "128MiB"}


def _large(device: str) -> torch.Tensor:
    """Of 16 MiB."""
    return torch.arange(4 * MIB, dtype=torch.float32, device=device)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_kernels_elsewhere_need_no_budget(device: str, tmp_path: Path) -> None:
    def program(step: Step) -> Bits:
        there = torch.ones(128, 128, device="emu")
        found: list[torch.Tensor] = []
        for _ in range(4):
            with step():
                (there @ there).nonzero()  # which have workspace, and results that depend on values
                matrix = _large(device).view(2048, 2048)
                product = matrix[:, :64] @ matrix[:64]
                found = [matrix + 1, matrix.mul_(2), product, torch._foreach_add([matrix, product], 1)[0]]
                if device == "cpu":
                    found.append(matrix.nonzero())
        return bits(found) if device == "cpu" else []

    found, report = offloaded(program, "4MiB", tmp_path, **ACCELERATOR)
    assert differences(in_memory(program), found) == []
    assert report.peak_bytes <= 4 * MIB and report.predicted_peak_bytes < MIB
    assert report.evicted_bytes == 0


def test_traces_have_no_bytes_of_the_host(tmp_path: Path) -> None:
    weight, on_host = torch.ones(MIB, device="emu"), torch.ones(MIB)

    def step() -> None:
        scaled = (on_host * 2).sum()
        (weight + scaled).cpu()

    with penstock.offload(device_budget="64MiB", spill_dir=tmp_path, **ACCELERATOR) as run:
        for _ in range(2):
            with run.step():
                step()
        assert run.trace is not None
        for trace in (run.trace, penstock.trace(step, fake=False, device="emu")):
            assert sorted(trace.tensor_bytes.tolist())[-2:] == [4 * MIB, 4 * MIB]
            assert trace.tensor_bytes.sum() == 8 * MIB
            assert not trace.movable[trace.tensor_bytes == 0].any()


def _to_device(large: torch.Tensor) -> list[torch.Tensor]:
    return [large[: MIB // 4].to("emu") * 2]


def _to_host(large: torch.Tensor) -> list[torch.Tensor]:
    on_device = torch.ones(MIB // 4, device="emu")
    return [on_device.cpu() + 1, large[: MIB // 4] + on_device.to("cpu", torch.float64)]


def _copied(large: torch.Tensor) -> list[torch.Tensor]:
    on_device = torch.empty(MIB // 4, device="emu")
    on_device.copy_(large[: MIB // 4])
    large[MIB:][: MIB // 4].copy_(on_device)
    return [on_device + 1, large]


def _scaled(large: torch.Tensor) -> list[torch.Tensor]:
    return [torch.ones(MIB // 4, device="emu") * large.sum() + torch.tensor(3.0)]


@pytest.mark.parametrize("work", [_to_device, _to_host, _copied, _scaled])
def test_mixed_kernels_need_what_lies_on_the_device(
    work: Callable[[torch.Tensor], list[torch.Tensor]], tmp_path: Path
) -> None:
    def program(step: Step) -> Bits:
        found: list[torch.Tensor] = []
        for _ in range(4):
            with step():
                found = work(_large("cpu"))
        return bits(found)

    found, report = offloaded(program, "6MiB", tmp_path, **ACCELERATOR)
    assert differences(in_memory(program), found) == []
    assert report.peak_bytes <= 6 * MIB and report.predicted_peak_bytes <= 4 * MIB


def test_a_larger_batch_than_planned_has_room_made(emu: Any, tmp_path: Path) -> None:
    """The trace has no size of the batch on the host."""
    refused: list[int] = []

    def program(step: Step) -> Bits:
        weights = [torch.full((3 * MIB,), float(number), device="emu") for number in range(4)]
        for rows in (1, 1, 1, 1, 3, 2):
            batch = torch.arange(rows * 3 * MIB, dtype=torch.float32).view(rows, 3 * MIB)
            with step():
                moved = batch.to("emu")
                for weight in weights:
                    weight.add_(moved[-1])
            refused.append(torch.accelerator.memory_stats()["num_ooms"])
            del moved
        return bits(weights)

    expected = in_memory(program)
    emu.configure()
    refused.clear()
    found, report = offloaded(program, "64MiB", tmp_path, **ACCELERATOR)
    assert differences(expected, found) == []
    assert report.peak_bytes <= 64 * MIB
    assert refused == [0] * 6
