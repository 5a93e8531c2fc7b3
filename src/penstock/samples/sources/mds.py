"""Samples of MosaicML streaming's MDS format, with nothing executed.

Streaming itself takes 2.9 times as long (benchmarks/samples_sources.py), pins 70 packages and opens pickles.

Format: MosaicML streaming 0.13, streaming/base/format/mds. A shard is uint32 samples, uint32
[samples + 1] offsets in the file, then samples: uint32 sizes of the columns that have no fixed one, then the
columns' bytes, which encodings.py there describes.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import logging
import math
import mmap
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np

from penstock.errors import InvalidArgument, InvalidFile, SampleError, installing
from penstock.samples.encoding import encode
from penstock.samples.layout import text_of
from penstock.samples.sources.source import (
    Labels,
    Numbered,
    RawSample,
    parts_with,
    printable,
    read_up_to,
)

Decode = Callable[[bytes], Any]

_ARRAY_DTYPES = {
    8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 18: "<f2", 32: "<u4", 33: "<i4", 34: "<f4", 64: "<u8", 65: "<i8",
    66: "<f8",
}  # fmt: skip
_SHAPE_DTYPES = ("u1", "<u2", "<u4", "<u8")
_NUMBERS = {f"{kind}int{bits}" for kind in ("u", "") for bits in (8, 16, 32, 64)}
_NUMBERS |= {"float16", "float32", "float64"}


def decoder(encoding: str) -> Decode:
    """What turns a column's bytes into a value. ValueError where the bytes do not fit.

    Images become their bytes as stored; raw ones ("pil") a map of width, height, mode, data. Raises
    InvalidFile for encodings that are unknown, and for pickles.
    """
    name, _, config = encoding.partition(":")
    if name == "ndarray":
        return _array_decoder(config)
    if not config and name in _DECODERS:
        return _DECODERS[name]
    if not config and name in _NUMBERS:
        return partial(_number, np.dtype(name).newbyteorder("<"))
    if name == "pkl":
        raise InvalidFile(
            "pickles are never opened, as they can run any program: write it without 'pkl' columns"
        )
    raise InvalidFile(f"the MDS encoding {encoding!r} is unknown")


def _number(dtype: np.dtype[Any], data: bytes) -> Any:
    if len(data) != dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are no {dtype}")
    return np.frombuffer(data, dtype)[0].item()


def _array_decoder(config: str) -> Decode:
    """ndarray, ndarray:dtype or ndarray:dtype:shape."""
    text, _, sizes = config.partition(":")
    if text and text not in _NUMBERS:
        raise InvalidFile(f"MDS arrays of {text!r} are unknown")
    try:
        known = tuple(map(int, sizes.split(","))) if sizes else None
    except ValueError:
        raise InvalidFile(f"the MDS encoding 'ndarray:{config}' has no valid shape") from None

    def decode(data: bytes) -> Any:
        dtype, at = (np.dtype(text), 0) if text else (np.dtype(_ARRAY_DTYPES[data[0]]), 1)
        shape = known
        if shape is None:
            dimensions, width = data[at] >> 2, data[at] & 3
            begin, at = at + 1, at + 1 + (dimensions << width)
            shape = tuple(np.frombuffer(data[begin:at], _SHAPE_DTYPES[width]).tolist())
        if math.prod(shape) * dtype.itemsize != len(data) - at:
            raise ValueError(f"an array {dtype} of shape {shape} has {len(data) - at} bytes")
        return np.frombuffer(data, dtype, offset=at).reshape(shape)

    return decode


def _image(data: bytes) -> dict[str, Any]:
    width, height, mode_bytes = np.frombuffer(data[:12], "<u4").tolist()
    if 12 + mode_bytes > len(data):
        raise ValueError("a raw image is cut off")
    mode = data[12 : 12 + mode_bytes].decode()
    return {"width": width, "height": height, "mode": mode, "data": data[12 + mode_bytes :]}


def _pieces(data: bytes, at: int) -> list[bytes]:
    """uint32 count, uint32 each size, then the pieces."""
    (count,) = np.frombuffer(data[at : at + 4], "<u4").tolist()
    begin = at + 4 + 4 * count
    if begin > len(data):
        raise ValueError("a list is cut off")
    ends = begin + np.cumsum(np.frombuffer(data[at + 4 : begin], "<u4").astype(np.int64))
    if (int(ends[-1]) if count else begin) != len(data):
        raise ValueError("the sizes in a list are wrong")
    return [data[first:last] for first, last in zip([begin, *ends.tolist()], ends.tolist(), strict=False)]


_DECODERS: dict[str, Decode] = {
    "bytes": bytes,
    "jpeg": bytes,
    "png": bytes,
    "str": bytes.decode,
    "int": partial(_number, np.dtype("<i8")),
    "str_int": lambda data: int(data.decode()),
    "str_float": lambda data: float(data.decode()),
    "str_decimal": bytes.decode,  # no number type keeps all its digits
    "json": json.loads,
    "pil": _image,
    "jpeg_array": lambda data: _pieces(data, 0),
    "jpegarray": lambda data: _pieces(data, 0),
    "list[pil]": lambda data: [_image(piece) for piece in _pieces(data, 4)],
    "list[jpeg]": lambda data: _pieces(data, 4),
    "list[png]": lambda data: _pieces(data, 4),
}


_log = logging.getLogger("penstock")
_LARGEST_INDEX_BYTES = 1 << 30
_LARGEST_SHARD_BYTES = 1 << 32  # offsets have 32 bits


class _File(msgspec.Struct):
    """A file, as the index says. path: there it is a name; `_check` makes a path of it."""

    path: str = msgspec.field(name="basename")
    bytes: int
    hashes: dict[str, str] = {}


class _Shard(msgspec.Struct):
    """A shard, as the index says. column_sizes: where there is none, each sample says its own."""

    format: str
    version: int
    samples: int
    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[int | None]
    raw_data: _File
    zip_data: _File | None = None
    compression: str | None = None

    @property
    def path(self) -> str:
        return self.raw_data.path


class _Index(msgspec.Struct):
    version: int
    shards: list[_Shard]


@dataclass(frozen=True)
class Mds(Numbered):
    """The samples of all shards, one after the other."""

    shards: list[_Shard]
    labels: Labels
    name_column: str | None
    label_column: str | None

    def after(self, samples: int) -> Iterator[RawSample]:
        wanted = self.mine[samples:]
        for shard, first, begin, end in parts_with(wanted, self.shards, lambda each: each.samples):
            for number, fields in _read(shard, begin, end):
                yield self._sample(shard, number, first + number, fields)

    def names(self) -> Iterator[str]:
        return super().names() if self.name_column is None else (sample.name for sample in self.after(0))

    def _sample(self, shard: _Shard, number: int, position: int, fields: dict[str, Any]) -> RawSample:
        try:
            name: Any = str(position) if self.name_column is None else fields.pop(self.name_column)
            name = text_of(name) if isinstance(name, bytes) else str(name)
            value = None if self.label_column is None else fields[self.label_column]
            return RawSample(name, encode(fields), self.labels.label(value, name))
        except (InvalidArgument, TypeError, ValueError) as error:
            raise SampleError(f"{shard.path}, sample {number}: {error}") from None


def open_mds(
    source: str | os.PathLike[str],
    *,
    name_column: str | None = None,
    label_column: str | None = None,
    classes: Sequence[str] | None = None,
) -> Mds:
    """Samples of a folder that MosaicML's MDSWriter wrote, or of the index.json in it: maps of their columns.

    name_column   holds the names, and is not stored otherwise; if none, names are running numbers
    label_column  a class's name or number; -1 for none
    classes       what labels count; otherwise all shards are read once more to find out

    Shards may be compressed with gzip, bzip2 or, where pyarrow is installed, Zstandard. Hashes are verified
    if Python's hashlib has them. Columns that are pickles are refused.

    Raises SampleError where the index is damaged or of another format; so does iteration for damaged shards.
    """
    path = os.fspath(source)
    index = path if os.path.basename(path) == "index.json" else os.path.join(path, "index.json")
    folder = os.path.dirname(index)
    try:
        with open(index, "rb") as file:
            text = file.read(_LARGEST_INDEX_BYTES + 1)
        if len(text) > _LARGEST_INDEX_BYTES:
            raise SampleError(
                f"{index} has more than {_LARGEST_INDEX_BYTES} bytes: it is not an index of MDS shards"
            )
        found = msgspec.json.decode(text, type=_Index)
        if found.version != 2:
            raise ValueError(f"version {found.version} is unknown")
        shards = found.shards
        for shard in shards:
            _check(shard, folder)
    except SampleError:
        raise
    except OSError as error:
        raise SampleError(f"{index} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise SampleError(f"{index} is not a valid index of MDS shards: {error}") from error
    for column in (name_column, label_column):
        for shard in shards:
            if column is not None and column not in shard.column_names:
                names = ", ".join(shard.column_names)
                raise InvalidArgument(f"{shard.path} has no column {column!r}, only {names}")
    raw = [shard.raw_data for shard in shards]
    if any(file.hashes and not _verifiable(file) for file in raw):
        _log.warning("%s: its hashes are of kinds that Python's hashlib has not, and are not verified", index)
    name = printable(os.path.basename(os.path.abspath(folder)))
    labels = Labels(classes or ())
    if label_column is not None and classes is None:
        rows = (row for shard in shards for _, row in _read(shard, 0, shard.samples))
        labels = Labels.of_values(row[label_column] for row in rows)
    whole, size_bytes = sum(shard.samples for shard in shards), sum(file.bytes for file in raw)
    return Mds(name, "msgpack", labels.classes, whole, size_bytes, shards, labels, name_column, label_column)


def _check(shard: _Shard, folder: str) -> None:
    """Raises ValueError where the index makes no sense, SampleError where it leads elsewhere."""
    names, encodings, sizes = shard.column_names, shard.column_encodings, shard.column_sizes
    if shard.format != "mds" or shard.version != 2:
        raise ValueError(f"shards of format {shard.format!r}, version {shard.version} are unknown")
    if not len(names) == len(encodings) == len(sizes) or len(set(names)) < len(names):
        raise ValueError("columns, encodings and sizes do not go together")
    if shard.samples < 0:
        raise ValueError(f"a shard has {shard.samples} samples")
    for encoding in encodings:
        decoder(encoding)
    for file in filter(None, (shard.raw_data, shard.zip_data)):
        name = file.path
        if "\0" in name or name.startswith("/") or {"..", ""} & set(name.split("/")):
            raise SampleError(f"the index in {folder} names the file {name!r}, which lies elsewhere")
        if not 0 <= file.bytes <= _LARGEST_SHARD_BYTES:
            raise ValueError(f"{name} is said to have {file.bytes} bytes")
        file.path = os.path.join(folder, name)


def _read(shard: _Shard, begin: int, end: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Some samples of a shard, each with its number there."""
    path, decoders = shard.path, list(map(decoder, shard.column_encodings))
    data = _content(shard)
    try:
        count = int.from_bytes(data[:4], "little")
        head = 4 * (count + 2)
        if count != shard.samples or head > len(data):
            raise SampleError(f"{path} is damaged: it has {count} samples; the index says {shard.samples}")
        offsets = np.frombuffer(data[4:head], "<u4").astype(np.int64)
        if offsets[0] < head or np.any(np.diff(offsets) < 0) or offsets[-1] > len(data):
            raise SampleError(f"{path} is damaged: its samples lie outside of it")
        places = offsets[begin : end + 1].tolist()
        for number in range(begin, end):
            sample = data[places[number - begin] : places[number - begin + 1]]
            try:
                yield number, _columns(shard, decoders, sample)
            except (LookupError, ValueError, RecursionError) as error:
                raise SampleError(f"{path} is damaged in sample {number}: {error}") from None
    finally:
        if isinstance(data, mmap.mmap):
            data.close()


