"""A manager keeps what it is told, writes what has changed, and every checkpoint that is left is whole."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock import checkpoint
from penstock.checkpoint import Manager, header, listing, pieces
from penstock.checkpoint import manager as manager_module
from penstock.storage.checksum import crc32c
from penstock.storage.native import PosixTransport
from tests.support.apart import Program, Running, python
from tests.support.families import iterate, small_gpt, weights
from tests.support.faulty_transport import FaultyTransport, direct_path
from tests.support.runs import PAGED
from tests.support.states import STATES, numbers, same

ROOT = Path(__file__).parents[2]

NAMES = ("large", "medium", "small", "tiny", "empty")
SIZES = (300_000, 100_001, 1_003, 3, 0)


def state_of(versions: Sequence[int]) -> dict[str, Any]:
    """Tensors of several sizes; one whose version is the same has the same bytes."""
    tensors = {
        name: numbers(size, torch.int16, seed=100 * number + version)
        for number, (name, size, version) in enumerate(zip(NAMES, SIZES, versions, strict=True))
    }
    return {**tensors, "versions": list(versions)}


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def left_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name != ".penstock.lock"]


# -- what stays ------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    changes=st.lists(st.sets(st.integers(0, len(NAMES) - 1)), min_size=1, max_size=8),
    keep_last=st.integers(1, 3),
    keep_every=st.none() | st.integers(1, 4),
    reopen_at=st.integers(0, 8),
)
def test_every_checkpoint_that_is_left_loads(
    changes: list[set[int]],
    keep_last: int,
    keep_every: int | None,
    reopen_at: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("manager")
    versions, saved = [0] * len(NAMES), {}
    manager = Manager(folder, keep_last=keep_last, keep_every=keep_every)
    for step, changed in enumerate(changes, start=1):
        versions = [version + (number in changed) for number, version in enumerate(versions)]
        if step == reopen_at:
            manager.close()
            manager = Manager(folder, keep_last=keep_last, keep_every=keep_every)
        manager.save(saved.setdefault(step, state_of(versions)), step, wait=step % 2 == 0)
        manager.wait()
        kept = set(range(1, step + 1)[-keep_last:])
        kept |= {each for each in range(1, step + 1) if keep_every and each % keep_every == 0}
        assert kept <= set(manager.steps())
        assert manager.latest() == folder / f"step-{step:010d}.safetensors"
        found = checkpoint.ls(folder)
        assert [each.step for each in found] == list(manager.steps()) and not any(e.problem for e in found)
        for each in found:
            assert same(checkpoint.load(each.path), saved[each.step])
        # What stays for the sake of others is bounded by what they use.
        extra = sum(each.size_bytes for each in found if each.step not in kept)
        assert extra <= 2 * sum(each.tensor_bytes for each in found if each.step in kept)
    manager.close()
    assert all(re.fullmatch(r"step-\d{10}\.safetensors", name) for name in left_in(folder))


def test_what_is_frozen_is_written_once(tmp_path: Path) -> None:
    frozen = {f"layer{number}": numbers(500_000, seed=number) for number in range(4)}
    adapter = {"a": numbers(1000, seed=9)}
    with Manager(tmp_path, keep_last=2) as manager:
        for step in range(5):
            adapter["a"] = numbers(1000, seed=step)
            manager.save({"frozen": frozen, "adapter": adapter}, step)
        manager.wait()
        assert manager.steps() == (0, 3, 4), "the first one stays: it holds what the others refer to"
        assert bytes_in(tmp_path) < 8_000_000 + 100_000
        latest = manager.latest()
        assert latest is not None and latest.stat().st_size < 20_000
        found = checkpoint.verify(latest)
    assert found.elsewhere == ("step-0000000000.safetensors",)
    assert found.tensor_bytes == 8_004_000 and found.checksummed


def test_little_that_is_frozen_does_not_keep_much(tmp_path: Path) -> None:
    """An old file of which one small tensor were used would stay for ever: the tensor is written again."""
    frozen = numbers(1000)
    with Manager(tmp_path, keep_last=1) as manager:
        for step in range(3):
            manager.save({"frozen": frozen, "trained": numbers(100_000, seed=step)}, step, wait=True)
        assert manager.steps() == (2,)


@pytest.mark.parametrize("name", STATES)
def test_every_state_comes_back_from_increments(name: str, tmp_path: Path) -> None:
    state = STATES[name]()
    with Manager(tmp_path) as manager:
        for step in range(3):
            manager.save({"state": state, "step": step}, step)
        manager.wait()
        for step, each in enumerate(checkpoint.ls(tmp_path)):
            for mmap in (None, False, True):
                assert same(checkpoint.load(each.path, mmap=mmap), {"state": state, "step": step})


def test_a_module_is_filled_from_increments(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 3))
    with Manager(tmp_path) as manager:
        manager.save(model.state_dict(), 0)
        with torch.no_grad():
            model[1].weight += 1
        manager.save(model.state_dict(), 1, wait=True)
        other = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 3))
        latest = manager.latest()
    assert latest is not None and checkpoint.info(latest).elsewhere
    penstock.load(latest, into=other)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_a_change_that_the_checksum_does_not_see_is_written(tmp_path: Path) -> None:
    """CRC-32C is linear: its polynomial, added to the bytes, leaves it as it is."""
    polynomial = ((0x82F63B78 << 1) | 1).to_bytes(5, "little")
    before = numbers(4096, torch.uint8)
    after = before.clone()
    after[100:105] ^= torch.tensor(list(polynomial), dtype=torch.uint8)
    assert crc32c(before.numpy()) == crc32c(after.numpy()) and not torch.equal(before, after)
    with Manager(tmp_path) as manager:
        manager.save({"a": before}, 0)
        manager.save({"a": after}, 1, wait=True)
        assert torch.equal(checkpoint.load(manager.latest())["a"], after)


def test_the_file_holds_the_values_at_the_call(tmp_path: Path) -> None:
    tensor, frozen = numbers(2_000_000, torch.int32), numbers(2_000_000)
    with Manager(tmp_path) as manager:
        for step in range(4):
            manager.save({"a": tensor, "frozen": frozen, "step": step}, step)
            tensor += 1
        manager.wait()
        first = numbers(2_000_000, torch.int32)
        for each in checkpoint.ls(tmp_path):
            assert torch.equal(checkpoint.load(each.path)["a"], first + each.step)


def test_a_packed_increment_stands_alone(tmp_path: Path) -> None:
    state = {"a": numbers(100_000), "b": numbers(10)}
    with Manager(tmp_path / "run") as manager:
        manager.save(state, 0)
        manager.save(state, 1, wait=True)
        latest = manager.latest()
    assert latest is not None
    found = checkpoint.convert(latest, tmp_path / "packed.safetensors")
    assert found.elsewhere == () and same(checkpoint.load(tmp_path / "packed.safetensors"), state)
    for path in (tmp_path / "run").iterdir():
        path.unlink()
    others = safetensors.torch.load_file(tmp_path / "packed.safetensors")
    assert all(same(others[name], state[name]) for name in state)


def test_a_run_with_frozen_weights_is_saved(tmp_path: Path, hardware: penstock.Hardware) -> None:
    """Inside a budget that the weights do not fit: the bits of training stay, and those of every file."""

    def train(manager: Manager | None) -> list[bytes]:
        model, optimizer = small_gpt()
        for parameter in list(model.parameters())[:-3]:
            parameter.requires_grad_(False)
        with penstock.offload(
            model, optimizer, device_budget="600KiB", spill_dir=tmp_path, hardware=hardware, planning=PAGED
        ) as run:
            for step in range(4):
                with run.step():
                    iterate(model, optimizer, step)
                if manager is not None:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    manager.save({**state, "step": step}, step)
        return weights(model)

    undisturbed = train(None)
    with Manager(tmp_path / "run", keep_last=4) as manager:
        assert train(manager) == undisturbed
    found = checkpoint.ls(tmp_path / "run")
    assert [each.step for each in found] == [0, 1, 2, 3]
    model, _ = small_gpt()
    model.load_state_dict(checkpoint.load(found[-1].path)["model"])
    assert weights(model) == undisturbed
    assert found[-1].elsewhere and found[-1].size_bytes < found[0].size_bytes


# -- when something goes wrong ---------------------------------------------------------------------


def test_the_last_good_one_stays_where_newer_ones_are_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Manager(tmp_path) as manager:
        for step in range(3):
            manager.save({"a": numbers(10_000, seed=step)}, step, wait=True)
    for step, keep in ((1, 0), (2, 20_000)):
        os.truncate(tmp_path / f"step-{step:010d}.safetensors", keep)
    with Manager(tmp_path, keep_last=1) as manager:
        assert manager.steps() == (0,) and "is not counted" in caplog.text
        assert same(checkpoint.load(manager.latest())["a"], numbers(10_000))
        manager.save({"a": numbers(10_000, seed=7)}, 2, wait=True)  # takes the place of the damaged one
        assert manager.steps() == (2,)
        assert same(checkpoint.load(manager.latest())["a"], numbers(10_000, seed=7))
    assert (tmp_path / "step-0000000001.safetensors").exists(), "what nobody understands is left alone"


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_what_somebody_removed_is_written_again(how: str, tmp_path: Path) -> None:
    state, first = {"a": numbers(100_000), "b": numbers(10)}, tmp_path / "step-0000000000.safetensors"
    with Manager(tmp_path) as manager:
        manager.save(state, 0)
        manager.save({**state, "b": numbers(11)}, 1, wait=True)
        assert checkpoint.info(manager.latest()).elsewhere
        first.unlink()
        if how == "replaced":
            checkpoint.save({"a": numbers(100_000, seed=3)}, first)
        with pytest.raises(penstock.InvalidCheckpoint, match=r"is not whole: its tensors a "):
            checkpoint.load(manager.latest())
        manager.save(state, 2, wait=True)
        assert same(checkpoint.load(manager.latest()), state)


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_saves_go_on_after_somebody_removed_an_old_one(how: str, tmp_path: Path) -> None:
    state, first = {"a": numbers(100_000), "b": numbers(10)}, tmp_path / "step-0000000000.safetensors"
    with Manager(tmp_path, keep_last=4) as manager:
        manager.save(state, 0, wait=True)
        first.unlink()
        if how == "replaced":
            checkpoint.save({"a": numbers(100_000, seed=3)}, first)
        for step in range(1, 5):
            manager.save(state, step, wait=True)
            assert same(checkpoint.load(manager.latest()), state)


def without_descriptors(call: Callable[[], Any]) -> Any:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        return call()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_nothing_is_removed_for_one_that_cannot_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may need what would be removed."""
    frozen, look = numbers(100_000), listing.look_at
    with Manager(tmp_path, keep_last=1) as manager:
        manager.save({"a": frozen}, 0, wait=True)
        with monkeypatch.context() as patched:
            patched.setattr(manager_module, "look_at", lambda path: without_descriptors(lambda: look(path)))
            with pytest.raises(penstock.CheckpointError, match="Too many open files"):
                manager.save({"a": frozen}, 1, wait=True)
        assert same(checkpoint.load(tmp_path / "step-0000000001.safetensors")["a"], frozen)
        assert same(checkpoint.load(manager.latest())["a"], frozen)


