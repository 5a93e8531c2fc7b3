"""Tensors on a GPU are saved from there, and come back there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock import checkpoint
from tests.support.accelerator import wanted
from tests.support.states import numbers, same

DEVICE = wanted("cuda")
ELEMENTS = 1 << (24 if DEVICE == "cuda" else 20)


def state() -> dict[str, torch.Tensor]:
    tensors = {
        "large": numbers(5_000_001),
        "odd": numbers(7, torch.uint8),
        "half": numbers(99, torch.bfloat16),
    }
    return {name: tensor.to(DEVICE) for name, tensor in tensors.items()} | {"host": numbers(33)}


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("mmap", [True, False])
def test_tensors_come_back_to_the_device_they_were_on(mmap: bool, wait: bool, tmp_path: Path) -> None:
    saved = state()
    if handle := checkpoint.save(saved, tmp_path / "state", wait=wait):
        handle.wait()
    loaded = checkpoint.load(tmp_path / "state", mmap=mmap)
    assert {name: tensor.device for name, tensor in loaded.items()} == {
        name: tensor.device for name, tensor in saved.items()
    }
    assert same(loaded, saved)
    on_host = checkpoint.load(tmp_path / "state", "cpu", mmap)
    assert all(tensor.device.type == "cpu" for tensor in on_host.values()) and same(on_host, saved)
    moved = checkpoint.load(tmp_path / "state", lambda storage, _: storage.to(device=DEVICE), mmap)
    assert all(tensor.device.type == DEVICE for tensor in moved.values()) and same(moved, saved)


@pytest.mark.parametrize("mmap", [True, False])
def test_tensors_on_a_gpu_are_filled(mmap: bool, tmp_path: Path) -> None:
    saved = state()
    checkpoint.save(saved, tmp_path / "state")
    target = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    assert same(checkpoint.load(tmp_path / "state", mmap=mmap, into=target), saved)


@pytest.mark.parametrize("wait", [True, False])
def test_a_save_sees_what_its_stream_was_told_to_do(wait: bool, tmp_path: Path) -> None:
    with torch.Stream(device=DEVICE):
        tensor = torch.zeros(ELEMENTS, device=DEVICE)
        for _ in range(200):
            tensor += 1
        handle = checkpoint.save({"a": tensor}, tmp_path / "state", wait=wait)
        tensor.zero_()
    if handle:
        handle.wait()
    assert bool((checkpoint.load(tmp_path / "state", "cpu")["a"] == 200).all())


def test_what_is_frozen_on_a_gpu_is_written_once(tmp_path: Path) -> None:
    frozen = state()
    moving = torch.zeros(ELEMENTS // 16, device=DEVICE)
    with checkpoint.Manager(tmp_path) as manager:
        for step in range(3):
            manager.save({"frozen": frozen, "moving": moving}, step)
            moving += 1
    found = checkpoint.ls(tmp_path)
    assert all(each.size_bytes < moving.nbytes + 20_000 and each.elsewhere for each in found[1:])
    for each in found:
        loaded = checkpoint.load(each.path)
        assert same(loaded["frozen"], frozen) and bool((loaded["moving"] == each.step).all())
        assert loaded["moving"].device == moving.device
