"""Which samples mounted stores have: their directory, names and classes, without their bytes.

Nothing is parsed: what a program reads of the directory of 50 million samples is the file's own pages,
which all processes of the machine share.
"""

from __future__ import annotations

import hashlib
import operator
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias, cast, overload

import numpy as np
import numpy.typing as npt

from penstock import _native
from penstock.errors import InvalidArgument, InvalidFile
from penstock.samples import layout
from penstock.samples.encoding import Decoder
from penstock.samples.manifest import AGAIN, Field, StoreManifest
from penstock.samples.places import Bytes, PathLike, Place, check_sums, places_of

if TYPE_CHECKING:
    from penstock.samples.objects.cache import CacheOptions

_NAME_FILES = (layout.NAMES, layout.ANCHORS, layout.LOOKUP)  # mapped together, when names are asked for


class Directory:
    """What a store says of its samples.

    place     where its data files are
    manifest  as read

    Files are mapped, or read, when they are first asked for.
    """

    def __init__(self, place: Place, verify: bool = True) -> None:
        """Of the store at ``place``; see `load`. A file may be missing."""
        self.place, self.manifest, self._verify = place, place.manifest(), verify
        self._loaded: dict[str, Bytes] = {}
        self._names: _native.SampleNames | None = None
        _check_manifest(self.manifest, place.path_of(layout.MANIFEST))

    @classmethod
    def load(cls, place: Place, verify: bool = True) -> Directory:
        """The directory of the store at ``place``.

        verify  compare the files' checksums: all at once, except those that only names need, at their
                first use

        Raises SampleError where there is no store, or one that cannot be read; InvalidFile where it is
        damaged.
        """
        directory = cls(place, verify)
        directory._load([name for name in directory.manifest.files if name not in _NAME_FILES])
        return directory

    def file(self, name: str) -> Bytes:
        """The bytes of a file; KeyError where the manifest does not name it."""
        if name not in self._loaded:
            self._load(_NAME_FILES if name in _NAME_FILES else [name])
        return self._loaded[name]

    def _load(self, names: Sequence[str]) -> None:
        """Load files, and verify them together. Two threads may both do it: a lock could outlive a fork."""
        listed = self.manifest.files
        fresh = {name: self.place.load(name, listed[name].size_bytes, self._verify) for name in names}
        if self._verify:
            check_sums(self.place, self.manifest, fresh)
        self._loaded |= fresh

    @cached_property
    def entries(self) -> npt.NDArray[np.uint64]:
        """[samples, 2]: the directory entries, in stored order."""
        return self.file(layout.DIRECTORY).view("<u8").reshape(-1, 2)

    @cached_property
    def sums(self) -> npt.NDArray[np.uint32]:
        """[samples]: CRC-32C of each sample."""
        return self.file(layout.SUMS).view("<u4")

    @cached_property
    def chunks(self) -> npt.NDArray[np.void]:
        """[chunks] of layout.CHUNK_RECORD."""
        return self.file(layout.CHUNKS).view(layout.CHUNK_RECORD)

    @cached_property
    def large(self) -> npt.NDArray[np.uint64]:
        """[large samples, 2]: index and length."""
        is_listed = layout.LARGE in self.manifest.files
        return (self.file(layout.LARGE) if is_listed else np.empty(0, np.uint8)).view("<u8").reshape(-1, 2)

    def located(self, where: slice | npt.NDArray[np.int64]) -> tuple[layout.Entries, npt.NDArray[np.int64]]:
        """The entries of samples, and their true lengths [n] int64.

        where   their indices in this store, or from which one to which

        Raises InvalidFile where large.bin does not have the length of a large sample.
        """
        entries = layout.unpack_entries(self.entries[where])
        lengths = entries.length.astype(np.int64)
        long = np.flatnonzero(entries.length == layout.LARGE_LENGTH)
        if len(long):
            wanted = (long + where.start if isinstance(where, slice) else where[long]).astype(np.uint64)
            places = np.searchsorted(self.large[:, 0], wanted)
            if int(places.max()) >= len(self.large) or not np.array_equal(self.large[places, 0], wanted):
                raise InvalidFile(f"{layout.LARGE} does not list all large samples. {AGAIN}")
            lengths[long] = self.large[places, 1].astype(np.int64)
        return entries, lengths

    @cached_property
    def labels(self) -> npt.NDArray[np.int32] | None:
        """[samples]: each one's class, -1 for none. None where no sample has one."""
        return self.file(layout.LABELS).view("<i4") if layout.LABELS in self.manifest.files else None

    @cached_property
    def firsts(self) -> npt.NDArray[np.uint64]:
        """[chunks + 1]: the first sample of each chunk, then how many samples there are.

        Raises InvalidFile where chunks.bin contradicts itself or the manifest.
        """
        firsts = np.append(self.chunks["first"], np.uint64(self.manifest.samples))
        chunks_before = np.cumsum([0] + [data_file.chunks for data_file in self.manifest.data_files])
        samples_before = np.cumsum([0] + [data_file.samples for data_file in self.manifest.data_files])
        if np.any(firsts[1:] < firsts[:-1]) or np.any(firsts[chunks_before] != samples_before):
            raise InvalidFile(f"{self.place.path_of(layout.CHUNKS)} contradicts {layout.MANIFEST}. {AGAIN}")
        return firsts

    @property
    def names(self) -> _native.SampleNames:
        """Finds names and gives them. Raises SampleError, InvalidFile."""
        # No cached_property: until Python 3.12 it holds a lock meanwhile, which a forked child never gets.
        if self._names is None:
            names, anchors, lookup = map(self.file, _NAME_FILES)
            self._names = _native.SampleNames(self.entries, names, anchors.view("<u8"), lookup)
        return self._names