def test_the_header_of_a_checkpoint_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = list[Path]()

    class Counted(listing.CheckpointSource):
        def __init__(self, path: Path) -> None:
            opened.append(path)
            super().__init__(path)

    monkeypatch.setattr(listing, "CheckpointSource", Counted)
    with Manager(tmp_path) as manager:
        for step in range(2):
            manager.save({"a": numbers(100_000)}, step, wait=True)
    Manager(tmp_path).close()
    assert [path.name[:15] for path in opened] == [f"step-{step:010d}" for step in (0, 1, 0, 1)]


def test_what_cannot_be_opened_just_now_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training would begin again from an older one, and what the newest needs would be removed."""
    with Manager(tmp_path) as manager:
        manager.save({"a": numbers(100_000)}, 0)
        manager.save({"a": numbers(100_000)}, 1)
    look = listing.look_at
    with monkeypatch.context() as patched:
        patched.setattr(manager_module, "look_at", lambda path: without_descriptors(lambda: look(path)))
        with pytest.raises(penstock.CheckpointError, match="Too many open files"):
            Manager(tmp_path)
    with Manager(tmp_path) as manager:
        assert manager.steps() == (0, 1)


def test_a_checkpoint_needs_few_files(tmp_path: Path) -> None:
    """All of them are open while it is loaded."""
    state = {str(number): numbers(5_000, seed=number) for number in range(70)}
    with Manager(tmp_path, keep_last=1) as manager:
        for step in range(68):
            state[str(step)] = numbers(5_000, seed=1000 + step)
            manager.save(state, step, wait=True)
            assert len(checkpoint.info(manager.latest()).elsewhere) <= 64
        assert same(checkpoint.load(manager.latest()), state)


def test_a_manager_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process goes elsewhere, and there is a directory of the same name."""
    (tmp_path / "other" / "run").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with Manager("run") as manager:
        manager.save({"a": numbers(10)}, 0, wait=True)
        monkeypatch.chdir(tmp_path / "other")
        manager.save({"a": numbers(10)}, 1, wait=True)
        assert manager.latest() == tmp_path / "run" / "step-0000000001.safetensors"
    assert len(left_in(tmp_path / "run")) == 2 and not left_in(tmp_path / "other" / "run")


