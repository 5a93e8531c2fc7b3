"""A run learns which I/O path is fastest, says so, and leaves what it learned to the next."""

from __future__ import annotations

import logging
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.core import files
from penstock.core.log import log_once
from penstock.errors import InvalidArgument, InvalidFile, InvalidSize
from penstock.storage.aligned import AlignedBuffer
from penstock.storage.costs import CostEntry, CostTables, Tables, add_tables, device_kind, read_tables
from penstock.storage.paths import TRANSPORTS, IoPaths
from penstock.storage.spill import SpillSpace
from penstock.storage.transfer import EVICT, PREFETCH, File, Transfer, TransportUnavailable
from tests.support.apart import context
from tests.support.families import iterate, small_gpt
from tests.support.memory_transport import MemoryTransport
from tests.support.runs import PAGED

MIB = 1 << 20


def cycle(space: SpillSpace, size_bytes: int, times: int) -> None:
    """Write and read back, as often as that."""
    buffer = AlignedBuffer(size_bytes)
    over = threading.Semaphore(0)
    for _ in range(times):
        extent = space.allocate(size_bytes)
        for move in (space.write, space.read):
            transfer = move(extent, buffer.address, size_bytes, buffer, lambda _: over.release())
            assert over.acquire(timeout=30)
            assert transfer.error is None
        space.release(extent)


