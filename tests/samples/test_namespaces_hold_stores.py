"""A store on a namespace is what its folder was, whatever interrupts its upload; damage is no store."""

from __future__ import annotations

import contextlib
import os
import random
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidFile, PenstockError, SampleError
from penstock.samples.remote.layout import (
    ALIGNMENT_BYTES,
    StoredFile,
    Superblock,
    decoded_progress,
    decoded_table,
    encoded_progress,
    encoded_table,
    find_superblock,
    plan_upload,
)
from penstock.samples.remote.store import contents, read_bytes, read_store, read_superblock
from penstock.samples.remote.upload import LocalStore, local_store, upload_to
from penstock.storage.checksum import crc32c
from penstock.storage.nvme import lease
from tests.support.devices import Broken, MemoryDevice
from tests.support.sample_stores import some_samples
from tests.support.stores import extract_namespace, write_store
from tests.support.stores import read_store as read_folder

MIB = 1 << 20
NAME = "nvme+tcp://host:4420/nqn?ns=1"
CONTENT = some_samples(2000)  # 2.5 MB: more extents than are written at once
slow_enough = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module", autouse=True)
def nobody_else_writes() -> Iterator[None]:
    """What is in this process's memory is not waited for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lease, "_OTHERS_S", 0.0)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores") / "store"
    write_store(folder, CONTENT, data_file_bytes=1_300_000, labels=[0] * len(CONTENT), classes=["one"])
    return folder


@pytest.fixture(scope="module")
def store(folder: Path) -> LocalStore:
    return local_store(folder)


@pytest.fixture(scope="module")
def uploaded(store: LocalStore) -> bytes:
    device = MemoryDevice(24 * MIB)
    upload_to(device, NAME, store, extent_bytes=MIB)
    return bytes(device.content)


def files_of(device: MemoryDevice) -> dict[str, bytes]:
    """All files, as the reader of namespaces finds them; their checksums are right."""
    _, _, partitions = read_store(device, NAME)
    found = {}
    for files in partitions.values():
        for file in files.values():
            found[file.name] = read_bytes(device, file.offset, file.size_bytes).tobytes()
            assert crc32c(found[file.name]) == file.crc32c
    return found


def originals(store: LocalStore) -> dict[str, bytes]:
    return {name: path.read_bytes() for name, path in store.paths.items()}


@pytest.mark.parametrize("block_bytes", [512, 4096, 65536])
def test_every_byte_comes_back(store: LocalStore, block_bytes: int) -> None:
    device = MemoryDevice(24 * MIB, block_bytes)
    steps: list[tuple[int, int]] = []
    done = upload_to(device, NAME, store, extent_bytes=MIB, progress=lambda *step: steps.append(step))
    assert files_of(device) == originals(store)
    size_bytes = sum(store.sizes.values())
    assert (done.size_bytes, done.written_bytes, done.files) == (size_bytes, size_bytes, len(store.sizes))
    assert steps[0] == (0, size_bytes)
    assert steps[-1] == (size_bytes, size_bytes)
    assert not any(device.content[done.used_bytes :])


def test_an_independent_reader_finds_every_sample(uploaded: bytes, tmp_path: Path) -> None:
    (folder,) = extract_namespace(uploaded, tmp_path)
    assert read_folder(folder) == CONTENT


def test_an_independent_reader_finds_every_partition(tmp_path: Path) -> None:
    parts = [some_samples(30, seed) for seed in range(2)]
    for number, samples in enumerate(parts):
        write_store(tmp_path / "in" / f"part-0000{number}-of-00002", samples, part=number, parts=2)
    device = MemoryDevice(64 * MIB)
    upload_to(device, NAME, local_store(tmp_path / "in"))
    folders = extract_namespace(bytes(device.content), tmp_path / "out")
    assert [folder.name for folder in folders] == ["part-00000-of-00002", "part-00001-of-00002"]
    assert [read_folder(folder) for folder in folders] == parts


def test_a_store_that_is_there_is_left_as_it_is(store: LocalStore, uploaded: bytes) -> None:
    device = MemoryDevice(24 * MIB, content=uploaded)
    assert upload_to(device, NAME, store, extent_bytes=MIB).written_bytes == 0
    assert device.writes == 0
    assert upload_to(device, NAME, store, extent_bytes=MIB, overwrite=True).written_bytes > 0
    assert files_of(device) == originals(store)


@given(st.integers(0, 32), st.integers(0, 32), st.integers(0, 1 << 30))
@slow_enough
def test_an_interrupted_upload_goes_on(store: LocalStore, first: int, second: int, seed: int) -> None:
    """Whatever was lost with the power, nothing is a store before all of it is there."""
    junk = random.Random(seed).randbytes(24 * MIB) if seed % 2 else b""
    device = MemoryDevice(24 * MIB, content=junk)
    whole = originals(store)
    for attempt, fails_at in enumerate((first, second)):
        overwrite = needs_overwrite(device)
        device.fails_at = device._steps + fails_at
        with contextlib.suppress(Broken):
            upload_to(device, NAME, store, extent_bytes=MIB, overwrite=overwrite)
        device.lose_power(seed + attempt)
        if first >= 4:  # the marker was written twice, then the first superblock, and flushed
            assert not needs_overwrite(device)
        with contextlib.suppress(SampleError, InvalidFile):
            assert files_of(device) == whole
    upload_to(device, NAME, store, extent_bytes=MIB, overwrite=needs_overwrite(device))
    device.lose_power(seed)
    assert files_of(device) == whole


def needs_overwrite(device: MemoryDevice) -> bool:
    """It holds what is not penstock's, or a superblock of which a part was written."""
    try:
        return read_superblock(device, NAME)[0] is None and contents(device) is not None
    except InvalidFile:
        return True


