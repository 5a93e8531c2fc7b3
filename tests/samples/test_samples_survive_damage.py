"""Damage is found, named and, where that is wished, gone around. Nothing wrong is ever given out."""

from __future__ import annotations

import contextlib
import logging
import pickle
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidFile, PenstockError, SampleError
from penstock.samples.store import Store, mount
from tests.support.sample_stores import Sample, epoch, some_samples
from tests.support.stores import write_store

CONTENT = some_samples(60)
FILES = [
    *("store.json", "directory.bin", "sums.bin", "chunks.bin", "names.bin", "anchors.bin", "lookup.bin"),
    *("labels.bin", "data-00000.bin", "data-00001.bin"),
]
quick = settings(
    max_examples=150,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "store"
    write_store(folder, CONTENT, data_file_bytes=60_000, labels=[0] * len(CONTENT), classes=["one"])
    assert (folder / "data-00001.bin").exists()
    return folder


class Changed:
    """A file of a store with other bytes, until the end of the block."""

    def __init__(self, path: Path, data: bytes) -> None:
        self._path, self._data = path, data

    def __enter__(self) -> None:
        self._right = self._path.read_bytes()
        self._path.write_bytes(self._data)

    def __exit__(self, *_: object) -> None:
        self._path.write_bytes(self._right)


def flipped(path: Path, place: int, bit: int) -> Changed:
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 1 << bit
    return Changed(path, bytes(data))


def everything(store: Store) -> list[Sample]:
    """Samples read in every way there is, which must agree."""
    read = [(name, store.read(name)) for name in store.names()]
    assert [store.read(index) for index in range(len(store))] == [data for _, data in read]
    for order in (0, 1):
        store.sequence(seed=order)
        assert epoch(store) == {index: data for index, (_, data) in enumerate(read)}
    return read


@quick
@given(
    file=st.sampled_from(FILES),
    place=st.integers(0, 1 << 20),
    bit=st.integers(0, 7),
    order=st.sampled_from(["full", "chunk"]),
)
@example(file="store.json", place=12, bit=7, order="full")
def test_a_flipped_bit_gives_an_error_or_changes_nothing(
    sound: Path, file: str, place: int, bit: int, order: str
) -> None:
    with flipped(sound / file, place, bit):
        try:
            with mount(sound, order, "64KiB", timeout_s=10) as store:
                assert everything(store) == CONTENT
                assert store.labels is not None
                assert not store.labels.any()
        except (InvalidFile, SampleError) as error:
            assert str(sound) in str(error)


WORDS = st.sampled_from([0, 1, 255, 1 << 23, 1 << 24, (1 << 24) - 1, 1 << 39, 1 << 63, (1 << 64) - 1])


@quick
@given(
    file=st.sampled_from(FILES[1:]),
    words=st.lists(st.tuples(st.integers(0, 1 << 16), WORDS | st.integers(0, (1 << 64) - 1)), max_size=4),
    order=st.sampled_from(["full", "chunk"]),
    on_damage=st.sampled_from(["raise", "skip"]),
)
def test_without_verification_nothing_in_a_store_ends_the_process(
    sound: Path, file: str, words: list[tuple[int, int]], order: str, on_damage: str
) -> None:
    data = bytearray((sound / file).read_bytes())
    for place, word in words:
        struct.pack_into("<Q", data, place % (len(data) // 8) * 8, word)
    options: dict[str, Any] = {"verify": False, "on_damage": on_damage, "timeout_s": 10}
    with Changed(sound / file, bytes(data)):
        for use in (by_name, at_once, in_order):
            with contextlib.suppress(PenstockError), mount(sound, order, "64KiB", **options) as store:
                use(store)


def by_name(store: Store) -> None:
    for name in store.names():
        if name in store:
            store.read(name)


def at_once(store: Store) -> None:
    store.read_many(range(len(store)))


def in_order(store: Store) -> None:
    while store.bread(7) is not None:
        pass


@quick
@given(file=st.sampled_from(FILES), size_bytes=st.integers(0, 1 << 18))
def test_a_file_of_another_size_is_refused(sound: Path, file: str, size_bytes: int) -> None:
    data = (sound / file).read_bytes()
    if size_bytes % (2 * len(data)) == len(data):
        return
    changed = data.ljust(2 * len(data), b"\0")[: size_bytes % (2 * len(data))]
    refusal = pytest.raises(InvalidFile, match=str(sound / file))
    with Changed(sound / file, changed), refusal, mount(sound) as store:
        store.read(CONTENT[0][0])


@pytest.fixture
def hurt(sound: Path, tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A store with a damaged sample, and which one that is: neither in the first chunk nor in the last."""
    folder = tmp_path / "hurt"
    shutil.copytree(sound, folder)
    index = next(index for index in range(20, 60) if len(CONTENT[index][1]) == 900)
    offset = sum(len(data) for _, data in CONTENT[:index])
    with flipped(folder / "data-00000.bin", offset + 450, 3):
        yield folder, index


@pytest.mark.parametrize("order", ["full", "chunk"])
def test_damage_in_mid_epoch_is_an_error_that_names_it(hurt: tuple[Path, int], order: str) -> None:
    folder, index = hurt
    with mount(folder, order, "64KiB") as store:
        with pytest.raises(SampleError) as refusal:
            epoch(store)
        text = str(refusal.value)
        assert f"sample {index} ('0/{index}')" in text
        assert str(folder / "data-00000.bin") in text
        assert "checksum" in text
        assert "on_damage='skip'" in text
        assert str(pickle.loads(pickle.dumps(refusal.value))) == text
        with pytest.raises(SampleError, match=f"sample {index} "):
            store.bread(1)
        store.sequence(seed=1)
        with pytest.raises(SampleError, match=f"sample {index} "):
            epoch(store)


@pytest.mark.parametrize("order", ["full", "chunk"])
def test_damage_is_skipped_where_that_is_wished(
    hurt: tuple[Path, int], order: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder, index = hurt
    with mount(folder, order, "64KiB", on_damage="skip") as store:
        assert store.damaged == []
        with caplog.at_level(logging.WARNING, "penstock"):
            for seed in range(3):
                store.sequence(seed=seed)
                found = epoch(store)
                assert found == {i: data for i, (_, data) in enumerate(CONTENT) if i != index}
                assert store.taken == store.replica_size == len(CONTENT)
        assert store.damaged == [index]
        told = [record for record in caplog.records if "damaged and was left out" in record.getMessage()]
        assert len(told) == 1
        assert f"sample {index}" in told[0].getMessage()


def test_single_reads_of_damaged_samples_fail_in_any_case(hurt: tuple[Path, int]) -> None:
    folder, index = hurt
    for on_damage in ("raise", "skip"):
        with mount(folder, on_damage=on_damage) as store:
            for read in (store.read, store.open, store.sample, lambda index: store.read_many([0, index])):
                with pytest.raises(SampleError, match=f"sample {index} "):
                    read(index)
            assert store.read(index - 1) == CONTENT[index - 1][1]
            assert store.read(index + 1) == CONTENT[index + 1][1]


def test_verification_can_be_left_out(hurt: tuple[Path, int]) -> None:
    folder, index = hurt
    with mount(folder, verify=False) as store:
        assert store.read(index) != CONTENT[index][1]


@pytest.mark.parametrize("order", ["full", "chunk"])
@pytest.mark.parametrize("io", ["buffered", "direct"])
def test_a_data_file_cut_while_mounted_is_an_error(sound: Path, tmp_path: Path, order: str, io: str) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(sound, folder)
    with mount(folder, order, "64KiB", io=io) as store:
        with open(folder / "data-00001.bin", "r+b") as file:
            file.truncate(4096)
        with pytest.raises(SampleError, match=r"data-00001\.bin"):
            epoch(store)
        assert store.read(0) == CONTENT[0][1]
    with mount(sound, order, "64KiB", io=io) as store:
        assert len(epoch(store)) == len(CONTENT)


def test_many_damaged_samples_leave_the_others(sound: Path, tmp_path: Path) -> None:
    folder = tmp_path / "zeros"
    shutil.copytree(sound, folder)
    (folder / "data-00001.bin").write_bytes(bytes((folder / "data-00001.bin").stat().st_size))
    with mount(folder, "chunk", "64KiB", on_damage="skip") as store:
        found = epoch(store)
        assert found.keys() | set(store.damaged) == set(range(len(CONTENT)))
        assert not found.keys() & set(store.damaged)
        assert all(data == CONTENT[index][1] for index, data in found.items())
        assert store.damaged
