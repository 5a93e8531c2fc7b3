"""Fields come back from a sample's bytes as they were; damaged bytes are refused, and never executed."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from penstock.errors import InvalidArgument, InvalidFile
from penstock.samples.encoding import DTYPES, Decoder, decode, encode
from penstock.samples.manifest import Field

DTYPE = st.sampled_from(sorted(DTYPES))
ARRAYS = npst.arrays(DTYPE, npst.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4))
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary()
    | ARRAYS
)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray | np.generic):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return type(right) is float and np.float64(left).tobytes() == np.float64(right).tobytes()
    return type(left) is type(right) and bool(left == right)


@given(st.dictionaries(NAMES, VALUES, max_size=4))
def test_fields_come_back(fields: dict[str, Any]) -> None:
    assert same(decode(encode(fields)), fields)


@given(st.dictionaries(NAMES, VALUES, max_size=3), st.data())
def test_damaged_fields_are_refused_or_plain(fields: dict[str, Any], data: st.DataObject) -> None:
    damaged = bytearray(encode(fields))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] = data.draw(st.integers(0, 255))
    del damaged[data.draw(st.integers(0, len(damaged))) :]
    try:
        found = decode(damaged)
    except InvalidFile:
        return
    assert all(isinstance(name, str) for name in found)


@given(st.binary(max_size=64))
def test_an_array_of_any_bytes_is_refused_or_of_numbers(payload: bytes) -> None:
    data = msgspec.msgpack.encode({"x": msgspec.msgpack.Ext(1, payload)})
    try:
        found = decode(data)["x"]
    except InvalidFile:
        return
    assert found.dtype.str in DTYPES


@pytest.mark.parametrize(
    ("text", "shape", "data"),
    [
        ("|O", [1], bytes(8)),
        ("<i8", [1 << 62, 4], bytes(8)),
        ("<i8", [0, 1 << 63, 1 << 63], b""),
        ("<i8", [3], bytes(16)),
        ("<U4", [1], bytes(16)),
        ("i4,(9999,9999)f8", [0], b""),
        ("<i8", [0] * 40, b""),
    ],
)
def test_an_array_that_cannot_be_is_refused(text: str, shape: list[int], data: bytes) -> None:
    payload = msgspec.msgpack.encode((text, shape)) + data
    with pytest.raises(InvalidFile):
        decode(msgspec.msgpack.encode({"x": msgspec.msgpack.Ext(1, payload)}))


def test_an_array_is_written_as_the_format_says() -> None:
    payload = b"\x92" + b"\xa3<i2" + b"\x92\x01\x02" + b"\x07\x00\xff\xff"
    expected = b"\x81\xa1x" + bytes([0xC7, len(payload), 1]) + payload
    assert encode({"x": np.array([[7, -1]], ">i2")}) == expected


@pytest.mark.parametrize("size", [b"\x02", b"\xcc\x02", b"\xcd\x00\x02", b"\xcf" + bytes(7) + b"\x02"])
@pytest.mark.parametrize("text", [b"\xa3<i2", b"\xd9\x03<i2"])
@pytest.mark.parametrize("count", [b"\x91", b"\xdc\x00\x01"])
def test_headers_may_be_as_long_as_msgpack_allows(size: bytes, text: bytes, count: bytes) -> None:
    payload = b"\x92" + text + count + size + b"\x07\x00\xff\xff"
    data = msgspec.msgpack.encode({"x": msgspec.msgpack.Ext(1, payload)})
    assert decode(data)["x"].tolist() == [7, -1]


def test_arrays_can_be_written_to_and_are_aligned() -> None:
    found = decode(encode({"a": b"1", "x": np.arange(3.0)}))["x"]
    found += 1
    assert found.flags.aligned and found.tolist() == [1, 2, 3]


def test_tensors_tuples_and_numpys_scalars_are_taken() -> None:
    fields = {"t": torch.arange(4).view(2, 2).t(), "p": (1, "a"), "s": np.float32(0.5), "u": np.str_("x")}
    expected = {"t": np.array([[0, 2], [1, 3]]), "p": [1, "a"], "s": np.float32(0.5), "u": "x"}
    assert same(decode(encode(fields)), expected)


class Anything:
    pass


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (Anything(), r"field 'a\.b\[1\]' is of type .*Anything"),
        ({1, 2}, "is of type set"),
        (1 << 64, "64 bits"),
        (np.array([object()]), "dtype object"),
        (np.array(["x"]), "dtype <U1"),
        (torch.zeros(1, dtype=torch.bfloat16), "BFloat16"),
        ({1: 2}, "the key 1"),
        ("\udc80", "cannot be stored"),
    ],
)
def test_other_values_are_refused_by_name(value: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said) as failure:
        encode({"a": {"b": [0, value]}})
    assert "'a" in str(failure.value)
    assert str(pickle.loads(pickle.dumps(failure.value))) == str(failure.value)


def test_what_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidArgument, match="deep"):
        encode({"loop": loop})
    with pytest.raises(InvalidFile):
        decode(b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0")


@given(
    st.lists(st.tuples(DTYPE, st.lists(st.integers(0, 3), max_size=3)), min_size=1, max_size=4),
    st.integers(0, 5),
    st.randoms(use_true_random=False),
)
def test_records_become_arrays_without_a_copy(
    kinds: list[tuple[str, list[int]]], samples: int, random: Any
) -> None:
    fields = [Field(name=str(i), dtype=dtype, shape=tuple(shape)) for i, (dtype, shape) in enumerate(kinds)]
    decoder = Decoder("record", fields)
    rows = [
        [np.frombuffer(_bytes(field, random), field.dtype).reshape(field.shape) for field in fields]
        for _ in range(samples)
    ]
    data = np.frombuffer(b"?" + b"".join(value.tobytes() for row in rows for value in row), np.uint8)
    offsets = 1 + np.arange(samples + 1) * decoder.record_bytes
    batch = decoder.batch(data, offsets)
    assert isinstance(batch, dict)
    for i, field in enumerate(fields):
        assert batch[field.name].shape == (samples, *field.shape)
        assert np.shares_memory(batch[field.name], data) == bool(batch[field.name].size)
        for row, found in zip(rows, batch[field.name], strict=True):
            assert found.tobytes() == row[i].tobytes()
    for row, begin in zip(rows, offsets[:-1], strict=True):
        sample = decoder.sample(data[begin : begin + decoder.record_bytes].data)
        assert isinstance(sample, dict)
        assert [sample[field.name].tobytes() for field in fields] == [value.tobytes() for value in row]


def _bytes(field: Field, random: Any) -> bytes:
    data = random.randbytes(int(np.prod(field.shape)) * np.dtype(field.dtype).itemsize)
    return bytes(byte & 1 for byte in data) if field.dtype == "|b1" else data


def test_records_of_a_wrong_size_are_refused() -> None:
    decoder = Decoder("record", [Field(name="x", dtype="<f4", shape=(2,))])
    with pytest.raises(InvalidFile, match="8 bytes"):
        decoder.sample(bytes(7))
    with pytest.raises(InvalidFile, match="8 bytes"):
        decoder.batch(np.zeros(16, np.uint8), np.array([0, 7, 16]))


def test_other_samples_come_as_a_list() -> None:
    data = np.frombuffer(b"abcde", np.uint8)
    assert Decoder("raw").batch(data, np.array([0, 2, 2, 5])) == [b"ab", b"", b"cde"]
    packed = np.frombuffer(encode({"a": 1}), np.uint8)
    assert Decoder("msgpack").batch(packed, np.array([0, len(packed)])) == [{"a": 1}]


@pytest.mark.parametrize("field", [Field(name="x", dtype="|O"), Field(name="x", dtype="<f4", shape=(-1,))])
def test_fields_of_a_manifest_are_not_trusted(field: Field) -> None:
    with pytest.raises(InvalidFile, match="'x'"):
        Decoder("record", [field])
    with pytest.raises(InvalidFile, match="pickle"):
        Decoder("pickle")
