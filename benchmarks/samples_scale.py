"""Reading a sample store with several processes and directories, and what of it hides behind training.

    python benchmarks/samples_scale.py --directories /mnt/a,/mnt/b,/mnt/c,/mnt/d -o out/samples_scale.json

DLFS (figures 8 and 9) reads with up to 16 nodes from as many NVMe devices. Here N processes, each bound to
one core, mount one store whose N partitions lie in as many directories, which stand for disks: each process
reads its share of an epoch in random order, all at once, from all directories. Give directories on as many
disks; without, all lie on one, and together are as fast as that. Beside it, each process reads random samples
of the same bytes from packed files by pread (DLFS's Ext4).

Cold: dropped from the page cache before (posix_fadvise), and read past it by penstock (O_DIRECT); pread goes
through it. Warm: everything was read into the page cache before. Rows take turns; starting an epoch is part
of the time, mounting is not. Throughput is of all samples, from the first beginning to the last end.

The second part trains a small network on batches of a loader (figure 7b), cold, and on one batch in memory:
one process with all cores, one thread that computes. The difference is what is not hidden of the time that
the loader takes for a batch when nothing is trained. The processor's time is that of the thread that trains:
it says most where the machine does other work, too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from io_bench.machine import heading, machine
from io_bench.measure import rotated
from processes import Processes, together_s
from samples_bench.data import ID_BYTES, Data, drop, warm
from torch import nn

from penstock import samples
from penstock.storage.files import Closing
from penstock.units import format_bytes, format_rate

PROCESSES = (1, 2, 4)
SIZES = {512: 1 << 20, 128 << 10: 4096}  # and how many samples there are
BATCHES = {512: 256, 128 << 10: 32}
CACHE_BYTES = 64 << 20
READERS = ("penstock", "pread")
IO = {"cold": "direct", "warm": "buffered"}
STEPS = {512: 500, 128 << 10: 60}  # of a turn of training
FIRST = 10  # that are not counted


class Reader(Closing):
    """A process that reads its share of a store, or of packed files. ``bound``: to one core."""

    def __init__(self, index: int, seed: int, bound: bool) -> None:
        cores = sorted(os.sched_getaffinity(0))
        if bound:
            os.sched_setaffinity(0, {cores[index % len(cores)]})
        torch.set_num_threads(1)
        self._index, self._seed = index, seed
        self._stores: dict[str, Any] = {}

    def close(self) -> None:
        for store in self._stores.values():
            store.close()
        self._stores = {}

    def mount(self, folders: list[Path], data: Data, world_size: int) -> None:
        self.close()
        self._folders, self._data, self._world = folders, data, world_size
        for how, io in IO.items():
            self._stores[how] = samples.mount(
                folders,
                rank=self._index,
                world_size=world_size,
                cache_bytes=CACHE_BYTES,
                io=io,
                prefetch_bytes="16MiB",
            )

    def penstock(self, how: str, epoch: int, most_s: float) -> tuple[float, float, int]:
        """Read for a time, or its share of an epoch: when it began and ended, and the samples."""
        begun_s, count, store = time.monotonic(), 0, self._stores[how]
        store.sequence(seed=self._seed, epoch=epoch)
        while (batch := store.bread(256)) is not None:
            count += len(batch)
            if time.monotonic() > begun_s + most_s:
                break
        return begun_s, time.monotonic(), count

    def pread(self, how: str, epoch: int, most_s: float) -> tuple[float, float, int]:
        size_bytes = self._data.size_bytes
        each = self._data.count // len(self._folders)
        files = [os.open(folder.parent / "packed", os.O_RDONLY) for folder in self._folders]
        order = np.random.default_rng(epoch).permutation(self._data.count)[self._index :: self._world]
        begun_s, count = time.monotonic(), 0
        try:
            for number in order.tolist():
                os.pread(files[min(number // each, len(files) - 1)], size_bytes, number % each * size_bytes)
                count += 1
                if not count & 63 and time.monotonic() > begun_s + most_s:
                    break
            return begun_s, time.monotonic(), count
        finally:
            for file in files:
                os.close(file)

    def seen(self, how: str) -> list[int]:
        """The numbers of the samples of a whole epoch, from their bytes. Not timed."""
        found, store = [], self._stores[how]
        store.sequence(seed=self._seed, epoch=0)
        while (batch := store.bread(256)) is not None:
            heads = np.stack([np.asarray(batch[i][:ID_BYTES]) for i in range(len(batch))])
            found += heads.view(np.int64).ravel().tolist()
        return found

    def train(self, how: str, epoch: int, batch_size: int, width: int) -> tuple[float, float]:
        """Mean seconds of a step, on a batch in memory or those of a loader, or of the loader alone; and of
        the processor for the thread that trains."""
        size_bytes, store = self._data.size_bytes, self._stores["cold"]
        torch.manual_seed(0)
        model = network(size_bytes, width)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        got = store.read_many(range(batch_size))
        held = {"data": torch.from_numpy(got.data), "indices": torch.from_numpy(got.indices)}
        batches = itertools.repeat(held)
        if how != "in memory":
            loader = samples.Loader(store, batch_size, drop_last=True, seed=self._seed)
            loader.set_epoch(epoch)
            batches = iter(loader)
        begun_s = begun_cpu_s = 0.0
        for step in range(STEPS[size_bytes]):
            if step == FIRST:
                begun_s, begun_cpu_s = time.perf_counter(), time.thread_time()
            batch = next(batches)
            if how != "loader alone":
                x = batch["data"].view(batch_size, size_bytes).to(torch.float32).div_(255).sub_(0.5)
                F.cross_entropy(model(x), batch["indices"] % 10).backward()
                optimizer.step()
                optimizer.zero_grad()
        count = STEPS[size_bytes] - FIRST
        return (time.perf_counter() - begun_s) / count, (time.thread_time() - begun_cpu_s) / count


def network(size_bytes: int, width: int) -> nn.Module:
    """Small samples are vectors, large ones images of 8 channels."""
    if size_bytes < 4096:
        return nn.Sequential(nn.Linear(size_bytes, width), nn.ReLU(), nn.Linear(width, 10))
    side = int((size_bytes // 8) ** 0.5)
    return nn.Sequential(
        nn.Unflatten(1, (8, side, side)),
        nn.Conv2d(8, width, 4, stride=4),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    )


WIDTHS = {512: (64, 1024), 128 << 10: (4, 32)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--directories", default=tempfile.gettempdir(), metavar="PATH,...", help="default: %(default)s"
    )
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--turn-s", type=float, default=3.0, help="most of a turn; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="only whether it works: few samples, one round")
    parser.add_argument("-o", "--output", type=Path, default=Path("out/samples_scale.json"))
    options = parser.parse_args(arguments)
    rounds = 1 if options.quick else options.rounds
    directories = [Path(path) for path in options.directories.split(",")]
    document: dict[str, Any] = {
        **heading("samples_scale", directories[0]),
        "hardware": [machine(directory) for directory in directories],
        "rounds": rounds,
        "sizes": {},
    }
    for size_bytes, count in SIZES.items():
        data = Data(size_bytes, max(count >> 2, 3200) if options.quick else count, options.seed)
        with tempfile.TemporaryDirectory(dir=directories[0], prefix="samples-scale.") as first:
            others = [
                tempfile.TemporaryDirectory(dir=each, prefix="samples-scale.") for each in directories[1:]
            ]
            try:
                places = [Path(first), *(Path(other.name) for other in others)]
                with Processes(PROCESSES[-1], Reader, options.seed, True) as readers:
                    read = throughput(readers, data, places, rounds, options.turn_s)
                with Processes(1, Reader, options.seed, False) as readers:
                    found = {"throughput": read, "training": training(readers, data, places, rounds)}
            finally:
                for other in others:
                    other.cleanup()
        document["sizes"][str(size_bytes)] = {"samples": data.count, **found}
        show(data, found)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(document, indent=1))
    print(f"wrote {options.output}")
    return 0


def throughput(
    readers: Processes, data: Data, places: list[Path], rounds: int, turn_s: float
) -> dict[str, list[float]]:
    """Samples a second of each round, by "READER TEMPERATURE PROCESSES"."""
    found: dict[str, list[float]] = {}
    for world_size in PROCESSES:
        folders = [made(place, data, world_size, part) for part, place in parts(places, world_size)]
        readers.ask(world_size, "mount", folders, data, world_size)
        for how in IO:
            everything = sorted(number for each in readers.ask(world_size, "seen", how) for number in each)
            if everything != list(range(data.count)):
                raise RuntimeError(f"{how}: {world_size} processes did not read every sample exactly once")
        rows = [(reader, how) for reader in READERS for how in IO]
        for number in range(rounds):
            for reader, how in rotated(rows, number):
                for folder in folders:
                    (drop if how == "cold" else warm)(folder.parent)
                answers = readers.ask(world_size, reader, how, number, turn_s)
                took_s = together_s([(began, ended) for began, ended, _ in answers])
                rate = sum(count for _, _, count in answers) / took_s
                found.setdefault(f"{reader} {how} {world_size}", []).append(rate)
        readers.ask(world_size, "close")
    return found


def parts(places: list[Path], world_size: int) -> list[tuple[int, Path]]:
    """A directory for each partition: on another disk each, where there are as many."""
    found = [
        (part, places[part % len(places)] / f"{world_size}-disks" / f"disk-{part}")
        for part in range(world_size)
    ]
    for _, place in found:
        place.mkdir(parents=True, exist_ok=True)
    return found


def made(place: Path, data: Data, world_size: int, part: int) -> Path:
    """A partition as a store in its directory, and the same samples in one packed file beside it."""
    begin, end = (data.count * edge // world_size for edge in (part, part + 1))
    with open(place / "packed", "wb") as packed:
        for index in range(begin, end):
            packed.write(data.sample(index))
        packed.flush()
        os.fsync(packed.fileno())
    samples.pack(((f"{index:09d}", data.sample(index)) for index in range(begin, end)), place / "store")
    return place / "store"


def training(
    readers: Processes, data: Data, places: list[Path], rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Seconds of a step of each round, and of the processor for the thread that trains, by "HOW WIDTH"."""
    readers.ask(1, "mount", [place / "store" for _, place in parts(places, PROCESSES[-1])], data, 1)
    found: dict[str, list[tuple[float, float]]] = {}
    batch_size = BATCHES[data.size_bytes]
    rows = [
        (how, width)
        for how in ("in memory", "with loader", "loader alone")
        for width in WIDTHS[data.size_bytes]
    ]
    for number in range(rounds):
        for how, width in rotated(rows, number):
            found.setdefault(f"{how} {width}", []).extend(
                readers.ask(1, "train", how, number, batch_size, width)
            )
    return found


