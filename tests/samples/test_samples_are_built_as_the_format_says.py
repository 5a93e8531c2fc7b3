"""The builder's files equal, byte for byte, those of a slow writer that shares no code with it."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock._native import SampleNames, sample_keys, sample_sums
from penstock.samples.builder import Block, Builder, lookup_of
from penstock.storage.checksum import crc32c
from tests.support.stores import LARGE, key_of, write_store

CHUNK_BYTES = 4096
LONG_EDGE_BYTES = CHUNK_BYTES // 4
DATA_FILE_BYTES = 1 << 40
LIMITS = (0, 1, LONG_EDGE_BYTES, CHUNK_BYTES, 2 * CHUNK_BYTES)
NAMED_FILES = ("directory", "sums", "chunks", "names", "anchors", "large", "labels")

Sample = tuple[str, bytes]


class Written:
    """The files that a builder's pieces make, in memory."""

    def __init__(self) -> None:
        self.files: dict[str, bytearray] = {}
        self.last_data_file = 0

    def append(self, builder: Builder) -> None:
        pieces, files = builder.take()
        assert list(files) == [f"{name}.bin" for name in NAMED_FILES]
        contents = list(files.items())
        for data_file, data in pieces:
            assert data_file >= self.last_data_file
            self.last_data_file = data_file
            contents.append((f"data-{data_file:05d}.bin", data.tobytes()))
        assert builder.pending_bytes == 0
        for name, content in contents:
            if content:
                self.files.setdefault(name, bytearray()).extend(content)


