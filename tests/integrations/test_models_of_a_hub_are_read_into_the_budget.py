"""A model that transformers has saved is read straight into a budget smaller than its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from tests.support.runs import HARDWARE, bits

transformers = pytest.importorskip("transformers")

from penstock.integrations.transformers import load  # noqa: E402

SMALL = {"vocab_size": 500, "num_hidden_layers": 3, "num_attention_heads": 4}
CONFIGS = {
    "tied": transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_key_value_heads=2, tie_word_embeddings=True, **SMALL
    ),
    "bfloat16": transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_key_value_heads=2, dtype="bfloat16", **SMALL
    ),
    "buffers": transformers.BertConfig(hidden_size=256, intermediate_size=512, **SMALL),
}
KINDS = {"tied": "LlamaForCausalLM", "bfloat16": "LlamaForCausalLM", "buffers": "BertForMaskedLM"}


def saved(name: str, folder: Path) -> Any:
    torch.manual_seed(1)
    model = getattr(transformers, KINDS[name])._from_config(CONFIGS[name], dtype=CONFIGS[name].dtype)
    model.save_pretrained(folder, max_shard_size="1MB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    return model


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_same_bits_as_what_was_saved(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path).eval()
    budget = sum(parameter.nbytes for parameter in model.parameters()) // 2
    words = torch.arange(16)[None]
    with torch.no_grad():
        expected = bits([*model.parameters(), *model.buffers(), model(input_ids=words).logits])
    planning = penstock.PlanOptions(smallest_bytes=4096, policy="g10")
    with penstock.offload(
        device_budget=budget, spill_dir=tmp_path, hardware=HARDWARE, planning=planning
    ) as run:
        loaded = load(tmp_path, run=run)
        with run.step(), torch.no_grad():
            logits = loaded(input_ids=words).logits
        found = bits([*loaded.parameters(), *loaded.buffers(), logits])
        assert run.report().peak_bytes <= budget
    assert found == expected
    assert type(loaded) is type(model) and loaded.training is False
    if name == "tied":
        assert loaded.lm_head.weight is loaded.get_input_embeddings().weight


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    saved("tied", tmp_path)
    other = transformers.LlamaConfig(
        **{**CONFIGS["tied"].to_dict(), "hidden_size": 128, "num_hidden_layers": 4}
    )
    other.architectures = ["LlamaForCausalLM"]
    with pytest.raises(penstock.InvalidArgument, match=r"layers\.3\.\S+ is missing.*and \d+ more"):
        load(tmp_path, other)
    other.num_hidden_layers = 3
    with pytest.raises(
        penstock.InvalidArgument, match=r"has the shape \[500, 256\], and the model \[500, 128\]"
    ):
        load(tmp_path, other)
    with pytest.raises(penstock.InvalidArgument, match="names no architecture"):
        load(tmp_path, CONFIGS["buffers"].__class__())

    shard = min(tmp_path.glob("model-*.safetensors"))
    shard.write_bytes(b"damaged")
    with pytest.raises(penstock.InvalidFile, match="no safetensors file"):
        load(tmp_path)
    shard.unlink()
    with pytest.raises(penstock.InvalidFile, match="is missing"):
        load(tmp_path)
    with penstock.offload(device_budget="1GiB", spill_dir=tmp_path, hardware=HARDWARE) as run:
        pass
    with pytest.raises(penstock.InvalidArgument, match="closed"):
        load(tmp_path, run=run)
