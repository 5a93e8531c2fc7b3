"""Many drives of limited rate, read by one client and by many: how much of what all give arrives.

As in DLFS's figures 9 and 11, drives are emulated in memory: each is a target of its own (a process) that
gives so many bytes a second and no more, and holds one store. N of them are mounted as one by one client, by
N, and by sixteen, processes all, and one epoch is read in chunk order, each sample by one client. The share
is that of N times the rate of one, from the first beginning to the last end; mounting is not timed. All share
the cores and the loopback, so the rates have to be small.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from io_bench.measure import rotated
from processes import Processes, together_s
from rich.console import Console
from rich.table import Table

from penstock import samples
from penstock.storage.files import Closing
from samples_bench.data import ID_BYTES, Data
from tests.support.nvme_target.process import NQN, Namespace, Subsystem, Target

DEVICES = (1, 2, 4, 8, 16)
CLIENTS = 16
RATE_BYTES_PER_S = 16_000_000
DEVICE_BYTES = {128 << 10: 40 << 20, 512: 64 << 20}  # of samples of each size
CACHE_BYTES = 256 << 20  # of each client: the default
PREFETCH_BYTES = 32 << 20  # the default
PREFETCH_BYTES_A_DEVICE = 8 << 20  # of one client, where that is more
BATCH = {128 << 10: 32, 512: 256}


class Client(Closing):
    """A process that reads its share of what is on the drives."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._store: Any = None

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
        self._store = None

    def mount(self, urls: list[str], world_size: int) -> None:
        self.close()
        self._store = samples.mount(
            urls,
            rank=self._index,
            world_size=world_size,
            cache_bytes=CACHE_BYTES,
            prefetch_bytes=max(PREFETCH_BYTES, PREFETCH_BYTES_A_DEVICE * len(urls) // world_size),
        )

    def epoch(self, epoch: int, batch: int, keep: bool) -> tuple[float, float, int, list[int]]:
        """When it began and ended, the samples, and with ``keep`` the numbers in their bytes."""
        count, seen, store = 0, [], self._store
        begun_s = time.monotonic()
        store.sequence(seed=0, epoch=epoch)
        while (found := store.bread(batch)) is not None:
            count += len(found)
            if keep:
                heads = np.stack([np.asarray(found[i][:ID_BYTES]) for i in range(len(found))])
                seen += heads.view(np.int64).ravel().tolist()
        return begun_s, time.monotonic(), count, seen


def rows() -> list[tuple[int, int]]:
    """Devices and clients."""
    return [(n, world_size) for n in DEVICES for world_size in sorted({1, n, CLIENTS})]


def measure(options: argparse.Namespace, folder: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """By the size of a sample: the turns of each row, "DEVICES CLIENTS", and what the targets complain of."""
    found: dict[str, Any] = {"rate_bytes_per_s": RATE_BYTES_PER_S, "sizes": {}}
    chosen = rows()[-2:] if options.quick else rows()
    with Processes(CLIENTS, Client) as clients:
        for size_bytes in options.sizes:
            device_bytes = DEVICE_BYTES[size_bytes]
            each = device_bytes // size_bytes // (16 if options.quick else 1)
            data = Data(size_bytes, each * DEVICES[-1], options.seed)
            tell(f"{DEVICES[-1]} drives with {each} samples of {size_bytes} bytes each")
            with ExitStack() as stack:
                targets = [stack.enter_context(drive(folder, n, data, each)) for n in range(DEVICES[-1])]
                turns = in_turns(clients, targets, data, each, chosen, options, tell)
                violations = [text for target in targets for text in target.violations()]
            found["sizes"][str(size_bytes)] = {
                "samples_a_device": each,
                "turns": turns,
                "violations": violations,
            }
    return found


def drive(folder: Path, number: int, data: Data, each: int) -> Target:
    """A drive that holds the ``number``-th of so many samples, as fast as it can for now."""
    store, image = folder / "store", folder / f"drive-{number}"
    begin = number * each
    samples.pack(((f"{i:09d}", data.sample(i)) for i in range(begin, begin + each)), store, overwrite=True)
    size_bytes = (each * data.size_bytes + (64 << 20)) // 4096 * 4096
    target = Target([Subsystem(NQN.format(0), [Namespace(1, size_bytes, 512, image)])])
    try:
        samples.upload(store, url_of(target), overwrite=True)
    except BaseException:
        target.close()
        raise
    return target


def url_of(target: Target) -> str:
    return f"nvme+tcp://{target.address}:{target.port}/{NQN.format(0)}?ns=1"


def in_turns(
    clients: Processes,
    targets: Sequence[Target],
    data: Data,
    each: int,
    chosen: Sequence[tuple[int, int]],
    options: argparse.Namespace,
    tell: Callable[[str], None],
) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {}
    batch = BATCH[data.size_bytes]
    for devices, world_size in chosen:  # as fast as they can: every sample exactly once
        _mount(clients, targets[:devices], world_size)
        seen = [number for one in clients.ask(world_size, "epoch", 0, batch, True) for number in one[3]]
        if sorted(seen) != list(range(devices * each)):
            raise RuntimeError(f"{world_size} clients did not read each sample of {devices} drives once")
    for number in range(options.rounds):
        tell(f"round {number + 1}")
        for devices, world_size in rotated(chosen, number):
            for target in targets:
                target.set(rate=0)
            _mount(clients, targets[:devices], world_size)
            before = sum(target.stats()["read_bytes"] for target in targets)
            for target in targets:
                target.set(rate=RATE_BYTES_PER_S)
            answers = clients.ask(world_size, "epoch", number + 1, batch, False)
            took_s = together_s([(began, ended) for began, ended, _, _ in answers])
            count = sum(one[2] for one in answers)
            moved_bytes = sum(target.stats()["read_bytes"] for target in targets) - before
            ideal_bytes = took_s * devices * RATE_BYTES_PER_S
            found.setdefault(f"{devices} {world_size}", []).append(
                {
                    "wall_s": took_s,
                    "samples": count,
                    "samples_per_s": count / took_s,
                    "share": count * data.size_bytes / ideal_bytes,
                    "share_moved": moved_bytes / ideal_bytes,
                }
            )
    clients.ask(CLIENTS, "close")
    return found


def _mount(clients: Processes, targets: Sequence[Target], world_size: int) -> None:
    clients.ask(world_size, "mount", [url_of(target) for target in targets], world_size)


def show(console: Console, found: dict[str, Any]) -> None:
    rate = found["rate_bytes_per_s"]
    for size_bytes, size in found["sizes"].items():
        table = Table(title=f"Samples of {size_bytes} B from drives of {rate / 1e6:g} MB/s; medians (range)")
        for column in ("drives", "clients", "samples/s", "of the ideal", "moved, of the ideal"):
            table.add_column(column, justify="right")
        for name, turns in size["turns"].items():
            shares = [turn["share"] for turn in turns]
            table.add_row(
                *name.split(),
                f"{statistics.median(turn['samples_per_s'] for turn in turns):,.0f}",
                f"{statistics.median(shares):.1%} ({min(shares):.1%} to {max(shares):.1%})",
                f"{statistics.median(turn['share_moved'] for turn in turns):.1%}",
            )
        console.print(table)
