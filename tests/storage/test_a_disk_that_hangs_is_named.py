"""Every wait for a disk ends, with an error that names the disk."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from penstock.errors import SpillError
from penstock.options import IoOptions
from penstock.storage.aligned import AlignedBuffer
from penstock.storage.costs import CostEntry, Tables, add_tables, read_tables
from penstock.storage.paths import TRANSPORTS
from penstock.storage.spill import SpillSpace
from penstock.storage.transfer import EVICT, Transfer
from tests.support.memory_transport import MemoryTransport

WAIT_S = 30
SIZE = 64 << 10


@pytest.fixture
def disk() -> Iterator[threading.Event]:
    """Until this is set the disk answers nothing."""
    answers = threading.Event()
    yield answers
    answers.set()


@pytest.fixture
def opened(
    tmp_path: Path, disk: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], SpillSpace]:
    """Opens a space on that disk."""

    def wait(_: Transfer) -> int:
        assert disk.wait(WAIT_S)
        return 0

    monkeypatch.setitem(TRANSPORTS, "hanging", lambda: MemoryTransport(1, fault=wait))
    return partial(SpillSpace, tmp_path, IoOptions(paths=["hanging direct"]), timeout_s=0.3)


@pytest.fixture
def space(opened: Callable[[], SpillSpace]) -> SpillSpace:
    return opened()


def is_named(error: SpillError | None, directory: Path) -> bool:
    assert error is not None
    return str(directory) in str(error) and "hangs" in str(error) and error.errno == errno.ETIMEDOUT


def test_what_waits_for_its_turn_fails(space: SpillSpace, disk: threading.Event, tmp_path: Path) -> None:
    buffer = AlignedBuffer(SIZE)
    over = [threading.Event() for _ in range(2)]
    results: dict[int, Transfer] = {}

    extents = [space.allocate(SIZE) for _ in over]

    def start(number: int) -> None:
        def on_done(transfer: Transfer) -> None:
            results[number] = transfer
            over[number].set()

        space.write(extents[number], buffer.address, SIZE, buffer, on_done, priority=EVICT)

    start(0)  # is measured, and hangs
    start(1)  # waits for it. What is asked for later may begin when this one has failed
    assert over[1].wait(WAIT_S)
    assert is_named(results[1].error, tmp_path)
    assert not over[0].is_set()  # its memory is in use
    disk.set()
    assert over[0].wait(WAIT_S)
    assert results[0].error is None
    space.close()


def test_close_gives_up_and_what_has_not_begun_fails(
    space: SpillSpace, disk: threading.Event, tmp_path: Path
) -> None:
    buffer, transfers = AlignedBuffer(SIZE), []
    extents = [space.allocate(SIZE) for _ in range(4)]
    for extent in extents[:2]:
        space.write(extent, buffer.address, SIZE, buffer, transfers.append, priority=EVICT)
    # Demands wait for no measurement: these are in the transport, which has one thread.
    for extent in extents[2:]:
        space.write(extent, buffer.address, SIZE, buffer, transfers.append, priority=0)
    with pytest.raises(SpillError) as refused:
        space.close()
    assert is_named(refused.value, tmp_path)
    assert len(transfers) == 3
    assert all(is_named(transfer.error, tmp_path) for transfer in transfers)
    with pytest.raises(SpillError, match="hangs"):
        space.close()
    assert space.file_bytes > 0
    disk.set()  # it comes back after all
    while len(transfers) < 4:
        assert disk.wait(WAIT_S)
    assert transfers[3].error is None


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks into /proc")
def test_files_stay_open_while_something_may_write_to_them(
    opened: Callable[[], SpillSpace], disk: threading.Event, tmp_path: Path
) -> None:
    def is_open() -> bool:
        links = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
        return any(link.startswith(f"{tmp_path}/") for link in links)

    buffer, space = AlignedBuffer(SIZE), opened()
    space.write(space.allocate(SIZE), buffer.address, SIZE, buffer, lambda _: None, priority=EVICT)
    with pytest.raises(SpillError, match="hangs"):
        space.close()
    del space
    gc.collect()
    assert is_open()


def test_a_lock_that_is_never_released_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "costs.json"
    tables = Tables(
        (CostEntry(class_bytes=1 << 20, kind="write", path="x", medium="disk", samples=3, s_per_byte=1e-9),)
    )
    add_tables(path, "disk", tables)
    holder = os.open(tmp_path / ".costs.json.lock", os.O_RDWR)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        add_tables(path, "other", tables, timeout_s=0.02)
    finally:
        os.close(holder)
    assert str(tmp_path / ".costs.json.lock") in caplog.text and "was not saved" in caplog.text
    assert read_tables(path, "other") == Tables()
    add_tables(path, "other", tables, timeout_s=0.02)
    assert read_tables(path, "other") == tables


# A pipe that nobody writes to hangs as a disk does, in the kernel.
HANGING_READ = """
import os, sys
from penstock.storage.aligned import AlignedBuffer
from penstock.storage import native
from penstock.storage.transfer import File, Transfer

try:
    transport = native.UringTransport()
except native.TransportUnavailable as reason:
    sys.exit(f"unavailable: {reason}")
reading, writing = os.pipe()
buffer = AlignedBuffer(4096)
transport.submit([Transfer("read", File(reading), 0, buffer.address, 4096, "buffered")])
"""


@pytest.mark.parametrize(
    "then", ["assert not transport.close(0.05)", "native.EXIT_TIMEOUT_S = 0.05"], ids=["closed", "left open"]
)
def test_a_process_ends_though_io_uring_waits_for_its_disk(then: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HANGING_READ + then], check=False, capture_output=True, text=True, timeout=60
    )
    if "unavailable" in ended.stderr:
        pytest.skip(ended.stderr)
    assert ended.returncode == 0, ended.stderr
    assert "the disk hangs" in ended.stderr
