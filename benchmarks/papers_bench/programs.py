"""The networks that are trained: as small as two cores want them, of the families that the papers train."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks")]

import gpt  # noqa: E402
from planning import models  # noqa: E402

import penstock  # noqa: E402
from papers_bench.modnn_networks import NETWORKS  # noqa: E402

CLASSES = 10
VOCABULARY = 8192
Program = tuple[nn.Module, torch.optim.Optimizer, Iterator[Any], Callable[[nn.Module, Any], Tensor]]


@dataclass(frozen=True)
class Config:
    """One network.

    model   "gpt", "llama", "vit", "resnet", "resnet50", "vgg", "lstm" or "dlrm", or one of moDNN's networks
    batch   samples
    depth   blocks; of a VGG, convolutions in each of its five stages; of an LSTM, layers; of a DLRM, tables;
            of ResNet-50 and moDNN's networks no matter
    width   channels; of ResNet-50 no matter
    side    of an image in pixels; of a GPT, a Llama or an LSTM, tokens of context; of a DLRM, rows of a table
    """

    model: str
    batch: int
    depth: int
    width: int
    side: int
    seed: int = 0


class ResNet(nn.Module):
    """Bottleneck blocks of one width, as deep as wanted: deep and thin, as FlashNeuron's ResNet-1922."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4 * width, 3, 2, 1)
        self.blocks = nn.Sequential(
            *(models.Bottleneck(4 * width, width, 4 * width, 1) for _ in range(depth))
        )
        self.head = nn.Linear(4 * width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(functional.relu(self.stem(images))).mean((2, 3)))


class Vgg(nn.Module):
    """Five stages of 3 x 3 convolutions with ReLUs, and pooling between them; no batch normalization."""

    def __init__(self, depth: int, width: int, side: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inside = 3
        for stage in range(5):
            outside = width * min(1 << stage, 8)
            for _ in range(depth):
                layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.ReLU()]
                inside = outside
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        flat = inside * (side // 32) ** 2
        self.head = nn.Sequential(nn.Linear(flat, inside), nn.ReLU(), nn.Linear(inside, CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).flatten(1))


class Llama(nn.Module):
    """Of transformers. Tokens [batch, context]; logits [batch, vocabulary, context]."""

    def __init__(self, depth: int, width: int, side: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        heads = max(1, width // 64)
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY, hidden_size=width, intermediate_size=4 * width,
                num_hidden_layers=depth, num_attention_heads=heads, num_key_value_heads=heads,
                max_position_embeddings=side,
            )
        )  # fmt: skip

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits.transpose(1, 2)


class Lstm(nn.Module):
    """A language model. Tokens [batch, context]; logits [batch, vocabulary, context]."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.layers = nn.LSTM(width, width, depth, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.words(tokens))[0]).transpose(1, 2)


class Dlrm(nn.Module):
    """Tables of embeddings; their products with one another, and with what a network makes of 13 numbers."""

    def __init__(self, tables: int, width: int, rows: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.dense = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU())
        products = (tables + 1) * tables // 2
        self.head = nn.Sequential(
            nn.Linear(width + products, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 2)
        )

    def forward(self, numbers_and_rows: tuple[Tensor, Tensor]) -> Tensor:
        numbers, rows = numbers_and_rows
        dense = self.dense(numbers)
        found = [table(rows[:, index]) for index, table in enumerate(self.tables)]
        vectors = torch.stack([dense, *found], 1)
        first, second = torch.tril_indices(len(found) + 1, len(found) + 1, -1)
        products = (vectors @ vectors.transpose(1, 2))[:, first, second]
        return self.head(torch.cat([dense, products], 1))


def build(config: Config) -> Program:
    """(model, optimizer, batches, loss). Adam for transformers and the LSTM, momentum for the others, as is
    usual; plain gradient descent for moDNN's networks, as in the paper."""
    if config.model == "gpt":
        return gpt.build(
            gpt.Config(
                layers=config.depth,
                width=config.width,
                heads=max(1, config.width // 64),
                context=config.side,
                batch=config.batch,
                seed=config.seed,
            )
        )
    torch.manual_seed(config.seed)
    depth, width, side = config.depth, config.width, config.side
    makers: dict[str, Callable[[], nn.Module]] = {
        "llama": lambda: Llama(depth, width, side),
        "vit": lambda: models.Vit(depth, width, max(1, width // 64), side, 8),
        "resnet": lambda: ResNet(depth, width),
        "resnet50": lambda: models.ResNet((3, 4, 6, 3)),
        "vgg": lambda: Vgg(depth, width, side),
        "lstm": lambda: Lstm(depth, width),
        "dlrm": lambda: Dlrm(depth, width, side),
    }
    if config.model in NETWORKS:
        model = NETWORKS[config.model].build(width, side)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    else:
        model = makers[config.model]()
        if config.model in ("llama", "vit", "lstm"):
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    batches = {"llama": _tokens, "lstm": _tokens, "dlrm": _clicks}.get(config.model, _images)
    return model, optimizer, batches(config), _loss


def _tokens(config: Config) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(config.seed)
    while True:
        tokens = torch.randint(VOCABULARY, (config.batch, config.side + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def _clicks(config: Config) -> Iterator[tuple[tuple[Tensor, Tensor], Tensor]]:
    generator = torch.Generator().manual_seed(config.seed)
    while True:
        numbers = torch.randn(config.batch, 13, generator=generator)
        rows = torch.randint(config.side, (config.batch, config.depth, 3), generator=generator)
        yield (numbers, rows), torch.randint(2, (config.batch,), generator=generator)


def _images(config: Config) -> Iterator[tuple[Tensor, Tensor]]:
    """Noise, the same for one seed: what is measured does not depend on what is learnt."""
    generator = torch.Generator().manual_seed(config.seed)
    while True:
        images = torch.randn(config.batch, 3, config.side, config.side, generator=generator)
        yield images, torch.randint(CLASSES, (config.batch,), generator=generator)


def _loss(model: nn.Module, batch: tuple[Any, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def captured(config: Config, micro_batch: int = 0) -> penstock.Trace:
    """A step as it would be in memory, whole or in parts. Nothing is allocated."""
    mode = penstock.fake_mode()
    with mode:
        model, optimizer, batches, loss = build(config)
        batch = next(batches)

    def step() -> None:
        size = micro_batch or config.batch
        for begin in range(0, config.batch, size):
            end = begin + size
            part = (
                (batch[0][begin:end], batch[1][begin:end]) if isinstance(batch, tuple) else batch[begin:end]
            )
            (loss(model, part) * (size / config.batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return penstock.trace(step, mode=mode)
