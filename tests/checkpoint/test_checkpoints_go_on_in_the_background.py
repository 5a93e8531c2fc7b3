"""save(wait=False): the file holds the values at the call, whatever training does meanwhile."""

from __future__ import annotations

import errno
import gc
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import penstock
from penstock import checkpoint
from penstock.checkpoint import background, pieces
from penstock.errors import CheckpointError
from penstock.runtime import snapshots
from penstock.storage.native import PosixTransport
from tests.support.families import iterate, small_gpt, weights
from tests.support.faulty_transport import FaultyTransport, direct_path
from tests.support.held_transport import HeldTransport, held
from tests.support.runs import PAGED
from tests.support.states import STATES, numbers, same

__all__ = ["held"]


@pytest.mark.parametrize("name", STATES)
def test_round_trip(name: str, tmp_path: Path) -> None:
    state = STATES[name]()
    handle = checkpoint.save(state, tmp_path / "state", wait=False)
    handle.wait()
    assert handle.done() and handle.exception() is None
    assert same(checkpoint.load(tmp_path / "state"), state)


def test_the_file_holds_the_values_at_the_call(held: HeldTransport, tmp_path: Path) -> None:
    model, optimizer = small_gpt()
    before = weights(model)
    handle = checkpoint.save(model.state_dict(), tmp_path / "state", wait=False)
    assert held.began.wait(60)
    for step in range(3):
        iterate(model, optimizer, step)
    assert not handle.done() and not (tmp_path / "state").exists()
    with pytest.raises(TimeoutError, match="wait longer"):
        handle.wait(0.01)
    held.goes.set()
    handle.wait()
    assert weights(model) != before
    model.load_state_dict(checkpoint.load(tmp_path / "state"))
    assert weights(model) == before


def test_of_two_saves_to_one_path_the_last_wins(held: HeldTransport, tmp_path: Path) -> None:
    path, link = tmp_path / "state", tmp_path / "link"
    link.symlink_to("state")
    handles = [checkpoint.save({"step": step}, path if step % 2 else link, wait=False) for step in range(6)]
    held.goes.set()
    for handle in reversed(handles):
        handle.wait()
    assert checkpoint.load(path) == {"step": 5}


def test_a_save_that_waits_comes_after_one_that_does_not(held: HeldTransport, tmp_path: Path) -> None:
    path = tmp_path / "state"
    first = checkpoint.save({"step": 0}, path, wait=False)
    threading.Timer(0.1, held.goes.set).start()
    checkpoint.save({"step": 1}, path)
    assert first.done() and checkpoint.load(path) == {"step": 1}


