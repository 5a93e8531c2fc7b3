"""Samples of an object store by penstock, litdata and MosaicML streaming, with their caches: cold, then warm.

    make bench-objects-peers

The server is SeaweedFS on this machine, which counts the requests. All store the same samples, in shards or
chunks of one size, and shuffle. How well each mixes is given, too: from how many of twenty equal ranges of
the stored order a batch of 256 draws (of the first epoch). In each round every row reads an epoch in a fresh
process with an empty cache (cold), then one in another process with a full one (warm). The first batch counts
from before the data set is opened, after imports. `--quick` checks that all works; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from io_bench.machine import heading
from samples_bench.data import ID_BYTES, Data
from samples_bench.peers import without_torchvision, write_litdata, write_mds

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from penstock import samples  # noqa: E402
from penstock.samples.order import mixing_of  # noqa: E402
from penstock.storage.objects import Bucket  # noqa: E402
from tests.support.object_servers import S3, shared_seaweed  # noqa: E402

BATCH = 256
SEED = 5


def by_penstock(share: float, url: str, cache: Path, data: Data) -> Iterator[list[Any]]:
    with samples.mount(url, cache_bytes=int(share * data.total_bytes), cache_dir=cache) as store:
        store.sequence(seed=SEED)
        while (batch := store.bread(BATCH)) is not None:
            yield list(batch)


def by_litdata(url: str, cache: Path, data: Data) -> Iterator[list[Any]]:
    import litdata
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # it has no option for that
    environment = os.environ
    keys = {
        "aws_access_key_id": environment["AWS_ACCESS_KEY_ID"],
        "aws_secret_access_key": environment["AWS_SECRET_ACCESS_KEY"],
        "endpoint_url": environment["AWS_ENDPOINT_URL"],
        "region_name": environment["AWS_REGION"],
    }
    dataset = litdata.StreamingDataset(
        url, cache_dir=str(cache), shuffle=True, seed=SEED, storage_options=keys
    )
    yield from batches(iter(dataset))


def by_streaming(url: str, cache: Path, data: Data) -> Iterator[list[Any]]:
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    os.environ["S3_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT_URL"]
    clean_stale_shared_memory()
    dataset = StreamingDataset(
        remote=url, local=str(cache), shuffle=True, shuffle_seed=SEED, batch_size=BATCH
    )
    yield from batches(sample["x"] for sample in dataset)


def batches(found: Iterator[Any]) -> Iterator[list[Any]]:
    batch: list[Any] = []
    for sample in found:
        batch.append(sample)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


# What reads which data; of penstock with which share of it in memory.
Read = Callable[[str, Path, Data], Iterator[list[Any]]]
ROWS: dict[str, tuple[str, Read]] = {
    "penstock, a quarter in memory": ("penstock", partial(by_penstock, 0.25)),
    "penstock, all in memory": ("penstock", partial(by_penstock, 1.5)),
    "litdata": ("litdata", by_litdata),
    "MosaicML streaming": ("streaming", by_streaming),
}


def one_epoch(row: str, url: str, cache: Path, data: Data) -> dict[str, Any]:
    """In this process."""
    if row.startswith("litdata"):
        import litdata  # noqa: F401
    if row.startswith("MosaicML"):
        without_torchvision()
        import streaming  # noqa: F401
    read = ROWS[row][1]
    begin_s, first_s, found = time.perf_counter(), 0.0, list[Any]()
    for batch in read(url, cache, data):
        first_s = first_s or time.perf_counter() - begin_s
        found += [bytes(each[:ID_BYTES]) for each in batch]
    taken_s = time.perf_counter() - begin_s
    indices = np.frombuffer(b"".join(found), "<i8")
    assert sorted(indices.tolist()) == list(range(data.count)), f"{row} lost samples"
    mixed = mixing_of(indices, [0, data.count], BATCH)
    return {"samples_per_s": data.count / taken_s, "first_s": first_s, "ranges": mixed.groups}


def write(package: str, folder: Path, data: Data, shard_bytes: int) -> None:
    """As each package stores samples."""
    if package == "penstock":
        samples.pack(((f"{n:08}", each) for n, each in enumerate(data.samples())), folder, shard_bytes)
    elif package == "litdata":
        write_litdata(folder, data, chunk_bytes=shard_bytes)
    else:
        write_mds(folder, data, shard_bytes)


def upload(folder: Path, url: str) -> None:
    bucket = Bucket(url)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        bucket.write(str(path.relative_to(folder)), path)


def in_fresh_process(*arguments: str) -> dict[str, Any]:
    """What the last line of this script's output says, run with these arguments; or why there is none."""
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        return {"command": " ".join(command), "error": done.stderr.strip()[-400:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(folder: Path, server: S3, data: Data, shard_bytes: int, rounds: int) -> dict[str, Any]:
    sizes = [str(data.size_bytes), str(data.count), str(shard_bytes)]
    failed: dict[str, dict[str, Any]] = {}
    for package in dict.fromkeys(package for package, _ in ROWS.values()):
        there = folder / package
        if "error" in (done := in_fresh_process("--write", package, str(there), *sizes)):
            failed[package] = done
        else:
            upload(there, server.url(f"{package}-{shard_bytes}"))
        shutil.rmtree(there, ignore_errors=True)
    results: dict[str, Any] = {}
    for number in range(rounds):
        rows = list(ROWS)
        for row in rows[number % len(rows) :] + rows[: number % len(rows)]:
            package, cache = ROWS[row][0], folder / "cache"
            shutil.rmtree(cache, ignore_errors=True)
            for turn in ("cold", "warm"):
                before = server.requests()
                url = server.url(f"{package}-{shard_bytes}")
                found = failed.get(package) or in_fresh_process("--read", row, url, str(cache), *sizes)
                found["requests_per_gb"] = (server.requests() - before) / (data.total_bytes / 1e9)
                results.setdefault(row, {}).setdefault(turn, []).append(found)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--folder", type=Path, help="where shards, the server and the caches lie")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--read", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write or options.read:
        *where, size_bytes, count, shard_bytes = options.write or options.read
        data = Data(int(size_bytes), int(count), SEED)
        if options.write:
            write(where[0], Path(where[1]), data, int(shard_bytes))
        print(json.dumps({} if options.write else one_epoch(where[0], where[1], Path(where[2]), data)))
        return
    data = Data(4096, 12_000 if options.quick else 20_000, SEED)
    rounds = 1 if options.quick else options.rounds
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as temporary,
        shared_seaweed(Path(temporary)) as server,
    ):
        os.environ |= server.environment
        packages = ["obstore", "litdata", "mosaicml-streaming"]
        result = {**heading("samples_objects_peers", Path(temporary), packages), "data": data._asdict()}
        for shard_bytes in (1 << 20, 8 << 20):
            found = compare(Path(temporary), server, data, shard_bytes, rounds)
            result[f"shards of {shard_bytes >> 20} MiB"] = found
            for row, turns in found.items():
                for turn, each in turns.items():
                    if errors := [one for one in each if "error" in one]:
                        print(f"{shard_bytes >> 20} MiB, {row}, {turn}: {errors[0]}", flush=True)
                        continue
                    names = ("samples_per_s", "requests_per_gb", "first_s", "ranges")
                    rate, requests, first_s, ranges = (statistics.median(o[n] for o in each) for n in names)
                    print(
                        f"{shard_bytes >> 20} MiB, {row}, {turn}: {rate:,.0f} samples/s, {requests:,.0f} "
                        f"requests per GB, first batch {first_s:.2f} s, of {ranges:.1f} of 20 ranges",
                        flush=True,
                    )
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1))
        print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
