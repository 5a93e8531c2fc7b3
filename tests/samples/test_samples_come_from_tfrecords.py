"""TFRecords become samples as they are; files that are damaged or hostile are refused."""

from __future__ import annotations

import gzip
import struct
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import SampleError
from penstock.samples.sources import RawSample, Source, open_source
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
    tmp_path_factory: pytest.TempPathFactory, files: list[list[bytes]], packed: bool, world_size: int
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
    shares = [pairs(source.of_rank(rank, world_size)) for rank in range(world_size)]
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
