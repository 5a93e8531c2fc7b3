"""`penstock.samples.verify` finds any changed bit of a store, names the samples it hit, and reads on."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidFile, SampleError
from penstock.samples import verification
from penstock.samples.inspection import info
from penstock.samples.verification import DamagedSample, verify
from tests.support.stores import crc32c, write_store

CLASSES = ["blue", "green", "grey"]

quick = settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)


def samples(count: int = 120, seed: int = 1) -> list[tuple[str, bytes]]:
    random_ = random.Random(seed)
    sizes = [0, 1, 10, 500, 1023, 1024, 1025, 3000, 5000, 30_000]
    return [(f"{i % 3}/ä {i}", random_.randbytes(random_.choice(sizes))) for i in range(count)]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "store"
    labels = [i % 4 - 1 for i in range(120)]
    write_store(folder, samples(), data_file_bytes=300_000, labels=labels, classes=CLASSES)
    return folder


@pytest.fixture
def store(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture(params=[8192, verification.PIECE_BYTES])
def piece_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Small pieces, so that samples go on from one to the next, and the usual ones."""
    monkeypatch.setattr(verification, "PIECE_BYTES", request.param)
    monkeypatch.setattr(verification, "ENTRIES_AT_ONCE", 7)
    return int(request.param)


def reseal(store: Path, name: str) -> None:
    """Make the manifest agree with a file that was changed, as a faulty packer would."""
    document = json.loads((store / "store.json").read_text())
    value = document["value"]
    content = (store / name).read_bytes()
    value["files"][name] = {"size_bytes": len(content), "crc32c": crc32c(content)}
    value["crc32c"] = 0
    value["crc32c"] = crc32c(json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode())
    (store / "store.json").write_text(json.dumps(document, ensure_ascii=False))


def change(path: Path, at: int, mask: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= mask
    path.write_bytes(content)


def test_a_sound_store_is_sound(store: Path, piece_bytes: int) -> None:
    told: list[tuple[int, int]] = []
    found = verify(store, lambda *so_far: told.append(so_far))
    assert found.sound and found.samples == 120
    assert found.size_bytes == sum(len(data) for _, data in samples())
    assert told == sorted(told) and told[-1][0] == 120


@pytest.mark.parametrize("count", [0, 1])
def test_the_smallest_stores_are_sound(count: int, tmp_path: Path) -> None:
    write_store(tmp_path / "store", samples(count))
    assert verify(tmp_path / "store").sound


@quick
@given(data=st.data())
def test_any_flipped_bit_is_found(sound: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(file.name for file in sound.iterdir())))
    path = sound / name
    content = path.read_bytes()
    at = data.draw(st.integers(0, len(content) - 1))
    try:
        change(path, at, 1 << data.draw(st.integers(0, 7)))
        try:
            assert not verify(sound).sound
        except InvalidFile:
            assert name == "store.json"  # without it nothing can be said
    finally:
        path.write_bytes(content)
    assert verify(sound).sound


def test_damaged_samples_are_named_and_no_others(store: Path, piece_bytes: int) -> None:
    held = samples()
    hit = [3, 17, 40, 41, 88]
    offset, data_file = 0, 0
    for index, (_, data) in enumerate(held):
        if offset and offset + len(data) > 300_000:
            data_file, offset = data_file + 1, 0
        if index in hit and data:
            change(store / f"data-{data_file:05d}.bin", offset + len(data) - 1, 0x80)
        offset += len(data)
    found = verify(store)
    expected = tuple(DamagedSample(index, held[index][0]) for index in hit if held[index][1])
    assert found.damaged == expected and found.complete and not found.sound
    assert found.problems == ()


def test_damage_is_counted_over_all_parts(tmp_path: Path) -> None:
    for partition in range(2):
        write_store(
            tmp_path / f"part-0000{partition}-of-00002",
            samples(20, seed=partition),
            part=partition,
            parts=2,
        )
    assert verify(tmp_path).sound
    last = tmp_path / "part-00001-of-00002" / "data-00000.bin"
    size_bytes = sum(len(data) for _, data in samples(20, seed=1))
    change(last, size_bytes - 1, 1)
    change(last, last.stat().st_size - 1, 1)
    found = verify(tmp_path)
    index = max(i for i, (_, data) in enumerate(samples(20, seed=1)) if data)
    assert [damaged.index for damaged in found.damaged] == [20 + index]
    assert found.problems == (
        "part-00001-of-00002/data-00000.bin has something other than zeros after its last sample",
    )
    shutil.rmtree(tmp_path / "part-00001-of-00002")
    with pytest.raises(SampleError, match="part-00001-of-00002"):
        verify(tmp_path)


@pytest.mark.parametrize("name", ["data-00001.bin", "directory.bin", "names.bin", "labels.bin"])
def test_what_was_cut_or_is_missing_is_named(name: str, store: Path) -> None:
    whole = (store / name).stat().st_size
    os.truncate(store / name, whole - 1)
    (problem,) = verify(store).problems
    assert f"{store / name} was cut short: it has {whole - 1} bytes, not {whole}" in problem
    (store / name).unlink()
    (problem,) = verify(store).problems
    assert f"{store / name} is missing" in problem


