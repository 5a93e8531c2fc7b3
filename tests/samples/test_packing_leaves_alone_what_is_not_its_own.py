"""Packing writes into a new or empty folder, or one that is its own, and nowhere else."""

from __future__ import annotations

import fcntl
import os
import pickle
import signal
import sys
from pathlib import Path

import pytest

from penstock.errors import InvalidArgument, SampleError
from penstock.samples.packing import pack
from penstock.samples.progress import lock_folder
from penstock.samples.sources import open_source
from penstock.samples.store import mount
from tests.support import stores
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

ITEMS = samples_of(5)


@pytest.mark.parametrize("name", ["notes.txt", "names.bin", "data-00000.bin", "packing.txt", ".hidden"])
def test_a_folder_with_other_files_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    for options in ({}, {"overwrite": True}, {"resume": False}):
        with pytest.raises(InvalidArgument, match=f"holds '{name}'"):
            pack(Listed(ITEMS), tmp_path, **options)
    assert os.listdir(tmp_path) == [name] and (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize("whole", [True, False])
def test_other_files_beside_a_store_are_not_lost(whole: bool, tmp_path: Path) -> None:
    if whole:
        pack(Listed(ITEMS), tmp_path / "store")
    else:
        with pytest.raises(Stopped):
            pack(Listed(ITEMS, stop=2), tmp_path / "store")
    (tmp_path / "store" / "notes.txt").write_text("mine")
    with pytest.raises(InvalidArgument, match=r"holds 'notes\.txt'"):
        pack(Listed(ITEMS), tmp_path / "store", overwrite=True)
    assert (tmp_path / "store" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "store" / "store.json").exists() == whole


def test_a_store_is_replaced_only_where_that_is_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    pack(Listed(samples_of(40)), folder, 4096, data_file_bytes=9000)
    before = contents(folder)
    for options in ({}, {"resume": False}):
        with pytest.raises(InvalidArgument, match="is already a store"):
            pack(Listed(ITEMS), folder, **options)
    assert contents(folder) == before
    pack(Listed(ITEMS), folder, 4096, overwrite=True)
    assert contents(folder) == expected(tmp_path / "wanted", ITEMS)


def test_a_store_that_is_replaced_stays_as_it_is_for_those_who_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    pack(Listed(ITEMS), folder)
    with (folder / "directory.bin").open("rb") as file:
        pack(Listed(samples_of(1)), folder, overwrite=True)
        assert len(file.read()) == 16 * len(ITEMS)


def test_an_interrupted_replacement_leaves_the_old_store_and_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    pack(Listed(ITEMS), folder, 4096)
    before = contents(folder)
    with pytest.raises(Stopped):
        pack_often(Listed(samples_of(40), stop=30), folder, overwrite=True)
    assert contents(folder) == before
    with pytest.raises(InvalidArgument, match="is already a store"):
        pack_often(Listed(samples_of(40)), folder)
    begun = Seekable(samples_of(40))
    assert pack_often(begun, folder, overwrite=True).samples == 40
    assert os.listdir(tmp_path) == ["store"]
    assert contents(folder) == expected(tmp_path / "wanted", samples_of(40))


def test_a_link_to_a_store_leads_to_the_new_one(tmp_path: Path) -> None:
    pack(Listed(ITEMS), tmp_path / "store")
    (tmp_path / "link").symlink_to("store")
    (tmp_path / "store").chmod(0o750)
    pack(Listed(samples_of(2)), tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert stores.read_store(tmp_path / "store") == samples_of(2)
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o750


def test_a_part_of_a_store_is_replaced(tmp_path: Path) -> None:
    items = samples_of(6)
    for rank in (0, 1):
        pack(Listed(items), tmp_path / "store", rank=rank, world_size=2)
    with pytest.raises(Stopped):
        pack(Listed(ITEMS, stop=1), tmp_path / "store", rank=1, world_size=2, overwrite=True)
    with mount(tmp_path / "store") as store:
        assert [store.read(name) for name, _ in items] == [data for _, data in items]
    for rank in (0, 1):
        pack(Listed(ITEMS), tmp_path / "store", rank=rank, world_size=2, overwrite=True, resume=False)
    with mount(tmp_path / "store") as store:
        assert {name: store.read(name) for name in store.names()} == dict(ITEMS)
    assert len(os.listdir(tmp_path / "store")) == 2


def kill_before(event: int) -> None:
    """Have the process killed where it is about to touch the file system for so many-th time."""
    left = event

    def count(name: str, _: object) -> None:
        nonlocal left
        if name in (
            "open",
            "os.mkdir",
            "os.remove",
            "os.rename",
            "os.rmdir",
            "os.truncate",
            "os.chmod",
            "os.listdir",
        ):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


@pytest.mark.slow
def test_a_process_killed_anywhere_leaves_the_old_store_or_the_new_one(tmp_path: Path) -> None:
    folder, new = tmp_path / "store", samples_of(7)
    pack(Listed(ITEMS), folder, 4096)
    wanted = {False: contents(folder), True: expected(tmp_path / "wanted", new)}
    seen, event, code = [], 0, -signal.SIGKILL
    while code:
        event += 1
        process = os.fork()
        if process == 0:
            kill_before(event)
            pack_often(Listed(new), folder, overwrite=True)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        assert code in (0, -signal.SIGKILL)
        found = contents(folder)
        seen.append(found == wanted[True])
        assert found == wanted[seen[-1]]
        pack_often(Listed(new), folder, overwrite=True)
        assert contents(folder) == wanted[True]
        assert sorted(os.listdir(tmp_path)) == ["store", "wanted"]
        pack(Listed(ITEMS), folder, 4096, overwrite=True)
    assert seen == sorted(seen) and event > 40 and seen.count(True) > 3  # also while the old one is removed


def test_two_packers_do_not_write_one_folder(tmp_path: Path) -> None:
    with (
        lock_folder(tmp_path / "store", recipe_of(Listed(ITEMS)), resume=True, overwrite=False),
        pytest.raises(SampleError, match="another process is packing"),
    ):
        pack(Listed(ITEMS), tmp_path / "store")
    pack(Listed(ITEMS), tmp_path / "store", 4096)
    assert stores.read_store(tmp_path / "store") == ITEMS


def test_a_folder_that_is_removed_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a packing below a URL, which ends at that moment."""
    folder, lock, made = tmp_path / "store", fcntl.flock, list[bool]()

    def late(descriptor: int, operation: int) -> None:
        if not made:
            folder.rmdir()
            folder.mkdir()  # by a third process
        made.append(True)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with (
        lock_folder(folder, recipe_of(Listed(ITEMS)), resume=True, overwrite=False),
        pytest.raises(SampleError, match="another process is packing"),
    ):
        pack(Listed(ITEMS), folder)
    pack(Listed(ITEMS), folder, 4096)
    assert stores.read_store(folder) == ITEMS


@pytest.mark.parametrize("inside", [".", "store", "a/b/store", "../link/store"])
def test_a_store_in_its_own_source_is_refused(inside: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "one.txt").write_text("1")
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(InvalidArgument, match="lies in the source"):
        pack(source, source / inside)
    with pytest.raises(InvalidArgument, match="lies in the source"):
        pack(open_source(source), source / inside)
    assert os.listdir(source) == ["one.txt"]


def test_the_source_is_not_changed(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name, data in ITEMS:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    before = {path: path.stat().st_mtime_ns for path in source.rglob("*")}
    pack(source, tmp_path / "store")
    assert {path: path.stat().st_mtime_ns for path in source.rglob("*")} == before
    assert dict(stores.read_store(tmp_path / "store")) == dict(ITEMS)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for dest in (tmp_path / "file", tmp_path / "file" / "store"):
        with pytest.raises(InvalidArgument, match="not a folder"):
            pack(Listed(ITEMS), dest)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SampleError, match=r"cannot make a store at /proc/nothing"):
        pack(Listed(ITEMS), "/proc/nothing/store")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(SampleError, match="Permission denied"):
        pack(Listed(ITEMS), tmp_path)


def test_parts_of_another_number_are_not_mixed_in(tmp_path: Path) -> None:
    pack(Listed(ITEMS), tmp_path / "store", rank=0, world_size=2)
    with pytest.raises(
        InvalidArgument, match="holds 'part-00000-of-00002', which is not a partition of a store of 3"
    ):
        pack(Listed(ITEMS), tmp_path / "store", rank=0, world_size=3)
    with pytest.raises(InvalidArgument, match="holds 'part-00000-of-00002'"):
        pack(Listed(ITEMS), tmp_path / "store")


def test_a_name_that_occurs_twice_is_named(tmp_path: Path) -> None:
    items = [*samples_of(30), ("twice", b"1"), *[(f"x{i}", b"") for i in range(30)], ("twice", b"2")]
    with pytest.raises(SampleError, match="samples 30 and 61 have one name, 'twice'") as caught:
        pack(Listed(items), tmp_path / "store")
    assert not (tmp_path / "store" / "store.json").exists()
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("label", [-2, 0, 1, 5])
def test_a_label_that_is_no_class_is_refused(label: int, tmp_path: Path) -> None:
    if label != 0:
        with pytest.raises(InvalidArgument, match="the source has 1 classes"):
            pack(Listed(ITEMS, labels=[0, 0, label, 0, -1], classes=("only",)), tmp_path / "store")
    with pytest.raises(InvalidArgument, match="the source has 0 classes"):
        pack(Listed(ITEMS, labels=[-1, -1, label, -1, -1]), tmp_path / "without")
    assert not (tmp_path / "store" / "store.json").exists()
    assert not (tmp_path / "without" / "store.json").exists()
