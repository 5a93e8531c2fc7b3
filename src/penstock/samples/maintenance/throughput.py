"""How fast a store gives its samples on this machine."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import numpy as np

from penstock.errors import InvalidArgument
from penstock.samples.format import layout
from penstock.samples.maintenance.structure import Numbers
from penstock.samples.mixing import expected_mixing
from penstock.samples.order import ORDERS
from penstock.samples.reader.places import StoreFile
from penstock.samples.reader.store import Store, mount

PROBED_PAGES = 256
READ_AT_ONCE = 256  # single reads between looks at the clock
MIXING_BATCHES = 256
SEED = 0

Read = Callable[[int], tuple[int, int]]  # at least so many samples: samples, bytes


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """What one way of reading gave.

    way        "single reads": a system call for each sample, in a random order, from open data files;
               "read": Store.read in a random order; "bread, full" and "bread, chunk"
    samples    that were read after the first ones, of size_bytes in all, in time_s
    first_s    until the first samples were there: "bread, chunk" fills its cache before
    cached     share of the store that was in the page cache before; None where that cannot be told
    mixing     of the batches' chunks against a full shuffle; None where there are no batches
    """

    way: str
    samples: int
    size_bytes: int
    time_s: float
    first_s: float
    cached: float | None = None
    mixing: float | None = None

    @property
    def sample_s(self) -> float:
        """Time of one sample."""
        return self.time_s / self.samples

    @property
    def rate_bytes_per_s(self) -> float:
        return self.size_bytes / self.time_s


@dataclass(frozen=True, kw_only=True)
class Bench:
    """How fast a store was read.

    io     "buffered" or "direct", of all but the single reads, which go through the page cache
    cold   the store was dropped from the page cache before each way
    """

    path: str
    samples: int
    io: str
    cold: bool
    rows: tuple[Throughput, ...]


def bench(
    path: str | os.PathLike[str],
    *,
    seconds: float = 8.0,
    cache_bytes: int | str = "256MiB",
    batch: int = 64,
    io: str = "auto",
    cold: bool = False,
) -> Bench:
    """Read the store at ``path`` for a while, in four ways.

    seconds        for all ways together, about
    cache_bytes    for the sample cache
    batch          samples in a batch
    io             as `mount` takes it
    cold           drop the store from the page cache before each way, as far as the system does so

    Checksums are compared, except by single reads. Raises SampleError where the store is damaged or cannot be
    read, InvalidArgument for a store without samples.
    """
    if not 0 < seconds < float("inf") or batch < 1:
        raise InvalidArgument(f"{seconds=} and {batch=} have to be more than 0")
    each_s = seconds / (2 + len(ORDERS))
    rows: list[Throughput] = []
    with mount(path, "full", io=io) as store, _data_files(store) as files, _data_files(store) as probes:
        if cold and any(directory.place.is_remote for directory in store.directories):
            raise InvalidArgument(
                f"{os.fspath(path)} lies on another machine: no page cache is before it here"
            )
        if not len(store):
            raise InvalidArgument(f"{os.fspath(path)} has no samples: there is nothing to measure")

        def measure(way: str, begin: Callable[[], Read], mixing: float | None = None) -> None:
            if cold:
                _drop(files)
            cached = _cached(probes, SEED + 1 + len(rows))
            rows.append(replace(_timed(way, begin(), each_s), cached=cached, mixing=mixing))

        measure("single reads", lambda: _single_reads(store, files))
        measure("read", lambda: _reads(store))
        for order in ORDERS:
            with mount(path, order, cache_bytes, io=io) as ordered:
                measure(f"bread, {order}", partial(_breads, ordered, batch), _mixing(ordered, batch))
        return Bench(path=os.fspath(path), samples=len(store), io=store.io, cold=cold, rows=tuple(rows))


def _mixing(store: Store, batch: int) -> float:
    slots = max(1, store.shape.slots)
    return expected_mixing(
        store.order, store.firsts, slots=slots, batch_size=batch, batches=MIXING_BATCHES
    ).ratio


def _timed(way: str, read: Read, seconds: float) -> Throughput:
    began_s = time.perf_counter()
    read(1)
    first_s = time.perf_counter() - began_s
    samples = size_bytes = 0
    time_s = 0.0
    while not samples or time_s < seconds:
        read_samples, read_bytes = read(READ_AT_ONCE)
        samples, size_bytes = samples + read_samples, size_bytes + read_bytes
        time_s = time.perf_counter() - began_s - first_s
    return Throughput(way=way, samples=samples, size_bytes=size_bytes, time_s=time_s, first_s=first_s)


def _single_reads(store: Store, files: Sequence[StoreFile]) -> Read:
    """What a program does that keeps the files open and knows where everything lies: the baseline."""
    data_files = [len(manifest.data_files) for manifest in store.manifests]
    firsts = (np.cumsum(data_files) - data_files).tolist()
    random = np.random.default_rng(SEED)

    def read(samples: int) -> tuple[int, int]:
        size_bytes = 0
        indices = random.integers(0, len(store), samples)
        for first, (directory, _, mine) in zip(firsts, store.by_directory(indices), strict=True):
            entries, lengths = directory.located(mine)
            places = zip(entries.data_file.tolist(), entries.offset.tolist(), lengths.tolist(), strict=True)
            for data_file, offset, length in places:
                size_bytes += _single_read(files[first + data_file], offset, length)
        return samples, size_bytes

    return read


def _single_read(file: StoreFile, offset: int, length: int) -> int:
    if (descriptor := file.target.buffered) >= 0:
        return len(os.pread(descriptor, length, offset))
    file.read_into(offset, memoryview(bytearray(length)))
    return length


def _reads(store: Store) -> Read:
    random = np.random.default_rng(SEED)

    def read(samples: int) -> tuple[int, int]:
        indices: Numbers = random.integers(0, len(store), samples)
        return samples, sum(len(store.read(index)) for index in indices.tolist())

    return read


def _breads(store: Store, batch: int) -> Read:
    epochs = count()
    store.sequence(seed=SEED, epoch=next(epochs))

    def read(samples: int) -> tuple[int, int]:
        found = size_bytes = 0
        while found < samples:
            given = store.bread(batch)
            if given is None:
                store.sequence(seed=SEED, epoch=next(epochs))
            else:
                found, size_bytes = found + len(given), size_bytes + given.data.nbytes
        return found, size_bytes

    return read


@contextlib.contextmanager
def _data_files(store: Store) -> Iterator[list[StoreFile]]:
    """All data files, opened."""
    with contextlib.ExitStack() as opened:
        yield [
            opened.enter_context(
                contextlib.closing(directory.place.open(layout.data_file_name(number), None, ""))
            )
            for directory in store.directories
            for number in range(len(directory.manifest.data_files))
        ]


def _drop(files: Sequence[StoreFile]) -> None:
    """Ask for the files' pages to be dropped. What was not written yet cannot be."""
    for descriptor in (file.target.buffered for file in files):
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _cached(files: Sequence[StoreFile], seed: int) -> float | None:
    """The share of random pages of the files that are in the page cache. Looking can bring them in."""
    descriptors = [file.target.buffered for file in files]
    if any(descriptor < 0 for descriptor in descriptors):  # on another machine
        return None
    sizes = np.array([os.fstat(descriptor).st_size for descriptor in descriptors])
    ends = np.cumsum(sizes)
    if not hasattr(os, "RWF_NOWAIT") or not len(sizes) or not ends[-1]:
        return None
    for descriptor in descriptors:  # nor more than them
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    page = bytearray(1)
    there = 0
    for position in np.random.default_rng(seed).integers(0, ends[-1], PROBED_PAGES).tolist():
        file = int(np.searchsorted(ends, position, side="right"))
        offset = position - int(ends[file] - sizes[file])
        try:
            there += os.preadv(descriptors[file], [page], offset, os.RWF_NOWAIT)
        except BlockingIOError:
            pass
        except OSError:  # this file system cannot tell
            return None
    return there / PROBED_PAGES
