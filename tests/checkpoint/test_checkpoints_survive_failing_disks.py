"""When the disk fails or is full there is one clear error, and the old file is as it was."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import checkpoint
from penstock.checkpoint import pieces
from penstock.checkpoint.reading import MappedFile
from penstock.errors import CheckpointError
from penstock.storage.checksum import copy_crc32c
from penstock.storage.native import PosixTransport
from penstock.storage.transfer import Transfer
from tests.support.faulty_transport import FaultyTransport, direct_path
from tests.support.states import numbers, same

OLD = {"old": numbers(50)}
STATE = {"a": numbers(100_000), "b": [numbers(30_000, torch.float64), 1], "c": numbers(7, torch.uint8)}


class Disk:
    """Fails request number `fails_at`, counted from 0."""

    def __init__(self) -> None:
        self.fails_at = -1
        self.error = errno.EIO
        self.requests: list[Transfer] = []

    def fault(self, request: Transfer) -> int:
        self.requests.append(request)
        return self.error if len(self.requests) == self.fails_at + 1 else 0

    def fail(self, at: int, error: int = errno.EIO) -> None:
        self.requests.clear()
        self.fails_at, self.error = at, error


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """Small pieces, so that there are many requests, and a disk that can fail."""
    disk = Disk()
    transport = FaultyTransport(PosixTransport(), disk.fault)
    monkeypatch.setattr(pieces, "shared_path", lambda: direct_path(transport))
    monkeypatch.setattr(pieces, "PIECE_BYTES", 64 << 10)
    monkeypatch.setattr(pieces, "_spare", deque(maxlen=pieces.DEPTH))  # smaller ones, which do not stay
    yield disk
    transport.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    checkpoint.save(OLD, tmp_path / "state")
    return tmp_path / "state"


def requests_of(disk: Disk, work: Callable[[], Any]) -> int:
    disk.fail(-1)
    work()
    return len(disk.requests)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_every_write_can_fail(error: int, wait: bool, disk: Disk, path: Path) -> None:
    def save(to: Path = path) -> None:
        if handle := checkpoint.save(STATE, to, wait=wait):
            handle.wait()

    writes = requests_of(disk, lambda: save(path.with_name("other")))
    path.with_name("other").unlink()
    assert writes >= 10
    for number in range(writes):
        disk.fail(number, error)
        with pytest.raises(CheckpointError) as failure:
            save()
        assert failure.value.errno == error
        said = str(failure.value)
        assert str(path) in said and f"at byte {disk.requests[number].offset}" in said
        assert os.strerror(error) in said and "unchanged" in said
        if error == errno.ENOSPC:
            assert "are needed, and" in said and "are free" in said
        assert os.listdir(path.parent) == ["state"]
        assert same(checkpoint.load(path, mmap=True), OLD)
    disk.fail(-1)
    save()
    assert same(checkpoint.load(path), STATE)


def test_every_read_can_fail(disk: Disk, path: Path) -> None:
    checkpoint.save(STATE, path)
    target = {"a": torch.zeros(100_000), "b": [torch.zeros(30_000, dtype=torch.float64), 1]}
    target["c"] = torch.zeros(7, dtype=torch.uint8)
    for load in (
        lambda: checkpoint.load(path, mmap=False),
        lambda: checkpoint.load(path, mmap=False, into=target),
    ):
        for number in range(requests_of(disk, load)):
            disk.fail(number)
            with pytest.raises(CheckpointError, match=r"cannot be read at byte \d+ \((a|b\.0|c)"):
                load()
    disk.fail(-1)
    assert same(checkpoint.load(path, mmap=False), STATE)


@pytest.mark.parametrize("call", ["fsync", "ftruncate", "replace", "link"])
def test_every_other_step_can_fail(call: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        with pytest.raises(CheckpointError, match=r"Input/output error.*unchanged") as failure:
            checkpoint.save(STATE, path)
        assert failure.value.errno == errno.EIO
    assert os.listdir(path.parent) == ["state"]
    assert same(checkpoint.load(path), OLD)


def test_a_directory_that_cannot_be_made_durable_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("penstock.checkpoint.replace.sync_folder", fail)
    with pytest.raises(CheckpointError, match="a power failure could bring the old one back"):
        checkpoint.save(STATE, path)
    assert same(checkpoint.load(path), STATE)


@pytest.mark.parametrize("step", [0, 1, 3])
def test_an_interrupted_save_leaves_nothing(
    step: int, disk: Disk, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = []

    def interrupted(*arguments: int) -> int:
        copies.append(arguments)
        if len(copies) > step:
            raise KeyboardInterrupt
        return copy_crc32c(*arguments)

    monkeypatch.setattr("penstock.checkpoint.contents.copy_crc32c", interrupted)
    disk.fail(-1)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(STATE, path)
    assert len(disk.requests) == step, "each piece is written while the next is copied"
    assert os.listdir(path.parent) == ["state"]
    assert same(checkpoint.load(path), OLD)


def test_a_file_that_becomes_shorter_while_it_is_mapped_is_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Touching its pages would end the process."""
    checkpoint.save({"a": numbers(3 << 20)}, path)
    populate = MappedFile.populate

    def truncated(self: MappedFile, begin: int, end: int) -> None:
        os.truncate(path, 1 << 20)
        populate(self, begin, end)

    monkeypatch.setattr(MappedFile, "populate", truncated)
    with pytest.raises(CheckpointError, match=r"\(a\): Input/output error"):
        checkpoint.load(path, mmap=True)


