"""A folder tree becomes samples: a file each, in an order that is always the same; and nothing else does."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidArgument, SampleError
from penstock.samples.sources import RawSample, Source, open_source

NAME = st.binary(min_size=1, max_size=3).filter(
    lambda name: not set(name) & set(b"/\0") and name not in (b".", b"..")
)


def write(root: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        path = os.path.join(root, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)


def pairs(source: Source) -> list[tuple[str, bytes]]:
    samples = list(source)
    assert all(isinstance(sample, RawSample) for sample in samples)
    return [(sample.name, bytes(sample.data)) for sample in samples if isinstance(sample, RawSample)]


@settings(max_examples=40)
@given(st.lists(st.lists(NAME, min_size=1, max_size=3), max_size=12), st.integers(1, 4))
def test_names_come_in_the_order_of_their_bytes(
    tmp_path_factory: pytest.TempPathFactory, paths, world_size
) -> None:
    root = os.fsencode(tmp_path_factory.mktemp("tree"))
    expected = {}
    for parts in paths:
        name = b"/".join(parts)
        try:
            os.makedirs(os.path.join(root, *parts[:-1]), exist_ok=True)
            with open(os.path.join(root, name), "wb") as file:
                file.write(name)
        except (NotADirectoryError, FileExistsError, IsADirectoryError):
            continue  # a file where another needs a folder
        expected[name] = name
    if not expected:
        with pytest.raises(SampleError, match="nothing to pack"):
            open_source(os.fsdecode(root), format="folder")
        return
    source = open_source(os.fsdecode(root), format="folder")
    found = [(os.fsencode(name), data) for name, data in pairs(source)]
    assert found == sorted(expected.items())
    assert source.samples == len(expected)
    shares = [source.of_rank(rank, world_size) for rank in range(world_size)]
    assert [pair for share in shares for pair in pairs(share)] == pairs(source)
    assert [share.samples for share in shares] == [len(pairs(share)) for share in shares]


def test_names_and_the_rest_agree_with_the_whole(tmp_path: Path) -> None:
    write(tmp_path, {f"{i % 3}/{i}": bytes([i]) * i for i in range(20)})
    source = open_source(tmp_path).of_rank(1, 2)
    whole = list(source)
    assert list(source.names()) == [sample.name for sample in whole]
    for taken in (0, 1, 7, len(whole)):
        assert list(source.after(taken)) == whole[taken:]


def test_folders_of_the_first_level_are_classes(tmp_path: Path) -> None:
    write(tmp_path, {"dog/1": b"a", "cat/deep/2": b"b", "cat/1": b"", "é/x": b"c"})
    source = open_source(tmp_path)
    assert source.classes == ("cat", "dog", "é")
    assert [(sample.name, sample.label) for sample in source] == [
        ("cat/1", 0),
        ("cat/deep/2", 0),
        ("dog/1", 1),
        ("é/x", 2),
    ]
    write(tmp_path, {"readme": b""})
    source = open_source(tmp_path)
    assert source.classes == ()
    assert {sample.label for sample in source} == {-1}


def test_names_that_are_no_text_keep_their_bytes(tmp_path: Path) -> None:
    root = os.path.join(os.fsencode(tmp_path), b"root\xff")
    os.makedirs(os.path.join(root, b"a\xff"))
    with open(os.path.join(root, b"a\xff", b"\xfe"), "wb") as file:
        file.write(b"1")
    source = open_source(os.fsdecode(root))
    assert [os.fsencode(name) for name, _ in pairs(source)] == [b"a\xff/\xfe"]
    assert source.classes == ("a\\udcff",) and [sample.label for sample in source] == [0]
    assert source.description.isascii()  # what a manifest holds must be Unicode


def test_links_and_pipes_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, {"a/1": b"1"})
    (tmp_path / "link").symlink_to("a/1")
    (tmp_path / "folder").symlink_to("a")
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listening, caplog.at_level(logging.WARNING, "penstock"):
        listening.bind(str(tmp_path / "s"))
        source = open_source(tmp_path)
    assert pairs(source) == [("a/1", b"1")]
    assert "4 entries are not regular files" in caplog.text and len(caplog.records) == 1


def test_links_are_followed_inside_only(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write(root, {"a/1": b"1"})
    (root / "b").symlink_to("a")
    (root / "c").symlink_to(root / "a" / "1")
    assert pairs(open_source(root, follow_links=True)) == [("a/1", b"1"), ("b/1", b"1"), ("c", b"1")]
    (tmp_path / "secret").write_bytes(b"s")
    (root / "out").symlink_to("../secret")
    with pytest.raises(SampleError, match="out leads out of the folder"):
        open_source(root, follow_links=True)


def test_links_that_go_round_are_refused(tmp_path: Path) -> None:
    write(tmp_path, {"a/b/1": b"1"})
    (tmp_path / "a" / "b" / "up").symlink_to("..")
    with pytest.raises(SampleError, match="folder that it lies in"):
        open_source(tmp_path, follow_links=True)
    (tmp_path / "a" / "b" / "up").unlink()
    (tmp_path / "gone").symlink_to("nothing")
    with pytest.raises(SampleError, match="leads to nothing"):
        open_source(tmp_path, follow_links=True)


def test_a_tree_that_changes_is_noticed(tmp_path: Path) -> None:
    write(tmp_path, {"a": b"1", "b": b"2"})
    source = open_source(tmp_path)
    samples = iter(source)
    next(samples)
    (tmp_path / "b").unlink()
    with pytest.raises(SampleError, match="b cannot be read: it is gone"):
        next(samples)
    with pytest.raises(SampleError, match="had 2 files, and has 1 now"):
        list(source)
    (tmp_path / "b").mkdir()
    with pytest.raises(SampleError):
        list(source)


def test_a_file_that_becomes_a_pipe_does_not_block(tmp_path: Path) -> None:
    write(tmp_path, {"a": b"1", "b": b"2"})
    samples = iter(open_source(tmp_path))
    next(samples)
    (tmp_path / "b").unlink()
    os.mkfifo(tmp_path / "b")
    with pytest.raises(SampleError, match="was a file, and is none now"):
        next(samples)


def test_a_file_that_grows_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"a": bytes(100)})
    source = open_source(tmp_path)
    read = os.read

    def grow(descriptor: int, size_bytes: int) -> bytes:
        with open(tmp_path / "a", "ab") as file:
            file.write(b"more")
        return read(descriptor, size_bytes)

    monkeypatch.setattr(os, "read", grow)
    with pytest.raises(SampleError, match="had 100 bytes, then more"):
        list(source)


def test_a_file_that_shrinks_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"a": bytes(100)})
    source = open_source(tmp_path)
    read = os.read

    def shrink(descriptor: int, size_bytes: int) -> bytes:
        os.truncate(tmp_path / "a", 40)
        return read(descriptor, size_bytes)

    monkeypatch.setattr(os, "read", shrink)
    with pytest.raises(SampleError, match="had 100 bytes, then 40"):
        list(source)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(SampleError, match="does not exist"):
        open_source(tmp_path / "nothing")
    with pytest.raises(SampleError, match="cannot be read: No such file"):
        open_source(tmp_path / "nothing", format="folder")
    with pytest.raises(InvalidArgument, match="no option 'speed', only follow_links"):
        open_source(tmp_path, speed=1)
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument, match="rank=2"):
        open_source(tmp_path).of_rank(2, 2)
