"""Samples of TFRecord files: the payloads, as they are. Checksums are compared, which tfrecord does not.

Format: TensorFlow's "TFRecord and tf.train.Example". A record is uint64 length, uint32 masked CRC-32C of the
length, the data, uint32 masked CRC-32C of the data; little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import partial

from penstock.errors import SampleError
from penstock.samples.sources.paths import Paths, shards_of
from penstock.samples.sources.source import RawSample, Sharded, described, read_up_to, unpacked
from penstock.storage.checksum import crc32c
from penstock.units import format_bytes, parse_bytes

_HEADER = struct.Struct("<QI")
_SUM = struct.Struct("<I")


def open_tfrecord(source: Paths, *, max_sample_bytes: int | str = "1GiB") -> Sharded:
    """Samples of TFRecord files, with or without gzip; named "file:number".

    source            a path, a folder, a pattern such as "train-{000..127}.tfrecord", or a list of these
    max_sample_bytes  a record that is said to be larger is an error

    Samples are the records' bytes; ``tf.train.Example.FromString`` decodes those that hold one. Iteration
    raises SampleError for files that are damaged or cut off: all checksums are verified.
    """
    read = partial(_records, largest_bytes=parse_bytes(max_sample_bytes))
    shards = tuple(shards_of(source, "tfrecord"))
    return Sharded(described(shards), "raw", (), shards, read, _sample)


def _sample(path: str, shard: str, number: int, record: bytes) -> RawSample:
    return RawSample(f"{shard}:{number}", record)


def _records(path: str, largest_bytes: int) -> Iterator[bytes]:
    with unpacked(path) as (file, size_bytes):
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
            data, data_sum = read_up_to(file.read, length), file.read(_SUM.size)
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