def test_names_that_are_lost_do_not_hide_damage(store: Path) -> None:
    (store / "names.bin").unlink()
    first = next(i for i, (_, data) in enumerate(samples()) if data)
    change(store / "data-00000.bin", 0, 1)
    found = verify(store)
    assert found.damaged == (DamagedSample(first, None),) and found.complete


def entry(store: Path, index: int, **changes: int) -> None:
    path = store / "directory.bin"
    content = bytearray(path.read_bytes())
    place, extent = struct.unpack_from("<QQ", content, 16 * index)
    fields = {
        "data_file": place >> 48,
        "key": place & (1 << 48) - 1,
        "offset": extent >> 24,
        "length": extent >> 1 & (1 << 23) - 1,
        "present": extent & 1,
    }
    for field, by in changes.items():
        fields[field] += by
    place = fields["data_file"] << 48 | fields["key"]
    extent = fields["offset"] << 24 | fields["length"] << 1 | fields["present"]
    struct.pack_into("<QQ", content, 16 * index, place, extent)
    path.write_bytes(content)
    reseal(store, "directory.bin")


@pytest.mark.parametrize(
    "changes", [{"offset": 1}, {"length": 1}, {"data_file": 1}, {"data_file": 9}, {"present": 1}]
)
def test_a_directory_that_contradicts_itself_is_found(changes: dict[str, int], store: Path) -> None:
    entry(store, 50, **changes)
    found = verify(store)
    assert not found.sound and not found.complete
    assert "directory.bin" in found.problems[0]


def test_a_length_that_stands_in_no_other_file_is_found(store: Path) -> None:
    (_, extent) = struct.unpack_from("<QQ", (store / "directory.bin").read_bytes(), 16 * 50)
    entry(store, 50, length=(1 << 23) - 1 - (extent >> 1 & (1 << 23) - 1))
    found = verify(store)
    assert not found.complete and "directory.bin: the entry of sample 50" in found.problems[0]
    with pytest.raises(InvalidFile, match=r"large\.bin does not list"):
        info(store)


def test_a_key_that_is_not_its_names_is_found(store: Path) -> None:
    entry(store, 50, key=1)
    found = verify(store)
    assert "the directory's key of sample 50 is not that of its name" in found.problems
    assert found.complete and not found.damaged


@pytest.mark.parametrize(
    ("name", "at", "said"),
    [
        ("anchors.bin", 8, "anchors.bin"),
        ("lookup.bin", 0, "lookup.bin"),
        ("chunks.bin", 0, "chunks.bin is wrong about which samples begin in 1 chunks, the first 0"),
        ("chunks.bin", 8, "chunks.bin has a wrong checksum for chunk 0 of data-00000.bin"),
        ("chunks.bin", 12, "chunks.bin is wrong about which samples begin"),
        ("labels.bin", 3, "labels.bin gives sample 0 the class"),
        ("sums.bin", 4, ""),
    ],
)
def test_files_that_agree_with_the_manifest_but_not_with_others(
    name: str, at: int, said: str, store: Path
) -> None:
    change(store / name, at, 0x40)
    reseal(store, name)
    found = verify(store)
    assert not found.sound
    assert any(said in problem for problem in found.problems) or [d.index for d in found.damaged] == [1]


def test_a_disk_that_fails_is_reported_and_read_on(
    store: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    reading = os.preadv

    def failing(descriptor: int, buffers: Any, offset: int, *flags: int) -> int:
        if offset == 0 and os.readlink(f"/proc/self/fd/{descriptor}").endswith("data-00000.bin"):
            raise OSError(5, "Input/output error")
        return reading(descriptor, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", failing)
    found = verify(store)
    assert not found.sound and found.damaged[0].index == 0
    assert "data-00000.bin cannot be read from 0 to" in found.problems[0]
    assert "Input/output error" in found.problems[0]


def test_a_disk_that_hangs_ends_the_wait(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = threading.Event()
    monkeypatch.setattr(verification, "READ_TIMEOUT_S", 0.05)
    monkeypatch.setattr(os, "preadv", lambda *_: hanging.wait(20) and 0)
    try:
        with pytest.raises(SampleError, match=r"waited .*data-00000.bin, bytes 0 to"):
            verify(store)
    finally:
        hanging.set()


HANGING = """
import os, sys, threading
from penstock.errors import SampleError
from penstock.samples import verification

verification.READ_TIMEOUT_S = 0.05
os.preadv = lambda *_: threading.Event().wait()
try:
    verification.verify(sys.argv[1])
except SampleError as error:
    print(error)
"""


def test_a_process_ends_though_a_disk_hangs(store: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HANGING, str(store)], check=True, capture_output=True, text=True, timeout=60
    )
    assert "waited" in ended.stdout


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SampleError, match="is not a sample store"):
        verify(tmp_path)
    with pytest.raises(SampleError):
        verify(tmp_path / "missing")
