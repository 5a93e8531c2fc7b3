"""The spill engine: what goes out comes back, within the disk it was given, or it says what to do."""

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
from penstock.storage import engine as engine_module
from penstock.storage import spillfile
from penstock.storage.aligned import AlignedBuffer
from penstock.storage.engine import SpillEngine, Transfer
from penstock.storage.extents import Extent
from penstock.storage.transports import Request
from penstock.storage.transports.memory import MemoryTransport

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


def move(engine: SpillEngine, kind: str, extent: Extent, buffer: AlignedBuffer, shift: int = 0) -> Transfer:
    done = Waiter()
    size = buffer.size_bytes - shift
    getattr(engine, kind)(extent, buffer.address + shift, size, buffer, done)
    return done.wait()


@pytest.mark.parametrize("transport", ["posix", "memory"])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("size_bytes", [1, 4095, 4096, 1 * MIB + 1, 9 * MIB, 13 * MIB + 4097])
def test_bytes_come_back(tmp_path: Path, size_bytes: int, shift: int, transport: str) -> None:
    source, target = AlignedBuffer(size_bytes + shift), AlignedBuffer(size_bytes + shift)
    source.view()[:] = random.Random(1).randbytes(size_bytes + shift)
    with SpillEngine(tmp_path, transport=transport) as engine:
        before, extent, after = engine.allocate(1), engine.allocate(size_bytes), engine.allocate(1)
        marks = AlignedBuffer(1)
        marks.view()[0] = 7
        for neighbour in (before, after):
            assert move(engine, "write", neighbour, marks).error is None
        written = move(engine, "write", extent, source, shift)
        read = move(engine, "read", extent, target, shift)
        assert written.error is read.error is None
        assert 0 < written.started_s <= written.finished_s <= read.finished_s
        assert target.view()[shift:] == source.view()[shift:]
        assert engine.written_bytes == size_bytes + 2
        assert engine.read_bytes == size_bytes
        for neighbour in (before, after):
            back = AlignedBuffer(1)
            assert move(engine, "read", neighbour, back).error is None
            assert back.view()[0] == 7


def test_several_threads_and_tensors_at_once(tmp_path: Path) -> None:
    with SpillEngine(tmp_path, request_bytes=64 << 10) as engine:

        def work(seed: int) -> None:
            try:
                draw = random.Random(seed)
                for _ in range(20):
                    size = draw.randrange(1, 2 * MIB)
                    source, target = AlignedBuffer(size), AlignedBuffer(size)
                    source.view()[:] = draw.randbytes(size)
                    extent = engine.allocate(size)
                    assert move(engine, "write", extent, source).error is None
                    assert move(engine, "read", extent, target).error is None
                    assert source.view() == target.view()
                    engine.release(extent)
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
        assert engine.used_bytes == 0


def test_the_spill_file_has_no_name_and_no_reader(tmp_path: Path) -> None:
    with SpillEngine(tmp_path) as engine:
        engine.allocate(10 * MIB)
        assert list(tmp_path.iterdir()) == []
        status = os.fstat(engine._files[0].descriptor)
        assert status.st_nlink == 0
        assert status.st_mode & 0o777 == 0o600
        assert engine.file_bytes >= 10 * MIB
        assert status.st_blocks * 512 >= 10 * MIB


def test_a_file_system_without_unnamed_files_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "O_TMPFILE", 0, raising=False)
    with SpillEngine(tmp_path) as engine:
        assert list(tmp_path.iterdir()) == []
        buffer = AlignedBuffer(MIB)
        assert move(engine, "write", engine.allocate(MIB), buffer).error is None
        assert os.fstat(engine._files[0].descriptor).st_mode & 0o777 == 0o600


def test_a_file_system_without_direct_io_is_served_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spillfile, "_DIRECT", 0)
    with SpillEngine(tmp_path) as engine:
        assert engine.direct is False
        assert "takes no direct I/O" in caplog.text
        source, target = AlignedBuffer(5000), AlignedBuffer(5000)
        source.view()[:] = random.Random(2).randbytes(5000)
        extent = engine.allocate(5000)
        assert move(engine, "write", extent, source, 1).error is None
        assert move(engine, "read", extent, target, 1).error is None
        assert source.view()[1:] == target.view()[1:]


def test_capacity_is_kept_and_the_error_names_the_budget(tmp_path: Path) -> None:
    with SpillEngine(tmp_path, capacity_bytes=8 * MIB) as engine:
        extent = engine.allocate(6 * MIB)
        with pytest.raises(SpillSpaceFull, match=r"Raise disk_budget by 2\.00 MiB"):
            engine.allocate(4 * MIB)
        assert engine.file_bytes <= 8 * MIB
        engine.release(extent)
        engine.allocate(8 * MIB)


