"""Files are opened twice, once past the page cache, where that works; and else it is said why not."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock._native import Descriptor
from penstock.storage import files
from penstock.storage.aligned import AlignedBuffer
from penstock.storage.files import from_descriptor
from tests.support.transports import open_file

O_DIRECT = getattr(os, "O_DIRECT", 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(b"as it was")
    with open_file(tmp_path / "file", "r") as opened:
        if opened.file.direct < 0:
            pytest.skip("no direct I/O here")
    return tmp_path / "file"


@pytest.fixture
def descriptors_stay_balanced() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def nothing_logged_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_logged", set())


def test_both_descriptors_are_of_one_file_and_one_bypasses_the_cache(path: Path) -> None:
    with open_file(path, "r+") as opened:
        file = opened.file
        assert os.path.sameopenfile(file.buffered, file.direct)
        assert os.get_inheritable(file.direct) is os.get_inheritable(file.buffered) is False
        with pytest.raises(OSError, match="Invalid argument"):
            os.pwrite(file.direct, b"odd", 1)
        block = AlignedBuffer(file.alignment_bytes)
        block.view()[:] = os.urandom(file.alignment_bytes)
        assert os.pwrite(file.direct, block.view(), 0) == file.alignment_bytes
        assert path.read_bytes() == block.view()


def test_the_alignment_is_never_below_a_page(path: Path) -> None:
    with open_file(path, "r") as opened:
        alignment = opened.file.alignment_bytes
    assert alignment >= max(4096, os.sysconf("SC_PAGESIZE"))
    assert alignment & (alignment - 1) == 0


def test_modes_do_what_they_say(path: Path) -> None:
    with open_file(path, "r") as opened:
        assert os.pread(opened.file.buffered, 100, 0) == b"as it was"
        for descriptor in (opened.file.buffered, opened.file.direct):
            with pytest.raises(OSError) as refused:
                os.write(descriptor, b"")
            assert refused.value.errno == errno.EBADF
    with open_file(path, "r+") as opened:
        os.pwrite(opened.file.buffered, b"AS", 0)
    assert path.read_bytes() == b"AS it was"
    with open_file(path, "w") as opened:
        os.pwrite(opened.file.buffered, b"anew", 0)
        assert os.pread(opened.file.buffered, 100, 0) == b"anew"
    assert path.read_bytes() == b"anew"


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_missing_file_is_an_error(
    tmp_path: Path, mode: files.Mode, descriptors_stay_balanced: None
) -> None:
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path / "missing", mode)


def test_closing_closes_both_and_is_idempotent(path: Path, descriptors_stay_balanced: None) -> None:
    opened = open_file(path, "r")
    file = opened.file
    opened.close()
    opened.close()
    for descriptor in file[:2]:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_a_file_that_no_path_leads_to_is_opened_too(path: Path) -> None:
    descriptor = Descriptor(path, os.O_RDWR)
    path.unlink()
    path.write_bytes(b"another")
    with from_descriptor(descriptor) as opened:
        assert opened.file.buffered == descriptor.fileno()
        assert os.path.sameopenfile(descriptor.fileno(), opened.file.direct)


def test_a_kernel_that_does_not_tell_alignments_is_tried(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_ask", lambda *_: None)
    with open_file(path, "r") as opened:
        assert opened.file.direct >= 0
        assert opened.file.alignment_bytes >= 4096


def the_system_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_demanded_alignment", lambda _: 0)


def opening_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EINVAL, "expected by the test")

    monkeypatch.setattr(files, "Descriptor", refuse)


def reading_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "expected by the test")

    monkeypatch.setattr(files, "_ask", lambda *_: None)
    monkeypatch.setattr(os, "preadv", refuse)


@pytest.mark.parametrize("obstacle", [the_system_says_so, opening_fails, reading_fails])
def test_where_it_cannot_be_there_is_none_and_that_is_said_once(
    path: Path,
    obstacle: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    nothing_logged_yet: None,
    descriptors_stay_balanced: None,
) -> None:
    obstacle(monkeypatch)
    with caplog.at_level(logging.WARNING, "penstock"):
        for _ in range(2):
            with open_file(path, "r") as opened:
                assert opened.file.direct == -1
                assert os.pread(opened.file.buffered, 100, 0) == b"as it was"
    assert len(caplog.records) == 1
    assert str(path) in caplog.text


def test_a_file_system_in_memory_has_no_direct_io(
    caplog: pytest.LogCaptureFixture, nothing_logged_yet: None
) -> None:
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK) or not hasattr(os, "O_TMPFILE"):
        pytest.skip("no tmpfs here")
    with from_descriptor(Descriptor(shared, os.O_TMPFILE | os.O_RDWR)) as opened:
        assert opened.file.direct == -1
    assert "tmpfs" in caplog.text
