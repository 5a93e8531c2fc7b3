"""Limits on what a process may use."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def most_more_memory(size_bytes: int) -> Iterator[None]:
    """What is mapped beyond so many bytes more fails with ENOMEM."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