def test_what_others_refer_to_is_not_converted_in_place(tmp_path: Path) -> None:
    state = {"a": numbers(100_000), "b": numbers(50_000), "c": numbers(10)}
    with Manager(tmp_path) as manager:
        for step in range(3):
            if step == 1:
                state["b"] = numbers(50_000, seed=1)
            manager.save({**state, "step": step}, step, wait=True)
        first, second, third = map(Path, (each.path for each in checkpoint.ls(tmp_path)))
        for place in (first, second):
            with pytest.raises(penstock.InvalidArgument, match="could not be loaded any more"):
                checkpoint.convert(place, place, overwrite=True)
        checkpoint.convert(third, third, overwrite=True)
        assert same(checkpoint.load(manager.latest()), {**state, "step": 2})
        manager.save({**state, "step": 3}, 3, wait=True)
        assert same(checkpoint.load(manager.latest()), {**state, "step": 3})
        checkpoint.save({**state, "a": numbers(100_000, seed=1)}, first)
        with pytest.raises(penstock.InvalidCheckpoint, match="it is another file by now"):
            checkpoint.load(second)


@pytest.mark.parametrize("wait", [True, False])
def test_a_failed_save_loses_nothing(wait: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = FaultyTransport(PosixTransport(), lambda _: errno.EIO)
    state = {"a": numbers(100_000)}
    with Manager(tmp_path, keep_last=1) as manager:
        manager.save(state, 0, wait=True)
        with monkeypatch.context() as patched:
            patched.setattr(pieces, "shared_path", lambda: direct_path(failing))
            if wait:
                with pytest.raises(penstock.CheckpointError, match="Input/output error"):
                    manager.save({"a": numbers(100_000, seed=1)}, 1, wait=True)
            else:
                manager.save({"a": numbers(100_000, seed=1)}, 1)
                with pytest.raises(penstock.CheckpointError, match="Input/output error"):
                    manager.save(state, 2)
        assert manager.steps() == (0,) and same(checkpoint.load(manager.latest()), state)
        manager.save(state, 3, wait=True)
        assert same(checkpoint.load(manager.latest()), state)
    failing.close()


def test_damage_of_what_is_referred_to_is_named(tmp_path: Path) -> None:
    state, first = {"a": numbers(100_000)}, tmp_path / "step-0000000000.safetensors"
    with Manager(tmp_path) as manager:
        manager.save(state, 0)
        manager.save(state, 1, wait=True)
        latest = manager.latest()
    with open(first, "r+b") as file:
        file.seek(200_000)
        byte = file.read(1)
        file.seek(200_000)
        file.write(bytes([byte[0] ^ 1]))
    for look in (checkpoint.load, checkpoint.verify, lambda path: checkpoint.load(path, mmap=False)):
        with pytest.raises(penstock.InvalidCheckpoint, match=f"{first} is damaged: the checksum of a is"):
            look(latest)


# -- one manager for a directory -------------------------------------------------------------------


def test_a_second_manager_is_refused(tmp_path: Path) -> None:
    with Manager(tmp_path):
        with pytest.raises(penstock.CheckpointError, match="another manager has"):
            Manager(tmp_path)
        other = python("import sys; from penstock.checkpoint import Manager; Manager(sys.argv[1])", tmp_path)
        assert other.returncode == 1 and "another manager has" in other.stderr
    Manager(tmp_path).close()


def test_a_manager_without_its_lock_saves_no_more(tmp_path: Path) -> None:
    with Manager(tmp_path, keep_last=1) as manager:
        manager.save({"a": numbers(10)}, 0, wait=True)
        (tmp_path / ".penstock.lock").unlink()
        with Manager(tmp_path) as second:
            with pytest.raises(penstock.InvalidArgument, match="removed the file of its lock"):
                manager.save({"a": numbers(10)}, 1)
            second.save({"a": numbers(10)}, 1, wait=True)


def test_a_child_does_not_keep_the_directory(tmp_path: Path) -> None:
    manager = Manager(tmp_path)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        try:
            manager.save({}, 1)
        except penstock.InvalidArgument:
            os.read(reader, 1)
            os._exit(0)
        os._exit(1)
    manager.close()
    Manager(tmp_path).close()
    os.close(writer)
    assert os.waitpid(child, 0)[1] == 0, "a child cannot save with it"
    os.close(reader)


def test_a_child_does_not_wait_for_a_save_of_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    manager = Manager(tmp_path)
    add = manager._add

    def add_later(path: Path) -> None:
        go_on.wait(60)
        add(path)

    monkeypatch.setattr(manager, "_add", add_later)
    handle = manager.save({"a": numbers(1000)}, 1)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends it where it waits
        manager.close()
        said = str(handle.exception())
        os._exit(0 if "when this process was forked" in said else 1)
    status = os.waitpid(child, 0)[1]
    go_on.set()
    handle.wait()
    manager.close()
    assert status == 0


def test_a_child_does_not_wait_for_a_thread_of_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves, go_on = threading.Event(), threading.Event()
    manager = Manager(tmp_path)

    def add(path: Path) -> None:
        saves.set()
        go_on.wait(60)

    monkeypatch.setattr(manager, "_add", add)
    thread = threading.Thread(target=lambda: manager.save({"a": numbers(1000)}, 1, wait=True))
    thread.start()
    saves.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends it where it waits
        try:
            manager.save({}, 2)
        except penstock.InvalidArgument:
            manager.close()
            os._exit(0)
        os._exit(1)
    status = os.waitpid(child, 0)[1]
    go_on.set()
    thread.join()
    manager.close()
    assert status == 0


def test_threads_save_one_after_the_other(tmp_path: Path) -> None:
    """A save that saw files go which it refers to would be lost."""
    frozen, steps, errors = numbers(200_000), iter(range(1, 1000)), []
    with Manager(tmp_path, keep_last=1) as manager:
        turn = threading.Lock()

        def save() -> None:
            try:
                for _ in range(8):
                    with turn:
                        step = next(steps)
                        handle = manager.save({"frozen": frozen + step // 4, "step": step}, step)
                    handle.wait()
                    manager.wait()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=save) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors and manager.steps()[-1] == 24
        for each in checkpoint.ls(tmp_path):
            state = {"frozen": frozen + each.step // 4, "step": each.step}
            assert same(checkpoint.load(each.path), state)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda folder: Manager(folder, keep_last=0), "keep_last is 0"),
        (lambda folder: Manager(folder, keep_every=True), "keep_every is True"),
        (lambda folder: Manager(folder).save({}, -1), "step is -1"),
        (lambda folder: Manager(folder).save({}, 1.5), "step is 1.5"),
        (lambda folder: Manager(folder / "a" / "\0"), "null"),
    ],
)
def test_bad_arguments_are_named(call: Callable[[Path], object], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        call(tmp_path)


def test_steps_go_on(tmp_path: Path) -> None:
    with Manager(tmp_path) as manager:
        manager.save({}, 5)
        with pytest.raises(penstock.InvalidArgument, match="step 5 is not after 5, the newest"):
            manager.save({}, 5)
    with pytest.raises(penstock.InvalidArgument, match="is closed"):
        manager.save({}, 6)
    (tmp_path / "file").touch()
    with pytest.raises(penstock.CheckpointError, match="file is not a directory"):
        Manager(tmp_path / "file")


# -- files are not trusted -------------------------------------------------------------------------


def reference(file: str, path: Path, **changes: Any) -> None:
    """An increment at ``path`` with one tensor that would lie in ``file``."""
    entry = header.TensorEntry("a", "U8", (16,), 0, 16, crc32c(bytes(range(16))))._replace(**changes)
    described = header.encode([], tree='{"a":{"$tensor":"a"}}', elsewhere=[header.Reference(file, entry)])
    path.write_bytes(described)


def other(path: Path) -> None:
    checkpoint.save({"a": torch.arange(16, dtype=torch.uint8)}, path)


def test_a_reference_that_is_right_is_followed(tmp_path: Path) -> None:
    other(tmp_path / "data")
    reference("data", tmp_path / "state")
    assert checkpoint.load(tmp_path / "state")["a"].tolist() == list(range(16))
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "state").symlink_to(tmp_path / "state")
    assert checkpoint.load(tmp_path / "link" / "state")["a"].tolist() == list(range(16))


