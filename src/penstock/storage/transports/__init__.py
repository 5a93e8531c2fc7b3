"""How bytes get to a file and back. Adding one takes a file, a line in TRANSPORTS or GPU_TRANSPORTS, and
a pass of the contract suite."""

from __future__ import annotations

from collections.abc import Callable

from penstock.storage.transports.contract import (
    DEMAND,
    EVICT,
    FOR_EVER_S,
    PREFETCH,
    Completion,
    File,
    Kind,
    OnComplete,
    Request,
    Transport,
    TransportBroken,
    TransportUnavailable,
)
from penstock.storage.transports.gpudirect import GpuDirectTransport
from penstock.storage.transports.native import NvmeSpillTransport, PosixTransport, UringTransport

# In order of preference where nothing is known. Each raises TransportUnavailable where it cannot work.
TRANSPORTS: dict[str, Callable[[], Transport]] = {
    "io_uring": UringTransport,
    "posix": PosixTransport,
}

# Those between memory and a namespace of a remote drive.
REMOTE_TRANSPORTS: dict[str, Callable[[], Transport]] = {
    "nvme": NvmeSpillTransport,
}

# Those that move the memory of a GPU, and no other.
GPU_TRANSPORTS: dict[str, Callable[[], Transport]] = {
    "kvikio": GpuDirectTransport,
}

# The medium that each method leaves what it writes in: a method reads only what was written to the same.
MEDIA = {
    "direct": "disk",
    "staged": "disk",
    "gpu-direct": "disk",
    "buffered": "page cache",
    "mapped": "page cache",
}

__all__ = [
    "DEMAND",
    "EVICT",
    "FOR_EVER_S",
    "GPU_TRANSPORTS",
    "MEDIA",
    "PREFETCH",
    "REMOTE_TRANSPORTS",
    "TRANSPORTS",
    "Completion",
    "File",
    "Kind",
    "OnComplete",
    "Request",
    "Transport",
    "TransportBroken",
    "TransportUnavailable",
]
