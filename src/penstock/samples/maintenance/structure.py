"""Whether the small files of a store agree with its manifest, and with each other."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidFile
from penstock.samples.format import layout
from penstock.samples.format.manifest import StoreManifest
from penstock.samples.reader.directory import Directory
from penstock.samples.reader.places import Place

Words = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]

ENTRIES_AT_ONCE = 1 << 18


class Extents(NamedTuple):
    """Where samples lie, once the directory is known to agree with itself.

    firsts      [chunks + 1]: the first sample of each chunk, then the number of samples
    """

    directory: Directory
    firsts: Numbers

    def of(self, begin: int, end: int) -> tuple[Numbers, Numbers]:
        """Offsets and true lengths of samples ``begin`` to ``end``, which lie in one data file."""
        entries, lengths = self.directory.located(slice(begin, end))
        return entries.offset.astype(np.int64), lengths


def check_files(directory: Directory) -> dict[str, str]:
    """What is wrong with the store's files, by name, with all data files under "": presence and sizes, and
    the checksums of all but data files."""
    place, manifest = directory.place, directory.manifest
    chunk_bytes = manifest.chunk_bytes
    wrong = {name: problem for name in manifest.files if (problem := _file_problem(place, manifest, name))}
    sizes = [
        problem
        for number, file in enumerate(manifest.data_files)
        if (problem := _size_problem(place, layout.data_file_name(number), file.chunks * chunk_bytes))
    ]
    return {**wrong, "": "; ".join(sizes)} if sizes else wrong


def _file_problem(place: Place, manifest: StoreManifest, name: str) -> str | None:
    listed = manifest.files[name]
    if problem := _size_problem(place, name, listed.size_bytes):
        return problem
    try:
        crc = place.sum_of(name)
    except OSError as error:
        return f"{name} cannot be read: {error.strerror or error}"
    except InvalidFile as error:
        return str(error)
    return None if crc == listed.crc32c else f"{name} is damaged: its checksum is wrong"


def _size_problem(place: Place, name: str, expected_bytes: int) -> str | None:
    try:
        size_bytes = place.size_bytes(name)
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror or error}"
    if size_bytes == expected_bytes:
        return None
    return f"{name} has {size_bytes} bytes instead of {expected_bytes}"


def check_entries(directory: Directory) -> tuple[Extents | None, list[str]]:
    """Where all samples lie, or None and why that cannot be known; and what else is wrong with chunks.bin.

    In each data file, samples have to lie back to back, in the order of the directory.
    """
    manifest, large = directory.manifest, directory.large
    if problem := _large_problem(large, manifest.samples):
        return None, [problem]
    walk = _Walk(directory)
    for begin in range(0, manifest.samples, ENTRIES_AT_ONCE):
        wrong = walk.take(begin)
        if wrong is not None:
            return None, [f"{layout.DIRECTORY}: the entry of sample {wrong} does not follow the one before"]
    found = list(zip(walk.counts.tolist(), walk.ends.tolist(), strict=True))
    if found != [(data_file.samples, data_file.size_bytes) for data_file in manifest.data_files]:
        return None, [f"{layout.DIRECTORY} does not fill the data files as {layout.MANIFEST} says"]
    extents = Extents(directory, walk.firsts)
    return extents, _chunk_problems(directory, walk.firsts)


class _Walk:
    """Goes through the directory, a block of entries at a time.

    counts, ends   [data files]: samples, and the end of the last one
    firsts         [chunks + 1], as in Extents
    """

    def __init__(self, directory: Directory) -> None:
        self._directory, manifest = directory, directory.manifest
        self._chunk_bytes = manifest.chunk_bytes
        self._chunks = np.array([data_file.chunks for data_file in manifest.data_files], np.int64)
        self._chunks_before = np.cumsum(self._chunks) - self._chunks
        self._data_file = self._end = self._filled = 0
        self.counts = np.zeros(len(manifest.data_files), np.int64)
        self.ends = np.zeros(len(manifest.data_files), np.int64)
        self.firsts = np.full(manifest.chunks + 1, manifest.samples, np.int64)

    def take(self, begin: int) -> int | None:
        """A block of entries from index ``begin`` on. The first one that is wrong, if any is."""
        block = slice(begin, begin + ENTRIES_AT_ONCE)
        short = layout.unpack_entries(self._directory.entries[block]).length
        listed = _listed(self._directory.large, begin, len(short))
        wrong = np.flatnonzero(listed != (short == layout.LARGE_LENGTH))
        if len(wrong):
            return begin + int(wrong[0])
        entries, lengths = self._directory.located(block)
        data_files, offsets = entries.data_file.astype(np.int64), entries.offset.astype(np.int64)
        ends = offsets + lengths
        before = np.concatenate(([self._data_file], data_files[:-1]))
        expected = np.where(data_files == before, np.concatenate(([self._end], ends[:-1])), 0)
        right = (data_files >= before) & (data_files < len(self._chunks)) & (offsets == expected)
        wrong = np.flatnonzero(~right | (entries.present != 0))
        if len(wrong):
            return begin + int(wrong[0])
        self._data_file, self._end = int(data_files[-1]), int(ends[-1])
        self.counts += np.bincount(data_files, minlength=len(self.counts))
        np.maximum.at(self.ends, data_files, ends)
        chunks = np.minimum(offsets // self._chunk_bytes, self._chunks[data_files] - 1)
        chunks += self._chunks_before[data_files]
        upto = int(chunks[-1]) + 1
        if upto > self._filled:
            self.firsts[self._filled : upto] = begin + np.searchsorted(chunks, np.arange(self._filled, upto))
            self._filled = upto
        return None


def _large_problem(large: Words, samples: int) -> str | None:
    indices, lengths = large[:, 0], large[:, 1]
    ascending = np.all(indices[1:] > indices[:-1]) and (not len(indices) or int(indices[-1]) < samples)
    possible = np.all((lengths >= layout.LARGE_LENGTH) & (lengths <= layout.DATA_FILE_BYTES))
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
