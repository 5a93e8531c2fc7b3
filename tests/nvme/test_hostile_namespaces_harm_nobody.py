"""A namespace made to do harm, its checksums right, gives an error or the samples that it says it has."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import PenstockError
from penstock.samples import info, mount, upload, verify
from penstock.storage.checksum import crc32c
from tests.support.nvme_target.process import Target
from tests.support.remote_stores import MIB, TIMEOUT_S, image_of, serving, url_of
from tests.support.sample_stores import epoch, some_samples
from tests.support.stores import write_store

SAMPLES = some_samples(40)
BYTES = {data for _, data in SAMPLES}
TABLE = MIB

quick = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Target, npt.NDArray[np.uint8], bytes]]:
    """A target, the bytes of its namespace, and what they were after the upload."""
    folder = tmp_path_factory.mktemp("hostile")
    write_store(folder / "store", SAMPLES, data_file_bytes=30_000)
    with serving(folder) as target:
        upload(folder / "store", url_of(target))
        image = np.memmap(image_of(folder), np.uint8)
        yield target, image, image.tobytes()


def seal(image: npt.NDArray[np.uint8]) -> None:
    """Make the checksums of the table and of the superblocks right."""
    (table_bytes,) = struct.unpack_from("<Q", image, 88)
    table = image[TABLE : TABLE + min(table_bytes, MIB)].tobytes()
    for at in (0, 512 << 10):
        struct.pack_into("<I", image, at + 96, crc32c(table))
        struct.pack_into("<I", image, at + 508, crc32c(image[at : at + 508].tobytes()))


def look(target: Target) -> None:
    """Every way in which a store is read: an error of penstock's, or samples that were packed."""
    url = url_of(target)
    for act in (info, verify):
        with contextlib.suppress(PenstockError):
            act(url)
    with contextlib.suppress(PenstockError), mount(url, cache_bytes="64KiB", timeout_s=TIMEOUT_S) as store:
        assert set(epoch(store).values()) <= BYTES
        for index in range(len(store)):
            assert store.read(index) in BYTES


numbers = st.integers(0, 40).map(lambda count: count * MIB) | st.integers(0, (1 << 64) - 1)


@given(st.integers(0, 10), st.sampled_from([0, 8]), numbers)
@quick
def test_files_that_cannot_be_where_they_are(served: Any, record: int, field: int, number: int) -> None:
    target, image, sound = served
    image[:] = np.frombuffer(sound, np.uint8)
    struct.pack_into("<Q", image, TABLE + 64 * record + field, number)
    seal(image)
    look(target)


@given(st.sampled_from([24, 64, 72, 80, 88, 104, 112]), numbers)
@quick
def test_superblocks_that_cannot_be(served: Any, offset: int, number: int) -> None:
    target, image, sound = served
    image[:] = np.frombuffer(sound, np.uint8)
    for at in (0, 512 << 10):
        struct.pack_into("<Q", image, at + offset, number)
    seal(image)
    look(target)


@given(st.data())
@quick
def test_damage_anywhere(served: Any, data: st.DataObject) -> None:
    target, image, sound = served
    image[:] = np.frombuffer(sound, np.uint8)
    for _ in range(data.draw(st.integers(1, 4))):
        record = data.draw(st.integers(0, 10))
        offset, size_bytes = struct.unpack_from("<QQ", sound, TABLE + 64 * record)
        if size_bytes:
            image[offset + data.draw(st.integers(0, size_bytes - 1))] ^= data.draw(st.integers(1, 255))
    look(target)


def test_the_sound_one_is_read(served: Any) -> None:
    target, image, sound = served
    image[:] = np.frombuffer(sound, np.uint8)
    seal(image)
    assert image.tobytes() == sound
    assert verify(url_of(target)).sound
    with mount(url_of(target), timeout_s=TIMEOUT_S) as store:
        assert epoch(store) == {index: data for index, (_, data) in enumerate(SAMPLES)}
