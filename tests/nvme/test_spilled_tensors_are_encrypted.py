"""What is spilled to another machine says nothing there, and comes back as it was or as an error."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import SpillError
from penstock.runtime import arena
from penstock.storage.aligned import AlignedBuffer
from penstock.storage.extents import Extent
from penstock.storage.nvme.contents import IN_USE, marker_of
from penstock.storage.spill import SpillSpace
from tests.nvme.test_tensors_are_spilled_to_remote_drives import Moved, there_and_back
from tests.support.nvme_target.process import Target
from tests.support.remote_stores import MIB, Clock, image_of, serving, url_of
from tests.support.runs import check_same, family_training

paging = pytest.mark.skipif(arena.unavailable() is not None, reason="no paging here")
NOISE = np.random.default_rng(3).bytes(MIB)


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    with serving(tmp_path, size_bytes=64 * MIB) as target:
        yield target


@pytest.fixture
def space(target: Target) -> Iterator[SpillSpace]:
    with SpillSpace(url_of(target, options="&encrypt=1")) as space:
        yield space


def move(begin: Callable[..., object], extent: Extent, buffer: AlignedBuffer) -> None:
    moved = Moved()
    begin(extent, buffer.address, buffer.size_bytes, buffer, moved)
    moved.wait()


def filled(content: bytes) -> AlignedBuffer:
    buffer = AlignedBuffer(len(content))
    buffer.view()[:] = content
    return buffer


def spilled(tmp_path: Path) -> bytes:
    """What lies there, behind the marker: as much as these tests write."""
    with open(image_of(tmp_path), "rb") as image:
        image.seek(MIB)
        return image.read(8 * MIB)


@paging
@pytest.mark.parametrize("lose", ["nothing", "a connection"])
def test_training_has_the_same_bits(target: Target, lose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)  # each run loses writes
    if lose == "a connection":
        target.fault("reset", "write", after=20)
    written = arena.stats().swapped_out_bytes
    for _, report in check_same(family_training("gpt", 4), url_of(target, options="&encrypt=1"), 0.0, 0.5):
        assert report.evicted_bytes > 0
    assert arena.stats().swapped_out_bytes > written  # the arena's own writes went there too
    assert target.armed() == 0


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size_bytes=st.integers(1, 3 * MIB) | st.sampled_from([4095, 4096, 4097, 8192, MIB, MIB + 1]))
def test_any_size_comes_back(space: SpillSpace, size_bytes: int) -> None:
    there_and_back(space, size_bytes, seed=size_bytes)


@pytest.mark.parametrize("options", ["", "&encrypt=0", "&encrypt=1"])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_what_crosses_the_network_is_encrypted(
    target: Target, tmp_path: Path, host: str, options: str
) -> None:
    """0.0.0.0 leads here, and says nothing of it."""
    zeros = bytes(MIB)
    with SpillSpace(url_of(target, options=options).replace("127.0.0.1", host)) as space:
        for content in (NOISE, zeros):
            move(space.write, space.allocate(MIB), filled(content))
        there = spilled(tmp_path)
        with open(image_of(tmp_path), "rb") as image:
            head = marker_of(image.read(4096))
    assert head is not None and head.state == IN_USE
    in_the_clear = options == "&encrypt=0" or (options == "" and host == "127.0.0.1")
    assert (NOISE in there) == in_the_clear
    if not in_the_clear:
        assert not any(NOISE[at : at + 32] in there for at in range(0, MIB, 40_961))
        pieces = [there[at : at + 4096] for at in range(0, 2 * MIB, 4096)]
        assert len(set(pieces)) == len(pieces)  # zeros are not all alike either


def test_each_run_has_a_key_of_its_own(target: Target, tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        with SpillSpace(url_of(target, options="&encrypt=1")) as space:
            move(space.write, space.allocate(MIB), filled(NOISE))
            found.append(spilled(tmp_path)[: 2 * MIB])
    assert found[0] != found[1]


@pytest.mark.parametrize("how", ["changed", "older", "moved", "zeros"])
def test_what_was_changed_there_is_an_error(space: SpillSpace, tmp_path: Path, how: str) -> None:
    extent, back = space.allocate(MIB), AlignedBuffer(MIB)
    move(space.write, extent, filled(NOISE))
    older = spilled(tmp_path)
    move(space.write, extent, filled(NOISE))  # the same bytes, and not the same there
    newer = spilled(tmp_path)
    place = next(at for at in range(0, len(newer), 4096) if newer[at : at + 4096] != bytes(4096))
    assert older[place : place + 4096] != newer[place : place + 4096]
    move(space.read, extent, back)
    assert bytes(back.view()) == NOISE
    at = place + 40 * 4096
    wrong = {
        "changed": newer[at : at + 100] + bytes([newer[at + 100] ^ 1]) + newer[at + 101 : at + 4096],
        "older": older[at : at + 4096],
        "moved": newer[at + 4096 : at + 8192],
        "zeros": bytes(4096),
    }[how]
    with open(image_of(tmp_path), "r+b") as image:
        image.seek(MIB + at)
        image.write(wrong)
    back.view()[:] = b"x" * MIB
    with pytest.raises(SpillError, match="not what was written there: somebody has changed") as error:
        move(space.read, extent, back)
    assert error.value.errno == errno.EBADMSG
    with open(image_of(tmp_path), "r+b") as image:
        image.seek(MIB + at)
        image.write(newer[at : at + 4096])
    move(space.read, extent, back)
    assert bytes(back.view()) == NOISE


def test_what_nobody_has_written_is_an_error(space: SpillSpace) -> None:
    with pytest.raises(SpillError, match="not what was written there"):
        move(space.read, space.allocate(4096), AlignedBuffer(4096))
