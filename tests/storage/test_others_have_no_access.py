"""What a run writes beside its results is nobody else's: docs/security.md says for whom each is."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import SampleError
from penstock.samples.objects.cache import CacheOptions, DiskCache
from penstock.storage.costs import Tables, add_tables
from penstock.storage.host_memory import HostMemory
from penstock.storage.region import SpillFile

NOBODY = 65534
OPENING = """
import os, sys
os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
for path in sys.argv[2:]:
    try:
        os.close(os.open(path, os.O_RDONLY))
        print("opened")
    except PermissionError:
        print("refused")
"""


@pytest.mark.parametrize("named", [False, True], ids=["O_TMPFILE", "without O_TMPFILE"])
def test_spill_files_have_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool) -> None:
    if named:
        monkeypatch.setattr(os, "O_TMPFILE", 0)
    before = os.umask(0)
    try:
        file = SpillFile(tmp_path)
    finally:
        os.umask(before)
    file.grow_to(1 << 20)
    about = os.fstat(file.handle)
    assert (about.st_nlink, stat.S_IMODE(about.st_mode)) == (0, 0o600)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError):  # nobody gives it one
        os.link(f"/proc/self/fd/{file.handle}", tmp_path / "found", follow_symlinks=True)
    file.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_opens_neither_file_nor_memory(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    file, memory = SpillFile(tmp_path), HostMemory(1 << 20)
    file.grow_to(1 << 20)
    memory.grow_to(1 << 20)
    assert set(os.listdir("/dev/shm")) <= before
    paths = [f"/proc/{os.getpid()}/fd/{each.handle}" for each in (file, memory)]
    done = subprocess.run(
        [sys.executable, "-c", OPENING, str(NOBODY), *paths],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["refused", "refused"], done.stderr
    file.close()
    memory.close()


def test_a_link_in_the_place_of_a_lock_is_not_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    victim = tmp_path / "victim"
    (tmp_path / ".costs.json.lock").symlink_to(victim)
    add_tables(tmp_path / "costs.json", "a disk", Tables())
    assert not victim.exists()
    assert "was not saved" in caplog.text


def test_a_cache_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        cache = DiskCache(CacheOptions(str(tmp_path), 1 << 30))
        store = cache.open(b"manifest", [(4096, 1)])
    finally:
        os.umask(before)
    store.close()
    found = [tmp_path / "penstock-samples", *(tmp_path / "penstock-samples").rglob("*")]
    assert len(found) > 4
    assert not [each for each in found if each.stat().st_mode & stat.S_IWOTH]
    (tmp_path / "penstock-samples").chmod(0o777)
    with pytest.raises(SampleError, match="everybody may write to it"):
        DiskCache(CacheOptions(str(tmp_path), 1 << 30))


@pytest.mark.parametrize("name", ["users", "lock"])
def test_a_link_in_a_cache_is_not_followed(tmp_path: Path, name: str) -> None:
    (tmp_path / "penstock-samples").mkdir()
    (tmp_path / "penstock-samples" / name).symlink_to(tmp_path / "victim")
    with pytest.raises(SampleError, match="cannot be used"):
        DiskCache(CacheOptions(str(tmp_path), 1 << 30))
    assert not (tmp_path / "victim").exists()


def test_a_link_in_the_place_of_a_cache_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "penstock-samples").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SampleError, match="cannot be trusted"):
        DiskCache(CacheOptions(str(tmp_path), 1 << 30))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_cache_that_another_user_has_made_first_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "penstock-samples"
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    DiskCache(CacheOptions(str(tmp_path), 1 << 30))  # who owns the folder above has put it there
    tmp_path.chmod(0o1777)
    with pytest.raises(SampleError, match=f"user {NOBODY} has made it"):
        DiskCache(CacheOptions(str(tmp_path), 1 << 30))
