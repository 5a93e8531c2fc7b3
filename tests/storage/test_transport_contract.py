"""What every transport promises, checked by reading and writing the file by other means."""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.storage.aligned import AlignedBuffer, align_down, align_up
from penstock.storage.native import SLOT_BYTES, CopyTransport, NvmeTransport, PosixTransport, UringTransport
from penstock.storage.transfer import (
    DEMAND,
    EVICT,
    PREFETCH,
    File,
    Kind,
    Transfer,
    Transport,
    TransportUnavailable,
)
from tests.support.faulty_transport import FaultyTransport
from tests.support.memory_transport import MemoryTransport
from tests.support.slow_disk import Rate, SlowDisk
from tests.support.transports import (
    DATA,
    FILE_BYTES,
    ORIGINAL,
    PAGE,
    WAIT_S,
    Gathered,
    Memory,
    changed,
    first_difference,
    open_file,
    submit,
)

HUGE_BYTES = 24 << 20  # more pieces than there are threads and slots


class Case(NamedTuple):
    """A transport, and the method of its transfers. Adding one takes a line in CASES."""

    make: Callable[[], Transport]
    method: str
    has_direct: bool = True  # False: as on a file system that takes no direct I/O
    memory: Callable[[int], Memory] = Memory
    workers: int = 4  # threads of its own, each of which waits while it tells a transfer
    on_disk: bool = True  # False: other programs do not reach its files


CASES = {
    **{f"posix {method}": Case(PosixTransport, method) for method in PosixTransport.methods},
    "posix direct, one thread": Case(lambda: PosixTransport(1), "direct", workers=1),
    "posix direct, small pieces": Case(lambda: PosixTransport(3, 100_000), "direct", workers=3),
    "posix direct, none there": Case(PosixTransport, "direct", has_direct=False),
    "posix staged, none there": Case(PosixTransport, "staged", has_direct=False),
    **{f"io_uring {method}": Case(UringTransport, method, workers=1) for method in UringTransport.methods},
    "io_uring direct, none there": Case(UringTransport, "direct", has_direct=False, workers=1),
    "faulty posix": Case(lambda: FaultyTransport(PosixTransport(1), lambda transfer: 0), "direct", workers=1),
    "slow disk": Case(lambda: SlowDisk(Rate(1e10)), "direct"),
    "memory": Case(MemoryTransport, "direct", on_disk=False),
    "memory short": Case(lambda: MemoryTransport(short_bytes=1000), "mapped", on_disk=False),
}

Test = TypeVar("Test", bound=Callable[..., None])


def cases(applies: Callable[[Case], bool]) -> Callable[[Test], Test]:
    """The test is about these cases only."""

    def mark(test: Test) -> Test:
        vars(test)["applies"] = applies
        return test

    return mark


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    applies = getattr(metafunc.function, "applies", lambda case: True)
    if "bench" in metafunc.fixturenames:
        metafunc.parametrize("bench", [name for name, case in CASES.items() if applies(case)], indirect=True)


class Bench:
    """A transport, a file of ORIGINAL bytes that it can reach, and a way round it."""

    def __init__(self, transport: Transport, case: Case, file: File, path: Path) -> None:
        self.transport = transport
        self.method = case.method
        self.workers = case.workers
        self._make_memory = case.memory
        self._memories: list[Memory] = []
        self.file = file
        self.path = path
        self.alignment = file.alignment_bytes
        if isinstance(transport, MemoryTransport):
            self.done(self.transfer("write", 0, self.memory().take(ORIGINAL), FILE_BYTES))

    def memory(self, size_bytes: int = 2 * FILE_BYTES) -> Memory:
        """It lives as long as the bench, and so longer than any transfer."""
        self._memories.append(self._make_memory(size_bytes))
        return self._memories[-1]

    def content(self) -> bytes:
        if isinstance(self.transport, MemoryTransport):
            return self.transport.content(self.file.buffered)
        return self.path.read_bytes()

    def transfer(self, kind: Kind, offset: int, address: int, size_bytes: int, **others: Any) -> Transfer:
        return Transfer(kind, self.file, offset, address, size_bytes, **{"method": self.method, **others})

    def run(self, *transfers: Transfer) -> list[Transfer]:
        """Submit, and wait for all."""
        gathered = Gathered(len(transfers))
        submit(self.transport, transfers, gathered)
        return gathered.wait()

    def done(self, *transfers: Transfer) -> None:
        """Submit, wait, and have all go well."""
        assert Counter(transfer.error_number for transfer in self.run(*transfers)) == {0: len(transfers)}

    def check_changes(self, before: bytes, writes: dict[int, bytes], padded: bool = False) -> None:
        """The file is as it was ``before``, but for these bytes at these offsets, and their padding."""
        after = self.content()
        expected = bytearray(before)
        for offset, data in writes.items():
            end = offset + len(data)
            if padded:
                low, high = align_down(offset, self.alignment), align_up(end, self.alignment)
                expected[low:high] = after[low:high]
            expected[offset:end] = data
        assert first_difference(after, expected) is None


