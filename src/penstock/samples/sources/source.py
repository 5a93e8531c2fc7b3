"""What packing reads samples from."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidArgument, SampleError
from penstock.samples.builder import Block
from penstock.samples.layout import bytes_of, text_of
from penstock.samples.manifest import Field

Item = TypeVar("Item")
One = TypeVar("One", bound="Source")
_READ_BYTES = 4 << 20
BLOCK_BYTES = 4 << 20  # of data in a Block, about
MOST_CLASSES = 1 << 16  # that are numbered without names
_NUMBER = re.compile(r"-1|\d{1,18}")


class RawSample(NamedTuple):
    """One sample, encoded.

    name    unique in the store; bytes of file names that are no UTF-8 as lone surrogates
    label   which of the source's classes; -1: none
    """

    name: str
    data: bytes | bytearray | memoryview
    label: int = -1


def as_block(sample: RawSample) -> Block:
    """A block of one sample."""
    name, data = np.frombuffer(bytes_of(sample.name), np.uint8), np.frombuffer(sample.data, np.uint8)
    ends = (np.array([len(each)], np.int64) for each in (name, data))
    return Block(name, next(ends), data, next(ends), np.array([sample.label], np.int32))


@dataclass(frozen=True)
class Source:
    """Samples in a fixed order: each iteration gives the same, so that packing can be resumed.

    description  for people
    encoding     of the samples, as in a store's manifest
    classes      what labels count
    fields       of "record"
    rank, world_size  this is partition ``rank`` of so many, which are disjoint, and together everything
    """

    description: str
    encoding: str
    classes: tuple[str, ...]
    fields: tuple[Field, ...] = field(default=(), kw_only=True)
    rank: int = field(default=0, kw_only=True)
    world_size: int = field(default=1, kw_only=True)

    def __iter__(self) -> Iterator[Any]:
        """RawSamples and Blocks."""
        raise NotImplementedError

    @property
    def samples(self) -> int | None:
        """How many, where known beforehand."""
        return None

    @property
    def size_bytes(self) -> int | None:
        """About how many bytes they have, where known beforehand."""
        return None

    def of_rank(self: One, rank: int, world_size: int) -> One:
        if not 0 <= rank < world_size:
            raise InvalidArgument(
                f"rank={rank} is none of world_size={world_size} processes: give 0 <= rank < world_size"
            )
        if self.world_size != 1:
            raise InvalidArgument("this source is a partition already: divide the whole source instead")
        return replace(self, rank=rank, world_size=world_size)

    def share(self, items: int) -> range:
        """The positions of this partition among ``items``, without gaps."""
        return range(items * self.rank // self.world_size, items * (self.rank + 1) // self.world_size)


@dataclass(frozen=True)
class Numbered(Source):
    """Samples that can be read from any number on. A partition is without gaps.

    whole, whole_bytes   samples of the whole source, and about how many bytes they have, where that is known
    """

    whole: int
    whole_bytes: int | None

    def names(self) -> Iterator[str]:
        """All names of this partition, with as little reading as can be: by default, numbers."""
        return map(str, self.mine)

    def after(self, samples: int) -> Iterator[Any]:
        """The samples behind the first so many."""
        raise NotImplementedError

    @property
    def mine(self) -> range:
        """The numbers of this partition's samples."""
        return self.share(self.whole)

    @property
    def samples(self) -> int:
        return len(self.mine)

    @property
    def size_bytes(self) -> int | None:
        return None if self.whole_bytes is None else self.whole_bytes * self.samples // max(self.whole, 1)

    def __iter__(self) -> Iterator[Any]:
        return self.after(0)


def parts_with(
    wanted: range, parts: Iterable[Item], count: Callable[[Item], int]
) -> Iterator[tuple[Item, int, int, int]]:
    """Those of ``parts``, which lie one after the other, that hold wanted samples.

    count   how many samples a part has

    Each with the number of its first sample, and from which of its samples up to which are wanted.
    """
    first = 0
    for part in parts:
        if first >= wanted.stop:
            return
        begin, end = max(wanted.start - first, 0), min(wanted.stop - first, count(part))
        if begin < end:
            yield part, first, begin, end
        first += count(part)


