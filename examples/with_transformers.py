"""Train a language model by transformers.Trainer in a budget: the text of this folder.

pip install '.[integrations]', then: python examples/with_transformers.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from penstock.integrations.transformers import Penstock

LENGTH = 64
CONFIG = GPT2Config(
    vocab_size=256, n_positions=LENGTH, n_embd=128, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0
)


def samples() -> list[dict[str, torch.Tensor]]:
    text = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    words = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return [{"input_ids": piece, "labels": piece} for piece in words.split(LENGTH)[:-1]]


def main(steps: int = 20, device_budget: str = "12MiB", **options: Any) -> Penstock:
    with (
        tempfile.TemporaryDirectory() as folder,
        Penstock(device_budget=device_budget, **options) as penstock,
    ):
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            logging_steps=5,
            use_cpu=True,
            report_to=[],
        )
        trainer = Trainer(GPT2LMHeadModel(CONFIG), arguments, train_dataset=samples(), callbacks=[penstock])
        trainer.train()
    return penstock


if __name__ == "__main__":
    run = main().run
    assert run is not None
    print(run.report())
