"""What the transports of threads promise beyond the contract: order, pieces, retries, faults on demand."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.storage.aligned import AlignedBuffer
from penstock.storage.native import PosixTransport
from penstock.storage.transfer import File, Transfer, Transport, move_fully
from tests.support.faulty_transport import FaultyTransport
from tests.support.memory_transport import MemoryTransport
from tests.support.transports import DATA, ORIGINAL, WAIT_S, Gathered, Memory, changed, open_file, submit


class TestThreads:
    """What `posix` and `memory` promise beyond the contract: transfers begin in the order they came."""

    @pytest.fixture(params=["posix", "memory"])
    def blocked(
        self, request: pytest.FixtureRequest, tmp_path: Path
    ) -> Iterator[tuple[Transport, File, Callable[[], None]]]:
        """A transport of one thread that waits in a transfer until the function is called."""
        make = {"posix": PosixTransport, "memory": MemoryTransport}[request.param]
        transport, release, busy = make(threads=1), threading.Event(), threading.Event()

        def block(_: Transfer) -> None:
            busy.set()
            assert release.wait(WAIT_S)

        with open_file(tmp_path / "file", "w") as opened:
            buffer = AlignedBuffer(4096)
            submit(transport, [Transfer("write", opened.file, 0, buffer.address, 4096, keep=buffer)], block)
            assert busy.wait(WAIT_S)
            yield transport, opened.file, release.set
            release.set()
            transport.close()

    def test_what_has_not_begun_is_cancelled_and_nothing_else(
        self, blocked: tuple[Transport, File, Callable[[], None]]
    ) -> None:
        transport, file, release = blocked
        buffer = AlignedBuffer(9 << 20)
        transfers = [Transfer("write", file, 0, buffer.address, 9 << 20, keep=buffer) for _ in range(5)]
        gathered = Gathered(5)
        submit(transport, transfers, gathered)
        assert transport.cancel(transfers[1:4]) == 3
        assert transport.cancel(transfers[1:4]) == 0
        release()
        gathered.wait()
        assert [transfer.error_number for transfer in transfers] == [0, *[errno.ECANCELED] * 3, 0]

    def test_requests_begin_in_the_order_they_came(
        self, blocked: tuple[Transport, File, Callable[[], None]]
    ) -> None:
        transport, file, release = blocked
        buffer = AlignedBuffer(9 << 20)
        sizes = [9 << 20, 1, 5 << 20, 4096, 100_000]
        gathered = Gathered(len(sizes))
        for size in sizes:
            submit(transport, [Transfer("write", file, 0, buffer.address, size, keep=buffer)], gathered)
        release()
        assert [transfer.size_bytes for transfer in gathered.wait()] == sizes


class TestAtOnce:
    """Small transfers through the page cache, which `posix` carries out without handing them over."""

    def test_they_are_over_when_submit_returns(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(ORIGINAL[:40_960])
        transport, memory, gathered = PosixTransport(), Memory(), Gathered(2)
        threads: list[int] = []

        def on_done(transfer: Transfer) -> None:
            threads.append(threading.get_ident())
            gathered(transfer)

        with open_file(tmp_path / "file", "r+") as opened:
            write = Transfer("write", opened.file, 111, memory.take(DATA[:5000]), 5000, "buffered")
            target = memory.take(bytes(5000))
            submit(transport, [write, changed(write, kind="read", address=target)], on_done)
            assert threads == [threading.get_ident()] * 2
            transport.close()
        assert [transfer.error_number for transfer in gathered.wait()] == [0, 0]
        memory.expect(target, DATA[:5000])
        memory.check()
        assert (tmp_path / "file").read_bytes()[111:5111] == DATA[:5000]

    def test_a_long_row_of_them_needs_no_stack(self, tmp_path: Path) -> None:
        """Each asks for the next when it is over, thousands of times."""
        (tmp_path / "file").write_bytes(ORIGINAL[:40_960])
        transport, memory, left = PosixTransport(), Memory(), [3000]
        address = memory.take(DATA[:5000])

        def again(_: Transfer) -> None:
            left[0] -= 1
            if left[0]:
                submit(transport, [Transfer("write", opened.file, 111, address, 5000, "buffered")], again)

        with open_file(tmp_path / "file", "r+") as opened:
            submit(transport, [Transfer("write", opened.file, 111, address, 5000, "buffered")], again)
            transport.close()
        assert left == [0]

    def test_what_would_wait_for_the_disk_is_handed_over(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(ORIGINAL)
        transport, memory, gathered = PosixTransport(), Memory(), Gathered(1)
        threads: list[int] = []

        def on_done(transfer: Transfer) -> None:
            threads.append(threading.get_ident())
            gathered(transfer)

        with open_file(tmp_path / "file", "r") as opened:
            far = 7 << 20  # asking for the first page may have the kernel read those that follow
            forget(opened.file.buffered)
            target = memory.take(bytes(5000))
            submit(transport, [Transfer("read", opened.file, far, target, 5000, "buffered")], on_done)
            assert gathered.wait()[0].error_number == 0
            transport.close()
        assert threads and threading.get_ident() not in threads
        memory.expect(target, ORIGINAL[far : far + 5000])
        memory.check()


def forget(file: int) -> None:
    """Have the page cache let go of the file, or skip the test."""
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        os.preadv(file, [bytearray(1)], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        return
    except OSError as error:
        pytest.skip(f"the file system cannot say what would wait: {error.strerror}")
    pytest.skip("the page cache keeps the file")


class TestFaults:
    def test_the_chosen_requests_fail_and_move_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(ORIGINAL[:40_960])
        memory, turns = Memory(), itertools.count()
        faults = {2: errno.ENOSPC, 5: errno.EIO, 6: errno.EIO}
        transport = FaultyTransport(PosixTransport(), lambda transfer: faults.get(next(turns), 0))
        with open_file(tmp_path / "file", "r+") as opened:
            transfer = Transfer("write", opened.file, 0, memory.take(DATA[:4096]), 4096)
            transfers = [changed(transfer, offset=4096 * number) for number in range(10)]
            gathered = Gathered(10)
            submit(transport, transfers[:4], gathered)
            submit(transport, transfers[4:], gathered)
            errors = {c.offset // 4096: c.error_number for c in gathered.wait()}
            transport.close()
        assert errors == {number: faults.get(number, 0) for number in range(10)}
        content = (tmp_path / "file").read_bytes()
        for number in range(10):
            blocks = ORIGINAL[4096 * number : 4096 * number + 4096] if number in faults else DATA[:4096]
            assert content[4096 * number : 4096 * number + 4096] == blocks

    def test_memory_fails_on_demand_too(self) -> None:
        transport = MemoryTransport(fault=lambda transfer: errno.ENOSPC if transfer.offset else 0)
        memory, gathered = Memory(), Gathered(2)
        transfer = Transfer("write", File(7), 0, memory.take(DATA[:100]), 100)
        submit(transport, [transfer, changed(transfer, offset=100)], gathered)
        errors = {transfer.offset: transfer.error_number for transfer in gathered.wait()}
        assert errors == {0: 0, 100: errno.ENOSPC}
        assert transport.content(7) == DATA[:100]
        transport.close()


class TestMovingFully:
    def test_short_moves_are_continued(self) -> None:
        moves: list[tuple[int, int]] = []

        def move(begin: int, end: int) -> int:
            moves.append((begin, end))
            return min(300, end - begin)

        assert move_fully(move, 1000) == 0
        assert moves == [(0, 1000), (300, 1000), (600, 1000), (900, 1000)]

    @pytest.mark.parametrize("error", [BlockingIOError(errno.EAGAIN, ""), InterruptedError(errno.EINTR, "")])
    def test_a_busy_device_is_tried_again(self, error: OSError) -> None:
        answers: list[OSError | int] = [error, error, 10]

        def move(begin: int, end: int) -> int:
            answer = answers.pop(0)
            if isinstance(answer, OSError):
                raise answer
            return answer

        assert move_fully(move, 10) == 0

    def test_what_never_moves_ends_in_an_error(self) -> None:
        def busy(begin: int, end: int) -> int:
            raise BlockingIOError(errno.EAGAIN, "")

        assert move_fully(busy, 10) == errno.EAGAIN
        assert move_fully(lambda begin, end: 0, 10) == errno.EIO
