"""A store made to do harm, its checksums right, gives an error or samples, and touches nothing but itself."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import resource
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidFile, PenstockError
from penstock.samples import encode
from penstock.samples.inspection import info
from penstock.samples.store import Store, mount
from penstock.samples.unpacking import unpack
from penstock.samples.verification import verify
from penstock.storage.checksum import crc32c
from tests.support.folders import folder_in_memory
from tests.support.sample_stores import some_samples
from tests.support.stores import write_store

CONTENT = some_samples(60)
METADATA = ["directory.bin", "sums.bin", "chunks.bin", "names.bin", "anchors.bin", "lookup.bin", "labels.bin"]
DATA = ["data-00000.bin", "data-00001.bin"]
MOST_MORE_BYTES = 2 << 30  # of address space
quick = settings(
    max_examples=100,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "store"
    write_store(folder, CONTENT, data_file_bytes=60_000, labels=[0] * len(CONTENT), classes=["one"])
    return folder


@pytest.fixture(autouse=True)
def hangs_are_failures() -> Iterator[None]:
    def give_up(*_: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(300)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def little_memory() -> Iterator[None]:
    """An allocation as large as a hostile number fails, and so does the test."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_MORE_BYTES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def seal(folder: Path, value: dict[str, Any]) -> None:
    value["crc32c"] = 0
    value["crc32c"] = crc32c(json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode())
    document = {"schema": "penstock.storemanifest/1", "value": value}
    (folder / "store.json").write_text(json.dumps(document, ensure_ascii=False))


def manifest_of(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "store.json").read_text())["value"]
    return value


def rewrite(folder: Path, name: str, data: bytes) -> None:
    """Other bytes for a file, which the manifest confirms."""
    (folder / name).write_bytes(data)
    value = manifest_of(folder)
    if name in value["files"]:
        value["files"][name] = {"size_bytes": len(data), "crc32c": crc32c(data)}
    seal(folder, value)


def by_name(folder: Path, **options: Any) -> None:
    with mount(folder, **options) as store:
        for name in store.names():
            if name in store:
                store.read(name)


def at_once(folder: Path, **options: Any) -> None:
    with mount(folder, **options) as store:
        _ = store.labels, store.firsts, store.sizes(range(len(store)))
        store.read_many(range(len(store))).decoded()


def in_order(folder: Path, **options: Any) -> None:
    with mount(folder, **options) as store:
        drain(store)


def drain(store: Store) -> None:
    left = len(store)
    while (batch := store.bread(7)) is not None:
        left -= len(batch)
    assert left >= 0


@contextlib.contextmanager
def copied(store: Path) -> Iterator[Path]:
    with folder_in_memory() as folder:
        yield Path(shutil.copytree(store, Path(folder) / "store"))


def every_use(folder: Path, **options: Any) -> None:
    """Everything that a user may do with a store that came from elsewhere."""
    uses: list[Callable[[], object]] = [
        *(lambda use=use: use(folder, timeout_s=10, **options) for use in (by_name, at_once, in_order)),
        lambda: info(folder),
        lambda: verify(folder),
        lambda: unpack(folder, folder.parent / "out", flat=True),
    ]
    for use in uses:
        with contextlib.suppress(PenstockError):
            use()
    shutil.rmtree(folder.parent / "out", ignore_errors=True)


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/hostname", "sub/secret", "extra.bin", "", ".", "data-00000.bin"]
)
def test_a_manifest_names_no_other_file(name: str, sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "store")
    secret = b"secret"
    (tmp_path / "secret").write_bytes(secret)
    value = manifest_of(tmp_path / "store")
    value["files"][name] = {"size_bytes": len(secret), "crc32c": crc32c(secret)}
    seal(tmp_path / "store", value)
    for use in (mount, verify, info):
        with pytest.raises(InvalidFile, match="not a file of a store"):
            use(tmp_path / "store")