def load_all(
    path: PathLike | Sequence[PathLike],
    verify: bool = True,
    timeout_s: float = 60.0,
    cache: CacheOptions | None = None,
) -> list[Directory]:
    """The directories of the stores that ``path`` stands for: see `places_of` and `Directory.load`."""
    return [Directory.load(place, verify) for place in places_of(path, timeout_s, cache)]


def _check_manifest(manifest: StoreManifest, path: str) -> None:
    """Raises InvalidFile where its numbers cannot all be true, so that nothing else need doubt them."""
    data_files, chunk_bytes = manifest.data_files, manifest.chunk_bytes
    sound = (
        layout.SMALLEST_CHUNK_BYTES <= chunk_bytes <= layout.LARGEST_CHUNK_BYTES
        and chunk_bytes % layout.SMALLEST_CHUNK_BYTES == 0
        and len(data_files) <= layout.MOST_DATA_FILES
        and all(file.samples >= 0 and 0 <= file.size_bytes <= layout.DATA_FILE_BYTES for file in data_files)
        and all(file.chunks == layout.chunks_of(file.size_bytes, chunk_bytes) for file in data_files)
        and sum(file.samples for file in data_files) == manifest.samples
        and 0 <= manifest.partition < manifest.partitions
    )
    if not sound:
        raise InvalidFile(f"{path} contradicts itself: no packer wrote it. {AGAIN}")
    for name in manifest.files.keys() - {*layout.FILES}:
        raise InvalidFile(f"{path} names {name!r}, which is not a file of a store. {AGAIN}")
    samples, any_size = manifest.samples, 1 << 62
    buckets = (1 << layout.lookup_bits(samples)) + 1
    exact = {
        layout.DIRECTORY: 16 * samples,
        layout.SUMS: 4 * samples,
        layout.CHUNKS: 16 * manifest.chunks,
        layout.ANCHORS: 8 * -(-samples // layout.ANCHOR_NAMES),
        layout.LOOKUP: 8 * samples + buckets * (4 if samples < 1 << 32 else 8),
        layout.LABELS: 4 * samples,
    }
    wanted = {name: (size_bytes, size_bytes) for name, size_bytes in exact.items()}
    wanted |= {layout.NAMES: (2 * samples, any_size), layout.LARGE: (0, 16 * samples)}
    for name, (least, most) in wanted.items():
        if name not in manifest.files:
            if name not in (layout.LARGE, layout.LABELS):
                raise InvalidFile(f"{path} does not name {name}, which every store has. {AGAIN}")
            continue
        size_bytes = manifest.files[name].size_bytes
        if not least <= size_bytes <= most or (name == layout.LARGE and size_bytes % 16):
            needed = least if size_bytes < least else most
            raise InvalidFile(
                f"{path} gives {name} {size_bytes} bytes; {samples} samples need {needed}. {AGAIN}"
            )


Indices = npt.NDArray[np.int64]

_BLOCK_NAMES = 4096  # that iteration takes at a time
_NO_NAME = bytes(layout.LARGEST_NAME_BYTES + 1)


class Names(Sequence[str]):
    """The names of all samples, in stored order. Nothing is read before it is asked for.

    Where partitions of a mount have a name in common, it finds the sample of the first of them.
    """

    def __init__(self, directories: Sequence[Directory]) -> None:
        self._directories = directories
        self._ends = list(accumulate(directory.manifest.samples for directory in directories))

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self._name(i) for i in range(len(self))[index]]
        return self._name(range(len(self))[index])

    def __iter__(self) -> Iterator[str]:
        for directory in self._directories:
            samples = directory.manifest.samples
            for begin in range(0, samples, _BLOCK_NAMES):
                with _checked(directory) as names:
                    block = names.names(begin, min(begin + _BLOCK_NAMES, samples))
                yield from map(layout.text_of, block)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.find(name) >= 0

    def index(self, name: str, start: int = 0, stop: int | None = None) -> int:
        """The index of the sample of that name. Raises ValueError where there is none, as a list does."""
        found = self.find(name)
        if found not in range(len(self))[start:stop]:
            raise InvalidArgument(f"no sample has the name {name!r}")
        return found

    def find(self, name: str) -> int:
        """The index of the sample of that name, -1 where there is none."""
        key, begin = _bytes(name), 0
        for directory in self._directories:
            with _checked(directory) as names:
                found = names.find(key)
            if found >= 0:
                return begin + found
            begin += directory.manifest.samples
        return -1

    def find_many(self, names: Sequence[str]) -> Indices:
        """[names]: `find` of each. Raises TypeError where one is no text."""
        joined, ends = _joined(names)
        found = np.full(len(ends), -1, np.int64)
        begin = 0
        for directory, end in zip(self._directories, self._ends, strict=True):
            with _checked(directory) as table:
                here = table.find_many(joined, ends)
            if len(self._directories) == 1:
                return here
            fresh = (found < 0) & (here >= 0)
            found[fresh] = here[fresh] + begin
            begin = end
        return found

    def many(self, indices: Indices) -> list[str]:
        """The names of these samples."""
        if len(self._directories) > 1:
            return [self._name(index) for index in indices.tolist()]
        with _checked(self._directories[0]) as names:
            return [layout.text_of(names.name(index)) for index in indices.tolist()]

    def _name(self, index: int) -> str:
        partition = bisect_right(self._ends, index)
        with _checked(self._directories[partition]) as names:
            return layout.text_of(names.name(index - (self._ends[partition - 1] if partition else 0)))


