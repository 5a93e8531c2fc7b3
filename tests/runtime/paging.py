"""Blocks of the arena that leave and come back, as a careful program moves them."""

from __future__ import annotations

import ctypes
import os
import tempfile
from dataclasses import dataclass

import numpy as np
import torch

from penstock import _native


def unnamed_file(directory: object) -> int:
    with tempfile.TemporaryFile(dir=str(directory), buffering=0) as file:
        return os.dup(file.fileno())


def random_bytes(size_bytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8)


def tensor_of(content: np.ndarray) -> torch.Tensor:
    """A tensor in the arena with these bytes."""
    tensor = torch.empty(content.size, dtype=torch.uint8)
    tensor.numpy()[:] = content
    return tensor


@dataclass
class Away:
    """Copies of tensors in one file, each at an offset of its own."""

    file: int
    end: int = 0

    def write(self, tensor: torch.Tensor) -> tuple[int, int, int, int]:
        """Guard the tensor and copy it to the file; give the segment that holds it."""
        address, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        _native.arena_lent_back(_native.arena_lend(address, guards=True))
        offset, self.end = self.end, self.end + -(-size // 4096) * 4096
        view = (ctypes.c_char * size).from_address(address)
        assert os.pwrite(self.file, view, offset) == size
        return self.file, offset, 0, size

    def leave(self, tensor: torch.Tensor) -> bool:
        return _native.arena_leave(tensor.data_ptr(), [self.write(tensor)])

    def come_back(self, tensor: torch.Tensor, segment: tuple[int, int, int, int]) -> bool:
        staging = _native.arena_stage(tensor.data_ptr())
        assert staging != 0
        file, offset, _, size = segment
        content = os.pread(file, size, offset)
        ctypes.memmove(staging, content, size)
        return _native.arena_arrive(staging)


class Limits:
    """The arena in use with these limits: what `runtime.arena.ArenaLease` does with limits of its own
    choice. What other tests left in it stays where it is."""

    def __init__(self, limit_bytes: int, budget_bytes: int | None = None) -> None:
        self.limit_bytes, self.budget_bytes = limit_bytes, budget_bytes
        _native.arena_disown_all()
        _native.arena_reset_peak()
        _native.arena_activate(limit_bytes, budget_bytes)

    def set_limit(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        _native.arena_set_limit(limit_bytes, self.budget_bytes)

    def set_budget(self, budget_bytes: int | None) -> None:
        self.budget_bytes = budget_bytes
        _native.arena_set_limit(self.limit_bytes, budget_bytes)

    def __enter__(self) -> Limits:
        return self

    def __exit__(self, *_: object) -> None:
        _native.arena_own_all()
        _native.arena_deactivate()