@pytest.fixture
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    case = CASES[request.param]
    path = tmp_path / "file"
    path.write_bytes(ORIGINAL)
    try:
        transport = case.make()
    except TransportUnavailable as reason:
        pytest.skip(str(reason))
    with open_file(path, "r+") as opened:
        file = opened.file if case.has_direct else opened.file._replace(direct=-1)
        yield Bench(transport, case, file, path)
        transport.close()
    path.unlink()


# Around the alignment of every file system, for offset and address; sizes around that and larger.
ODD = [0, 1, 64, 511, 512, 4095]
SIZES = [1, 511, 512, 4095, 4096, 4097, 8191, 8192, 12_289]
COMBINATIONS = [
    *itertools.product(ODD, ODD, SIZES),
    *itertools.product([0, 511], [0, 511], [300_000]),
    (511, 511, SLOT_BYTES - 1),
    (511, 64, SLOT_BYTES + 4097),
]


def placed(alignment: int) -> Iterator[tuple[int, int, int]]:
    """(offset, shift, size) of every combination, each with a block of other bytes on both sides."""
    at = 0
    for offset, shift, size in COMBINATIONS:
        at = align_up(at, alignment) + alignment + offset
        yield at, shift, size
        at += size
    assert at + 2 * alignment < FILE_BYTES


@pytest.mark.parametrize("padded", [False, True])
def test_every_odd_combination_is_written(bench: Bench, padded: bool) -> None:
    memory = bench.memory()
    writes = {offset: DATA[offset : offset + size] for offset, _, size in placed(bench.alignment)}
    bench.done(
        *(
            bench.transfer("write", offset, memory.take(writes[offset], shift), size, padded=padded)
            for offset, shift, size in placed(bench.alignment)
        )
    )
    bench.check_changes(ORIGINAL, writes, padded)
    memory.check()


def test_every_odd_combination_is_read(bench: Bench) -> None:
    memory = bench.memory()
    transfers = [
        bench.transfer("read", offset, memory.take(bytes(size), shift), size)
        for offset, shift, size in placed(bench.alignment)
    ]
    bench.done(*transfers)
    for transfer in transfers:
        memory.expect(transfer.address, ORIGINAL[transfer.offset : transfer.offset + transfer.size_bytes])
    memory.check()
    bench.check_changes(ORIGINAL, {})


@given(
    parts=st.lists(
        st.tuples(
            st.sampled_from(["read", "write"]),
            st.integers(0, 9000),  # bytes to skip
            st.integers(1, 20_000),
            st.one_of(st.none(), st.integers(0, 4095)),  # the address's shift, None: like the offset's
        ),
        min_size=1,
        max_size=40,
    )
)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_neighbours_that_share_blocks_do_not_harm_each_other(
    bench: Bench, parts: Sequence[tuple[Kind, int, int, int | None]]
) -> None:
    memory = bench.memory(2 << 20)
    before = bench.content()
    at, transfers, writes = 0, [], {}
    for kind, skipped, size, shift in parts:
        at += skipped
        data = os.urandom(size) if kind == "write" else bytes(size)
        address = memory.take(data, at % PAGE if shift is None else shift)
        transfers.append(bench.transfer(kind, at, address, size))
        if kind == "write":
            writes[at] = data
        else:
            memory.expect(address, before[at : at + size])
        at += size
    bench.done(*transfers)
    bench.check_changes(before, writes)
    memory.check()