def _joined(names: Sequence[str]) -> tuple[npt.NDArray[np.uint8], Indices]:
    """The names' bytes, back to back, and where each ends."""
    text = "".join(names)
    if text.isascii():
        data, lengths = text.encode(), map(len, names)
    else:
        each = [_bytes(name) for name in names]
        data, lengths = b"".join(each), map(len, each)
    return np.frombuffer(data, np.uint8), np.cumsum(np.fromiter(lengths, np.int64, len(names)))


def _bytes(name: str) -> bytes:
    """Of a name; of one that no sample can have, such as half of a surrogate pair, a name that none has."""
    try:
        return layout.bytes_of(name)
    except UnicodeEncodeError:
        return _NO_NAME


@contextmanager
def _checked(directory: Directory) -> Iterator[_native.SampleNames]:
    """The names of a store; InvalidFile where they turn out to be damaged."""
    try:
        yield directory.names
    except InvalidFile:
        raise
    except ValueError as error:
        raise InvalidFile(f"{directory.place.path_of(layout.NAMES)} is damaged: {error}. {AGAIN}") from error


Labels = npt.NDArray[np.int32]
Key: TypeAlias = "str | int | np.integer[Any]"
Keys: TypeAlias = "Sequence[Key] | Sequence[str] | npt.NDArray[np.integer[Any]]"


