"""Samples of TFRecord files: the payloads, as they are.

Format: TensorFlow's "TFRecord and tf.train.Example". A record is uint64 length, uint32 masked CRC-32C of the
length, the data, uint32 masked CRC-32C of the data; little-endian.
"""

from __future__ import annotations

import gzip
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from penstock.errors import SampleError
from penstock.samples.format.manifest import Field
from penstock.samples.sources.example import example
from penstock.samples.sources.paths import Paths, shards_of
from penstock.samples.sources.source import Part, RawSample, Readable, printable, read_up_to
from penstock.storage.checksum import crc32c
from penstock.units import format_bytes, parse_bytes

__all__ = ["example", "open_tfrecord"]

_HEADER = struct.Struct("<QI")
_SUM = struct.Struct("<I")


@dataclass(frozen=True)
class Records:
    """The records of several files. A share has whole files, or every so many-th record if they are few."""

    shards: tuple[tuple[str, str], ...]
    description: str
    largest_bytes: int
    part: Part = field(default_factory=Part)
    encoding: str = "raw"
    fields: tuple[Field, ...] = ()
    classes: tuple[str, ...] = ()
    samples: int | None = None

    @property
    def size_bytes(self) -> int | None:
        shards, part = self.part.deal(self.shards)
        if any(path.endswith(".gz") for path, _ in shards):
            return None
        return sum(os.path.getsize(path) for path, _ in shards) // part.world

    def __iter__(self) -> Iterator[RawSample]:
        shards, part = self.part.deal(self.shards)
        position = 0
        for path, shard in shards:
            for number, data in enumerate(_records(path, self.largest_bytes)):
                if part.has(position):
                    yield RawSample(f"{shard}:{number}", data)
                position += 1

    def share(self, rank: int, world: int) -> Records:
        return replace(self, part=self.part.divide(rank, world))


def open_tfrecord(source: Paths, *, max_sample_bytes: int | str = "1GiB") -> Records:
    """Samples of TFRecord files, with or without gzip; named "file:number".

    source            a path, a folder, a pattern such as "train-{000..127}.tfrecord", or a list of these
    max_sample_bytes  a record that is said to be larger is an error

    Samples are the records' bytes; `example` decodes those that hold a tf.train.Example. Iteration raises
    SampleError for files that are damaged or cut off: all checksums are verified.
    """
    shards = tuple(shards_of(source, "tfrecord"))
    name = printable(shards[0][1]) + (f" and {len(shards) - 1} more" if len(shards) > 1 else "")
    return Records(shards, name, parse_bytes(max_sample_bytes))


def _records(path: str, largest_bytes: int) -> Iterator[bytes]:
    try:
        with open(path, "rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            if packed:
                with gzip.open(raw) as file:
                    yield from _framed(path, file, None, largest_bytes)
            else:
                yield from _framed(path, raw, os.fstat(raw.fileno()).st_size, largest_bytes)
    except SampleError:
        raise
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise SampleError(f"{path} is damaged or cut off: {error}") from error
    except OSError as error:
        raise SampleError(f"{path} cannot be read: {error.strerror or error}") from error


def _framed(path: str, file: Readable, size_bytes: int | None, largest_bytes: int) -> Iterator[bytes]:
    at = 0
    while header := file.read(_HEADER.size):
        if len(header) < _HEADER.size:
            raise SampleError(f"{path} is cut off in the record at byte {at}")
        length, length_sum = _HEADER.unpack(header)
        if _masked(header[:8]) != length_sum:
            raise SampleError(f"{path} is damaged, or no TFRecord file: wrong checksum at byte {at}")
        if size_bytes is not None and at + _HEADER.size + length + _SUM.size > size_bytes:
            raise SampleError(f"{path} is cut off in the record at byte {at}, which has {length} bytes")
        if length > largest_bytes:
            raise SampleError(
                f"{path} has a record of {length} bytes at byte {at}: more than "
                f"{format_bytes(largest_bytes)}. Check the file, or pass max_sample_bytes="
            )
        data, data_sum = read_up_to(file, length), file.read(_SUM.size)
        if len(data) < length or len(data_sum) < _SUM.size:
            raise SampleError(f"{path} is cut off in the record at byte {at}, which has {length} bytes")
        if _SUM.pack(_masked(data)) != data_sum:
            raise SampleError(f"{path} is damaged: the record at byte {at} has a wrong checksum")
        yield data
        at += _HEADER.size + length + _SUM.size


def _masked(data: bytes) -> int:
    """TensorFlow stores a checksum rotated and shifted, so that one of data with checksums in it is sound."""
    crc = crc32c(data)
    return (crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF
