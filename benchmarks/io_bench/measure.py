"""The clock, the page cache, random tensors, and samples with their statistics."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import resource
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from penstock.storage.aligned import AlignedBuffer

PAGE_BYTES = mmap.PAGESIZE
# OpenMP's threads spin for some milliseconds after their last work, on somebody else's account.
PAUSE_S = 0.02
_CACHESTAT = 451  # its number, the same on every architecture; Linux 6.5
_libc = ctypes.CDLL(None, use_errno=True)
Item = TypeVar("Item")


class Sample(NamedTuple):
    """What moving some bytes took.

    wall_s   seconds
    cpu_s    of user and system, all threads of this process and of children that ended. Kernel
             threads that write pages back later are not counted
    """

    wall_s: float
    cpu_s: float


def cpu_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def timed(action: Callable[[], Any]) -> tuple[Sample, Any]:
    """Call ``action``; a Sample that it gives itself is taken instead of the clock's."""
    time.sleep(PAUSE_S)
    begun_cpu_s, begun_s = cpu_s(), time.perf_counter()
    result = action()
    sample = Sample(time.perf_counter() - begun_s, cpu_s() - begun_cpu_s)
    return (result, None) if isinstance(result, Sample) else (sample, result)


def rotated(items: Sequence[Item], shift: int) -> Iterator[Item]:
    """Every item once, beginning with another one for each ``shift``."""
    shift %= len(items)
    yield from items[shift:]
    yield from items[:shift]


def summary(samples: Sequence[Sample], size_bytes: int) -> dict[str, Any]:
    """Medians and spread of ``samples``, each of which moved ``size_bytes``."""
    rates = sorted(size_bytes / sample.wall_s for sample in samples)
    lower, median, upper = statistics.quantiles(rates, n=4, method="inclusive") if rates[1:] else rates * 3
    return {
        "median_bytes_per_s": median,
        "quartiles_bytes_per_s": [lower, upper],
        "range_bytes_per_s": [rates[0], rates[-1]],
        "median_s": size_bytes / median,
        "median_cpu_s_per_gb": statistics.median(sample.cpu_s for sample in samples) / (size_bytes / 1e9),
        "samples_s": [sample.wall_s for sample in samples],
        "samples_cpu_s": [sample.cpu_s for sample in samples],
    }


def tensors_in_sample(size_bytes: int, quick: bool) -> int:
    """How many tensors of ``size_bytes`` a sample moves: one that is too short says nothing."""
    sample_bytes = (8 if quick else 32) << 20
    return max(1, min(128, sample_bytes // size_bytes))


# -- memory ----------------------------------------------------------------------------------------


class Tensors:
    """Random tensors, one after another in huge pages, and as much memory to read into.

    tensors        float32, of any bits
    destinations   as many, for the rows that read into memory they are given
    """

    def __init__(self, sizes_bytes: Sequence[int], seed: int) -> None:
        self.sizes_bytes = tuple(sizes_bytes)
        self.total_bytes = sum(sizes_bytes)
        self._random = np.random.Generator(np.random.SFC64(seed))
        self.source, self.destination = AlignedBuffer(self.total_bytes), AlignedBuffer(self.total_bytes)
        self._words = np.frombuffer(self.source.view(), dtype=np.uint64)
        for begin in range(0, len(self._words), 1 << 20):
            part = self._words[begin : begin + (1 << 20)]
            part[:] = self._random.integers(0, 1 << 64, len(part), dtype=np.uint64)
        self.tensors = self._cut(self.source)
        self.destinations = self._cut(self.destination)
        self.scrub()

    def refresh(self) -> None:
        """Other random bits: a word drawn anew is added to each."""
        np.bitwise_xor(self._words, self._random.integers(0, 1 << 64, dtype=np.uint64), out=self._words)

    def scrub(self) -> None:
        """Forget what was read into the destinations."""
        ctypes.memset(self.destination.address, 0, self.total_bytes)

    def verify(self, read: Iterable[Tensor], who: str) -> None:
        """Raise RuntimeError unless ``read`` holds the bits of the tensors."""
        for index, (tensor, found) in enumerate(zip(self.tensors, read, strict=True)):
            if not same_bits(tensor, found):
                raise RuntimeError(f"{who}: tensor {index} of {len(self.tensors)} came back with other bits")

    def _cut(self, buffer: AlignedBuffer) -> list[Tensor]:
        # Each with a storage of its own: torch.save writes whole storages.
        view, begins = buffer.view(), itertools.accumulate(self.sizes_bytes, initial=0)
        return [
            torch.frombuffer(view[begin : begin + size_bytes], dtype=torch.float32)
            for begin, size_bytes in zip(begins, self.sizes_bytes, strict=False)
        ]


def same_bits(one: Tensor, other: Tensor) -> bool:
    flat = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    if flat[0].numel() % 8 == 0:
        flat = [tensor.view(torch.int64) for tensor in flat]
    return torch.equal(*flat)


def touch(tensors: Iterable[Tensor]) -> None:
    """Read a byte of every page, so that memory mapped from a file is there."""
    for tensor in tensors:
        tensor.view(-1).view(torch.uint8)[::PAGE_BYTES].sum()


# -- files -----------------------------------------------------------------------------------------


def files_under(path: Path) -> list[Path]:
    """``path``, or the files below it."""
    return [entry for entry in path.rglob("*") if entry.is_file()] if path.is_dir() else [path]


def sync(path: Path) -> None:
    """fsync ``path``, or every file below it."""
    for file in files_under(path):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def settle(directory: Path) -> None:
    """Wait until the file system has nothing left to write, so that nobody pays for others."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        _libc.syncfs(descriptor)
    finally:
        os.close(descriptor)


def make_cold(path: Path) -> int:
    """Read ``path`` once, and drop it from the page cache; the bytes that stayed nevertheless.

    A host takes the memory that its virtual machine does not use. Memory that was in use just now is there
    for every row alike, whether or not the row's own writes went through the page cache.
    """
    make_warm(path)
    left = 0
    for file in files_under(path):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            left += cached_bytes(descriptor)
        finally:
            os.close(descriptor)
    return left


def make_warm(path: Path) -> None:
    """Bring ``path`` into the page cache."""
    buffer = bytearray(4 << 20)
    for file in files_under(path):
        with open(file, "rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def cached_bytes(descriptor: int) -> int:
    """Bytes of the file in the page cache, by cachestat or, on an older kernel, by mincore."""
    size_bytes = os.fstat(descriptor).st_size
    if not size_bytes:
        return 0
    whole, found = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    if _libc.syscall(_CACHESTAT, descriptor, whole, found, 0) == 0:
        return int(found[0]) * PAGE_BYTES
    pages = -(-size_bytes // PAGE_BYTES)
    resident = (ctypes.c_ubyte * pages)()
    with mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_PRIVATE) as mapping:
        view = ctypes.c_char.from_buffer(mapping)
        _libc.mincore(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(size_bytes), resident)
        del view
    return sum(page & 1 for page in resident) * PAGE_BYTES
