"""What a checkpoint holds, and whether it is sound."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from penstock.checkpoint.failures import cannot_read
from penstock.checkpoint.header import DEVICES, Header
from penstock.checkpoint.source import Source
from penstock.errors import InvalidFile

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

    Raises CheckpointError where it cannot be read, InvalidFile where it is no checkpoint or its header
    is damaged.
    """
    with Source(path) as source:
        return _info(source)


def verify(path: str | os.PathLike[str]) -> CheckpointInfo:
    """Read the checkpoint at ``path`` whole, and compare all checksums.

    Gives what `info` does; where `checksummed` is False, only the file's structure was compared. Raises
    CheckpointError where it cannot be read, InvalidFile, with the tensors' names, where it is damaged.
    """
    with Source(path) as source:
        found = _info(source)
        if source.is_torch:
            _verify_zip(source)
        else:
            from penstock.checkpoint import reading

            reading.fill(source, lambda _: None, mapped=source.is_cached)
        return found


def _info(source: Source) -> CheckpointInfo:
    if source.is_torch:
        from penstock.checkpoint import torchfile

        tensors = tuple(_named_tensors("", torchfile.load(source, "cpu", mmap=True)))
        return CheckpointInfo(str(source.path), "torch", source.size_bytes, tensors, {}, True)
    header = source.header
    entries = tuple(
        TensorInfo(entry.name, entry.dtype, entry.shape, entry.end - entry.begin, entry.crc32c)
        for entry in header.entries
    )
    kind: Format = "penstock" if header.written_by_penstock else "safetensors"
    return CheckpointInfo(
        str(source.path), kind, source.size_bytes, entries, own_metadata(header), header.written_by_penstock
    )


def own_metadata(header: Header) -> dict[str, str]:
    """The metadata as given to `save`, without what penstock added."""
    return {key: value for key, value in header.metadata.items() if key != DEVICES}


def _named_tensors(path: str, value: Any) -> Iterator[TensorInfo]:
    """The tensors of a state, by their path in it."""
    import torch

    if isinstance(value, torch.Tensor):
        yield TensorInfo(path, str(value.dtype).removeprefix("torch."), tuple(value.shape), value.nbytes)
    elif isinstance(value, Mapping):
        for key, below in value.items():
            yield from _named_tensors(f"{path}.{key}" if path else str(key), below)
    elif isinstance(value, list | tuple):
        for index, below in enumerate(value):
            yield from _named_tensors(f"{path}.{index}" if path else str(index), below)


def _verify_zip(source: Source) -> None:
    """Compare the checksums of a zip file's members."""
    try:
        with os.fdopen(os.dup(source.file.buffered), "rb") as file, zipfile.ZipFile(file) as members:
            damaged = members.testzip()
    except OSError as error:
        raise cannot_read(source.path, error) from error
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, EOFError) as error:
        raise InvalidFile(f"{source.path} is damaged: {error}. Load another copy.") from error
    if damaged is not None:
        raise InvalidFile(
            f"{source.path} is damaged: the checksum of its member {damaged} is not the one that was saved. "
            "Load another copy."
        )