def show(data: Data, found: dict[str, Any]) -> None:
    print(f"{data.count} samples of {format_bytes(data.size_bytes)}")
    for name, rates in found["throughput"].items():
        reader, how, world_size = name.split(" ")
        rate = statistics.median(rates)
        alone = statistics.median(found["throughput"][f"{reader} {how} 1"])
        print(
            f"  {reader:<8} {how} {world_size} processes  {rate:12,.0f} samples/s  "
            f"{format_rate(rate * data.size_bytes):>11}  {rate / alone:5.2f} x one  "
            f"({min(rates):,.0f} to {max(rates):,.0f})"
        )
    for width in WIDTHS[data.size_bytes]:
        memory, loaded, alone = (
            found["training"][f"{how} {width}"] for how in ("in memory", "with loader", "loader alone")
        )
        more_s, more_cpu_s = (
            sorted(with_it[unit] - without[unit] for with_it, without in zip(loaded, memory, strict=True))
            for unit in (0, 1)
        )
        print(
            f"  batches of {BATCHES[data.size_bytes]}, width {width}: a step in memory "
            f"{statistics.median(step_s for step_s, _ in memory) * 1e3:.2f} ms, with the loader "
            f"{statistics.median(more_s) * 1e3:+.2f} ms ({more_s[0] * 1e3:+.2f} to {more_s[-1] * 1e3:+.2f}), "
            f"of the processor {statistics.median(more_cpu_s) * 1e3:+.2f} ms; the loader alone "
            f"{statistics.median(step_s for step_s, _ in alone) * 1e3:.2f} ms"
        )


if __name__ == "__main__":
    sys.exit(main())
