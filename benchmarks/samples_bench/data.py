"""The samples: their number in eight bytes, then noise. All rows store the same ones, in the same order."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

ID_BYTES = 8
SHARDS = 20  # of peers that store shards; and the equal ranges of the stored order that mixing counts


class Data(NamedTuple):
    """size_bytes of each sample, and how many there are."""

    size_bytes: int
    count: int
    seed: int

    @property
    def total_bytes(self) -> int:
        return self.size_bytes * self.count

    def samples(self, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
        end = self.count if end is None else end
        for index in range(begin, end):
            yield self.sample(index)

    def sample(self, index: int) -> bytes:
        """The noise is a window of one megabyte of it: made fast, and compressible by nobody here."""
        noise = _noise(self.seed, self.size_bytes)
        start = index * 4099 % (len(noise) - self.size_bytes)
        return index.to_bytes(ID_BYTES, "little") + noise[start + ID_BYTES : start + self.size_bytes]

    def shards(self) -> list[range]:
        edges = np.linspace(0, self.count, SHARDS + 1).astype(int).tolist()
        return [range(begin, end) for begin, end in itertools.pairwise(edges)]


_made: dict[tuple[int, int], bytes] = {}


def _noise(seed: int, size_bytes: int) -> bytes:
    key = (seed, size_bytes)
    if key not in _made:
        _made[key] = np.random.default_rng(seed).bytes(size_bytes + (1 << 20))
    return _made[key]


def id_of(sample: bytes | memoryview) -> int:
    return int.from_bytes(sample[:ID_BYTES], "little")


def files_below(folder: Path) -> Iterator[str]:
    stack = [os.fspath(folder)]
    while stack:
        with os.scandir(stack.pop()) as found:
            for entry in found:
                if entry.is_dir(follow_symlinks=False):
                    stack.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    yield entry.path


def drop(folder: Path) -> None:
    """Out of the page cache with everything below ``folder``."""
    for path in files_below(folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def warm(folder: Path) -> None:
    """Into the page cache with it."""
    block = bytearray(1 << 20)
    for path in files_below(folder):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(block):
                pass
