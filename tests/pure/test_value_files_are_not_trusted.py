"""Files of values are loaded as they were written, or refused: nothing in them is believed."""

from __future__ import annotations

import gzip
import os
import tracemalloc
from pathlib import Path

import pytest

from penstock.core import files
from penstock.core.hardware import Hardware
from penstock.errors import InvalidFile

from .traces import machine

# -- writing ----------------------------------------------------------------------------------------


def test_a_planted_draft_is_not_followed(tmp_path: Path) -> None:
    """Whoever may write to the folder cannot have another file overwritten."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / f".hardware.json.{os.getpid()}").symlink_to(victim)
    machine().save(folder / "hardware.json")
    assert victim.read_text() == "precious"
    assert Hardware.load(folder / "hardware.json") == machine()


def test_a_file_is_durable_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "hardware.json"
    synced = []
    sync = os.fsync

    def observed(descriptor: int) -> None:
        target = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((target.is_dir(), path.exists(), None if target.is_dir() else target.stat().st_size))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", observed)
    machine().save(path)
    assert synced == [(False, False, path.stat().st_size), (True, True, None)]


def test_what_cannot_be_written_names_the_file(tmp_path: Path) -> None:
    for path in (tmp_path / "none" / "a.json", Path("/dev/null")):
        with pytest.raises(OSError) as refusal:
            machine().save(path)
        assert refusal.value.filename == str(path)
    assert not os.path.isfile("/dev/null")
    assert list(tmp_path.iterdir()) == []


# -- reading ----------------------------------------------------------------------------------------


def test_a_small_file_cannot_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "hardware.json.gz"
    with gzip.open(path, "wb", compresslevel=1) as bomb:
        bomb.write(b'{"schema": "penstock.hardware/1", "value": "')
        for _ in range(4 * files.MOST_BYTES >> 20):
            bomb.write(bytes(1 << 20))
    assert path.stat().st_size < 8 << 20
    tracemalloc.start()
    try:
        with pytest.raises(InvalidFile, match="holds more than 256 MiB of text once unpacked"):
            Hardware.load(path)
        assert tracemalloc.get_traced_memory()[1] < 2.5 * files.MOST_BYTES
    finally:
        tracemalloc.stop()


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    with path.open("wb") as sparse:
        sparse.truncate(1 << 40)
    with pytest.raises(InvalidFile, match="holds more than 256 MiB of text:"):
        Hardware.load(path)


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidFile, match="not a regular file"):
        Hardware.load(tmp_path / "pipe")
