"""A store in S3, or behind HTTP, gives what it gives from a folder, whatever happens to the server."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from penstock import cli, samples
from penstock.errors import SampleError
from penstock.samples.objects.cache import CacheOptions, DiskCache
from penstock.samples.objects.fetching import REQUESTS_AT_ONCE
from penstock.storage.objects import Bucket
from tests.support import object_readers, small_disk
from tests.support.apart import context, started
from tests.support.object_readers import bits
from tests.support.object_servers import S3, SECRET_KEY, HttpServer, Proxy, free_ports, rclone, writes
from tests.support.sample_stores import epoch, flat, received, some_samples
from tests.support.stores import write_store

pytest.importorskip("obstore", reason="obstore is not installed: the extra cloud")

ROOT = Path(__file__).parents[2]

# Also samples of several chunks, and of a long edge.
CONTENT = [*some_samples(150), *((f"large/{n}", bytes([n]) * (3000 + 4500 * n)) for n in range(1, 5))]


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    write_store(tmp_path / "packed", CONTENT, data_file_bytes=70_000)
    return tmp_path / "packed"


@pytest.fixture
def served(packed: Path) -> Iterator[HttpServer]:
    with HttpServer(packed) as server:
        yield server


@pytest.fixture
def url(s3: S3, packed: Path, request: pytest.FixtureRequest) -> str:
    """Of the store, uploaded."""
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
    url = s3.url(f"stores/{name}")
    samples.upload(packed, url)
    return url


@pytest.mark.parametrize("cached", [False, True], ids=["bare", "cached"])
@pytest.mark.parametrize("order", ["chunk", "full"])
@pytest.mark.parametrize("cache_bytes", ["64KiB", "16MiB"])
def test_batches_have_the_bits_of_a_folder(
    url: str, packed: Path, tmp_path: Path, order: str, cache_bytes: str, cached: bool
) -> None:
    there: dict[str, Any] = {"cache_dir": tmp_path / "cache"} if cached else {}
    here = samples.mount(packed, order, cache_bytes)
    for _ in range(2):  # with what the first mount has kept
        with samples.mount(url, order, cache_bytes, **there) as store:
            assert list(store.names()) == list(here.names()) and store.identity == here.identity
            for number in range(2):
                assert bits(store, epoch=number, seed=5) == bits(here, epoch=number, seed=5)
            batch = store.read_many([3, 151, 3, 0])
            assert [bytes(each) for each in batch] == [CONTENT[index][1] for index in (3, 151, 3, 0)]
            assert store.read("large/4") == CONTENT[-1][1]
    with samples.mount(url, order, cache_bytes, **there) as store:
        bits(store)
        assert (store.counters()["requests"] == 0) == cached


def test_http_is_mounted(served: HttpServer, tmp_path: Path) -> None:
    for _ in range(2):
        with samples.mount(served.url, cache_bytes="64KiB", cache_dir=tmp_path / "cache") as store:
            assert epoch(store) == {index: data for index, (_, data) in enumerate(CONTENT)}
    with pytest.raises(SampleError, match=r"x/store.json cannot be read: .*404"):
        samples.mount(f"{served.url}/x")
    assert not samples.verify(served.url).damaged


def test_partitions_are_one_store(s3: S3, tmp_path: Path) -> None:
    for rank in range(2):
        samples.pack(CONTENT, tmp_path / "parts", rank=rank, world_size=2, chunk_bytes=4096)
    url = s3.url("stores/partitions")
    done = samples.upload(tmp_path / "parts", url)
    assert done.samples == len(CONTENT)
    with samples.mount(url) as store, samples.mount(tmp_path / "parts") as here:
        assert bits(store) == bits(here)
    Bucket(url).delete(["part-00001-of-00002/store.json"])
    with pytest.raises(SampleError, match=r"part-00001-of-00002/store.json cannot be read"):
        samples.mount(url)


def test_an_upload_goes_on_and_replaces_only_what_it_may(s3: S3, packed: Path, tmp_path: Path) -> None:
    url = s3.url("stores/upload")
    bucket = Bucket(url)
    bucket.write("mine.txt", b"mine")

    def stop(durable_bytes: int, total_bytes: int) -> None:
        if durable_bytes > total_bytes // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        samples.upload(packed, url, progress=stop)
    with pytest.raises(SampleError, match=r"no sample store.*goes on by the same command"):
        samples.mount(url)
    done = samples.upload(packed, url)
    assert 0 < done.written_bytes < done.size_bytes == sum(os.path.getsize(p) for p in packed.iterdir())
    assert samples.upload(packed, url).written_bytes == 0
    write_store(tmp_path / "other", some_samples(30, seed=1))
    with pytest.raises(SampleError, match=f"{url} is already a store: nothing was written"):
        samples.upload(tmp_path / "other", url)
    samples.upload(tmp_path / "other", url, overwrite=True)
    assert set(bucket.listed()) == {"mine.txt", *(path.name for path in (tmp_path / "other").iterdir())}
    with samples.mount(url) as store:
        assert len(store) == 30
    (tmp_path / "other" / "names.bin").write_bytes(bytes((tmp_path / "other" / "names.bin").stat().st_size))
    with pytest.raises(Exception, match=r"names.bin is damaged"):
        samples.upload(tmp_path / "other", s3.url("stores/damaged"))


def test_an_upload_goes_on_after_trouble_of_the_server(s3: S3, proxy: Proxy, packed: Path) -> None:
    url = s3.url("stores/upload-in-trouble")
    proxy.answer = lambda line, number: 503 if writes(line) and "data-00002" in line else None
    with pytest.raises(SampleError, match=f"{url}/data-00002.bin cannot be written: .*answers 503"):
        samples.upload(packed, url, timeout_s=6)
    with pytest.raises(SampleError, match=r"no sample store.*goes on by the same command"):
        samples.mount(url)
    answers = ["drop", 503, 500, "lost", None, 429, None]
    proxy.answer = lambda line, number: answers[number % 7] if writes(line) else None
    done = samples.upload(packed, url)
    assert 0 < done.written_bytes < done.size_bytes
    with samples.mount(url) as store, samples.mount(packed) as here:
        assert bits(store) == bits(here)


@pytest.mark.parametrize(
    "command",
    ["ls {} --long", "info {} --batch 8", "verify {}", "unpack {} out", "bench {} --time-limit 1 --batch 8"],
)
def test_commands_take_urls(
    command: str,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["samples", *command.format(url).split()]) == 0
    assert "large/4" in capsys.readouterr().out or not command.startswith("ls")
    if command.startswith("unpack"):
        assert (tmp_path / "out" / "large" / "4").read_bytes() == CONTENT[-1][1]


def test_workers_and_copies_read_too(url: str, tmp_path: Path) -> None:
    with samples.mount(url, cache_bytes="64KiB", cache_dir=tmp_path / "cache") as store:
        assert store.read(0) == CONTENT[0][1]  # so that a fork finds threads of obstore
        loader = torch.utils.data.DataLoader(
            samples.Loader(store, batch_size=7),
            batch_size=None,
            num_workers=2,
            multiprocessing_context="fork",
        )
        seen = [index for batch in loader for index in batch["indices"].tolist()]
        assert sorted(seen) == list(range(len(CONTENT)))
        with pickle.loads(pickle.dumps(store)) as copy:
            assert bits(copy) == bits(store)


def test_a_store_in_s3_mixes_with_local_ones(url: str, s3: S3, packed: Path, tmp_path: Path) -> None:
    local = tmp_path / "local"
    write_store(local, some_samples(60, seed=1))
    there: dict[str, Any] = {"cache_bytes": "64KiB", "cache_dir": tmp_path / "cache", "timeout_s": 1}

    def loader(first: samples.Store) -> samples.Loader:
        mixture = samples.Mixture({first: 3, samples.mount(local, "full"): 2}, samples_per_epoch=400)
        return samples.Loader(
            mixture, 7, decode_batch=lambda batch: (batch.indices.tolist(), batch.data.tobytes())
        )

    whole = list(loader(samples.mount(packed, cache_bytes="64KiB")))
    counts = Counter(index for indices, _ in whole for index in indices)
    assert sum(counts.values()) == 400 and len(counts) == len(CONTENT) + 60
    with Proxy(s3.endpoint) as proxy, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", proxy.url)
        troubled = loader(samples.mount(url, **there))
        batches = iter(troubled)
        seen = [next(batches) for _ in range(2)]
        proxy.answer = lambda line, number: 503
        with pytest.raises(SampleError, match=rf"{url}/data-0000\d.bin.*answers 503"):
            seen += batches
    again = loader(samples.mount(url, **there))
    again.load_state_dict(troubled.state_dict())
    assert seen + list(again) == whole


# -- trouble -------------------------------------------------------------------------------------


def test_a_server_that_goes_and_comes_back_costs_no_sample(served: HttpServer, packed: Path) -> None:
    with samples.mount(packed, cache_bytes="64KiB") as here:
        wanted = bits(here)
    with samples.mount(served.url, cache_bytes="64KiB") as store:
        store.sequence()
        first = store.bread(7)
        assert first is not None
        served.__exit__()
        again = list[HttpServer]()
        back = threading.Timer(1.0, lambda: again.append(HttpServer(served.folder, served.port)))
        back.start()
        found = [(first.indices.tolist(), first.data.tobytes())]
        while (batch := store.bread(7)) is not None:
            found.append((batch.indices.tolist(), batch.data.tobytes()))
        back.join()
        for server in again:
            server.__exit__()
        assert found == wanted


def test_answers_of_an_overloaded_server_cost_no_sample(served: HttpServer) -> None:
    with samples.mount(served.url, cache_bytes="64KiB") as store:
        statuses = [503, 429, "drop", 500, None, None]
        served.answer = lambda path, number: statuses[number % len(statuses)]
        assert epoch(store) == {index: data for index, (_, data) in enumerate(CONTENT)}


@pytest.mark.parametrize("on_damage", ["raise", "skip"])
def test_a_server_that_stays_away_is_one_error_which_names_the_object(
    served: HttpServer, on_damage: str
) -> None:
    with samples.mount(served.url, cache_bytes="64KiB", on_damage=on_damage, timeout_s=2) as store:
        served.answer = lambda path, number: 503
        with pytest.raises(SampleError, match=rf"{served.url}/data-0000\d.bin.*answers 503") as caught:
            epoch(store)
        assert "Once it is back" in str(caught.value)
        assert store.damaged == []
        served.answer = lambda path, number: None
        assert epoch_of(store) == {index: data for index, (_, data) in enumerate(CONTENT)}


@pytest.mark.parametrize(("cached", "threads"), [(False, 0), (True, 2)])
def test_a_loader_s_state_after_the_error_goes_on_with_every_sample_once(
    served: HttpServer, tmp_path: Path, cached: bool, threads: int
) -> None:
    there: dict[str, Any] = {"cache_dir": tmp_path / "cache"} if cached else {}

    def loader(**mounted: Any) -> samples.Loader:
        store = samples.mount(served.url, cache_bytes="64KiB", **there, **mounted)
        return samples.Loader(
            store, 7, seed=3, num_threads=threads, decode_batch=lambda batch: batch.indices.tolist()
        )

    whole = received(loader())
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    first = loader(timeout_s=3)
    batches = iter(first)
    seen = [next(batches) for _ in range(2)]
    served.answer = lambda path, number: 503
    with pytest.raises(SampleError, match=rf"{served.url}/data-0000\d.bin.*answers 503"):
        seen += batches
    state = json.loads(json.dumps(first.state_dict()))
    served.answer = lambda path, number: None
    for again in (first, loader()):
        again.load_state_dict(state)
        assert seen + received(again) == whole
    rest = list[int]()
    for rank in range(2):
        other = loader(rank=rank, world_size=2)
        other.load_state_dict(state)
        rest += flat(received(other))
    assert sorted(flat(seen) + rest) == list(range(len(CONTENT)))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # of torchdata
def test_workers_go_on_after_the_error_with_every_sample_once(served: HttpServer) -> None:
    def loader(timeout_s: float) -> samples.Loader:
        store = samples.mount(served.url, cache_bytes="64KiB", timeout_s=timeout_s)
        return samples.Loader(store, 7, decode_batch=lambda batch: batch.indices.tolist())

    through, seen = StatefulDataLoader(loader(2), batch_size=None, num_workers=2), list[list[int]]()
    batches = iter(through)
    seen += [next(batches) for _ in range(3)]
    served.answer = lambda path, number: 503
    with pytest.raises(SampleError, match=rf"{served.url}/data-0000\d.bin.*answers 503"):
        seen += batches
    served.answer = lambda path, number: None
    state, again = through.state_dict(), loader(60)
    again.load_state_dict(state)
    assert sorted(flat(seen + received(again))) == list(range(len(CONTENT)))


@pytest.mark.parametrize("on_damage", ["raise", "skip"])
def test_a_key_that_is_refused_in_mid_epoch_is_one_error_which_names_the_object(
    url: str, proxy: Proxy, on_damage: str
) -> None:
    with samples.mount(url, cache_bytes="64KiB", on_damage=on_damage) as store:
        store.sequence()
        first = store.bread(7)
        assert first is not None
        proxy.answer = lambda line, number: 403
        with pytest.raises(SampleError, match=rf"{url}/data-0000\d.bin .*: the server answers 403") as caught:
            epoch(store)
        assert "or mount it again with other credentials" in str(caught.value)
        assert "Once it is back" not in str(caught.value) and SECRET_KEY not in str(caught.value)
        proxy.answer = lambda line, number: None
        assert store.damaged == [] and len(epoch_of(store)) == len(CONTENT)


def test_a_server_that_hangs_keeps_no_file_open(served: HttpServer, tmp_path: Path) -> None:
    goes_on = threading.Event()
    store = samples.mount(served.url, cache_bytes="64KiB", cache_dir=tmp_path / "cache")
    asked = len(served.requests)
    served.answer = lambda path, number: None if goes_on.wait(60) else 503
    store.sequence()

    def wait() -> None:
        with pytest.raises(SampleError, match="closed"):
            store.bread(7)

    waiting = threading.Thread(target=wait)
    waiting.start()
    while len(served.requests) == asked:
        time.sleep(0.01)
    store.close()
    waiting.join()
    assert not goes_on.is_set()
    goes_on.set()
    end_s = time.monotonic() + 30
    while any("penstock-samples" in each for each in open_files()):
        assert time.monotonic() < end_s
        time.sleep(0.01)


def open_files() -> list[str]:
    found = []
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{each}"))
    return [path for path in found if not path.endswith(("/users", "/lock"))]


def epoch_of(store: samples.Store) -> dict[int, bytes]:
    store.sequence()
    return epoch(store)


def test_a_store_that_changes_under_a_mount_is_an_error(served: HttpServer, packed: Path) -> None:
    with samples.mount(served.url, cache_bytes="64KiB") as store:
        for path in packed.glob("data-*.bin"):
            path.write_bytes(os.urandom(path.stat().st_size))
        with pytest.raises(SampleError, match="changed under this mount: mount it again"):
            epoch(store)


@pytest.mark.parametrize("server", ["no tags", "rclone"])
def test_a_server_without_tags_gives_no_wrong_bytes(packed: Path, tmp_path: Path, server: str) -> None:
    """Where the store changes under a mount, checksums find it."""
    whole = {index: data for index, (_, data) in enumerate(CONTENT)}
    with ExitStack() as stack:
        if server == "rclone":
            url = stack.enter_context(rclone(packed))
        else:
            url = stack.enter_context(HttpServer(packed, tags=False)).url
        mounts = [
            stack.enter_context(samples.mount(url, cache_bytes="64KiB", on_damage=on_damage, **there))
            for on_damage in ("raise", "skip")
            for there in ({}, {"cache_dir": tmp_path / on_damage})
        ]
        before = {path: path.read_bytes() for path in packed.glob("data-*.bin")}
        for path, data in before.items():
            path.write_bytes(os.urandom(len(data)))
        for store in mounts[:2]:
            with pytest.raises(SampleError, match=f"the checksum at .* of {url}/data-0000.* is wrong"):
                epoch(store)
        for store in mounts[2:]:
            found = epoch(store)
            assert found.items() <= whole.items() and sorted([*found, *store.damaged]) == sorted(whole)
        for path, data in before.items():
            path.write_bytes(data)
        for store in mounts[:2]:
            assert epoch_of(store) == whole
        with samples.mount(url, cache_bytes="64KiB", cache_dir=tmp_path / "raise") as store:
            # The other mount is open: it may be writing its last chunk.
            assert epoch(store) == whole and store.counters()["requests"] <= 1


@pytest.mark.parametrize("gone", ["data-00000.bin", "sums.bin", "data-00002.bin"])
def test_a_missing_object_is_named(s3: S3, url: str, gone: str) -> None:
    store = samples.mount(url, cache_bytes="64KiB")
    Bucket(url).delete([gone])
    with pytest.raises(SampleError, match=f"{url}/{gone} cannot be read: .*404"):
        samples.mount(url)
    if gone.startswith("data"):
        with store, pytest.raises(SampleError, match=f"{url}/{gone}.*404"):
            epoch(store)


def test_credentials_are_in_no_error_and_no_pickle(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = samples.mount(url)
    with pytest.raises(SampleError, match=r"no-such-bucket.*NoSuchBucket"):
        samples.mount("s3://no-such-bucket/x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "sesame-open")
    with pytest.raises(SampleError, match=f"{url}/store.json cannot be read: .*403") as caught:
        samples.mount(url)
    assert "sesame" not in f"{caught.value!r}" and SECRET_KEY.encode() not in pickle.dumps(store)
    (port,) = free_ports(1)
    with pytest.raises(SampleError, match=rf"127.0.0.1:{port}/x/store.json.*cannot be reached"):
        samples.mount(f"http://127.0.0.1:{port}/x", timeout_s=1)


# -- the cache on disk ---------------------------------------------------------------------------


def cached_files(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file()]


def taken_bytes(cache: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in cached_files(cache))


def test_what_is_damaged_on_disk_is_fetched_again(url: str, packed: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with samples.mount(packed, cache_bytes="64KiB") as here:
        wanted = [bits(here, epoch=number) for number in range(2)]
    random = np.random.default_rng(0)
    with samples.mount(url, cache_bytes="64KiB", cache_dir=cache, verify=False) as store:
        assert bits(store) == wanted[0]
    for path in cached_files(cache):
        if path.suffix == ".bin" and not path.name.startswith("held"):
            data = bytearray(path.read_bytes())
            for at in random.integers(0, len(data), 9).tolist():
                data[at] ^= 1 + int(random.integers(255))
            path.write_bytes(data)
    with samples.mount(url, cache_bytes="64KiB", cache_dir=cache, verify=False) as store:
        assert bits(store, epoch=1) == wanted[1]
        assert store.counters()["requests"] > 0
    with samples.mount(url, cache_bytes="64KiB", cache_dir=cache, verify=False) as store:  # all is kept
        assert bits(store) == wanted[0] and store.counters()["requests"] == 0
        assert list(store.names()) == [name for name, _ in CONTENT]


def test_a_cache_that_is_too_small_is_bounded_and_never_thrashes(url: str, tmp_path: Path) -> None:
    """Every epoch fetches what the cache cannot hold, once: no choice of what to keep fetches less."""
    cache, limit = tmp_path / "cache", 160 << 10
    with samples.mount(url, cache_bytes="32KiB") as store:
        bits(store)
        whole = store.counters()
    with samples.mount(url, cache_bytes="32KiB", cache_dir=cache, cache_disk=limit) as store:
        fetched = []
        for number in range(4):
            before = store.counters()["fetched_bytes"]
            assert len(bits(store, epoch=number)) > 0
            fetched.append(store.counters()["fetched_bytes"] - before)
            assert taken_bytes(cache) <= limit
        assert 0 <= fetched[0] - whole["fetched_bytes"] <= 8192 * whole["requests"]  # whole blocks
        assert fetched[1] == fetched[2] == fetched[3] < 0.7 * fetched[0]
        held = sum(int(np.count_nonzero(np.fromfile(path, np.uint8))) for path in cache.rglob("held-*"))
        assert held > 0


def fewest_misses(uses: Sequence[int], slots: int) -> int:
    """By Belady's rule, which knows what comes: what is needed last goes."""
    held, misses = set[int](), 0
    for at, chunk in enumerate(uses):
        misses += chunk not in held
        held.add(chunk)
        if len(held) > slots:
            later = uses[at + 1 :]
            held.remove(max(held, key=lambda each: later.index(each) if each in later else len(uses)))
    return misses


