"""Files of torch.save."""

from __future__ import annotations

import errno
import re
from typing import Any

import torch

from penstock.checkpoint.failures import cannot_read
from penstock.checkpoint.source import Source
from penstock.errors import DeviceUnavailable, InvalidFile

_REFUSED = re.compile(r"Unsupported (?:global: GLOBAL|class|operand) (\S+)")


def load(source: Source, map_location: Any = None, mmap: bool | None = None) -> Any:
    """What torch.load makes of the file; code in it is not run.

    Raises CheckpointError, DeviceUnavailable, or InvalidFile where torch refuses the file.
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
        raise InvalidFile(f"{source.path} cannot be loaded: {_why(text, type(error))}") from error


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
