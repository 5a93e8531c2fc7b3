"""Checkpoints: a state to a file and back, at the speed of the disk, whole or not at all.

A checkpoint is a `safetensors` file; what that format cannot express stands in its metadata
(`header`, `tree`). Every tensor has a checksum. `save` and `load` take the place of torch.save and
torch.load.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.background import SaveHandle
from penstock.checkpoint.inspection import CheckpointInfo, TensorInfo, convert, info, verify
from penstock.checkpoint.listing import Saved, ls

# What needs torch is imported at its first use: looking at a checkpoint does without.
if TYPE_CHECKING:
    from penstock.checkpoint.loading import load
    from penstock.checkpoint.manager import Manager
    from penstock.checkpoint.saving import save
else:
    _MODULES = {"Manager": "manager", "load": "loading", "save": "saving"}

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module 'penstock.checkpoint' has no attribute {name!r}")
        module = import_module(f"penstock.checkpoint.{_MODULES[name]}")
        return globals().setdefault(name, getattr(module, name))


__all__ = [
    "CheckpointInfo",
    "Manager",
    "SaveHandle",
    "Saved",
    "TensorInfo",
    "convert",
    "info",
    "load",
    "ls",
    "save",
    "verify",
]