def test_many_threads_use_one_file_at_once(bench: Bench) -> None:
    size, threads, per_thread = 10_007, 8, 40
    memory = bench.memory()
    addresses = [
        memory.take(DATA[begin : begin + size]) for begin in range(0, threads * per_thread * size, size)
    ]
    results: list[list[Transfer]] = [[] for _ in range(threads)]

    def use(thread: int) -> None:
        for begin in range(thread * per_thread, (thread + 1) * per_thread, 10):
            results[thread] += bench.run(
                *(
                    bench.transfer("write", number * size, addresses[number], size)
                    for number in range(begin, begin + 10)
                )
            )

    users = [threading.Thread(target=use, args=(thread,)) for thread in range(threads)]
    for user in users:
        user.start()
    for user in users:
        user.join(WAIT_S)
    ended = list(itertools.chain(*results))
    assert sorted(transfer.address for transfer in ended) == addresses
    assert all(transfer.error_number == 0 for transfer in ended)
    assert all(0 < transfer.started_s <= transfer.finished_s for transfer in ended)
    bench.check_changes(ORIGINAL, {0: DATA[: threads * per_thread * size]})


def test_each_method_reads_what_another_wrote(bench: Bench) -> None:
    memory = bench.memory()
    offset, size = 12_345, 300_001
    for turn, (writer, reader) in enumerate(itertools.product(bench.transport.methods, repeat=2)):
        data = DATA[turn : turn + size]
        source, target = memory.take(data, offset % PAGE), memory.take(bytes(size), offset % PAGE)
        bench.done(bench.transfer("read", offset, target, size, method=reader))  # what caches may now hold
        bench.done(bench.transfer("write", offset, source, size, method=writer))
        bench.done(bench.transfer("read", offset, target, size, method=reader))
        memory.expect(target, data)
    memory.check()


@cases(lambda case: case.on_disk)
def test_what_other_programs_wrote_is_read(bench: Bench) -> None:
    memory = bench.memory()
    target = memory.take(bytes(100_000))
    with open(bench.path, "r+b") as other:
        other.seek(8192)
        other.write(DATA[:100_000])
    bench.done(bench.transfer("read", 8192, target, 100_000))
    memory.expect(target, DATA[:100_000])
    memory.check()


