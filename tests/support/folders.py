"""Folders for tests that make many."""

from __future__ import annotations

import os
import tempfile

_MEMORY = "/dev/shm"


def folder_in_memory() -> tempfile.TemporaryDirectory[str]:
    """A folder that goes with its context, in memory where the system has room for files there.

    For drawn examples, each of which would wait for the disk many times: what survives a power cut is tested
    elsewhere, on disks.
    """
    return tempfile.TemporaryDirectory(dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None)
