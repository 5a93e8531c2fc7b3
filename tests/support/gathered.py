"""A program that frees storages and allocates them again in a step, as FSDP2 does with what it gathers."""

from __future__ import annotations

import torch
from torch import nn


class Gathered:
    """Each layer's weight is copied into a buffer that has memory only while it is used.

    weights   [width, width], of each layer
    """

    def __init__(self, width: int, layers: int, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self._device, self._shape = device, (16, width)
        self.weights = [
            nn.Parameter((torch.randn(width, width) / width**0.5).to(device)) for _ in range(layers)
        ]
        self._buffers = [torch.empty(width, width, device=device) for _ in range(layers)]
        for buffer in self._buffers:
            buffer.untyped_storage().resize_(0)

    @torch.no_grad()
    def step(self, number: int) -> None:
        x = torch.randn(self._shape, generator=torch.Generator().manual_seed(number)).to(self._device)
        for weight, buffer in zip(self.weights, self._buffers, strict=True):
            buffer.untyped_storage().resize_(weight.nbytes)
            buffer.copy_(weight)
            x = torch.tanh(x @ buffer)
            weight.add_(x.t() @ x @ buffer, alpha=-1e-3)
        for buffer in reversed(self._buffers):
            x = x @ buffer
            buffer.untyped_storage().resize_(0)
        self.weights[0].add_(x.mean(), alpha=1e-3)
