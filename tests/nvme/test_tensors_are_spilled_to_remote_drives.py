"""Tensors that leave for a namespace come back as they were, and nothing else that lies there is touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import penstock
from penstock import cli
from penstock.errors import InvalidArgument, SpillError, SpillSpaceFull
from penstock.runtime import arena
from penstock.samples import upload, verify
from penstock.storage import region
from penstock.storage.aligned import AlignedBuffer
from penstock.storage.extents import Extent
from penstock.storage.nvme.contents import own_marker
from penstock.storage.spill import SpillSpace, Transfer
from tests.support.apart import python
from tests.support.checked import checked_run
from tests.support.nvme_target.process import Target
from tests.support.remote_stores import MIB, Clock, image_of, serving, url_of
from tests.support.runs import (
    Bits,
    Step,
    budgets,
    check_same,
    differences,
    family_training,
    in_memory,
    offloaded,
)
from tests.support.sample_stores import some_samples
from tests.support.stores import write_store

paging = pytest.mark.skipif(arena.unavailable() is not None, reason="no paging here")


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    with serving(tmp_path, size_bytes=64 * MIB) as target:
        yield target


class Moved:
    """The end of a transfer."""

    def __init__(self) -> None:
        self._over = threading.Semaphore(0)
        self.error: SpillError | None = None

    def __call__(self, transfer: Transfer) -> None:
        self.error = transfer.error
        self._over.release()

    def wait(self, timeout_s: float = 60.0) -> None:
        assert self._over.acquire(timeout=timeout_s)
        if self.error is not None:
            raise self.error


def there_and_back(space: SpillSpace, size_bytes: int, seed: int) -> None:
    source, back = AlignedBuffer(size_bytes), AlignedBuffer(size_bytes)
    source.view()[:] = np.random.default_rng(seed).bytes(size_bytes)
    extent = space.allocate(size_bytes)
    for begin, buffer in ((space.write, source), (space.read, back)):
        moved = Moved()
        begin(extent, buffer.address, size_bytes, buffer, moved)
        moved.wait()
    assert bytes(back.view()) == bytes(source.view())


@paging
def test_training_has_the_same_bits(target: Target) -> None:
    target.set(queues=2)  # no more than it takes
    written = arena.stats().swapped_out_bytes
    for _, report in check_same(family_training("gpt", 4), url_of(target), 0.0, 0.5):
        assert set(report.moved_bytes_by_io_path) == {"nvme staged"}
        assert report.evicted_bytes > 0
    assert arena.stats().swapped_out_bytes > written  # the arena's own writes went there too
    assert target.stats()["write_bytes"] > arena.stats().swapped_out_bytes - written


def test_an_accelerator_spills_there_too(target: Target) -> None:
    with (
        SpillSpace(url_of(target)) as space,
        checked_run(space, 4 * 12_000, host_bytes=0) as run,
    ):
        tensors = [torch.full((3000,), float(index)) for index in range(8)]
        for _ in range(3):
            run.engine.begin_step()
            run.device.begin_step()
            run.clock.begin_step([], None)
            for tensor in tensors:
                tensor.add_(1)
            run.clock.end_step()
        values = [(float(tensor.min()), float(tensor.max())) for tensor in tensors]
        assert values == [(index + 3, index + 3) for index in range(8)]
        assert space.read_bytes > 0


@paging
@pytest.mark.parametrize("lose", ["reset", "restart"])
def test_training_goes_on_where_the_target_comes_back(target: Target, lose: str) -> None:
    program = family_training("gpt", 4)
    (budget_bytes,) = budgets(program, url_of(target), 0.2)
    expected = in_memory(program)

    def program_with_losses(step: Step) -> Bits:
        if lose == "restart":
            target.kill()
            threading.Timer(0.5, target.start).start()
        else:
            target.fault("reset", "write", after=20)
            target.fault("reset", "read", after=20)
        return program(step)

    found, _ = offloaded(program_with_losses, budget_bytes, url_of(target))
    assert differences(expected, found) == []
    if lose == "reset":
        assert target.armed() == 0


BLOCK = 4096  # goes in a capsule


def moved(
    space: SpillSpace, kind: str, extent: Extent, content: bytes | None = None, checksum: bool = False
) -> bytes:
    buffer, over = AlignedBuffer(BLOCK), Moved()
    if content is not None:
        buffer.view()[:] = content
    options = {"checksum": checksum} if kind == "write" else {}
    getattr(space, kind)(extent, buffer.address, BLOCK, buffer, over, **options)
    over.wait()
    return bytes(buffer.view())


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("whose", ["its own", "another's"])
def test_a_write_that_was_lost_lands_on_nothing_newer(target: Target, whose: str, checksum: bool) -> None:
    old, new = b"\1" * BLOCK, b"\2" * BLOCK
    with SpillSpace(url_of(target)) as space:
        extent = space.allocate(BLOCK)
        target.fault("hold", "write")
        moved(space, "write", extent, old)  # lost with its connection, and sent again
        assert target.armed() == 0
        if whose == "another's":
            space.release(extent)
            extent = space.allocate(BLOCK)
        moved(space, "write", extent, new, checksum)
        assert target.land() == 1
        assert moved(space, "read", extent) == new


def test_an_extent_is_written_in_its_own_place_again_once_nothing_can_land(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1e6
    monkeypatch.setattr(region, "monotonic", lambda: now_s)
    with SpillSpace(url_of(target)) as space:
        extent = space.allocate(BLOCK)
        place = space.segments(extent, BLOCK)
        target.fault("hold", "write")
        moved(space, "write", extent, b"\1" * BLOCK)
        assert space.segments(extent, BLOCK) == place
        moved(space, "write", extent, b"\2" * BLOCK)
        assert space.segments(extent, BLOCK) != place
        assert space.used_bytes == 2 * BLOCK
        target.land()
        now_s += 3 * 15 + 10
        moved(space, "write", extent, b"\3" * BLOCK)
        assert space.segments(extent, BLOCK) == place
        assert moved(space, "read", extent) == b"\3" * BLOCK
        space.release(extent)
        assert space.used_bytes == 0


FORKING = """
import os, sys
import torch, penstock
from tests.support.runs import HARDWARE

