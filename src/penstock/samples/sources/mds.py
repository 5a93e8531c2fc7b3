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
import json
import logging
import math
import mmap
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.errors import InvalidArgument, InvalidFile, SampleError, installing
from penstock.samples.encoding import encode
from penstock.samples.layout import text_of
from penstock.samples.manifest import Field
from penstock.samples.sources.source import Labels, Numbered, RawSample, Readable, printable, read_up_to

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
        return _number_decoder(np.dtype(name).newbyteorder("<"))
    if name == "pkl":
        raise InvalidFile(
            "pickles are never opened, as they can run any program: write it without 'pkl' columns"
        )
    raise InvalidFile(f"the MDS encoding {encoding!r} is unknown")


def _number_decoder(dtype: np.dtype[Any]) -> Decode:
    def decode(data: bytes) -> Any:
        if len(data) != dtype.itemsize:
            raise ValueError(f"{len(data)} bytes are no {dtype}")
        return np.frombuffer(data, dtype)[0].item()

    return decode


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
        at = 0
        kind = text
        if not kind:
            kind, at = _ARRAY_DTYPES[data[0]], 1
        shape = known
        if shape is None:
            dimensions, width = data[at] >> 2, data[at] & 3
            end = at + 1 + (dimensions << width)
            shape = tuple(np.frombuffer(data[at + 1 : end], _SHAPE_DTYPES[width]).tolist())
            at = end
        dtype = np.dtype(kind)
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
    "int": _number_decoder(np.dtype("<i8")),
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


@dataclass(frozen=True)
class _File:
    """One file, as the index says."""

    path: str
    size_bytes: int
    hashes: dict[str, str]


@dataclass(frozen=True)
class _Shard:
    raw: _File
    packed: _File | None
    compression: str
    samples: int
    names: tuple[str, ...]
    sizes: tuple[int, ...]  # 0: each sample says its own
    decoders: tuple[Decode, ...]


@dataclass(frozen=True)
class Mds(Numbered):
    """The samples of all shards, one after the other."""

    shards: tuple[_Shard, ...]
    description: str
    name_column: str | None
    label_column: str | None
    labels: Labels
    encoding: str = "msgpack"
    fields: tuple[Field, ...] = ()

    def count(self) -> int:
        return sum(shard.samples for shard in self.shards)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.labels.classes

    @property
    def size_bytes(self) -> int:
        return sum(shard.raw.size_bytes for shard in self.shards) * self.samples // max(self.count(), 1)

    def after(self, samples: int) -> Iterator[RawSample]:
        wanted, first = self.mine[samples:], 0
        for shard in self.shards:
            begin, end = max(wanted.start - first, 0), min(wanted.stop - first, shard.samples)
            for number, fields in _read(shard, begin, end) if begin < end else ():
                yield self._sample(shard, number, first + number, fields)
            first += shard.samples

    def names(self) -> Iterator[str]:
        """All names. Only a name column has to be read."""
        if self.name_column is None:
            return map(str, self.mine)
        return (sample.name for sample in self.after(0))

    def _sample(self, shard: _Shard, number: int, position: int, fields: dict[str, Any]) -> RawSample:
        try:
            name = str(position) if self.name_column is None else _name(fields.pop(self.name_column))
            label = -1
            if self.label_column is not None:
                label = self.labels.label(fields[self.label_column], name)
            return RawSample(name, encode(fields), label)
        except (InvalidArgument, TypeError, ValueError) as error:
            raise SampleError(f"{shard.raw.path}, sample {number}: {error}") from None


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
        found = json.loads(text)
        if found["version"] != 2:
            raise ValueError(f"version {found['version']!r} is unknown")
        shards = tuple(_shard(folder, each) for each in found["shards"])
    except SampleError:
        raise
    except OSError as error:
        raise SampleError(f"{index} cannot be read: {error.strerror}") from error
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise SampleError(
            f"{index} is not a valid index of MDS shards: {type(error).__name__}, {error}"
        ) from error
    for column in (name_column, label_column):
        without = next((s for s in shards if column is not None and column not in s.names), None)
        if without is not None:
            raise InvalidArgument(
                f"{without.raw.path} has no column {column!r}, only {', '.join(without.names)}"
            )
    if any(shard.raw.hashes and not _verifiable(shard.raw) for shard in shards):
        _log.warning("%s: its hashes are of kinds that Python's hashlib has not, and are not verified", index)
    name = printable(os.path.basename(os.path.abspath(folder)))
    opened = Mds(shards, name, name_column, label_column, Labels(classes or ()))
    if label_column is None or classes is not None:
        return opened
    values = (row[label_column] for shard in shards for _, row in _read(shard, 0, shard.samples))
    return replace(opened, labels=Labels.of_values(values))


