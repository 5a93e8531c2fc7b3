"""A device in memory, as strict as a drive: whole blocks only; what was not flushed may be lost."""

from __future__ import annotations

import random


class Broken(Exception):
    """The device has failed, as asked."""


class MemoryDevice:
    """Stands for a Namespace.

    content   what reads give
    writes    how many there were
    """

    def __init__(self, size_bytes: int, block_bytes: int = 512, content: bytes = b"") -> None:
        assert size_bytes % block_bytes == 0
        self.size_bytes, self.block_bytes = size_bytes, block_bytes
        self.longest_request_s = self.quiesce_s = self.late_s = 0.0
        self.content = bytearray(content.ljust(size_bytes, b"\0"))
        self.writes = 0
        self.fails_at: int | None = None  # that many writes and flushes from the beginning on
        self._durable: dict[int, tuple[int, bytes]] = {}  # by block: its last write since the last flush, and
        # what was there before that flush
        self._steps = 0

    def read_into(self, offset: int, view: memoryview) -> None:
        assert 0 <= offset <= offset + view.nbytes <= self.size_bytes
        view[:] = self.content[offset : offset + view.nbytes]

    def write(self, offset: int, view: memoryview) -> None:
        assert 0 <= offset <= offset + view.nbytes <= self.size_bytes
        assert offset % self.block_bytes == view.nbytes % self.block_bytes == 0
        self._step()
        self.writes += 1
        for block in range(offset // self.block_bytes, (offset + view.nbytes) // self.block_bytes):
            _, before = self._durable.get(block, (0, self._block(block)))
            self._durable[block] = self.writes, before
        self.content[offset : offset + view.nbytes] = view

    def flush(self) -> None:
        self._step()
        self._durable.clear()

    @property
    def all_is_durable(self) -> bool:
        return not self._durable

    def lose_power(self, seed: int) -> None:
        """Of what was not flushed some writes are there, others are not, and of some a part is. Then it works
        again."""
        random_ = random.Random(seed)
        fates = [random_.choice(["kept", "kept", "lost", "torn"]) for _ in range(self.writes + 1)]
        for block, (write, before) in self._durable.items():
            torn = random_.choice([0, random_.randrange(self.block_bytes), self.block_bytes])
            lost_bytes = {"kept": 0, "lost": self.block_bytes, "torn": torn}[fates[write]]
            end = (block + 1) * self.block_bytes
            self.content[end - lost_bytes : end] = before[self.block_bytes - lost_bytes :]
        self._durable.clear()
        self.fails_at = None

    def _block(self, block: int) -> bytes:
        return bytes(self.content[block * self.block_bytes : (block + 1) * self.block_bytes])

    def _step(self) -> None:
        self._steps += 1
        if self.fails_at is not None and self._steps > self.fails_at:
            raise Broken
