"""The spill space: what goes out comes back, within the disk it was given, or it says what to do."""

from __future__ import annotations

import errno
import gc
import os
import random
import threading
import weakref
from pathlib import Path

import pytest

from penstock.errors import InvalidArgument, SpillError, SpillSpaceFull
from penstock.options import IoOptions
from penstock.storage import files
from penstock.storage.aligned import AlignedBuffer
from penstock.storage.extents import STRIPE_BYTES, Extent
from penstock.storage.paths import TRANSPORTS
from penstock.storage.spill import SpillSpace
from penstock.storage.transfer import Transfer
from tests.support.memory_transport import MemoryTransport

WAIT_S = 30
MIB = 1 << 20


class Waiter:
    """Counts transfers, and waits for them."""

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []
        self._over = threading.Semaphore(0)

    def __call__(self, transfer: Transfer) -> None:
        self.transfers.append(transfer)
        self._over.release()

    def wait(self, count: int = 1) -> Transfer:
        for _ in range(count):
            assert self._over.acquire(timeout=WAIT_S)
        return self.transfers[-1]


def move(space: SpillSpace, kind: str, extent: Extent, buffer: AlignedBuffer, shift: int = 0) -> Transfer:
    done = Waiter()
    size = buffer.size_bytes - shift
    getattr(space, kind)(extent, buffer.address + shift, size, buffer, done)
    return done.wait()


@pytest.fixture(scope="module")
def io_paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """All that this machine has."""
    with SpillSpace(tmp_path_factory.mktemp("spill"), IoOptions(page_cache_budget=MIB)) as space:
        return list(space.paths)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("size_bytes", [1, 4095, 4096, 1 * MIB + 1, 9 * MIB, 13 * MIB + 4097])
def test_bytes_come_back_by_every_io_path(
    tmp_path: Path, size_bytes: int, shift: int, io_paths: list[str]
) -> None:
    for io_path in io_paths:
        bytes_come_back(tmp_path, size_bytes, shift, io_path)


def bytes_come_back(tmp_path: Path, size_bytes: int, shift: int, io_path: str) -> None:
    source, target = AlignedBuffer(size_bytes + shift), AlignedBuffer(size_bytes + shift)
    source.view()[:] = random.Random(1).randbytes(size_bytes + shift)
    with SpillSpace(tmp_path, IoOptions(paths=[io_path], page_cache_budget=64 * MIB)) as space:
        before, extent, after = space.allocate(1), space.allocate(size_bytes), space.allocate(1)
        marks = AlignedBuffer(1)
        marks.view()[0] = 7
        for neighbour in (before, after):
            assert move(space, "write", neighbour, marks).error is None
        written = move(space, "write", extent, source, shift)
        read = move(space, "read", extent, target, shift)
        assert written.error is read.error is None
        assert 0 < written.started_s <= written.finished_s <= read.finished_s
        assert target.view()[shift:] == source.view()[shift:]
        assert space.written_bytes == size_bytes + 2
        assert space.read_bytes == size_bytes
        for neighbour in (before, after):
            back = AlignedBuffer(1)
            assert move(space, "read", neighbour, back).error is None
            assert back.view()[0] == 7


def test_several_threads_and_tensors_at_once(tmp_path: Path) -> None:
    with SpillSpace(tmp_path, IoOptions(page_cache_budget=4 * MIB)) as space:

        def work(seed: int) -> None:
            try:
                draw = random.Random(seed)
                for _ in range(20):
                    size = draw.randrange(1, 2 * MIB)
                    source, target = AlignedBuffer(size), AlignedBuffer(size)
                    source.view()[:] = draw.randbytes(size)
                    extent = space.allocate(size)
                    assert move(space, "write", extent, source).error is None
                    assert move(space, "read", extent, target).error is None
                    assert source.view() == target.view()
                    space.release(extent)
            except BaseException as error:
                failures.append(error)
                raise

        failures: list[BaseException] = []
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert space.used_bytes == 0


def test_the_spill_file_has_no_name_and_no_reader(tmp_path: Path) -> None:
    with SpillSpace(tmp_path) as space:
        space.allocate(10 * MIB)
        assert list(tmp_path.iterdir()) == []
        status = os.fstat(space._regions["disk"].files[0].file.buffered)
        assert status.st_nlink == 0
        assert status.st_mode & 0o777 == 0o600
        assert space.file_bytes >= 10 * MIB
        assert status.st_blocks * 512 >= 10 * MIB


def test_a_file_system_without_unnamed_files_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "O_TMPFILE", 0, raising=False)
    with SpillSpace(tmp_path) as space:
        assert list(tmp_path.iterdir()) == []
        buffer = AlignedBuffer(MIB)
        assert move(space, "write", space.allocate(MIB), buffer).error is None
        assert os.fstat(space._regions["disk"].files[0].file.buffered).st_mode & 0o777 == 0o600