def test_memory_at_the_edge_of_a_mapping_is_not_overstepped(bench: Bench) -> None:
    library = ctypes.CDLL(None)
    pages = mmap.mmap(-1, 6 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    pages[PAGE : 5 * PAGE] = DATA[: 4 * PAGE]
    for forbidden in (begin, begin + 5 * PAGE):
        assert library.mprotect(ctypes.c_void_p(forbidden), ctypes.c_size_t(PAGE), 0) == 0
    for size in (1, 1000, PAGE, 2 * PAGE + 1000):
        for address in (begin + PAGE, begin + 5 * PAGE - size):
            for offset in (0, 1000, PAGE, address % PAGE):
                bench.done(bench.transfer("write", offset, address, size, padded=True, keep=pages))
                bench.done(bench.transfer("read", offset, address, size, keep=pages))
    assert pages[PAGE : 5 * PAGE] == DATA[: 4 * PAGE]


def test_a_huge_request_completes_once(bench: Bench) -> None:
    size = HUGE_BYTES + 321
    source, target = AlignedBuffer(size), AlignedBuffer(size)
    for begin in range(0, size, FILE_BYTES):
        part = source.view()[begin : begin + FILE_BYTES]
        part[:] = DATA[: len(part)]
    if bench.method == "mapped":
        os.posix_fallocate(bench.file.buffered, 0, size + 77)
    bench.done(bench.transfer("write", 77, source.address, size, keep=source))
    bench.done(bench.transfer("read", 77, target.address, size, keep=target))
    assert source.view() == target.view()
    assert first_difference(bench.content(), ORIGINAL[:77] + bytes(source.view())) is None


@cases(lambda case: case.method != "mapped")
def test_a_file_grows_to_the_byte(bench: Bench) -> None:
    memory = bench.memory()
    data = DATA[:50_001]
    for shift in (0, FILE_BYTES % PAGE):
        bench.done(bench.transfer("write", FILE_BYTES - 1, memory.take(data, shift), len(data)))
        assert first_difference(bench.content(), ORIGINAL[:-1] + data) is None


def test_the_last_bytes_are_read_and_what_lies_beyond_is_an_error(bench: Bench) -> None:
    memory = bench.memory()
    for size, shift in itertools.product([1, 1234, 5000, 300_000], [0, 3]):
        offset = FILE_BYTES - size
        for address_shift in (shift, (offset + shift) % PAGE):
            target = memory.take(bytes(size), address_shift)
            bench.done(bench.transfer("read", offset, target, size))
            memory.expect(target, ORIGINAL[-size:])
    memory.check()
    for offset, size in [
        (FILE_BYTES - 1, 2),
        (FILE_BYTES - 5000, 5001),
        (FILE_BYTES - 300_000, 400_000),
        (FILE_BYTES - 300_000, 7 << 20),
        (FILE_BYTES, 1),
        (FILE_BYTES + 100_000, 5000),
    ]:
        target = bench.memory().take(bytes(size), offset % PAGE)
        (transfer,) = bench.run(bench.transfer("read", offset, target, size))
        assert transfer.error_number == errno.EIO


@cases(lambda case: case.method == "mapped" and case.on_disk)
def test_a_mapping_beyond_the_end_of_the_file_is_an_error(bench: Bench) -> None:
    memory = bench.memory()
    address = memory.take(DATA[:100_000])
    for offset in (FILE_BYTES - 99_999, FILE_BYTES, FILE_BYTES + 100_000):
        assert bench.run(bench.transfer("write", offset, address, 100_000))[0].error_number == errno.EIO
    assert len(bench.content()) == FILE_BYTES


def test_a_bad_descriptor_fails_alone(bench: Bench) -> None:
    nowhere = File(10**6, 10**6, bench.alignment)
    if isinstance(bench.transport, MemoryTransport):
        bench.transport.fault = lambda transfer: errno.EBADF if transfer.file == nowhere else 0
    memory = bench.memory()
    good = bench.transfer("write", 8192, memory.take(DATA[:5000]), 5000)
    bad = [changed(good, file=nowhere, kind=kind) for kind in ("read", "write") * 2]
    errors = {(c.file, c.error_number) for c in bench.run(*bad[:2], good, *bad[2:])}
    assert errors == {(nowhere, errno.EBADF), (bench.file, 0)}
    bench.check_changes(ORIGINAL, {8192: DATA[:5000]})
    memory.check()


def test_an_unknown_method_is_refused_before_anything_begins(bench: Bench) -> None:
    memory = bench.memory()
    transfer = bench.transfer("write", 0, memory.take(DATA[:5000]), 5000)
    with pytest.raises(ValueError, match="method"):
        bench.run(transfer, changed(transfer, method="by mail"))
    bench.transport.close()
    bench.check_changes(ORIGINAL, {})


def test_an_exception_in_a_completion_stops_nothing(bench: Bench) -> None:
    memory = bench.memory()
    transfer = bench.transfer("write", 1, memory.take(DATA[:5000]), 5000)

    def fail(_: Transfer) -> None:
        raise RuntimeError("expected by the test")

    submit(bench.transport, [changed(transfer) for _ in range(8)], fail)
    bench.done(changed(transfer))
    bench.check_changes(ORIGINAL, {1: DATA[:5000]})


def test_requests_may_be_submitted_from_a_completion(bench: Bench) -> None:
    memory = bench.memory()
    first, second = (bench.transfer("write", at, memory.take(DATA[:5000]), 5000) for at in (1, 9000))
    gathered = Gathered(1)
    submit(bench.transport, [first], lambda _: submit(bench.transport, [second], gathered))
    assert gathered.wait()[0].error_number == 0
    bench.check_changes(ORIGINAL, {1: DATA[:5000], 9000: DATA[:5000]})


def test_memory_is_held_until_the_request_is_over_and_let_go_then(bench: Bench) -> None:
    class Held:
        def __init__(self, size_bytes: int) -> None:
            self.buffer = AlignedBuffer(size_bytes)

        def __del__(self) -> None:
            gone.set()

    gone, completing = threading.Event(), threading.Event()
    held_while_completing: list[bool] = []

    def on_done(_: Transfer) -> None:
        assert completing.wait(WAIT_S)
        held_while_completing.append(not gone.is_set())

    held = Held(8 << 20)
    transfer = bench.transfer("write", 0, held.buffer.address, 8 << 20, keep=held)
    submit(bench.transport, [transfer], on_done)
    del transfer, held
    completing.set()
    assert gone.wait(WAIT_S)
    assert held_while_completing == [True]


def test_what_is_refused_is_let_go(bench: Bench) -> None:
    class Held:
        pass

    held = Held()
    gone = weakref.ref(held)
    sound = bench.transfer("read", 0, bench.memory().take(bytes(5000)), 5000, keep=held)
    with pytest.raises(ValueError, match="method"):
        bench.transport.submit([sound, changed(sound, method="by mail")])
    bench.transport.close()
    with pytest.raises(ValueError, match="closed"):
        bench.transport.submit([sound])
    del sound, held
    assert gone() is None


HELD_BYTES = (1 << 20) + 4096  # larger than what `posix` carries out at once


class Hold:
    """Keeps a transport still: every thread that could begin a transfer waits in a transfer."""

    def __init__(self, bench: Bench) -> None:
        self._released = threading.Event()
        holding = threading.Semaphore(0)

        def hold(_: Transfer) -> None:
            holding.release()
            assert self._released.wait(WAIT_S)

        memory = bench.memory()
        transfer = bench.transfer("read", 0, memory.take(bytes(HELD_BYTES)), HELD_BYTES)
        for _ in range(bench.workers):  # one by one: a thread tells of what ends while nothing else goes on
            submit(bench.transport, [changed(transfer)], hold)
            assert holding.acquire(timeout=WAIT_S)

    def release(self) -> None:
        self._released.set()


def test_requests_begin_by_priority_and_in_the_order_they_came(bench: Bench) -> None:
    memory = bench.memory(8 * FILE_BYTES)
    priorities = [EVICT, PREFETCH, DEMAND, PREFETCH, EVICT, DEMAND, PREFETCH, DEMAND, EVICT]
    transfers = [
        bench.transfer(
            "write" if index % 2 else "read",
            index * HELD_BYTES,
            memory.take(DATA[:HELD_BYTES]),
            HELD_BYTES,
            priority=priority,
        )
        for index, priority in enumerate(priorities)
    ]
    hold, gathered = Hold(bench), Gathered(len(transfers))
    for transfer in transfers:
        submit(bench.transport, [transfer], gathered)
    bench.transport.raise_priority([transfers[8], transfers[1], transfers[2]])
    hold.release()
    began = sorted(gathered.wait(), key=lambda transfer: transfer.started_s)
    order = [transfers.index(each) for each in began]
    assert set(order[3:5]) == {8, 1}  # hurried together
    assert [index for index in order if index not in (8, 1)] == [2, 5, 7, 3, 6, 0, 4]
    assert all(transfer.error_number == 0 for transfer in began)
    memory_of_writes = {index * HELD_BYTES: DATA[:HELD_BYTES] for index in range(1, 9, 2)}
    bench.check_changes(ORIGINAL, memory_of_writes)


def test_what_was_hurried_is_not_changed_otherwise(bench: Bench) -> None:
    memory = bench.memory()
    address = memory.take(DATA[:5000])
    transfers = [bench.transfer("write", at, address, 5000, priority=EVICT) for at in (1, 9000, 20_000)]
    hold, gathered = Hold(bench), Gathered(2 + 1)
    submit(bench.transport, transfers, gathered)
    bench.transport.raise_priority(transfers[1:])
    bench.transport.raise_priority(transfers[1:])
    cancelled = bench.transport.cancel(transfers[2:])
    hold.release()
    errors = {transfer.offset: transfer.error_number for transfer in gathered.wait()}
    assert errors == {1: 0, 9000: 0, 20_000: errno.ECANCELED if cancelled else 0}
    bench.transport.raise_priority(transfers)  # they are over
    bench.check_changes(ORIGINAL, {at: DATA[:5000] for at, error in errors.items() if not error})


def test_an_unknown_priority_is_refused_before_anything_begins(bench: Bench) -> None:
    memory = bench.memory()
    transfer = bench.transfer("write", 0, memory.take(DATA[:5000]), 5000)
    for priority in (-1, EVICT + 1):
        with pytest.raises((ValueError, TypeError)):
            bench.run(changed(transfer), changed(transfer, priority=priority))
    bench.transport.close()
    bench.check_changes(ORIGINAL, {})


def test_close_gives_up_after_its_time_limit_and_can_be_called_again(bench: Bench) -> None:
    memory = bench.memory()
    transfer = bench.transfer("write", 1, memory.take(DATA[:HELD_BYTES]), HELD_BYTES, priority=EVICT)
    hold, gathered = Hold(bench), Gathered(1)
    submit(bench.transport, [transfer], gathered)
    assert not bench.transport.close(0.01)
    with pytest.raises(ValueError, match="closed"):
        submit(bench.transport, [changed(transfer)], print)
    hold.release()
    assert bench.transport.close(WAIT_S)
    assert gathered.wait()[0].error_number == 0
    bench.check_changes(ORIGINAL, {1: DATA[:HELD_BYTES]})


def test_close_waits_for_everything_and_is_idempotent(bench: Bench) -> None:
    memory = bench.memory()
    address, size = memory.take(DATA[:500_000]), 500_000
    errors: list[int] = []
    transfers = [bench.transfer("write", begin, address, size) for begin in range(0, 20 * size, size)]
    submit(bench.transport, transfers, lambda transfer: errors.append(transfer.error_number))
    bench.transport.close()
    assert errors == [0] * len(transfers)
    bench.check_changes(ORIGINAL, dict.fromkeys(range(0, 20 * size, size), DATA[:size]))
    bench.transport.close()
    with pytest.raises(ValueError, match="closed"):
        bench.transport.submit([changed(transfers[0])])


def left_by(work: Callable[[], None]) -> tuple[int, int]:
    """Native threads and descriptors more than before, once those that end have ended."""

    def counted() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    threads, descriptors = counted()
    work()
    deadline_s = time.monotonic() + WAIT_S
    while True:
        now = counted()
        left = max(now[0] - threads, 0), max(now[1] - descriptors, 0)
        if not any(left) or time.monotonic() > deadline_s:
            return left
        time.sleep(0.001)


@pytest.mark.parametrize("make", [UringTransport, PosixTransport, CopyTransport, NvmeTransport])
def test_what_an_interrupt_kept_from_anybody_leaves_nothing(make: Callable[[], Transport]) -> None:
    """An interrupt that comes before the transport has a name."""
    try:
        make().close()
    except TransportUnavailable as reason:
        pytest.skip(str(reason))

    def make_some() -> None:
        for _ in range(5):
            make()

    assert left_by(make_some) == (0, 0)


@pytest.mark.parametrize("count", [1, 20])
def test_the_last_reference_may_go_on_a_thread_of_its_own(tmp_path: Path, count: int) -> None:
    path = tmp_path / "data"
    path.write_bytes(DATA)
    memory = Memory()

    def submit_and_forget() -> None:
        over = Gathered(count)
        held: list[Transport] = [PosixTransport(2)]

        def tell(transfer: Transfer) -> None:
            over(transfer)
            held.clear()

        with open_file(path, "r") as opened:
            reads = [
                Transfer("read", opened.file, 0, memory.take(bytes(100)), 100, "staged") for _ in range(count)
            ]
            submit(held[0], reads, tell)
            assert all(each.error_number == 0 for each in over.wait())

    assert left_by(submit_and_forget) == (0, 0)


def test_cancelled_requests_are_not_carried_out(bench: Bench) -> None:
    memory = bench.memory()
    address, size = memory.take(DATA[:4000]), 4000
    transfers = [bench.transfer("write", begin, address, size) for begin in range(0, 2000 * size, size)]
    gathered = Gathered(len(transfers))
    submit(bench.transport, transfers, gathered)
    cancelled = bench.transport.cancel(transfers)
    errors = {transfer.offset: transfer.error_number for transfer in gathered.wait()}
    assert Counter(errors.values()) == Counter({errno.ECANCELED: cancelled, 0: len(transfers) - cancelled})
    bench.check_changes(ORIGINAL, {offset: DATA[:size] for offset, error in errors.items() if not error})
    assert bench.transport.cancel(transfers) == 0
