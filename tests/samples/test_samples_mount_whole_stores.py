"""What is mounted is whole, and what is not says what to do about it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import InvalidArgument, InvalidFile, PenstockError, SampleError
from penstock.samples.places import StoreFolder
from penstock.samples.reading import choose_io
from penstock.samples.store import mount
from tests.support.sample_stores import some_samples
from tests.support.stores import crc32c, write_store


def write_partitions(folder: Path, partitions: int) -> None:
    for partition in range(partitions):
        content = some_samples(10, partition)
        write_store(
            folder / f"part-{partition:05d}-of-{partitions:05d}",
            content,
            part=partition,
            parts=partitions,
        )


def rewrite(path: Path, **fields: Any) -> None:
    """Change fields of a manifest, whose checksum is right all the same."""
    document = json.loads(path.read_text())
    document["value"] |= {**fields, "crc32c": 0}
    document["value"]["crc32c"] = crc32c(json.dumps(document["value"], separators=(",", ":")).encode())
    path.write_text(json.dumps(document))


def refused(path: Any, kind: type[PenstockError] = SampleError, **options: Any) -> str:
    with pytest.raises(kind) as refusal:
        mount(path, **options)
    return str(refusal.value)


def test_a_manifest_is_read_where_the_file_system_knows_no_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_size(descriptor: int) -> os.stat_result:
        return os.stat_result((*os.stat(descriptor)[:6], 0, 0, 0, 0))

    write_store(tmp_path, some_samples(10))
    monkeypatch.setattr(os, "fstat", without_size)
    assert StoreFolder(tmp_path).manifest().samples == 10


def test_partitions_are_mounted_in_order(tmp_path: Path) -> None:
    write_partitions(tmp_path, 12)
    with mount(tmp_path) as store:
        assert len(store) == 120
        assert [store.name(index) for index in (0, 15, 119)] == ["0/0", "1/5", "11/9"]
        assert store.read("7/3") == some_samples(10, 7)[3][1]
        assert len(store.manifests) == 12


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    write_partitions(tmp_path, 4)
    shutil.rmtree(tmp_path / "part-00001-of-00004")
    (tmp_path / "part-00003-of-00004" / "store.json").unlink()
    text = refused(tmp_path)
    assert "part-00001-of-00004, part-00003-of-00004 are missing" in text
    assert "4 partitions" in text
    with mount([tmp_path / "part-00002-of-00004", tmp_path / "part-00000-of-00004"]) as store:
        assert store.name(0) == "2/0"


def test_partitions_of_two_packings_are_not_mixed(tmp_path: Path) -> None:
    write_partitions(tmp_path, 2)
    write_partitions(tmp_path, 3)
    assert "partitions of 2 and 3" in refused(tmp_path)


def test_a_part_is_what_its_name_says(tmp_path: Path) -> None:
    write_store(tmp_path / "part-00000-of-00002", [], part=0, parts=2)
    write_store(tmp_path / "part-00001-of-00002", [], part=0, parts=2)
    assert "partition 0 of 2, which its name denies" in refused(tmp_path, InvalidFile)


def test_no_store_says_what_to_do(tmp_path: Path) -> None:
    assert "penstock samples pack" in refused(tmp_path / "none")
    assert "penstock samples pack" in refused(tmp_path)
    (tmp_path / "file").write_text("text")
    assert "penstock samples pack" in refused(tmp_path / "file")
    assert "no store was given" in refused([], InvalidArgument)


def test_unfinished_packing_is_no_store(tmp_path: Path) -> None:
    write_store(tmp_path, some_samples())
    (tmp_path / "store.json").unlink()
    assert "packing was not finished. Run pack again" in refused(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    content = some_samples()
    for name in ("directory.bin", "sums.bin", "chunks.bin", "labels.bin", "data-00002.bin"):
        write_store(tmp_path, content, data_file_bytes=50_000, labels=[0] * len(content))
        (tmp_path / name).unlink()
        text = refused(tmp_path, InvalidFile)
        assert f"{tmp_path / name} is missing" in text
        assert "pack the store again" in text


def test_files_of_names_are_looked_at_when_names_are_needed(tmp_path: Path) -> None:
    content = some_samples()
    write_store(tmp_path, content)
    (tmp_path / "lookup.bin").unlink()
    with mount(tmp_path) as store:
        assert store.read(5) == content[5][1]
        with pytest.raises(InvalidFile, match=r"lookup.bin is missing"):
            store.read("0/5")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chunk_bytes", 4097),
        ("chunk_bytes", 0),
        ("chunk_bytes", 1 << 40),
        ("samples", 99),
        ("samples", -1),
        ("nodes", []),
        ("nodes", [{"samples": 100, "chunks": 0, "size_bytes": 0}]),
        ("nodes", [{"samples": 100, "chunks": 1 << 60, "size_bytes": 1 << 72}]),
        ("files", {}),
        ("part", 1),
        ("parts", 0),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(tmp_path: Path, field: str, value: Any) -> None:
    write_store(tmp_path, some_samples())
    rewrite(tmp_path / "store.json", **{field: value})
    assert str(tmp_path / "store.json") in refused(tmp_path, InvalidFile)


def test_a_later_version_is_refused(tmp_path: Path) -> None:
    write_store(tmp_path, some_samples())
    path = tmp_path / "store.json"
    path.write_text(path.read_text().replace("storemanifest/1", "storemanifest/2"))
    assert "storemanifest/2" in refused(tmp_path, InvalidFile)
    write_store(tmp_path, some_samples(), encoding="brotli")
    assert "brotli" in refused(tmp_path, InvalidFile)


def test_stores_that_differ_are_not_mounted_together(tmp_path: Path) -> None:
    write_store(tmp_path / "a", some_samples(5, 1), classes=["cat"], labels=[0] * 5)
    write_store(tmp_path / "b", some_samples(5, 2), classes=["dog"], labels=[0] * 5)
    assert "classes differ" in refused([tmp_path / "a", tmp_path / "b"], InvalidArgument)


def test_labels_count_through(tmp_path: Path) -> None:
    classes = ["cat", "dog"]
    write_store(tmp_path / "a", some_samples(4, 1), classes=classes, labels=[0, 1, 1, -1])
    write_store(tmp_path / "b", some_samples(2, 2), classes=classes)
    with mount([tmp_path / "a", tmp_path / "b"]) as store:
        assert store.classes == ("cat", "dog")
        assert store.labels is not None
        assert store.labels.tolist() == [0, 1, 1, -1, -1, -1]
        batch = store.read_many([5, 1])
        assert batch.labels is not None
        assert batch.labels.tolist() == [-1, 1]
    with mount(tmp_path / "b") as store:
        assert store.labels is None is store.read_many([0]).labels


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("order", "random"),
        ("io", "fast"),
        ("on_damage", "ignore"),
        ("rank", 2),
        ("rank", -1),
        ("world_size", 0),
        ("timeout_s", 0),
        ("cache_bytes", 4096),
        ("cache_bytes", "much"),
        ("copy_threads", -1),
    ],
)
def test_arguments_that_make_no_sense_are_refused(tmp_path: Path, option: str, value: Any) -> None:
    write_store(tmp_path, some_samples())
    with pytest.raises(PenstockError, match=str(value)):
        mount(tmp_path, **{option: value})


def test_the_io_path_follows_from_memory() -> None:
    assert choose_io("auto", 100, 1000, True).io == "buffered"
    assert choose_io("auto", 600, 1000, True).io == "direct"
    assert "500 B" in choose_io("auto", 500, 999, True).reason
    assert choose_io("auto", 600, 1000, False).io == "buffered"
    assert choose_io("direct", 1, 1000, False).io == "buffered"
    assert choose_io("direct", 1, 1000, True).io == "direct"
    assert choose_io("buffered", 600, 1000, True).io == "buffered"
