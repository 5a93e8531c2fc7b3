"""Stores in threads, forked children, other processes, and at their end: nothing hangs, nothing is left."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.errors import InvalidArgument, SampleError
from penstock.samples import pack, reading
from penstock.samples.store import Store, mount
from penstock.storage.native import TransportUnavailable, UringTransport
from tests.support.sample_stores import epoch, mounted, some_samples
from tests.support.stores import write_store

ORDERS = ["full", "chunk"]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run(script: str, *arguments: object) -> str:
    """What a process of its own prints; an error where it fails or hangs."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


MOUNTS = """
import gc, os, sys, time
from pathlib import Path
from penstock.samples.store import mount

def names():
    tasks = Path("/proc/self/task").iterdir()
    return sorted((task / "comm").read_text().strip() for task in tasks)

def held():
    # A thread that was told to end may still be at it.
    deadline = time.monotonic() + 10
    while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    return (
        names(),
        len(os.listdir("/proc/self/fd")),
        len(Path("/proc/self/maps").read_text().splitlines()),
        int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    )

counts = []
for number in range(1000):
    store = mount(sys.argv[1], ("full", "chunk")[number % 2], "64KiB", prefetch_bytes="16KiB")
    if number % 3:
        assert len(store.read("0/3")) == int(sys.argv[2])
        assert store.bread(3) is not None
    if number % 5:
        store.close()
    del store
    if number in (200, 999):
        gc.collect()
        counts.append(held())
before, after = counts
assert after[:2] == before[:2], (before, after)
assert after[2] - before[2] < 20, (before, after)
assert after[3] - before[3] < 20 << 20, (before, after)
print("done")
"""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks into /proc")
@pytest.mark.slow
def test_a_thousand_mounts_leave_nothing(tmp_path: Path) -> None:
    content = some_samples(20)
    write_store(tmp_path, content, data_file_bytes=20_000)
    assert run(MOUNTS, tmp_path, len(content[3][1])) == "done\n"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks into /proc")