def test_only_what_is_durable_is_noted_as_durable(store: LocalStore) -> None:
    plan = plan_upload(store.sizes, extent_bytes=MIB)
    noted = []

    class Watched(MemoryDevice):
        def write(self, offset: int, view: memoryview) -> None:
            if offset == plan.superblock.progress_offset and any(view):
                assert self.all_is_durable
                noted.append(bytes(view))
            super().write(offset, view)

    upload_to(Watched(24 * MIB), NAME, store, extent_bytes=MIB)
    assert len(noted) == 2


def test_what_is_durable_is_not_written_again(store: LocalStore) -> None:
    device = MemoryDevice(24 * MIB)
    device.fails_at = 21
    with pytest.raises(Broken):
        upload_to(device, NAME, store, extent_bytes=MIB)
    device.fails_at = None
    assert 0 < upload_to(device, NAME, store, extent_bytes=MIB).written_bytes < sum(store.sizes.values())


def test_what_a_drive_has_lost_is_written_again(store: LocalStore, caplog: pytest.LogCaptureFixture) -> None:
    device = MemoryDevice(24 * MIB)
    device.fails_at = 21
    with pytest.raises(Broken):
        upload_to(device, NAME, store, extent_bytes=MIB)
    device.fails_at = None
    plan = plan_upload(store.sizes, extent_bytes=MIB)
    for extent in plan.each_extent():
        device.content[extent.offset] ^= 1
    upload_to(device, NAME, store, extent_bytes=MIB)
    assert "does not hold what was uploaded to it before" in caplog.text
    assert files_of(device) == originals(store)


CONTENTS = {
    "a partition table (GPT)": (512, b"EFI PART"),
    "an ext2, ext3 or ext4 file system": (1080, b"\x53\xef"),
    "an XFS file system": (0, b"XFSB"),
    "a btrfs file system": (65600, b"_BHRfS_M"),
    "a volume of LVM": (512, b"LABELONE"),
    "a partition table or a boot sector": (510, b"\x55\xaa"),
    "data that is not penstock's": (900_000, b"x"),
}


@pytest.mark.parametrize("what", CONTENTS)
def test_what_is_there_is_not_destroyed(store: LocalStore, what: str) -> None:
    offset, magic = CONTENTS[what]
    device = MemoryDevice(24 * MIB)
    device.content[offset : offset + len(magic)] = magic
    with pytest.raises(SampleError, match="nothing was written") as raised:
        upload_to(device, NAME, store)
    assert f"{NAME} holds {what}" in str(raised.value)
    assert device.writes == 0
    with pytest.raises(SampleError, match="has no sample store: it holds"):
        read_store(device, NAME)
    upload_to(device, NAME, store, overwrite=True)
    assert files_of(device) == originals(store)
    assert device.content[offset : offset + len(magic)] != magic


def test_another_store_is_replaced_only_where_that_is_said(uploaded: bytes, tmp_path: Path) -> None:
    write_store(tmp_path, some_samples(40, seed=2))
    other = local_store(tmp_path)
    device = MemoryDevice(24 * MIB, content=uploaded)
    with pytest.raises(SampleError, match="holds another store: nothing was written"):
        upload_to(device, NAME, other)
    assert device.writes == 0
    device.fails_at = 9
    with pytest.raises(Broken):
        upload_to(device, NAME, other, overwrite=True)
    device.fails_at = None
    with pytest.raises(SampleError, match="was not finished"):
        read_store(device, NAME)
    upload_to(device, NAME, other)  # it goes on: what was there is gone
    assert files_of(device) == originals(other)


