"""What the tests of transports share: memory that is watched, bytes to move, and a wait for what is over."""

from __future__ import annotations

import copy
import mmap
import os
import random
import threading
from collections.abc import Callable, Sequence

import numpy as np

from penstock._native import Descriptor
from penstock.storage.aligned import AlignedBuffer, align_up
from penstock.storage.files import OpenFile, from_descriptor
from penstock.storage.transfer import Transfer, Transport

FLAGS = {"r": os.O_RDONLY, "r+": os.O_RDWR, "w": os.O_RDWR | os.O_CREAT | os.O_TRUNC}


def open_file(path: str | os.PathLike[str], mode: str) -> OpenFile:
    """The file for transports: "r" to read it, "r+" to change it, "w" to make it anew."""
    return from_descriptor(Descriptor(path, FLAGS[mode], 0o666), os.fspath(path))


FILE_BYTES = (10 << 20) + 1234
ORIGINAL = random.Random(1).randbytes(FILE_BYTES)
DATA = random.Random(2).randbytes(FILE_BYTES)
PAGE = mmap.PAGESIZE
WAIT_S = 30


class Memory:
    """Parts of one buffer, a page or more apart, and what the buffer should hold."""

    def __init__(self, size_bytes: int = 1 << 20) -> None:
        self._buffer = AlignedBuffer(size_bytes)
        self._expected = bytearray(size_bytes)
        self._used = 0

    def take(self, data: bytes, shift: int = 0) -> int:
        """The address, a multiple of the page size plus ``shift``, of ``data``."""
        begin = align_up(self._used, PAGE) + PAGE + shift
        self._used = begin + len(data)
        assert self._used + PAGE <= len(self._expected)
        self._buffer.view()[begin : self._used] = data
        self.expect(self._buffer.address + begin, data)
        return self._buffer.address + begin

    def expect(self, address: int, data: bytes) -> None:
        begin = address - self._buffer.address
        self._expected[begin : begin + len(data)] = data

    def check(self) -> None:
        """It holds what is expected, and nothing else was touched."""
        assert first_difference(bytes(self._buffer.view()), self._expected) is None


class Gathered:
    """Waits for transfers that are over."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._ended: list[Transfer] = []
        self._over = threading.Semaphore(0)

    def __call__(self, transfer: Transfer) -> None:
        self._ended.append(transfer)
        self._over.release()

    def wait(self) -> list[Transfer]:
        for _ in range(self._count):
            assert self._over.acquire(timeout=WAIT_S)
        assert len(self._ended) == self._count
        return self._ended


def submit(transport: Transport, transfers: Sequence[Transfer], on_done: Callable[[Transfer], None]) -> None:
    for transfer in transfers:
        transfer.on_done = on_done
    transport.submit(transfers)


def changed(transfer: Transfer, **changes: object) -> Transfer:
    """Another one, like it but for these."""
    other = copy.copy(transfer)
    vars(other).update(changes)
    return other


def first_difference(found: bytes, expected: bytes | bytearray) -> str | None:
    if len(found) != len(expected):
        return f"{len(found)} bytes instead of {len(expected)}"
    differing = np.flatnonzero(np.frombuffer(found, np.uint8) != np.frombuffer(expected, np.uint8))
    return f"{len(differing)} bytes, from {differing[0]} to {differing[-1]}" if len(differing) else None
