"""Which samples mounted stores have: their names, classes and places, without their bytes."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidArgument
from penstock.samples.format.encoding import Decoder
from penstock.samples.format.manifest import Field, StoreManifest
from penstock.samples.reader.batch import Labels
from penstock.samples.reader.directory import Directory
from penstock.samples.reader.names import Indices, Names

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
        sizes = [manifest.samples for manifest in self.manifests]
        absent = (np.full(size, -1, np.int32) for size in sizes)
        return np.concatenate([a if b is None else b for a, b in zip(absent, labels, strict=True)])

    @cached_property
    def firsts(self) -> npt.NDArray[np.uint64]:
        """[chunks + 1]: the first sample of each chunk, over all partitions, then the number of samples."""
        firsts, begin = [], 0
        for directory in self.directories:
            firsts.append(directory.firsts[:-1] + np.uint64(begin))
            begin += directory.manifest.samples
        return np.append(np.concatenate(firsts), np.uint64(begin))

    def chunk_of(self, indices: Keys) -> Indices:
        """[n] int64: in which chunk, counted over all partitions, each of the samples begins."""
        chunks = np.searchsorted(self.firsts[:-1], self.indices(indices).astype(np.uint64), side="right") - 1
        return chunks.astype(np.int64)

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
        values = [getattr(manifest, field) for manifest in self.manifests]
        for directory, value in zip(self.directories, values, strict=True):
            if value != values[0]:
                raise InvalidArgument(
                    f"{self.directories[0].place} and {directory.place} cannot be mounted together: their "
                    f"{field} differ. Mount them one by one, or pack them alike"
                )
        return values[0]


def identity_of(manifests: Sequence[StoreManifest]) -> str:
    if len(manifests) == 1:
        return manifests[0].identity
    text = " ".join(manifest.identity for manifest in manifests)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
