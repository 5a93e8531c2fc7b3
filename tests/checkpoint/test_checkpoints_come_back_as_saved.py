"""What is loaded is what was saved: every bit, type, stride and shared storage, however it is read."""

from __future__ import annotations

import gc
import io
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock import checkpoint
from penstock.storage.page_cache import cached_share
from tests.support.families import iterate, small_gpt, weights
from tests.support.states import STATES, bits, numbers, same, sharing, trained_gpt

MODES = [None, True, False]


def drop_cache(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


@pytest.mark.parametrize("mmap", MODES)
@pytest.mark.parametrize("name", STATES)
def test_round_trip(name: str, mmap: bool | None, tmp_path: Path) -> None:
    state = STATES[name]()
    checkpoint.save(state, tmp_path / "state")
    loaded = checkpoint.load(tmp_path / "state", mmap=mmap)
    assert same(loaded, state)
    assert sharing(loaded) == sharing(state)


@pytest.mark.parametrize("warm", [True, False])
def test_the_page_cache_changes_nothing(warm: bool, tmp_path: Path) -> None:
    path, state = tmp_path / "state", STATES["several pieces"]()
    checkpoint.save(state, path)
    if warm:
        path.read_bytes()
    else:
        drop_cache(path)
    assert same(checkpoint.load(path), state)


@pytest.mark.parametrize("mmap", [None, True, False])
def test_the_file_is_mapped_unless_memory_of_its_own_is_asked_for(tmp_path: Path, mmap: bool | None) -> None:
    path, state = tmp_path / "state", {"a": numbers(1 << 20)}
    checkpoint.save(state, path)
    drop_cache(path)
    assert same(checkpoint.load(path, mmap=mmap), state)
    with path.open("rb") as file:
        assert (cached_share(file.fileno()) == 1.0) == (mmap is not False)


@pytest.mark.parametrize("size_bytes", [100, 1 << 20, (1 << 24) + 4097])
@pytest.mark.parametrize("has_cachestat", [True, False])
def test_the_page_cache_is_asked_what_it_holds(
    has_cachestat: bool, size_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_cachestat:
        monkeypatch.setattr("penstock.storage.page_cache._ask_cachestat", lambda *_: None)
    (tmp_path / "file").write_bytes(bytes(size_bytes))
    with (tmp_path / "file").open("rb") as file:
        assert cached_share(file.fileno()) == 1.0
    drop_cache(tmp_path / "file")
    with (tmp_path / "file").open("rb") as file:
        assert cached_share(file.fileno()) == 0.0


@pytest.mark.parametrize("mmap", [True, False])
def test_what_was_loaded_can_be_changed_and_the_file_stays(mmap: bool, tmp_path: Path) -> None:
    path, state = tmp_path / "state", {"a": torch.zeros(1 << 19), "b": torch.zeros(3)}
    checkpoint.save(state, path)
    before = path.read_bytes()
    loaded = checkpoint.load(path, mmap=mmap)
    for tensor in loaded.values():
        tensor += 1
    assert path.read_bytes() == before
    assert same(loaded, {key: value + 1 for key, value in state.items()})


@pytest.mark.parametrize("mmap", [True, False])
def test_loaded_tensors_outlive_the_file(mmap: bool, tmp_path: Path) -> None:
    path, state = tmp_path / "state", STATES["several pieces"]()
    checkpoint.save(state, path)
    loaded = checkpoint.load(path, mmap=mmap)
    checkpoint.save({}, path)
    path.unlink()
    gc.collect()
    assert same(loaded, state)


def private_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def test_a_tensor_keeps_only_its_own_memory(tmp_path: Path) -> None:
    large = 48 << 20
    checkpoint.save({"large": numbers(large, torch.uint8), "small": numbers(9)}, tmp_path / "state")
    gc.collect()
    loaded = checkpoint.load(tmp_path / "state", mmap=False)
    time.sleep(0.3)  # the transport's thread lets go of what it delivered last
    both = private_bytes()
    small = loaded["small"]
    del loaded
    assert both - private_bytes() > large * 0.9
    assert bits(small) == bits(numbers(9))


def test_each_tensor_has_a_storage_of_its_own(tmp_path: Path) -> None:
    checkpoint.save({"large": numbers(1 << 19), "small": numbers(5)}, tmp_path / "state")
    for mmap in (True, False):
        for tensor in checkpoint.load(tmp_path / "state", mmap=mmap).values():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_every_tensor_begins_at_a_multiple_of_its_element(tmp_path: Path) -> None:
    state = {
        "a": numbers(3, torch.uint8),
        "b": numbers(5, torch.float64),
        "c": numbers(1024),
        "d": numbers(1),
    }
    checkpoint.save(state, tmp_path / "state")
    assert checkpoint.info(tmp_path / "state").tensors[0].name == "c", "whole pages come first"
    for mmap in (True, False):
        loaded = checkpoint.load(tmp_path / "state", mmap=mmap)
        assert all(tensor.data_ptr() % tensor.itemsize == 0 for tensor in loaded.values())
        assert loaded["c"].data_ptr() % 4096 == 0


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_training_goes_on_as_if_it_had_not_been_interrupted(
    optimizer: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    options = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    state = trained_gpt(optimizer, **options)
    checkpoint.save(state, tmp_path / "state")
    ended = []
    for source in (state, checkpoint.load(tmp_path / "state")):
        model, _ = small_gpt()
        model.load_state_dict(source["model"])
        resumed = optimizer(model.parameters(), lr=0.5, **options)
        resumed.load_state_dict(source["optimizer"])
        for step in range(2, 4):
            iterate(model, resumed, step)
        ended.append(weights(model))
    assert ended[0] == ended[1]


def test_a_model_takes_what_was_loaded_as_its_own(tmp_path: Path) -> None:
    model, _ = small_gpt()
    checkpoint.save(model.state_dict(), tmp_path / "state")
    other, _ = small_gpt()
    other.load_state_dict(checkpoint.load(tmp_path / "state", mmap=False), assign=True)
    assert weights(other) == weights(model)
    iterate(other, torch.optim.SGD(other.parameters(), lr=0.1), 0)


def test_metadata_comes_back(tmp_path: Path) -> None:
    checkpoint.save({"a": numbers(3)}, tmp_path / "state", metadata={"run": "17", "ü": "\n\"'"})
    info = checkpoint.info(tmp_path / "state")
    assert info.metadata == {"run": "17", "ü": "\n\"'"}
    assert (info.format, info.checksummed, info.tensor_bytes) == ("penstock", True, 12)
    assert info.size_bytes == (tmp_path / "state").stat().st_size


@pytest.mark.parametrize("metadata", [{"a": 1}, {1: "a"}, {"penstock.devices": "{}"}])
def test_metadata_that_is_no_text_is_refused(metadata: dict[Any, Any], tmp_path: Path) -> None:
    with pytest.raises(penstock.InvalidArgument, match="metadata"):
        checkpoint.save({}, tmp_path / "state", metadata=metadata)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", [None, "", 3, io.BytesIO()])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(penstock.InvalidArgument, match="is not a path"):
        checkpoint.save({}, path)
    with pytest.raises(penstock.InvalidArgument, match="is not a path"):
        checkpoint.load(path)


# -- the file ---------------------------------------------------------------------------------------


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_a_new_file_gets_what_the_umask_leaves(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        checkpoint.save({}, tmp_path / "state")
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "state") == 0o666 & ~umask


def test_the_mode_of_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_text("old")
    path.chmod(0o640)
    checkpoint.save({}, path)
    assert mode_of(path) == 0o640


def test_a_symbolic_link_stays(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there/state")
    for step in range(2):  # the first time it leads nowhere
        checkpoint.save({"step": step}, tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
        assert checkpoint.load(tmp_path / "there" / "state") == {"step": step}


def test_other_names_of_the_old_file_keep_it(tmp_path: Path) -> None:
    checkpoint.save({"step": 0}, tmp_path / "state")
    os.link(tmp_path / "state", tmp_path / "kept")
    checkpoint.save({"step": 1}, tmp_path / "state")
    assert checkpoint.load(tmp_path / "kept") == {"step": 0}


@pytest.mark.parametrize("nameless", [True, False])
def test_nothing_else_is_left_in_the_directory(
    nameless: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not nameless:
        monkeypatch.setattr("penstock.checkpoint.replace._create_nameless", lambda *_: None)
    for step in range(2):
        checkpoint.save({"step": step}, tmp_path / "state")
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert checkpoint.load(tmp_path / "state") == {"step": 1}


def test_the_longest_name_can_be_used(tmp_path: Path) -> None:
    path = tmp_path / ("ü" * 127)
    checkpoint.save({}, path)
    assert checkpoint.load(path) == {}


# -- devices ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mmap", MODES)
@pytest.mark.parametrize(
    "map_location",
    [
        "cpu",
        torch.device("cpu"),
        {"cpu": "cpu"},
        {"cuda:0": "cpu"},
        lambda storage, _: storage,
        lambda *_: None,
    ],
)
def test_map_location(map_location: Any, mmap: bool | None, tmp_path: Path) -> None:
    state = STATES["views"]()
    checkpoint.save(state, tmp_path / "state")
    loaded = checkpoint.load(tmp_path / "state", map_location, mmap)
    assert same(loaded, state) and sharing(loaded) == sharing(state)


def test_map_location_can_be_the_meta_device(tmp_path: Path) -> None:
    checkpoint.save({"a": numbers(3)}, tmp_path / "state")
    loaded = checkpoint.load(tmp_path / "state", "meta")
    assert loaded["a"].is_meta and loaded["a"].shape == (3,)


def test_a_function_hears_where_tensors_were_saved_from(tmp_path: Path) -> None:
    checkpoint.save({"a": numbers(3)}, tmp_path / "state")
    heard = []
    checkpoint.load(tmp_path / "state", lambda storage, location: heard.append((storage.nbytes(), location)))
    assert heard == [(12, "cpu")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_missing_is_named(tmp_path: Path) -> None:
    checkpoint.save({"a": numbers(3)}, tmp_path / "state")
    with pytest.raises(penstock.DeviceUnavailable, match="map_location='cpu'"):
        checkpoint.load(tmp_path / "state", "cuda:0")
    with pytest.raises(penstock.InvalidArgument, match="is not a device"):
        checkpoint.load(tmp_path / "state", "abacus")


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("mmap", [True, False])
def test_tensors_of_other_devices_pass_through_host_memory(
    mmap: bool, wait: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here all are treated as if they were elsewhere; tests/gpu has real ones."""
    for module in ("contents", "reading", "loading"):
        monkeypatch.setattr(f"penstock.checkpoint.{module}.is_on_host", lambda _: False)
    state = STATES["several pieces"]()
    if handle := checkpoint.save(state, tmp_path / "state", wait=wait):
        handle.wait()
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    assert same(checkpoint.load(tmp_path / "state", mmap=mmap, into=target), state)
    monkeypatch.undo()
    assert same(checkpoint.load(tmp_path / "state", mmap=mmap), state)
