"""TRL's SFTTrainer, with activation checkpointing and an adapter of PEFT, through the callback."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

import penstock
from tests.support.runs import Bits, bits, state_bits
from tests.support.trainers import check_moved, options, tight

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from penstock.integrations.transformers import Penstock  # noqa: E402


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[PAD]", "[EOS]", *(f"w{number}" for number in range(50))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[PAD]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", eos_token="[EOS]")


def train(folder: Path, *callbacks: Any, **changes: Any) -> tuple[list[Any], Bits]:
    from datasets import Dataset

    texts = [" ".join(f"w{(7 * i + 3 * j) % 50}" for j in range(6 + i % 9)) for i in range(16)]
    with callbacks[0] if callbacks else contextlib.nullcontext():
        transformers.set_seed(3)
        config = transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        training = trl.SFTTrainer(
            transformers.LlamaForCausalLM(config),
            args=trl.SFTConfig(
                str(folder),
                max_steps=6,
                per_device_train_batch_size=2,
                learning_rate=1e-2,
                max_length=16,
                bf16=False,
                use_cpu=True,
                report_to=[],
                logging_steps=1,
                save_strategy="no",
                disable_tqdm=True,
                dataloader_pin_memory=False,
            ),
            train_dataset=Dataset.from_dict({"text": texts}),
            processing_class=tokenizer(),
            peft_config=peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]),
            callbacks=list(callbacks),
        )
        training.train()
        losses = [entry.get("loss") for entry in training.state.log_history]
        return losses, bits(training.model.parameters()) + state_bits(training.optimizer.optimizer)


def test_same_bits(tmp_path: Path) -> None:
    expected = train(tmp_path)
    generous = Penstock(**options("1GiB", tmp_path))
    assert train(tmp_path, generous) == expected
    assert generous.run is not None
    budget = tight(generous.run.report())
    callback = Penstock(**options(budget, tmp_path))
    assert train(tmp_path, callback) == expected
    assert callback.run is not None
    report: penstock.Report = callback.run.report()
    check_moved(report, budget)
    assert report.steps == 6
