"""What is wrong with a device, or a budget for it, is said at once, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.errors import DeviceUnavailable, InvalidArgument
from penstock.runtime import opening
from tests.support.accelerator import wanted
from tests.support.runs import offload

DEVICE = wanted("emu")


def offloaded(**options: Any) -> Callable[[Path], object]:
    return lambda spill_dir: offload(spill_dir=spill_dir, **{"device_budget": "32MiB"} | options)


CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (offloaded(device="tpu"), InvalidArgument, "'tpu' is no device: give 'cpu', 'cuda'"),
        (offloaded(device=7.5), InvalidArgument, "7.5 is no device: give 'cpu', 'cuda'"),
        (offloaded(device="meta"), DeviceUnavailable, "penstock cannot use 'meta': give 'cpu', 'cuda'"),
        (
            offloaded(model=torch.nn.Linear(2, 2, device="meta")),
            DeviceUnavailable,
            "penstock cannot use 'meta': give 'cpu', 'cuda'",
        ),
        pytest.param(
            offloaded(device="cuda"),
            DeviceUnavailable,
            "sees 0 CUDA device(s). Give device='cpu'",
            marks=CUDA,
        ),
        pytest.param(
            lambda spill_dir: penstock.probe(spill_dir, device="cuda:1"),
            DeviceUnavailable,
            "'cuda:1' is not on this machine",
            marks=CUDA,
        ),
        (offloaded(device=f"{DEVICE}:99"), DeviceUnavailable, f"'{DEVICE}:99' is not on this machine"),
        (
            offloaded(device=DEVICE, device_budget="5TiB"),
            InvalidArgument,
            f"device_budget is 5.00 TiB, and {DEVICE}:0 (",
        ),
        (offloaded(device=DEVICE, host_budget="1MiB"), InvalidArgument, "host_budget is 1.00 MiB"),
        (
            offloaded(device=DEVICE, host_budget="900TiB"),
            InvalidArgument,
            "host_budget is 900.0 TiB, all of it page-locked, and",
        ),
    ],
)
def test_devices(
    call: Callable[[Path], object],
    error: type[Exception],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opening, "PROBE_S", 0.05)
    with pytest.raises(error) as refused:
        call(tmp_path)
    assert said in str(refused.value)


@pytest.mark.parametrize("allocator", ["cudaMallocAsync", "pluggable", "uncached"])
def test_allocators_that_keep_no_limit(
    allocator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    if allocator == "uncached":
        monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "0")  # torch asks only whether it is set
    backend = "native" if allocator == "uncached" else allocator
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    with pytest.raises(DeviceUnavailable, match=f"'{allocator}', and no budget can be kept with it"):
        offloaded(device="cuda:0")(tmp_path)
    with pytest.raises(DeviceUnavailable, match=f"'{allocator}', and no budget can be kept with it"):
        penstock.probe(tmp_path, device="cuda:0")


def test_a_run_inside_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "PROBE_S", 0.05)
    again = offloaded(device=DEVICE)
    with penstock.offload(device=DEVICE, device_budget="32MiB", spill_dir=tmp_path) as run:
        with pytest.raises(InvalidArgument, match=r"another run is open.*penstock\.close\(\)"):
            again(tmp_path)
        with run.step():
            with pytest.raises(InvalidArgument, match=r"another run is open.*penstock\.close\(\)"):
                again(tmp_path)
            assert float(torch.ones(8, device=DEVICE).sum()) == 8


def test_the_programs_own_limit_outlives_a_run(
    configure: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(memory="512MiB")
    monkeypatch.setattr(opening, "PROBE_S", 0.05)
    module = torch.get_device_module(DEVICE)
    total_bytes = module.get_device_properties(0).total_memory
    module.set_per_process_memory_fraction(0.5)
    with pytest.raises(InvalidArgument, match=r"left to this process.*memory fraction"):
        penstock.offload(device=DEVICE, device_budget=int(0.6 * total_bytes), spill_dir=tmp_path)
    run = penstock.offload(device=DEVICE, device_budget=int(0.4 * total_bytes), spill_dir=tmp_path)
    with run, pytest.raises(penstock.BudgetTooSmall):
        torch.empty(int(0.7 * total_bytes), dtype=torch.uint8, device=DEVICE)
    assert module.get_per_process_memory_fraction() == pytest.approx(0.5, rel=1e-3)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(int(0.7 * total_bytes), dtype=torch.uint8, device=DEVICE)


def test_devices_are_measured(tmp_path: Path) -> None:
    machine = penstock.probe(tmp_path, device=DEVICE, time_limit_s=0.2)
    properties = torch.get_device_module(DEVICE).get_device_properties(0)
    assert machine.device_bytes == properties.total_memory
    assert machine.name.startswith(f"{properties.name}, ")
    assert machine.device_to_host_bytes_per_s > 0 and machine.host_to_device_bytes_per_s > 0
    assert machine.compress_bytes_per_s > 0 and not machine.copy_overhead_s


def test_steps_are_traced_on_it() -> None:
    layer = torch.nn.Linear(64, 64, device=DEVICE)
    x = torch.ones(64, 64, device=DEVICE)
    trace = penstock.trace(lambda: layer(x).square().sum().backward(), fake=False, device=DEVICE)
    assert trace.kernels > 3 and trace.peak_bytes >= 4 * 64 * 64 * 4


@pytest.mark.parametrize(("budget", "least", "most"), [("25%", 0.25, 0.25), ("auto", 0.5, 0.9)])
def test_a_budget_is_a_share_of_the_device(
    budget: str, least: float, most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "PROBE_S", 0.05)
    total_bytes = torch.get_device_module(DEVICE).get_device_properties(0).total_memory
    with penstock.offload(device=DEVICE, device_budget=budget, spill_dir=tmp_path) as run:
        assert int(least * total_bytes) <= run._engine.budget_bytes <= int(most * total_bytes)
