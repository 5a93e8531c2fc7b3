"""tf.train.Example without TensorFlow.

Messages: tensorflow/core/example/{example,feature}.proto; encoding: Protocol Buffers, "Encoding".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidFile

Value = list[bytes] | npt.NDArray[np.float32] | npt.NDArray[np.int64]

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def example(data: bytes | bytearray | memoryview) -> dict[str, Value]:
    """The features of a tf.train.Example: lists of bytes, arrays [n] of float32, or arrays [n] of int64.

    Raises InvalidFile where the bytes are none.
    """
    found: dict[str, Value] = {}
    try:
        for features in _messages(memoryview(data), 1):
            for entry in _messages(features, 1):
                names = [bytes(name) for name in _messages(entry, 1)]
                values = list(_messages(entry, 2))
                found[(names[-1] if names else b"").decode()] = _feature(values)
    except (IndexError, ValueError, OverflowError) as error:
        raise InvalidFile(
            f"{len(data)} bytes are not a tf.train.Example: {error or 'they are cut off'}"
        ) from None
    return found


def _feature(messages: list[memoryview]) -> Value:
    """One of three kinds of list; where a writer repeats it, the last kind counts, and its values add up."""
    kind = 1
    parts: list[memoryview] = []
    for message in messages:
        for number, wire, value in _fields(message):
            if number in (1, 2, 3) and wire == _BYTES:
                parts = parts if number == kind else []
                kind = number
                parts.append(value)
    if kind == 1:
        return [bytes(value) for part in parts for value in _messages(part, 1)]
    if kind == 2:
        return np.concatenate([_floats(part) for part in parts])
    return np.concatenate([_integers(part) for part in parts])


def _floats(message: memoryview) -> npt.NDArray[np.float32]:
    """Packed, or one by one."""
    data = b"".join(
        value for number, wire, value in _fields(message) if number == 1 and wire in (_BYTES, _FIXED32)
    )
    return np.array(np.frombuffer(data, np.float32))


def _integers(message: memoryview) -> npt.NDArray[np.int64]:
    found: list[int] = []
    for number, wire, value in _fields(message):
        if number == 1 and wire == _VARINT:
            found.append(value)
        elif number == 1 and wire == _BYTES:
            at = 0
            while at < len(value):
                each, at = _varint(value, at)
                found.append(each)
    return np.array(found, np.uint64).view(np.int64)


def _messages(message: memoryview, wanted: int) -> Iterator[memoryview]:
    """What the fields of one number hold."""
    for number, wire, value in _fields(message):
        if number == wanted:
            if wire != _BYTES:
                raise ValueError(f"field {number} has the wire type {wire}")
            yield value


def _fields(message: memoryview) -> Iterator[tuple[int, int, Any]]:
    """Number, wire type and value: an integer for varints, otherwise bytes."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            value, at = _varint(message, at)
            yield number, wire, value
            continue
        if wire == _BYTES:
            size_bytes, at = _varint(message, at)
        elif wire in (_FIXED32, _FIXED64):
            size_bytes = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"the wire type {wire} is unknown")
        if at + size_bytes > len(message):
            raise IndexError
        yield number, wire, message[at : at + size_bytes]
        at += size_bytes


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """An integer of up to 64 bits, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
    raise ValueError("an integer has more than 64 bits")
