"""No damaged file is loaded: whatever byte changed, wherever it was cut, whatever it is."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import penstock
from penstock import checkpoint
from penstock.errors import CheckpointError
from tests.support.states import numbers, same

STATE = {
    "layer.weight": numbers(3000).view(50, 60),
    "page": numbers(1024, torch.int32),
    "bytes": numbers(11, torch.uint8),
    "count": 3,
    "views": {"complex": numbers(5, torch.complex128), "empty": torch.empty(0)},
}
NAMES = ("page", "views.complex", "layer.weight", "bytes")  # in the file's order

quick = settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("sound") / "state"
    checkpoint.save(STATE, path)
    assert same(checkpoint.load(path), STATE)
    return path.read_bytes()


@pytest.fixture(scope="module")
def header_bytes(sound: bytes) -> int:
    return 8 + int.from_bytes(sound[:8], "little")


def refused(path: Path, data: bytes, **options: Any) -> str:
    path.write_bytes(data)
    with pytest.raises(penstock.InvalidFile) as refusal:
        checkpoint.load(path, **options)
    assert str(path) in str(refusal.value)
    return str(refusal.value)


def flipped(data: bytes, position: int, mask: int = 1) -> bytes:
    changed = bytearray(data)
    changed[position] ^= mask
    return bytes(changed)


def test_every_byte_of_the_header_counts(sound: bytes, header_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(sound)
    with path.open("r+b", buffering=0) as file:
        for position in range(header_bytes):
            for content in (flipped(sound, position, 1 << position % 8)[position], sound[position]):
                file.seek(position)
                file.write(bytes([content]))
                if content != sound[position]:
                    with pytest.raises(penstock.InvalidFile):
                        checkpoint.load(path, mmap=True, verify=False)
    assert same(checkpoint.load(path), STATE)


@quick
@given(data=st.data(), mask=st.integers(1, 255), mmap=st.sampled_from([None, True, False]))
def test_a_changed_byte_is_found(
    sound: bytes, header_bytes: int, tmp_path: Path, data: st.DataObject, mask: int, mmap: bool | None
) -> None:
    position = data.draw(st.integers(0, len(sound) - 1))
    said = refused(tmp_path / "state", flipped(sound, position, mask), mmap=mmap)
    if position >= header_bytes:
        assert any(name in said for name in NAMES)


def test_the_damaged_tensor_is_named(sound: bytes, tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(sound)
    info = checkpoint.info(path)
    assert [tensor.name for tensor in info.tensors if tensor.size_bytes] == list(NAMES)
    end = len(sound)
    for tensor in reversed(info.tensors):
        if tensor.size_bytes:
            begin = end - tensor.size_bytes
            for position in (begin, end - 1):
                for mmap in (True, False):
                    said = refused(path, flipped(sound, position), mmap=mmap)
                    assert f"the checksum of {tensor.name} is not" in said
                with pytest.raises(penstock.InvalidFile, match=tensor.name):
                    checkpoint.verify(path)
            end = begin


def test_all_damaged_tensors_are_named(sound: bytes, header_bytes: int, tmp_path: Path) -> None:
    said = refused(tmp_path / "state", flipped(flipped(sound, header_bytes), len(sound) - 1))
    assert "page, bytes" in said


def test_damage_in_a_late_piece_of_a_large_tensor_is_found(tmp_path: Path) -> None:
    path = tmp_path / "state"
    checkpoint.save({"small": numbers(3), "large": numbers(9 << 20, torch.uint8)}, path)
    data = path.read_bytes()
    for position in (len(data) - 1, len(data) - (5 << 20)):
        for mmap in (True, False):
            refused(path, flipped(data, position), mmap=mmap)


def test_verification_can_be_left_out(sound: bytes, tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(flipped(sound, len(sound) - 1))
    for mmap in (True, False):
        loaded = checkpoint.load(path, mmap=mmap, verify=False)
        assert not torch.equal(loaded["bytes"], STATE["bytes"])
        assert same(loaded["layer.weight"], STATE["layer.weight"])


def test_every_cut_is_found(sound: bytes, header_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(sound)
    ends, end = set(), header_bytes
    for tensor in checkpoint.info(path).tensors:
        ends |= {end, end + tensor.size_bytes // 2, end + tensor.size_bytes}
        end += tensor.size_bytes
    cuts = {0, 1, 7, 8, 9, header_bytes // 2, 4095, 4096, len(sound)} | ends
    for cut in sorted({near for each in cuts for near in (each - 1, each, each + 1)}):
        if 0 <= cut < len(sound):
            refused(path, sound[:cut])
    refused(path, sound + b"\0")


@quick
@given(data=st.binary(max_size=200))
@example(data=b"")
@example(data=b"PK\x03\x04 and no zip")
@example(data=b"{}")
@example(data=pickle.dumps({"a": 1}, protocol=2))
@example(data=b"plain text, longer than eight bytes\n" * 20)
@example(data=(2).to_bytes(8, "little") + b"[]")
@example(data=(10**15).to_bytes(8, "little") + b"{}")
def test_what_is_no_checkpoint_is_refused(data: bytes, tmp_path: Path) -> None:
    refused(tmp_path / "state", data)


@quick
@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.binary(max_size=8)), min_size=1, max_size=5), st.data())
def test_a_file_changed_in_several_places_is_refused_or_the_same(
    sound: bytes, tmp_path: Path, changes: list[tuple[int, bytes]], data: st.DataObject
) -> None:
    changed = bytearray(sound)
    for position, content in changes:
        position %= len(changed) + 1
        removed = data.draw(st.sampled_from([0, len(content), 4]))
        changed[position : position + removed] = content
    if bytes(changed) != sound:
        refused(tmp_path / "state", bytes(changed), mmap=data.draw(st.sampled_from([True, False])))


def test_old_pickles_say_how_to_convert_them(tmp_path: Path) -> None:
    torch.save({"a": numbers(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(penstock.InvalidFile, match=r"is a pickle.*weights_only=False"):
        checkpoint.load(tmp_path / "old.pt")


def test_an_empty_file_is_called_empty(tmp_path: Path) -> None:
    assert "is empty" in refused(tmp_path / "state", b"")


@pytest.mark.parametrize(
    ("name", "said"), [("none", "No such file"), (".", "Is a directory"), ("/dev/null", "regular file")]
)
def test_what_is_no_file_is_an_error_of_reading(name: str, said: str, tmp_path: Path) -> None:
    for read in (checkpoint.load, checkpoint.info, checkpoint.verify):
        with pytest.raises(CheckpointError, match=said) as error:
            read(tmp_path / name)
        assert isinstance(error.value, OSError) and error.value.errno