@pytest.mark.parametrize("file", ["../data", "/etc/passwd", "sub/data", ".data", "", "..", "da\0", "a" * 300])
def test_references_stay_in_the_directory(file: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for path in (tmp_path / "data", tmp_path / "sub" / "data", tmp_path / ".data"):
        other(path)
    (tmp_path / "sub" / "sub").mkdir()
    other(tmp_path / "sub" / "sub" / "data")
    reference(file, tmp_path / "sub" / "state")
    with pytest.raises(penstock.InvalidCheckpoint, match="no name of a file"):
        checkpoint.load(tmp_path / "sub" / "state")


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    other(tmp_path / "elsewhere" / "data")
    (tmp_path / "data").symlink_to(tmp_path / "elsewhere" / "data")
    reference("data", tmp_path / "state")
    with pytest.raises(penstock.InvalidCheckpoint, match="is not whole"):
        checkpoint.load(tmp_path / "state")


@pytest.mark.parametrize(
    "changes",
    [
        {"crc32c": 7},
        {"dtype": "I8"},
        {"shape": (4, 4)},
        {"begin": 16, "end": 32},
        {"name": "b"},
    ],
)
def test_another_tensor_is_not_taken_for_it(changes: dict[str, Any], tmp_path: Path) -> None:
    other(tmp_path / "data")
    reference("data", tmp_path / "state", **changes)
    with pytest.raises(penstock.InvalidCheckpoint):
        checkpoint.load(tmp_path / "state")


def test_sums_are_compared_where_both_files_have_them(tmp_path: Path) -> None:
    data = bytes(range(16))
    entry = header.TensorEntry("a", "U8", (16,), 0, 16, crc32c(data), 3)
    (tmp_path / "data").write_bytes(header.encode([entry], tree='{"a":{"$tensor":"a"}}') + data)
    reference("data", tmp_path / "state", sum64=3)
    assert checkpoint.load(tmp_path / "state")["a"].tolist() == list(range(16))
    reference("data", tmp_path / "state", sum64=4)
    with pytest.raises(penstock.InvalidCheckpoint, match="it is another file by now"):
        checkpoint.load(tmp_path / "state")


def test_a_file_may_refer_to_itself_only_in_vain(tmp_path: Path) -> None:
    reference("state", tmp_path / "state")
    with pytest.raises(penstock.InvalidCheckpoint, match=r"are not in .* as they were"):
        checkpoint.load(tmp_path / "state")


ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "F32", "F4", "XX"]),
        "shape": st.lists(st.integers(0, 3), max_size=3),
        "data_offsets": st.lists(st.integers(0, 40), min_size=2, max_size=2),
    }
)
JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | ENTRY,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
ELSEWHERE = st.dictionaries(
    st.sampled_from(["data", "other", "../data", ""]),
    st.dictionaries(st.sampled_from(["a", "b", ""]), ENTRY | JSON, max_size=2),
    max_size=3,
)


