"""The direct path between a GPU and the disk is used only where it was seen to work, and to be faster.

No GPU is needed: a stand-in for kvikio moves host memory. `tests/gpu` does the same with a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock._native import DEMAND
from penstock.core.log import log_once
from penstock.errors import InvalidArgument, SpillError
from penstock.options import IoOptions
from penstock.runtime.devices import Copy, Moved
from penstock.runtime.devices.direct import BOUNCE, SMALLEST_DIRECT_BYTES, Paths
from penstock.runtime.storages import ManagedStorage
from penstock.storage.aligned import AlignedBuffer
from penstock.storage.extents import Extent
from penstock.storage.gpudirect import GpuDirectTransport
from penstock.storage.paths import GPU_TRANSPORTS, TRANSPORTS, IoPaths
from penstock.storage.spill import MEASURED_EVERY, SpillSpace
from penstock.storage.transfer import Transfer, TransportUnavailable

# The contract, for what follows as `bench`.
from tests.storage.test_transport_contract import (  # noqa: F401
    Bench,
    Case,
    test_a_bad_descriptor_fails_alone,
    test_a_file_grows_to_the_byte,
    test_a_huge_request_completes_once,
    test_an_exception_in_a_completion_stops_nothing,
    test_an_unknown_method_is_refused_before_anything_begins,
    test_cancelled_requests_are_not_carried_out,
    test_close_waits_for_everything_and_is_idempotent,
    test_every_odd_combination_is_read,
    test_every_odd_combination_is_written,
    test_many_threads_use_one_file_at_once,
    test_memory_is_held_until_the_request_is_over_and_let_go_then,
    test_neighbours_that_share_blocks_do_not_harm_each_other,
    test_requests_may_be_submitted_from_a_completion,
    test_the_last_bytes_are_read_and_what_lies_beyond_is_an_error,
    test_what_other_programs_wrote_is_read,
)
from tests.support.kvikio_stand_in import CompatMode, StandIn
from tests.support.memory_transport import MemoryTransport
from tests.support.transports import DATA, ORIGINAL, WAIT_S, Gathered, Memory, open_file, submit

GPU_DIRECT = "kvikio gpu-direct"
MIB = 1 << 20


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    stand_in = StandIn()
    stand_in.install(monkeypatch)
    log_once.cache_clear()
    yield stand_in
    stand_in.pool.shutdown()


@pytest.fixture(params=["whole", "short"])
def bench(request: pytest.FixtureRequest, kvikio: StandIn, tmp_path: Path) -> Iterator[Bench]:
    path = tmp_path / "file"
    path.write_bytes(ORIGINAL)
    if request.param == "short":
        kvikio.short_bytes = 3_000_001
    transport = GpuDirectTransport(piece_bytes=4 * MIB)
    with open_file(path, "r+") as opened:
        if opened.file.direct < 0:
            pytest.skip("the file system takes no direct I/O")
        yield Bench(transport, Case(GpuDirectTransport, "gpu-direct"), opened.file, path)
        transport.close()


# -- whether it is there ------------------------------------------------------------------------------


def refusal() -> TransportUnavailable:
    with pytest.raises(TransportUnavailable) as refused:
        GpuDirectTransport()
    return refused.value


def test_without_a_gpu_kvikio_is_not_even_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delitem(sys.modules, "kvikio", raising=False)
    refused = refusal()
    assert refused.expected and "no CUDA device" in str(refused)
    assert "kvikio" not in sys.modules


def test_without_kvikio_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "kvikio", None)
    refused = refusal()
    assert refused.expected and "pip install '.[gds]'" in str(refused)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda kvikio: setattr(kvikio, "compatible", True), "compatibility mode"),
        (lambda kvikio: setattr(kvikio, "driver_error", "NVFS driver initialization error"), "NVFS driver"),
        (lambda kvikio: kvikio.driver.update(is_gds_available=False), "nvidia-fs is not loaded"),
        (lambda kvikio: kvikio.settings.pop("num_threads"), "cannot be used"),  # an old kvikio
    ],
)
def test_what_only_looks_like_a_direct_path_is_refused(
    kvikio: StandIn, change: Callable[[StandIn], object], reason: str
) -> None:
    change(kvikio)
    refused = refusal()
    assert reason in str(refused)
    assert not refused.expected  # somebody installed kvikio, and wants to know


def test_a_broken_kvikio_is_refused(kvikio: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "kvikio":
                raise RuntimeError("libcufile.so.0: cannot open shared object file")

    monkeypatch.delitem(sys.modules, "kvikio")
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    refused = refusal()
    assert not refused.expected and "cannot be loaded: libcufile" in str(refused)


def test_without_nvidia_fs_it_is_used_where_cufile_may_not_fall_back(kvikio: StandIn) -> None:
    kvikio.driver.update(is_gds_available=False, allow_compat_mode=False)
    GpuDirectTransport().close()


def test_io_paths_have_no_gpu_direct_unless_asked(kvikio: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.closing(IoPaths()) as io:
        assert not io.gpu_paths and not io.unavailable.keys() & GPU_TRANSPORTS.keys()
    with contextlib.closing(IoPaths(gpu=True)) as io:
        assert [path.medium for path in io.gpu_paths.values()] == ["disk"]
        assert list(io.gpu_paths) == [GPU_DIRECT] and GPU_DIRECT not in io.paths
    with contextlib.closing(IoPaths([GPU_DIRECT], gpu=True)) as io:
        assert list(io.gpu_paths) == [GPU_DIRECT] and {path.partition(" ")[0] for path in io.paths} <= {
            *TRANSPORTS
        }
        assert io.paths
    with contextlib.closing(IoPaths(["posix direct"], gpu=True)) as io:
        assert not io.gpu_paths
    with pytest.raises(InvalidArgument, match="nothing but the memory of a GPU"):
        IoPaths([GPU_DIRECT])
    assert not caplog.records


@pytest.mark.parametrize("expected", [True, False])
def test_io_paths_warns_only_of_what_was_to_be_expected_there(
    kvikio: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, expected: bool
) -> None:
    if expected:
        monkeypatch.setitem(sys.modules, "kvikio", None)
    else:
        kvikio.compatible = True
    with caplog.at_level(logging.INFO, "penstock"):
        for _ in range(2):
            with contextlib.closing(IoPaths(gpu=True)) as io:
                assert io.paths and not io.gpu_paths and "kvikio" in io.unavailable
    (record,) = caplog.records
    assert record.levelno == (logging.INFO if expected else logging.WARNING)
    with pytest.raises(InvalidArgument, match=r"kvikio gpu-direct cannot be used.*kvikio: "):
        IoPaths([GPU_DIRECT], gpu=True)


# -- files ---------------------------------------------------------------------------------------------


def write_once(transport: GpuDirectTransport, file: Any, data: bytes = DATA[:50_000]) -> int:
    memory, gathered = Memory(), Gathered(1)
    transfer = Transfer("write", file, 0, memory.take(data), len(data), "gpu-direct", keep=memory)
    submit(transport, [transfer], gathered)
    return gathered.wait()[0].error_number


def test_files_are_registered_once_and_never_with_a_fallback(kvikio: StandIn, tmp_path: Path) -> None:
    transport = GpuDirectTransport()
    with open_file(tmp_path / "file", "w") as opened:
        for _ in range(3):
            assert transport.probe(opened.file) is None
            assert write_once(transport, opened.file) == 0
        assert kvikio.registered == [f"/proc/self/fd/{opened.file.direct}"]
        assert kvikio.settings["compat_mode"] == CompatMode.AUTO  # that of the program
        transport.close()
    assert kvikio.open_files == 0


def test_a_file_that_cufile_refuses_fails_with_the_reason(kvikio: StandIn, tmp_path: Path) -> None:
    transport = GpuDirectTransport()
    with open_file(tmp_path / "good", "w") as good, open_file(tmp_path / "bad", "w") as bad:
        assert write_once(transport, good.file) == 0
        kvikio.refusal = "GPUDirect Storage not supported on current file"
        assert write_once(transport, bad.file) == errno.EOPNOTSUPP
        assert kvikio.refusal in (transport.probe(bad.file) or "")
        kvikio.refusal = None
        assert write_once(transport, bad.file) == errno.EOPNOTSUPP  # not tried again
        assert write_once(transport, good.file) == 0
        assert kvikio.settings["compat_mode"] == CompatMode.AUTO
    transport.close()


def test_a_descriptor_that_became_another_files_is_registered_anew(kvikio: StandIn, tmp_path: Path) -> None:
    transport = GpuDirectTransport()
    for name in ("first", "second"):
        with open_file(tmp_path / name, "w") as opened:
            numbers = opened.file
            assert write_once(transport, opened.file, name.encode() * 8000) == 0
    assert len(kvikio.registered) == 2 and len({*kvikio.registered}) == 1
    for name in ("first", "second"):
        assert (tmp_path / name).read_bytes() == name.encode() * 8000
    assert write_once(transport, numbers) == errno.EBADF
    transport.close()


def test_a_closed_file_gives_its_disk_space_back(kvikio: StandIn, tmp_path: Path) -> None:
    transport = GpuDirectTransport()
    with open_file(tmp_path / "first", "w") as first, open_file(tmp_path / "second", "w") as second:
        assert write_once(transport, first.file) == 0
        first.close()
        assert write_once(transport, second.file) == 0
        assert kvikio.open_files == 1
    transport.close()


def test_a_file_without_a_name_is_reached(kvikio: StandIn, tmp_path: Path) -> None:
    transport = GpuDirectTransport()
    with open_file(tmp_path / "file", "w") as opened:
        (tmp_path / "file").unlink()
        (tmp_path / "file").write_bytes(b"another")
        assert write_once(transport, opened.file) == 0
        assert os.pread(opened.file.buffered, 50_000, 0) == DATA[:50_000]
    transport.close()
    assert (tmp_path / "file").read_bytes() == b"another"


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_what_the_disk_says_is_passed_on(kvikio: StandIn, tmp_path: Path, error: int) -> None:
    transport = GpuDirectTransport()
    with open_file(tmp_path / "file", "w") as opened:
        kvikio.move_error = error
        assert write_once(transport, opened.file) == error
        memory, gathered = Memory(), Gathered(1)
        transfer = Transfer("read", opened.file, 0, memory.take(bytes(50_000)), 50_000, "gpu-direct")
        submit(transport, [transfer], gathered)
        assert gathered.wait()[0].error_number == errno.EIO
    transport.close()


# -- spill space ----------------------------------------------------------------------------------------


def test_spill_space_moves_a_gpus_memory_beside_the_choice(kvikio: StandIn, tmp_path: Path) -> None:
    with SpillSpace([tmp_path, tmp_path], gpu=True) as space:
        assert space.gpu_direct == GPU_DIRECT and not space.gpu_direct_only and GPU_DIRECT not in space.paths
        memory, size = Memory(2 * len(DATA)), 5 * MIB + 1001
        source, target = memory.take(DATA[:size], 77), memory.take(bytes(size), 5)
        over = threading.Semaphore(0)
        extent = space.allocate(size)
        for move, address in ((space.write, source), (space.read, target)):
            move(extent, address, size, memory, lambda _: over.release(), on_gpu=True)
            assert over.acquire(timeout=WAIT_S)
        memory.expect(target, DATA[:size])
        # What one path wrote the other reads.
        target = memory.take(bytes(size))
        space.read(extent, target, size, memory, lambda _: over.release())
        assert over.acquire(timeout=WAIT_S)
        memory.expect(target, DATA[:size])
        memory.check()
        assert space.moved_bytes_by_path[GPU_DIRECT] == 2 * size
        assert sum(space.moved_bytes_by_path.values()) == 3 * size
        assert (space.written_bytes, space.read_bytes) == (size, 2 * size)
        assert all(entry.path != GPU_DIRECT for entry in space.choice.tables().entries)
        space.release(extent)
        assert space.used_bytes == 0


def test_spill_space_does_without_where_a_file_is_refused(
    kvikio: StandIn, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kvikio.refusal = "GPUDirect Storage not supported on current file"
    with SpillSpace(tmp_path, gpu=True) as space:
        assert space.gpu_direct is None
        assert kvikio.refusal in space.unavailable["kvikio"]
        with pytest.raises(InvalidArgument, match="directly"):
            space.write(space.allocate(4096), 0, 4096, None, print, on_gpu=True)
    assert caplog.text.count("kvikio is not used") == 1
    with pytest.raises(InvalidArgument, match=r"kvikio gpu-direct cannot be used.*not supported"):
        SpillSpace(tmp_path, IoOptions(paths=[GPU_DIRECT]), gpu=True)


def test_spill_space_verifies_nothing_that_it_cannot_see(kvikio: StandIn, tmp_path: Path) -> None:
    with SpillSpace(tmp_path, IoOptions(verify=True), gpu=True) as space:
        assert space.gpu_direct is None and "verify" in space.unavailable["kvikio"]


def test_the_page_cache_holds_nothing_of_it(kvikio: StandIn, tmp_path: Path) -> None:
    paths = ["posix buffered", GPU_DIRECT]
    with SpillSpace(tmp_path, IoOptions(page_cache_budget=64 * MIB, paths=paths), gpu=True) as space:
        extent = space.allocate(MIB)
        assert extent.space == "page cache"
        with pytest.raises(InvalidArgument, match="directly"):
            space.read(extent, 0, MIB, None, print, on_gpu=True)


# -- the choice between the paths -------------------------------------------------------------------------


class Runner:
    """Moves storages as a CUDA device does, with a bounce path that takes as long as it is told."""

    def __init__(self, space: SpillSpace, bounce_s: float = 0.0) -> None:
        self.space = space
        self.paths = Paths(space, torch.device("cpu"))
        self.bounce_s = bounce_s
        self.bounced = 0
        self.waits = 0

    def cycle(self, size_bytes: int, times: int) -> list[Moved]:
        moved: list[Moved] = []
        for _ in range(times):
            storage = torch.frombuffer(bytearray(DATA[:size_bytes]), dtype=torch.uint8).untyped_storage()
            block = self.paths.allocate(size_bytes)
            wrote = self.write(storage, block)
            assert wrote.error is None
            target = torch.UntypedStorage(size_bytes)
            read = self._moved(False, target, block)
            assert read.error is None
            if self.bounced == 0:
                assert ctypes.string_at(target.data_ptr(), size_bytes) == DATA[:size_bytes]
            moved += [*wrote.moved, *read.moved]
            self.space.release(block)
        return moved

    def write(self, storage: torch.UntypedStorage, block: Extent, lasts: bool = False) -> Copy:
        return self._moved(True, storage, block, lasts)

    def _moved(self, *what: Any) -> Copy:
        (ended,) = self.begin(*what)
        return ended

    def begin(
        self, out: bool, storage: torch.UntypedStorage, block: Extent, lasts: bool = False
    ) -> list[Copy]:
        """Where the copy is going to be, when it has ended."""
        managed = ManagedStorage(storage, storage.nbytes(), lambda _: None)
        managed.persistent = lasts
        ended: list[Copy] = []
        copy = Copy(managed, storage, out, DEMAND, ended.append)
        copy.block, copy.ready = block, [types.SimpleNamespace(synchronize=self._wait)]
        self.paths.move(self, copy, DEMAND)  # type: ignore[arg-type]
        return ended

    def start(self, copy: Copy, priority: int) -> None:
        time.sleep(self.bounce_s)
        self.bounced += 1
        copy.then(copy)

    def drain(self) -> bool:
        return True

    def _wait(self) -> None:
        self.waits += 1


@contextlib.contextmanager
def runner(
    directory: Path, bounce_s: float = 0.0, accelerator: str = "cpu", **options: Any
) -> Iterator[Runner]:
    with SpillSpace(directory, IoOptions(**options), accelerator=accelerator, gpu=True) as space:
        yield Runner(space, bounce_s)


@pytest.mark.parametrize("faster", ["direct", "bounce"])
def test_the_faster_path_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faster: str) -> None:
    class Memories(MemoryTransport):
        methods = ("gpu-direct",)

    delay_s, bounce_s = (0.0, 0.03) if faster == "direct" else (0.03, 0.0)
    monkeypatch.setitem(GPU_TRANSPORTS, "kvikio", lambda: Memories(delay_s=delay_s))
    with runner(tmp_path, bounce_s, reexplore=0) as chosen:
        chosen.cycle(64 << 10, 15)
        assert chosen.paths.choice is not None
        assert {entry.path for entry in chosen.paths.choice.tables().entries} == {BOUNCE, GPU_DIRECT}
    # Three trials of each, for writes and for reads.
    assert chosen.bounced <= 6 if faster == "direct" else chosen.bounced >= 24


class Overlapping(Runner):
    """Its copies are over when somebody waits for them.

    most        that were under way at once
    disturbed   that were measured, and others were under way with them
    """

    def __init__(self, space: SpillSpace) -> None:
        super().__init__(space)
        self.under_way: list[tuple[Copy, int]] = []
        self.most = self.disturbed = self.observed = 0
        choice = self.paths.choice
        assert choice is not None
        observe = choice.observe

        def observed(*arguments: Any) -> None:
            self.observed += 1
            observe(*arguments)

        choice.observe = observed  # type: ignore[method-assign]

    def start(self, copy: Copy, priority: int) -> None:
        self.under_way.append((copy, len(self.under_way)))
        self.most = max(self.most, len(self.under_way))

    def drain(self) -> bool:
        while self.under_way:
            copy, others = self.under_way.pop(0)
            before = self.observed
            copy.then(copy)
            self.disturbed += self.observed > before and others + len(self.under_way) > 0
        return True


def test_what_is_measured_has_its_direction_to_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Memories(MemoryTransport):
        methods = ("gpu-direct",)

    monkeypatch.setitem(GPU_TRANSPORTS, "kvikio", lambda: Memories(delay_s=0.03))
    with SpillSpace(tmp_path, IoOptions(reexplore=0), gpu=True) as space:
        runner = Overlapping(space)
        block, storage = space.allocate(64 << 10), torch.UntypedStorage(64 << 10)
        for _ in range(3 * MEASURED_EVERY):
            runner.begin(True, storage, block)
        runner.drain()
        assert runner.most > MEASURED_EVERY // 2 and runner.observed > 6 and not runner.disturbed


def test_what_was_learned_serves_the_next_run_on_the_same_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Memories(MemoryTransport):
        methods = ("gpu-direct",)

    monkeypatch.setitem(GPU_TRANSPORTS, "kvikio", Memories)
    bounced = {}
    options: dict[str, Any] = {"reexplore": 0, "costs": tmp_path / "costs.json"}
    for run, gpu in (("first", "GPU a"), ("again", "GPU a"), ("elsewhere", "GPU b")):
        with runner(tmp_path, 0.03, accelerator=gpu, **options) as one:
            one.cycle(64 << 10, 8)
            bounced[run] = one.bounced
    assert bounced["first"] > 0 and bounced["elsewhere"] > 0  # how many depends on their times
    assert bounced["again"] == 0


def test_a_pinned_direct_path_moves_all_but_the_smallest(kvikio: StandIn, tmp_path: Path) -> None:
    with runner(tmp_path, paths=[GPU_DIRECT], page_cache_budget=64 * MIB) as pinned:
        trial_bytes = pinned.space.moved_bytes_by_path[GPU_DIRECT]
        moved = pinned.cycle(MIB, 5)
        assert pinned.bounced == 0
        assert pinned.space.moved_bytes_by_path[GPU_DIRECT] - trial_bytes == 10 * MIB
        assert pinned.waits == 10  # for the kernels, before each
        links = [one.link for one in moved]
        assert links == ["device_to_host", "disk_write", "disk_read", "host_to_device"] * 5
        assert all(one.size_bytes == MIB and one.started_s < one.finished_s for one in moved)
        pinned.cycle(SMALLEST_DIRECT_BYTES - 1, 1)
        assert pinned.bounced == 2


def test_what_outlives_a_step_goes_where_it_is_checksummed(kvikio: StandIn, tmp_path: Path) -> None:
    with runner(tmp_path, reexplore=0) as both:
        block, storage = both.paths.allocate(MIB), torch.UntypedStorage(MIB)
        for _ in range(10):
            both.write(storage, block, lasts=True)
        assert both.bounced == 10
    with runner(tmp_path, paths=[GPU_DIRECT]) as pinned:
        block = pinned.paths.allocate(MIB)
        pinned.write(storage, block, lasts=True)
        assert pinned.bounced == 0


def test_other_io_paths_only_means_the_bounce_path_only(kvikio: StandIn, tmp_path: Path) -> None:
    with runner(tmp_path, paths=["posix direct"]) as other:
        other.cycle(MIB, 4)
        assert other.paths.choice is None and other.bounced == 8 and not kvikio.registered


@pytest.mark.parametrize("what", ["errors", "damage"])
def test_a_path_that_does_not_bring_bytes_back_is_not_used(
    kvikio: StandIn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    what: str,
) -> None:
    if what == "errors":
        kvikio.move_error = errno.EIO
    else:
        monkeypatch.setattr(
            "tests.support.kvikio_stand_in._File._blocks", lambda *arguments: len(arguments[2])
        )
    with runner(tmp_path) as bouncing:
        bouncing.cycle(MIB, 2)
        assert bouncing.paths.choice is None and bouncing.bounced == 4
        assert ("Input/output error" if what == "errors" else "other than") in bouncing.space.unavailable[
            "kvikio"
        ]
        assert bouncing.space.used_bytes == 0
    assert "kvikio is not used" in caplog.text
    with pytest.raises(InvalidArgument, match="cannot be used"), runner(tmp_path, paths=[GPU_DIRECT]):
        pass


def test_a_failed_transfer_is_reported_and_teaches_nothing(kvikio: StandIn, tmp_path: Path) -> None:
    with runner(tmp_path, paths=[GPU_DIRECT]) as pinned:
        storage = torch.UntypedStorage(MIB)
        block = pinned.paths.allocate(MIB)
        kvikio.move_error = errno.ENOSPC
        wrote = pinned.write(storage, block)
        assert isinstance(wrote.error, SpillError) and wrote.error.errno == errno.ENOSPC and not wrote.moved
        assert pinned.paths.choice is not None and not pinned.paths.choice.tables().entries


def test_memory_is_kept_alive_until_it_was_moved(kvikio: StandIn, tmp_path: Path) -> None:
    class Held:
        def __del__(self) -> None:
            gone.set()

    gone, going, over = threading.Event(), threading.Event(), threading.Event()
    with SpillSpace(tmp_path, gpu=True) as space:
        buffer, held = AlignedBuffer(MIB), Held()
        extent = space.allocate(MIB)
        try:
            for _ in range(8):
                kvikio.pool.submit(going.wait)  # the transfer waits behind these
            space.write(extent, buffer.address, MIB, held, lambda _: over.set(), on_gpu=True)
            del held
            assert not gone.is_set()
        finally:
            going.set()
        assert over.wait(WAIT_S) and gone.wait(WAIT_S)
