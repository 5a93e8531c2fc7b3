"""A write that was sent and lost may be carried out later: whoever comes next waits until it cannot."""

from __future__ import annotations

import functools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from penstock.errors import SampleError, SpillError
from penstock.samples import mount, pack, upload
from penstock.storage.native import NvmeTransport
from penstock.storage.nvme import lease, namespace
from penstock.storage.nvme.contents import (
    ENDED,
    IN_USE,
    MARKER_BYTES,
    SPILL_MAGIC,
    STORE_MAGIC,
    STORE_MAGIC_OFFSETS,
    WRITER_MAGIC,
    WRITER_OFFSET,
    Marker,
    marker_of,
    own_marker,
)
from penstock.storage.spill import SpillSpace
from tests.nvme.test_tensors_are_spilled_to_remote_drives import BLOCK, moved
from tests.support.nvme_target.process import Target
from tests.support.remote_stores import MIB, Clock, image_of, serving, url_of

QUIESCE_S = 3 * 15 + 10  # of a run, and of an upload in its usual time limit
OLD, NEW = b"\1" * BLOCK, b"\2" * BLOCK
OFFSETS = {SPILL_MAGIC: 0, WRITER_MAGIC: WRITER_OFFSET}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two, laid out alike."""
    folder = tmp_path_factory.mktemp("packed")
    for seed in range(2):
        pack([(f"{n}", bytes([n + seed]) * 5000) for n in range(20)], folder / f"{seed}")
    return [folder / "0", folder / "1"]


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    with serving(tmp_path, size_bytes=64 * MIB, honest=False) as target:
        yield target


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def there(folder: Path, magic: bytes) -> Marker | None:
    with open(image_of(folder), "rb") as image:
        image.seek(OFFSETS[magic])
        return marker_of(image.read(MARKER_BYTES), magic)


def put(folder: Path, magic: bytes, marker: Marker) -> None:
    with open(image_of(folder), "r+b") as image:
        image.seek(OFFSETS[magic])
        image.write(marker.encoded(magic))


def superblocks(folder: Path) -> set[bytes]:
    image = image_of(folder).read_bytes()
    return {image[offset : offset + 512] for offset in STORE_MAGIC_OFFSETS}


def elsewhere(lease_s: int = 30, quiesce_s: int = 20) -> Marker:
    return own_marker()._replace(
        place=bytes(16), process=7, host=b"far", sign_s=5, lease_s=lease_s, quiesce_s=quiesce_s
    )


def spills(url: str, said: Connection) -> None:
    space = SpillSpace(url)
    said.send("open")
    said.recv()
    moved(space, "write", space.allocate(BLOCK), OLD)
    said.send("written")
    time.sleep(1000)


def uploads(store: Path, url: str, said: Connection) -> None:
    def stop(done_bytes: int, _: int) -> None:
        if done_bytes:
            said.send("written")
            time.sleep(1000)

    said.send("not yet open")
    said.recv()
    upload(store, url, progress=stop)


def killed(work: Callable[[str, Connection], None], target: Target, *, after: int) -> None:
    """A process that has lost a write, and ended so."""
    context = multiprocessing.get_context("fork")
    said, other = context.Pipe()
    process = context.Process(target=work, args=[url_of(target), other], daemon=True)
    process.start()
    other.close()
    assert said.poll(60)
    said.recv()
    target.fault("hold", "write", after=after)
    said.send("go on")
    assert said.poll(60) and said.recv() == "written"
    process.kill()
    process.join()
    assert target.armed() == 0


@pytest.mark.parametrize("machine", ["the same", "another"])
def test_of_a_run_that_was_killed(target: Target, tmp_path: Path, clock: Clock, machine: str) -> None:
    killed(spills, target, after=0)
    url = url_of(target)
    if machine == "another":
        left = there(tmp_path, SPILL_MAGIC)
        assert left is not None
        put(tmp_path, SPILL_MAGIC, left._replace(place=bytes(16)))
        url = url_of(target, options="&takeover=1")
    clock.at_nap = lambda: clock.slept_s > 5 and target.land()
    with SpillSpace(url) as space:
        extent = space.allocate(BLOCK)
        moved(space, "write", extent, NEW)
        target.land()
        assert moved(space, "read", extent) == NEW
    assert clock.waited_s() == QUIESCE_S


def test_of_a_run_that_was_killed_long_ago_nobody_waits_for_any(
    target: Target, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    killed(spills, target, after=0)
    clock.slept_s = begun_s = 1000.0
    with SpillSpace(url_of(target)):
        assert clock.slept_s - begun_s == lease._OTHERS_S
    assert not caplog.messages


def test_of_an_upload_that_was_killed(
    target: Target, tmp_path: Path, stores: list[Path], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    killed(functools.partial(uploads, stores[0]), target, after=1)  # a superblock
    clock.at_nap = lambda: clock.slept_s > 5 and target.land()
    upload(stores[1], url_of(target), overwrite=True)
    target.land()
    assert len(superblocks(tmp_path)) == 1
    with mount(url_of(target)) as store:
        assert store.read(3) == bytes([4]) * 5000
    assert clock.waited_s() == QUIESCE_S
    (said,) = caplog.messages
    assert said.startswith("waiting up to ") and "writes of process " in said


@pytest.mark.parametrize("next_one", ["a run", "an upload"])
def test_of_a_run_that_ended(target: Target, stores: list[Path], clock: Clock, next_one: str) -> None:
    with SpillSpace(url_of(target)) as space:
        target.fault("hold", "write")
        moved(space, "write", space.allocate(BLOCK), OLD)
    assert clock.waited_s() == 0

    def come_next() -> None:
        if next_one == "a run":
            SpillSpace(url_of(target)).close()
        else:
            upload(stores[0], url_of(target), overwrite=True)

    come_next()
    assert QUIESCE_S / 2 < clock.waited_s() <= QUIESCE_S + 1
    come_next()  # has nothing to wait for
    assert clock.waited_s() == 0


def test_of_an_upload_on_its_own_superblock(
    target: Target, tmp_path: Path, stores: list[Path], clock: Clock
) -> None:
    target.fault("hold", "write", after=1)
    clock.at_nap = lambda: clock.slept_s > 5 and target.land()
    upload(stores[0], url_of(target))
    assert target.armed() == 0
    target.land()
    assert len(superblocks(tmp_path)) == 1
    mount(url_of(target)).close()
    assert 0 < clock.waited_s() <= QUIESCE_S
    upload(stores[1], url_of(target), overwrite=True)  # what was lost last may land on this one
    assert 0 < clock.waited_s() <= QUIESCE_S + 1


@pytest.mark.parametrize("options", ["", "&takeover=1"])
def test_a_run_on_another_machine_is_replaced_when_it_gives_no_sign(
    target: Target, tmp_path: Path, stores: list[Path], clock: Clock, options: str
) -> None:
    run = elsewhere(lease_s=300)
    put(tmp_path, SPILL_MAGIC, run)
    before = image_of(tmp_path).read_bytes()
    with pytest.raises(SampleError, match="nothing was written"):
        upload(stores[0], url_of(target, options=options))
    clock.at_nap = lambda: put(tmp_path, SPILL_MAGIC, run._replace(sign_s=6))
    with pytest.raises(SampleError, match="process 7 on far spills tensors to "):
        upload(stores[0], url_of(target, options=options), overwrite=True)
    assert image_of(tmp_path).read_bytes()[MARKER_BYTES:] == before[MARKER_BYTES:]
    clock.at_nap = lambda: None
    clock.waited_s()
    upload(stores[0], url_of(target, options=options), overwrite=True)
    assert clock.waited_s() == (20 if options else 300)
    mount(url_of(target)).close()


@pytest.mark.parametrize("come_next", ["a run", "an upload"])
def test_who_gives_signs_on_this_machine_goes_on_even_where_no_process_is_seen(
    target: Target, tmp_path: Path, stores: list[Path], clock: Clock, come_next: str
) -> None:
    hidden = elsewhere()._replace(place=own_marker().place, process=2**40)  # of another user

    def renew() -> None:
        put(tmp_path, SPILL_MAGIC, hidden._replace(sign_s=int(lease.monotonic())))
        assert clock.slept_s < 1000

    renew()
    clock.at_nap = renew
    with pytest.raises((SpillError, SampleError), match=r"process \d+ on far spills tensors to "):
        if come_next == "a run":
            SpillSpace(url_of(target))
        else:
            upload(stores[0], url_of(target), overwrite=True)


def test_an_old_sign_that_lands_meanwhile_is_no_sign(target: Target, tmp_path: Path, clock: Clock) -> None:
    dead = elsewhere()._replace(place=own_marker().place, process=2**40, sign_s=int(lease.monotonic()))
    put(tmp_path, SPILL_MAGIC, dead)
    old = dead._replace(sign_s=dead.sign_s - 1)
    clock.at_nap = lambda: clock.slept_s == 5 and put(tmp_path, SPILL_MAGIC, old)
    SpillSpace(url_of(target)).close()
    assert clock.waited_s() > 20


def test_what_a_marker_says_has_nobody_wait_for_ever(
    target: Target, tmp_path: Path, stores: list[Path], clock: Clock
) -> None:
    endless = elsewhere(lease_s=2**32 - 1, quiesce_s=2**32 - 1)
    put(tmp_path, SPILL_MAGIC, endless)

    def gives_up() -> None:
        assert clock.slept_s < 5000

    clock.at_nap = gives_up
    SpillSpace(url_of(target, options="&takeover=1")).close()
    assert clock.waited_s() == 300
    put(tmp_path, WRITER_MAGIC, endless)
    upload(stores[0], url_of(target), overwrite=True)
    assert clock.waited_s() == 3600


@pytest.mark.parametrize("state", [ENDED, IN_USE])
def test_a_run_begins_behind_the_marker_of_an_upload_that_has_ended(
    target: Target, tmp_path: Path, clock: Clock, state: int
) -> None:
    SpillSpace(url_of(target)).close()
    here = elsewhere()._replace(place=own_marker().place, process=2**40, state=state)
    put(tmp_path, WRITER_MAGIC, here)
    SpillSpace(url_of(target)).close()


def test_a_run_that_was_taken_over_writes_no_more(
    target: Target,
    tmp_path: Path,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    often = lease._KINDS[SPILL_MAGIC]._replace(renewed_s=0.01)
    monkeypatch.setitem(lease._KINDS, SPILL_MAGIC, often)
    with SpillSpace(url_of(target)) as space:
        extent = space.allocate(BLOCK)
        moved(space, "write", extent, OLD)
        (renewing,) = [thread for thread in threading.enumerate() if thread.name == "penstock-lease"]
        while renewing.is_alive():
            put(tmp_path, SPILL_MAGIC, elsewhere())  # one of its own may be on its way
            clock.slept_s += 1
            renewing.join(0.01)
        before = image_of(tmp_path).read_bytes()
        for kind, content in (("write", NEW), ("read", None)):
            with pytest.raises(SpillError, match="process 7 on far has begun to write to "):
                moved(space, kind, extent, content)
    assert image_of(tmp_path).read_bytes() == before
    assert not caplog.messages


def test_a_marker_that_cannot_be_written_any_more_ends_no_run(
    target: Target, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with SpillSpace(url_of(target)):
        transport = NvmeTransport()
        transport.close()
        monkeypatch.setitem(namespace._transports, os.getpid(), transport)
    assert any("still says that this run spills to it" in text for text in caplog.messages)


def begins(folder: Path) -> None:
    put(folder, WRITER_MAGIC, elsewhere())


def gives_a_sign(folder: Path) -> None:
    put(folder, SPILL_MAGIC, elsewhere()._replace(sign_s=6))


def has_uploaded(folder: Path) -> None:
    with open(image_of(folder), "r+b") as image:
        image.write(STORE_MAGIC)


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (begins, "process 7 on far writes to "),
        (gives_a_sign, "process 7 on far spills tensors to "),
        (has_uploaded, "a sample store"),
    ],
)
def test_who_comes_while_a_run_waits_is_seen(
    target: Target, tmp_path: Path, clock: Clock, act: Callable[[Path], None], why: str
) -> None:
    put(tmp_path, SPILL_MAGIC, elsewhere())
    clock.at_nap = lambda: act(tmp_path)
    with pytest.raises(SpillError, match=why):
        SpillSpace(url_of(target, options="&takeover=1"))


def test_a_run_gives_signs(
    target: Target, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    often = lease._KINDS[SPILL_MAGIC]._replace(renewed_s=0.01)
    monkeypatch.setitem(lease._KINDS, SPILL_MAGIC, often)
    with SpillSpace(url_of(target)):
        while (first := there(tmp_path, SPILL_MAGIC)) is None:  # while it is being written
            time.sleep(0.005)
        signs = {first.sign_s}
        for _ in range(2000):
            clock.slept_s += 1
            now = there(tmp_path, SPILL_MAGIC)
            signs |= {now.sign_s} if now is not None else set()
            if max(signs) >= first.sign_s + 5:
                break
            time.sleep(0.005)
        assert max(signs) >= first.sign_s + 5
    last = there(tmp_path, SPILL_MAGIC)
    assert last is not None and (last.state, last.quiesce_s) == (ENDED, 0)