def test_a_full_disk_says_what_is_free_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = os.posix_fallocate

    def full(descriptor: int, offset: int, size: int) -> None:
        if offset + size > 64 * MIB:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with SpillEngine(tmp_path) as engine:
        first = engine.allocate(40 * MIB)  # the step of 256 MiB does not fit, what is needed does
        assert engine.file_bytes == 40 * MIB
        with pytest.raises(SpillSpaceFull, match=r"is full .*40\.00 MiB.* free.*spill_dir") as refused:
            engine.allocate(40 * MIB)
        assert str(tmp_path) in str(refused.value)
        assert engine.used_bytes == 40 * MIB
        engine.allocate(20 * MIB)
        engine.release(first)
        engine.allocate(40 * MIB)


@pytest.mark.parametrize("name", ["absent", "file"])
def test_a_bad_directory_is_refused_at_once(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpillError, match="spill_dir") as refused:
        SpillEngine(tmp_path / name)
    assert str(tmp_path / name) in str(refused.value)
    assert refused.value.errno in (errno.ENOENT, errno.ENOTDIR)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_a_directory_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(SpillError, match=r"/proc.*spill_dir"):
        SpillEngine("/proc/self")


def test_an_io_error_names_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(request: Request) -> int:
        return errno.EIO if request.offset == 4 * MIB else 0

    def faulty(threads: int, alignment_bytes: int) -> MemoryTransport:
        return MemoryTransport(threads, alignment_bytes, fault=fault)

    monkeypatch.setitem(engine_module.TRANSPORTS, "memory", faulty)
    with SpillEngine(tmp_path, transport="memory", request_bytes=MIB) as engine:
        extent = engine.allocate(8 * MIB)
        error = move(engine, "write", extent, AlignedBuffer(8 * MIB)).error
        assert isinstance(error, SpillError)
        assert error.errno == errno.EIO
        for part in ("write", "1.00 MiB", str(4 * MIB), str(tmp_path), os.strerror(errno.EIO)):
            assert part in str(error)
        assert engine.written_bytes == 0
        assert move(engine, "write", extent, AlignedBuffer(4 * MIB)).error is None


def test_close_waits_and_then_refuses(tmp_path: Path) -> None:
    engine = SpillEngine(tmp_path)
    done = Waiter()
    buffer = AlignedBuffer(32 * MIB)
    extent = engine.allocate(32 * MIB)
    engine.write(extent, buffer.address, buffer.size_bytes, buffer, done)
    engine.close()
    assert [transfer.error for transfer in done.transfers] == [None]
    engine.close()
    with pytest.raises(SpillError, match="closed"):
        engine.allocate(1)
    with pytest.raises(SpillError, match="closed"):
        engine.write(extent, buffer.address, 1, buffer, done)


def test_memory_is_let_go_after_a_transfer(tmp_path: Path) -> None:
    with SpillEngine(tmp_path, request_bytes=MIB) as engine:
        buffer = AlignedBuffer(8 * MIB)
        gone = weakref.ref(buffer)
        move(engine, "write", engine.allocate(8 * MIB), buffer)
        del buffer
        for _ in range(100):  # the last worker is still leaving its callback
            gc.collect()
            if gone() is None:
                break
            threading.Event().wait(0.01)
        assert gone() is None


def test_two_directories_share_the_tensors(tmp_path: Path) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    with SpillEngine(places, capacity_bytes=16 * MIB) as engine:
        extents = [engine.allocate(2 * MIB) for _ in range(8)]
        assert [extent.file for extent in extents].count(0) == 4
        with pytest.raises(SpillSpaceFull):
            engine.allocate(1)
        for index, extent in enumerate(extents):
            buffer = AlignedBuffer(2 * MIB)
            buffer.view()[:] = bytes([index]) * (2 * MIB)
            assert move(engine, "write", extent, buffer).error is None
        for index, extent in enumerate(extents):
            buffer = AlignedBuffer(2 * MIB)
            assert move(engine, "read", extent, buffer).error is None
            assert set(bytes(buffer.view())) == {index}


def test_impossible_arguments_are_refused(tmp_path: Path) -> None:
    for arguments in ({"threads": 0}, {"request_bytes": 1000}, {"transport": "none"}):
        with pytest.raises(InvalidArgument):
            SpillEngine(tmp_path, **arguments)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument):
        SpillEngine([])
    with SpillEngine(tmp_path) as engine:
        extent = engine.allocate(100)
        with pytest.raises(InvalidArgument):
            engine.write(extent, 0, 4097, None, lambda _: None)