@given(described=st.text(max_size=30) | (JSON | ELSEWHERE).map(json.dumps), count=st.integers(0, 3))
def test_descriptions_of_what_is_elsewhere_are_not_trusted(described: str, count: int) -> None:
    """Whatever a header with a right checksum says, it is an error or references to plain names."""
    wanted = [
        header.Reference("x", header.TensorEntry(str(i), "U8", (1,), 0, 1, i)) for i in range(max(count, 1))
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(header, "_described_elsewhere", lambda _: described)
        encoded = header.encode([], tree="{}", elsewhere=wanted)
    try:
        found = header.decode(encoded, len(encoded), "file")
    except penstock.InvalidCheckpoint:
        return
    for file, entry in found.elsewhere:
        assert file in ("data", "other") and entry.crc32c is not None
        assert entry.begin <= entry.end and entry.size_bytes < 100


@given(
    st.lists(
        st.tuples(st.sampled_from(["a.b", "c-1"]), st.integers(0, 9), st.integers(0, (1 << 64) - 1)),
        max_size=9,
    )
)
def test_references_survive_the_round_trip(drawn: list[tuple[str, int, int]]) -> None:
    references = [
        header.Reference(file, header.TensorEntry(f"t{number}", "F32", (size,), 8, 8 + 4 * size, size, total))
        for number, (file, size, total) in enumerate(sorted(drawn))
    ]
    own = [header.TensorEntry("own", "U8", (3,), 0, 3, 7, 9)]
    encoded = header.encode(own, tree="{}", elsewhere=references)
    found = header.decode(encoded, len(encoded) + 3, "file")
    assert found.elsewhere == tuple(references) and found.entries == tuple(own)


# -- kills -----------------------------------------------------------------------------------------

SAVING = """
import sys, torch
from penstock.checkpoint import Manager, ls, load
folder, hidden = sys.argv[1], sys.argv[2] == "hidden"
if hidden:  # as on a file system without nameless files
    from penstock.checkpoint import replace
    replace._create_nameless = lambda *_: None
frozen = torch.arange(400_000)
manager = Manager(folder, keep_last=2, keep_every=50)
latest = manager.latest()
step = 0 if latest is None else load(latest)["step"]
while True:
    step += 1
    moving = torch.full((50_000,), step)
    # Every tenth step nearly all is new, so that files to refer to change.
    manager.save({"frozen": frozen + step // 10, "moving": moving, "step": step}, step, wait=step % 2 == 0)
    print("saved", flush=True)
"""


@pytest.mark.parametrize("how", ["nameless", pytest.param("hidden", marks=pytest.mark.slow)])
def test_a_killed_process_leaves_its_newest_checkpoint_whole(how: str, tmp_path: Path) -> None:
    chance, last = random.Random(3), 0
    for _ in range(4):
        saving = Running(Program(SAVING, (tmp_path / "run", how)))
        saving.wait_for("saved", chance.randrange(3, 9))
        time.sleep(chance.uniform(0, 0.1))
        saving.end(0)
        found = checkpoint.ls(tmp_path / "run")
        assert not [each.problem for each in found if each.problem]
        for each in found:
            state = checkpoint.load(each.path)
            assert state["step"] == each.step and bool((state["moving"] == each.step).all())
            assert torch.equal(state["frozen"], torch.arange(400_000) + each.step // 10)
        assert found[-1].step >= last
        last = found[-1].step
        assert len(found) <= 2 + last // 50 + 3
    assert last > 8, "some were saved in between"
    Manager(tmp_path / "run").close()
    assert all(name.startswith("step-") for name in left_in(tmp_path / "run")), "nothing hidden is left"
