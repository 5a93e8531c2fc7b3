"""What a store holds, in numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import InvalidArgument
from penstock.options import CACHES
from penstock.samples.format import layout
from penstock.samples.format.manifest import Field
from penstock.samples.maintenance.structure import ENTRIES_AT_ONCE
from penstock.samples.mixing import Mixing, expected_mixing
from penstock.samples.order import cache_shape
from penstock.samples.reader.catalog import Catalog
from penstock.samples.reader.directory import Directory
from penstock.samples.reader.places import places_of
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
    catalog = Catalog([Directory.load(place) for place in places_of(path)])
    manifests = catalog.manifests
    size_bytes = sum(m.size_bytes for m in manifests)
    sizes, edges, long_edges = _sizes(catalog)
    return StoreInfo(
        path=os.fspath(path),
        samples=len(catalog),
        size_bytes=size_bytes,
        overhead_bytes=sum(map(_stored_bytes, catalog.directories)) - size_bytes,
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


def _stored_bytes(directory: Directory) -> int:
    """Of all files."""
    manifest = directory.manifest
    listed = sum(file.size_bytes for file in manifest.files.values())
    return manifest.chunks * manifest.chunk_bytes + listed + directory.place.size_bytes(layout.MANIFEST)


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
        slots = cache_shape(cache_bytes, chunk_bytes, chunks).slots
        mixing = expected_mixing("chunk", firsts, slots=slots, batch_size=batch, batches=MOST_BATCHES)
        yield OrderMixing(order="chunk", cache_bytes=cache_bytes, slots=slots, mixing=mixing)
        if slots == chunks:
            break  # larger ones give the same
    mixing = expected_mixing("full", firsts, slots=1, batch_size=batch, batches=MOST_BATCHES)
    yield OrderMixing(order="full", cache_bytes=None, slots=None, mixing=mixing)