def test_saves_to_several_paths_do_not_wait_for_each_other(
    held: HeldTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = checkpoint.save({"step": 0}, tmp_path / "a", wait=False)
    assert held.began.wait(60)
    monkeypatch.setattr(pieces, "shared_path", lambda: direct_path(held.inner))
    checkpoint.save({"step": 1}, tmp_path / "b", wait=False).wait()
    assert not first.done()
    held.goes.set()
    first.wait()


@pytest.mark.parametrize("limit", ["bytes", "saves"])
def test_copies_do_not_pile_up(
    limit: str, held: HeldTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is slower than training: a save waits before it copies anything."""
    monkeypatch.setattr(
        background, "MOST_COPIED_BYTES", 3 << 20 if limit == "bytes" else 1 << 30, raising=False
    )
    monkeypatch.setattr(background, "MOST_SAVES", 3 if limit == "saves" else 64, raising=False)
    state = {"a": numbers(1 << 18)}
    for number in range(3):
        checkpoint.save(state, tmp_path / f"{number}", wait=False)
    returned = threading.Event()

    def one_more() -> None:
        checkpoint.save(state, tmp_path / "3", wait=False)
        returned.set()

    threading.Thread(target=one_more).start()
    assert not returned.wait(0.3)
    held.goes.set()
    assert returned.wait(60)
    for number in range(4):
        background.wait_for(tmp_path / f"{number}")
    assert all(same(checkpoint.load(tmp_path / f"{number}"), state) for number in range(4))


def test_a_state_above_the_limit_is_saved_alone(
    held: HeldTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "MOST_COPIED_BYTES", 1000, raising=False)
    state = {"a": numbers(1000)}
    checkpoint.save(state, tmp_path / "0", wait=False)
    threading.Timer(0.1, held.goes.set).start()
    second = checkpoint.save(state, tmp_path / "1", wait=False)
    assert (tmp_path / "0").exists()
    second.wait()
    assert same(checkpoint.load(tmp_path / "1"), state)


def test_the_copy_is_freed(tmp_path: Path) -> None:
    def resident_bytes() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) << 10

    state = {"a": torch.ones(192 << 20, dtype=torch.uint8)}
    checkpoint.save({"a": numbers(3)}, tmp_path / "state", wait=False).wait()
    before = resident_bytes()
    handle = checkpoint.save(state, tmp_path / "state", wait=False)
    handle.wait()
    assert resident_bytes() - before < 96 << 20


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    transport = FaultyTransport(PosixTransport(), lambda _: errno.EIO)
    monkeypatch.setattr(pieces, "shared_path", lambda: direct_path(transport))
    yield
    transport.close()


def test_an_error_is_raised_to_whoever_waits(
    failing: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handle = checkpoint.save({"a": numbers(3)}, tmp_path / "state", wait=False)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="Input/output error"):
            handle.wait()
    assert isinstance(handle.exception(), CheckpointError)
    del handle
    gc.collect()
    assert not caplog.records
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("drop", [True, False])
def test_an_error_that_nobody_waits_for_is_logged(
    drop: bool, failing: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "penstock"):
        handle = checkpoint.save({"a": numbers(3)}, tmp_path / "state", wait=False)
        if drop:
            del handle
        for thread in threading.enumerate():
            if thread.name == "penstock-save":
                thread.join()
        if not drop:
            assert not caplog.records, "somebody may still ask"
            del handle
        gc.collect()
    assert "nobody waited" in caplog.text and "Input/output error" in caplog.text


def test_what_cannot_be_saved_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(penstock.InvalidArgument):
        checkpoint.save({"a": object()}, tmp_path / "state", wait=False)
    with pytest.raises(CheckpointError):
        checkpoint.save({}, tmp_path / "none" / "state", wait=False)
    assert not list(tmp_path.iterdir())


SCRIPT = """
import sys, torch
from penstock import checkpoint
checkpoint.save({"a": torch.arange(3_000_000)}, sys.argv[1], wait=False)
"""


def test_the_interpreter_ends_after_the_save(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / "state")], check=True, timeout=60)
    assert torch.equal(checkpoint.load(tmp_path / "state")["a"], torch.arange(3_000_000))


@pytest.mark.parametrize("smallest_bytes", [4096, snapshots.SMALLEST_BYTES])
@pytest.mark.parametrize("wait", [True, False])
def test_offloaded_training_can_be_saved(
    wait: bool,
    smallest_bytes: int,
    tmp_path: Path,
    hardware: penstock.Hardware,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshots, "SMALLEST_BYTES", smallest_bytes)

    def train(save: Callable[[int, dict[str, object]], None] | None) -> list[bytes]:
        model, optimizer = small_gpt()
        with penstock.offload(
            model, optimizer, device_budget="600KiB", spill_dir=tmp_path, hardware=hardware, planning=PAGED
        ) as run:
            for step in range(4):
                with run.step():
                    iterate(model, optimizer, step)
                    if save:
                        save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        return weights(model)

    handles = []

    def save(step: int, state: dict[str, object]) -> None:
        handles.append(checkpoint.save({**state, "step": step}, tmp_path / f"step{step}", wait=wait))

    undisturbed = train(None)
    assert train(save) == undisturbed
    for handle in handles:
        if handle is not None:
            handle.wait()
    model, optimizer = small_gpt()
    loaded = checkpoint.load(tmp_path / "step1")
    assert loaded["step"] == 1
    model.load_state_dict(loaded["model"])
    for step in (2, 3):
        iterate(model, optimizer, step)
    assert weights(model) == undisturbed
