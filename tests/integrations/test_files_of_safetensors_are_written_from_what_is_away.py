"""save_file of safetensors, and so save_pretrained, inside a budget smaller than what is saved."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import penstock
from tests.support.runs import HARDWARE, bits

library = pytest.importorskip("safetensors.torch")
for_numpy = pytest.importorskip("safetensors.numpy")


def test_every_dtype_and_a_tensor_of_several_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.runtime.safetensors.PIECE_BYTES", 100_000)
    with penstock.offload(device_budget="3MiB", spill_dir=tmp_path, hardware=HARDWARE):
        tensors = {f"weight.{i}": torch.randn(256, 1024) for i in range(5)}
        tensors |= {str(dtype): torch.arange(100).to(dtype) for dtype in library._TYPES.values()}
        tensors |= {"none": torch.empty(0, 3), "one": torch.tensor(1.5), "bytes": torch.ones(3).byte()}
        expected = {name: bits([tensor]) for name, tensor in tensors.items() if tensor.element_size() > 1}
        library.save_file(tensors, tmp_path / "inside.safetensors", metadata={"format": "pt"})
    after = library.load_file(tmp_path / "inside.safetensors")
    assert {name: bits([after[name]]) for name in expected} == expected
    assert set(after) == set(tensors)
    assert all(after[name].dtype == tensors[name].dtype for name in tensors)

    (tmp_path / "by_the_library.safetensors").write_bytes(library.save(after, metadata={"format": "pt"}))
    texts = []
    for name in ("inside", "by_the_library"):
        data = (tmp_path / f"{name}.safetensors").read_bytes()
        texts.append(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]))
    for text in texts:
        assert text["__metadata__"] == {"format": "pt"}
    assert {n: (v.get("dtype"), v.get("shape")) for n, v in texts[0].items()} == {
        n: (v.get("dtype"), v.get("shape")) for n, v in texts[1].items()
    }


def test_what_is_still_away_when_its_run_is_closed(tmp_path: Path) -> None:
    with penstock.offload(device_budget="3MiB", spill_dir=tmp_path, hardware=HARDWARE):
        tensors = {f"weight.{i}": torch.full((512, 1024), float(i)) for i in range(5)}
    library.save_file(tensors, tmp_path / "torch.safetensors")
    for_numpy.save_file(
        {name: each.numpy() for name, each in tensors.items()}, tmp_path / "numpy.safetensors"
    )
    for file in ("torch.safetensors", "numpy.safetensors"):
        found = library.load_file(tmp_path / file)
        assert all(np.all(found[f"weight.{i}"].numpy() == i) for i in range(5))