def test_a_file_system_without_direct_io_is_served_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "_demanded_alignment", lambda _: 0)
    monkeypatch.setattr(files, "_logged", set())
    with SpillSpace(tmp_path) as space:
        assert space.direct is False
        assert "direct I/O cannot be used" in caplog.text
        source, target = AlignedBuffer(5000), AlignedBuffer(5000)
        source.view()[:] = random.Random(2).randbytes(5000)
        extent = space.allocate(5000)
        assert move(space, "write", extent, source, 1).error is None
        assert move(space, "read", extent, target, 1).error is None
        assert source.view()[1:] == target.view()[1:]


def test_capacity_is_kept_and_the_error_names_the_budget(tmp_path: Path) -> None:
    with SpillSpace(tmp_path, capacity_bytes=8 * MIB) as space:
        extent = space.allocate(6 * MIB)
        with pytest.raises(SpillSpaceFull, match=r"Raise disk_budget by 2\.00 MiB"):
            space.allocate(4 * MIB)
        assert space.file_bytes <= 8 * MIB
        space.release(extent)
        space.allocate(8 * MIB)


def test_a_full_disk_says_what_is_free_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = os.posix_fallocate

    def full(descriptor: int, offset: int, size: int) -> None:
        if offset + size > 64 * MIB:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with SpillSpace(tmp_path) as space:
        first = space.allocate(40 * MIB)  # the step of 256 MiB does not fit, what is needed does
        assert space.file_bytes == 40 * MIB
        with pytest.raises(SpillSpaceFull, match=r"is full .*40\.00 MiB.* free.*spill_dir") as refused:
            space.allocate(40 * MIB)
        assert str(tmp_path) in str(refused.value)
        assert space.used_bytes == 40 * MIB
        space.allocate(20 * MIB)
        space.release(first)
        space.allocate(40 * MIB)


@pytest.mark.parametrize("name", ["absent", "file"])
def test_a_bad_directory_is_refused_at_once(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpillError, match="spill_dir") as refused:
        SpillSpace(tmp_path / name)
    assert str(tmp_path / name) in str(refused.value)
    assert refused.value.errno in (errno.ENOENT, errno.ENOTDIR)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("directory", "said"),
    [
        ("/proc/self", r"/proc.*spill_dir"),
        ("/proc", r"/proc: its file system takes no new files\. .*spill_dir"),
    ],
)
def test_a_directory_that_cannot_be_written_is_refused(directory: str, said: str) -> None:
    with pytest.raises(SpillError, match=said):
        SpillSpace(directory)


def test_an_io_error_names_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(transfer: Transfer) -> int:
        return errno.EIO if transfer.offset == 2 * MIB else 0

    monkeypatch.setitem(TRANSPORTS, "memory", lambda: MemoryTransport(fault=fault))
    with SpillSpace([tmp_path, tmp_path], IoOptions(paths=["memory direct"])) as space:
        extent = space.allocate(8 * MIB)
        error = move(space, "write", extent, AlignedBuffer(8 * MIB)).error
        assert isinstance(error, SpillError)
        assert error.errno == errno.EIO
        for part in ("write", "1.00 MiB", str(2 * MIB), str(tmp_path), os.strerror(errno.EIO)):
            assert part in str(error)
        assert space.written_bytes == 0
        assert move(space, "write", extent, AlignedBuffer(4 * MIB)).error is None


def test_close_waits_and_then_refuses(tmp_path: Path) -> None:
    space = SpillSpace(tmp_path)
    done = Waiter()
    buffer = AlignedBuffer(32 * MIB)
    extent = space.allocate(32 * MIB)
    space.write(extent, buffer.address, buffer.size_bytes, buffer, done)
    space.close()
    assert [transfer.error for transfer in done.transfers] == [None]
    space.close()
    with pytest.raises(SpillError, match="closed"):
        space.allocate(1)
    with pytest.raises(SpillError, match="closed"):
        space.write(extent, buffer.address, 1, buffer, done)


def test_memory_is_let_go_after_a_transfer(tmp_path: Path) -> None:
    with SpillSpace(tmp_path) as space:
        buffer = AlignedBuffer(8 * MIB)
        gone = weakref.ref(buffer)
        move(space, "write", space.allocate(8 * MIB), buffer)
        del buffer
        for _ in range(100):  # the last worker is still leaving its callback
            gc.collect()
            if gone() is None:
                break
            threading.Event().wait(0.01)
        assert gone() is None


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    made = [tmp_path / name for name in "abc"]
    for place in made:
        place.mkdir()
    return made


def test_a_tensor_is_striped_over_all_directories(places: list[Path]) -> None:
    with SpillSpace(places, capacity_bytes=30 * STRIPE_BYTES) as space:
        extents = [space.allocate(5 * STRIPE_BYTES + 4096 * index) for index in range(5)]
        with pytest.raises(SpillSpaceFull):
            space.allocate(6 * STRIPE_BYTES)
        sizes = [file.size_bytes for file in space._regions["disk"].files]
        assert max(sizes) - min(sizes) <= STRIPE_BYTES
        assert sum(sizes) <= 30 * STRIPE_BYTES
        all_come_back(space, extents)