def _shard(folder: str, entry: Mapping[str, Any]) -> _Shard:
    """Raises LookupError, TypeError or ValueError where the index makes no sense."""
    if entry["format"] != "mds" or entry["version"] != 2:
        raise ValueError(f"shards of format {entry['format']!r}, version {entry['version']!r} are unknown")
    names, encodings, sizes = entry["column_names"], entry["column_encodings"], entry["column_sizes"]
    if not len(names) == len(encodings) == len(sizes) or len(set(names)) < len(names):
        raise ValueError("columns, encodings and sizes do not go together")
    packed = _file(folder, entry["zip_data"]) if entry.get("zip_data") else None
    samples = int(entry["samples"])
    if samples < 0:
        raise ValueError(f"a shard has {samples} samples")
    return _Shard(
        _file(folder, entry["raw_data"]),
        packed,
        str(entry.get("compression") or "").partition(":")[0],
        samples,
        tuple(map(str, names)),
        tuple(int(size or 0) for size in sizes),
        tuple(map(decoder, encodings)),
    )


def _file(folder: str, entry: Mapping[str, Any]) -> _File:
    name, size_bytes = entry["basename"], int(entry["bytes"])
    parts = str(name).split("/")
    if not isinstance(name, str) or "\0" in name or name.startswith("/") or {"..", ""} & set(parts):
        raise SampleError(f"the index in {folder} names the file {name!r}, which lies elsewhere")
    if not 0 <= size_bytes <= _LARGEST_SHARD_BYTES:
        raise ValueError(f"{name} is said to have {size_bytes} bytes")
    return _File(os.path.join(folder, name), size_bytes, dict(entry.get("hashes") or {}))


def _read(shard: _Shard, begin: int, end: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Some samples of a shard, each with its number there."""
    path = shard.raw.path
    data = _content(shard)
    try:
        count = int.from_bytes(data[:4], "little")
        head = 4 * (count + 2)
        if count != shard.samples or head > len(data):
            raise SampleError(
                f"{path} is damaged: it has {count} samples, and the index says {shard.samples}"
            )
        offsets = np.frombuffer(data[4:head], "<u4").astype(np.int64)
        if offsets[0] < head or np.any(np.diff(offsets) < 0) or offsets[-1] > len(data):
            raise SampleError(f"{path} is damaged: its samples lie outside of it")
        places = offsets[begin : end + 1].tolist()
        for number in range(begin, end):
            sample = data[places[number - begin] : places[number - begin + 1]]
            try:
                yield number, _columns(shard, sample)
            except (LookupError, ValueError, RecursionError) as error:
                raise SampleError(f"{path} is damaged in sample {number}: {error}") from None
    finally:
        if isinstance(data, mmap.mmap):
            data.close()


def _columns(shard: _Shard, data: bytes) -> dict[str, Any]:
    sizes, at = list(shard.sizes), 0
    for i, size in enumerate(sizes):
        if not size:
            sizes[i] = int.from_bytes(data[at : at + 4], "little")
            at += 4
    if at + sum(sizes) != len(data):
        raise ValueError(f"its columns have {at + sum(sizes)} bytes of {len(data)}")
    fields = {}
    for name, size, decode in zip(shard.names, sizes, shard.decoders, strict=True):
        fields[name] = decode(data[at : at + size])
        at += size
    return fields


def _content(shard: _Shard) -> bytes | mmap.mmap:
    """A shard's bytes, verified; mapped where it is not compressed."""
    raw, packed = shard.raw, shard.packed
    try:
        if packed is None or os.path.exists(raw.path):
            with open(raw.path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            _verify(mapped, raw)
            return mapped
        with open(packed.path, "rb") as file:
            content = file.read(packed.size_bytes + 1)
        _verify(content, packed)
        with open(packed.path, "rb") as file:
            unpacked = read_up_to(_opened(file, shard.compression, packed.path), raw.size_bytes + 1)
        _verify(unpacked, raw)
        return unpacked
    except (SampleError, InvalidArgument):
        raise
    except OSError as error:
        raise SampleError(f"{raw.path} cannot be read: {error.strerror or error}") from error
    except (EOFError, ValueError, zlib.error) as error:
        raise SampleError(f"{raw.path} is damaged or cut off: {error}") from error


def _verify(data: bytes | mmap.mmap, file: _File) -> None:
    if len(data) != file.size_bytes:
        raise SampleError(
            f"{file.path} does not have the {file.size_bytes} bytes that the index says: copy it again"
        )
    for kind in _verifiable(file):
        if hashlib.new(kind, data).hexdigest() != file.hashes[kind]:
            raise SampleError(f"{file.path} is damaged: its {kind} is wrong. Copy it again")


def _verifiable(file: _File) -> list[str]:
    return [kind for kind in file.hashes if kind in hashlib.algorithms_guaranteed and "shake" not in kind]


def _opened(file: Any, compression: str, path: str) -> Readable:
    if compression == "gz":
        return gzip.GzipFile(fileobj=file)
    if compression == "bz2":
        return bz2.BZ2File(file)
    if compression == "zstd":
        try:
            import pyarrow
        except ImportError:
            raise InvalidArgument(f"{path} needs pyarrow: {installing('arrow')}") from None
        reader: Readable = pyarrow.CompressedInputStream(file, "zstd")
        return reader
    raise SampleError(f"{path} is compressed with {compression!r}: gz, bz2 and zstd can be read")


def _name(value: Any) -> str:
    return text_of(value) if isinstance(value, bytes) else str(value)