class Catalog:
    """The samples of all partitions, counted through.

    chunk_bytes  the largest of its partitions'
    classes      what labels count; empty where samples have none
    encoding     of samples: "raw", "record" or "msgpack"
    fields       of "record"
    decoder      for that encoding
    directories  of its partitions, and their manifests
    identity     32 hexadecimal digits: the same for the same samples, names and order
    """

    def __init__(self, directories: Sequence[Directory]) -> None:
        """Raises InvalidArgument where the partitions do not go together."""
        self.directories = tuple(directories)
        self.manifests: tuple[StoreManifest, ...] = tuple(each.manifest for each in directories)
        self.classes: tuple[str, ...] = self._same("classes")
        self.encoding: str = self._same("encoding")
        self.fields: tuple[Field, ...] = self._same("fields")
        self.decoder = Decoder(self.encoding, self.fields)
        self.chunk_bytes = max(manifest.chunk_bytes for manifest in self.manifests)
        self.identity = identity_of(self.manifests)
        self._names = Names(self.directories)
        self._samples = len(self._names)

    def __len__(self) -> int:
        return self._samples

    def names(self) -> Names:
        """The samples' names, in stored order: a sequence that reads no more than it is asked for."""
        return self._names

    def name(self, index: int) -> str:
        """The name of a sample."""
        return self._names[self.index(index)]

    def index(self, key: Key) -> int:
        """The index of the sample of that name, or of that index. InvalidArgument where there is none.

        Where partitions have a name in common, it is the first one's.
        """
        if isinstance(key, str):
            found = self._names.find(key)
            if found < 0:
                raise InvalidArgument(
                    f"no sample has the name {key!r}. `penstock samples ls` lists the names"
                )
            return found
        try:
            index = operator.index(key)
        except TypeError:
            raise InvalidArgument(f"{key!r} is not a sample: give a name, or an index") from None
        if not 0 <= index < self._samples:
            raise InvalidArgument(f"there is no sample {index}: there are {self._samples}, from 0 on")
        return index

    def indices(self, keys: Keys) -> Indices:
        """[n] int64: `index` of many names or indices, quicker."""
        if isinstance(keys, str | bytes):
            raise InvalidArgument(f"{keys!r} is one name: give a list of names, or of indices")
        if isinstance(keys, np.ndarray):
            return self._checked(keys)
        try:
            found = self._names.find_many(cast("Sequence[str]", keys))
        except TypeError:  # not all are names
            if any(isinstance(key, str) for key in keys):
                return np.array([self.index(key) for key in keys], np.int64)
            return self._checked(np.asarray(keys))
        if (lacking := np.flatnonzero(found < 0)).size:
            name = keys[int(lacking[0])]
            raise InvalidArgument(f"{lacking.size} of {len(keys)} names are no sample's, such as {name!r}")
        return found

    def __contains__(self, key: object) -> bool:
        if isinstance(key, str):
            return key in self._names
        return isinstance(key, int | np.integer) and 0 <= int(key) < self._samples

    @cached_property
    def labels(self) -> Labels | None:
        """[samples] int32: the class of each, -1 for none. None where the store has no labels."""
        labels = [directory.labels for directory in self.directories]
        if len(labels) == 1:
            return labels[0]
        if all(each is None for each in labels):
            return None
        absent = (np.full(manifest.samples, -1, np.int32) for manifest in self.manifests)
        return np.concatenate([a if b is None else b for a, b in zip(absent, labels, strict=True)])

    @cached_property
    def firsts(self) -> npt.NDArray[np.uint64]:
        """[chunks + 1]: the first sample of each chunk, over all partitions, then the number of samples."""
        firsts, begin = [], 0
        for directory in self.directories:
            firsts.append(directory.firsts[:-1] + np.uint64(begin))
            begin += directory.manifest.samples
        return np.append(np.concatenate(firsts), np.uint64(begin))

    def sizes(self, keys: Keys) -> Indices:
        """[n] int64: how many bytes each of the samples has."""
        indices = self.indices(keys)
        sizes = np.zeros(len(indices), np.int64)
        for directory, here, mine in self.by_directory(indices):
            sizes[here] = directory.located(mine)[1]
        return sizes

    def by_directory(self, indices: Indices) -> Iterator[tuple[Directory, npt.NDArray[np.bool_], Indices]]:
        """Each partition's directory, which of the samples [n] it has, and their indices in it."""
        begin = 0
        for directory in self.directories:
            end = begin + directory.manifest.samples
            here = (begin <= indices) & (indices < end)
            yield directory, here, indices[here] - begin
            begin = end

    def labels_of(self, indices: Indices) -> Labels | None:
        """[n] int32: the class of each; None where the store has no labels."""
        return None if self.labels is None else self.labels[indices]

    def names_of(self, indices: Indices) -> list[str]:
        """The name of each."""
        return self._names.many(indices)

    def _checked(self, indices: npt.NDArray[Any]) -> Indices:
        if indices.ndim != 1 or (indices.size and indices.dtype.kind not in "iu"):
            raise InvalidArgument(
                f"indices of shape {indices.shape} and dtype {indices.dtype}: give [n] integers"
            )
        checked = np.array(indices)  # a copy: the caller may change its array while samples are read
        least, most = (int(checked.min()), int(checked.max())) if checked.size else (0, -1)
        if least < 0 or most >= self._samples:
            raise InvalidArgument(
                f"there is no sample {least if least < 0 else most}: there are {self._samples}, from 0 on"
            )
        return checked.astype(np.int64, copy=False)

    def _same(self, field: str) -> Any:
        """What all partitions say of themselves. Raises InvalidArgument where they differ."""
        first, value = self.directories[0], getattr(self.manifests[0], field)
        for directory in self.directories:
            if getattr(directory.manifest, field) != value:
                raise InvalidArgument(
                    f"{first.place} and {directory.place} cannot be mounted together: their {field} differ. "
                    "Mount them one by one, or pack them alike"
                )
        return value


def identity_of(manifests: Sequence[StoreManifest]) -> str:
    if len(manifests) == 1:
        return manifests[0].identity
    text = " ".join(manifest.identity for manifest in manifests)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