@pytest.fixture
def slow_and_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two transports alone, to the same files: one that takes 20 ms a request, and one that takes none."""
    files: dict[int, bytearray] = {}
    monkeypatch.delitem(TRANSPORTS, "io_uring")
    monkeypatch.delitem(TRANSPORTS, "posix")
    monkeypatch.setitem(TRANSPORTS, "slow", lambda: MemoryTransport(delay_s=0.02, files=files))
    monkeypatch.setitem(TRANSPORTS, "fast", lambda: MemoryTransport(files=files))


@pytest.mark.usefixtures("slow_and_fast")
def test_a_new_transport_joins_by_one_line_and_wins_if_it_is_faster(tmp_path: Path) -> None:
    with SpillSpace(tmp_path, penstock.IoOptions(paths=["slow direct", "fast direct"], reexplore=0)) as space:
        cycle(space, MIB, 30)
        moved = space.moved_bytes_by_path
        assert moved["fast direct"] > 5 * moved["slow direct"] > 0
        (row,) = [row for row in space.choice.tables().rows() if row.writes]
        assert row.path == "fast direct"


@pytest.mark.usefixtures("slow_and_fast")
def test_the_next_run_begins_with_what_was_learned(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    paths = ["slow direct", "fast direct"]
    with SpillSpace(tmp_path, penstock.IoOptions(paths=paths, costs=path, reexplore=0)) as space:
        cycle(space, MIB, 20)
    with SpillSpace(tmp_path, penstock.IoOptions(paths=paths, costs=path, reexplore=0)) as space:
        cycle(space, MIB, 5)
        assert space.moved_bytes_by_path == {"slow direct": 0, "fast direct": 10 * MIB}
    assert files.load(CostTables, path).devices.keys() == {device_kind([tmp_path], "cpu")}


@pytest.mark.usefixtures("slow_and_fast")
def test_a_run_keeps_to_the_path_that_is_given_for_a_size(tmp_path: Path) -> None:
    io = penstock.IoOptions(paths={"64KiB": "fast direct", "1MiB": "slow direct"})
    with SpillSpace(tmp_path, io) as space:
        for size_bytes, path in ((4096, "fast"), (512 << 10, "fast"), (MIB, "slow"), (3 * MIB, "slow")):
            before = dict(space.moved_bytes_by_path)
            cycle(space, size_bytes, 2)
            moved = {name: space.moved_bytes_by_path[name] - before[name] for name in before}
            assert moved == {"fast direct": 0, "slow direct": 0} | {f"{path} direct": 4 * size_bytes}


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        ({"3MiB": "posix direct"}, "powers of two"),
        ({}, "powers of two"),
        ({"much": "posix direct"}, "much"),
        (["1MiB=posix direct", "posix buffered"], "a size of its own"),
        (["1MiB=posix direct", "1MiB=posix buffered"], "a size of its own"),
    ],
)
def test_a_table_that_cannot_be_is_refused(paths: Any, said: str) -> None:
    with pytest.raises((InvalidArgument, InvalidSize), match=f"paths: .*{said}"):
        penstock.IoOptions(paths=paths)


def test_a_table_names_paths_of_this_machine(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="tape direct"):
        SpillSpace(tmp_path, penstock.IoOptions(paths={"1MiB": "tape direct"}))
    texts = ["64KiB=posix direct", "1MiB=posix staged"]  # as on the command line
    assert penstock.IoOptions(paths=texts).wanted_paths()[1] == {1 << 16: "posix direct", MIB: "posix staged"}


def entry(path: str, samples: int, s_per_byte: float) -> CostEntry:
    return CostEntry(
        class_bytes=MIB, kind="write", path=path, medium="disk", samples=samples, s_per_byte=s_per_byte
    )


def test_kinds_of_device_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    add_tables(path, "ext4 on a", Tables((entry("x", 3, 1e-9),)))
    add_tables(path, "xfs on b", Tables((entry("x", 3, 5e-9),)))
    assert read_tables(path, "ext4 on a").entries == (entry("x", 3, 1e-9),)
    assert read_tables(path, "xfs on b").entries == (entry("x", 3, 5e-9),)
    assert read_tables(path, "tmpfs on c") == Tables()


def test_the_file_follows_a_machine_that_changes(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    for _ in range(100):
        add_tables(path, "disk", Tables((entry("x", 9, 1e-9),)))
    for _ in range(10):
        add_tables(path, "disk", Tables((entry("x", 9, 3e-9),)))
    (known,) = read_tables(path, "disk").entries
    assert known.s_per_byte > 2.9e-9


def _add(path: Path, number: int) -> None:
    for index in range(10):
        add_tables(path, f"disk {number} {index}", Tables((entry("x", 3, 1e-9),)))


def test_processes_share_one_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    processes = [context().Process(target=_add, args=(path, number)) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert len(files.load(CostTables, path).devices) == 30


def test_another_file_is_refused_and_a_full_disk_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(InvalidFile, match=r"plan\.json"):
        SpillSpace(tmp_path, penstock.IoOptions(costs=tmp_path / "plan.json"))
    with caplog.at_level(logging.WARNING, "penstock"):
        add_tables(tmp_path / "absent" / "costs.json", "disk", Tables((entry("x", 3, 1e-9),)))
    assert "was not saved" in caplog.text


def test_a_transport_that_cannot_work_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> MemoryTransport:
        raise TransportUnavailable("the system refuses it: Operation not permitted")

    monkeypatch.setitem(TRANSPORTS, "io_uring", refuse)
    log_once.cache_clear()
    for _ in range(2):
        with SpillSpace(tmp_path) as space:
            assert space.unavailable == {"io_uring": "the system refuses it: Operation not permitted"}
            assert {path.partition(" ")[0] for path in space.paths} == {"posix"}
            cycle(space, MIB, 2)
    assert caplog.text.count("io_uring is not used") == 1
    with pytest.raises(InvalidArgument, match=r"io_uring direct cannot be used.*not permitted"):
        SpillSpace(tmp_path, penstock.IoOptions(paths=["io_uring direct"]))


def test_io_paths_opens_only_what_is_wanted() -> None:
    with closing(IoPaths(["posix staged"])) as io:
        assert list(io.paths) == ["posix staged"]
    with pytest.raises(ValueError, match="closed"):
        transfer = Transfer("read", File(-1), 0, 0, 1, "staged")
        io.paths["posix staged"].transport.submit([transfer])


def test_a_run_is_told_its_io_paths_and_tells_what_it_learned(
    tmp_path: Path, hardware: penstock.Hardware
) -> None:
    model, optimizer = small_gpt()
    path = tmp_path / "costs.json"
    with penstock.offload(
        model,
        optimizer,
        device_budget="500KiB",
        planning=PAGED,
        spill_dir=[tmp_path, tmp_path],
        hardware=hardware,
        io=penstock.IoOptions(paths="posix direct", verify=True, costs=path),
    ) as run:
        for step in range(3):
            with run.step():
                iterate(model, optimizer, step)
        assert run.io_paths == ("posix direct",)
        report = run.report()
        assert set(report.moved_bytes_by_io_path) == {"posix direct"}
        assert "I/O paths: posix direct (100%)" in str(report)
        assert {row.path for row in run.io_costs().rows()} == {"posix direct"}
        assert all(row.first == "posix direct" for row in run.io_report().rows)
    assert path.exists()


def test_a_transfer_that_is_measured_has_its_direction_to_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once, through two transports of which one takes longer: the faster one is found."""
    monkeypatch.setitem(TRANSPORTS, "slow", lambda: MemoryTransport(8, delay_s=0.004))
    monkeypatch.setitem(TRANSPORTS, "fast", lambda: MemoryTransport(8, delay_s=0.001))
    count, size_bytes = 64, 64 << 10
    buffer = AlignedBuffer(size_bytes)
    with SpillSpace(tmp_path, penstock.IoOptions(paths=["slow direct", "fast direct"], reexplore=0)) as space:
        for _ in range(3):
            over = threading.Semaphore(0)
            extents = [space.allocate(size_bytes) for _ in range(count)]
            for move, priority in ((space.write, EVICT), (space.read, PREFETCH)):
                for extent in extents:
                    move(
                        extent,
                        buffer.address,
                        size_bytes,
                        buffer,
                        lambda _, over=over: over.release(),
                        priority=priority,
                    )
                for _ in range(count):
                    assert over.acquire(timeout=30)
            for extent in extents:
                space.release(extent)
        rates = {row.path: row for row in space.choice.tables().rows()}
        assert rates["fast direct"].writes and rates["fast direct"].reads
        for row in rates.values():  # no faster than a transfer can be
            delay_s = 0.004 if row.path == "slow direct" else 0.001
            assert row.write_bytes_per_s is not None and row.write_bytes_per_s < size_bytes / delay_s
        # All of the first round are asked for before the first of them is over.
        assert space.moved_bytes_by_path["slow direct"] <= count * size_bytes
