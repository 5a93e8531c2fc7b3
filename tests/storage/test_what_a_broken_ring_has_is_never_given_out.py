"""A ring that breaks leaves memory and disk space behind that the kernel may use: nobody else gets them."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.errors import SpillError, SpillSpaceFull
from penstock.options import IoOptions
from penstock.storage.aligned import AlignedBuffer
from penstock.storage.native import UringTransport
from penstock.storage.paths import TRANSPORTS
from penstock.storage.spill import SpillSpace
from penstock.storage.transfer import File, Transfer, TransportBroken, TransportUnavailable
from tests.support.memory_transport import MemoryTransport

WAIT_S = 30
SIZE = 64 << 10


class Breaking(MemoryTransport):
    """Gives up for lost what it is given while `broken`, as a ring does that breaks with it in flight."""

    broken = False

    def submit(self, transfers: Sequence[Transfer]) -> None:
        if not self.broken:
            super().submit(transfers)
            return
        for transfer in transfers:
            transfer.end(errno.EBADF, abandoned=True)


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> Breaking:
    transport = Breaking()
    monkeypatch.setitem(TRANSPORTS, "breaking", lambda: transport)
    return transport


def moved(space: SpillSpace, kind: str, extent: object, content: bytes = b"") -> tuple[Transfer, bytes]:
    buffer, over, transfers = AlignedBuffer(SIZE), threading.Event(), []
    buffer.view()[: len(content)] = content

    def on_done(transfer: Transfer) -> None:
        transfers.append(transfer)
        over.set()

    getattr(space, kind)(extent, buffer.address, SIZE, buffer, on_done)
    assert over.wait(WAIT_S)
    return transfers[0], bytes(buffer.view())


def test_space_of_an_abandoned_write_stays_unused(tmp_path: Path, transport: Breaking) -> None:
    with SpillSpace(tmp_path, IoOptions(paths=["breaking direct"]), capacity_bytes=3 * SIZE) as space:
        extent = space.allocate(SIZE)
        transport.broken = True
        transfer, _ = moved(space, "write", extent)
        transport.broken = False
        assert transfer.abandoned and transfer.keep is not None
        assert isinstance(transfer.error, SpillError) and transfer.error.errno == errno.EBADF
        assert "os.closerange" in str(transfer.error)
        before = space.segments(extent, SIZE)
        assert moved(space, "write", extent, b"\1" * SIZE)[0].error is None
        assert space.segments(extent, SIZE) != before, "the old write may land there"
        assert moved(space, "read", extent)[1] == b"\1" * SIZE
        assert space.used_bytes == 2 * SIZE
        space.release(extent)
        assert space.used_bytes == SIZE
        others = [space.allocate(SIZE) for _ in range(2)]
        assert all(space.segments(other, SIZE) != before for other in others)
        with pytest.raises(SpillSpaceFull, match=r"64\.00 KiB are held back: old writes may land there yet"):
            space.allocate(SIZE)


def test_space_of_an_abandoned_read_is_given_out_again(tmp_path: Path, transport: Breaking) -> None:
    with SpillSpace(tmp_path, IoOptions(paths=["breaking direct"])) as space:
        extent = space.allocate(SIZE)
        assert moved(space, "write", extent)[0].error is None
        transport.broken = True
        transfer, _ = moved(space, "read", extent)
        assert transfer.abandoned and transfer.keep is not None
        space.release(extent)
        assert space.used_bytes == 0


def rings() -> set[int]:
    """Descriptors of rings, and of what wakes their threads."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            if os.readlink(f"/proc/self/fd/{name}") in ("anon_inode:[io_uring]", "anon_inode:[eventfd]"):
                found.add(int(name))
    return found


def test_a_ring_that_the_program_closes_says_so() -> None:
    before = rings()
    try:
        transport = UringTransport()
    except TransportUnavailable as error:
        pytest.skip(str(error))
    reading, writing = os.pipe()
    memory, over = AlignedBuffer(4096), threading.Event()

    def transfer() -> Transfer:
        made = Transfer("read", File(reading), 0, memory.address, 4096, "buffered", keep=memory)
        made.on_done = lambda _: over.set()
        return made

    first = transfer()
    transport.submit([first])  # nothing is written: it stays in flight
    for number in rings() - before:
        os.close(number)
    assert over.wait(WAIT_S)
    assert first.error_number == errno.EBADF and first.abandoned
    with pytest.raises(TransportBroken, match="Something closed descriptors of penstock's"):
        transport.submit([transfer()])
    assert transport.close(WAIT_S)
    os.close(reading)
    os.close(writing)


CLOSING = """
import os, sys, threading
from penstock.errors import SpillError
from penstock.storage.aligned import AlignedBuffer
from penstock.options import IoOptions
from penstock.storage.spill import SpillSpace

space = SpillSpace(sys.argv[1], IoOptions(paths=sys.argv[2]))
extent, buffer = space.allocate(4096), AlignedBuffer(4096)

def write():
    over = threading.Event()
    transfer = space.write(extent, buffer.address, 4096, buffer, lambda _: over.set())
    assert over.wait(30)
    return transfer.error

assert write() is None
os.closerange(3, 1024)
for _ in range(2):  # as it breaks, and after
    print(write())
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize("path", ["io_uring staged", "posix staged"])
def test_a_program_that_closes_all_descriptors_is_told(tmp_path: Path, path: str) -> None:
    with SpillSpace(tmp_path) as space:
        if path not in space.paths:
            pytest.skip(f"no {path} here")
    ran = subprocess.run(
        [sys.executable, "-c", CLOSING, tmp_path, path],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lines = ran.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("transfers broke: Bad file descriptor. ") and "os.closerange" in line
