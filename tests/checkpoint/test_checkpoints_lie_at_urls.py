"""Checkpoints at URLs: whole or not at all, verified, and errors that say what to do and no secrets."""

from __future__ import annotations

import builtins
import json
import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import penstock
from penstock import checkpoint, cli
from penstock.checkpoint import Manager, pieces
from penstock.errors import CheckpointError
from penstock.storage.objects import Bucket
from tests.support.apart import Program, Running
from tests.support.limits import most_more_memory
from tests.support.object_servers import S3, SECRET_KEY, HttpServer, Proxy, writes
from tests.support.runs import PAGED
from tests.support.states import STATES, numbers, same


@pytest.fixture
def folder(s3: S3, tmp_path: Path) -> str:
    return s3.url(tmp_path.name)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("name", STATES)
def test_round_trip(name: str, wait: bool, folder: str) -> None:
    state, url = STATES[name](), f"{folder}/{wait}.safetensors"
    handle = checkpoint.save(state, url, wait=wait)
    if handle is not None:
        handle.wait()
        assert url in repr(handle)
    assert same(checkpoint.load(url), state)
    assert checkpoint.verify(url).checksummed and checkpoint.info(url).path == url


def test_the_object_is_the_file(folder: str, tmp_path: Path) -> None:
    """Byte for byte, so that any reader of safetensors files can read it."""
    state = {"a": numbers(2_500_001), "b": numbers(3, torch.uint8)}
    checkpoint.save(state, tmp_path / "file", metadata={"of": "tests"})
    for wait in (True, False):
        handle = checkpoint.save(state, f"{folder}/object", metadata={"of": "tests"}, wait=wait)
        if handle is not None:
            handle.wait()
        written = Bucket(folder).read("object")
        assert bytes(written) == (tmp_path / "file").read_bytes()
    others = safetensors.torch.load(bytes(written))
    assert all(same(others[name], state[name]) for name in state)


def test_what_is_there_is_filled(folder: str) -> None:
    shared = numbers(3000)
    state = {
        "plain": numbers(2_000_000),
        "transposed": numbers(12).view(3, 4).t(),
        "twice": shared,
        "part": shared[10:20],
        "array": np.arange(10),
        "step": 3,
        "empty": torch.empty(0, 3),
    }
    url = f"{folder}/state.safetensors"
    checkpoint.save(state, url)
    into = {
        key: torch.zeros(value.shape) if isinstance(value, torch.Tensor) else None
        for key, value in state.items()
    }
    plain = into["plain"]
    found = checkpoint.load(url, into=into)
    assert found["plain"] is plain and found["step"] == 3
    assert np.array_equal(found["array"], np.arange(10))
    for name in ("plain", "transposed", "twice", "part"):
        assert same(found[name].contiguous(), state[name].contiguous()), name


