"""A read that fails says which sample, where, why, and what to do."""

from __future__ import annotations

import errno
import pickle
from pathlib import Path

import pytest

from penstock.errors import SampleError
from penstock.samples.failures import Failure, cannot_open, cannot_read
from penstock.samples.places import StoreFolder

PATH = Path("store").absolute() / "data-00001.bin"


def text_of(kind: str, error_number: int = 0) -> str:
    failure = Failure(kind, 0, 1, 300_000, 512, 7, error_number)
    error = cannot_read(failure, StoreFolder("store"), 262_144, "sample 7 ('cat.jpg')", 2.5)
    assert isinstance(error, SampleError)
    assert isinstance(error, OSError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    return str(error)


@pytest.mark.parametrize("kind", ["read", "checksum", "timeout"])
def test_place_and_sample_are_named(kind: str) -> None:
    text = text_of(kind)
    for part in ("sample 7 ('cat.jpg')", "byte 300000", str(PATH), "chunk 1", "512 bytes"):
        assert part in text


def test_each_kind_says_what_to_do() -> None:
    assert "Input/output error. Look at the disk's health" in text_of("read", errno.EIO)
    assert "Cannot allocate memory. Free memory, or lower cache_bytes" in text_of("read", errno.ENOMEM)
    assert "the file ends there" in text_of("read")
    assert "Copy or pack the store again" in text_of("checksum")
    assert "on_damage='skip'" in text_of("checksum")
    assert "2.5 s passed while waiting" in text_of("timeout")
    assert "higher timeout_s" in text_of("timeout")
    assert str(PATH.parent / "directory.bin") in text_of("directory")
    assert "mount it again" in text_of("closed")


def test_files_that_cannot_be_opened_say_what_to_do() -> None:
    for number, advice in ((errno.EMFILE, "ulimit -n"), (errno.EACCES, "permission"), (errno.EIO, "dmesg")):
        error = cannot_open(PATH, OSError(number, "reason"))
        assert error.errno == number
        assert str(PATH) in str(error)
        assert advice in str(error)
