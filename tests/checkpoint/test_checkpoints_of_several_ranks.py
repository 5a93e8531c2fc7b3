"""torch.distributed.checkpoint through penstock's files: what ranks save comes back, on any number."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import penstock
from penstock.checkpoint.dcp import INDEX, Reader, Writer
from penstock.errors import CheckpointError, InvalidFile
from tests.support.ranks import together

SCRIPT = Path(__file__).parents[1] / "distributed" / "shards.py"


def numbers(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def state(seed: int = 0) -> dict[str, Any]:
    return {
        "model": {"weight": numbers(6000, seed).view(60, 100), "bias": numbers(3, seed).to(torch.bfloat16)},
        "transposed": numbers(1200, seed).view(30, 40).t(),
        "empty": torch.empty(0, 4),
        "list": [numbers(5, seed), {"step": 3 + seed, "name": "gpt", "lr": 0.5}],
        "flag": True,
    }


def save(value: Any, directory: Path) -> None:
    dcp.save(value, storage_writer=Writer(directory), no_dist=True)


def loaded(value: Any, directory: Path) -> Any:
    dcp.load(value, storage_reader=Reader(directory), no_dist=True)
    return value


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(wanted, torch.Tensor):
        return found.dtype == wanted.dtype and torch.equal(found, wanted)
    return bool(found == wanted)


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    save(state(), tmp_path)
    into = state(1)
    address = into["model"]["weight"].data_ptr()
    assert same(loaded(into, tmp_path), state())
    assert into["model"]["weight"].data_ptr() == address


def test_a_part_of_it_comes_back(tmp_path: Path) -> None:
    save(state(), tmp_path)
    assert same(loaded({"model": {"bias": torch.zeros(3, dtype=torch.bfloat16)}}, tmp_path)["model"]["bias"],
                state()["model"]["bias"])  # fmt: skip


def test_tied_weights_are_written_once_and_come_back(tmp_path: Path) -> None:
    weight = numbers(1 << 18)
    save({"a": weight, "b": weight, "half": weight[: 1 << 17]}, tmp_path)
    files = list(tmp_path.glob("save-*/*"))
    assert sum(path.stat().st_size for path in files) < 1.1 * weight.nbytes
    into = {"a": torch.zeros(1 << 18), "b": torch.zeros(1 << 18), "half": torch.zeros(1 << 17)}
    loaded(into, tmp_path)
    assert torch.equal(into["a"], weight) and torch.equal(into["b"], weight)
    assert torch.equal(into["half"], weight[: 1 << 17])


@pytest.mark.slow
def test_shards_of_four_ranks_come_back_on_two_and_on_one(tmp_path: Path) -> None:
    def digests(ranks: int, action: str) -> list[str]:
        return together(ranks, SCRIPT, action, tmp_path).split()[1:]

    wanted = digests(4, "save")
    for how in ("now", "later"):
        written = sorted(path.name for path in (tmp_path / how).glob("save-*/*"))
        assert written == [f"rank-{rank}.safetensors" for rank in range(4)]
    assert digests(2, "load") == digests(1, "load") == [*wanted, *wanted]


def test_the_old_checkpoint_is_valid_until_the_new_one_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(state(), tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "finish", killed)
        with pytest.raises(BaseException, match=r"|KeyboardInterrupt"):
            save(state(1), tmp_path)
    assert {path: path.read_bytes() for path in before} == before
    assert same(loaded(state(2), tmp_path), state())
    assert len(list(tmp_path.glob("save-*"))) == 2
    save(state(1), tmp_path)
    assert same(loaded(state(2), tmp_path), state(1))
    assert len(list(tmp_path.glob("save-*"))) == 1, "what was left of the others is gone"


def test_damage_is_found_and_named(tmp_path: Path) -> None:
    save(state(), tmp_path)
    (file,) = tmp_path.glob("save-*/*")
    content = bytearray(file.read_bytes())
    needle = state()["model"]["weight"].numpy().tobytes()
    content[content.index(needle) + 1234] ^= 1
    file.write_bytes(content)
    with pytest.raises(BaseException, match=r"checksum of model\.weight"):
        loaded(state(1), tmp_path)
    # What is not asked for is not read.
    assert same(loaded({"flag": False}, tmp_path), {"flag": True})


def test_an_index_is_not_trusted(tmp_path: Path) -> None:
    save(state(), tmp_path / "state")
    index = penstock.load(tmp_path / "state" / INDEX)
    reader = Reader(tmp_path / "state")

    def refused(words: str, **changes: Any) -> None:
        penstock.save({**index, **changes}, tmp_path / "state" / INDEX)
        with pytest.raises(InvalidFile, match=words):
            reader.read_metadata()

    outside = {"flag": ["../../etc/passwd", "flag"]}
    refused("no file of a checkpoint", state=outside)
    refused("no file of a checkpoint", state={"flag": ["save-0123456789abcdef/../x", "flag"]})
    refused("another format", format="else")
    refused("cannot read", version=2)
    refused("no index", state={"weight": {"dtype": 3, "size": [1], "chunks": []}})
    refused("no index", state=7)
    (tmp_path / "state" / INDEX).write_bytes(b"\x00" * 100)
    with pytest.raises(InvalidFile):
        reader.read_metadata()
    (tmp_path / "state" / INDEX).unlink()
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        reader.read_metadata()


class Trap:
    def __reduce__(self) -> Any:
        return os.system, ("touch trapped",)


def test_a_pickle_that_could_execute_code_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save({"value": 1}, tmp_path / "state")
    (file,) = (tmp_path / "state").glob("save-*/*")
    buffer = io.BytesIO()
    torch.save(Trap(), buffer)
    pickled = torch.from_numpy(np.frombuffer(buffer.getvalue(), dtype=np.uint8).copy())
    penstock.save({"value": pickled}, file)
    with pytest.raises(BaseException, match="could execute code"):
        loaded({"value": 0}, tmp_path / "state")
    assert not (tmp_path / "trapped").exists()


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(state(), tmp_path)
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, limits[1]))
    try:
        with pytest.raises(BaseException, match="cannot be written"):
            save(state(1), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert same(loaded(state(2), tmp_path), state())


def test_a_planner_is_told_where_it_saves(tmp_path: Path) -> None:
    class Planner(dcp.DefaultSavePlanner):
        def set_up_planner(
            self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
        ) -> None:
            super().set_up_planner(state_dict, storage_meta, is_coordinator)
            asked.append(storage_meta.checkpoint_id)

    asked: list[str] = []
    dcp.save({"weight": torch.ones(3)}, storage_writer=Writer(tmp_path), planner=Planner(), no_dist=True)
    assert asked == [str(tmp_path)]
