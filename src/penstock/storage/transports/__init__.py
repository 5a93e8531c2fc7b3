"""How bytes get to a file and back. Adding one takes a file, a line in TRANSPORTS, and a pass of the
contract suite."""

from __future__ import annotations

from collections.abc import Callable

from penstock.storage.transports.contract import Completion, OnComplete, Request, Transport
from penstock.storage.transports.memory import MemoryTransport
from penstock.storage.transports.posix import PosixTransport

# Each takes (threads, alignment_bytes).
TRANSPORTS: dict[str, Callable[[int, int], Transport]] = {
    "posix": PosixTransport,
    "memory": MemoryTransport,
}

__all__ = ["TRANSPORTS", "Completion", "OnComplete", "Request", "Transport"]
