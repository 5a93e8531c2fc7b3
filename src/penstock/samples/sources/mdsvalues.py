"""The columns of MDS samples: bytes to values, with nothing executed.

Format: MosaicML streaming 0.13, streaming/base/format/mds/encodings.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.errors import InvalidFile

Decode = Callable[[bytes], Any]

_ARRAY_DTYPES = {
    8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 18: "<f2", 32: "<u4", 33: "<i4", 34: "<f4", 64: "<u8", 65: "<i8",
    66: "<f8",
}  # fmt: skip
_SHAPE_DTYPES = ("u1", "<u2", "<u4", "<u8")
_NUMBERS = (
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
)


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
