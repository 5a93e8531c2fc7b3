"""`penstock.samples.unpack` gives samples back as files, byte for byte, and writes nowhere else."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import InvalidArgument, SampleError
from penstock.samples import unpacking
from penstock.samples.encoding import encode
from penstock.samples.unpacking import unpack
from tests.support.stores import write_store

SAMPLES = [
    ("cat/1.jpg", b"meow"),
    ("cat/deep/er/2.jpg", b""),
    ("dog/1.jpg", b"woof" * 5000),
    ("読む.txt", b"text"),
    ("no utf-8 \udcff", b"\0"),
    ("top", b"x"),
]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    write_store(tmp_path / "store", SAMPLES)
    return tmp_path / "store"


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if not path.is_dir()
    }


def packed(tmp_path: Path, *names: str) -> Path:
    write_store(tmp_path / "store", [(name, name.encode("utf-8", "surrogateescape")) for name in names])
    return tmp_path / "store"


def test_every_sample_comes_back_under_its_name(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacking, "BATCH_SAMPLES", 4)
    monkeypatch.setattr(unpacking, "BATCH_BYTES", 3)
    told: list[tuple[int, int]] = []
    assert unpack(store, tmp_path / "new" / "out", progress=lambda *so_far: told.append(so_far)) == 6
    assert files(tmp_path / "new" / "out") == dict(SAMPLES)
    assert told[-1] == (6, sum(len(data) for _, data in SAMPLES))


def test_only_what_is_asked_for_comes_back(store: Path, tmp_path: Path) -> None:
    assert unpack(store, tmp_path / "out", ["top", "dog/1.jpg"]) == 2
    assert files(tmp_path / "out") == {"top": b"x", "dog/1.jpg": b"woof" * 5000}
    with pytest.raises(InvalidArgument, match="cow"):
        unpack(store, tmp_path / "out", ["cow"])


@pytest.mark.parametrize(
    "name",
    [
        "/etc/x",
        "../x",
        "a/../../x",
        "a//b",
        "a/",
        "/",
        ".",
        "..",
        "./x",
        "",
        "a\0b",
        "x" * 256,
        "a/" + "ä" * 128,
    ],
)
def test_names_that_are_no_files_in_the_folder_are_refused_before_anything_is_written(
    name: str, tmp_path: Path
) -> None:
    store = packed(tmp_path, "good", name)
    with pytest.raises(SampleError, match="nothing was written"):
        unpack(store, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not (tmp_path / "x").exists()


def test_a_name_that_is_the_folder_of_another_is_refused(tmp_path: Path) -> None:
    store = packed(tmp_path, "a/b/c", "a/b")
    with pytest.raises(SampleError, match="'a/b' would be a file, and also the folder of others"):
        unpack(store, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_flat_names_take_anything(tmp_path: Path) -> None:
    names = [
        "/etc/x",
        "../x",
        "a//b",
        "a%2F%2Fb",
        "a",
        "a/b",
        ".",
        "..",
        "a\0b",
        "no\udcff",
        "n\nl",
        "plain.txt",
    ]
    store = packed(tmp_path, *names)
    assert unpack(store, tmp_path / "out", flat=True) == len(names)
    found = files(tmp_path / "out")
    assert sorted(found.values()) == sorted(name.encode("utf-8", "surrogateescape") for name in names)
    assert {"%2Fetc%2Fx", "..%2Fx", "%2E", "%2E%2E", "plain.txt"} <= found.keys()


@pytest.mark.parametrize("overwrite", [False, True])
def test_links_in_the_folder_are_not_followed(store: Path, tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "dog").symlink_to(tmp_path / "outside")
    with pytest.raises(SampleError, match="in the way of a folder"):
        unpack(store, tmp_path / "out", ["dog/1.jpg"], overwrite=overwrite)
    assert not any((tmp_path / "outside").iterdir())


def test_a_link_under_the_name_itself_is_replaced_and_not_written_through(
    store: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "precious").write_bytes(b"precious")
    (tmp_path / "out" / "top").symlink_to(tmp_path / "precious")
    with pytest.raises(SampleError, match="Remove it"):
        unpack(store, tmp_path / "out", ["top"])
    unpack(store, tmp_path / "out", ["top"], overwrite=True)
    assert (tmp_path / "precious").read_bytes() == b"precious"
    assert (tmp_path / "out" / "top").read_bytes() == b"x" and not (tmp_path / "out" / "top").is_symlink()


def test_files_that_are_there_stay_unless_told(store: Path, tmp_path: Path) -> None:
    unpack(store, tmp_path / "out")
    (tmp_path / "out" / "top").write_bytes(b"mine")
    with pytest.raises(SampleError, match="let it be replaced"):
        unpack(store, tmp_path / "out", ["top"])
    assert (tmp_path / "out" / "top").read_bytes() == b"mine"
    unpack(store, tmp_path / "out", overwrite=True)
    assert files(tmp_path / "out") == dict(SAMPLES)


def test_a_full_disk_leaves_no_part_of_a_file(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(SampleError, match=r"dog/1.jpg cannot be written: No space left.* Free space"):
        unpack(store, tmp_path / "out", ["dog/1.jpg"])
    assert files(tmp_path / "out") == {}


def test_a_damaged_sample_is_not_written(store: Path, tmp_path: Path) -> None:
    content = bytearray((store / "data-00000.bin").read_bytes())
    content[0] ^= 1
    (store / "data-00000.bin").write_bytes(content)
    with pytest.raises(SampleError, match=r"cat/1\.jpg"):
        unpack(store, tmp_path / "out")
    assert "cat/1.jpg" not in files(tmp_path / "out")


def test_fields_become_files_of_a_folder(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    sample = {"jpg": b"\xff\xd8", "cls": 3, "x": array, "note": {"tags": ["a"], "of": np.arange(2)}}
    write_store(tmp_path / "store", [("a/1", encode(sample)), ("a/2", encode({}))], encoding="msgpack")
    assert unpack(tmp_path / "store", tmp_path / "out") == 2
    out = tmp_path / "out" / "a"
    assert (out / "1" / "jpg").read_bytes() == b"\xff\xd8"
    assert np.array_equal(np.load(out / "1" / "x.npy"), array)
    assert json.loads((out / "1" / "fields.json").read_text()) == {
        "cls": 3,
        "note": {"tags": ["a"], "of": [0, 1]},
    }
    assert json.loads((out / "2" / "fields.json").read_text()) == {}


@pytest.mark.parametrize("field", ["../x", "/x", "", ".", "..", "fields.json", "a\0"])
def test_fields_that_are_no_files_names_are_refused(field: str, tmp_path: Path) -> None:
    write_store(tmp_path / "store", [("1", encode({field: b"x"}))], encoding="msgpack")
    with pytest.raises(SampleError, match="cannot be a file name"):
        unpack(tmp_path / "store", tmp_path / "out")
    assert not [name for name in files(tmp_path) if name.endswith("x") and "store" not in name]
