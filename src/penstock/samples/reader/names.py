"""Names of samples, found and given when they are asked for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import overload

import numpy as np
import numpy.typing as npt

from penstock import _native
from penstock.errors import InvalidArgument, InvalidFile
from penstock.samples.format.layout import LARGEST_NAME_BYTES, NAMES, bytes_of, text_of
from penstock.samples.format.manifest import AGAIN
from penstock.samples.reader.directory import Directory

Indices = npt.NDArray[np.int64]

_BLOCK_NAMES = 4096  # that iteration takes at a time
_NO_NAME = bytes(LARGEST_NAME_BYTES + 1)


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
                yield from map(text_of, block)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.find(name) >= 0

    def index(self, name: str, start: int = 0, stop: int | None = None) -> int:
        """The index of the sample of that name. Raises ValueError where there is none, as a list does."""
        found = self.find(name)
        if found not in range(len(self))[start:stop]:
            raise InvalidArgument(f"no sample has the name {name!r}")
        return found

    def count(self, name: str) -> int:
        return int(name in self)

    def find(self, name: str) -> int:
        """The index of the sample of that name, -1 where there is none."""
        try:
            key = bytes_of(name)
        except UnicodeEncodeError:  # half of a surrogate pair: neither text nor a file's name
            return -1
        begin = 0
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
            return [text_of(names.name(index)) for index in indices.tolist()]

    def _name(self, index: int) -> str:
        partition = bisect_right(self._ends, index)
        with _checked(self._directories[partition]) as names:
            return text_of(names.name(index - (self._ends[partition - 1] if partition else 0)))


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
    try:
        return bytes_of(name)
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
        raise InvalidFile(f"{directory.place.path_of(NAMES)} is damaged: {error}. {AGAIN}") from error
