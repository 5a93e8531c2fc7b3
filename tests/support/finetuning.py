"""What `penstock finetune` is compared with: a plain loop of transformers and torch, all in memory.

    python -m tests.support.finetuning make DIR '{"hidden_size": 1024, ...}'
    python -m tests.support.finetuning train DIR TEXT '{"max_steps": 4, ...}' OUTPUT

The second prints the losses as JSON, and the most resident bytes; it writes the model to OUTPUT.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 128,
    "attention_dropout": 0.1,  # losses tell whether random numbers are drawn in the same order
}


def make(folder: Path, config: Mapping[str, Any] = SMALL, dtype: torch.dtype = torch.float32) -> Path:
    """A model directory of random weights, in several files."""
    import transformers

    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM._from_config(transformers.LlamaConfig(**config), dtype=dtype)
    size = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(folder, max_shard_size=size // 3)
    return folder


def train(
    folder: Path,
    text: Path,
    *,
    max_steps: int,
    block_size: int,
    per_device_train_batch_size: int = 1,
    gradient_accumulation_steps: int = 1,
    learning_rate: float = 1e-3,
    warmup_steps: int = 0,
    weight_decay: float = 0.0,
    seed: int = 42,
    dtype: str = "float32",
    lora: bool = False,
    few_bits: Mapping[str, Any] | None = None,
) -> tuple[list[float], Any]:
    """The losses, and the model. A token for each byte.

    few_bits   of BitsAndBytesConfig
    """
    import transformers

    quantized = {}
    if few_bits is not None:
        config = transformers.BitsAndBytesConfig(bnb_4bit_compute_dtype=dtype, **few_bits)
        quantized = {"quantization_config": config, "device_map": {"": "cpu"}}
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), **quantized
    )
    torch.manual_seed(seed)
    if lora:
        import peft

        model = peft.get_peft_model(
            model, peft.LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")
        )
    torch.manual_seed(seed)
    model.train()
    trained = [each for each in model.parameters() if each.requires_grad]
    groups = [
        {"params": [each for each in trained if each.dim() > 1], "weight_decay": weight_decay},
        {"params": [each for each in trained if each.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, fused=True)
    scheduler = transformers.get_scheduler("linear", optimizer, warmup_steps, max_steps)
    tokens = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8).long()
    sequences = torch.stack(tokens.split(block_size)[: len(tokens) // block_size])
    per_step = per_device_train_batch_size * gradient_accumulation_steps
    losses: list[float] = []
    while len(losses) < max_steps:
        epoch, place = divmod(len(losses), len(sequences) // per_step)
        order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(seed + epoch))
        chosen = sequences[order[place * per_step : (place + 1) * per_step]]
        total = torch.zeros(())
        for batch in chosen.split(per_device_train_batch_size):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss / gradient_accumulation_steps
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(total.item())
    return losses, model


def main(command: str, folder: str, *rest: str) -> None:
    if command == "make":
        make(Path(folder), json.loads(rest[0]))
        return
    text, options, output = rest
    losses, model = train(Path(folder), Path(text), **json.loads(options))
    model.save_pretrained(output)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    print(json.dumps({"losses": losses, "peak_resident_bytes": peak}))


if __name__ == "__main__":
    main(*sys.argv[1:])