@pytest.mark.parametrize("order", ["chunk", "full"])
@pytest.mark.parametrize("seed", range(4))
def test_no_choice_of_what_to_keep_fetches_less(tmp_path: Path, seed: int, order: str) -> None:
    """In chunk order not one request more than by Belady's rule, and in any order no byte more."""
    random = np.random.default_rng(seed)
    together, chunks, epochs = 8, 40, 4  # samples of a chunk
    content = [(f"{index}", random.bytes(512)) for index in range(together * chunks)]
    write_store(tmp_path / "packed", content)
    with HttpServer(tmp_path / "packed") as server:
        with samples.mount(server.url, cache_dir=tmp_path / "cache") as store:
            small_bytes = store.directories[0].place._store().cache._used()  # type: ignore[attr-defined]
        shutil.rmtree(tmp_path / "cache")
        limit = small_bytes + 4096 * int(random.integers(chunks))
        with samples.mount(
            server.url, order, "20KiB", cache_dir=tmp_path / "cache", cache_disk=limit
        ) as store:
            uses, fetched = list[int](), list[int]()
            for number in range(epochs):
                before = store.counters()["fetched_bytes"]
                indices = [index for batch, _ in bits(store, seed=seed, epoch=number) for index in batch]
                uses += dict.fromkeys(index // together for index in indices)
                fetched.append(store.counters()["fetched_bytes"] - before)
            held = sum(
                int(np.count_nonzero(np.fromfile(path, np.uint8))) for path in tmp_path.rglob("held-*")
            )
            assert held == (limit - small_bytes) // 4096
            # Less where a chunk of the epoch before is still in memory.
            assert max(fetched[1:]) <= 4096 * (chunks - held)
            # What threads ask for at the moment at which the cache becomes full may find no room.
            assert fetched[0] <= 4096 * (chunks + REQUESTS_AT_ONCE)
            if order == "chunk":
                assert store.counters()["requests"] <= fewest_misses(uses, held)


def test_stores_that_nobody_uses_make_room_and_nothing_else_does(s3: S3, tmp_path: Path) -> None:
    cache, urls = tmp_path / "cache", [s3.url(f"stores/room-{number}") for number in range(2)]
    for number, url in enumerate(urls):
        write_store(tmp_path / f"{number}", some_samples(150, seed=number), chunk_bytes=16384)
        samples.upload(tmp_path / f"{number}", url)
    (cache / "penstock-samples" / ("0" * 32)).mkdir(parents=True)
    strangers = [cache / "mine.bin", cache / "penstock-samples" / ("0" * 32) / "data-00000.bin"]
    for path in strangers:
        path.write_bytes(bytes(1 << 20))
    limit = 300 << 10  # for one of them
    with samples.mount(urls[0], cache_dir=cache, cache_disk=limit) as store:
        bits(store)
        mine = next(path.parent for path in cache.rglob("in-use"))
        (mine / "notes.txt").write_text("of somebody else")
        with samples.mount(urls[1], cache_dir=cache, cache_disk=limit) as other:
            bits(other)
        before = store.counters()["requests"]
        bits(store, epoch=1)
        assert store.counters()["requests"] <= before + 8  # only the other's small files took some room
    for _ in range(2):
        with samples.mount(urls[1], cache_dir=cache, cache_disk=limit) as other:
            bits(other)
    with samples.mount(urls[1], cache_dir=cache, cache_disk=limit) as other:
        bits(other, epoch=2)
        assert other.counters()["requests"] == 0
    assert (mine / "notes.txt").exists() and all(path.stat().st_size == 1 << 20 for path in strangers)
    shutil.rmtree(cache / "penstock-samples" / ("0" * 32))
    (cache / "mine.bin").unlink()
    assert taken_bytes(cache) <= limit + 4096


def test_processes_share_a_cache(url: str, packed: Path, tmp_path: Path) -> None:
    """Each of those that begin at once with an empty one may fetch all, once. Who comes later fetches what is
    not noted, where two did so at once; and then nothing."""
    wanted, alone = list[Any](), list[int]()
    for seed in range(3):
        with samples.mount(packed, cache_bytes="32KiB") as here:
            wanted.append(bits(here, seed=seed))
        with samples.mount(url, cache_bytes="32KiB", cache_dir=tmp_path / f"{seed}") as store:
            bits(store, seed=seed)
            alone.append(store.counters()["requests"])
    cache, processes = tmp_path / "cache", context()
    together, queue = processes.Barrier(3), processes.Queue()
    for seed in range(3):
        started(object_readers.read, url, cache, seed, together, queue)
    for seed, batches, requests in [queue.get(timeout=120) for _ in range(3)]:
        assert batches == wanted[seed] and requests <= alone[seed]
    for most in (alone[0] // 4, 0):
        with samples.mount(url, cache_bytes="32KiB", cache_dir=cache) as store:
            assert bits(store) == wanted[0] and store.counters()["requests"] <= most


def test_a_kill_leaves_the_cache_whole(url: str, packed: Path, tmp_path: Path) -> None:
    cache, processes = tmp_path / "cache", context()
    with samples.mount(packed, cache_bytes="32KiB") as here:
        wanted = bits(here)
    for after_s in (0.0, 0.02, 0.1):
        mounted = processes.Queue()  # its lock may die with the child
        child = started(object_readers.read_for_ever, url, cache, mounted)
        mounted.get(timeout=60)
        threading.Event().wait(after_s)
        child.kill()
        child.join()
        with samples.mount(url, cache_bytes="32KiB", cache_dir=cache) as store:
            assert bits(store) == wanted


def test_a_folder_that_cannot_be_written_is_one_error(url: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for folder in (tmp_path / "file", Path("/proc/penstock")):
        with pytest.raises(SampleError, match=f"cache_dir='{folder}' cannot be used: "):
            samples.mount(url, cache_dir=folder)
    with pytest.raises(SampleError, match=r"cache_disk=4.00 KiB is too small: a store.s directory needs"):
        samples.mount(url, cache_dir=tmp_path / "cache", cache_disk=4096)


def test_a_cache_that_is_removed_costs_no_sample(
    served: HttpServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with samples.mount(served.url, cache_bytes="64KiB", cache_dir=tmp_path / "cache", timeout_s=20) as store:
        assert store.read(0) == CONTENT[0][1]
        shutil.rmtree(tmp_path / "cache")
        assert epoch(store) == {index: data for index, (_, data) in enumerate(CONTENT)}
    (said,) = (record.message for record in caplog.records if str(tmp_path) in record.message)
    assert "cannot be written (No such file or directory): the cache keeps what it has" in said


def test_a_chunk_that_two_keep_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = [DiskCache(CacheOptions(str(tmp_path), 1 << 20)) for _ in range(2)]
    stores = [cache.open(b"manifest", [(8192, 2)]) for cache in caches]
    reserve, data = caches[0].reserve, np.zeros(4096, np.uint8)

    def meanwhile(size_bytes: int) -> bool:
        stores[1].files[0].keep(0, 1, 0, data, lambda descriptor: 0)
        return reserve(size_bytes)

    monkeypatch.setattr(caches[0], "reserve", meanwhile)
    stores[0].files[0].keep(0, 1, 0, data, lambda descriptor: 0)
    assert caches[0]._used() == 4096


def test_threads_mount_with_one_cache(served: HttpServer, tmp_path: Path) -> None:
    def first(number: int) -> bytes:
        with samples.mount(served.url, cache_dir=tmp_path / f"cache{number // 6}") as store:
            return store.read(0)

    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(first, range(24))) == {CONTENT[0][1]}


def test_fewer_threads_are_slower_and_none_is_an_error(
    served: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, allowed = threading.Thread.start, 0

    def limited(thread: threading.Thread) -> None:
        nonlocal allowed
        if thread.name == "penstock-fetch":
            if not allowed:
                raise RuntimeError("can't start new thread")
            allowed -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with samples.mount(served.url, cache_bytes="64KiB") as store:
        for _ in range(2):
            with pytest.raises(SampleError, match=r"no thread can be started to fetch samples: can't start"):
                store.read(0)
        allowed = 2
        assert epoch(store) == {index: data for index, (_, data) in enumerate(CONTENT)}


def test_a_disk_that_fails_costs_no_sample(
    served: HttpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is noted of chunks is written by calls: an access to a mapping would end the process (SIGBUS)."""
    write = os.pwrite

    def failing(descriptor: int, data: bytes, offset: int) -> int:
        if "held-" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(descriptor, data, offset)

    with samples.mount(served.url, cache_bytes="64KiB", cache_dir=tmp_path) as store:
        monkeypatch.setattr(os, "pwrite", failing)
        assert epoch(store) == {index: data for index, (_, data) in enumerate(CONTENT)}
    assert not any(np.fromfile(path, np.uint8).any() for path in tmp_path.rglob("held-*"))
    (said,) = (record.message for record in caplog.records if str(tmp_path) in record.message)
    assert "cannot be written (Input/output error): the cache keeps what it has" in said


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_keeps_no_lock_of_the_cache(tmp_path: Path) -> None:
    cache = DiskCache(CacheOptions(str(tmp_path), 1 << 20))
    waits, ends = os.pipe()
    with cache._locked():  # as a thread that fetches may
        if (child := os.fork()) == 0:
            os.close(ends)
            os.read(waits, 1)
            os._exit(0)
    try:
        thread = threading.Thread(target=cache.reserve, args=(1,), daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
    finally:
        os.close(ends)
        os.waitpid(child, 0)
        os.close(waits)


def test_a_full_disk_makes_the_cache_smaller_and_is_said_once(
    served: HttpServer, packed: Path, tmp_path: Path
) -> None:
    alone = ["unshare", "--mount", *(["--map-root-user"] if os.geteuid() else [])]
    try:
        subprocess.run([*alone, "true"], check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file system can be mounted here")
    (tmp_path / "small").mkdir()
    command = [*alone, sys.executable, "-m", "tests.support.small_disk", served.url, tmp_path / "small"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    with samples.mount(packed, cache_bytes="32KiB") as here:
        wanted = [small_disk.digest(here, epoch) for epoch in range(2)]
    assert found["full 0"] == found["full 1"] == wanted
    assert 0 < found["requests 1"] < found["requests 0"]
    (said,) = (text for text in found["logged"] if "cache" in text)
    assert "is full: the cache keeps what it has" in said
    assert f"cache_dir='{tmp_path / 'small'}' cannot be used: No space left" in found["full"]
    assert "cannot be used: Read-only file system" in found["read-only"]