@dataclass(frozen=True)
class Sharded(Source):
    """The samples of several files. A partition has whole files, or every so many-th sample if they are few.

    shards   path and short name of each file
    read     what a file holds, from its path
    sample   makes a sample of what `read` gave: path and short name of the file, the number in it, and that
    """

    shards: tuple[tuple[str, str], ...]
    read: Callable[[str], Iterator[Any]]
    sample: Callable[[str, str, int, Any], RawSample]

    @property
    def size_bytes(self) -> int | None:
        shards, every = self._mine()
        if any(path.endswith("gz") for path, _ in shards):
            return None
        return sum(os.path.getsize(path) for path, _ in shards) // every

    def _mine(self) -> tuple[Sequence[tuple[str, str]], int]:
        """The shards to read, and that every so many-th of their samples is kept: all of enough shards."""
        if len(self.shards) < self.world_size:
            return self.shards, self.world_size
        mine = self.share(len(self.shards))
        return self.shards[mine.start : mine.stop], 1

    def __iter__(self) -> Iterator[RawSample]:
        shards, every = self._mine()
        position = 0
        for path, shard in shards:
            for number, item in enumerate(self.read(path)):
                if position % every == self.rank % every:
                    yield self.sample(path, shard, number, item)
                position += 1


def described(shards: Sequence[tuple[str, str]]) -> str:
    """The description of several files."""
    return printable(shards[0][1]) + (f" and {len(shards) - 1} more" if len(shards) > 1 else "")


def numbers(begin: int, end: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Names in decimal, from ``begin`` on, as a Block has them: names, name_ends."""
    texts = list(map(str, range(begin, end)))
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    return np.frombuffer("".join(texts).encode(), np.uint8), np.cumsum(lengths)


@contextlib.contextmanager
def unpacked(path: str) -> Iterator[tuple[io.BufferedIOBase, int | None]]:
    """The file and its size; of one that gzip packed what it holds, and None. Raises SampleError."""
    try:
        with open(path, "rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            if packed:
                with gzip.open(raw) as file:
                    yield file, None
            else:
                yield raw, os.fstat(raw.fileno()).st_size
    except SampleError:
        raise
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise SampleError(f"{path} is damaged or cut off: {error}") from error
    except OSError as error:
        raise SampleError(f"{path} cannot be read: {error.strerror or error}") from error


def read_up_to(read: Callable[[int], bytes], size_bytes: int) -> bytes:
    """So many bytes, or fewer at the end. Memory grows with what is there, not with what is asked for."""
    data = read(min(size_bytes, _READ_BYTES))
    if len(data) == size_bytes:
        return data
    pieces, left = [data], size_bytes - len(data)
    while left and (piece := read(min(left, _READ_BYTES))):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def printable(text: str) -> str:
    """The text where all of it is Unicode; otherwise with escapes: for people, not for opening files."""
    return text.encode("utf-8", "backslashreplace").decode()


class Labels:
    """How values become labels.

    classes   what labels count; a value is a class's name or its number, -1, or None
    """

    def __init__(self, classes: Sequence[str]) -> None:
        self.classes = tuple(classes)
        self._labels = {name: label for label, name in enumerate(self.classes)}

    @classmethod
    def of_values(cls, values: Iterable[Any]) -> Labels:
        """Numbers up to the largest value where all are numbers; otherwise the values, sorted."""
        texts = {label_text(value) for value in values if value is not None}
        if all(_NUMBER.fullmatch(text) for text in texts):
            largest = max(map(int, texts), default=-1)
            if largest >= MOST_CLASSES:
                raise InvalidArgument(
                    f"there is a label {largest}: labels count classes, up to {MOST_CLASSES}"
                )
            return cls([str(number) for number in range(largest + 1)])
        return cls(sorted(texts))

    def label(self, value: Any, name: str) -> int:
        """The label of a sample; InvalidArgument where it is of none of the classes."""
        if value is None or isinstance(value, int):
            return check_label(-1 if value is None else value, self.classes, name)
        text = label_text(value)
        label = self._labels.get(text, int(text) if _NUMBER.fullmatch(text) else None)
        if label is None:
            raise InvalidArgument(f"sample {name!r} is of the class {text!r}, which is none of the source's")
        return check_label(label, self.classes, name)


def label_text(value: Any) -> str:
    """A value as the name of a class."""
    text = text_of(value) if isinstance(value, bytes) else str(value)
    return printable(text).strip()


def check_label(label: int, classes: Sequence[str], name: str) -> int:
    """Raises InvalidArgument where the label is neither -1 nor one of the classes."""
    if -1 <= label < len(classes):
        return label
    what = f"has {len(classes)} classes" if classes else "has no classes: give classes="
    raise InvalidArgument(f"sample {name!r} has the label {label}, but the source {what}")
