"""Memory as the operating system counts it: resident bytes of this process (Linux; 0 elsewhere), and which
directories lie in memory."""

from __future__ import annotations

import ctypes
import os
import tempfile
from pathlib import Path

from penstock.machine import lines

_STATUS = Path("/proc/self/status")


def _status_bytes(name: str) -> int:
    line = next((line for line in lines(_STATUS) if line.startswith(name + ":")), None)
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
    """Whether a directory lies in RAM (tmpfs, ramfs), where spilling saves nothing. `penstock doctor` asks,
    where the compiled module is missing, too."""
    best, kind = "", ""
    path = os.path.realpath(directory)
    for mount in lines(Path("/proc/mounts")):
        _, point, filesystem, *_ = mount.split()
        if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, kind = point, filesystem
    return kind in ("tmpfs", "ramfs")


def default_spill_dir() -> str:
    """The system's directory for temporary files, or /var/tmp where that one is in RAM."""
    directory = tempfile.gettempdir()
    if is_in_memory(directory) and os.access("/var/tmp", os.W_OK):
        return "/var/tmp"
    return directory
