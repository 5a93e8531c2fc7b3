"""Small models of transformers, and adapters of peft, each by its width."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.families import Family, device_of

transformers = pytest.importorskip("transformers")

WORDS, LENGTH = 96, 24


def llama(width: int) -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=WORDS,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )


def gpt2(width: int) -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=WORDS,
            n_positions=LENGTH,
            n_embd=width,
            n_layer=3,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def bert(width: int) -> nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=WORDS,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
        )
    )


def mixtral(width: int) -> nn.Module:
    """Which experts see how many words differs from step to step."""
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=WORDS,
            hidden_size=width,
            intermediate_size=width,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            output_router_logits=True,
        )
    )


def lora(width: int) -> nn.Module:
    """Frozen weights, and small ones that learn."""
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(llama(width), adapters)


def _checkpointed(make: Callable[[int], Any], width: int) -> nn.Module:
    model = make(width)
    model.gradient_checkpointing_enable()
    return model


MAKERS: dict[str, Callable[[int], nn.Module]] = {
    "llama": llama,
    "gpt2": gpt2,
    "bert": bert,
    "mixtral": mixtral,
    "lora": lora,
    "checkpointed llama": functools.partial(_checkpointed, llama),
    "checkpointed gpt2": functools.partial(_checkpointed, gpt2),
}


def _loss(model: Any, step: int) -> torch.Tensor:
    words = torch.randint(WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(step))
    words = words.to(device_of(model))
    return model(input_ids=words, labels=words).loss


def language_model(name: str, width: int = 64) -> Family:
    """``name`` is one of MAKERS."""
    return Family(functools.partial(MAKERS[name], width), _loss)
