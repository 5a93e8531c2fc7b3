"""Whatever the store, the batches and the way of reading: samples come with their bytes, in their order."""

from __future__ import annotations

import errno
import os
import signal
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock._native import SampleFailure
from tests.support.apart import python
from tests.support.native_reader import WAIT_S, breads, mounted, parts
from tests.support.stores import write_store

KINDS = ["chunk", "full"]
lengths = st.one_of(st.integers(0, 300), st.sampled_from([511, 1024, 4095, 4096, 5000, 9000, 20000]))


def sample_bytes(index: int, length: int) -> bytes:
    return np.random.default_rng(index).bytes(length)


def store_of(folder: Path, sizes: list[int], first: int = 0, **options: int) -> list[bytes]:
    data = [sample_bytes(first + index, length) for index, length in enumerate(sizes)]
    write_store(folder, [(f"sample {index}", one) for index, one in enumerate(data)], **options)
    return data


@settings(max_examples=60, derandomize=True)
@given(
    stores=st.lists(st.lists(lengths, max_size=40), min_size=1, max_size=3),
    data_file_bytes=st.sampled_from([20000, 1 << 40]),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    slots=st.integers(1, 5),
    buffers=st.integers(0, 60),
    prefetch_bytes=st.sampled_from([0, 10000, 1 << 20]),
    kind=st.sampled_from(KINDS),
    direct=st.booleans(),
    ring=st.booleans(),
    copy_threads=st.sampled_from([0, 2]),
    skipped=st.integers(0, 50),
)
def test_every_store_comes_back(
    stores: list[list[int]],
    data_file_bytes: int,
    sizes: list[int],
    slots: int,
    buffers: int,
    prefetch_bytes: int,
    kind: str,
    direct: bool,
    ring: bool,
    copy_threads: int,
    skipped: int,
) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folders, data = [], []
        for number, store in enumerate(stores):
            folders.append(Path(temporary) / str(number))
            data += store_of(folders[-1], store, len(data), data_file_bytes=data_file_bytes)
        options = {"buffers": buffers, "direct": direct, "ring": ring, "copy_threads": copy_threads}
        with mounted(*folders, **options) as store:
            order = store.order(kind, slots=slots)
            gone = order.skip(skipped)
            expected = store.order(kind, slots=slots).take(len(data))[gone:].tolist()
            feed = store.reader.feed(order, 1, prefetch_bytes, False)
            assert feed.taken == gone
            found = breads(feed, sizes)
            assert [index for index, _ in found] == expected
            assert [one for _, one in found] == [data[index] for index in expected]
            assert feed.taken == len(data)
            assert feed.bread(1, WAIT_S) is None
            assert [store.reader.read(index, WAIT_S) for index in range(len(data))] == data
            wanted = np.array(expected[::3] * 2, np.int64)
            assert parts(*store.reader.gather(wanted, WAIT_S)[1:]) == [data[index] for index in wanted]


@pytest.mark.parametrize("kind", KINDS)
def test_batches_may_outlive_everything(tmp_path: Path, kind: str) -> None:
    data = store_of(tmp_path, [100] * 200)
    with mounted(tmp_path) as store:
        feed = store.feed(kind)
        batches = [feed.bread(16, WAIT_S) for _ in range(10)]
        del feed
    for batch in batches:
        assert batch is not None
        indices, values, offsets = batch
        assert parts(values, offsets) == [data[index] for index in indices]


def test_a_second_epoch_reads_nothing_where_all_chunks_fit(tmp_path: Path) -> None:
    store_of(tmp_path, [100] * 400)
    with mounted(tmp_path, buffers=100) as store:
        for kind in ("full", "chunk", "full"):
            breads(store.feed(kind, slots=100), [50])
        assert store.reader.counters()["chunk_reads"] == len(store.firsts) - 1
        assert store.reader.counters()["sample_reads"] == 0


def test_several_feeds_share_a_reader(tmp_path: Path) -> None:
    data = store_of(tmp_path, [100] * 400)
    with mounted(tmp_path, buffers=4) as store:
        feeds = [store.feed(kind) for kind in KINDS * 2]
        found: list[list[tuple[int, bytes]]] = [[] for _ in feeds]
        for _ in range(50):
            for feed, got in zip(feeds, found, strict=True):
                batch = feed.bread(8, WAIT_S)
                assert batch is not None
                got += zip(batch[0].tolist(), parts(batch[1], batch[2]), strict=True)
        for got in found:
            assert sorted(got) == list(enumerate(data))


# -- damage --------------------------------------------------------------------------------------