# -- disks that hang --------------------------------------------------------------------------------


class HangingTransport:
    """What is submitted begins when the disk answers, and is not recalled before."""

    def __init__(self) -> None:
        self.inner = PosixTransport()
        self.methods = self.inner.methods
        self.answers = threading.Event()

    def submit(self, transfers: Sequence[Transfer]) -> None:
        def begin() -> None:
            assert self.answers.wait(60)
            self.inner.submit(transfers)

        threading.Thread(target=begin, daemon=True).start()

    def cancel(self, transfers: Sequence[Transfer]) -> int:
        return 0


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Until this is called the disk answers nothing."""
    transport = HangingTransport()
    monkeypatch.setattr(pieces, "shared_path", lambda: direct_path(transport))
    monkeypatch.setattr(pieces, "TIMEOUT_S", 0.2, raising=False)

    def answer() -> None:
        monkeypatch.undo()  # a disk that answers may be slow
        monkeypatch.setattr(pieces, "shared_path", lambda: direct_path(transport))
        transport.answers.set()

    yield answer
    transport.answers.set()


def ends(work: Callable[[], Any]) -> BaseException | None:
    """Call ``work`` on a thread; give the error that it raised. Fails where it does not end."""
    errors: list[BaseException | None] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)
        else:
            errors.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert errors, "it waits for ever"
    return errors[0]


def open_files(path: Path) -> int:
    """How many descriptors of this process lead to ``path``."""
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return sum(os.path.exists(link) and os.path.samefile(link, path) for link in links)


@pytest.mark.parametrize("wait", [True, False])
def test_a_save_to_a_disk_that_hangs_ends(wait: bool, path: Path, hanging: Callable[[], None]) -> None:
    def save() -> None:
        if handle := checkpoint.save(STATE, path, wait=wait):
            handle.wait()

    error = ends(save)
    assert isinstance(error, CheckpointError) and error.errno == errno.ETIMEDOUT
    assert "The disk hangs" in str(error) and "unchanged" in str(error)
    assert same(checkpoint.load(path), OLD)
    assert os.listdir(path.parent) == ["state"]
    hanging()
    checkpoint.save(STATE, path)
    assert same(checkpoint.load(path), STATE)


def test_a_load_from_a_disk_that_hangs_ends(path: Path, hanging: Callable[[], None]) -> None:
    into = {"old": torch.zeros(50)}
    for load in (
        lambda: checkpoint.load(path, mmap=False),
        lambda: checkpoint.load(path, mmap=False, into=into),
    ):
        before = open_files(path)
        error = ends(load)
        assert isinstance(error, CheckpointError) and error.errno == errno.ETIMEDOUT
        assert "The disk hangs" in str(error)
        assert open_files(path) > before, "what the disk still uses must not become another file"
    hanging()
    assert same(checkpoint.load(path, mmap=False), OLD)


def test_a_pipe_under_the_name_of_a_draft_does_not_stop_a_save(path: Path) -> None:
    """As anybody may make one who may write to the directory."""
    pipe = path.with_name(f".{path.name}.{'0' * 16}.penstock")
    os.mkfifo(pipe)
    assert ends(lambda: checkpoint.save(STATE, path)) is None
    assert same(checkpoint.load(path), STATE) and pipe.is_fifo()


@contextlib.contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("allocates", [True, False])
def test_a_limit_on_file_sizes_is_an_error(
    allocates: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not allocates:  # as on a file system that cannot reserve space
        monkeypatch.setattr("penstock.checkpoint.replace._allocate", lambda *_: None)
    with largest_file(128 << 10), pytest.raises(CheckpointError, match="ulimit -f"):
        checkpoint.save(STATE, path)
    assert os.listdir(path.parent) == ["state"]
    assert same(checkpoint.load(path), OLD)


SAVES_WITHOUT_MEMORY = """
import gc, sys
import torch
from penstock import checkpoint
from penstock.errors import CheckpointError
from penstock.storage.aligned import AlignedBuffer
from tests.support.limits import most_more_memory