def test_a_training_goes_on_from_a_url(folder: str) -> None:
    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = torch.nn.Linear(100, 100)
        return model, torch.optim.AdamW(model.parameters())

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 100)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = make()
    step(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoint.save(state, f"{folder}/state.safetensors")
    other, its_optimizer = make()
    checkpoint.load(f"{folder}/state.safetensors", into={"model": other, "optimizer": its_optimizer})
    for each in ((model, optimizer), (other, its_optimizer)):
        step(*each)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_damage_is_found(folder: str) -> None:
    checkpoint.save({"a": numbers(100_000), "b": numbers(10)}, f"{folder}/state")
    data = bytearray(Bucket(folder).read("state"))
    data[200_000] ^= 1
    Bucket(folder).write("damaged", bytes(data))
    Bucket(folder).write("cut", bytes(data[:300_000]))
    for look in (
        checkpoint.load,
        checkpoint.verify,
        lambda url: checkpoint.load(url, into={"a": torch.zeros(100_000), "b": torch.zeros(10)}),
    ):
        with pytest.raises(penstock.InvalidCheckpoint, match="damaged is damaged: the checksum of a is not"):
            look(f"{folder}/damaged")
        with pytest.raises(penstock.InvalidCheckpoint, match="was cut short"):
            look(f"{folder}/cut")


def test_tensors_that_change_meanwhile_are_refused(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header, with the checksums, is sent first: a thread that trains on would make it wrong."""
    state = {"a": torch.zeros(5_000_000)}
    checkpoint.save(state, f"{folder}/state")
    write = Bucket.write

    def slow(self: Bucket, name: str, data: Any, **more: Any) -> Any:
        state["a"][4_000_000] = 1
        return write(self, name, data, **more)

    monkeypatch.setattr(Bucket, "write", slow)
    with pytest.raises(penstock.CheckpointError, match=r"its tensors changed meanwhile. Nothing"):
        checkpoint.save(state, f"{folder}/state")
    assert not checkpoint.load(f"{folder}/state")["a"].any(), "the one before is still there"


def test_the_object_holds_the_values_at_the_call(folder: str) -> None:
    tensor = torch.zeros(3_000_000)
    handles = []
    for step in range(3):
        handles.append(checkpoint.save({"a": tensor}, f"{folder}/{step}", wait=False))
        tensor += 1
    for step, handle in enumerate(handles):
        handle.wait()
        assert bool((checkpoint.load(f"{folder}/{step}")["a"] == step).all())


def test_no_memory_for_a_buffer_is_an_error(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save({"a": numbers(3)}, f"{folder}/state")
    monkeypatch.setattr(pieces, "_spare", deque(maxlen=pieces.DEPTH))
    state = {"a": torch.ones(8 << 20, dtype=torch.uint8)}
    with (
        most_more_memory(1 << 20),
        pytest.raises(CheckpointError, match=rf"{folder}/state cannot be written: Cannot allocate memory"),
    ):
        checkpoint.save(state, f"{folder}/state")
    assert same(checkpoint.load(f"{folder}/state"), {"a": numbers(3)})


def test_a_replaced_object_is_noticed(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url, read = f"{folder}/state", Bucket.read
    checkpoint.save({"a": numbers(3_000_000)}, url)
    asked = []

    def replaced(self: Bucket, *arguments: Any) -> memoryview:
        asked.append(arguments)
        if len(asked) == 2:
            monkeypatch.setattr(Bucket, "read", read)
            checkpoint.save({"a": numbers(3_000_000, seed=1)}, url)
        return read(self, *arguments)

    monkeypatch.setattr(Bucket, "read", replaced)
    with pytest.raises(penstock.CheckpointError, match="replaced meanwhile: load it again"):
        checkpoint.load(url)


# -- a server in trouble ---------------------------------------------------------------------------


@pytest.fixture
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bucket.__init__, "__defaults__", (2.0,))


@pytest.mark.parametrize("wait", [True, False])
def test_a_server_in_trouble_costs_a_save_time_alone(proxy: Proxy, folder: str, wait: bool) -> None:
    state, url, asked = {"a": numbers(2_500_000), "step": 1}, f"{folder}/state", list[str]()

    def first(line: str, number: int) -> int | None:
        asked.append(writes(line))
        return 503 if asked[-1] and asked.count(asked[-1]) == 1 else None

    proxy.answer = first
    handle = checkpoint.save(state, url, wait=wait)
    if handle is not None:
        handle.wait()
    assert same(checkpoint.load(url), state) and asked.count("begin") == asked.count("end") == 2


@pytest.mark.usefixtures("little_patience")
@pytest.mark.parametrize("wait", [True, False])
def test_a_server_that_stays_in_trouble_is_one_error_and_the_checkpoint_before_is_there(
    proxy: Proxy, folder: str, wait: bool
) -> None:
    old, url = {"a": numbers(1000), "step": 0}, f"{folder}/state"
    checkpoint.save(old, url)
    proxy.answer = lambda line, number: 503 if writes(line) in ("part", "end") else None
    with pytest.raises(penstock.CheckpointError, match=f"{url} cannot be written: the server ") as caught:
        handle = checkpoint.save({"a": numbers(2_500_000), "step": 1}, url, wait=wait)
        assert handle is not None
        handle.wait()
    assert "Look at the network" in str(caught.value)
    assert "what was before, or all of the new one" in str(caught.value)
    proxy.answer = lambda line, number: None
    assert same(checkpoint.load(url), old)
    checkpoint.save({"step": 2}, url)
    assert checkpoint.load(url) == {"step": 2}


@pytest.mark.usefixtures("little_patience")
def test_a_save_whose_answer_never_comes_is_whole(proxy: Proxy, folder: str) -> None:
    """And its error says that it may be."""
    checkpoint.save({"step": 0}, f"{folder}/state")
    proxy.answer = lambda line, number: "lost" if writes(line) in ("end", "whole") else None
    with pytest.raises(penstock.CheckpointError, match="what was before, or all of the new one"):
        checkpoint.save({"step": 1}, f"{folder}/state")
    end_s = time.monotonic() + 30
    while checkpoint.load(f"{folder}/state") != {"step": 1}:  # a slow server may not have begun
        assert time.monotonic() < end_s


@pytest.mark.usefixtures("little_patience")
def test_a_manager_goes_on_after_a_save_that_the_server_refused(proxy: Proxy, folder: str) -> None:
    state = {"frozen": numbers(100_000)}
    with Manager(folder, keep_last=1) as manager:
        manager.save({**state, "step": 0}, 0, wait=True)
        proxy.answer = lambda line, number: 503 if writes(line) else None
        with pytest.raises(penstock.CheckpointError, match=f"{folder}/.* cannot be written"):
            manager.save({**state, "step": 1}, 1, wait=True)
        proxy.answer = lambda line, number: None
        assert same(checkpoint.load(manager.latest()), {**state, "step": 0})
        manager.save({**state, "step": 2}, 2, wait=True)
        assert same(checkpoint.load(manager.latest()), {**state, "step": 2})
    assert not [each.problem for each in checkpoint.ls(folder) if each.problem]


# -- managers --------------------------------------------------------------------------------------


def test_a_manager_keeps_checkpoints_at_a_url(folder: str) -> None:
    frozen = numbers(300_000)
    with Manager(folder, keep_last=2) as manager:
        for step in range(4):
            manager.save({"frozen": frozen, "step": step}, step)
        manager.wait()
        assert manager.steps() == (0, 2, 3)
    found = checkpoint.ls(folder)
    assert [each.step for each in found] == [0, 2, 3] and found[-1].size_bytes < 10_000
    for each in found:
        assert same(checkpoint.load(each.path), {"frozen": frozen, "step": each.step})
    with Manager(folder, keep_last=1) as manager:
        assert manager.latest() == found[-1].path
        manager.save({"frozen": frozen, "step": 4}, 4, wait=True)
        assert manager.steps() == (4,), "it refers only to what it has written itself"


def test_two_managers_break_nothing_of_each_others(folder: str) -> None:
    with Manager(folder, keep_last=1) as one, Manager(folder, keep_last=1) as two:
        for step in range(4):
            for seed, manager in enumerate((one, two)):
                manager.save({"a": numbers(50_000, seed=seed), "b": step, "of": seed}, step, wait=True)
        for seed, manager in enumerate((one, two)):
            found = checkpoint.load(manager.latest())
            assert same(found, {"a": numbers(50_000, seed=seed), "b": 3, "of": seed})
    assert not [each.problem for each in checkpoint.ls(folder) if each.problem]


SAVING = """
import sys, torch
from penstock.checkpoint import Manager, load
manager = Manager(sys.argv[1], keep_last=2)
latest = manager.latest()
step = 0 if latest is None else load(latest)["step"]
while True:
    step += 1
    manager.save({"frozen": torch.arange(2_000_000), "moving": torch.full((9999,), step), "step": step}, step)
    print("saved", flush=True)
"""


def test_a_killed_process_leaves_its_newest_checkpoint_whole(folder: str) -> None:
    chance, last = random.Random(3), 0
    for _ in range(3):
        saving = Running(Program(SAVING, (folder,)))
        saving.wait_for("saved", chance.randrange(1, 5))
        time.sleep(chance.uniform(0, 0.3))
        saving.end(0)
        found = checkpoint.ls(folder)
        assert not [each.problem for each in found if each.problem]
        for each in found:
            state = checkpoint.load(each.path)
            assert state["step"] == each.step and bool((state["moving"] == each.step).all())
        assert not found or found[-1].step >= last
        last = found[-1].step if found else last
    assert last, "some were saved in between"


def test_a_damaged_object_is_not_copied(folder: str, tmp_path: Path) -> None:
    checkpoint.save({"a": numbers(3_000_000)}, f"{folder}/state.safetensors")
    data = bytearray(Bucket(folder).read("state.safetensors"))
    data[9_000_000] ^= 1
    Bucket(folder).write("damaged.safetensors", bytes(data))
    there = tmp_path / "there.safetensors"
    checkpoint.save({"a": 1}, there)
    with pytest.raises(penstock.InvalidCheckpoint, match="the checksum of a is not"):
        checkpoint.convert(f"{folder}/damaged.safetensors", there, overwrite=True)
    assert checkpoint.load(there) == {"a": 1} and os.listdir(tmp_path) == ["there.safetensors"]
    with pytest.raises(penstock.CheckpointError, match="Create the directory"):
        checkpoint.convert(f"{folder}/state.safetensors", tmp_path / "none" / "a.safetensors")


def test_a_budget_is_filled_from_a_url(folder: str, tmp_path: Path, hardware: penstock.Hardware) -> None:
    """The weights are more than twice the budget."""

    def build(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return torch.nn.Sequential(*(torch.nn.Linear(1000, 1000) for _ in range(12)))

    saved = build(1).state_dict()
    checkpoint.save(saved, f"{folder}/model.safetensors")
    model = build(2)
    with penstock.offload(
        model, device_budget="20MiB", spill_dir=tmp_path, hardware=hardware, planning=PAGED
    ) as run:
        checkpoint.load(f"{folder}/model.safetensors", into=model)
        with run.step():
            model(torch.ones(1, 1000)).sum().backward()
            model.zero_grad()
        assert run.report().peak_bytes <= 20 << 20
    assert all(same(value, saved[name]) for name, value in model.state_dict().items())


# -- HTTP, the command line, errors ----------------------------------------------------------------


def test_http_is_read(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    state = {"a": numbers(3_000_000), "b": 3}
    checkpoint.save(state, tmp_path / "state.safetensors")
    with HttpServer(tmp_path) as server:
        assert same(checkpoint.load(f"{server.url}/state.safetensors"), state)
        server.answer = lambda path, number: "drop" if number % 3 == 0 else None
        assert same(checkpoint.load(f"{server.url}/state.safetensors"), state), "requests are sent again"
        asked = len(server.requests)
        for write, source in ((checkpoint.save, state), (checkpoint.convert, tmp_path / "state.safetensors")):
            with pytest.raises(penstock.InvalidArgument, match="cannot be written by HTTP"):
                write(source, f"{server.url}/other.safetensors")
        assert len(server.requests) == asked


def test_commands_take_urls(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"a": numbers(100_000), "b": numbers(3)}
    checkpoint.save(state, tmp_path / "a.safetensors", metadata={"of": "tests"})

    def run(*words: object) -> dict[str, Any]:
        assert cli.main(["checkpoint", *map(str, words), "--json"]) == 0
        return dict(json.loads(capsys.readouterr().out))

    url = f"{folder}/a.safetensors"
    assert run("cp", tmp_path / "a.safetensors", url)["metadata"] == {"of": "tests"}
    assert run("verify", url)["sound"] and run("info", url)["path"] == url
    assert run("cp", url, tmp_path / "b.safetensors")["written"] == [str(tmp_path / "b.safetensors")]
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    run("convert", url, tmp_path / "c.pt")
    assert same(torch.load(tmp_path / "c.pt"), state)
    assert cli.main(["checkpoint", "cp", str(tmp_path / "a.safetensors"), url]) == 1
    assert f"{url} exists" in capsys.readouterr().err
    with Manager(f"{folder}/run") as manager:
        for step in range(2):
            manager.save(state, step)
    listed = run("ls", f"{folder}/run")["checkpoints"]
    assert [each["step"] for each in listed] == [0, 1] and listed[1]["elsewhere"]
    packed = run("pack", listed[1]["path"], tmp_path / "packed.safetensors")
    assert packed["elsewhere"] == [] and same(checkpoint.load(tmp_path / "packed.safetensors"), state)


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import_module = builtins.__import__

    def without(name: str, *arguments: Any, **more: Any) -> Any:
        if name.startswith("obstore"):
            raise ImportError(name)
        return import_module(name, *arguments, **more)

    for name in [name for name in sys.modules if name.startswith("obstore")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    for call in (checkpoint.load, checkpoint.ls, Manager, lambda url: checkpoint.save({}, url)):
        with pytest.raises(penstock.InvalidArgument, match=r"'\.\[cloud\]'"):
            call("s3://bucket/state")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda url: checkpoint.load(f"{url}/none"),
            "404 Not Found.*Give the URL of a checkpoint",
        ),
        (lambda url: checkpoint.load("s3://none-there/x"), "404 Not Found.*in a bucket that exists"),
        (lambda url: checkpoint.load(f"{url}/x", mmap=True), "cannot be mapped: leave mmap out"),
        (lambda url: checkpoint.save({}, "s3://bucket"), "names no object"),
        (
            lambda url: checkpoint.save({}, f"{url}/x", io=penstock.IoOptions()),
            "is not on a disk: leave io out",
        ),
        (lambda url: checkpoint.save({}, f"{url}/x", io=penstock.IoOptions(), wait=False), "leave io out"),
        (
            lambda url: checkpoint.convert(f"{url}/x", f"{url}/x.pt"),
            "files of torch.save are written",
        ),
        (lambda url: checkpoint.ls("https://127.0.0.1:1/x"), "cannot be listed"),
        (
            lambda url: checkpoint.load("s3://AKIAX:secret@bucket/x"),
            "credentials belong into",
        ),
    ],
)
def test_errors_say_what_to_do(call: Callable[[str], object], said: str, folder: str) -> None:
    if "mmap" in said:
        checkpoint.save({}, f"{folder}/x")
    with pytest.raises(penstock.PenstockError, match=said) as caught:
        call(folder)
    assert "secret" not in str(caught.value)


def test_refused_credentials_are_not_shown(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
    for call in (checkpoint.load, lambda url: checkpoint.save({}, url)):
        with pytest.raises(penstock.CheckpointError, match=r"403.*Give the credentials") as caught:
            call(f"{folder}/x")
        assert "another-secret" not in str(caught.value) and SECRET_KEY not in str(caught.value)


def test_files_of_torch_are_not_read_from_urls(folder: str) -> None:
    Bucket(folder).write("a.pt", b"PK\x03\x04" + bytes(100))
    with pytest.raises(penstock.InvalidArgument, match=r"is a file of torch.save: copy it to a disk"):
        checkpoint.load(f"{folder}/a.pt")
