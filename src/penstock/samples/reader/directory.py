"""The small files of one store, in memory and verified.

Nothing is parsed: what a program reads of the directory of 50 million samples is the file's own pages,
which all processes of the machine share.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from penstock import _native
from penstock.errors import InvalidFile
from penstock.samples.format.layout import (
    ANCHOR_NAMES,
    ANCHORS,
    CHUNK_RECORD,
    CHUNKS,
    DATA_FILE_BYTES,
    DIRECTORY,
    LABELS,
    LARGE,
    LARGE_LENGTH,
    LARGEST_CHUNK_BYTES,
    LOOKUP,
    MANIFEST,
    MOST_DATA_FILES,
    NAMES,
    SMALLEST_CHUNK_BYTES,
    SUMS,
    Entries,
    chunks_of,
    lookup_bits,
    lookup_start_dtype,
    unpack_entries,
)
from penstock.samples.format.manifest import AGAIN, StoreManifest
from penstock.samples.reader.mapping import LoadedFiles
from penstock.samples.reader.places import PathLike, Place, place_of

_FILES = {DIRECTORY, SUMS, CHUNKS, NAMES, ANCHORS, LOOKUP, LARGE, LABELS}
_NAME_FILES = (NAMES, ANCHORS, LOOKUP)  # mapped together, when names are asked for


@dataclass(frozen=True, eq=False)
class Directory:
    """What a store says of its samples.

    place     where its data files are
    manifest  as read
    files     the bytes of each file that the manifest names; loaded at first use
    """

    place: Place
    manifest: StoreManifest
    files: LoadedFiles

    def __post_init__(self) -> None:
        _check_manifest(self.manifest, self.place.path_of(MANIFEST))

    @classmethod
    def load(cls, place: Place | PathLike, verify: bool = True) -> Directory:
        """The directory of the store at ``place``, or at that path or URL.

        verify  compare the files' checksums: all at once, except those that only names need, at their
                first use

        Raises SampleError where there is no store, or one that cannot be read; InvalidFile where it is
        damaged.
        """
        directory = cls.open(place, verify)
        directory.files.load([name for name in directory.files if name not in _NAME_FILES])
        return directory

    @classmethod
    def open(cls, place: Place | PathLike, verify: bool) -> Directory:
        """The same, of which nothing is loaded yet: a file may be missing."""
        if isinstance(place, str | os.PathLike):
            place = place_of(place)
        manifest = place.manifest()
        return cls(place, manifest, LoadedFiles(place, manifest, verify, together=_NAME_FILES))

    @cached_property
    def entries(self) -> npt.NDArray[np.uint64]:
        """[samples, 2]: the directory entries, in stored order."""
        return self.files[DIRECTORY].view("<u8").reshape(-1, 2)

    @cached_property
    def sums(self) -> npt.NDArray[np.uint32]:
        """[samples]: CRC-32C of each sample."""
        return self.files[SUMS].view("<u4")

    @cached_property
    def chunks(self) -> npt.NDArray[np.void]:
        """[chunks] of CHUNK_RECORD."""
        return self.files[CHUNKS].view(CHUNK_RECORD)

    @cached_property
    def large(self) -> npt.NDArray[np.uint64]:
        """[large samples, 2]: index and length."""
        return self.files.get(LARGE, np.empty(0, np.uint8)).view("<u8").reshape(-1, 2)

    def located(self, where: slice | npt.NDArray[np.int64]) -> tuple[Entries, npt.NDArray[np.int64]]:
        """The entries of samples, and their true lengths [n] int64.

        where   their indices in this store, or from which one to which

        Raises InvalidFile where large.bin does not have the length of a large sample.
        """
        entries = unpack_entries(self.entries[where])
        lengths = entries.length.astype(np.int64)
        long = np.flatnonzero(entries.length == LARGE_LENGTH)
        if len(long):
            wanted = (long + where.start if isinstance(where, slice) else where[long]).astype(np.uint64)
            places = np.searchsorted(self.large[:, 0], wanted)
            if int(places.max()) >= len(self.large) or not np.array_equal(self.large[places, 0], wanted):
                raise InvalidFile(f"{LARGE} does not list all large samples. {AGAIN}")
            lengths[long] = self.large[places, 1].astype(np.int64)
        return entries, lengths

    @cached_property
    def labels(self) -> npt.NDArray[np.int32] | None:
        """[samples]: each one's class, -1 for none. None where no sample has one."""
        return self.files[LABELS].view("<i4") if LABELS in self.files else None

    @cached_property
    def firsts(self) -> npt.NDArray[np.uint64]:
        """[chunks + 1]: the first sample of each chunk, then how many samples there are.

        Raises InvalidFile where chunks.bin contradicts itself or the manifest.
        """
        firsts = np.append(self.chunks["first"], np.uint64(self.manifest.samples))
        chunks_before = np.cumsum([0] + [data_file.chunks for data_file in self.manifest.data_files])
        samples_before = np.cumsum([0] + [data_file.samples for data_file in self.manifest.data_files])
        if np.any(firsts[1:] < firsts[:-1]) or np.any(firsts[chunks_before] != samples_before):
            raise InvalidFile(f"{self.place.path_of(CHUNKS)} contradicts {MANIFEST}. {AGAIN}")
        return firsts

    @property
    def names(self) -> _native.SampleNames:
        """Finds names and gives them. Raises SampleError, InvalidFile."""
        # No cached_property: until Python 3.12 it holds a lock meanwhile, which a forked child never gets.
        names: _native.SampleNames | None = self.__dict__.get("_names")
        if names is None:
            anchors = self.files[ANCHORS].view("<u8")
            names = _native.SampleNames(self.entries, self.files[NAMES], anchors, self.files[LOOKUP])
            self.__dict__["_names"] = names
        return names


