"""`penstock samples`: from files to a store, what is in it, and back to files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import cli
from tests.support.stores import read_store, write_store

FILES = {
    "cat/1.txt": b"meow",
    "cat/2.txt": b"m" * 5000,
    "dog/1.txt": b"",
    "dog/a\nb\x1b[31m.txt": b"woof",
    "dog/\udcff.txt": b"no utf-8",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tree(folder: Path) -> Path:
    for name, content in FILES.items():
        path = folder / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (folder / "empty").mkdir()
    return folder / "tree"


@pytest.fixture
def store(tree: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["samples", "pack", "tree", "store"]) == 0
    capsys.readouterr()
    return "store"


def told(capsys: pytest.CaptureFixture[str], *arguments: str, exit_code: int = 0) -> str:
    assert cli.main(["samples", *arguments]) == exit_code
    shown = capsys.readouterr()
    assert shown.err == ""
    return shown.out


def values(capsys: pytest.CaptureFixture[str], *arguments: str, exit_code: int = 0) -> Any:
    return json.loads(told(capsys, *arguments, "--json", exit_code=exit_code))


def test_files_are_packed_and_the_store_is_named(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = told(capsys, "pack", "tree", "store", "--chunk-bytes", "4KiB")
    assert "5 samples" in shown and shown.endswith("wrote store\n")
    assert dict(read_store(Path("store"))) == FILES
    again = values(capsys, "pack", "tree", "store", "--overwrite")
    assert again["samples"] == 5 and again["classes"] == ["cat", "dog"] and again["written"] == ["store"]
    assert again["chunk_bytes"] == 256 << 10


def test_parts_of_several_processes_are_one_store(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        told(capsys, "pack", "tree", "store", "--rank", str(rank), "--world-size", "2")
    found = values(capsys, "info", "store")
    assert found["partitions"] == 2 and found["samples"] == 5
    assert len(values(capsys, "ls", "store")["samples"]) == 5
    assert values(capsys, "verify", "store")["sound"]
    told(capsys, "unpack", "store", "back")
    assert (Path("back") / "cat" / "2.txt").read_bytes() == FILES["cat/2.txt"]


def test_fields_are_packed_by_column_and_unpacked_by_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = np.arange(12.0).reshape(4, 3), np.array([1, 0, 1, 1])
    np.savez(folder / "arrays.npz", x=x, y=y)
    told(capsys, "pack", "arrays.npz", "store", "--label-field", "y")
    found = values(capsys, "info", "store")
    assert [(one["name"], one["samples"]) for one in found["classes"]] == [("0", 1), ("1", 3)]
    assert [field["name"] for field in found["fields"]] == ["x", "y"]
    assert "fields of fixed size" in told(capsys, "info", "store")
    told(capsys, "unpack", "store", "out")
    for row in range(4):
        assert np.array_equal(np.load(f"out/{row}/x.npy"), x[row])
        assert json.loads(Path(f"out/{row}/fields.json").read_text()) == {"y": y[row]}


def test_names_are_listed_in_stored_order(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, "ls", store).splitlines()
    assert lines[:3] == ["cat/1.txt", "cat/2.txt", "dog/1.txt"]
    assert sorted(lines[3:]) == ["dog/\\xff.txt", "dog/a\\nb\\x1b[31m.txt"]
    assert told(capsys, "ls", store, "cat/*").splitlines() == ["cat/1.txt", "cat/2.txt"]
    assert told(capsys, "ls", store, "*1.txt", "--limit", "1") == "cat/1.txt\n"
    assert told(capsys, "ls", store, "nothing") == ""
    titles, line = told(capsys, "ls", store, "cat/2*", "--long").splitlines()
    assert titles.split() == ["index", "bytes", "class", "name"]
    assert line.split() == ["1", "5000", "cat", "cat/2.txt"]
    listed = values(capsys, "ls", store, "--limit", "2")["samples"]
    assert listed[1] == {"index": 1, "name": "cat/2.txt", "size_bytes": 5000, "class": "cat"}
    assert {one["name"] for one in values(capsys, "ls", store)["samples"]} == FILES.keys()


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of POSIX")
def test_a_reader_that_has_seen_enough_is_no_error(folder: Path) -> None:
    write_store(folder / "many", [(f"a long name of a sample {i}", b"x") for i in range(5000)])
    command = f"{sys.executable} -c 'import sys; from penstock import cli; sys.exit(cli.main())'"
    script = f"set -o pipefail; {command} samples ls many | head -n 1"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert done.stdout == "a long name of a sample 0\n"
    assert done.stderr == "" and done.returncode == 0


def test_info_tells_sizes_classes_and_mixing(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = told(capsys, "info", store)
    for said in ("5 samples", "4.90 KiB", "cat", "4.00 KiB to 8.00 KiB", "chunk", "full", "mixing"):
        assert said in shown
    found = values(capsys, "info", store, "--batch", "2", "--cache", "1MiB,2MiB")
    assert found["samples"] == 5 and found["batch"] == 2
    assert {(one["name"], one["samples"]) for one in found["classes"]} == {("cat", 2), ("dog", 3)}
    assert found["sizes"]["smallest_bytes"] == 0 and found["sizes"]["largest_bytes"] == 5000
    assert sum(size["samples"] for size in found["sizes"]["ranges"]) == 5
    # Both caches hold the whole store: the larger one gives nothing new.
    assert [(row["order"], row["cache_bytes"]) for row in found["mixing"]] == [
        ("chunk", 1 << 20),
        ("full", None),
    ]


def test_info_tells_how_much_of_a_shuffle_a_cache_gives(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_store(folder / "many", [(str(i), b"x" * 200) for i in range(2000)])
    found = values(capsys, "info", "many", "--batch", "32", "--cache", "30KiB,100KiB,1GiB")
    rows = found["mixing"]
    ratios = [row["mixing"]["chunks"] / row["mixing"]["ideal_chunks"] for row in rows]
    assert [row["order"] for row in rows] == ["chunk", "chunk", "chunk", "full"]
    assert ratios[0] < ratios[1] < 0.5 and ratios[2] > 0.97 and ratios[3] > 0.97
    assert found["edges"] > 0 and found["long_edges"] == 0


def test_a_store_without_samples_is_told_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_store(folder / "none", [])
    assert values(capsys, "info", "none")["mixing"] == []
    assert "0 samples" in told(capsys, "info", "none")
    assert told(capsys, "ls", "none") == ""
    assert values(capsys, "verify", "none")["sound"]
    assert values(capsys, "unpack", "none", "out")["samples"] == 0
    assert cli.main(["samples", "bench", "none"]) == 1
    assert "nothing to measure" in capsys.readouterr().err


def test_a_sound_store_is_verified(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "every checksum is right" in told(capsys, "verify", store)
    assert values(capsys, "verify", store)["sound"] is True


def test_damage_is_named_and_an_error(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(store) / "data-00000.bin"
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    shown = told(capsys, "verify", store, exit_code=1)
    assert "sample 0, cat/1.txt: its bytes are damaged" in shown
    assert "1 of 5 samples" in shown and "Copy or pack it again" in shown
    found = values(capsys, "verify", store, exit_code=1)
    assert found["sound"] is False and found["damaged"] == [{"index": 0, "name": "cat/1.txt"}]


def test_samples_become_the_same_files_again(
    store: str, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = told(capsys, "unpack", store, "back")
    assert "5 samples" in shown and shown.endswith("wrote back\n")
    back = {os.fsdecode(os.path.relpath(path, "back")): path.read_bytes() for path in _files(Path("back"))}
    assert back == FILES
    told(capsys, "unpack", store, "one", "cat/1.txt")
    assert [path.name for path in _files(Path("one"))] == ["1.txt"]
    told(capsys, "unpack", store, "one", "cat/1.txt", "--flat")
    assert (Path("one") / "cat%2F1.txt").read_bytes() == b"meow"


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_bench_compares_what_reads_samples(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = told(capsys, "bench", store, "--time-limit", "0.05", "--batch", "2", "--cache", "2MiB")
    for way in ("single reads", "read", "bread, full", "bread, chunk"):
        assert way in shown
    found = values(capsys, "bench", store, "--time-limit", "0.05", "--cold", "--io", "buffered")
    assert found["io"] == "buffered" and found["cold"] is True
    assert [row["way"] for row in found["rows"]] == ["single reads", "read", "bread, full", "bread, chunk"]
    assert all(row["samples"] > 0 and row["time_s"] > 0 for row in found["rows"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("pack", "missing", "new"), "missing"),
        (("pack", "tree", "store"), "store"),
        (("pack", "tree", "tree/inside"), "tree"),
        (("pack", "tree", "new", "--chunk-bytes", "1000"), "4096"),
        (("pack", "tree", "new", "--rank", "2", "--world-size", "2"), "rank"),
        (("pack", "tree", "new", "--name-column", "x"), "name_column"),
        (("pack", "tree/cat", "tree/dog", "new"), "takes one path"),
        (("pack", "tree", "tree", "new", "--format", "arrays"), "takes one path"),
        (("pack", "empty", "new"), "nothing to pack"),
        (("ls", "missing"), "missing"),
        (("ls", "tree"), "is not a sample store"),
        (("info", "tree"), "is not a sample store"),
        (("info", "store", "--cache", "1KiB,2KiB"), ""),
        (("verify", "tree"), "is not a sample store"),
        (("unpack", "store", "out", "cow"), "cow"),
        (("unpack", "store", "tree", "cat/1.txt"), "--overwrite"),
        (("bench", "store", "--time-limit", "0"), "nothing is read in 0 s by batches of 64: give more"),
        (("upload", "store", "https://127.0.0.1:1/x"), "cannot be written by HTTP: give s3://BUCKET/NAME"),
        (("upload", "store", "there"), "is not a URL. Give s3://BUCKET/NAME (gs://, az://), or nvme+tcp:"),
        (
            ("upload", "store", "ftp://a/b"),
            "is of the kind ftp://, which penstock does not speak. Give s3://",
        ),
        (("info", "ftp://a/b"), "which penstock does not speak. Give a folder, s3://BUCKET/NAME"),
        (("pack", "tree", "ftp://a/b"), "ftp://a/b cannot be packed to: give a folder, or s3://BUCKET/NAME"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: tuple[str, ...], said: str, store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code = cli.main(["samples", *arguments])
    shown = capsys.readouterr()
    if not said:
        assert exit_code == 0
        return
    assert exit_code == 1
    assert shown.out == ""
    assert shown.err.startswith("penstock: error: ") and said in shown.err
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("pack", "tree"), "DEST"),
        (("pack", "tree", "new", "--chunk-bytes", "big"), "is not a size"),
        (("pack", "tree", "new", "--format", "zip"), "invalid choice"),
        (("ls", "store", "--limit", "0"), "is not a number of samples"),
        (("info", "store", "--batch", "none"), "is not a number of samples"),
    ],
)
def test_what_cannot_be_read_is_refused(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refusal:
        cli.main(["samples", *arguments])
    assert refusal.value.code == 2
    assert said in capsys.readouterr().err
