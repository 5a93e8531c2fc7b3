"""What is packed is, byte for byte, what docs/formats.md says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidArgument
from penstock.samples.packing import pack
from penstock.samples.places import StoreFolder
from tests.support import stores
from tests.support.folders import folder_in_memory
from tests.support.packing import Listed, contents, expected, pack_often, samples_of

_SIZES = st.one_of(
    st.integers(0, 50), st.sampled_from([0, 1, 1023, 1024, 1025, 4095, 4096, 4097]), st.integers(0, 20000)
)
_NAMES = st.text(min_size=1, max_size=20).filter(
    lambda name: name.encode("utf-8", "replace").decode() == name
)


@st.composite
def _items(draw: st.DrawFn) -> list[tuple[str, bytes]]:
    names = draw(st.lists(_NAMES, unique=True, min_size=1, max_size=40))
    return [(name, draw(st.binary(min_size=1, max_size=8)) * draw(_SIZES)) for name in names]


@settings(max_examples=25)
@given(_items(), st.sampled_from([1, 20000, 1 << 40]), st.lists(st.integers(1, 20), max_size=3))
def test_any_samples_make_the_files_of_the_format(
    items: list[tuple[str, bytes]], data_file_bytes: int, blocks: list[int]
) -> None:
    data_file_bytes = max(data_file_bytes, *(len(data) for _, data in items))
    with folder_in_memory() as made:
        source = Listed(items, blocks=tuple(blocks))
        pack(source, Path(made, "store"), 4096, data_file_bytes=data_file_bytes)
        wanted = expected(Path(made, "wanted"), items, data_file_bytes=data_file_bytes)
        assert contents(Path(made, "store")) == wanted


@settings(max_examples=8)
@given(st.integers(1, 20), st.integers(1, 5000))
def test_how_often_packing_writes_changes_nothing(count: int, size_bytes: int) -> None:
    items = samples_of(count, size_bytes)
    with folder_in_memory() as made:
        pack_often(Listed(items), Path(made, "store"), data_file_bytes=12000)
        assert contents(Path(made, "store")) == expected(Path(made, "wanted"), items, data_file_bytes=12000)


def test_nothing_makes_a_store_of_no_samples(tmp_path: Path) -> None:
    made = pack([], tmp_path / "store")
    assert made.samples == 0 and made.data_files == ()
    assert stores.read_store(tmp_path / "store") == []
    assert StoreFolder(tmp_path / "store").manifest() == made


def test_labels_metadata_and_the_source_are_kept(tmp_path: Path) -> None:
    items, labels = samples_of(5), [0, 1, -1, 1, 0]
    source = Listed(items, labels=labels, classes=("cat", "dog"))
    made = pack(source, tmp_path / "store", "4KiB", metadata={"licence": "CC0"})
    wanted = expected(
        tmp_path / "wanted", items, labels=labels, classes=["cat", "dog"], metadata={"licence": "CC0"}
    )
    assert contents(tmp_path / "store") == wanted
    assert made.metadata == {"licence": "CC0"} and made.source == "a list"


def test_samples_of_8_mib_and_more_keep_their_length(tmp_path: Path) -> None:
    items = [("one", b"\1" * 3), ("large", b"\2" * stores.LARGE), ("another", b"")]
    pack(Listed(items), tmp_path / "store")
    assert stores.read_store(tmp_path / "store") == items
    assert (tmp_path / "store" / "large.bin").stat().st_size == 16


def test_processes_pack_disjoint_partitions(tmp_path: Path) -> None:
    items = samples_of(10)
    for rank in range(3):
        pack(Listed(items), tmp_path / "store", rank=rank, world_size=3)
    folders = [tmp_path / "store" / f"part-{rank:05d}-of-00003" for rank in range(3)]
    assert [stores.read_store(folder) for folder in folders] == [items[rank::3] for rank in range(3)]
    assert [
        (made.partition, made.partitions) for made in (StoreFolder(folder).manifest() for folder in folders)
    ] == [(rank, 3) for rank in range(3)]


def test_iterables_and_their_fields_can_be_packed(tmp_path: Path) -> None:
    made = pack([("a", {"x": 1}), ("b", {"x": 2})], tmp_path / "fields")
    assert made.encoding == "msgpack" and made.samples == 2
    pack((pair for pair in [("a", b"1"), ("b", b"2")]), tmp_path / "generated")
    assert stores.read_store(tmp_path / "generated") == [("a", b"1"), ("b", b"2")]


def test_progress_ends_with_everything(tmp_path: Path) -> None:
    items, told = samples_of(50), list[tuple[int, int]]()
    pack(
        Listed(items),
        tmp_path / "store",
        progress=lambda samples, size_bytes: told.append((samples, size_bytes)),
    )
    assert told == sorted(told) and told[-1] == (50, sum(len(data) for _, data in items))


def test_the_manifest_returned_is_the_one_written(tmp_path: Path) -> None:
    made = pack(Listed(samples_of(3)), tmp_path / "store")
    assert StoreFolder(tmp_path / "store").manifest() == made
    document = json.loads((tmp_path / "store" / "store.json").read_text())
    assert document["schema"] == "penstock.storemanifest/1"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"chunk_bytes": 1000}, "multiple of 4096"),
        ({"chunk_bytes": 0}, "multiple of 4096"),
        ({"chunk_bytes": "2GiB"}, "up to 1.00 GiB"),
        ({"chunk_bytes": "a lot"}, "not a size"),
        ({"data_file_bytes": 0}, "at most 1.00 TiB"),
        ({"data_file_bytes": "2TiB"}, "at most 1.00 TiB"),
        ({"rank": 2, "world_size": 2}, "rank=2"),
        ({"metadata": {"a": 1}}, "give text"),
        ({"format": "zip"}, "unknown"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_cannot_be_used_are_refused(
    options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises((InvalidArgument, ValueError), match=says):
        pack([("a", b"")], tmp_path / "store", **options)
    assert not (tmp_path / "store").exists()