def _check_manifest(manifest: StoreManifest, path: str) -> None:
    """Raises InvalidFile where its numbers cannot all be true, so that nothing else need doubt them."""
    data_files, chunk_bytes = manifest.data_files, manifest.chunk_bytes
    sound = (
        SMALLEST_CHUNK_BYTES <= chunk_bytes <= LARGEST_CHUNK_BYTES
        and chunk_bytes % SMALLEST_CHUNK_BYTES == 0
        and len(data_files) <= MOST_DATA_FILES
        and all(file.samples >= 0 and 0 <= file.size_bytes <= DATA_FILE_BYTES for file in data_files)
        and all(file.chunks == chunks_of(file.size_bytes, chunk_bytes) for file in data_files)
        and sum(file.samples for file in data_files) == manifest.samples
        and 0 <= manifest.partition < manifest.partitions
    )
    if not sound:
        raise InvalidFile(f"{path} contradicts itself: no packer wrote it. {AGAIN}")
    for name in manifest.files.keys() - _FILES:
        raise InvalidFile(f"{path} names {name!r}, which is not a file of a store. {AGAIN}")
    for name, size_bytes in _sizes(manifest).items():
        if name not in manifest.files:
            raise InvalidFile(f"{path} does not name {name}, which every store has. {AGAIN}")
        if manifest.files[name].size_bytes != size_bytes:
            raise InvalidFile(
                f"{path} gives {name} {manifest.files[name].size_bytes} bytes; {manifest.samples} samples "
                f"need {size_bytes}. {AGAIN}"
            )


def _sizes(manifest: StoreManifest) -> dict[str, int]:
    """What the files must measure."""
    samples = manifest.samples
    sizes = {
        DIRECTORY: 16 * samples,
        SUMS: 4 * samples,
        CHUNKS: CHUNK_RECORD.itemsize * manifest.chunks,
        ANCHORS: 8 * -(-samples // ANCHOR_NAMES),
        LOOKUP: 8 * samples + ((1 << lookup_bits(samples)) + 1) * lookup_start_dtype(samples).itemsize,
    }
    files = manifest.files
    if NAMES not in files or files[NAMES].size_bytes < 2 * samples:
        sizes[NAMES] = 2 * samples  # at least
    if LARGE in files and (files[LARGE].size_bytes % 16 or files[LARGE].size_bytes > 16 * samples):
        sizes[LARGE] = 16 * samples  # at most
    if LABELS in files:
        sizes[LABELS] = 4 * samples
    return sizes
