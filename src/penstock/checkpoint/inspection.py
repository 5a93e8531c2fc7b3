"""What a checkpoint holds, and whether it is sound."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from penstock.checkpoint.file.header import DEVICES, FOR_TORCH
from penstock.checkpoint.file.source import Source

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
    size_bytes    of the whole file
    tensors       in the file's order
    metadata      as given to `save`
    checksummed   every tensor has a checksum
    """

    path: str
    format: Format
    size_bytes: int
    tensors: tuple[TensorInfo, ...]
    metadata: Mapping[str, str]
    checksummed: bool

    @property
    def tensor_bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors)


def info(path: str | os.PathLike[str]) -> CheckpointInfo:
    """What the checkpoint at ``path`` holds. Its tensors are not read.

    Raises CheckpointError where it cannot be read, InvalidCheckpoint where it is not a checkpoint or its
    header is damaged.
    """
    with Source(path) as source:
        return _info(source)


def verify(path: str | os.PathLike[str]) -> CheckpointInfo:
    """Read the checkpoint at ``path`` whole, and compare all checksums.

    Gives what `info` does; where `checksummed` is False, only the file's structure was compared. Raises
    CheckpointError where it cannot be read, InvalidCheckpoint, with the tensors' names, where it is damaged.
    """
    with Source(path) as source:
        found = _info(source)
        if source.is_torch:
            from penstock.checkpoint.file import torchfile

            torchfile.verify(source)
        else:
            from penstock.checkpoint.file import reading

            reading.fill(source, lambda _: None, mapped=source.is_cached)
        return found


def _info(source: Source) -> CheckpointInfo:
    if source.is_torch:
        from penstock.checkpoint.file import torchfile
        from penstock.checkpoint.state.matching import named_tensors

        tensors = tuple(
            TensorInfo(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.nbytes)
            for name, tensor in named_tensors(torchfile.load(source, "cpu", mmap=True))
        )
        checksummed = torchfile.has_checksums(source)
        return CheckpointInfo(str(source.path), "torch", source.size_bytes, tensors, {}, checksummed)
    header = source.header
    entries = tuple(
        TensorInfo(entry.name, entry.dtype, entry.shape, entry.end - entry.begin, entry.crc32c)
        for entry in header.entries
    )
    kind: Format = "penstock" if header.written_by_penstock else "safetensors"
    own = FOR_TORCH.items() if header.written_by_penstock else ()
    metadata = {
        key: value for key, value in header.metadata.items() if key != DEVICES and (key, value) not in own
    }
    return CheckpointInfo(
        str(source.path), kind, source.size_bytes, entries, metadata, header.written_by_penstock
    )