def test_an_interrupted_mount_leaves_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    mounted(tmp_path, some_samples()).close()
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(reading, "available_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mount(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_closing_is_the_end(tmp_path: Path) -> None:
    store = mounted(tmp_path, some_samples())
    store.read(0)
    store.sequence()
    store.close()
    store.close()
    for use in (lambda: store.read(0), lambda: store.bread(1), store.sequence, lambda: store.read_many([0])):
        with pytest.raises(SampleError, match="closed: mount it again"):
            use()


def consume_for_ever(store: Store, begun: threading.Event) -> None:
    begun.set()
    while True:
        store.sequence()
        while store.bread(5) is not None:
            pass


def test_closing_ends_a_wait(tmp_path: Path) -> None:
    """A thread that reads while the store is closed gets samples or an error, soon."""
    content = some_samples()
    for _ in range(20):
        store, begun = mounted(tmp_path, content), threading.Event()
        with ThreadPoolExecutor(1) as pool:
            consumer = pool.submit(consume_for_ever, store, begun)
            begun.wait(10)
            store.close()
            error = consumer.exception(30)
        assert isinstance(error, SampleError)
        assert "closed" in str(error)


# A pipe that nobody writes to hangs as a disk does, in the kernel.
HANGS = """
import gc, os, sys
from pathlib import Path
from penstock.errors import SampleError
from penstock.samples import mount, reading

reading._CLOSE_TIMEOUT_S = 0.05
store = mount(sys.argv[1], io="buffered", timeout_s=0.05)
links = {int(each.name): each for each in Path("/proc/self/fd").iterdir()}
held = [number for number, link in links.items() if link.exists() and ".bin" in os.readlink(link)]
pipe, _ = os.pipe()
for number in held:
    os.dup2(pipe, number)
try:
    store.read(0)
except SampleError as error:
    assert "hangs" in str(error), error
store.close()
del store
gc.collect()
print(held != [] and all(os.path.sameopenfile(pipe, number) for number in held))
"""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks into /proc")
def test_files_that_a_stuck_read_uses_stay_open(tmp_path: Path) -> None:
    try:
        UringTransport().close()
    except TransportUnavailable as reason:
        pytest.skip(f"io_uring: {reason}")
    write_store(tmp_path, some_samples())
    assert run(HANGS, tmp_path) == "True\n"


@pytest.mark.parametrize("order", ORDERS)
def test_many_threads_read_at_once(tmp_path: Path, order: str) -> None:
    content = some_samples()
    with mounted(tmp_path, content, order=order) as store, ThreadPoolExecutor(8) as pool:

        def read(thread: int) -> None:
            for step in range(100):
                index = (thread * 31 + step * 7) % len(content)
                assert store.read(content[index][0]) == content[index][1]
                some = [index, (index + 1) % len(content)]
                assert [bytes(view) for view in store.read_many(some)] == [content[i][1] for i in some]

        reads = [pool.submit(read, thread) for thread in range(7)]
        found = epoch(store)
        for each in reads:
            each.result()
    assert found == {index: data for index, (_, data) in enumerate(content)}


def test_threads_that_bread_share_an_epoch(tmp_path: Path) -> None:
    content = some_samples()
    with mounted(tmp_path, content) as store, ThreadPoolExecutor(4) as pool:
        store.sequence()

        def consume() -> list[tuple[int, bytes]]:
            found = []
            while (batch := store.bread(3)) is not None:
                found += zip(batch.indices.tolist(), map(bytes, batch), strict=True)
            return found

        shares = [pool.submit(consume) for _ in range(4)]
        found = [sample for share in shares for sample in share.result()]
    assert sorted(found) == [(index, data) for index, (_, data) in enumerate(content)]


@pytest.mark.parametrize("order", ORDERS)
def test_a_pickled_store_is_mounted_anew(tmp_path: Path, order: str) -> None:
    content = some_samples()
    write_store(tmp_path / "a", content, labels=[3] * len(content))
    write_store(tmp_path / "b", [("more", b"bytes")])
    with mount([tmp_path / "a", tmp_path / "b"], order, "64KiB", 1, 3) as store:
        store.sequence(seed=4)
        expected = epoch(store)
        sent = pickle.dumps(store)
    with pickle.loads(sent) as other:
        assert (other.order, other.rank, other.world_size, other.shape) == (order, 1, 3, store.shape)
        assert other.read("more") == b"bytes"
        other.sequence(seed=4)
        assert epoch(other) == expected
    write_store(tmp_path / "b", [("other", b"bytes")])
    with pytest.raises(SampleError, match="other samples"):
        pickle.loads(sent)


def test_a_batch_can_be_pickled(tmp_path: Path) -> None:
    content = some_samples()
    write_store(tmp_path, content, labels=list(range(len(content))))
    with mount(tmp_path) as store:
        batch = store.read_many([5, 3, 5])
        sent = pickle.dumps(batch)
        names = batch.names()
    received = pickle.loads(sent)
    assert [bytes(view) for view in received] == [content[index][1] for index in (5, 3, 5)]
    assert received.names() == names == ["0/5", "0/3", "0/5"]
    assert received.labels.tolist() == [5, 3, 5]
    assert received.decoded() == [content[index][1] for index in (5, 3, 5)]


FORKS = """
import os, sys, traceback
from penstock.errors import InvalidArgument
from penstock.samples import mount
from tests.support.sample_stores import epoch

def use(store, first, before):
    try:
        store.bread(5)
    except InvalidArgument as error:
        assert "forked" in str(error)
    else:
        raise AssertionError("the parent's sequence goes on here")
    assert store.read(3) == before
    store.sequence(seed=1)
    assert store.bread(5).indices.tolist() == first.indices.tolist()
    assert len(epoch(store)) == len(store) - 5
    assert [bytes(view) for view in first]

for order, endings in (("full", ["_exit", "close"]), ("chunk", ["exit"])):
    store = mount(sys.argv[1], order, "64KiB")
    store.sequence(seed=1)
    first = store.bread(5)
    before = store.read(3)
    for ending in endings:
        child = os.fork()
        if child == 0:
            try:
                use(store, first, before)
            except BaseException:
                traceback.print_exc()
                os._exit(3)
            if ending == "close":
                store.close()
            if ending == "exit":
                sys.exit(0)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0, ending
    found = set(first.indices.tolist()) | epoch(store).keys()
    assert found == set(range(len(store)))
    assert store.read(3) == before
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_reads_for_itself(tmp_path: Path) -> None:
    write_store(tmp_path, some_samples())
    assert run(FORKS, tmp_path) == "done\n"


EXITS = """
import sys
from penstock.samples import mount
from penstock.samples import store as module

stores = []
for order in ("full", "chunk"):
    store = mount(sys.argv[1], order, "64KiB")
    store.sequence()
    stores.append((store, store.bread(5)))
    store.read(3)
module.kept = stores, mount(sys.argv[1])
print("done")
"""


def test_a_program_can_end_with_open_stores(tmp_path: Path) -> None:
    write_store(tmp_path, some_samples())
    assert run(EXITS, tmp_path) == "done\n"


def test_sizes_are_known_once_an_epoch_has_begun(tmp_path: Path) -> None:
    with mounted(tmp_path, some_samples()) as store:
        assert store.taken == 0
        with pytest.raises(InvalidArgument, match="sequence"):
            _ = store.replica_size
        store.sequence(replica=1, replicas=3)
        assert store.replica_size in (33, 34)
        store.bread(10)
        assert store.taken == 10


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="looks into /proc")
def test_later_epochs_take_no_more_memory(tmp_path: Path) -> None:
    """A sequence gives its chunks' room back when the next one begins, not when it is forgotten."""
    sample = bytes(16 << 10)
    pack(((f"{i:05d}", sample) for i in range(4096)), tmp_path / "store")
    with mount(tmp_path / "store", cache_bytes="32MiB", prefetch_bytes="1MiB") as store:
        after_each = []
        for epoch in range(4):
            store.sequence(epoch=epoch)
            while store.bread(64) is not None:
                pass
            after_each.append(resident_bytes())
    assert after_each[-1] - after_each[0] < 16 << 20
