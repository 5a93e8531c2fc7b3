"""A target that is lost in mid-epoch and comes back costs no sample, and one that stays away is an error."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import cli
from penstock.errors import SampleError
from penstock.samples import Store, mount, upload, verify
from penstock.samples.remote.upload import Upload, local_store, upload_to
from penstock.storage.nvme.namespace import Namespace
from penstock.storage.nvme.url import parse_url
from tests.support.nvme_target.process import Target
from tests.support.remote_stores import MIB, TIMEOUT_S, Clock, image_of, serving, url_of
from tests.support.sample_stores import epoch, some_samples
from tests.support.stores import extract_namespace, read_store, write_store

SHARES = [some_samples(150, seed=number) for number in range(2)]
CONTENT = {index: data for index, (_, data) in enumerate(SHARES[0] + SHARES[1])}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("remote")
    for number, samples in enumerate(SHARES):
        write_store(folder / f"store-{number}", samples, data_file_bytes=70_000)
    return folder


@pytest.fixture
def targets(folder: Path, tmp_path: Path) -> Iterator[list[Target]]:
    """Two targets, each with one of the two stores."""
    for name in "ab":
        (tmp_path / name).mkdir()
    with serving(tmp_path / "a") as a, serving(tmp_path / "b") as b:
        for target, store in ((a, "store-0"), (b, "store-1")):
            upload(folder / store, url_of(target))
        yield [a, b]


def mounted(targets: list[Target], order: str = "chunk", timeout_s: float = 30.0, **options: Any) -> Store:
    """With so little memory that an epoch is read while it is taken."""
    urls = [url_of(target) for target in targets]
    return mount(urls, order, "40KiB", timeout_s=timeout_s, prefetch_bytes="8KiB", **options)


def reset(target: Target) -> None:
    target.fault("reset", "read", after=2)


def restart(target: Target) -> None:
    target.kill()
    threading.Timer(1.0, target.start).start()


def fall_silent(target: Target) -> None:
    target.freeze()
    threading.Timer(1.0, target.thaw).start()


def fall_silent_for_long(target: Target) -> None:
    target.set(kato_check=0)  # it would blame the host for what came while it slept
    target.freeze()
    threading.Timer(9.0, target.thaw).start()  # a command may take 7.5 s


@pytest.mark.parametrize("order", ["chunk", "full"])
@pytest.mark.parametrize(
    "lose",
    [reset, restart, fall_silent, pytest.param(fall_silent_for_long, marks=pytest.mark.slow)],
)
def test_every_sample_comes_exactly_once(
    targets: list[Target], lose: Callable[[Target], None], order: str
) -> None:
    with mounted(targets, order) as store:
        found = {}
        for _ in range(6):
            batch = store.bread(7)
            assert batch is not None
            found |= {int(index): bytes(data) for index, data in zip(batch.indices, batch, strict=True)}
        assert len(found) == 42
        lose(targets[0])
        rest = epoch(store)
        assert not found.keys() & rest.keys()
        assert found | rest == CONTENT


@pytest.mark.parametrize("on_damage", ["raise", "skip"])
def test_a_target_that_stays_away_is_named(targets: list[Target], on_damage: str) -> None:
    """Also where damaged samples are skipped: nothing is known to be damaged."""
    with mounted(targets, timeout_s=4.0, on_damage=on_damage) as store:
        assert store.bread(7) is not None
        targets[1].kill()
        began_s = time.monotonic()
        with pytest.raises(SampleError) as raised:
            epoch(store)
        assert time.monotonic() - began_s < 60.0  # it ends
        assert f"127.0.0.1:{targets[1].port}" in str(raised.value)
        assert "Once it is back, the store reads again" in str(raised.value)
        assert store.damaged == []
        assert store.read(0) == CONTENT[0]
        if on_damage == "raise":
            return
        with pytest.raises(SampleError, match=str(targets[1].port)):
            store.read(len(SHARES[0]))
        assert "skip" not in str(raised.value)
        targets[1].start()
        assert reads_again(store, len(SHARES[0]))
        store.sequence(epoch=1)
        assert epoch(store) == CONTENT


def reads_again(store: Store, index: int) -> bool:
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        with contextlib.suppress(SampleError):
            return store.read(index) == CONTENT[index]
        time.sleep(0.05)
    return False


def test_a_target_that_is_away_from_the_beginning_is_named(targets: list[Target]) -> None:
    targets[0].kill()
    for act in (lambda: mounted(targets, timeout_s=4.0), lambda: verify(url_of(targets[0]))):
        with pytest.raises(SampleError, match=f"127.0.0.1:{targets[0].port}.*Nothing listens there"):
            act()


def test_closing_does_not_wait_for_a_lost_target(targets: list[Target]) -> None:
    store = mounted(targets)
    assert store.bread(7) is not None
    targets[0].freeze()
    try:
        began_s = time.monotonic()
        store.close()
        assert time.monotonic() - began_s < 40.0  # it ends
    finally:
        targets[0].thaw()


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_upload_goes_on(
    tmp_path: Path, how: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch)
    samples = [(f"{index}", os.urandom(4000)) for index in range(9000)]
    write_fast(tmp_path / "store", samples)
    with serving(tmp_path, size_bytes=128 << 20) as target:
        url = url_of(target)
        target.set(rate=12 << 20)
        command = [sys.executable, "-m", "penstock", "samples", "upload", str(tmp_path / "store"), url]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        deadline_s = time.monotonic() + 60
        while target.stats()["write_bytes"] < 8 << 20 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        process.send_signal(how)
        _, said = process.communicate(timeout=60)
        assert process.returncode in (-how, 130), said
        if how == signal.SIGINT:
            assert "the same command goes on where this one was stopped" in said
        with pytest.raises(SampleError, match="was not finished"):
            mount(url)
        target.set(rate=0)
        assert cli.main(command[3:]) == 0
        assert "wrote nvme+tcp://" in capfd.readouterr().out
        with mount(url) as store:
            assert [store.read(index) for index in range(0, 9000, 100)] == [
                data for _, data in samples[::100]
            ]
        assert verify(url).sound


@pytest.mark.slow
def test_an_upload_that_was_killed_at_any_write_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the superblock, an extent, a note or the table: the target swallows that write, the uploader waits
    for its answer and is killed. What it had noted is not written again."""
    Clock(monkeypatch)
    samples = [(f"{index}", os.urandom(40_000)) for index in range(120)]
    write_fast(tmp_path / "store", samples)
    local = local_store(tmp_path / "store")

    def run(url: str) -> Upload:
        with Namespace(parse_url(url), TIMEOUT_S) as namespace:
            return upload_to(namespace, url, local, extent_bytes=MIB)

    (tmp_path / "first").mkdir()
    with serving(tmp_path / "first") as target:
        begun = target.stats()["writes"]
        run(url_of(target))
        writes = target.stats()["writes"] - begun
    left_bytes = []
    for number in sorted({*range(0, writes, writes // 6), writes - 1}):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        with serving(folder) as target:
            url = url_of(target)
            target.fault("drop", "write", after=number)
            uploader = multiprocessing.get_context("fork").Process(target=run, args=[url], daemon=True)
            uploader.start()
            deadline_s = time.monotonic() + 60
            while target.armed() and time.monotonic() < deadline_s:
                time.sleep(0.005)
            uploader.kill()
            uploader.join()
            assert uploader.exitcode == -signal.SIGKILL
            left_bytes.append(run(url).written_bytes)
        (extracted,) = extract_namespace(image_of(folder).read_bytes(), folder / "out")
        assert read_store(extracted) == samples
    assert left_bytes == sorted(left_bytes, reverse=True)
    assert left_bytes[0] == sum(local.sizes.values()) and left_bytes[-1] == 0
    assert any(0 < size_bytes < left_bytes[0] for size_bytes in left_bytes)


def write_fast(folder: Path, samples: list[tuple[str, bytes]]) -> None:
    """Packed by penstock: the other writer takes long for so much."""
    from penstock.samples import pack

    pack(iter(samples), folder)


def test_a_target_that_is_lost_in_an_upload_costs_nothing(folder: Path, tmp_path: Path) -> None:
    with serving(tmp_path) as target:
        target.fault("reset", "write", after=3)
        upload(folder / "store-0", url_of(target))
        assert target.armed() == 0
        assert verify(url_of(target)).sound
    (extracted,) = extract_namespace(image_of(tmp_path).read_bytes(), tmp_path / "out")
    assert read_store(extracted) == SHARES[0]


def test_an_upload_says_that_it_goes_on(folder: Path, tmp_path: Path) -> None:
    with serving(tmp_path) as target:
        url = url_of(target)
        target.set(read_only=1)
        with pytest.raises(SampleError, match="The same upload goes on where this one stopped") as raised:
            upload(folder / "store-0", url)
        assert str(target.port) in str(raised.value)
        target.set(read_only=0)
        upload(folder / "store-0", url)
        assert verify(url).sound
