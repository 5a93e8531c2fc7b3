"""However packing was interrupted, the same call goes on, and makes the same store as if it had not been."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidArgument, SampleError
from penstock.samples import progress
from penstock.samples.packing import FlushPolicy, pack, pack_source
from penstock.samples.places import StoreFolder
from penstock.samples.sources import open_source
from tests.support.folders import folder_in_memory
from tests.support.packing import (
    Listed,
    Seekable,
    Stopped,
    contents,
    expected,
    pack_often,
    recipe_of,
    samples_of,
)


def _stop(
    source: Listed, folder: Path, error: type[BaseException] = Stopped, data_file_bytes: int = 1 << 40
) -> None:
    with pytest.raises(error):
        pack_often(source, folder, data_file_bytes=data_file_bytes)


@settings(max_examples=12)
@given(
    st.sampled_from([Listed, Seekable]),
    st.lists(st.integers(0, 12), min_size=1, max_size=2),
    st.lists(st.integers(1, 7), max_size=3),
    st.sampled_from([1500, 20000, 1 << 40]),
)
def test_the_store_is_the_same_wherever_packing_stopped(
    kind: type[Listed], stops: list[int], blocks: list[int], data_file_bytes: int
) -> None:
    items = samples_of(12)
    labels = [index % 4 - 1 for index in range(12)]
    source = kind(items, labels=labels, classes=("a", "b", "c"))
    with folder_in_memory() as made:
        folder = Path(made, "store")
        for stop in stops:
            _stop(replace(source, stop=stop), folder, data_file_bytes=data_file_bytes)
            assert not (folder / "store.json").exists()
        pack_often(replace(source, blocks=tuple(blocks)), folder, data_file_bytes=data_file_bytes)
        assert contents(folder) == expected(
            Path(made, "wanted"),
            items,
            data_file_bytes=data_file_bytes,
            labels=labels,
            classes=["a", "b", "c"],
        )


def test_a_checkpoint_inside_a_block_is_found_again(tmp_path: Path) -> None:
    items = samples_of(20)
    _stop(Listed(items, stop=7), tmp_path / "store")
    pack_often(Listed(items, blocks=(5, 15)), tmp_path / "store")
    assert contents(tmp_path / "store") == expected(tmp_path / "wanted", items)


def test_what_came_after_the_last_checkpoint_is_packed_anew(tmp_path: Path) -> None:
    items = samples_of(20)
    folder = tmp_path / "store"
    _stop(Listed(items, stop=7), folder)
    with (folder / "data-00000.bin").open("ab") as file:  # as a killed process could leave it
        file.write(b"half a sample")
    (folder / "data-00001.bin").write_bytes(b"the next")
    (folder / "lookup.bin").write_bytes(b"half a lookup")
    pack_often(Listed(items), folder)
    assert contents(folder) == expected(tmp_path / "wanted", items)


def test_packing_that_was_stopped_once_whole_is_made_whole_again(tmp_path: Path) -> None:
    items = samples_of(20)
    folder = tmp_path / "store"
    _stop(Listed(items, stop=20), folder)
    left = (folder / "packing.json").read_bytes()
    pack_often(Listed(items), folder)
    (folder / "packing.json").write_bytes(left)  # killed just before it was removed
    pack_often(Listed(items), folder)
    assert contents(folder) == expected(tmp_path / "wanted", items)


def test_ctrl_c_loses_nothing(tmp_path: Path) -> None:
    items = samples_of(20)
    folder = tmp_path / "store"
    with pytest.raises(KeyboardInterrupt):
        pack(Listed(items, stop=11, error=KeyboardInterrupt), folder, 4096)
    told = list[int]()
    pack(Seekable(items), folder, 4096, progress=lambda samples, _: told.append(samples))
    assert min(told) >= 11
    assert contents(folder) == expected(tmp_path / "wanted", items)


def test_a_source_that_can_begin_anywhere_is_not_read_again(tmp_path: Path) -> None:
    items = samples_of(20)
    _stop(Seekable(items, stop=11), tmp_path / "store")
    unreadable = [(name, data if index >= 11 else None) for index, (name, data) in enumerate(items)]
    pack_often(Seekable(unreadable), tmp_path / "store")  # type: ignore[arg-type]
    assert contents(tmp_path / "store") == expected(tmp_path / "wanted", items)


def test_progress_counts_what_was_packed_before(tmp_path: Path) -> None:
    items = samples_of(20)
    for kind in (Listed, Seekable):
        folder = tmp_path / kind.__name__
        _stop(kind(items, stop=11), folder)
        told = list[tuple[int, int]]()
        pack_often(kind(items), folder, report=lambda *so_far, told=told: told.append(so_far))
        assert told == sorted(told)
        assert told[-1] == (20, sum(len(data) for _, data in items))


@pytest.mark.parametrize("kind", [Listed, Seekable])
def test_a_source_with_other_names_is_noticed(kind: type[Listed], tmp_path: Path) -> None:
    items = samples_of(20)
    _stop(kind(items, stop=11), tmp_path / "store")
    renamed = [*items[:10], ("other/10", items[10][1]), *items[11:]]
    with pytest.raises(SampleError, match=r"source has changed.*resume=False"):
        pack_often(kind(renamed), tmp_path / "store")
    pack_often(kind(renamed), tmp_path / "store", resume=False)
    assert contents(tmp_path / "store") == expected(tmp_path / "wanted", renamed)


def test_a_source_with_other_bytes_is_noticed(tmp_path: Path) -> None:
    items = samples_of(20)
    _stop(Listed(items, stop=11), tmp_path / "store")
    name, data = items[4]
    changed = [*items[:4], (name, bytes([data[0] ^ 1]) + data[1:]), *items[5:]]
    with pytest.raises(SampleError, match="sample 4 is another now"):
        pack_often(Listed(changed), tmp_path / "store")


@pytest.mark.parametrize("kind", [Listed, Seekable])
def test_a_source_that_lost_samples_is_noticed(kind: type[Listed], tmp_path: Path) -> None:
    items = samples_of(20)
    _stop(kind(items, stop=11), tmp_path / "store")
    with pytest.raises(SampleError, match="it has 5 samples, and 11 were packed"):
        pack_often(kind(items[:5]), tmp_path / "store")


def test_other_options_are_refused(tmp_path: Path) -> None:
    items, folder = samples_of(20), tmp_path / "store"
    _stop(Listed(items, stop=11), folder)
    with pytest.raises(SampleError, match="begun with chunk_bytes=4096, not 8192"):
        pack(Listed(items), folder, 8192)
    with pytest.raises(SampleError, match=r"begun with a source with size_bytes=None, not 5"):
        pack(Listed(items, size_bytes=5), folder, 4096)
    with pytest.raises(SampleError, match="encoding='raw', not 'msgpack'"):
        pack(Listed(items, encoding="msgpack"), folder, 4096)
    pack(Listed(items), folder, 8192, resume=False)
    assert contents(folder) == expected(tmp_path / "wanted", items, chunk_bytes=8192)


@pytest.mark.parametrize("damage", ["cut", "flipped", "other", "empty"])
def test_damaged_progress_is_refused(damage: str, tmp_path: Path) -> None:
    items, folder = samples_of(20), tmp_path / "store"
    _stop(Listed(items, stop=11), folder)
    path = folder / "packing.json"
    data = path.read_bytes()
    path.write_bytes(
        {
            "cut": data[: len(data) // 2],
            "flipped": data.replace(b'"samples":11', b'"samples":10'),
            "other": b'{"schema":"penstock.plan/1","value":{}}',
            "empty": b"",
        }[damage]
    )
    with pytest.raises(SampleError, match="resume=False"):
        pack_often(Listed(items), folder)
    pack_often(Listed(items), folder, resume=False)
    assert contents(folder) == expected(tmp_path / "wanted", items)


@pytest.mark.parametrize("file", ["data-00000.bin", "names.bin", "sums.bin"])
def test_files_that_lost_their_end_are_refused(file: str, tmp_path: Path) -> None:
    items, folder = samples_of(20), tmp_path / "store"
    _stop(Listed(items, stop=11), folder)
    path = folder / file
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SampleError, match=f"{file} has .* were packed"):
        pack_often(Listed(items), folder)


def test_metadata_may_change_on_the_way(tmp_path: Path) -> None:
    items, folder = samples_of(20), tmp_path / "store"
    _stop(Listed(items, stop=11), folder)
    assert pack(Listed(items), folder, 4096, metadata={"a": "b"}).metadata == {"a": "b"}


def test_a_sample_that_does_not_fit_is_named_and_the_rest_is_kept(tmp_path: Path) -> None:
    items, folder = samples_of(20), tmp_path / "store"
    for bad, says in [("", "name"), ("x" * 70000, "name"), ("\ud800", "surrogates")]:
        with pytest.raises(InvalidArgument, match=rf"after 11 others, cannot be packed: .*{says}"):
            pack_often(Listed([*items[:11], (bad, b"")]), folder)
    pack_often(Listed(items), folder)
    assert contents(folder) == expected(tmp_path / "wanted", items)


def test_few_checkpoints_are_made_of_much(tmp_path: Path) -> None:
    """A checkpoint waits for the disk: there is one for so many bytes, not for each sample."""
    items = samples_of(200)
    folder, seen = tmp_path / "store", set[bytes]()

    def look(*_: int) -> None:
        seen.add((folder / "packing.json").read_bytes())

    policy = FlushPolicy(flush_bytes=1 << 10, checkpoint_bytes=32 << 10, checkpoint_s=1e9)
    pack_source(Listed(items), folder, recipe_of(Listed(items)), metadata={}, policy=policy, report=look)
    assert len(seen) <= 2 + sum(len(data) for _, data in items) // (32 << 10)
    assert StoreFolder(folder).manifest().samples == 200


@pytest.mark.parametrize("kind", ["folder", "arrays", "fields"])
def test_sources_of_every_kind_go_on(kind: str, tmp_path: Path) -> None:
    for name, data in samples_of(30):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_bytes(data)
    source: Any = {
        "folder": tmp_path / "tree",
        "arrays": {"x": np.arange(2 << 20).reshape(-1, 2), "y": np.ones(1 << 20)},  # several blocks
        "fields": [(str(number), {"number": number}) for number in range(30)],
    }[kind]
    left = [3]

    def stop(samples: int, _: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Stopped

    with pytest.raises(Stopped):
        pack_often(open_source(source), tmp_path / "store", report=stop)
    found = progress.read(tmp_path / "store")
    assert found is not None and found.samples > 0
    pack_often(open_source(source), tmp_path / "store")
    pack(source, tmp_path / "wanted", 4096)
    assert contents(tmp_path / "store") == contents(tmp_path / "wanted")


def test_a_state_of_another_version_is_refused(tmp_path: Path) -> None:
    items, folder = samples_of(20), tmp_path / "store"
    _stop(Seekable(items, stop=11), folder)
    found = progress.read(folder)
    assert found is not None
    msgspec.structs.replace(found, state=b"of another version").save(folder / progress.PROGRESS)
    with pytest.raises(SampleError, match=r"another version.*resume=False"):
        pack_often(Seekable(items), folder)


def test_a_disk_that_is_too_small_is_told_beforehand(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pack(Listed(samples_of(3), size_bytes=1 << 60), tmp_path / "store")
    assert "make room there, or packing will stop" in caplog.text
