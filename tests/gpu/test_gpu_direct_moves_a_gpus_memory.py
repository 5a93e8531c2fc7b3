"""The direct path with a GPU: the contract of transports on its memory, and the same bits in training."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import penstock
from penstock.runtime.devices.direct import BOUNCE, Paths
from penstock.storage.aligned import align_up
from penstock.storage.gpudirect import GpuDirectTransport
from penstock.storage.spill import SpillSpace
from penstock.storage.transfer import Transfer, TransportUnavailable

# The families that are trained on a GPU, and how.
from tests.gpu.test_offloaded_training_on_a_gpu import train

# The contract, for what follows as `bench`. Left out are the tests that allocate host memory themselves.
from tests.storage.test_transport_contract import (  # noqa: F401
    Bench,
    Case,
    test_a_bad_descriptor_fails_alone,
    test_a_file_grows_to_the_byte,
    test_an_exception_in_a_completion_stops_nothing,
    test_an_unknown_method_is_refused_before_anything_begins,
    test_cancelled_requests_are_not_carried_out,
    test_close_waits_for_everything_and_is_idempotent,
    test_each_method_reads_what_another_wrote,
    test_every_odd_combination_is_read,
    test_every_odd_combination_is_written,
    test_many_threads_use_one_file_at_once,
    test_neighbours_that_share_blocks_do_not_harm_each_other,
    test_requests_may_be_submitted_from_a_completion,
    test_the_last_bytes_are_read_and_what_lies_beyond_is_an_error,
    test_what_other_programs_wrote_is_read,
)
from tests.support.accelerator import wanted
from tests.support.families import FAMILIES, _Gpt
from tests.support.kvikio_stand_in import StandIn
from tests.support.runs import offload
from tests.support.transports import (
    ORIGINAL,
    PAGE,
    WAIT_S,
    Gathered,
    Memory,
    first_difference,
    open_file,
    submit,
)

DEVICE = wanted("cuda")

GPU_DIRECT = "kvikio gpu-direct"
MIB = 1 << 20
BATCH = 8 if DEVICE == "cuda" else 2


class GpuMemory(Memory):
    """The same on a GPU. Addresses are multiples of the page size plus the shift here too."""

    def __init__(self, size_bytes: int = MIB) -> None:
        self._bytes = torch.zeros(size_bytes + PAGE, dtype=torch.uint8, device=DEVICE)
        self._skipped = align_up(self._bytes.data_ptr(), PAGE) - self._bytes.data_ptr()
        self._buffer = SimpleNamespace(address=self._bytes.data_ptr() + self._skipped, view=self._view)
        self._expected = bytearray(size_bytes)
        self._used = 0

    def take(self, data: bytes, shift: int = 0) -> int:
        begin = align_up(self._used, PAGE) + PAGE + shift
        self._used = begin + len(data)
        assert self._used + PAGE <= len(self._expected)
        target = self._bytes[self._skipped + begin : self._skipped + self._used]
        target.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        torch.accelerator.synchronize()
        self.expect(self._buffer.address + begin, data)
        return int(self._buffer.address) + begin

    def _view(self) -> bytes:
        return self._bytes[self._skipped : self._skipped + len(self._expected)].cpu().numpy().tobytes()


@pytest.fixture
def usable(
    loaded: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    """Skips, with the reason, where there is no direct path to the directory of the test."""
    if loaded is not None:
        record_property("not rehearsed", "cuFile and kvikio themselves")
        StandIn(loaded.alias_of).install(monkeypatch)
    try:
        transport = GpuDirectTransport()
    except TransportUnavailable as reason:
        pytest.skip(str(reason))
    with open_file(tmp_path / "probed", "w") as opened:
        refusal = transport.probe(opened.file)
    transport.close()
    if refusal is not None:
        pytest.skip(refusal)


@pytest.fixture(params=[4 * MIB, 100_000])
def bench(request: pytest.FixtureRequest, usable: None, tmp_path: Path) -> Iterator[Bench]:
    path = tmp_path / "file"
    path.write_bytes(ORIGINAL)
    transport = GpuDirectTransport(piece_bytes=request.param)
    case = Case(GpuDirectTransport, "gpu-direct", memory=GpuMemory)
    with open_file(path, "r+") as opened:
        yield Bench(transport, case, opened.file, path)
        transport.close()


@pytest.mark.usefixtures("usable")
def test_a_huge_tensor_survives_the_round_trip(tmp_path: Path) -> None:
    size = (256 << 20 if DEVICE == "cuda" else 32 << 20) + 4097
    written = torch.randint(0, 256, (size,), dtype=torch.uint8, device=DEVICE)
    read = torch.zeros_like(written)
    torch.accelerator.synchronize()
    transport, path = GpuDirectTransport(), tmp_path / "file"
    with open_file(path, "w") as opened:
        for kind, tensor in (("write", written), ("read", read)):
            gathered = Gathered(1)
            transfer = Transfer(kind, opened.file, 4096, tensor.data_ptr(), size, "gpu-direct", keep=tensor)  # type: ignore[arg-type]
            submit(transport, [transfer], gathered)
            assert gathered.wait()[0].error_number == 0
        transport.close()
    assert torch.equal(written, read)
    assert first_difference(path.read_bytes()[4096:], written.cpu().numpy().tobytes()) is None
    path.unlink()


@pytest.mark.usefixtures("usable")
def test_a_file_that_is_open_for_reading_only_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(MIB))
    tensor = torch.ones(MIB, dtype=torch.uint8, device=DEVICE)
    torch.accelerator.synchronize()
    transport, gathered = GpuDirectTransport(), Gathered(1)
    with open_file(path, "r") as opened:
        transfer = Transfer("write", opened.file, 0, tensor.data_ptr(), MIB, "gpu-direct", keep=tensor)
        submit(transport, [transfer], gathered)
        assert gathered.wait()[0].error_number in (errno.EBADF, errno.EIO, errno.EACCES)
        transport.close()
    assert path.read_bytes() == bytes(MIB)


@pytest.mark.usefixtures("usable")
def test_both_paths_read_what_either_wrote(tmp_path: Path) -> None:
    size = 3 * MIB + 1001
    with SpillSpace(tmp_path, gpu=True) as space:
        assert space.gpu_direct == GPU_DIRECT
        transfers: list[Transfer] = []
        over = threading.Semaphore(0)

        def on_done(transfer: Transfer) -> None:
            transfers.append(transfer)
            over.release()

        for direct_first in (True, False):
            content = torch.randint(0, 256, (size,), dtype=torch.uint8)
            extent, target = space.allocate(size), torch.zeros(size, dtype=torch.uint8)
            on_gpu = content.to(DEVICE) if direct_first else target.to(DEVICE)
            torch.accelerator.synchronize()
            if direct_first:
                space.write(extent, on_gpu.data_ptr(), size, on_gpu, on_done, on_gpu=True)
                assert over.acquire(timeout=WAIT_S)
                space.read(extent, target.data_ptr(), size, target, on_done)
                assert over.acquire(timeout=WAIT_S)
            else:
                space.write(extent, content.data_ptr(), size, content, on_done)
                assert over.acquire(timeout=WAIT_S)
                space.read(extent, on_gpu.data_ptr(), size, on_gpu, on_done, on_gpu=True)
                assert over.acquire(timeout=WAIT_S)
                target = on_gpu.cpu()
            assert torch.equal(content, target)
            space.release(extent)
        assert [transfer.error for transfer in transfers] == [None] * 4


@pytest.mark.usefixtures("usable")
def test_the_trial_leaves_random_numbers_as_they_were(tmp_path: Path) -> None:
    before = torch.get_device_module(DEVICE).get_rng_state()
    with SpillSpace(tmp_path, gpu=True) as space:
        paths = Paths(space, torch.device(DEVICE))
        assert paths.choice is not None and {*paths.choice.paths} == {BOUNCE, GPU_DIRECT}
    assert torch.equal(torch.get_device_module(DEVICE).get_rng_state(), before)


def options(ways: str | None, tmp_path: Path, machine: penstock.Hardware) -> dict[str, Any]:
    """Everything that leaves goes to disk: the host's memory is all staging."""
    return {
        "device_budget": "4GiB",
        "smallest_bytes": 1,
        "spill_dir": tmp_path,
        "hardware": machine,
        "host_budget": "64MiB",
        "policy": "evict_all",
        "paths": ways,
    }


