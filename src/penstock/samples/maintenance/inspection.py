"""What a store holds, in numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import InvalidArgument
from penstock.samples.format import layout
from penstock.samples.format.manifest import Field
from penstock.samples.maintenance.structure import ENTRIES_AT_ONCE, Numbers, true_lengths
from penstock.samples.mixing import Mixing, expected_mixing
from penstock.samples.order import cache_shape
from penstock.samples.reader.directory import Directory, members
from penstock.units import parse_bytes

CACHES = ("16MiB", "64MiB", "256MiB", "1GiB")
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

    parts            stores that it consists of
    nodes            data files
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
    nodes: int
    parts: int
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

    path          of a store, or of a folder of its parts
    cache_bytes   sizes of the sample cache to give the mixing of "chunk" for. One that has no room for a
                  chunk is left out; of those that hold the whole store, all but the smallest are
    batch         samples in a batch

    Raises SampleError where there is no store or a part is missing, InvalidFile where it is damaged,
    InvalidArgument for a batch of nothing.
    """
    if batch < 1:
        raise InvalidArgument(f"batch={batch} is not a number of samples: give 1 or more")
    caches = sorted({parse_bytes(size) for size in cache_bytes})
    folders = members(path)
    directories = [Directory.load(folder) for folder in folders]
    manifests = [directory.manifest for directory in directories]
    counts = [_count(directory) for directory in directories]
    samples, size_bytes = sum(m.samples for m in manifests), sum(m.size_bytes for m in manifests)
    lengths = np.concatenate([count.lengths for count in counts])
    first = manifests[0]
    return StoreInfo(
        path=os.fspath(path),
        samples=samples,
        size_bytes=size_bytes,
        overhead_bytes=sum(map(_stored_bytes, directories)) - size_bytes,
        chunk_bytes=max(m.chunk_bytes for m in manifests),
        chunks=sum(m.chunks for m in manifests),
        nodes=sum(len(m.nodes) for m in manifests),
        parts=len(folders),
        encoding=first.encoding,
        fields=first.fields,
        classes=_classes(directories),
        edges=sum(count.edges for count in counts),
        long_edges=sum(count.long_edges for count in counts),
        sizes=_sizes(counts, lengths, size_bytes / samples) if samples else None,
        batch=batch,
        mixing=tuple(_mixing(directories, caches, batch)) if samples else (),
        source=first.source,
        metadata=first.metadata,
    )


def _stored_bytes(directory: Directory) -> int:
    """Of all files."""
    manifest = directory.manifest
    listed = sum(file.size_bytes for file in manifest.files.values())
    return (
        manifest.chunks * manifest.chunk_bytes + listed + os.path.getsize(directory.folder / layout.MANIFEST)
    )


@dataclass(frozen=True)
class _Count:
    """Of one member.

    lengths   of its samples, or of every so many-th
    powers    samples by the bits that their sizes take
    """

    lengths: Numbers
    smallest: int
    largest: int
    powers: Numbers
    edges: int
    long_edges: int


def _count(directory: Directory) -> _Count:
    samples, chunk_bytes = directory.manifest.samples, directory.manifest.chunk_bytes
    stride = max(1, -(-samples // MOST_LENGTHS))
    kept = [np.empty(0, np.int64)]
    powers = np.zeros(layout.OFFSET_BITS + 2, np.int64)
    smallest, largest, edges, long_edges = layout.NODE_BYTES, 0, 0, 0
    for begin in range(0, samples, ENTRIES_AT_ONCE):
        entries = layout.unpack_entries(directory.entries[begin : begin + ENTRIES_AT_ONCE])
        lengths = true_lengths(entries, directory.large, begin)
        edge = entries.offset.astype(np.int64) % chunk_bytes + lengths > chunk_bytes
        edges += int(np.count_nonzero(edge))
        long_edges += int(np.count_nonzero(edge & (lengths >= layout.long_edge_bytes(chunk_bytes))))
        smallest, largest = min(smallest, int(lengths.min())), max(largest, int(lengths.max()))
        _, bits = np.frexp(lengths.astype(np.float64))  # 0 for 0, 1 for 1, 2 for 2 and 3, ...
        powers += np.bincount(bits, minlength=len(powers))
        kept.append(lengths[-begin % stride :: stride])
    return _Count(np.concatenate(kept), smallest, largest, powers, edges, long_edges)


def _sizes(counts: Sequence[_Count], lengths: Numbers, mean_bytes: float) -> Sizes:
    powers = np.sum([count.powers for count in counts], axis=0).tolist()
    sizes = np.quantile(lengths, QUANTILES, method="inverted_cdf").astype(int).tolist()
    return Sizes(
        smallest_bytes=min(count.smallest for count in counts),
        largest_bytes=max(count.largest for count in counts),
        mean_bytes=mean_bytes,
        quantiles=tuple(zip(QUANTILES, sizes, strict=True)),
        ranges=tuple(
            SizeRange(begin_bytes=1 << bits >> 1, end_bytes=1 << bits, samples=count)
            for bits, count in enumerate(powers)
            if count
        ),
    )


def _classes(directories: Sequence[Directory]) -> tuple[ClassCount, ...]:
    """Samples of each class, by its name; then those without one, if there are any. Empty without classes."""
    counts: dict[str | None, int] = {}
    for directory in directories:
        classes, labels = directory.manifest.classes, directory.labels
        if labels is None:
            continue
        counts |= {name: counts.get(name, 0) for name in classes}
        found = np.bincount(
            np.clip(labels, -1, len(classes)).astype(np.int64) + 1, minlength=len(classes) + 2
        )
        for name, count in zip(classes, found[1:].tolist(), strict=False):
            counts[name] += count
        if unclassed := int(found[0] + found[len(classes) + 1]):
            counts[None] = counts.get(None, 0) + unclassed
    without = counts.pop(None, 0)
    listed = [ClassCount(name=name, samples=count) for name, count in counts.items()]
    return (*listed, ClassCount(name=None, samples=without)) if without else tuple(listed)


def _mixing(directories: Sequence[Directory], caches: Sequence[int], batch: int) -> Iterator[OrderMixing]:
    chunk_bytes = max(directory.manifest.chunk_bytes for directory in directories)
    firsts = _firsts(directories)
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


def _firsts(directories: Sequence[Directory]) -> Numbers:
    """[chunks + 1]: the first sample of each chunk, over all members, then how many samples there are."""
    firsts = [np.zeros(0, np.int64)]
    begin = 0
    for directory in directories:
        firsts.append(directory.firsts[:-1].astype(np.int64) + begin)
        begin += directory.manifest.samples
    return np.append(np.concatenate(firsts), begin)
