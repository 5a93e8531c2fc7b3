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
from planning.models import Bottleneck, Vit  # noqa: E402

import penstock  # noqa: E402
from papers_bench.modnn_networks import NETWORKS  # noqa: E402

CLASSES = 10
Program = tuple[nn.Module, torch.optim.Optimizer, Iterator[Any], Callable[[nn.Module, Any], Tensor]]


@dataclass(frozen=True)
class Config:
    """One network.

    model   "gpt", "vit", "resnet" or "vgg", or one of moDNN's networks
    batch   samples
    depth   blocks; of a VGG, convolutions in each of its five stages; of moDNN's networks no matter
    width   channels
    side    of an image in pixels; of a GPT, characters of context
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
        self.blocks = nn.Sequential(*(Bottleneck(4 * width, width, 4 * width, 1) for _ in range(depth)))
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


def build(config: Config) -> Program:
    """(model, optimizer, batches, loss). Adam for transformers, momentum for the others, as is usual; plain
    gradient descent for moDNN's networks, as in the paper."""
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
    if config.model == "vit":
        model: nn.Module = Vit(config.depth, config.width, max(1, config.width // 64), config.side, 8)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    elif config.model in NETWORKS:
        model = NETWORKS[config.model].build(config.width, config.side)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    else:
        model = (
            ResNet(config.depth, config.width)
            if config.model == "resnet"
            else Vgg(config.depth, config.width, config.side)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return model, optimizer, _images(config), _loss


def _images(config: Config) -> Iterator[tuple[Tensor, Tensor]]:
    """Noise, the same for one seed: what is measured does not depend on what is learnt."""
    generator = torch.Generator().manual_seed(config.seed)
    while True:
        images = torch.randn(config.batch, 3, config.side, config.side, generator=generator)
        yield images, torch.randint(CLASSES, (config.batch,), generator=generator)


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
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
