"""Whether the small files of a store agree with its manifest, and with each other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidFile
from penstock.samples.format import layout
from penstock.samples.format.files import AGAIN, open_regular
from penstock.samples.format.manifest import StoreManifest
from penstock.samples.reader.directory import Directory
from penstock.storage.checksum import crc32c

Words = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]

READ_BYTES = 4 << 20
ENTRIES_AT_ONCE = 1 << 18


class Extents(NamedTuple):
    """Where samples lie, once the directory is known to agree with itself.

    directory   [samples, 2]
    large       [large samples, 2]: index and length
    firsts      [chunks + 1]: the first sample of each chunk, then the number of samples
    """

    directory: Words
    large: Words
    firsts: Numbers

    def of(self, begin: int, end: int) -> tuple[Numbers, Numbers]:
        """Offsets and true lengths of samples ``begin`` to ``end``, which lie in one node."""
        entries = layout.unpack_entries(self.directory[begin:end])
        return entries.offset.astype(np.int64), true_lengths(entries, self.large, begin)


def true_lengths(entries: layout.Entries, large: Words, begin: int) -> Numbers:
    """Lengths of the samples from index ``begin`` on, those of large ones from ``large``, [n, 2] by index.

    Raises InvalidFile where ``large`` does not have them.
    """
    return _with_large(entries.length, large, np.arange(begin, begin + len(entries.length)))


def lengths_of(entries: Words, large: Words, indices: Numbers) -> Numbers:
    """True lengths of any samples of one store. entries: [samples, 2], large: [large samples, 2]

    Raises InvalidFile where ``large`` does not have them.
    """
    return _with_large(layout.unpack_entries(entries[indices]).length, large, indices)


def _with_large(short: Words, large: Words, indices: Numbers) -> Numbers:
    lengths = short.astype(np.int64)
    long = np.flatnonzero(short == layout.LARGE_LENGTH)
    if len(long):
        wanted = indices[long].astype(np.uint64)
        places = np.searchsorted(large[:, 0], wanted)
        if int(places.max()) >= len(large) or not np.array_equal(large[places, 0], wanted):
            raise InvalidFile(f"{layout.LARGE} does not list all large samples. {AGAIN}")
        lengths[long] = large[places, 1].astype(np.int64)
    return lengths


def check_files(directory: Directory) -> dict[str, str]:
    """What is wrong with the store's files, by name, with all data files under "": presence and sizes, and
    the checksums of all but data files."""
    folder, manifest = directory.folder, directory.manifest
    wrong = {name: problem for name in manifest.files if (problem := _file_problem(folder, manifest, name))}
    sizes = [
        problem
        for number, node in enumerate(manifest.nodes)
        if (problem := _size_problem(folder / layout.data_file(number), node.chunks * manifest.chunk_bytes))
    ]
    return {**wrong, "": "; ".join(sizes)} if sizes else wrong


def _file_problem(folder: Path, manifest: StoreManifest, name: str) -> str | None:
    listed = manifest.files[name]
    if problem := _size_problem(folder / name, listed.size_bytes):
        return problem
    crc = 0
    try:
        with open(open_regular(folder / name), "rb", buffering=0) as file:
            while block := file.read(READ_BYTES):
                crc = crc32c(block, crc)
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    except InvalidFile as error:
        return str(error)
    return None if crc == listed.crc32c else f"{name} is damaged: its checksum is wrong"


def _size_problem(path: Path, expected_bytes: int) -> str | None:
    try:
        size_bytes = os.path.getsize(path)
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    if size_bytes == expected_bytes:
        return None
    return f"{path.name} has {size_bytes} bytes instead of {expected_bytes}"


def check_entries(directory: Directory) -> tuple[Extents | None, list[str]]:
    """Where all samples lie, or None and why that cannot be known; and what else is wrong with chunks.bin.

    In each node, samples have to lie back to back, in the order of the directory.
    """
    manifest, large = directory.manifest, directory.large
    if problem := _large_problem(large, manifest.samples):
        return None, [problem]
    walk = _Walk(manifest)
    for begin in range(0, manifest.samples, ENTRIES_AT_ONCE):
        entries = layout.unpack_entries(directory.entries[begin : begin + ENTRIES_AT_ONCE])
        wrong = walk.take(begin, entries, large)
        if wrong is not None:
            return None, [f"{layout.DIRECTORY}: the entry of sample {wrong} does not follow the one before"]
    found = list(zip(walk.counts.tolist(), walk.ends.tolist(), strict=True))
    if found != [(node.samples, node.size_bytes) for node in manifest.nodes]:
        return None, [f"{layout.DIRECTORY} does not fill the data files as {layout.MANIFEST} says"]
    extents = Extents(directory.entries, large, walk.firsts)
    return extents, _chunk_problems(directory, walk.firsts)


class _Walk:
    """Goes through the directory, a block of entries at a time.

    counts, ends   [nodes]: samples, and the end of the last one
    firsts         [chunks + 1], as in Extents
    """

    def __init__(self, manifest: StoreManifest) -> None:
        self._chunk_bytes = manifest.chunk_bytes
        self._chunks = np.array([node.chunks for node in manifest.nodes], np.int64)
        self._chunks_before = np.cumsum(self._chunks) - self._chunks
        self._node = self._end = self._filled = 0
        self.counts = np.zeros(len(manifest.nodes), np.int64)
        self.ends = np.zeros(len(manifest.nodes), np.int64)
        self.firsts = np.full(manifest.chunks + 1, manifest.samples, np.int64)

    def take(self, begin: int, entries: layout.Entries, large: Words) -> int | None:
        """The entries from index ``begin`` on. The first one that is wrong, if any is."""
        nodes, offsets = entries.node.astype(np.int64), entries.offset.astype(np.int64)
        wrong = np.flatnonzero(_listed(large, begin, len(nodes)) != (entries.length == layout.LARGE_LENGTH))
        if len(wrong):
            return begin + int(wrong[0])
        ends = offsets + true_lengths(entries, large, begin)
        before = np.concatenate(([self._node], nodes[:-1]))
        expected = np.where(nodes == before, np.concatenate(([self._end], ends[:-1])), 0)
        right = (nodes >= before) & (nodes < len(self._chunks)) & (offsets == expected)
        wrong = np.flatnonzero(~right | (entries.present != 0))
        if len(wrong):
            return begin + int(wrong[0])
        self._node, self._end = int(nodes[-1]), int(ends[-1])
        self.counts += np.bincount(nodes, minlength=len(self.counts))
        np.maximum.at(self.ends, nodes, ends)
        chunks = np.minimum(offsets // self._chunk_bytes, self._chunks[nodes] - 1)
        chunks += self._chunks_before[nodes]
        upto = int(chunks[-1]) + 1
        if upto > self._filled:
            self.firsts[self._filled : upto] = begin + np.searchsorted(chunks, np.arange(self._filled, upto))
            self._filled = upto
        return None


def _large_problem(large: Words, samples: int) -> str | None:
    indices, lengths = large[:, 0], large[:, 1]
    ascending = np.all(indices[1:] > indices[:-1]) and (not len(indices) or int(indices[-1]) < samples)
    possible = np.all((lengths >= layout.LARGE_LENGTH) & (lengths <= layout.NODE_BYTES))
    return None if ascending and possible else f"{layout.LARGE} contradicts itself"


def _listed(large: Words, begin: int, count: int) -> npt.NDArray[np.bool_]:
    listed = np.zeros(count, np.bool_)
    low, high = np.searchsorted(large[:, 0], (begin, begin + count))
    listed[large[low:high, 0].astype(np.int64) - begin] = True
    return listed


def _chunk_problems(directory: Directory, firsts: Numbers) -> list[str]:
    records = directory.chunks
    wrong = np.flatnonzero((records["first"] != firsts[:-1].astype(np.uint64)) | (records["reserved"] != 0))
    if not len(wrong):
        return []
    return [
        f"{layout.CHUNKS} is wrong about which samples begin in {len(wrong)} chunks, the first {wrong[0]}"
    ]


def check_labels(directory: Directory) -> list[str]:
    """Labels count the manifest's classes; -1 is none."""
    labels, classes = directory.labels, len(directory.manifest.classes)
    if labels is None:
        return []
    wrong = np.flatnonzero((labels < -1) | (labels >= classes))
    if not len(wrong):
        return []
    return [f"{layout.LABELS} gives sample {wrong[0]} the class {labels[wrong[0]]} of {classes}"]