@pytest.mark.parametrize("name", ["store.json", *METADATA, *DATA])
@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_not_a_regular_file_is_refused_at_once(
    name: str, kind: str, sound: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "store"
    shutil.copytree(sound, folder)
    (folder / name).unlink()
    if kind == "pipe":
        os.mkfifo(folder / name)
    elif kind == "folder":
        (folder / name).mkdir()
    else:
        (folder / name).symlink_to("/dev/zero")
    with pytest.raises(PenstockError, match="is not a regular file"):
        by_name(folder)
    with contextlib.suppress(PenstockError):
        assert not verify(folder).sound


def test_links_to_files_are_followed(sound: Path, tmp_path: Path) -> None:
    """As caches of downloaded files have them."""
    (tmp_path / "store").mkdir()
    for path in sound.iterdir():
        (tmp_path / "store" / path.name).symlink_to(path)
    with mount(tmp_path / "store") as store:
        assert [store.read(index) for index in range(len(store))] == [data for _, data in CONTENT]


WORDS = st.sampled_from([0, 1, 255, 1 << 23, 1 << 24, (1 << 24) - 1, 1 << 39, 1 << 63, (1 << 64) - 1])


@quick
@given(
    name=st.sampled_from([*METADATA, *DATA]),
    words=st.lists(st.tuples(st.integers(0, 1 << 16), WORDS | st.integers(0, (1 << 64) - 1)), max_size=4),
    longer=st.sampled_from([0, 0, 0, 1, 16, 4096, -1, -16]),
    order=st.sampled_from(["full", "chunk"]),
    on_damage=st.sampled_from(["raise", "skip"]),
)
@pytest.mark.usefixtures("little_memory")
def test_any_bytes_with_right_checksums_give_an_error_or_samples(
    sound: Path,
    name: str,
    words: list[tuple[int, int]],
    longer: int,
    order: str,
    on_damage: str,
) -> None:
    data = bytearray((sound / name).read_bytes())
    for place, word in words:
        struct.pack_into("<Q", data, place % (len(data) // 8) * 8, word)
    data = data + bytes(longer) if longer >= 0 else data[:longer]
    with copied(sound) as folder:
        rewrite(folder, name, bytes(data))
        every_use(folder, order=order, on_damage=on_damage, cache_bytes="64KiB")


@pytest.mark.usefixtures("little_memory")
def test_samples_that_share_their_bytes_do_not_fill_the_memory_or_the_disk(tmp_path: Path) -> None:
    large = bytes(2 << 20)
    folder = tmp_path / "store"
    write_store(
        folder, [("large", large), *[(str(index), b"x") for index in range(4000)]], chunk_bytes=1 << 20
    )
    entries = np.frombuffer((folder / "directory.bin").read_bytes(), "<u8").reshape(-1, 2).copy()
    entries[:, 1] = len(large) << 1
    rewrite(folder, "directory.bin", entries.tobytes())
    rewrite(folder, "sums.bin", np.full(len(entries), crc32c(large), "<u4").tobytes())
    for order in ("full", "chunk"):
        with mount(folder, order) as store:
            assert store.read(3000) == large
            assert store.read_many([3000] * 3).data.nbytes == 3 * len(large)
            with pytest.raises(PenstockError, match="a place that cannot be"):
                store.read_many(range(4001))
            with pytest.raises(PenstockError, match="a place that cannot be"):
                store.bread(4001)
    with pytest.raises(InvalidFile, match="more bytes than the store has"):
        unpack(folder, tmp_path / "out")


HOSTILE: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, -1, 0, 1, 2, 1.5, 1e308, 255, 4096, 1 << 31, 1 << 40, 1 << 63, (1 << 64) - 1, 1 << 80]
    + ["", "..", "/", "../x", "\0", "<f4", "|O", "record", "msgpack", "raw", [], [[]], {}, {"": 0}]
    + [[-1], [1 << 62] * 3, [0, 1 << 62], [1] * 40, [{"name": "a", "dtype": "<f8", "shape": [0, 1 << 62]}]]
    + [[{"name": "a", "dtype": "|u1", "shape": []}], [{"name": "a", "dtype": "|u1", "shape": [900]}] * 2]
)


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(value, dict):
        found += [place for key in value for place in places_in(value[key], (*path, key))]
    elif isinstance(value, list):
        found += [place for at, each in enumerate(value) for place in places_in(each, (*path, at))]
    return found


@quick
@given(
    encoding=st.sampled_from(["raw", "record", "msgpack"]),
    changes=st.lists(st.tuples(st.integers(0, 1000), HOSTILE), min_size=1, max_size=3),
)
@pytest.mark.usefixtures("little_memory")
def test_any_manifest_gives_an_error_or_samples(
    sound: Path, encoding: str, changes: list[tuple[int, Any]]
) -> None:
    value = manifest_of(sound)
    value |= {"encoding": encoding, "fields": [{"name": "a", "dtype": "|u1", "shape": [3]}]}
    for at, other in changes:
        places = places_in(value)
        *above, last = places[at % len(places)]
        holder = value
        for key in above:
            holder = holder[key]
        holder[last] = copy.deepcopy(other)
    with copied(sound) as folder:
        seal(folder, value)
        every_use(folder)


@quick
@given(
    text=st.binary(max_size=200) | st.sampled_from([b"[" * 100_000, b'{"schema":' * 9999, b"\x1f\x8b" * 99])
)
def test_any_text_as_a_manifest_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "store.json").write_bytes(text)
    for use in (mount, info, verify):
        with pytest.raises(InvalidFile):
            use(tmp_path)


FIELDS = encode({"a": [1.5, {"b": b"x" * 9}], "c": np.arange(12).reshape(3, 4), "d": "ä" * 40})


@quick
@given(
    edits=st.lists(st.tuples(st.integers(0, len(FIELDS) - 1), st.integers(0, 255)), max_size=4),
    cut=st.integers(0, len(FIELDS)),
)
@pytest.mark.usefixtures("little_memory")
def test_any_fields_of_a_sample_give_an_error_or_values(
    tmp_path: Path, edits: list[tuple[int, int]], cut: int
) -> None:
    data = bytearray(FIELDS)
    for place, byte in edits:
        data[place] = byte
    write_store(tmp_path / "store", [("one", bytes(data[cut:] if cut % 2 else data))], encoding="msgpack")
    with mount(tmp_path / "store") as store, contextlib.suppress(PenstockError):
        assert isinstance(store.sample(0), dict)
    every_use(tmp_path / "store")