def large_buffers():
    gc.collect()
    buffers = [each for each in gc.get_objects() if isinstance(each, AlignedBuffer)]
    return [each for each in buffers if each.size_bytes >= 32 << 20]

path, wait = sys.argv[1], sys.argv[2] == "True"
checkpoint.save({"warm": torch.ones(1)}, path + ".warm", wait=wait)
state = {"a": torch.ones(32 << 20, dtype=torch.uint8)}
before = large_buffers()
copied_bytes = 0 if wait else 34 << 20  # there is memory for that, and not for the header
try:
    with most_more_memory(copied_bytes + (1 << 20)):
        if handle := checkpoint.save(state, path, wait=wait):
            handle.wait()
except CheckpointError as error:
    print(error)
assert large_buffers() == before, "the copy is held"
"""


@pytest.mark.parametrize("wait", [True, False])
def test_no_memory_for_a_buffer_is_an_error(wait: bool, path: Path) -> None:
    """In a process of its own, which has no memory left over from others."""
    command = [sys.executable, "-c", SAVES_WITHOUT_MEMORY, os.fspath(path), str(wait)]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=Path(__file__).parents[2]
    )
    assert ran.returncode == 0, ran.stderr
    assert re.search(rf"{path} cannot be written: Cannot allocate memory.*unchanged", ran.stdout), ran.stdout
    assert same(checkpoint.load(path), OLD)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    where = tmp_path / "small"
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(where)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("needs the permission to mount")
    yield where
    subprocess.run(["umount", str(where)], check=True)


@pytest.mark.parametrize("wait", [True, False])
def test_a_full_disk_is_an_error(wait: bool, full_disk: Path) -> None:
    checkpoint.save(OLD, full_disk / "state")
    large = {"a": numbers(1 << 20)}
    with pytest.raises(CheckpointError, match=r"4\.0\d MiB are needed, and .* are free. Free space"):
        checkpoint.save(large, full_disk / "state", wait=wait)
    assert os.listdir(full_disk) == ["state"]
    assert same(checkpoint.load(full_disk / "state"), OLD)
    checkpoint.save(STATE, full_disk / "new")
    assert same(checkpoint.load(full_disk / "new"), STATE)


# -- paths ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none/state", r"No such file or directory. Create the directory .*none first"),
        ("directory", "It is a directory"),
        ("file/state", r"file is not a directory"),
        ("pipe", "not a regular file"),
        ("loop/state", "symbolic links"),
        ("n" * 300, "too long"),
    ],
)
@pytest.mark.parametrize("wait", [True, False])
def test_a_path_that_cannot_be_is_an_error_at_once(name: str, said: str, wait: bool, tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(CheckpointError, match=said) as failure:
        checkpoint.save(STATE, tmp_path / name, wait=wait)
    assert failure.value.errno
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_is_not_writable_is_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="permission"):
        checkpoint.save(STATE, tmp_path / "state")


def test_a_file_that_may_not_be_written_is_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.chmod(0o444)
    if os.geteuid() == 0:  # root may
        monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(CheckpointError, match="Permission denied"):
        checkpoint.save(STATE, path)
    assert same(checkpoint.load(path), OLD)
