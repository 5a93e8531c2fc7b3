"""The disk traffic of several ranks together, against that of one rank alone.

    python benchmarks/ranks_disk.py --directory /mnt/nvme -o out/ranks_disk.json

1, 2 and 4 processes take turns; each has a spill space of its own in the same directory, as the ranks of a
job have, and all begin at the same time. A turn writes tensors of one size, and reads them back: the same
bytes in each turn, divided among its processes, with at most 64 MiB of each process in flight, as the
runtime has. The time is from the first beginning to the last end. Beside them, the same requests by a raw
io_uring loop (O_DIRECT, huge pages, files that were written before). Which I/O path is fastest was learned
before, by one process.

Every byte read is compared, outside the time. The share is that of medians, its quartiles are of the rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from io_bench.limit import library
from io_bench.machine import heading
from io_bench.measure import rotated, settle
from processes import Processes, together_s

from penstock.options import IoOptions
from penstock.storage.aligned import AlignedBuffer
from penstock.storage.spill import SpillSpace, Transfer
from penstock.storage.transfer import EVICT, PREFETCH
from penstock.units import format_rate, parse_bytes

MIB = 1 << 20
IN_FLIGHT_BYTES = 64 * MIB
PROCESSES = (1, 2, 4)
SIZES = "3MiB,9MiB,49MiB"
KINDS = ("write", "read", "both")
RAW_PIECE_BYTES, RAW_DEPTH = 4 * MIB, 32


class Rank:
    """One process: a spill space, a raw ring on a file of its own, and their memory."""

    def __init__(self, index: int, directory: Path, total_bytes: int, options: IoOptions) -> None:
        self._share = next(count for count in PROCESSES if count > index)  # it never moves more than that
        most_bytes = total_bytes // self._share
        self._space = SpillSpace(directory, options)
        self._memory = {kind: AlignedBuffer(most_bytes) for kind in ("write", "read")}
        random = np.random.Generator(np.random.SFC64(index))
        self._memory["write"].view()[:] = random.bytes(most_bytes)
        self._memory["read"].view()[:] = bytes(most_bytes)
        self._library = library()
        self._ring = ctypes.c_void_p()
        self._check(self._library.limit_open(ctypes.byref(self._ring)))
        self._file = os.open(directory / f"raw-{index}", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._file, 0, most_bytes)
        self._raw("write", most_bytes)

    def __enter__(self) -> Rank:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._library.limit_close(self._ring)
        os.close(self._file)
        self._space.close()

    def allocate(self, size_bytes: int, total: int) -> None:
        """Space for its share of the tensors, written once: what was never written is slower."""
        self._size_bytes = size_bytes
        self._extents = [self._space.allocate(size_bytes) for _ in range(total // self._share)]
        self._engine("write")

    def release(self) -> None:
        for extent in self._extents:
            self._space.release(extent)

    def move(self, who: str, kind: str, count: int) -> tuple[float, float]:
        """Write or read as many tensors. When it began, and when it ended."""
        begun_s = time.monotonic()
        if who == "raw":
            self._raw(kind, self._size_bytes * count)
        else:
            self._engine(kind, count)
        return begun_s, time.monotonic()

    def verify(self, count: int) -> bool:
        """Whether the bytes that were read are those that were written; they are forgotten."""
        size_bytes = self._size_bytes * count
        written, read = (
            np.frombuffer(self._memory[kind].view()[:size_bytes], dtype=np.uint64)
            for kind in ("write", "read")
        )
        same = np.array_equal(written, read)
        read[:] = 0
        return same

    def paths(self) -> dict[str, int]:
        return {path: moved for path, moved in self._space.moved_bytes_by_path.items() if moved}

    def _raw(self, kind: str, size_bytes: int) -> None:
        memory = self._memory[kind].address
        self._check(
            self._library.limit_move(
                self._ring, kind == "write", self._file, 0, memory, size_bytes, RAW_PIECE_BYTES, RAW_DEPTH
            )
        )

    def _engine(self, kind: str, count: int | None = None) -> None:
        start = self._space.write if kind == "write" else self._space.read
        room = threading.Semaphore(max(1, IN_FLIGHT_BYTES // self._size_bytes))
        failed: list[Exception] = []

        def on_done(transfer: Transfer) -> None:
            if transfer.error is not None:
                failed.append(transfer.error)
            room.release()

        extents = self._extents[:count]
        for index, extent in enumerate(extents):
            if not room.acquire(timeout=self._space.timeout_s):
                raise self._space.hang_error()
            memory = self._memory[kind]
            start(
                extent,
                memory.address + index * self._size_bytes,
                self._size_bytes,
                memory,
                on_done,
                priority=EVICT if kind == "write" else PREFETCH,
            )
        for _ in range(max(1, IN_FLIGHT_BYTES // self._size_bytes)):
            if not room.acquire(timeout=self._space.timeout_s):
                raise self._space.hang_error()
        if failed:
            raise failed[0]

    @staticmethod
    def _check(result: int) -> None:
        if result < 0:
            raise OSError(-result, os.strerror(-result))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--sizes", default=SIZES, metavar="SIZE,...", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=15, help="default: %(default)s")
    parser.add_argument("--mib", type=int, default=588, help="of a turn, in each direction; %(default)s")
    parser.add_argument("--io-path", help="such as 'io_uring direct'; default: what the engine chooses")
    parser.add_argument("-o", "--output", type=Path, default=Path("out/ranks_disk.json"))
    options = parser.parse_args(arguments)
    sizes = [parse_bytes(size) for size in options.sizes.split(",")]
    most = PROCESSES[-1]
    document: dict[str, Any] = {
        **heading("ranks_disk", options.directory),
        "rounds": options.rounds,
        "sizes": {},
    }
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="ranks-disk.") as folder:
        totals = {size: max(most, (options.mib * MIB) // size // most * most) for size in sizes}
        most_bytes = max(size * count for size, count in totals.items())
        spill = IoOptions(paths=options.io_path, costs=Path(folder) / "costs.json")
        learn(Path(folder), sizes, spill)
        with Processes(most, Rank, Path(folder), most_bytes, spill) as ranks:
            for size, count in totals.items():
                seconds = measure(ranks, size, count, options.rounds, Path(folder))
                document["sizes"][str(size)] = {"tensors": count, "seconds": seconds}
                show(size, count, seconds)
            document["paths"] = ranks.ask(most, "paths")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(document, indent=1))
    print(f"wrote {options.output}")
    return 0


def learn(folder: Path, sizes: Sequence[int], options: IoOptions) -> None:
    """Try every I/O path with tensors of these sizes, and save what each costs."""
    with SpillSpace(folder, options) as space:
        buffer = AlignedBuffer(max(sizes))
        buffer.view()[:] = np.random.default_rng(0).bytes(buffer.size_bytes)
        over = threading.Semaphore(0)
        for size_bytes in sizes:
            while not space.choice.classes().get(size_bytes.bit_length() - 1):
                extent = space.allocate(size_bytes)
                for move in (space.write, space.read):
                    transfer = move(extent, buffer.address, size_bytes, buffer, lambda _: over.release())
                    if not over.acquire(timeout=space.timeout_s):
                        raise space.hang_error()
                    if transfer.error is not None:
                        raise transfer.error
                space.release(extent)


def measure(
    ranks: Processes, size_bytes: int, total: int, rounds: int, folder: Path
) -> dict[str, list[float]]:
    """Seconds of each round, by "WHO KIND PROCESSES"."""
    most = PROCESSES[-1]
    ranks.ask(most, "allocate", size_bytes, total)
    rows = [(who, count) for who in ("engine", "raw") for count in PROCESSES]
    found: dict[str, list[float]] = {f"{who} {kind} {count}": [] for who, count in rows for kind in KINDS}
    for number in range(rounds):
        for who, count in rotated(rows, number):
            both_s = 0.0
            for kind in KINDS[:2]:
                took_s = together_s(ranks.ask(count, "move", who, kind, total // count))
                found[f"{who} {kind} {count}"].append(took_s)
                both_s += took_s
            found[f"{who} both {count}"].append(both_s)
            if not all(ranks.ask(count, "verify", total // count)):
                raise RuntimeError(f"{who}, {count} processes: tensors came back with other bits")
            settle(folder)
    ranks.ask(most, "release")
    return found


def show(size_bytes: int, total: int, seconds: dict[str, list[float]]) -> None:
    print(f"{total} tensors of {size_bytes / MIB:g} MiB")
    for name, times_s in seconds.items():
        who, kind, count = name.rsplit(" ", 2)
        alone_s = seconds[f"{who} {kind} 1"]
        moved = size_bytes * total * (2 if kind == "both" else 1)
        median_s = statistics.median(times_s)
        ratios = sorted(a / t for a, t in zip(alone_s, times_s, strict=True))
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if ratios[1:] else ratios * 3
        share = statistics.median(alone_s) / median_s
        print(
            f"  {who:<6} {kind:<5} {count} processes  {format_rate(moved / median_s):>12}  "
            f"{share:6.1%} of one alone ({low:.1%} to {high:.1%})"
        )


if __name__ == "__main__":
    sys.exit(main())
