"""Thousands of kernels of some microseconds each, and among them a few tensors that are worth moving."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """
    layers    each keeps one large activation for backward
    kernels   of each layer, on vectors of `width` numbers
    large     numbers of a large activation
    """

    layers: int = 24
    kernels: int = 200
    width: int = 2048
    large: int = 1 << 18
    seed: int = 0


class Chain(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.scale = nn.Parameter(torch.rand(config.width) + 0.5)
        self.shift = nn.Parameter(torch.rand(config.width) - 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x: [width] -> []"""
        repeats = self.config.large // self.config.width
        total = x.new_zeros(())
        for _ in range(self.config.layers):
            for _ in range(self.config.kernels // 2):
                x = torch.tanh(x * self.scale)
            large = x.repeat(repeats).sin()  # kept until backward has come here
            total = total + large.mean()
            x = x + self.shift
        return total + x.mean()


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def batches(config: Config) -> Iterator[Tensor]:
    numbers = torch.Generator().manual_seed(config.seed)
    while True:
        yield torch.rand(config.width, generator=numbers)


def build(
    config: Config,
) -> tuple[nn.Module, torch.optim.Optimizer, Iterator[Tensor], Callable[[nn.Module, Tensor], Tensor]]:
    torch.manual_seed(config.seed)
    model = Chain(config)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3), batches(config), loss
