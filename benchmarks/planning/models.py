"""Models of the families that people train, built on fake tensors and captured as traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock

DENSITY = {"relu": 0.5}  # of what a ReLU gives, as FlashNeuron measured on trained networks, about


@dataclass(frozen=True)
class Family:
    """How to build one.

    make    (batch) -> model and the arguments of its forward pass
    batch   for which the whole step is about twice the memory of a large GPU
    """

    make: Callable[[int], tuple[nn.Module, tuple[Tensor, ...]]]
    batch: int


def capture(family: Family, device: str, batch: int | None = None) -> penstock.Trace:
    """One step with Adam, in bfloat16, with times from the data sheet of ``device``."""
    mode = penstock.fake_mode()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with mode:
            model, inputs = family.make(batch or family.batch)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    finally:
        torch.set_default_dtype(before)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(*inputs).float().mean().backward()
        optimizer.step()

    trace = penstock.trace(step, device=device, mode=mode)
    return trace.with_density(DENSITY)


class Block(nn.Module):
    """Pre-norm attention and a perceptron."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, length, width]"""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, context: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text) + self.places.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), text.flatten())


class Vit(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, image: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.places = nn.Parameter(torch.zeros(1, (image // patch) ** 2, width))
        self.blocks = nn.ModuleList(Block(width, heads, causal=False) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Bottleneck(nn.Module):
    def __init__(self, inside: int, width: int, outside: int, stride: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            [
                nn.Conv2d(inside, width, 1, bias=False),
                nn.Conv2d(width, width, 3, stride, 1, bias=False),
                nn.Conv2d(width, outside, 1, bias=False),
            ]
        )
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width), nn.BatchNorm2d(outside)])
        self.short = (
            nn.Conv2d(inside, outside, 1, stride, bias=False)
            if stride > 1 or inside != outside
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for index, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(y))
            if index < 2:
                y = functional.relu(y)
        return functional.relu(y + self.short(x))


class ResNet(nn.Module):
    def __init__(self, depths: Sequence[int]) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        blocks: list[nn.Module] = []
        inside = 64
        for stage, depth in enumerate(depths):
            for index in range(depth):
                width = 64 << stage
                blocks.append(Bottleneck(inside, width, 4 * width, 2 if index == 0 and stage > 0 else 1))
                inside = 4 * width
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(inside, 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.norm(self.stem(images))), 3, 2, 1)
        return self.head(self.blocks(x).mean((2, 3)))


class UNet(nn.Module):
    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        widths = [width << level for level in range(levels)]
        self.down = nn.ModuleList(
            self._stage(inside, outside) for inside, outside in zip([3, *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(self._stage(3 * narrow, narrow) for narrow in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, 2, 1)

    @staticmethod
    def _stage(inside: int, outside: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for source in (inside, outside):
            layers += [nn.Conv2d(source, outside, 3, padding=1), nn.GroupNorm(8, outside), nn.ReLU()]
        return nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        x, kept = images, []
        for stage in self.down:
            x = stage(functional.max_pool2d(x, 2) if kept else x)
            kept.append(x)
        kept.pop()
        for stage in self.up:
            x = stage(torch.cat([functional.interpolate(x, scale_factor=2.0), kept.pop()], 1))
        return self.head(x)


def _images(batch: int, side: int) -> tuple[Tensor, ...]:
    return (torch.zeros(batch, 3, side, side),)


def _gpt(layers: int, width: int, heads: int, context: int, vocabulary: int) -> Callable[[int], Any]:
    def make(batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
        text = torch.zeros(batch, context, dtype=torch.long)
        return Gpt(layers, width, heads, context, vocabulary), (text,)

    return make


FAMILIES = {
    "GPT, 48 layers": Family(_gpt(48, 1600, 25, 1024, 50304), 24),
    "ViT, 32 layers": Family(lambda batch: (Vit(32, 1280, 16, 224, 14), _images(batch, 224)), 192),
    "ResNet-152": Family(lambda batch: (ResNet((3, 8, 36, 3)), _images(batch, 224)), 512),
    "U-Net": Family(lambda batch: (UNet(64, 5), _images(batch, 512)), 32),
}
SMALL = {
    "GPT, small": Family(_gpt(4, 128, 4, 64, 512), 4),
    "ViT, small": Family(lambda batch: (Vit(3, 96, 4, 32, 8), _images(batch, 32)), 8),
    "ResNet, small": Family(lambda batch: (ResNet((1, 1, 1, 1)), _images(batch, 64)), 8),
    "U-Net, small": Family(lambda batch: (UNet(16, 3), _images(batch, 32)), 4),
}
