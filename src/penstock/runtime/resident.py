"""Resident bytes of this process, as the operating system counts them. Linux; 0 elsewhere."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_STATUS = Path("/proc/self/status")


def _status_bytes(name: str) -> int:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    line = next((line for line in lines if line.startswith(name + ":")), None)
    return int(line.split()[1]) * 1024 if line else 0


def resident_bytes() -> int:
    """Resident bytes now."""
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """Most resident bytes since the process began, or since `reset_peak`."""
    return _status_bytes("VmHWM")


def reset_peak() -> bool:
    """Start the peak anew. False where the system does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def release_free_memory() -> None:
    """Let the C library give what is free back to the system, where it can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def is_in_memory(directory: str | os.PathLike[str]) -> bool:
    """Whether a directory lies in RAM (tmpfs, ramfs), where spilling saves nothing."""
    best, kind = "", ""
    try:
        mounts = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return False
    path = os.path.realpath(directory)
    for mount in mounts:
        _, point, filesystem, *_ = mount.split()
        if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, kind = point, filesystem
    return kind in ("tmpfs", "ramfs")
