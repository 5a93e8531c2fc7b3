"""Small models of every family whose training must not change by a bit. Each has its own difficulty."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Family(NamedTuple):
    """make   builds the model; loss   of (model, step number) gives that of one iteration, on its device"""

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], torch.Tensor]
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _images(step: int, batch: int = 4) -> torch.Tensor:
    return torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(step))


def _words(step: int, batch: int = 4, length: int = 32) -> torch.Tensor:
    return torch.randint(0, 64, (batch, length), generator=torch.Generator().manual_seed(step))


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.norm_first = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.norm_second = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm_first(self.first(x)))
        y = self.norm_second(self.second(y))
        y += x
        return self.relu(y)


class _Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 + 8 * i, 8, 3, padding=1) for i in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.cat([x, F.relu(layer(x))], 1)
        return x


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(x)


class _Gpt(nn.Module):
    def __init__(
        self,
        *,
        tied: bool = False,
        checkpointed: bool = False,
        dropout: float = 0.0,
        width: int = 32,
        blocks: int = 3,
        heads: int = 4,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(_Attention(width, heads) for _ in range(blocks))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, 64, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.checkpointed = checkpointed

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.tokens(words))
        for index, block in enumerate(self.blocks):
            if self.checkpointed and index == 1:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = self.dropout(block(x))
        return self.head(x)


class _Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, 32)
        self.lstm = nn.LSTM(32, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, 64)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.tokens(words))[0])


class _UnusedBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(64, 128)
        self.used = nn.Linear(128, 64)
        self.unused = nn.Linear(128, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(x))
        torch.sigmoid(self.unused(hidden)) * 2  # a branch that nobody asks for
        self.kept = torch.sigmoid(self.unused(hidden))  # and one that is kept, but has no loss
        return self.used(hidden)


class _Dynamic(nn.Module):
    """Depth, and by its batch the shapes, depend on the step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(5))
        self.depth = 5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[: self.depth]:
            x = torch.tanh(layer(x))
        return x


def _image_loss(model: nn.Module, step: int) -> torch.Tensor:
    return model(_images(step).to(device_of(model))).square().mean()


def _word_loss(model: nn.Module, step: int) -> torch.Tensor:
    words = _words(step).to(device_of(model))
    return F.cross_entropy(model(words).flatten(0, 1), words.roll(-1, 1).flatten())


def _autocast_loss(model: nn.Module, step: int) -> torch.Tensor:
    with torch.autocast(device_of(model).type, dtype=torch.bfloat16):
        return _word_loss(model, step)


def _vector_loss(model: nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(step))
    return model(x.to(device_of(model))).square().mean()


def _dynamic_loss(model: nn.Module, step: int) -> torch.Tensor:
    model.depth = 3 + step % 3
    x = torch.randn(32 + 16 * (step % 2), 64, generator=torch.Generator().manual_seed(step))
    return model(x.to(device_of(model))).square().mean()


def _backward_twice(loss: torch.Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def _cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), _Residual(16), _Residual(16), nn.AvgPool2d(2))


FAMILIES = {
    "cnn": Family(_cnn, _image_loss),
    "dense": Family(_Dense, _image_loss),
    "gpt": Family(_Gpt, _word_loss),
    "tied_embeddings": Family(lambda: _Gpt(tied=True), _word_loss),
    "lstm": Family(_Lstm, _word_loss),
    "dropout": Family(lambda: _Gpt(dropout=0.1), _word_loss),
    "bf16_autocast": Family(_Gpt, _autocast_loss),
    "checkpoint_inside": Family(lambda: _Gpt(checkpointed=True), _word_loss),
    "retain_graph": Family(_Gpt, _word_loss, _backward_twice),
    "unused_branch": Family(_UnusedBranch, _vector_loss),
    "dynamic": Family(_Dynamic, _dynamic_loss),
}


def small_gpt() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same small GPT each time, with an optimizer."""
    torch.manual_seed(3)
    model = FAMILIES["gpt"].make()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def iterate(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """One iteration of a GPT."""
    FAMILIES["gpt"].loss(model, step).backward()
    optimizer.step()
    optimizer.zero_grad()


def weights(model: nn.Module) -> list[bytes]:
    """The bits of all weights."""
    return [parameter.detach().numpy().tobytes() for parameter in model.parameters()]