def all_come_back(space: SpillSpace, extents: list[Extent]) -> None:
    buffers = []
    for index, extent in enumerate(extents):
        buffer = AlignedBuffer(extent.size_bytes)
        buffer.view()[:] = random.Random(index).randbytes(extent.size_bytes)
        assert move(space, "write", extent, buffer).error is None
        buffers.append(buffer)
    for extent, written in zip(extents, buffers, strict=True):
        buffer = AlignedBuffer(extent.size_bytes)
        assert move(space, "read", extent, buffer).error is None
        assert buffer.view() == written.view()


def test_directories_with_room_go_on_when_one_is_full(
    places: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = os.posix_fallocate
    rooms = [3, 8, 100]
    room_bytes = {}

    def full(descriptor: int, offset: int, size: int) -> None:
        inode = os.fstat(descriptor).st_ino
        if inode not in room_bytes:
            room_bytes[inode] = rooms.pop(0) * STRIPE_BYTES
        if offset + size > room_bytes[inode]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with SpillSpace(places) as space:
        extents = [space.allocate(4 * STRIPE_BYTES) for _ in range(20)]
        assert not rooms
        all_come_back(space, extents)
        with pytest.raises(SpillSpaceFull, match="is full"):
            space.allocate(100 * STRIPE_BYTES)


def test_what_passes_through_the_page_cache_is_bounded(tmp_path: Path, io_paths: list[str]) -> None:
    page_cache = [io_path for io_path in io_paths if io_path.endswith("buffered")][:1]
    disk = [io_path for io_path in io_paths if io_path.endswith("direct")][:1]
    with SpillSpace(tmp_path, IoOptions(page_cache_budget=4 * MIB, paths=page_cache + disk)) as space:
        extents = [space.allocate(MIB) for _ in range(20)]
        cached = [extent for extent in extents if extent.space == "page cache"]
        assert 0 < len(cached) <= 4
        all_come_back(space, extents)
    with SpillSpace(tmp_path) as space:
        assert {path.medium for path in space.paths.values()} == {"disk"}


@pytest.mark.parametrize("position", [0, 12_345, 3 * MIB - 1])
def test_a_byte_that_changed_on_the_disk_is_noticed_where_asked(tmp_path: Path, position: int) -> None:
    buffer = AlignedBuffer(3 * MIB)
    buffer.view()[:] = random.Random(position).randbytes(3 * MIB)
    for verify in (True, False):
        with SpillSpace(tmp_path, IoOptions(verify=verify)) as space:
            extent, other = space.allocate(3 * MIB), space.allocate(3 * MIB)
            for each in (extent, other):
                assert move(space, "write", each, buffer).error is None
            descriptor = space._regions["disk"].files[0].file.buffered
            (old,) = os.pread(descriptor, 1, extent.offset + position)
            os.pwrite(descriptor, bytes([old ^ 1]), extent.offset + position)
            error = move(space, "read", extent, AlignedBuffer(3 * MIB)).error
            assert (error is not None) == verify
            if error is not None:
                assert "other than they were written" in str(error) and str(tmp_path) in str(error)
            assert move(space, "read", other, AlignedBuffer(3 * MIB)).error is None


def test_impossible_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"carrier pigeon.*there are"):
        SpillSpace(tmp_path, IoOptions(paths=["carrier pigeon"]))
    with pytest.raises(InvalidArgument, match="directory"):
        SpillSpace([])
    with SpillSpace(tmp_path) as space:
        extent = space.allocate(100)
        with pytest.raises(InvalidArgument, match="do not fit"):
            space.write(extent, 0, 4097, None, lambda _: None)


def test_a_file_to_swap_to_has_no_name_and_counts(tmp_path: Path) -> None:
    with SpillSpace(tmp_path, capacity_bytes=16 * MIB) as space:
        space.allocate(4 * MIB)
        direct, buffered, capacity_bytes, begin = space.swap_file()
        assert (capacity_bytes, begin) == (12 * MIB, 0)
        assert space.swap_file()[:2] == (direct, buffered), "it is the same file"
        assert list(tmp_path.iterdir()) == []
        status = os.fstat(buffered)
        assert status.st_nlink == 0 and status.st_mode & 0o777 == 0o600
        if direct >= 0:
            assert os.path.sameopenfile(direct, buffered)
        before_bytes = space.file_bytes
        os.pwrite(buffered, os.urandom(8 * MIB), 3 * MIB)
        os.fsync(buffered)
        assert before_bytes + 8 * MIB <= space.file_bytes <= before_bytes + 9 * MIB
        space.allocate(3 * MIB)
        with pytest.raises(SpillSpaceFull, match=r"16\.00 MiB is full.*Raise disk_budget"):
            space.allocate(3 * MIB)
        os.ftruncate(buffered, 0)
        space.allocate(3 * MIB)
    with pytest.raises(OSError):
        os.fstat(buffered)
    with pytest.raises(SpillError, match="closed"):
        space.swap_file()


def test_a_file_to_swap_to_gets_what_the_disk_has_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SpillSpace([tmp_path, tmp_path]) as space:
        status = os.statvfs(tmp_path)
        _, _, capacity_bytes, _ = space.swap_file()
        assert 0 < capacity_bytes <= status.f_blocks * status.f_frsize
        assert space.file_bytes == 0
