"""A small residual network on random images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """
    blocks    of two convolutions each
    width     channels
    side      of an image, in pixels
    """

    blocks: int = 6
    width: int = 48
    side: int = 32
    batch: int = 32
    seed: int = 0


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.first_norm, self.second_norm = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, width, side, side]"""
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(x + self.second_norm(self.second(y)))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def batches(config: Config) -> Iterator[tuple[Tensor, Tensor]]:
    numbers = torch.Generator().manual_seed(config.seed)
    while True:
        images = torch.randn(config.batch, 3, config.side, config.side, generator=numbers)
        yield images, torch.randint(10, (config.batch,), generator=numbers)


def build(
    config: Config,
) -> tuple[
    nn.Module,
    torch.optim.Optimizer,
    Iterator[tuple[Tensor, Tensor]],
    Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor],
]:
    torch.manual_seed(config.seed)
    model = nn.Sequential(
        nn.Conv2d(3, config.width, 3, padding=1),
        *(Block(config.width) for _ in range(config.blocks)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(config.width, 10),
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), batches(config), loss