def test_part_of_another_store_is_not_gone_on_with(store: LocalStore, tmp_path: Path) -> None:
    device = MemoryDevice(24 * MIB)
    device.fails_at = 15
    with pytest.raises(Broken):
        upload_to(device, NAME, store)
    device.fails_at = None
    write_store(tmp_path, CONTENT[1:], data_file_bytes=1_300_000)
    with pytest.raises(SampleError, match="part of another store, whose upload was broken off"):
        upload_to(device, NAME, local_store(tmp_path))


def test_one_superblock_is_enough(store: LocalStore, uploaded: bytes) -> None:
    for offset in (0, 512 << 10):
        device = MemoryDevice(24 * MIB, content=uploaded)
        device.content[offset + 100] ^= 1
        _, problems, _ = read_store(device, NAME)
        assert len(problems) == 1
        assert "damaged" in problems[0]
        assert files_of(device) == originals(store)


def test_no_superblock_is_an_error(store: LocalStore, uploaded: bytes) -> None:
    device = MemoryDevice(24 * MIB, content=uploaded)
    device.content[100] ^= 1
    device.content[(512 << 10) + 100] ^= 1
    with pytest.raises(InvalidFile, match=r"first superblock .* damaged.*second superblock .* damaged"):
        read_store(device, NAME)
    with pytest.raises(SampleError, match="nothing was written"):
        upload_to(device, NAME, store)
    upload_to(device, NAME, store, overwrite=True)
    assert files_of(device) == originals(store)


def test_sizes_that_do_not_fit_are_told(store: LocalStore, uploaded: bytes) -> None:
    device = MemoryDevice(8 * MIB)
    with pytest.raises(SampleError, match=r"too small: it has 8.* and the store needs 1"):
        upload_to(device, NAME, store)
    assert device.writes == 0
    shrunk = MemoryDevice(8 * MIB, content=uploaded[: 8 * MIB])
    with pytest.raises(InvalidFile, match="the namespace was made smaller"):
        read_store(shrunk, NAME)
    grown = MemoryDevice(32 * MIB, content=uploaded)
    assert files_of(grown) == originals(store)


def test_an_empty_namespace_says_so() -> None:
    for size_bytes in (4096, 2 * MIB):
        with pytest.raises(SampleError, match=r"no sample store: it is empty\. Upload one"):
            read_store(MemoryDevice(size_bytes), NAME)