def _columns(shard: _Shard, decoders: list[Decode], data: bytes) -> dict[str, Any]:
    sizes, at = [size or 0 for size in shard.column_sizes], 0
    for i, size in enumerate(sizes):
        if not size:
            sizes[i] = int.from_bytes(data[at : at + 4], "little")
            at += 4
    if at + sum(sizes) != len(data):
        raise ValueError(f"its columns have {at + sum(sizes)} bytes of {len(data)}")
    fields = {}
    for name, size, decode in zip(shard.column_names, sizes, decoders, strict=True):
        fields[name] = decode(data[at : at + size])
        at += size
    return fields


def _content(shard: _Shard) -> bytes | mmap.mmap:
    """A shard's bytes, verified; mapped where it is not compressed."""
    raw, packed = shard.raw_data, shard.zip_data
    try:
        if packed is None or os.path.exists(shard.path):
            with open(shard.path, "rb") as file:
                content: bytes | mmap.mmap = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        else:
            with open(packed.path, "rb") as file:
                _verify(file.read(packed.bytes + 1), packed)
                file.seek(0)
                content = read_up_to(_unpacking(file, shard).read, raw.bytes + 1)
        _verify(content, raw)
        return content
    except (SampleError, InvalidArgument):
        raise
    except OSError as error:
        raise SampleError(f"{shard.path} cannot be read: {error.strerror or error}") from error
    except (EOFError, ValueError, zlib.error) as error:
        raise SampleError(f"{shard.path} is damaged or cut off: {error}") from error


def _verify(data: bytes | mmap.mmap, file: _File) -> None:
    if len(data) != file.bytes:
        said = f"the {file.bytes} bytes that the index says"
        raise SampleError(f"{file.path} does not have {said}: copy it again")
    for kind in _verifiable(file):
        if hashlib.new(kind, data).hexdigest() != file.hashes[kind]:
            raise SampleError(f"{file.path} is damaged: its {kind} is wrong. Copy it again")


def _verifiable(file: _File) -> list[str]:
    return [kind for kind in file.hashes if kind in hashlib.algorithms_guaranteed and "shake" not in kind]


def _unpacking(file: Any, shard: _Shard) -> io.BufferedIOBase:
    compression = (shard.compression or "").partition(":")[0]
    if compression == "gz":
        return gzip.GzipFile(fileobj=file)
    if compression == "bz2":
        return bz2.BZ2File(file)
    if compression == "zstd":
        try:
            import pyarrow
        except ImportError:
            raise InvalidArgument(f"{shard.path} needs pyarrow: {installing('arrow')}") from None
        reader: io.BufferedIOBase = pyarrow.CompressedInputStream(file, "zstd")
        return reader
    raise SampleError(f"{shard.path} is compressed with {compression!r}: gz, bz2 and zstd can be read")
