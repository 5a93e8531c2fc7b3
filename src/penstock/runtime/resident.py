"""Memory as the operating system counts it: resident bytes of this process (Linux; 0 elsewhere), and which
directories lie in memory."""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
from pathlib import Path

from penstock.machine import lines

_STATUS = Path("/proc/self/status")

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_HIGHEST_MMAP_THRESHOLD = 32 << 20
_LOOKED_AT_BYTES = 64 << 10  # where so much is freed at once, a heap's end is compared with the threshold
_MALLOC_VARIABLES = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES"}
_threshold = threading.Lock()


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
    """Let the C library give what is free back to the system, where it can.

    glibc's malloc_trim leaves the ends of threads' heaps, up to its trim threshold each, and each thread that
    solves for a plan has another heap. The calling thread's goes back, too: the threshold is 0 for a moment.
    As glibc adapts neither threshold once one was set, both are then the highest that it comes to by itself.
    What the environment says of them stays as it is.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        return
    libc.malloc_trim(0)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main and os.environ.keys().isdisjoint(_MALLOC_VARIABLES):
        libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
        with _threshold:
            libc.mallopt(_TRIM_THRESHOLD, 0)
            libc.free(libc.malloc(_LOOKED_AT_BYTES))
            libc.mallopt(_TRIM_THRESHOLD, 2 * _HIGHEST_MMAP_THRESHOLD)
            libc.mallopt(_MMAP_THRESHOLD, _HIGHEST_MMAP_THRESHOLD)


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
