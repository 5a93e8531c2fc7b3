"""What every transport promises, checked by reading and writing the file by other means."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.storage.aligned import AlignedBuffer
from penstock.storage.transports import TRANSPORTS, Completion, Request, Transport
from penstock.storage.transports.contract import move_fully
from penstock.storage.transports.memory import MemoryTransport
from penstock.storage.transports.posix import BOUNCE_BYTES, PosixTransport

FILE_BYTES = 16 << 20
WAIT_S = 30


@dataclass
class Bench:
    """A transport, a file of FILE_BYTES random bytes that it can reach, and a way round it."""

    transport: Transport
    file: int
    content: Callable[[], bytes]
    original: bytes

    def run(self, *requests: Request) -> list[Completion]:
        """Submit, and wait for all."""
        completions: list[Completion] = []
        over = threading.Semaphore(0)

        def on_complete(completion: Completion) -> None:
            completions.append(completion)
            over.release()

        self.transport.submit(requests, on_complete)
        for _ in requests:
            assert over.acquire(timeout=WAIT_S)
        return completions


@pytest.fixture(params=["posix", "posix direct", "memory", "memory short"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    original = random.Random(1).randbytes(FILE_BYTES)
    path = tmp_path / "file"
    path.write_bytes(original)
    flags = os.O_RDWR
    if request.param == "posix direct":
        flags |= getattr(os, "O_DIRECT", 0)
    try:
        file = os.open(path, flags)
    except OSError:
        pytest.skip("no direct I/O here")
    transport: Transport
    if request.param.startswith("memory"):
        transport = MemoryTransport(short_bytes=1000 if request.param == "memory short" else None)
        seed = AlignedBuffer(FILE_BYTES)
        seed.view()[:] = original
        bench = Bench(transport, file, lambda: transport.content(file), original)
        bench.run(Request("write", file, 0, seed.address, FILE_BYTES, seed))
    else:
        transport = PosixTransport(alignment_bytes=4096 if "direct" in request.param else 1)
        bench = Bench(transport, file, path.read_bytes, original)
    yield bench
    transport.close()
    os.close(file)


def filled(size_bytes: int, seed: int, shift: int = 0) -> tuple[AlignedBuffer, int, bytes]:
    """Random bytes, and their address: a multiple of 4096 plus ``shift``."""
    buffer = AlignedBuffer(size_bytes + shift)
    data = random.Random(seed).randbytes(size_bytes)
    buffer.view()[shift:] = data
    return buffer, buffer.address + shift, data


SIZES = [1, 511, 4096, 4097, 100_000, BOUNCE_BYTES, 2 * BOUNCE_BYTES + 12_345]


@pytest.mark.parametrize("shift", [0, 64, 1])
@pytest.mark.parametrize("size_bytes", SIZES)
def test_what_is_written_is_in_the_file(bench: Bench, size_bytes: int, shift: int) -> None:
    buffer, address, data = filled(size_bytes, 2, shift)
    (completion,) = bench.run(Request("write", bench.file, 8192, address, size_bytes, buffer))
    assert completion.error_number == 0
    content = bench.content()
    end = 8192 + size_bytes
    padded_end = -(-end // 4096) * 4096
    assert content[8192:end] == data
    assert content[:8192] == bench.original[:8192]
    assert content[padded_end:] == bench.original[padded_end:]


@pytest.mark.parametrize("shift", [0, 64, 1])
@pytest.mark.parametrize("size_bytes", SIZES)
def test_what_is_in_the_file_is_read(bench: Bench, size_bytes: int, shift: int) -> None:
    buffer = AlignedBuffer(size_bytes + shift + 10)
    request = Request("read", bench.file, 4096, buffer.address + shift, size_bytes, buffer)
    (completion,) = bench.run(request)
    assert completion.error_number == 0
    assert buffer.view()[shift : shift + size_bytes] == bench.original[4096 : 4096 + size_bytes]
    assert bytes(buffer.view()[shift + size_bytes :]) == bytes(10), "nothing past the end is touched"


def test_many_requests_complete_once_each(bench: Bench) -> None:
    size = 64 << 10
    buffer, address, data = filled(FILE_BYTES // 2, 3)
    requests = [
        Request("write", bench.file, begin, address + begin, size, buffer)
        for begin in range(0, FILE_BYTES // 2, size)
    ]
    completions = bench.run(*requests)
    assert sorted(completion.request.offset for completion in completions) == list(
        range(0, FILE_BYTES // 2, size)
    )
    assert all(completion.error_number == 0 for completion in completions)
    assert all(completion.started_s <= completion.finished_s for completion in completions)
    assert bench.content()[: FILE_BYTES // 2] == data


def test_a_bad_request_fails_alone(bench: Bench) -> None:
    if isinstance(bench.transport, MemoryTransport):
        bench.transport.fault = lambda request: errno.EBADF if request.file == 10**6 else 0
    buffer, address, data = filled(4096, 4)
    bad = Request("write", 10**6, 0, address, 4096, buffer)
    good = Request("write", bench.file, 0, address, 4096, buffer)
    errors = {c.request.file: c.error_number for c in bench.run(bad, good, bad)}
    assert errors == {10**6: errno.EBADF, bench.file: 0}
    assert bench.content()[:4096] == data


def test_an_exception_in_a_completion_stops_nothing(bench: Bench) -> None:
    buffer, address, data = filled(4096, 5)
    request = Request("write", bench.file, 0, address, 4096, buffer)

    def fail(_: Completion) -> None:
        raise RuntimeError("expected by the test")

    bench.transport.submit([request] * 8, fail)
    assert bench.run(request)[0].error_number == 0
    assert bench.content()[:4096] == data


def test_memory_is_let_go_when_the_request_is_over(bench: Bench) -> None:
    class Held:
        def __del__(self) -> None:
            gone.set()

    gone = threading.Event()
    buffer = AlignedBuffer(4096)
    request = Request("write", bench.file, 0, buffer.address, 4096, Held())
    bench.transport.submit([request], lambda _: None)
    assert not gone.is_set()
    del request
    assert gone.wait(WAIT_S)


def test_close_waits_for_everything_and_is_idempotent(bench: Bench) -> None:
    buffer, address, data = filled(1 << 20, 7)
    over: list[int] = []
    requests = [
        Request("write", bench.file, begin, address, 1 << 20, buffer)
        for begin in range(0, FILE_BYTES, 1 << 20)
    ]
    bench.transport.submit(requests, lambda completion: over.append(completion.error_number))
    bench.transport.close()
    assert over == [0] * len(requests)
    assert bench.content() == data * len(requests)
    bench.transport.close()
    with pytest.raises(ValueError, match="closed"):
        bench.transport.submit(requests[:1], lambda _: None)


def test_cancelled_requests_complete_with_ecanceled(bench: Bench) -> None:
    buffer, address, _ = filled(1 << 20, 8)
    release = threading.Event()
    outcomes: list[int] = []
    blocked = Request("write", bench.file, 0, address, 4096, buffer)
    # Completions that wait keep every thread busy, so that the rest cannot begin.
    bench.transport.submit([blocked] * 64, lambda _: release.wait(WAIT_S) and None)
    waiting = [Request("write", bench.file, 0, address, 4096, buffer) for _ in range(5)]
    bench.transport.submit(waiting, lambda completion: outcomes.append(completion.error_number))
    assert bench.transport.cancel(waiting) == 5
    assert outcomes == [errno.ECANCELED] * 5
    assert bench.transport.cancel(waiting) == 0
    release.set()


def test_reading_past_the_end_of_the_file_is_an_error(bench: Bench) -> None:
    if isinstance(bench.transport, MemoryTransport):
        pytest.skip("its files have no end")
    buffer = AlignedBuffer(8192)
    request = Request("read", bench.file, FILE_BYTES - 4096, buffer.address, 8192, buffer)
    assert bench.run(request)[0].error_number == errno.EIO


def test_the_table_makes_transports() -> None:
    for make in TRANSPORTS.values():
        make(1, 4096).close()


class TestMovingFully:
    def test_short_moves_are_continued(self) -> None:
        moves: list[tuple[int, int]] = []

        def move(begin: int, end: int) -> int:
            moves.append((begin, end))
            return min(300, end - begin)

        assert move_fully(move, 1000) == 0
        assert moves == [(0, 1000), (300, 1000), (600, 1000), (900, 1000)]

    def test_a_short_direct_move_goes_on_at_a_block(self) -> None:
        begins: list[int] = []

        def move(begin: int, end: int) -> int:
            begins.append(begin)
            return min(5000, end - begin)

        assert move_fully(move, 12_288, 4096) == 0
        assert begins == [0, 4096, 8192]

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
        assert move_fully(lambda begin, end: 100, 8192, 4096) == errno.EIO