with penstock.offload(device_budget="4MiB", spill_dir=sys.argv[1], hardware=HARDWARE):
    tensors = [torch.full((1 << 18,), float(number)) for number in range(16)]
    arrays = [tensor.numpy() for tensor in tensors]
    for number, array in enumerate(arrays):  # penstock sees none of these accesses
        assert (array == number).all()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        grandchild = os.fork()  # asks the same parent
        right = all((array == number).all() for number, array in enumerate(arrays))
        if grandchild == 0:
            os._exit(int(not right))
        os._exit(int(not right) + os.waitpid(grandchild, 0)[1])
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    for number, array in enumerate(arrays):
        assert (array == number).all()
    sys.stdout.flush()
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.close(writing)
        os.read(reading, 1)  # until the parent has ended
        arrays[0].sum()
        arrays[8].sum()
    os.close(reading)
    os._exit(0)
"""


@paging
def test_accesses_that_nobody_planned_are_served_in_forked_children_too(target: Target) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", FORKING, url_of(target)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert ran.stdout == "0\n"
    assert "touch tensors in the parent before it forks" in ran.stderr, "its own parent has ended"


def test_a_target_that_stays_away_is_named(tmp_path: Path) -> None:
    with (
        serving(tmp_path, size_bytes=64 * MIB, honest=False) as target,
        SpillSpace(url_of(target), timeout_s=8.0) as space,
    ):
        there_and_back(space, MIB, 1)
        target.kill()
        with pytest.raises(SpillError, match=f"127.0.0.1:{target.port}"):
            there_and_back(space, MIB, 2)


@paging
@pytest.mark.slow
def test_training_ends_where_the_target_stays_away(tmp_path: Path) -> None:
    with serving(tmp_path, size_bytes=64 * MIB, honest=False) as target:
        program = family_training("gpt", 4)
        (budget_bytes,) = budgets(program, url_of(target), 0.2)

        def without_target(step: Step) -> Bits:
            target.kill()
            return program(step)

        with pytest.raises(SpillError, match=f"127.0.0.1:{target.port}"):
            offloaded(without_target, budget_bytes, url_of(target))


def test_a_sample_store_is_refused_and_stays_whole(target: Target, tmp_path: Path) -> None:
    samples = some_samples(40)
    write_store(tmp_path / "store", samples)
    upload(tmp_path / "store", url_of(target))
    before = image_of(tmp_path).read_bytes()
    for use in (SpillSpace, penstock.probe):
        with pytest.raises(SpillError, match="a sample store"):
            use(url_of(target))
    assert image_of(tmp_path).read_bytes() == before
    verify(url_of(target))


@pytest.mark.parametrize(
    ("offset", "data", "what"),
    [
        (1080, b"\x53\xef", "ext4"),
        (510, b"\x55\xaa", "partition table"),
        (700_001, b"x", "not penstock's"),
        (512 << 10, b"penstock-samples", "a sample store"),
        (0, b"penstock-spill\0\0 and then nothing", "spill space"),
    ],
)
def test_what_is_unknown_is_refused(
    target: Target, tmp_path: Path, offset: int, data: bytes, what: str
) -> None:
    with open(image_of(tmp_path), "r+b") as image:
        image.seek(offset)
        image.write(data)
    before = image_of(tmp_path).read_bytes()
    with pytest.raises(SpillError, match=what):
        SpillSpace(url_of(target))
    assert image_of(tmp_path).read_bytes() == before


def test_only_an_open_space_keeps_others_off(target: Target, tmp_path: Path) -> None:
    for seed in range(2):
        with SpillSpace(url_of(target)) as space:
            there_and_back(space, 3 * MIB + 5, seed)
            with pytest.raises(SpillError, match=rf"process {os.getpid()} on .*, which runs"):
                SpillSpace(url_of(target))
    with pytest.raises(Exception, match="spill space of a run"):
        write_store(tmp_path / "store", some_samples(3))
        upload(tmp_path / "store", url_of(target))


def test_a_process_that_was_killed_keeps_nobody_off(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    program = (
        "import os, sys; from penstock.storage.spill import SpillSpace; SpillSpace(sys.argv[1]); "
        "os.kill(os.getpid(), 9)"
    )
    assert python(program, url_of(target)).returncode == -9
    with SpillSpace(url_of(target)) as space:
        there_and_back(space, MIB, 0)


def test_what_a_dead_machine_has_left_is_taken_over_when_asked(target: Target, tmp_path: Path) -> None:
    """Not by itself, nor from a run that goes on here, nor anything that is no run's."""
    image = image_of(tmp_path)
    dead = own_marker()._replace(place=bytes(16), host=b"gone").encoded()
    url = url_of(target, options="&takeover=1")
    with open(image, "r+b") as file:
        file.write(dead)
    with pytest.raises(SpillError, match=r"on gone, which has not said that it has ended.*add &takeover=1"):
        SpillSpace(url_of(target))
    assert image.read_bytes().startswith(dead)
    with SpillSpace(url) as space:
        there_and_back(space, MIB, 0)
        with pytest.raises(SpillError, match=rf"process {os.getpid()} on .*, which runs"):
            SpillSpace(url)
    with open(image, "r+b") as file:
        file.write(b"data")
    with pytest.raises(SpillError, match="would destroy what lies there"):
        SpillSpace(url)


