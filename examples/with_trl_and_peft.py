"""Fine-tune an adapter of PEFT by TRL's SFTTrainer, in a budget of half of its memory.

pip install '.[integrations]', then: python examples/with_trl_and_peft.py

The model has random weights: take `AutoModelForCausalLM.from_pretrained(...)` and its tokenizer instead.
"""

from __future__ import annotations

import tempfile
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from penstock.integrations.transformers import Penstock

TEXT = ["the", "plan", "says", "what", "leaves", "memory", "and", "when", "it", "comes", "back"]
WORDS = ["[PAD]", "[EOS]", *TEXT]
CONFIG = LlamaConfig(
    vocab_size=len(WORDS),
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[PAD]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", eos_token="[EOS]")


def main(steps: int = 10, device_budget: str = "9MiB", **options: Any) -> Penstock:
    texts = [" ".join(WORDS[2 + first :]) for first in range(8)]
    with (
        tempfile.TemporaryDirectory() as folder,
        Penstock(device_budget=device_budget, **options) as penstock,
    ):
        arguments = SFTConfig(
            folder,
            max_steps=steps,
            per_device_train_batch_size=4,
            logging_steps=1,
            use_cpu=True,
            bf16=False,
            report_to=[],
        )
        trainer = SFTTrainer(
            LlamaForCausalLM(CONFIG),
            args=arguments,
            train_dataset=Dataset.from_dict({"text": texts}),
            processing_class=tokenizer(),
            peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"]),
            callbacks=[penstock],
        )
        trainer.train()
    return penstock


if __name__ == "__main__":
    run = main().run
    assert run is not None
    print(run.report())
