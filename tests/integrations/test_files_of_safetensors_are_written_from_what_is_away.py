"""safetensors.torch.save_file, and so save_pretrained, inside a budget smaller than what is saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import penstock
from tests.support.runs import HARDWARE, bits

library = pytest.importorskip("safetensors.torch")

from penstock.integrations.safetensors import readable_while_away  # noqa: E402


def test_every_dtype_and_a_tensor_of_several_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.integrations.safetensors.PIECE_BYTES", 100_000)
    with penstock.offload(device_budget="3MiB", spill_dir=tmp_path, hardware=HARDWARE):
        tensors = {f"weight.{i}": torch.randn(256, 1024) for i in range(5)}
        tensors |= {str(dtype): torch.arange(100).to(dtype) for dtype in library._TYPES.values()}
        tensors |= {"none": torch.empty(0, 3), "one": torch.tensor(1.5), "bytes": torch.ones(3).byte()}
        expected = {name: bits([tensor]) for name, tensor in tensors.items() if tensor.element_size() > 1}
        undo = readable_while_away()
        library.save_file(tensors, tmp_path / "inside.safetensors", metadata={"format": "pt"})
        undo()
    after = library.load_file(tmp_path / "inside.safetensors")
    assert {name: bits([after[name]]) for name in expected} == expected
    assert set(after) == set(tensors)
    assert all(after[name].dtype == tensors[name].dtype for name in tensors)

    library.save_file(after, tmp_path / "outside.safetensors", metadata={"format": "pt"})
    texts = []
    for name in ("inside", "outside"):
        data = (tmp_path / f"{name}.safetensors").read_bytes()
        texts.append(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]))
    for text in texts:
        assert text["__metadata__"] == {"format": "pt"}
    assert {n: (v.get("dtype"), v.get("shape")) for n, v in texts[0].items()} == {
        n: (v.get("dtype"), v.get("shape")) for n, v in texts[1].items()
    }


def test_another_save_is_as_before() -> None:
    before = library.serialize_file
    undo = readable_while_away()
    assert library.serialize_file is not before
    undo()
    assert library.serialize_file is before
