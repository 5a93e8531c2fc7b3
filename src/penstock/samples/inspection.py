"""What a store holds, in numbers, and how fast this machine reads it."""

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
from penstock.options import CACHES
from penstock.samples import layout
from penstock.samples.catalog import Catalog, load_all
from penstock.samples.manifest import Field
from penstock.samples.order import ORDERS, Mixing, cache_shape, expected_mixing
from penstock.samples.places import StoreFile
from penstock.samples.store import Store, mount
from penstock.samples.verification import ENTRIES_AT_ONCE, Numbers
from penstock.storage.page_cache import cached_share
from penstock.units import parse_bytes

QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)
MOST_BATCHES = 1024  # that mixing is measured on
MOST_LENGTHS = 1 << 22  # that quantiles are taken from


@dataclass(frozen=True, kw_only=True)
class ClassCount:
    """name: None for samples without a class"""

    name: str | None
    samples: int


@dataclass(frozen=True, kw_only=True)
class SizeRange:
    """How many samples are of ``begin_bytes`` up to, not including, ``end_bytes``."""

    begin_bytes: int
    end_bytes: int
    samples: int


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of single samples.

    quantiles   (share, size) for each of QUANTILES; in large stores of every so many-th sample
    ranges      by powers of two, ascending, without empty ones
    """

    smallest_bytes: int
    largest_bytes: int
    mean_bytes: float
    quantiles: tuple[tuple[float, int], ...]
    ranges: tuple[SizeRange, ...]


@dataclass(frozen=True, kw_only=True)
class OrderMixing:
    """What an order gives.

    cache_bytes   that it is given; None for "full", which needs none
    slots         chunks that samples are picked from at once; None for "full"
    """

    order: str
    cache_bytes: int | None
    slots: int | None
    mixing: Mixing


@dataclass(frozen=True, kw_only=True)
class StoreInfo:
    """What a store holds.

    data_files       files that hold the samples
    partitions       stores that it consists of
    size_bytes       of all samples
    overhead_bytes   of everything else: directory, names, sums, padding
    edges            samples that cross the end of their chunk
    long_edges       those of them that are read by themselves
    sizes            None without samples
    mixing           of batches of ``batch`` samples; empty without samples
    """

    path: str
    samples: int
    size_bytes: int
    overhead_bytes: int
    chunk_bytes: int
    chunks: int
    data_files: int
    partitions: int
    encoding: str
    fields: tuple[Field, ...]
    classes: tuple[ClassCount, ...]
    edges: int
    long_edges: int
    sizes: Sizes | None
    batch: int
    mixing: tuple[OrderMixing, ...]
    source: str
    metadata: dict[str, str]


def info(
    path: str | os.PathLike[str],
    *,
    cache_bytes: Sequence[int | str] = CACHES,
    batch: int = 64,
) -> StoreInfo:
    """What the store at ``path`` holds, and how well it will mix. Samples are not read.

    path          of a store, or of a folder of its partitions; or the URL of a namespace that has one
    cache_bytes   sizes of the sample cache to give the mixing of "chunk" for. One that has no room for a
                  chunk is left out; of those that hold the whole store, all but the smallest are
    batch         samples in a batch

    Raises SampleError where there is no store or a partition is missing, InvalidFile where it is damaged,
    InvalidArgument for a batch of nothing.
    """
    if batch < 1:
        raise InvalidArgument(f"batch={batch} is not a number of samples: give 1 or more")
    caches = sorted({parse_bytes(size) for size in cache_bytes})
    catalog = Catalog(load_all(path))
    manifests = catalog.manifests
    size_bytes = sum(m.size_bytes for m in manifests)
    stored_bytes = sum(
        directory.place.size_bytes(layout.MANIFEST) + sum(directory.manifest.file_sizes.values())
        for directory in catalog.directories
    )
    sizes, edges, long_edges = _sizes(catalog)
    return StoreInfo(
        path=os.fspath(path),
        samples=len(catalog),
        size_bytes=size_bytes,
        overhead_bytes=stored_bytes - size_bytes,
        chunk_bytes=catalog.chunk_bytes,
        chunks=sum(m.chunks for m in manifests),
        data_files=sum(len(m.data_files) for m in manifests),
        partitions=len(manifests),
        encoding=catalog.encoding,
        fields=catalog.fields,
        classes=_classes(catalog),
        edges=edges,
        long_edges=long_edges,
        sizes=sizes,
        batch=batch,
        mixing=tuple(_mixing(catalog, caches, batch)) if len(catalog) else (),
        source=manifests[0].source,
        metadata=manifests[0].metadata,
    )


def _sizes(catalog: Catalog) -> tuple[Sizes | None, int, int]:
    """Sizes, samples that cross the end of their chunk, and those of them that are long."""
    kept = []  # lengths of all samples, or of every so many-th
    powers = np.zeros(layout.OFFSET_BITS + 2, np.int64)  # samples by the bits that their sizes take
    smallest, largest, edges, long_edges = layout.DATA_FILE_BYTES, 0, 0, 0
    for directory in catalog.directories:
        samples, chunk_bytes = directory.manifest.samples, directory.manifest.chunk_bytes
        stride = max(1, -(-samples // MOST_LENGTHS))
        for begin in range(0, samples, ENTRIES_AT_ONCE):
            entries, lengths = directory.located(slice(begin, begin + ENTRIES_AT_ONCE))
            edge = entries.offset.astype(np.int64) % chunk_bytes + lengths > chunk_bytes
            edges += int(np.count_nonzero(edge))
            long_edges += int(np.count_nonzero(edge & (lengths >= layout.long_edge_bytes(chunk_bytes))))
            smallest, largest = min(smallest, int(lengths.min())), max(largest, int(lengths.max()))
            _, bits = np.frexp(lengths.astype(np.float64))  # 0 for 0, 1 for 1, 2 for 2 and 3, ...
            powers += np.bincount(bits, minlength=len(powers))
            kept.append(lengths[-begin % stride :: stride])
    if not kept:
        return None, 0, 0
    quantiles = np.quantile(np.concatenate(kept), QUANTILES, method="inverted_cdf").astype(int).tolist()
    ranges = [
        SizeRange(begin_bytes=1 << bits >> 1, end_bytes=1 << bits, samples=count)
        for bits, count in enumerate(powers.tolist())
        if count
    ]
    sizes = Sizes(
        smallest_bytes=smallest,
        largest_bytes=largest,
        mean_bytes=sum(m.size_bytes for m in catalog.manifests) / len(catalog),
        quantiles=tuple(zip(QUANTILES, quantiles, strict=True)),
        ranges=tuple(ranges),
    )
    return sizes, edges, long_edges


def _classes(catalog: Catalog) -> tuple[ClassCount, ...]:
    """Samples of each class; then those without one, if there are any. Empty without classes."""
    labels, classes = catalog.labels, catalog.classes
    if labels is None:
        return ()
    bins = np.clip(labels, -1, len(classes)).astype(np.int64) + 1
    without, *counts, unknown = np.bincount(bins, minlength=len(classes) + 2).tolist()
    listed = [ClassCount(name=name, samples=count) for name, count in zip(classes, counts, strict=True)]
    if without + unknown:
        listed.append(ClassCount(name=None, samples=without + unknown))
    return tuple(listed)


def _mixing(catalog: Catalog, caches: Sequence[int], batch: int) -> Iterator[OrderMixing]:
    chunk_bytes, firsts = catalog.chunk_bytes, catalog.firsts
    chunks = len(firsts) - 1
    for cache_bytes in caches:
        if cache_bytes < min(2, chunks) * layout.buffer_bytes(chunk_bytes):
            continue
        slots = cache_shape(cache_bytes, chunk_bytes, chunks, len(catalog.directories)).slots
        mixing = expected_mixing("chunk", firsts, slots=slots, batch_size=batch, batches=MOST_BATCHES)
        yield OrderMixing(order="chunk", cache_bytes=cache_bytes, slots=slots, mixing=mixing)
        if slots == chunks:
            break  # larger ones give the same
    mixing = expected_mixing("full", firsts, slots=1, batch_size=batch, batches=MOST_BATCHES)
    yield OrderMixing(order="full", cache_bytes=None, slots=None, mixing=mixing)


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
    cached     about the share of the store that was in the page cache before; None where it lies on
               another machine
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
        raise InvalidArgument(f"nothing is read in {seconds:g} s by batches of {batch}: give more than 0")
    each_s = seconds / (2 + len(ORDERS))
    rows: list[Throughput] = []
    with mount(path, "full", io=io) as store, _data_files(store) as files:
        if cold and any(directory.place.is_remote for directory in store.directories):
            raise InvalidArgument(
                f"{os.fspath(path)} lies on another machine: no page cache is before it here"
            )
        if not len(store):
            raise InvalidArgument(f"{os.fspath(path)} has no samples: there is nothing to measure")

        def measure(way: str, begin: Callable[[], Read], mixing: float | None = None) -> None:
            if cold:
                _drop(files)
            cached = _cached(files)
            rows.append(replace(_timed(way, begin(), each_s), cached=cached, mixing=mixing))

        measure("single reads", lambda: _single_reads(store, files))
        measure("read", lambda: _reads(store))
        for order in ORDERS:
            with mount(path, order, cache_bytes, io=io) as ordered:
                slots, firsts = max(1, ordered.shape.slots), ordered.firsts
                mixing = expected_mixing(order, firsts, slots=slots, batch_size=batch, batches=MIXING_BATCHES)
                measure(f"bread, {order}", partial(_breads, ordered, batch), mixing.ratio)
        return Bench(path=os.fspath(path), samples=len(store), io=store.io, cold=cold, rows=tuple(rows))


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
                file = files[first + data_file]
                if (descriptor := file.target().buffered) >= 0:
                    size_bytes += len(os.pread(descriptor, length, offset))
                else:
                    file.read_into(offset, memoryview(bytearray(length)))
                    size_bytes += length
        return samples, size_bytes

    return read


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
            opened.enter_context(contextlib.closing(directory.place.open(layout.data_file_name(number))))
            for directory in store.directories
            for number in range(len(directory.manifest.data_files))
        ]


def _drop(files: Sequence[StoreFile]) -> None:
    """Ask for the files' pages to be dropped. What was not written yet cannot be."""
    for descriptor in (file.target().buffered for file in files):
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _cached(files: Sequence[StoreFile]) -> float | None:
    """About the share of the files that is in the page cache."""
    descriptors = [file.target().buffered for file in files]
    if any(descriptor < 0 for descriptor in descriptors):  # on another machine
        return None
    sizes = [os.fstat(descriptor).st_size for descriptor in descriptors]
    held = sum(size * cached_share(fd) for size, fd in zip(sizes, descriptors, strict=True))
    return held / sum(sizes) if any(sizes) else None