def damage(folder: Path, offset: int) -> None:
    with open(folder / "data-00000.bin", "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("buffers", [0, 100])
def test_a_flipped_bit_is_an_error_that_names_the_sample(tmp_path: Path, kind: str, buffers: int) -> None:
    store_of(tmp_path, [100] * 200)
    damage(tmp_path, 100 * 77 + 5)
    with mounted(tmp_path, buffers=buffers) as store:
        feed = store.feed(kind)
        for _ in range(2):  # it stays as it is
            with pytest.raises(SampleFailure) as raised:
                breads(feed, [7])
            assert raised.value.args == ("checksum", 0, 0, 7700, 100, 77, 0)
        with pytest.raises(SampleFailure) as raised:
            store.reader.read(77, WAIT_S)
        assert raised.value.args[5] == 77
        with pytest.raises(SampleFailure):
            store.reader.gather(np.array([76, 77]), WAIT_S)
        assert store.reader.read(76, WAIT_S) == sample_bytes(76, 100)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("buffers", [0, 100])
def test_damaged_samples_can_be_skipped(tmp_path: Path, kind: str, buffers: int) -> None:
    data = store_of(tmp_path, [100] * 200 + [3000] * 5)
    bad = [3, 77, 78, 199, 202]
    for index in bad:
        damage(tmp_path, 100 * min(index, 200) + 3000 * max(0, index - 200) + 5)
    with mounted(tmp_path, buffers=buffers) as store:
        order = store.order(kind).take(205).tolist()
        feed = store.feed(kind, skip_damaged=True)
        found = breads(feed, [10, 1, 31])
        assert [index for index, _ in found] == [index for index in order if index not in bad]
        assert all(one == data[index] for index, one in found)
        assert feed.skipped() == [index for index in order if index in bad]
        assert feed.skipped() == []
        assert feed.taken == 205


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("direct", [False, True])
def test_a_truncated_file_is_an_error_and_can_be_skipped(tmp_path: Path, kind: str, direct: bool) -> None:
    data = store_of(tmp_path, [100] * 200)
    os.truncate(tmp_path / "data-00000.bin", 8192)
    with mounted(tmp_path, buffers=0, direct=direct) as store:
        with pytest.raises(SampleFailure) as raised:
            breads(store.feed(kind), [7])
        assert raised.value.args[0] == "read"
        assert raised.value.args[6] == errno.EIO
        feed = store.feed(kind, skip_damaged=True)
        found = breads(feed, [7])
        lost = feed.skipped()
        assert all(one == data[index] for index, one in found)
        assert sorted([index for index, _ in found] + lost) == list(range(200))
        assert len(found) > 40


def test_without_verifying_nothing_is_checked(tmp_path: Path) -> None:
    store_of(tmp_path, [100] * 200)
    damage(tmp_path, 5)
    with mounted(tmp_path, verify=False) as store:
        for kind in KINDS:
            assert len(breads(store.feed(kind), [7])) == 200
        assert store.reader.read(0, WAIT_S) != sample_bytes(0, 100)


def test_a_wrong_sum_of_a_chunk_alone_costs_no_sample(tmp_path: Path) -> None:
    data = store_of(tmp_path, [100] * 200)
    with open(tmp_path / "chunks.bin", "r+b") as file:
        file.seek(8)
        file.write(b"oops")
    with mounted(tmp_path) as store:
        assert sorted(breads(store.feed("chunk"), [7])) == list(enumerate(data))


@settings(max_examples=60, derandomize=True)
@given(
    file=st.sampled_from(["directory.bin", "chunks.bin", "large.bin"]),
    places=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=20),
    kind=st.sampled_from(KINDS),
    buffers=st.sampled_from([0, 3, 100]),
)
def test_files_that_contradict_themselves_do_no_harm(
    file: str, places: list[tuple[float, int]], kind: str, buffers: int
) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "store"
        data = store_of(folder, [100] * 90 + [5000, 0, 9000] + [50] * 40)
        (folder / "large.bin").touch()
        content = bytearray((folder / file).read_bytes())
        for place, value in places:
            if content:
                content[int(place * (len(content) - 1))] = value
        (folder / file).write_bytes(content)
        with mounted(folder, buffers=buffers) as store:
            store.firsts = np.maximum.accumulate(np.minimum(store.firsts, np.uint64(len(data))))
            store.firsts[0] = 0
            feed = store.feed(kind, skip_damaged=True)
            found = breads(feed, [9])
            assert sorted([index for index, _ in found] + feed.skipped()) == list(range(len(data)))
            assert all(one == data[index] for index, one in found)


