"""Of several who would write a store to a namespace one does, and the others are told who it is."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SampleError, SpillError
from penstock.samples import mount, pack, upload
from penstock.storage.nvme.contents import (
    IN_USE,
    MARKER_BYTES,
    SPILL_MAGIC,
    WRITER_MAGIC,
    WRITER_OFFSET,
    Marker,
    in_the_way,
    known_contents,
    marker_of,
    own_marker,
)
from penstock.storage.nvme.url import parse_url
from penstock.storage.spill_namespace import SpillNamespace
from tests.support.apart import Program, Running, python
from tests.support.nvme_target.process import Target
from tests.support.remote_stores import MIB, Clock, image_of, serving, url_of
from tests.support.sample_stores import some_samples

ROOT = Path(__file__).parents[2]
SAMPLES = [*some_samples(20, seed=1), *((f"large/{n}", bytes([n]) * (20 * MIB)) for n in range(10))]
TIMEOUT_S = 10.0
# Half an upload, and no end to it.
UPLOADING = """
import sys, time
from penstock.samples import upload
def progress(done, whole):
    if done:
        print("half", flush=True)
        time.sleep(1000)
upload(sys.argv[1], sys.argv[2], progress=progress)
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "a.store"
    pack(SAMPLES, folder)
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    with serving(tmp_path, size_bytes=300 * MIB, honest=False) as target:
        yield target


def is_whole(url: str) -> bool:
    with mount(url, timeout_s=TIMEOUT_S) as found:
        return list(found.names()) == [name for name, _ in SAMPLES] and found.read(25) == SAMPLES[25][1]


def marker_in(folder: Path) -> bytes:
    with open(image_of(folder), "rb") as image:
        image.seek(WRITER_OFFSET)
        return image.read(MARKER_BYTES)


def put(folder: Path, marker: Marker) -> None:
    with open(image_of(folder), "r+b") as image:
        image.seek(WRITER_OFFSET)
        image.write(marker.encoded(WRITER_MAGIC))


def elsewhere(lease_s: int) -> Marker:
    return own_marker()._replace(place=bytes(16), process=7, host=b"far", lease_s=lease_s)


def once(act: Callable[[], None]) -> Callable[[int, int], None]:
    """When a part is durable."""
    left = [act]

    def progress(durable_bytes: int, _: int) -> None:
        if durable_bytes and left:
            left.pop()()

    return progress


def test_a_second_upload_is_told_who_writes(store: Path, target: Target, tmp_path: Path) -> None:
    url, texts = url_of(target), []

    def others() -> None:
        with pytest.raises(SampleError) as error:
            upload(store, url, timeout_s=TIMEOUT_S, overwrite=True)
        texts.append(str(error.value))
        code = "import sys; from penstock.samples import upload; upload(sys.argv[1], sys.argv[2])"
        texts.append(python(code, store, url).stderr.splitlines()[-1])

    upload(store, url, timeout_s=TIMEOUT_S, progress=once(others))
    assert len(texts) == 2
    for text in texts:
        assert f"process {os.getpid()} on " in text and "nothing more was written" in text
    assert is_whole(url)
    assert not any(marker_in(tmp_path))


def test_an_upload_that_was_killed_is_gone_on_with(
    store: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, url = Clock(monkeypatch), url_of(target)
    first = Running(Program(UPLOADING, (store, url)))
    first.wait_for("half\n")
    with pytest.raises(SampleError, match=f"process {first.process.pid} on "):
        upload(store, url, timeout_s=TIMEOUT_S)
    first.end(0)
    left = marker_of(marker_in(tmp_path), WRITER_MAGIC)
    assert left is not None
    done = upload(store, url, timeout_s=TIMEOUT_S)
    assert clock.slept_s < left.quiesce_s + 1 < left.lease_s  # the process is gone
    assert 0 < done.written_bytes < done.size_bytes
    assert is_whole(url)


def test_a_writer_on_another_machine_is_known_by_its_signs(
    store: Path, target: Target, tmp_path: Path
) -> None:
    there, ended = elsewhere(lease_s=30), threading.Event()

    def renew() -> None:
        marker = there
        while not ended.wait(0.5):
            marker = marker._replace(sign_s=marker.sign_s + 1)
            put(tmp_path, marker)

    put(tmp_path, there)
    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(SampleError, match="process 7 on far writes to "):
            upload(store, url_of(target), timeout_s=TIMEOUT_S)
    finally:
        ended.set()
        thread.join()
    put(tmp_path, elsewhere(lease_s=1))
    upload(store, url_of(target), timeout_s=TIMEOUT_S)
    assert is_whole(url_of(target))


def test_who_was_taken_over_stops(store: Path, target: Target, tmp_path: Path) -> None:
    url, other = url_of(target), elsewhere(lease_s=30)

    def take_over() -> None:
        put(tmp_path, other)
        time.sleep(3)  # longer than it trusts what it has read

    with pytest.raises(SampleError, match="process 7 on far has begun to write to "):
        upload(store, url, timeout_s=TIMEOUT_S, progress=once(take_over))
    assert marker_in(tmp_path) == other.encoded(WRITER_MAGIC)
    with pytest.raises(SampleError, match="was not finished"):
        mount(url, timeout_s=TIMEOUT_S)


def test_the_same_process_tries_again(store: Path, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    with pytest.raises(SampleError):
        upload(store, url_of(target), timeout_s=1.0, progress=once(target.kill))
    target.start()
    upload(store, url_of(target), timeout_s=TIMEOUT_S)
    assert is_whole(url_of(target))


def test_runs_and_uploads_keep_off_each_other(store: Path, target: Target) -> None:
    url = url_of(target)

    def spill() -> None:
        with pytest.raises(SpillError, match="would destroy what lies there, a "):
            SpillNamespace(parse_url(url), TIMEOUT_S)

    upload(store, url, timeout_s=TIMEOUT_S, progress=once(spill))
    assert is_whole(url)


def test_a_store_does_not_replace_a_run_that_goes_on(store: Path, target: Target) -> None:
    space = SpillNamespace(parse_url(url_of(target)), TIMEOUT_S)
    with pytest.raises(SampleError, match=f"process {os.getpid()} on .* spills tensors to "):
        upload(store, url_of(target), timeout_s=TIMEOUT_S, overwrite=True)
    space.close()
    upload(store, url_of(target), timeout_s=TIMEOUT_S, overwrite=True)
    assert is_whole(url_of(target))


MARKERS = st.builds(
    Marker,
    st.just(IN_USE),
    st.binary(min_size=16, max_size=16),
    st.binary(min_size=16, max_size=16),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.binary(min_size=64, max_size=64),
    *[st.integers(0, 2**32 - 1)] * 3,
)


@given(marker=MARKERS, place=st.integers(0, 151), flipped=st.integers(1, 255))
def test_a_damaged_marker_is_none(marker: Marker, place: int, flipped: int) -> None:
    block = bytearray(marker.encoded(WRITER_MAGIC))
    assert marker_of(block, WRITER_MAGIC) == marker
    assert marker_of(block) is None and marker_of(marker.encoded()) == marker
    assert marker_of(marker.encoded(), WRITER_MAGIC) is None and SPILL_MAGIC != WRITER_MAGIC
    head = bytearray(MIB)
    head[WRITER_OFFSET : WRITER_OFFSET + MARKER_BYTES] = block
    assert known_contents(head) is None
    assert "uploads" in (in_the_way(head) or "")
    block[place] ^= flipped
    assert marker_of(block, WRITER_MAGIC) is None
