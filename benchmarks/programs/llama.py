"""A small Llama of transformers on batches whose lengths change from step to step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True)
class Config:
    """lengths   least and most characters of a batch, drawn for each"""

    layers: int = 8
    width: int = 256
    heads: int = 8
    vocabulary: int = 1024
    batch: int = 8
    lengths: tuple[int, int] = (120, 192)
    seed: int = 0


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def batches(config: Config) -> Iterator[Tensor]:
    lengths, tokens = random.Random(config.seed), torch.Generator().manual_seed(config.seed)
    while True:
        shape = (config.batch, lengths.randint(*config.lengths))
        yield torch.randint(config.vocabulary, shape, generator=tokens)


def build(
    config: Config,
) -> tuple[nn.Module, torch.optim.Optimizer, Iterator[Tensor], Callable[[nn.Module, Tensor], Tensor]]:
    torch.manual_seed(config.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocabulary,
            hidden_size=config.width,
            intermediate_size=4 * config.width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.heads,
            max_position_embeddings=max(config.lengths),
        )
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), batches(config), loss