@pytest.mark.parametrize("buffers", [0, 3, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_an_entry_that_leads_into_another_chunk_is_damaged(kind: str, buffers: int, tmp_path: Path) -> None:
    data = store_of(tmp_path, [100] * 90)  # in three chunks
    entries = np.fromfile(tmp_path / "directory.bin", "<u8").reshape(-1, 2)
    entries[74, 1] = entries[2, 1]
    entries.tofile(tmp_path / "directory.bin")
    with mounted(tmp_path, buffers=buffers) as store:
        feed = store.feed(kind, skip_damaged=True)
        assert sorted(breads(feed, [9])) == [each for each in enumerate(data) if each[0] != 74]
        assert feed.skipped() == [74]


WRITE_WHILE_READING = """
import sys, threading
from pathlib import Path
import numpy as np
from tests.support.native_reader import WAIT_S, mounted
sys.setswitchinterval(1e-4)
indices, done = np.arange(200).repeat(100), threading.Event()
def write():
    while not done.is_set():
        indices[-1] = 1 << 40
        indices[-1] = 0
expected = np.arange(200, dtype="u1").repeat(100)[:-1].tobytes() + bytes(1)
with mounted(Path(sys.argv[1])) as store:
    thread = threading.Thread(target=write)
    thread.start()
    for _ in range(20):
        try:
            _, data, _ = store.reader.gather(indices, WAIT_S)
            assert data.tobytes() == expected
        except IndexError:
            pass
    done.set()
    thread.join()
"""


def test_indices_may_be_written_while_their_samples_are_read(tmp_path: Path) -> None:
    write_store(tmp_path, [(str(index), bytes([index])) for index in range(200)])
    done = python(WRITE_WHILE_READING, tmp_path)
    assert done.returncode == 0, done.stderr


# -- ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_after_close_everything_says_so(tmp_path: Path, kind: str) -> None:
    store_of(tmp_path, [100] * 400)
    with mounted(tmp_path) as store:
        feed = store.feed(kind)
        assert feed.bread(3, WAIT_S) is not None
        assert store.reader.close(WAIT_S)
        assert store.reader.close(WAIT_S)
        for call in (
            lambda: feed.bread(3, WAIT_S),
            lambda: store.reader.read(0, WAIT_S),
            lambda: store.reader.gather(np.zeros(1, np.int64), WAIT_S),
            lambda: store.feed(kind),
        ):
            with pytest.raises(SampleFailure, match="closed"):
                call()


@pytest.mark.parametrize("kind", KINDS)
def test_closing_in_the_middle_of_reading_ends_at_once(tmp_path: Path, kind: str) -> None:
    store_of(tmp_path, [1000] * 400)
    for count in range(12):
        with mounted(tmp_path, ring=count % 2 == 0) as store:
            feeds = [store.feed(kind, slots=1 + count) for _ in range(3)]
            failures: list[str] = []

            def read_on(feed=feeds[0], failures=failures) -> None:  # type: ignore[no-untyped-def]
                try:
                    breads(feed, [3])
                except SampleFailure as failure:
                    failures.append(failure.args[0])

            thread = threading.Thread(target=read_on)
            thread.start()
            for _ in range(count):
                feeds[1].bread(2, WAIT_S)
            assert store.reader.close(WAIT_S)
            thread.join(WAIT_S)
            assert not thread.is_alive()
            assert failures in ([], ["closed"])


def test_a_forked_child_lets_everything_be(tmp_path: Path) -> None:
    store_of(tmp_path, [100] * 400)
    with mounted(tmp_path) as store:
        feed = store.feed("chunk")
        batch = feed.bread(3, WAIT_S)
        child = os.fork()
        if child == 0:
            signal.alarm(int(WAIT_S))
            status = 1
            try:
                feed.bread(3, WAIT_S)
            except SampleFailure as failure:
                status = 0 if failure.args[0] == "closed" and store.reader.close(WAIT_S) else 2
            del batch, feed, store
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert feed.bread(3, WAIT_S) is not None


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    store_of(tmp_path, [100] * 10)
    with mounted(tmp_path) as store:
        feed = store.feed("chunk")
        for count in (0, -1):
            with pytest.raises(ValueError, match="at least one"):
                feed.bread(count, WAIT_S)
        for index in (-1, 10, 1 << 40):
            with pytest.raises(IndexError):
                store.reader.read(index, WAIT_S)
            with pytest.raises(IndexError):
                store.reader.gather(np.array([0, index]), WAIT_S)
        batch = feed.bread(1 << 60, WAIT_S)
        assert batch is not None
        assert len(batch[0]) == 10
        assert feed.bread(1, WAIT_S) is None
