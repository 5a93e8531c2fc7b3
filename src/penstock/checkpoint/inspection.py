"""What a checkpoint holds, whether it is sound, and from torch.save's format to penstock's and back.

Looking at a file of penstock does without torch, which is imported where it is needed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.checkpoint.header import DEVICES, FOR_TORCH
from penstock.checkpoint.listing import referring_to
from penstock.checkpoint.remote import ObjectPath
from penstock.checkpoint.replace import replacing
from penstock.checkpoint.source import OWN_SUFFIXES, TORCH_SUFFIXES, CheckpointSource, PathLike, place_of
from penstock.errors import InvalidArgument
from penstock.storage.objects import is_object_url

Format = Literal["penstock", "safetensors", "torch"]


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a file.

    dtype        safetensors' name, such as "BF16"; torch's in a file of torch.save
    size_bytes   of its data
    crc32c       its checksum, None where the file has none
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    crc32c: int | None = None


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint holds.

    format        "penstock", "safetensors" for files of other writers, or "torch" for those of torch.save
    size_bytes    of the file alone
    tensors       in the file's order, then those that lie elsewhere
    metadata      as given to `save`
    checksummed   every tensor has a checksum
    elsewhere     the files beside it that hold some of its tensors
    """

    path: str
    format: Format
    size_bytes: int
    tensors: tuple[TensorInfo, ...]
    metadata: Mapping[str, str]
    checksummed: bool
    elsewhere: tuple[str, ...] = ()

    @property
    def tensor_bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors)


def info(path: PathLike) -> CheckpointInfo:
    """What the checkpoint at ``path`` holds. Its tensors are not read.

    Raises CheckpointError where it cannot be read, InvalidCheckpoint where it is not a checkpoint or its
    header is damaged.
    """
    with CheckpointSource(path) as source:
        return _info(source)


def verify(path: PathLike) -> CheckpointInfo:
    """Read the checkpoint at ``path`` whole, and compare all checksums.

    Returns what `info` does; where `checksummed` is False, only the file's structure was compared. Raises
    CheckpointError where it cannot be read, InvalidCheckpoint, with the tensors' names, where it is damaged.
    """
    with CheckpointSource(path) as source:
        found = _info(source)
        if source.is_torch:
            from penstock.checkpoint import torchfile

            torchfile.verify(source)
        else:
            from penstock.checkpoint import reading

            reading.verify_all(source)
        return found


def _info(source: CheckpointSource) -> CheckpointInfo:
    if source.is_torch:
        from penstock.checkpoint import torchfile
        from penstock.checkpoint.matching import named_tensors

        tensors = tuple(
            TensorInfo(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.nbytes)
            for name, tensor in named_tensors(torchfile.load(source, "cpu", mmap=True))
        )
        checksummed = torchfile.has_checksums(source)
        return CheckpointInfo(str(source.path), "torch", source.size_bytes, tensors, {}, checksummed)
    header = source.header
    is_own = header.written_by_penstock
    added = {(DEVICES, header.metadata.get(DEVICES)), *(FOR_TORCH.items() if is_own else ())}
    return CheckpointInfo(
        path=str(source.path),
        format="penstock" if is_own else "safetensors",
        size_bytes=source.size_bytes,
        tensors=tuple(
            TensorInfo(entry.name, entry.dtype, entry.shape, entry.end - entry.begin, entry.crc32c)
            for entry in source.entries
        ),
        metadata={key: value for key, value in header.metadata.items() if (key, value) not in added},
        checksummed=is_own,
        elsewhere=tuple(volume.source.path.name for volume in source.volumes[1:]),
    )


def convert(source: PathLike, destination: PathLike, *, overwrite: bool = False) -> CheckpointInfo:
    """Write what ``source`` holds to ``destination``, in the format that its suffix names.

    source        a file or object: of penstock.save, of torch.save (a file), or of another writer of
                  safetensors files
    destination   ``.safetensors`` for penstock's format, ``.pt``, ``.pth``, ``.bin`` or ``.ckpt`` for torch's
    overwrite     replace a file that is there, which may be the source; else it is an error. Not one that
                  increments beside it refer to

    The source is verified and mapped, and its tensors go from there to the destination. They lose the devices
    they were saved from. What lies at a URL is copied to a file as it is, unless others wrote it or it is an
    increment: then it is read into memory. Returns what the destination holds. Raises as `load` and `save`.
    """
    from penstock.checkpoint.loading import load
    from penstock.checkpoint.saving import save

    place = place_of(destination)
    if isinstance(place, ObjectPath):
        place.bucket.require_writable()
    suffix = place.suffix.lower()
    if suffix not in OWN_SUFFIXES + TORCH_SUFFIXES:
        raise InvalidArgument(
            f"{place} does not say which format it is to have: give it one of the suffixes "
            f"{', '.join(OWN_SUFFIXES)} (penstock) and {', '.join(TORCH_SUFFIXES)} (torch)"
        )
    if isinstance(place, ObjectPath) and suffix in TORCH_SUFFIXES:
        raise InvalidArgument(f"{place} is a URL, and files of torch.save are written to a disk: give a path")
    if not overwrite and (place.exists() if isinstance(place, ObjectPath) else os.path.lexists(place)):
        raise InvalidArgument(
            f"{place} exists: give another path, or have it replaced (overwrite=True, --overwrite)"
        )
    if isinstance(place, Path) and (others := referring_to(place)):
        raise InvalidArgument(
            f"{place} has tensors of {others[0]}, which could not be loaded any more: give another path"
        )
    with CheckpointSource(source) as opened:
        is_own = not opened.is_torch and opened.header.written_by_penstock and not opened.header.elsewhere
        if opened.is_object and is_own and isinstance(place, Path) and suffix in OWN_SUFFIXES:
            _download(opened, place)
            return info(place)
    found = info(source)
    state = load(source, "cpu", mmap=None if is_object_url(source) else True)
    if isinstance(place, ObjectPath) or suffix in OWN_SUFFIXES:
        save(state, destination, metadata=found.metadata)
    else:
        _save_torch(state, place, found.tensor_bytes)
    return info(destination)


def _download(source: CheckpointSource, path: Path) -> None:
    """Copy an object to a file as it is, whole or not at all. Raises CheckpointError."""
    from penstock.checkpoint import reading

    with replacing(path, source.size_bytes, source.size_bytes) as replacement:
        reading.copy_to(source, replacement.file.buffered)
        replacement.commit(source.size_bytes)


def _save_torch(state: Any, path: Path, tensor_bytes: int) -> None:
    """torch.save, whole or not at all. Raises CheckpointError."""
    import torch

    with replacing(path, 0, tensor_bytes) as replacement:
        with os.fdopen(os.dup(replacement.file.buffered), "wb") as file:
            torch.save(state, file)
        replacement.commit(os.fstat(replacement.file.buffered).st_size)
