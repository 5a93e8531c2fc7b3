"""Memory as the operating system counts it: resident bytes of this process (Linux; 0 elsewhere), what the
machine and the container have, and which directories lie in it."""

from __future__ import annotations

import ctypes
import os
import tempfile
from pathlib import Path

_STATUS = Path("/proc/self/status")
_NO_LIMIT_BYTES = 1 << 60  # version 1 of control groups has a number just below 2**63 for none


def _status_bytes(name: str) -> int:
    line = next((line for line in _lines(_STATUS) if line.startswith(name + ":")), None)
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
    path = os.path.realpath(directory)
    for mount in _lines(Path("/proc/mounts")):
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


def container_bytes(
    groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """The smallest memory limit of the control groups that this process is in, of version 1 or 2; None where
    there is none.

    groups, root   where the system names them, and where their limits lie
    """
    limits = []
    for line in _lines(groups):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        # A container may have its own group mounted as the root, and know it by the host's path.
        group = base / path.lstrip("/")
        for folder in dict.fromkeys((group, *group.parents, base)):
            if folder.is_relative_to(base):
                limits += [int(text) for text in _lines(folder / name) if text.isdecimal()]
    return min((limit for limit in limits if limit < _NO_LIMIT_BYTES), default=None)


def memory_bytes() -> int:
    """Memory of the machine, or of the container that this process is confined to."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(total, container_bytes() or total)


def available_bytes() -> int:
    """Memory that can be had without swapping, on the whole machine."""
    fields = dict(line.split(":", 1) for line in _lines(Path("/proc/meminfo")))
    return int(fields["MemAvailable"].split()[0]) << 10 if "MemAvailable" in fields else memory_bytes()


def _lines(path: Path) -> list[str]:
    """Of a file of the system's; empty where it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
