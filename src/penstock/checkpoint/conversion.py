"""From torch.save's format to penstock's, and back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from penstock.checkpoint.failures import cannot_write
from penstock.checkpoint.file.replace import Replacement
from penstock.checkpoint.file.source import PathLike, path_of
from penstock.checkpoint.inspection import CheckpointInfo, info
from penstock.checkpoint.loading import load
from penstock.checkpoint.saving import save
from penstock.errors import InvalidArgument

_OWN_SUFFIXES = (".safetensors",)
_TORCH_SUFFIXES = (".pt", ".pth", ".bin")


def convert(source: PathLike, destination: PathLike, *, overwrite: bool = False) -> CheckpointInfo:
    """Write what ``source`` holds to ``destination``, in the format that its suffix names.

    source        a file of penstock.save, of torch.save, or of another writer of safetensors files
    destination   ``.safetensors`` for penstock's format, ``.pt``, ``.pth`` or ``.bin`` for torch's
    overwrite     replace a file that is there, which may be the source; else it is an error

    The source is verified and mapped, and its tensors go from there to the destination. They lose the
    devices they were saved from. Gives what the destination holds. Raises as `load` and `save` do.
    """
    destination = path_of(destination)
    suffix = destination.suffix.lower()
    if suffix not in _OWN_SUFFIXES + _TORCH_SUFFIXES:
        raise InvalidArgument(
            f"{destination} does not say which format it is to have: give it one of the suffixes "
            f"{', '.join(_OWN_SUFFIXES)} (penstock) and {', '.join(_TORCH_SUFFIXES)} (torch)"
        )
    if not overwrite and os.path.lexists(destination):
        raise InvalidArgument(
            f"{destination} exists: give another path, or have it replaced (overwrite=True, --overwrite)"
        )
    found = info(source)
    state = load(source, "cpu", mmap=True)
    if suffix in _OWN_SUFFIXES:
        save(state, destination, metadata=found.metadata)
    else:
        _save_torch(state, destination, found.tensor_bytes)
    return info(destination)


def _save_torch(state: Any, path: Path, tensor_bytes: int) -> None:
    """torch.save, whole or not at all. Raises CheckpointError."""
    committed = False
    try:
        with Replacement(path, 0) as replacement:
            with os.fdopen(os.dup(replacement.file.buffered), "wb") as file:
                torch.save(state, file)
            try:
                replacement.commit(os.fstat(replacement.file.buffered).st_size)
            finally:
                committed = replacement.committed
    except OSError as error:
        raise cannot_write(path, error, tensor_bytes, None, committed) from error
