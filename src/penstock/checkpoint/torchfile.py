"""Files of torch.save."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

import torch

from penstock.checkpoint.failures import cannot_read
from penstock.checkpoint.source import CheckpointSource
from penstock.errors import CheckpointError, DeviceUnavailable, InvalidCheckpoint
from penstock.storage.threads import in_parallel

_PIECE_BYTES = 1 << 20
_NOT_A_ZIP = (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, EOFError, zlib.error)
_REFUSED = re.compile(r"Unsupported (?:global: GLOBAL|class|operand) (\S+)")


def load(source: CheckpointSource, map_location: Any = None, mmap: bool | None = None) -> Any:
    """What torch.load makes of the file; code in it is not run.

    Raises CheckpointError, DeviceUnavailable, or InvalidCheckpoint where torch refuses the file.
    """
    # By its descriptor, since another file may be at its path by now: torch maps only what has a name.
    path = f"/proc/self/fd/{source.file.buffered}"
    try:
        return torch.load(path, map_location=map_location, mmap=mmap, weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # torch does not say which there are
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # that is a seek before the beginning
            raise cannot_read(source.path, error) from error
        text = str(error)
        if text.startswith("Attempting to deserialize object on"):
            raise DeviceUnavailable(
                f"{source.path} has tensors of a device that this machine does not have: load with "
                f"map_location='cpu' ({_first_sentence(text)})"
            ) from error
        if _is_other_zip(source):
            raise InvalidCheckpoint(
                f"{source.path} is not a checkpoint: it is a zip file, and torch.save did not write it. Give "
                "a file of penstock.save, torch.save or safetensors."
            ) from error
        raise InvalidCheckpoint(f"{source.path} cannot be loaded: {_why(text, type(error))}") from error


def _is_other_zip(source: CheckpointSource) -> bool:
    """Whether it is a whole zip file without what each of torch.save has, such as a file of numpy.savez."""
    with contextlib.suppress(CheckpointError, InvalidCheckpoint), _members(source) as members:
        return not any(re.search(r"(^|/)(data\.pkl|constants\.pkl)$", name) for name in members.namelist())
    return False


def has_checksums(source: CheckpointSource) -> bool:
    """False where torch was told to compute none (torch.serialization.set_crc32_options)."""
    with _members(source) as members:
        return any(member.CRC for member in members.infolist())


def verify(source: CheckpointSource) -> None:
    """Read the file whole and compare the checksums that the zip format has, if there are any.

    Raises CheckpointError, or InvalidCheckpoint with the name of a damaged member.
    """
    if not has_checksums(source):
        return
    with _members(source) as members:
        in_parallel(lambda member: _read_member(source, members, member), members.infolist())


@contextlib.contextmanager
def _members(source: CheckpointSource) -> Iterator[zipfile.ZipFile]:
    """The file as a zip file. Raises CheckpointError, also where the caller's reads fail."""
    try:
        with os.fdopen(os.dup(source.file.buffered), "rb") as file, zipfile.ZipFile(file) as members:
            yield members
    except InvalidCheckpoint:
        raise
    except OSError as error:
        raise cannot_read(source.path, error) from error
    except _NOT_A_ZIP as error:
        raise InvalidCheckpoint(f"{source.path} is damaged: {error}. Load another copy.") from error


def _read_member(source: CheckpointSource, members: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    try:
        with members.open(member) as data:
            while data.read(_PIECE_BYTES):
                pass
    except _NOT_A_ZIP as error:
        raise InvalidCheckpoint(
            f"{source.path} is damaged: the checksum of its member {member.filename} is not the one that was "
            f"saved ({error}). Load another copy; verify=False loads the bytes as they are."
        ) from error


def _why(text: str, kind: type[Exception]) -> str:
    if refused := _REFUSED.search(text):
        return (
            f"it holds {refused[1]}, and code in a file is not run. If you trust the file, convert it once: "
            "penstock.save(torch.load(path, weights_only=False), new_path)."
        )
    return (
        f"torch.load says {kind.__name__}: {_first_sentence(text)} It is damaged, or was cut short: load "
        "another copy."
    )


def _first_sentence(text: str) -> str:
    return text.splitlines()[0].partition(". ")[0].rstrip(".") + "." if text else ""
