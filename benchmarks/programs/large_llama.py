"""A Llama of random weights that are frozen, and trained adapters of PEFT beside them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import peft
import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from penstock.integrations.hub import uninitialized
from penstock.integrations.quantization import Quantizer

with contextlib.suppress(ImportError):  # now: memory is measured from here on
    import bitsandbytes  # noqa: F401

HEAD_WIDTH = 128


@dataclass(frozen=True)
class Config:
    """Llama 3.2 3B, unless said otherwise.

    bits     16: all of `dtype`; or of bitsandbytes 8 or 4
    """

    layers: int = 28
    heads: int = 24
    key_value_heads: int = 8
    feed: int = 8192
    vocabulary: int = 128256
    tied: bool = True
    context: int = 128
    dtype: str = "bfloat16"
    bits: int = 16
    checkpoint: bool = False
    seed: int = 0


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    found: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return found


def batches(config: Config) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(config.seed)
    for _ in itertools.count():
        yield torch.randint(config.vocabulary, (1, config.context), generator=generator)


def base(config: Config) -> LlamaForCausalLM:
    """One tensor after the other is made: there is never more than one of them in whole precision."""
    llama = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=config.vocabulary,
        hidden_size=config.heads * HEAD_WIDTH,
        intermediate_size=config.feed,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.key_value_heads,
        max_position_embeddings=config.context,
        tie_word_embeddings=config.tied,
    )
    quantizer = None
    dtype = getattr(torch, config.dtype)
    if config.bits == 16:
        model = uninitialized(llama, dtype)
    else:
        quantizer = Quantizer(
            BitsAndBytesConfig(
                load_in_4bit=config.bits == 4,
                load_in_8bit=config.bits == 8,
                bnb_4bit_compute_dtype=config.dtype,
                bnb_4bit_quant_type="nf4",
            )
        )
        model = quantizer.build(lambda: uninitialized(llama, dtype))
    model.requires_grad_(False)
    for name, weight in list(model.named_parameters()):
        if weight.dim() == 1:
            weight.fill_(1.0)
        elif not weight.is_meta:
            weight.normal_(std=0.02)
        elif quantizer is not None:
            values = torch.empty(weight.shape, dtype=dtype).normal_(std=0.02)
            quantizer.put(model, name, values)
    return model


def build(
    config: Config,
) -> tuple[nn.Module, torch.optim.Optimizer, Iterator[Tensor], Callable[[nn.Module, Tensor], Tensor]]:
    torch.manual_seed(config.seed)
    model = base(config)
    if config.checkpoint:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    adapters = peft.LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")
    adapted = peft.get_peft_model(model, adapters).train()
    trained = [weight for weight in adapted.parameters() if weight.requires_grad]
    return adapted, torch.optim.AdamW(trained, lr=2e-4), batches(config), loss
