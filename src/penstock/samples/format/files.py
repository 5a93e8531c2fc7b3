"""Opening files of a store."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from penstock.errors import InvalidFile

AGAIN = "Copy or pack the store again"


def open_regular(path: Path) -> int:
    """A descriptor of the regular file at ``path``, for reading. Pipes and devices are refused.

    Raises OSError as os.open does, InvalidFile for what is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidFile(f"{path} is not a regular file. {AGAIN}")
    os.set_blocking(descriptor, True)
    return descriptor
