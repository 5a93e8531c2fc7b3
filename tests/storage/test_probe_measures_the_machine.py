"""The probe: a Hardware of this machine within its time, and clear refusals."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest
import torch

from penstock.capture.probe import SIZES_BYTES, probe
from penstock.core.hardware import Hardware
from penstock.errors import DeviceUnavailable, InvalidArgument, SpillError, SpillSpaceFull
from penstock.storage.paths import TRANSPORTS
from penstock.storage.spill import SpillSpace
from tests.support.memory_transport import MemoryTransport

MIB = 1 << 20


def test_a_cpu_is_probed_in_time(tmp_path: Path) -> None:
    start_s = time.perf_counter()
    hardware = probe(tmp_path, time_limit_s=5)
    assert time.perf_counter() - start_s < 15
    assert 0.5 * MIB < hardware.device_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert hardware.host_bytes == 0
    assert hardware.disk_bytes > 0
    assert hardware.disk_shares_bus is False
    assert 0 < hardware.duplex <= 1
    assert 0 <= hardware.copy_overhead_s < 0.1
    assert 0 <= hardware.byte_overhead_s < 1e-7
    for rate in (hardware.compress_bytes_per_s, hardware.expand_bytes_per_s):
        assert 1e6 < rate < 1e11  # measured: the defaults are a GPU's
    assert set(hardware.measured_rates) == {"disk_write", "disk_read"}
    for link, points in hardware.measured_rates.items():
        sizes = [size for size, _ in points]
        assert sizes == list(SIZES_BYTES[: len(sizes)])
        assert hardware.rate_bytes_per_s(link) == points[-1][1]
        assert all(rate > 0 for _, rate in points)
        assert 0 < getattr(hardware, f"{link}_latency_s") < 1
    assert hardware.transfer_s("disk_read", 64 * MIB) > hardware.transfer_s("disk_read", MIB)
    assert list(tmp_path.iterdir()) == []


def test_what_was_measured_can_be_saved(tmp_path: Path) -> None:
    hardware = probe(tmp_path, time_limit_s=0.5)
    hardware.save(tmp_path / "hardware.json")
    assert Hardware.load(tmp_path / "hardware.json") == hardware


def test_a_slow_disk_is_not_measured_at_every_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(TRANSPORTS, "io_uring")
    monkeypatch.setitem(TRANSPORTS, "posix", lambda: MemoryTransport(delay_s=0.01))
    start_s = time.perf_counter()
    hardware = probe(tmp_path, time_limit_s=1)
    assert time.perf_counter() - start_s < 15
    assert 3 <= len(hardware.measured_rates["disk_write"]) < len(SIZES_BYTES)
    assert hardware.disk_write_latency_s >= 0.01


def test_little_room_leaves_the_large_sizes_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = os.posix_fallocate

    def full(descriptor: int, offset: int, size: int) -> None:
        if offset + size > 100 * MIB:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    points = probe(tmp_path, time_limit_s=20).measured_rates["disk_write"]
    assert [size for size, _ in points] == [size for size in SIZES_BYTES if size < 64 * MIB]


def test_no_room_at_all_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: SpillSpace, size_bytes: int) -> None:
        raise SpillSpaceFull("full")

    monkeypatch.setattr(SpillSpace, "allocate", full)
    with pytest.raises(SpillSpaceFull):
        probe(tmp_path)


@pytest.mark.parametrize("device", ["cuda:1000", "mps"])
def test_a_device_that_is_not_there_is_refused(tmp_path: Path, device: str) -> None:
    with pytest.raises(DeviceUnavailable, match="cpu"):
        probe(tmp_path, device)


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument):
        probe(tmp_path, "toaster")
    with pytest.raises(InvalidArgument):
        probe(tmp_path, time_limit_s=0)
    with pytest.raises(SpillError):
        probe(tmp_path / "absent")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_probed(tmp_path: Path) -> None:
    hardware = probe(tmp_path, "cuda")
    assert hardware.disk_shares_bus is True
    assert hardware.host_bytes > 0
    assert set(hardware.measured_rates) == {"device_to_host", "host_to_device", "disk_write", "disk_read"}
    assert hardware.transfer_s("device_to_host", 64 * MIB) > 0