def test_small_namespaces_say_so(tmp_path: Path) -> None:
    with (
        serving(tmp_path, size_bytes=MIB) as target,
        pytest.raises(SpillSpaceFull, match=r"too small.*1\.00 MiB.*2\.00 MiB"),
    ):
        SpillSpace(url_of(target))
    with serving(tmp_path, size_bytes=9 * MIB) as target, SpillSpace(url_of(target)) as space:
        assert space.free_bytes == 8 * MIB
        assert space.swap_file()[2:] == (2 * MIB, 7 * MIB)
        there_and_back(space, 6 * MIB, 0)
        with pytest.raises(SpillSpaceFull, match=r"of its 9\.00 MiB.*6\.00 MiB.*2\.00 MiB are kept"):
            space.allocate(MIB)


def refused_ranks(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    penstock.offload(device_budget="1GiB", spill_dir=url)


def refused_stripes(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    SpillSpace([tmp_path, url])


def refused_page_cache(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    SpillSpace(url, penstock.IoOptions(page_cache_budget=MIB))


def refused_path(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    SpillSpace(url, penstock.IoOptions(paths=["io_uring direct"]))


def refused_part(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    SpillSpace(f"{url}#part-00000-of-00002")


@pytest.mark.parametrize(
    ("use", "why"),
    [
        (refused_ranks, "2 processes"),
        (refused_stripes, "with 1 more"),
        (refused_page_cache, "without a page cache"),
        (refused_path, "nvme staged"),
        (refused_part, "a part of a namespace"),
    ],
)
def test_what_cannot_be_is_refused(
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    use: Callable[[str, pytest.MonkeyPatch, Path], None],
    why: str,
) -> None:
    with pytest.raises(InvalidArgument, match=why):
        use(url_of(target), monkeypatch, tmp_path)
    assert not any(image_of(tmp_path).read_bytes())


@pytest.mark.parametrize(
    ("block_bytes", "queues", "why"),
    [(8192, 16, "blocks of 8192"), (512, 1, "too few I/O queues.*: 1, and 2")],
)
def test_targets_that_do_not_serve_are_refused(
    tmp_path: Path, block_bytes: int, queues: int, why: str
) -> None:
    with (
        serving(tmp_path, size_bytes=8 * MIB, block_bytes=block_bytes, queues=queues) as target,
        pytest.raises(SpillError, match=why),
    ):
        SpillSpace(url_of(target))


@pytest.mark.parametrize("block_bytes", [512, 4096])
def test_every_byte_comes_back(tmp_path: Path, block_bytes: int) -> None:
    with (
        serving(tmp_path, size_bytes=32 * MIB, block_bytes=block_bytes) as target,
        SpillSpace(url_of(target, options="&hdgst=1&ddgst=1"), penstock.IoOptions(verify=True)) as space,
    ):
        for seed, size_bytes in enumerate([1, 4095, 4097, MIB, 5 * MIB + 123]):
            there_and_back(space, size_bytes, seed)


SCRIPT = """
import torch

def build():
    torch.manual_seed(0)
    layers = [part for _ in range(6) for part in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers)
    batches = [torch.randn(512, 64) for _ in range(4)]
    return model, torch.optim.AdamW(model.parameters()), batches, loss

def loss(model, batch):
    return (model(batch) - batch).square().mean()
"""


@paging
def test_the_commands_take_the_url(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = url_of(target)
    assert cli.main(["probe", "--spill-dir", url, "--time-limit", "0.5", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)["hardware"]
    assert measured["disk_bytes"] == 63 * MIB
    (tmp_path / "model.py").write_text(SCRIPT)
    running = ["run", "model.py:build", "--device-budget", "1400KiB", "--hardware", "hardware.json", "--json"]
    assert cli.main([*running, "--spill-dir", url]) == 0
    remote = json.loads(capsys.readouterr().out)
    assert cli.main([*running, "--spill-dir", "."]) == 0
    assert remote["losses"] == json.loads(capsys.readouterr().out)["losses"]
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--spill-dir", url])
    assert "is a remote drive" in capsys.readouterr().err