def encode(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def joined(parts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """The parts side by side, and where each ends."""
    return np.frombuffer(b"".join(parts), np.uint8), np.cumsum([len(part) for part in parts], dtype=np.int64)


def add_many(builder: Builder, samples: Sequence[Sample], labels: Sequence[int] | None) -> None:
    names, name_ends = joined([encode(name) for name, _ in samples])
    data, data_ends = joined([data for _, data in samples])
    numbers = None if labels is None else np.array(labels, np.int32)
    builder.add_many(Block(names, name_ends, data, data_ends, numbers))


def columns(files: dict[str, bytearray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The directory, names and anchors of a builder's files, as arrays."""
    directory = np.frombuffer(bytes(files.get("directory.bin", b"")), np.uint64).reshape(-1, 2)
    names = np.frombuffer(bytes(files.get("names.bin", b"")), np.uint8)
    return directory, names, np.frombuffer(bytes(files.get("anchors.bin", b"")), np.uint64)


def build(samples: Sequence[Sample]) -> dict[str, bytearray]:
    builder, written = Builder(CHUNK_BYTES, DATA_FILE_BYTES), Written()
    for name, data in samples:
        builder.add(encode(name), data)
    builder.finish()
    written.append(builder)
    return written.files


def check_against_the_slow_writer(
    folder: Path,
    files: dict[str, bytearray],
    data_files: list[tuple[int, int, int]],
    samples: Sequence[Sample],
    labels: Sequence[int],
    data_file_bytes: int = DATA_FILE_BYTES,
) -> None:
    write_store(folder, samples, chunk_bytes=CHUNK_BYTES, data_file_bytes=data_file_bytes, labels=labels)
    expected = json.loads((folder / "store.json").read_text())["value"]
    assert data_files == [(each["samples"], each["chunks"], each["size_bytes"]) for each in expected["nodes"]]
    lookup, twins = lookup_of(*columns(files))
    assert twins is None
    found = {name: bytes(content) for name, content in files.items()} | {"lookup.bin": lookup.tobytes()}
    assert sorted(found) == sorted(path.name for path in folder.iterdir() if path.suffix == ".bin")
    for name, content in found.items():
        assert content == (folder / name).read_bytes(), name


names_of_samples = st.one_of(
    st.text(min_size=1, max_size=20),
    st.binary(min_size=1, max_size=60).map(lambda name: name.decode("utf-8", "surrogateescape")),
)
sizes_of_samples = st.one_of(
    st.integers(0, 300),
    st.builds(lambda size, by: max(0, size + by), st.sampled_from(LIMITS), st.integers(-2, 2)),
)


@st.composite
def sample_lists(draw: st.DrawFn, most_bytes: int) -> list[Sample]:
    names = draw(st.lists(names_of_samples, min_size=1, max_size=20, unique_by=encode))
    sizes = draw(st.lists(sizes_of_samples, min_size=len(names), max_size=len(names)))
    random = np.random.default_rng(len(names))
    return [(name, random.bytes(min(size, most_bytes))) for name, size in zip(names, sizes, strict=True)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stores")


@settings(max_examples=150)
@given(st.data())
def test_files_are_the_same_however_samples_arrive(folders: Path, data: st.DataObject) -> None:
    data_file_bytes = data.draw(
        st.sampled_from([DATA_FILE_BYTES, 1, CHUNK_BYTES, 10_000, 3 * CHUNK_BYTES + 1])
    )
    samples = data.draw(sample_lists(data_file_bytes))
    labels = data.draw(st.none() | st.just(list(range(5, 5 + len(samples)))))
    builder, written = Builder(CHUNK_BYTES, data_file_bytes), Written()
    cuts = data.draw(st.lists(st.tuples(st.integers(0, len(samples)), st.booleans()), max_size=6))
    done = 0
    for until, resumed in [*sorted(cuts), (len(samples), False)]:
        if until - done == 1:
            name, content = samples[done]
            builder.add(encode(name), content, -1 if labels is None else labels[done])
        else:
            add_many(builder, samples[done:until], labels and labels[done:until])
        done = until
        assert builder.samples == done
        if resumed:
            written.append(builder)
            builder = Builder(CHUNK_BYTES, data_file_bytes, builder.state())
    builder.finish()
    written.append(builder)
    check_against_the_slow_writer(
        Path(tempfile.mkdtemp(dir=folders)) / "store",
        written.files,
        builder.data_files,
        samples,
        labels or [-1] * len(samples),
        data_file_bytes,
    )


def test_a_sample_of_8_mib_has_its_length_beside_the_directory(tmp_path: Path) -> None:
    samples = [("just fits", b"\1" * (LARGE - 1)), ("empty", b""), ("large", b"\2" * LARGE), ("last", b"\3")]
    builder, written = Builder(CHUNK_BYTES, DATA_FILE_BYTES), Written()
    add_many(builder, samples[:2], None)
    written.append(builder)
    add_many(builder, samples[2:], None)
    builder.finish()
    written.append(builder)
    assert written.files["large.bin"] == struct.pack("<QQ", 2, LARGE)
    check_against_the_slow_writer(tmp_path / "store", written.files, builder.data_files, samples, [-1] * 4)


def test_bodies_of_many_kilobytes_have_the_right_checksum(tmp_path: Path) -> None:
    """Checksums of samples from 32 KiB on are joined rather than computed again."""
    sizes = [33_000, 100, 70_000, 20_000, 140_000, 5, 32_768, 32_767, 32_769, 65_535, 1, 0, 66_000, 0]
    random = np.random.default_rng(0)
    samples = [(f"{i}", random.bytes(size)) for i, size in enumerate(sizes)]
    builder, written = Builder(256 << 10, DATA_FILE_BYTES), Written()
    add_many(builder, samples, None)
    builder.finish()
    written.append(builder)
    write_store(tmp_path / "store", samples, chunk_bytes=256 << 10)
    for name in ("chunks.bin", "sums.bin", "data-00000.bin"):
        assert bytes(written.files[name]) == (tmp_path / "store" / name).read_bytes()


def test_nothing_is_built_of_nothing() -> None:
    builder = Builder(CHUNK_BYTES, DATA_FILE_BYTES)
    add_many(builder, [], None)
    builder.finish()
    assert (builder.data_files, builder.samples, builder.pending_bytes) == ([], 0, 0)
    lookup, twins = lookup_of(*columns({}))
    assert (lookup.tobytes(), twins) == (bytes(8), None)
    assert SampleNames(*columns({}), lookup).find(b"any") == -1


@pytest.mark.parametrize("size", [0, 1, 3, 4, 7, 8, 31, 32, 33, 63, 64, 100, 65535])
def test_keys_are_xxh64(size: int) -> None:
    name = bytes(i * 7 % 256 for i in range(size))
    (key,) = sample_keys(*joined([name])).tolist()
    assert key == key_of(name) == xxhash.xxh64_intdigest(name) % 2**48


def test_every_kind_of_buffer_is_taken() -> None:
    content = b"four kinds"
    builder, written = Builder(CHUNK_BYTES, DATA_FILE_BYTES), Written()
    for i, data in enumerate(
        [content, bytearray(content), memoryview(content), np.frombuffer(content, np.uint8)]
    ):
        builder.add(b"%d" % i, data)
    builder.finish()
    written.append(builder)
    assert written.files["data-00000.bin"].rstrip(b"\0") == 4 * content
    with pytest.raises(TypeError):
        builder.add(b"strided", memoryview(content)[::2])


def test_what_was_added_in_part_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = Builder(CHUNK_BYTES, DATA_FILE_BYTES)
    builder.add(b"whole", b"1")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(builder, "_add_chunks", interrupted)
    with pytest.raises(KeyboardInterrupt):
        builder.take()
    with pytest.raises(RuntimeError, match="broken off"):
        builder.take()


def test_memory_that_is_still_held_is_not_used_again() -> None:
    builder = Builder(CHUNK_BYTES, DATA_FILE_BYTES)
    held = []
    for i in range(40):
        builder.add(b"%d" % i, bytes([i]) * 300_000)
        held += [data for _, data in builder.take()[0]]
    joined_data = b"".join(data.tobytes() for data in held)
    assert joined_data == b"".join(bytes([i]) * 300_000 for i in range(40))


BAD = {
    "an empty name": ([b"a", b""], [b"", b""], "sample 1 has an empty name"),
    "a long name": ([b"a", b"n" * 65536], [b"", b""], "65536 bytes: at most 65535 fit"),
    "a sample larger than a data file": (
        [b"a", b"b"],
        [b"", b"x" * 9000],
        "9000 bytes: a data file takes at most 8192",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_batch_that_does_not_fit_changes_nothing(case: str) -> None:
    names, contents, message = BAD[case]
    builder = Builder(CHUNK_BYTES, 2 * CHUNK_BYTES)
    before = builder.state()
    with pytest.raises(ValueError, match=message):
        builder.add_many(Block(*joined(names), *joined(contents)))
    with pytest.raises(ValueError, match=message.replace("sample 1", "sample 0")):
        builder.add(names[1], contents[1])
    assert (builder.samples, builder.pending_bytes, builder.state()) == (0, 0, before)


@pytest.mark.parametrize("ends", [[2, 1], [-1, 2], [1, 4], [1], [1, 2, 3]])
def test_ends_must_ascend_within_the_bytes(ends: list[int]) -> None:
    builder = Builder(CHUNK_BYTES, DATA_FILE_BYTES)
    letters, good, bad = np.frombuffer(b"abc", np.uint8), np.array([1, 2], np.int64), np.array(ends, np.int64)
    for name_ends, data_ends in ((good, bad), (bad, good)):
        with pytest.raises(ValueError, match="ends"):
            builder.add_many(Block(letters, name_ends, letters, data_ends))
    with pytest.raises(ValueError, match="one label"):
        builder.add_many(Block(letters, good, letters, good, np.zeros(3, np.int32)))
    assert builder.pending_bytes == 0


def test_there_are_65536_data_files_and_no_more() -> None:
    builder = Builder(CHUNK_BYTES, 1)
    count = 65536
    letters = np.full(count + 1, ord("a"), np.uint8)
    ends = np.arange(1, count + 2, dtype=np.int64)
    with pytest.raises(ValueError, match="data file 65536 of 65536"):
        builder.add_many(Block(letters, ends, letters, ends))
    assert builder.samples == 0
    for begin in range(0, count, 4096):  # 16 MiB of padded data files at a time
        part = slice(begin, begin + 4096)
        builder.add_many(Block(letters[part], ends[:4096], letters[part], ends[:4096]))
        builder.take()
    with pytest.raises(ValueError, match="data file 65536 of 65536"):
        builder.add(b"one more", b"1")
    builder.add(b"of no bytes", b"")
    builder.finish()
    assert len(builder.data_files) == count
    assert builder.data_files[-1] == (2, 1, 1)


@pytest.mark.parametrize("chunk_bytes", [0, 1, 4095, 6000, (1 << 30) + 4096])
def test_chunks_are_of_whole_blocks(chunk_bytes: int) -> None:
    with pytest.raises(ValueError, match="multiple of 4096"):
        Builder(chunk_bytes, DATA_FILE_BYTES)


@pytest.mark.parametrize("data_file_bytes", [0, (1 << 40) + 1])
def test_data_files_have_a_largest_size(data_file_bytes: int) -> None:
    with pytest.raises(ValueError, match="data_file_bytes"):
        Builder(CHUNK_BYTES, data_file_bytes)


@settings(max_examples=100)
@given(st.data())
def test_a_damaged_state_is_refused(data: st.DataObject) -> None:
    builder = Builder(CHUNK_BYTES, CHUNK_BYTES)
    add_many(builder, [(f"{i}", bytes(1000)) for i in range(20)], None)
    builder.take()
    state = bytearray(builder.state())
    Builder(CHUNK_BYTES, CHUNK_BYTES, bytes(state))
    if data.draw(st.booleans()):
        state[data.draw(st.integers(0, len(state) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del state[data.draw(st.integers(1, len(state) - 1)) :]
    with pytest.raises(ValueError, match="no state of a builder"):
        Builder(CHUNK_BYTES, CHUNK_BYTES, bytes(state))


def test_a_state_belongs_to_its_sizes_and_follows_a_take() -> None:
    builder = Builder(CHUNK_BYTES, DATA_FILE_BYTES)
    state = builder.state()
    with pytest.raises(ValueError, match="chunk_bytes=4096"):
        Builder(2 * CHUNK_BYTES, DATA_FILE_BYTES, state)
    builder.add(b"a", b"")
    with pytest.raises(RuntimeError, match="take them first"):
        builder.state()
    builder.take()
    builder.finish()
    builder.take()
    again = Builder(CHUNK_BYTES, DATA_FILE_BYTES, builder.state())
    assert again.data_files == builder.data_files == [(1, 1, 0)]
    with pytest.raises(RuntimeError, match="finished"):
        again.add(b"b", b"")


@given(st.lists(st.binary(max_size=3000), max_size=20))
def test_sums_of_samples_back_to_back(samples: list[bytes]) -> None:
    data, ends = joined(samples)
    found = sample_sums(data.ctypes.data, ends)
    assert found.dtype == np.uint32
    assert found.tolist() == [crc32c(sample) for sample in samples]


@pytest.mark.parametrize("ends", [[-1], [3, 2]])
def test_sums_are_of_ends_that_ascend(ends: list[int]) -> None:
    data = np.zeros(10, np.uint8)
    with pytest.raises(ValueError, match="ascend"):
        sample_sums(data.ctypes.data, np.array(ends, np.int64))
