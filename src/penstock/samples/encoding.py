"""Fields to the bytes of a sample and back: the encodings of docs/formats.md, "Sample stores".

`msgpack` holds None, bool, int, float, str, bytes, lists, maps and arrays. Nothing that is read is ever
executed: arrays are of numbers, and every size is checked.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidArgument, InvalidFile
from penstock.samples.manifest import Field

ENCODINGS = ("raw", "record", "msgpack")
_KINDS = ("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16")
DTYPES = {dtype.str: dtype for dtype in (np.dtype(kind).newbyteorder("<") for kind in _KINDS)}
_ARRAY = 1  # msgpack's extension type
_DEEPEST = 64
_MOST_DIMENSIONS = 32

Bytes = bytes | bytearray | memoryview


def encode(fields: Mapping[str, Any]) -> bytes:
    """A sample encoded as `msgpack`.

    fields   values of None, bool, int (64 bits), float, str, bytes, lists, tuples (which become lists), dicts
             with text keys, arrays and tensors of numbers, and numpy's scalars

    Raises InvalidArgument for anything else, with the field's name and the value's type.
    """
    plain = _plain(fields, "", 0) if isinstance(fields, Mapping) else None
    if plain is None:
        raise InvalidArgument(f"a sample of fields is a map from names to values, not a {_kind(fields)}")
    try:
        return _ENCODER.encode(plain)
    except (ValueError, OverflowError) as error:  # text that is no Unicode, bytes of 4 GiB
        raise InvalidArgument(f"{_culprit(plain)} cannot be stored: {error}") from None


def decode(data: Bytes) -> dict[str, Any]:
    """The reverse of `encode`. Arrays are copies: aligned, and free to be written to.

    Raises InvalidFile where the bytes are damaged, or not from `encode`.
    """
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, OverflowError) as error:
        raise InvalidFile(f"a sample of {len(data)} bytes is not a valid msgpack map: {error}") from None


def stored_dtype(dtype: np.dtype[Any], what: str) -> np.dtype[Any]:
    """The little-endian dtype that such values are stored as; InvalidArgument where they cannot be."""
    stored: np.dtype[Any] | None = DTYPES.get(dtype.newbyteorder("<").str)
    if stored is None:
        raise InvalidArgument(
            f"{what} has the dtype {dtype}, which cannot be stored: use numbers of at most 64 bits, or bool"
        )
    return stored


def array_of(value: Any, what: str) -> npt.NDArray[Any]:
    """An array, or a tensor of any device, as an array of numbers in C order."""
    if not isinstance(value, np.ndarray | np.generic):
        tensor = value.detach().cpu() if hasattr(value, "detach") else value
        try:
            value = tensor.numpy()
        except TypeError as error:  # bfloat16, quantised
            raise InvalidArgument(f"{what} cannot be stored as an array: {error}") from None
    return np.asarray(value, dtype=stored_dtype(value.dtype, what), order="C")


class Decoder:
    """What a store's samples hold, from their bytes.

    encoding, fields   as in the store's manifest; InvalidFile where they make no sense
    """

    def __init__(self, encoding: str, fields: Sequence[Field] = ()) -> None:
        if encoding not in ENCODINGS:
            raise InvalidFile(f"samples encoded as {encoding!r} are unknown to this version of penstock")
        self.encoding, self.fields = encoding, tuple(fields)
        columns: list[tuple[str, np.dtype[Any], tuple[int, ...]]] = []
        for field in self.fields if encoding == "record" else ():
            dtype = DTYPES.get(field.dtype)
            if dtype is None or len(field.shape) > _MOST_DIMENSIONS or any(size < 0 for size in field.shape):
                raise InvalidFile(
                    f"field {field.name!r} cannot be of dtype {field.dtype}, shape {field.shape}"
                )
            columns.append((f"f{len(columns)}", dtype, field.shape))
        try:
            self._record = np.dtype(columns)
        except ValueError as error:  # numpy's limit
            raise InvalidFile(f"records of the fields {columns} are too large: {error}") from None
        self.record_bytes = self._record.itemsize

    def sample(self, data: Bytes) -> bytes | dict[str, Any]:
        """One sample: bytes for "raw", else its fields by name.

        Arrays of "record" are views of ``data``, perhaps not aligned. Raises InvalidFile for damage.
        """
        if self.encoding == "raw":
            return bytes(data)
        if self.encoding == "msgpack":
            return decode(data)
        return {name: array[0] for name, array in self._views(data, 1).items()}

    def batch(
        self, data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]
    ) -> dict[str, npt.NDArray[Any]] | list[bytes | dict[str, Any]]:
        """All samples of a batch.

        data     uint8
        offsets  [n + 1] int64: sample i is data[offsets[i]:offsets[i + 1]]

        For "record", an array [n, *shape] for each field: views of ``data``, in which samples are a record
        apart, perhaps not aligned. For the others a list of what `sample` gives. Raises InvalidFile.
        """
        if self.encoding != "record":
            view, ends = data.data, offsets.tolist()
            return [self.sample(view[begin:end]) for begin, end in itertools.pairwise(ends)]
        if np.any(np.diff(offsets) != self.record_bytes):
            raise InvalidFile(f"a sample is not of {self.record_bytes} bytes, as its fields say")
        return self._views(data[offsets[0] : offsets[-1]], len(offsets) - 1)

    def _views(self, data: Bytes | npt.NDArray[np.uint8], samples: int) -> dict[str, npt.NDArray[Any]]:
        size_bytes = data.nbytes if isinstance(data, memoryview | np.ndarray) else len(data)
        if size_bytes != samples * self.record_bytes:
            raise InvalidFile(f"{samples} samples of {self.record_bytes} bytes are in {size_bytes} bytes")
        if not self.record_bytes:
            return {field.name: np.empty((samples, *field.shape), field.dtype) for field in self.fields}
        records: npt.NDArray[Any] = np.ndarray(samples, self._record, data)
        return {field.name: records[f"f{number}"] for number, field in enumerate(self.fields)}


_SCALARS = frozenset({type(None), bool, float, str, bytes, bytearray, memoryview})


def _plain(value: Any, name: str, depth: int) -> Any:
    """The same in types that msgspec knows, or InvalidArgument with the name of the value."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is int:
        if not -(1 << 63) <= value < 1 << 64:
            raise InvalidArgument(
                f"{_field(name)} is {value}: an integer of more than 64 bits cannot be stored"
            )
        return value
    if isinstance(value, np.str_ | np.bytes_):
        return value.item()
    if isinstance(value, np.ndarray | np.generic) or (hasattr(value, "numpy") and hasattr(value, "dtype")):
        return _extension(array_of(value, _field(name)))
    if depth == _DEEPEST:
        raise InvalidArgument(f"{_field(name)} is nested more than {_DEEPEST} deep, and cannot be stored")
    if isinstance(value, list | tuple):
        return [_plain(item, f"{name}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {_key(key, name): _plain(item, _below(name, key), depth + 1) for key, item in value.items()}
    raise InvalidArgument(
        f"{_field(name)} is of type {_kind(value)}, which cannot be stored: use None, bool, int, float, str, "
        "bytes, lists, dicts, arrays or tensors of numbers"
    )


def _key(key: Any, name: str) -> str:
    if type(key) is not str:
        raise InvalidArgument(f"{_field(name)} has the key {key!r}: keys must be text")
    return key


def _below(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _field(name: str) -> str:
    return f"field {name!r}" if name else "the sample"


def _kind(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _culprit(plain: Mapping[str, Any]) -> str:
    for name, value in plain.items():
        try:
            _ENCODER.encode({name: value})
        except (ValueError, OverflowError):
            return _field(name)
    return "the sample"


def _extension(array: npt.NDArray[Any]) -> msgspec.msgpack.Ext:
    header = _ENCODER.encode((array.dtype.str, array.shape))
    return msgspec.msgpack.Ext(_ARRAY, header + array.tobytes())


def _array(code: int, data: memoryview) -> Any:
    """An array of an extension's bytes: a msgpack array of dtype text and shape, then the values."""
    if code != _ARRAY:
        raise InvalidFile(f"the msgpack extension {code} is unknown")
    try:
        text, shape, begin = _array_header(bytes(data[:1024]))
    except (IndexError, UnicodeDecodeError):
        raise InvalidFile("the header of an array is damaged") from None
    dtype = DTYPES.get(text)
    if dtype is None or len(shape) > _MOST_DIMENSIONS:
        raise InvalidFile(f"an array cannot be of dtype {text!r}, shape {shape}")
    values = math.prod(shape)
    if values * dtype.itemsize != len(data) - begin:
        raise InvalidFile(f"an array {text} of shape {shape} has {len(data) - begin} bytes")
    if not values:
        return np.empty(shape, dtype)  # sizes beside a zero may be absurd: numpy's own error is a ValueError
    return np.frombuffer(data, dtype, values, begin).reshape(shape).copy()[()]


def _array_header(data: bytes) -> tuple[str, tuple[int, ...], int]:
    """Dtype text, shape, and where the header ends; IndexError where it is none."""
    if data[0] != 0x92:
        raise IndexError
    length, at = (data[1] & 0x1F, 2) if data[1] >> 5 == 0b101 else (data[2], 3)
    if at == 3 and data[1] != 0xD9:
        raise IndexError
    text = data[at : at + length].decode("ascii")
    at += length
    if data[at] >> 4 != 0b1001 and data[at] != 0xDC:
        raise IndexError
    dimensions, at = (
        (data[at] & 0xF, at + 1)
        if data[at] != 0xDC
        else (int.from_bytes(data[at + 1 : at + 3], "big"), at + 3)
    )
    shape = []
    for _ in range(dimensions):
        first = data[at]
        size = 1 << (first - 0xCC) if 0xCC <= first <= 0xCF else 0
        if first > 0x7F and not size:
            raise IndexError
        shape.append(int.from_bytes(data[at + 1 : at + 1 + size], "big") if size else first)
        at += 1 + size
    if at > len(data):
        raise IndexError
    return text, tuple(shape), at


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(dict[str, Any], ext_hook=_array)