def test_a_damaged_store_is_not_uploaded(folder: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "store"
    for name in os.listdir(folder):
        (damaged / name).parent.mkdir(exist_ok=True)
        (damaged / name).write_bytes((folder / name).read_bytes())
    names = bytearray((damaged / "names.bin").read_bytes())
    names[9] ^= 1
    (damaged / "names.bin").write_bytes(names)
    device = MemoryDevice(24 * MIB)
    with pytest.raises(InvalidFile, match=r"names.bin is damaged"):
        upload_to(device, NAME, local_store(damaged))
    with pytest.raises(SampleError, match="not finished"):
        read_store(device, NAME)
    os.truncate(damaged / "data-00001.bin", 4096)
    with pytest.raises(InvalidFile, match=r"data-00001.bin was cut short"):
        local_store(damaged)


# What lies on a namespace may come from anybody.

superblocks = st.builds(
    Superblock,
    generation=st.integers(0, (1 << 64) - 1),
    complete=st.booleans(),
    upload_id=st.binary(min_size=16, max_size=16),
    store_id=st.binary(min_size=16, max_size=16),
    namespace_bytes=st.integers(0, (1 << 64) - 1),
    used_bytes=st.integers(0, (1 << 64) - 1),
    table_offset=st.integers(0, (1 << 64) - 1),
    table_bytes=st.integers(0, (1 << 64) - 1),
    table_crc32c=st.integers(0, (1 << 32) - 1),
    files=st.integers(0, (1 << 32) - 1),
    progress_offset=st.integers(0, (1 << 64) - 1),
    progress_bytes=st.integers(0, (1 << 64) - 1),
    extent_bytes=st.integers(0, (1 << 32) - 1),
)
sizes = st.dictionaries(
    st.sampled_from(["store.json", "directory.bin", "sums.bin", "data-00000.bin", "data-00017.bin"]),
    st.integers(0, 1 << 44),
    min_size=1,
)


@given(superblocks, st.integers(0, 1 << 64))
def test_superblocks_are_believed_only_where_they_can_be_true(
    superblock: Superblock, namespace_bytes: int
) -> None:
    encoded = superblock.encoded()
    assert len(encoded) == 512
    with contextlib.suppress(InvalidFile):
        found, problems = find_superblock([encoded, encoded], namespace_bytes, NAME)
        assert found == superblock
        assert problems == ()
        assert superblock.table_bytes <= superblock.used_bytes <= namespace_bytes


@given(sizes, st.binary(min_size=32, max_size=32))
def test_plans_have_room_for_everything(sizes: dict[str, int], ids: bytes) -> None:
    plan = plan_upload(sizes)
    superblock = replace(plan.superblock, upload_id=ids[:16], store_id=ids[16:])
    superblock = replace(superblock, namespace_bytes=superblock.used_bytes)
    found, _ = find_superblock([superblock.encoded()] * 2, superblock.used_bytes, NAME)
    assert found == superblock
    end = superblock.progress_offset + superblock.progress_bytes
    for file in plan.files:
        assert end <= file.offset
        assert file.offset % ALIGNMENT_BYTES == 0
        end = file.offset + file.size_bytes
    assert end <= superblock.used_bytes
    assert {file.name: file.size_bytes for file in plan.files} == sizes
    if sum(sizes.values()) < 1 << 34:
        extents = list(plan.each_extent())
        assert [extent.number for extent in extents] == list(range(superblock.progress_bytes // 16))
        for index, file in enumerate(plan.files):
            mine = [extent for extent in extents if extent.file == index]
            assert sum(extent.size_bytes for extent in mine) == file.size_bytes
            assert all(extent.offset == file.offset + extent.begin for extent in mine)


@given(st.data())
def test_tables_are_believed_only_where_they_can_be_true(data: st.DataObject) -> None:
    """A table with a right checksum, of which a record was made up: refused, or no file lies in another."""
    plan = plan_upload({"store.json": 700, "directory.bin": 3 * MIB, "sums.bin": 0, "data-00000.bin": 4096})
    files = list(plan.files)
    at = data.draw(st.integers(0, len(files) - 1))
    names = st.sampled_from(
        ["store.json", "sums.bin", "lookup.bin", "../x", "data-1.bin", "", "part-00000-of-00002/store.json"]
    )
    numbers = st.integers(0, 40).map(lambda count: count * MIB) | st.integers(0, (1 << 64) - 1)
    files[at] = StoredFile(
        data.draw(names | st.just(files[at].name)),
        data.draw(numbers | st.just(files[at].offset)),
        data.draw(numbers | st.just(files[at].size_bytes)),
    )
    table = encoded_table(files)
    superblock = replace(plan.superblock, namespace_bytes=64 * MIB, complete=True, table_crc32c=crc32c(table))
    try:
        partitions = decoded_table(table, superblock, NAME)
    except InvalidFile:
        return
    found = sorted((file.offset, file.size_bytes) for files in partitions.values() for file in files.values())
    end = superblock.progress_offset + superblock.progress_bytes
    for offset, size_bytes in found:
        assert end <= offset
        end = offset + size_bytes
    assert end <= superblock.used_bytes
    assert all("store.json" in files for files in partitions.values())


@given(st.data())
def test_notes_of_another_upload_are_not_believed(data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.binary(min_size=16, max_size=16), min_size=2, max_size=2, unique=True))
    plan = plan_upload({"store.json": 700, "data-00000.bin": 3 << 30})
    mine, other = (replace(plan.superblock, upload_id=each) for each in ids)
    done = data.draw(st.dictionaries(st.integers(0, (3 << 30) // (16 << 20)), st.integers(0, (1 << 32) - 1)))
    notes = bytearray(mine.progress_bytes)
    for number, crc in done.items():
        notes[16 * number : 16 * number + 16] = encoded_progress(mine, number, crc)
    assert decoded_progress(bytes(notes), mine) == done
    assert decoded_progress(bytes(notes), other) == {}


@given(st.integers(0, 2 * MIB - 1), st.integers(0, 7), st.binary(max_size=40))
@settings(max_examples=150)
def test_damage_is_an_error_or_does_no_harm(
    uploaded: bytes, store: LocalStore, offset: int, bit: int, more: bytes
) -> None:
    """In the superblocks and the table, whether or not the checksums were made right again."""
    device = MemoryDevice(24 * MIB, content=uploaded)
    device.content[offset : offset + len(more)] = more
    device.content[offset] ^= 1 << bit
    for at in (0, 512 << 10):
        block = bytes(device.content[at : at + 508])
        device.content[at + 508 : at + 512] = struct.pack("<I", crc32c(block))
    with contextlib.suppress(PenstockError):
        superblock, _, partitions = read_store(device, NAME)
        assert superblock.used_bytes <= device.size_bytes
        for file in partitions[""].values():
            assert file.offset + file.size_bytes <= superblock.used_bytes
