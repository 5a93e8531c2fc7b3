"""A character-level GPT that learns the source text of Python's standard library.

Try it with the command line, which asks for `build`::

    penstock run examples/gpt.py:build --device-budget 900MiB --steps 30
"""

from __future__ import annotations

import itertools
import random
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# ASCII; its last code stands for every byte beyond.
VOCABULARY = 128
CORPUS_BYTES = 4 << 20


@dataclass(frozen=True)
class Config:
    """What is trained, on what, and from which seed.

    checkpoint   run each block's forward again in backward, instead of keeping its activations
    """

    layers: int = 12
    width: int = 512
    heads: int = 8
    context: int = 256
    batch: int = 8
    learning_rate: float = 1e-3
    warm_up_steps: int = 10
    checkpoint: bool = False
    seed: int = 0


# Half of the layers: half of the memory and of the time, and kernels as large.
HALF = Config(layers=6)

# Trains in a tenth of a second a step. Its tensors are just large enough to leave memory.
QUICK = Config(layers=6, width=128, heads=4, context=128, batch=4)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, context, width]"""
        x = x + self.projection(self.attend(self.attention_norm(x)))
        return x + self.down(F.gelu(self.up(self.feed_norm(x))))

    def attend(self, x: Tensor) -> Tensor:
        heads = (self.heads, x.shape[-1] // self.heads)
        query, key, value = (
            part.unflatten(-1, heads).transpose(1, 2) for part in self.query_key_value(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).flatten(-2)


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.checkpoint = config.checkpoint
        self.characters = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # What adds to the residual stream is the smaller, the more of it there is.
                adds = name.endswith(("projection.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * config.layers) ** 0.5 if adds else 0.02)
        # Which character follows which is learnt first: characters outweigh positions.
        nn.init.normal_(self.characters.weight, std=0.5)

    def forward(self, characters: Tensor) -> Tensor:
        """characters: [batch, context] -> logits of the next ones: [batch, context, VOCABULARY]"""
        x = self.characters(characters) + self.positions.weight[: characters.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoint else block(x)
        return self.head(self.norm(x))


def loss(model: nn.Module, text: Tensor) -> Tensor:
    """text: [batch, context + 1] -> the mean surprise at each next character, in nats"""
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def corpus(limit_bytes: int = CORPUS_BYTES) -> bytes:
    """The source text of Python's standard library, module after module."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = bytearray()
    for module in modules:
        text += module.read_bytes()
        if len(text) >= limit_bytes:
            break
    return bytes(min(byte, VOCABULARY - 1) for byte in text[:limit_bytes])


def batches(config: Config) -> Iterator[Tensor]:
    """[batch, context + 1] characters each, from random places; without end, the same for one seed."""
    text = corpus()
    places = random.Random(config.seed)
    while True:
        starts = [places.randrange(len(text) - config.context) for _ in range(config.batch)]
        yield torch.tensor([list(text[start : start + config.context + 1]) for start in starts])


def warm_up(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Let the learning rate grow to its full value over the first ``steps`` steps."""
    full = [group["lr"] for group in optimizer.param_groups]
    count = itertools.count(1)

    def set_rate(optimizer: torch.optim.Optimizer, *_: object) -> None:
        fraction = min(1.0, next(count) / steps)
        for group, rate in zip(optimizer.param_groups, full, strict=True):
            group["lr"] = rate * fraction

    optimizer.register_step_pre_hook(set_rate)


def build(
    config: Config | None = None,
) -> tuple[nn.Module, torch.optim.Optimizer, Iterator[Tensor], Callable[[nn.Module, Tensor], Tensor]]:
    """(model, optimizer, batches, loss), as `penstock run` and `penstock trace` want them."""
    config = config or Config()
    torch.manual_seed(config.seed)
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95))
    warm_up(optimizer, config.warm_up_steps)
    return model, optimizer, batches(config), loss


def build_half() -> tuple[
    nn.Module, torch.optim.Optimizer, Iterator[Tensor], Callable[[nn.Module, Tensor], Tensor]
]:
    """`build` of half of the layers."""
    return build(HALF)


def build_quick() -> tuple[
    nn.Module, torch.optim.Optimizer, Iterator[Tensor], Callable[[nn.Module, Tensor], Tensor]
]:
    """`build` of a tiny model."""
    return build(QUICK)
