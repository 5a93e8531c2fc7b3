"""TFRecords become samples as they are; files that are damaged or hostile are refused."""

from __future__ import annotations

import gzip
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidFile, SampleError
from penstock.samples.sources import RawSample, Source, open_source
from penstock.samples.sources.tfrecord import example
from tests.support.stores import crc32c


def masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + masked(data)


def pairs(source: Source) -> list[tuple[str, bytes]]:
    return [(sample.name, bytes(sample.data)) for sample in source if isinstance(sample, RawSample)]


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.binary(max_size=50), max_size=4), min_size=1, max_size=4),
    st.booleans(),
    st.integers(1, 5),
)
def test_records_come_back_in_shares(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[bytes]], packed: bool, world: int
) -> None:
    folder = tmp_path_factory.mktemp("records")
    expected = []
    for number, records in enumerate(files):
        name = f"a.tfrecord-{number:05d}-of-00009" + ".gz" * packed
        content = b"".join(map(record, records))
        (folder / name).write_bytes(gzip.compress(content) if packed else content)
        expected += [(f"{name}:{i}", data) for i, data in enumerate(records)]
    source = open_source(folder)
    assert source.encoding == "raw"
    assert pairs(source) == expected
    shares = [pairs(source.of_rank(rank, world)) for rank in range(world)]
    assert sorted(pair for share in shares for pair in share) == sorted(expected)


GOOD = record(b"first") + record(b"second")


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_every_flipped_byte_is_refused(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / "a.tfrecord"
    for at in range(len(GOOD)):
        damaged = GOOD[:at] + bytes([GOOD[at] ^ 4]) + GOOD[at + 1 :]
        path.write_bytes(gzip.compress(damaged) if packed else damaged)
        with pytest.raises(SampleError, match=r"a\.tfrecord is damaged"):
            list(open_source(path))


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_every_cut_is_refused(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / "a.tfrecord"
    for length in set(range(1, len(GOOD))) - {len(record(b"first"))}:
        path.write_bytes(gzip.compress(GOOD[:length]) if packed else GOOD[:length])
        with pytest.raises(SampleError, match=r"a\.tfrecord is cut off"):
            list(open_source(path))


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_absurd_lengths_are_refused(tmp_path: Path, packed: bool) -> None:
    length = struct.pack("<Q", 1 << 60)
    content = length + masked(length) + bytes(100)
    path = tmp_path / "a.tfrecord"
    path.write_bytes(gzip.compress(content) if packed else content)
    tracemalloc.start()
    with pytest.raises(SampleError, match=f"{1 << 60} bytes"):
        list(open_source(path))
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


def test_large_records_need_permission(tmp_path: Path) -> None:
    (tmp_path / "a.tfrecord").write_bytes(record(bytes(2000)))
    with pytest.raises(
        SampleError, match=r"record of 2000 bytes at byte 0: more than 1000 B.*max_sample_bytes"
    ):
        list(open_source(tmp_path / "a.tfrecord", max_sample_bytes=1000))


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    found = b""
    while value > 0x7F:
        found += bytes([value & 0x7F | 0x80])
        value >>= 7
    return found + bytes([value])


def feature(name: str, kind: int, values: bytes) -> bytes:
    return field(1, field(1, field(1, name.encode()) + field(2, field(kind, values))))


FEATURES = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    st.tuples(
        st.lists(st.binary(max_size=9), max_size=3)
        | st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1, max_size=4).map(
            lambda x: np.array(x, np.int64)
        )
        | st.lists(st.floats(width=32), min_size=1, max_size=4).map(lambda x: np.array(x, np.float32)),
        st.booleans(),
    ),
    max_size=4,
)


@given(FEATURES)
def test_examples_are_decoded_packed_or_not(features: dict[str, tuple[object, bool]]) -> None:
    data = b""
    for name, (values, packed) in features.items():
        if isinstance(values, list):
            data += feature(name, 1, b"".join(field(1, value) for value in values))
            continue
        assert isinstance(values, np.ndarray)
        if values.dtype == np.float32:
            each = [values[i : i + 1].tobytes() for i in range(len(values))]
            loose = b"".join(b"\x0d" + value for value in each)
        else:
            each = [varint(int(value)) for value in values]
            loose = b"".join(b"\x08" + value for value in each)
        kind = 2 if values.dtype == np.float32 else 3
        data += feature(name, kind, field(1, b"".join(each)) if packed else loose)
    found = example(data)
    assert list(found) == list(features)
    for name, (values, _) in features.items():
        if isinstance(values, np.ndarray):
            assert found[name].dtype == values.dtype and found[name].tobytes() == values.tobytes()
        else:
            assert found[name] == values


@given(st.binary(max_size=60))
def test_other_bytes_are_no_example(data: bytes) -> None:
    try:
        found = example(data)
    except InvalidFile:
        return
    assert all(isinstance(name, str) for name in found)


@pytest.mark.parametrize(
    "data",
    [b"\x0a\xff\xff\xff\xff\x0f", b"\x08\x01", b"\x0b", b"\xff" * 11, field(1, field(1, field(1, b"\xff")))],
)
def test_what_is_cut_off_or_wrong_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidFile, match=r"not a tf\.train\.Example"):
        example(data)