@pytest.mark.usefixtures("usable", "reproducible")
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("ways", [None, GPU_DIRECT])
def test_every_family_keeps_its_bits(
    name: str, ways: str | None, tmp_path: Path, machine: penstock.Hardware
) -> None:
    expected, _ = train(name)
    found, _ = train(name, **options(ways, tmp_path, machine))
    assert found == expected


def train_gpt(**how: Any) -> tuple[list[str], penstock.Report | None]:
    """A GPT whose activations have a megabyte and more."""
    torch.manual_seed(0)
    model = _Gpt(width=256, blocks=3).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    with offload(model, optimizer, **how) if how else nullcontext() as run:
        for step in range(12):
            seeded = torch.Generator().manual_seed(step)
            words = torch.randint(0, 64, (BATCH, 256), generator=seeded).to(DEVICE)
            with run.step() if run else nullcontext():
                loss = F.cross_entropy(model(words).flatten(0, 1), words.roll(-1, 1).flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item().hex())
        return losses, run.report() if run else None


@pytest.mark.usefixtures("usable", "reproducible")
@pytest.mark.parametrize("ways", [None, GPU_DIRECT, "posix direct"])
def test_a_pinned_path_is_the_one_that_is_taken(
    ways: str | None, tmp_path: Path, machine: penstock.Hardware
) -> None:
    expected, _ = train_gpt()
    found, report = train_gpt(**options(ways, tmp_path, machine))
    assert found == expected
    assert report is not None and report.evicted_bytes > 0
    moved = report.moved_bytes_by_io_path
    if ways == GPU_DIRECT:  # all but what kvikio would copy through the host
        assert sum(moved.values()) - moved[GPU_DIRECT] < 0.05 * moved[GPU_DIRECT]
    elif ways is None:  # both were tried at least
        assert moved[GPU_DIRECT] > 0 and len(moved) > 1
    else:
        assert moved.keys() == {ways}
