"""Remote drives by NVMe/TCP on this machine's loopback: reads and bytes a second, processor time, samples.

    python benchmarks/samples_remote.py -o out/samples_remote.json

The target is the tests' own (tests/support/nvme_target: C++, memory), on a core of its own; the host has the
first core, all its threads together. Beside it stands a raw socket: a process on the target's core that sends
bytes for ever, a mebibyte at a time, and one on the host's core that receives them in pieces of the same size
into as much memory; once as sockets are, once with buffers of 4 MiB. In each round every row has its turn,
each round begins with another one. Bytes are verified outside the time.

With --other HOST:PORT, the same reads of another target (SPDK's, the kernel's): of namespace 1 of --nqn,
whose first 64 MiB are overwritten. Give it the target's core.

Targets of limited rate give so many bytes a second and no more: neither the loopback nor a core is the limit.

Devices: up to sixteen drives of limited rate, each its own target, read by one client and by many: see
samples_bench/devices.py.

Samples: one store, read in chunk order by `bread`, from files and from a namespace. Warm: from the page
cache, and from a target as fast as it is. Equal bandwidth: from the disk, past the page cache, and from a
target that gives as many bytes a second as the disk then did. Mixing: see benchmarks/samples.py.

The JSON holds every turn. `--quick` checks that it all works; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from io_bench.machine import heading
from rich.console import Console
from rich.table import Table
from samples import BATCH, check_order, ideal_groups
from samples_bench.data import Data, drop

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from samples_bench import devices  # noqa: E402

import penstock.samples  # noqa: E402
from penstock import _native  # noqa: E402
from penstock.storage.transfer import File, Transfer  # noqa: E402
from tests.support.nvme_host import HOST_ID, HOST_NQN  # noqa: E402
from tests.support.nvme_native import Requests  # noqa: E402
from tests.support.nvme_target.process import NQN, Namespace, Subsystem, Target  # noqa: E402

CHUNK_BYTES = 256 << 10
SMALL_BYTES = 4 << 10
IN_FLIGHT = {SMALL_BYTES: 128, CHUNK_BYTES: 16}
LIMITED_BYTES_PER_S = 100_000_000
CONTENT_BYTES = 64 << 20
SAMPLE_BYTES, SAMPLES = 4096, 65_536


def cores() -> tuple[set[int], set[int]]:
    """Of the host, and of the target."""
    allowed = sorted(os.sched_getaffinity(0))
    return {allowed[0]}, {allowed[-1]}


@contextmanager
def on(processors: set[int]) -> Iterator[None]:
    """What is started meanwhile has these processors."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def processor_s(pid: int) -> float:
    if pid == 0:
        return math.nan
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def turn(pid: int, read: Callable[[], int], size_bytes: int) -> dict[str, float]:
    """One turn: reads, bytes, and seconds of the clock, of this process, and of the one that serves."""
    served_s, used_s, begun_s = processor_s(pid), time.process_time(), time.perf_counter()
    reads = read()
    return {
        "reads": reads,
        "bytes": reads * size_bytes,
        "wall_s": time.perf_counter() - begun_s,
        "host_s": time.process_time() - used_s,
        "target_s": processor_s(pid) - served_s,
    }


# ---- A raw socket


SENT_BYTES, RAW_BUFFER_BYTES = 1 << 20, 4 << 20


def send_for_ever(pipe: Any, total_bytes: int, large_buffers: bool) -> None:
    data = memoryview(os.urandom(total_bytes))
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        connection, _ = server.accept()
    if large_buffers:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, RAW_BUFFER_BYTES)
    with connection:
        while True:
            for begin in range(0, total_bytes, SENT_BYTES):
                connection.sendall(data[begin : begin + SENT_BYTES])


class RawSocket:
    """Receives pieces of `size_bytes`, in turn into as much memory as the host's reads have in flight."""

    def __init__(self, size_bytes: int, target_cores: set[int], large_buffers: bool) -> None:
        self.size_bytes = size_bytes
        spawn = multiprocessing.get_context("spawn")
        here, there = spawn.Pipe()
        with on(target_cores):
            self._process = spawn.Process(
                target=send_for_ever, args=(there, CONTENT_BYTES, large_buffers), daemon=True
            )
            self._process.start()
        self._connection = socket.socket()
        if large_buffers:
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RAW_BUFFER_BYTES)
        self._connection.connect(("127.0.0.1", here.recv()))
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._memory = [bytearray(size_bytes) for _ in range(IN_FLIGHT[size_bytes])]

    def run(self, seconds: float) -> dict[str, float]:
        def receive() -> int:
            pieces, end_s = 0, time.perf_counter() + seconds
            while time.perf_counter() < end_s:
                left = memoryview(self._memory[pieces % len(self._memory)])
                while left:
                    left = left[self._connection.recv_into(left, flags=socket.MSG_WAITALL) :]
                pieces += 1
            return pieces

        return turn(self.pid, receive, self.size_bytes)

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()


# ---- The host


@dataclass(frozen=True)
class Endpoint:
    """A target that runs elsewhere, or by itself."""

    address: str
    port: int
    nqn: str
    pid: int = 0  # 0: not known


def endpoint(target: Target) -> Endpoint:
    return Endpoint(target.address, target.port, NQN.format(0), target.process.pid)


class Reads:
    """Random reads of whole pieces, always as many in flight, of one namespace or of several by turns."""

    def __init__(
        self, targets: Sequence[Endpoint], size_bytes: int, seed: int = 0, **options: bool | int
    ) -> None:
        self.size_bytes, self.targets = size_bytes, targets
        self.pid = targets[0].pid
        self._stack = ExitStack()
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._open: list[Any] = []
        self._groups: dict[int, list[Transfer]] = {}
        self._left: dict[int, int] = {}
        self.reads: list[int] = [0] * len(targets)
        self._target_of: dict[int, int] = {}
        self._running = self._error = 0
        self._stop = True
        in_flight = IN_FLIGHT[size_bytes]
        groups = 4
        self._memory = np.zeros((len(targets), in_flight, size_bytes), np.uint8)
        self._offsets: dict[int, int] = {}
        random = np.random.default_rng(seed)
        for number, target in enumerate(targets):
            controller = _native.NvmeController(
                target.address, target.port, target.nqn, host_nqn=HOST_NQN, host_id=HOST_ID, **options
            )
            self._open.append(controller)
            namespace = controller.open_namespace(1)
            file = File(-1, namespace["handle"], namespace["block_bytes"])
            pieces = min(namespace["blocks"] * namespace["block_bytes"], CONTENT_BYTES) // size_bytes
            for group in range(groups):
                key = number * groups + group
                transfers = []
                for place in range(group, in_flight, groups):
                    offset = int(random.integers(pieces)) * size_bytes
                    address = self._memory[number, place].ctypes.data
                    over = partial(self._over, key)
                    transfers.append(Transfer("read", file, offset, address, size_bytes, on_done=over))
                self._groups[key] = transfers
                self._target_of[key] = number
        # The reads of all targets at once: the slower ones hold no place that the others need.
        depth = in_flight * len(targets)
        self._transfers = _native.Transfers(
            "nvme", ["direct"], depth, max(size_bytes, 1 << 20), 1 << 20, 4, 1
        )

    def _over(self, key: int, transfer: Transfer) -> None:
        with self._lock:
            self._error = self._error or transfer.error_number
            self._left[key] -= 1
            if self._left[key]:
                return
            self.reads[self._target_of[key]] += len(self._groups[key])
            if self._stop or self._error:
                self._running -= 1
                self._ended.notify_all()
                return
            self._left[key] = len(self._groups[key])
        self._begin(key)

    def _begin(self, key: int) -> None:
        self._transfers.submit(self._groups[key])

    def run(self, seconds: float) -> dict[str, float]:
        self.reads = [0] * len(self.targets)

        def read() -> int:
            with self._lock:
                self._stop = False
                self._left = {key: len(group) for key, group in self._groups.items()}
                self._running = len(self._groups)
            for key in self._groups:
                self._begin(key)
            time.sleep(seconds)
            with self._lock:
                self._stop = True
                if not self._ended.wait_for(lambda: self._running == 0, 60.0):
                    raise RuntimeError("reads do not end")
            if self._error:
                raise OSError(self._error, os.strerror(self._error))
            return sum(self.reads)

        found = turn(self.pid, read, self.size_bytes)
        found["reads_by_target"] = list(self.reads)  # type: ignore[assignment]
        return found

    def verify(self, contents: Sequence[np.ndarray]) -> None:
        """That the memory holds what was asked for."""
        groups = 4
        for key, transfers in self._groups.items():
            number, group = divmod(key, groups)
            for place, transfer in enumerate(transfers):
                offset = transfer.offset
                mine = self._memory[number, group + place * groups]
                assert np.array_equal(mine, contents[number][offset : offset + self.size_bytes])

    def counters(self) -> list[dict[str, int]]:
        return [controller.counters() for controller in self._open]

    def close(self) -> None:
        assert self._transfers.close(60.0)
        for controller in self._open:
            controller.close()


# ---- Rows


def in_turns(
    rows: dict[str, Any], rounds: int, seconds: float, tell: Callable[[str], None]
) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {name: [] for name in rows}
    names = list(rows)
    for name in names:
        rows[name].run(seconds / 4)  # connections grow their windows
    for number in range(rounds):
        tell(f"round {number + 1}")
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            found[name].append(rows[name].run(seconds))
    return found


def serve(path: Path, size_bytes: int, target_cores: set[int], **options: int) -> Target:
    namespace = Namespace(1, size_bytes, 512, path)
    with on(target_cores):
        return Target([Subsystem(NQN.format(0), [namespace])], options=options)


def measure_reads(options: argparse.Namespace, folder: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    host_cores, target_cores = cores()
    content = random_content(folder / "reads", CONTENT_BYTES, options.seed)
    with serve(folder / "reads", content.size, target_cores) as target, on(host_cores):
        found = reads_of(endpoint(target), content, options, target_cores, tell)
        found["violations"] = target.violations()
    return found


def measure_other(options: argparse.Namespace, folder: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    if options.other is None:
        return {}
    host_cores, _ = cores()
    other = options.other
    content = np.frombuffer(np.random.default_rng(options.seed).bytes(CONTENT_BYTES), np.uint8)
    controller = _native.NvmeController(
        other.address, other.port, other.nqn, host_nqn=HOST_NQN, host_id=HOST_ID
    )
    namespace, identity = controller.open_namespace(1), controller.identify()
    moves = Requests()
    moves.write(namespace, 0, content.tobytes())
    moves.close()
    controller.close()
    with on(host_cores):
        found = reads_of(other, content, options, None, tell)  # it may have the target's core for itself
    found["target"] = {
        name: identity[name] for name in ("model", "firmware", "mdts_bytes", "io_capsule_bytes")
    }
    return found


def reads_of(
    target: Endpoint,
    content: np.ndarray,
    options: argparse.Namespace,
    raw_cores: set[int] | None,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for size in (CHUNK_BYTES, SMALL_BYTES):
        tell(f"reads of {size} bytes")
        rows: dict[str, Any] = {
            "penstock, io_uring": Reads([target], size, options.seed),
            "penstock, epoll": Reads([target], size, options.seed, io_uring=False, queues=2),
        }
        if raw_cores is not None:
            rows["raw socket"] = RawSocket(size, raw_cores, False)
            rows["raw socket, large buffers"] = RawSocket(size, raw_cores, True)
        if size == CHUNK_BYTES:
            digests = {"header_digest": True, "data_digest": True}
            rows["penstock, both digests"] = Reads([target], size, options.seed, **digests, queues=3)
        try:
            found[str(size)] = in_turns(rows, options.rounds, options.turn_s, tell)
            for row in rows.values():
                if isinstance(row, Reads):
                    row.verify([content])
        finally:
            for row in rows.values():
                row.close()
    return found


def random_content(path: Path, size_bytes: int, seed: int) -> np.ndarray:
    content = np.frombuffer(np.random.default_rng(seed).bytes(size_bytes), np.uint8)
    content.tofile(path)
    return content


def measure_targets(options: argparse.Namespace, folder: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    tell("one target and two")
    host_cores, target_cores = cores()
    content = random_content(folder / "limited", 32 << 20, options.seed)
    with ExitStack() as stack:
        targets = [
            endpoint(stack.enter_context(serve(folder / "limited", content.size, target_cores, rate=rate)))
            for rate in (LIMITED_BYTES_PER_S, LIMITED_BYTES_PER_S, LIMITED_BYTES_PER_S // 2)
        ]
        with on(host_cores):
            rows = {
                "one target": Reads(targets[:1], CHUNK_BYTES),
                "two targets": Reads(targets[:2], CHUNK_BYTES),
                "one and one of half its rate": Reads([targets[0], targets[2]], CHUNK_BYTES),
            }
            try:
                found = in_turns(rows, options.rounds, options.turn_s, tell)
                for row in rows.values():
                    row.verify([content] * 2)
            finally:
                for row in rows.values():
                    row.close()
    return {"limit_bytes_per_s": LIMITED_BYTES_PER_S, "turns": found}


# ---- Samples


class Samples:
    """A store in chunk order, batches of 64; epoch after epoch."""

    def __init__(
        self,
        what: Any,
        data: Data,
        target: Target | None = None,
        io: str = "auto",
        cold: Path | None = None,
    ) -> None:
        # A quarter of the store, so that chunk order has to mix what does not fit.
        self.store: Any = penstock.samples.mount(
            what, order="chunk", cache_bytes=data.total_bytes // 4, io=io
        )
        self.data, self._target, self._cold, self._epoch = data, target, cold, 0

    def _moved_bytes(self) -> int:
        """Read from the target so far, or from the disk by this process."""
        if self._target is not None:
            return self._target.stats()["read_bytes"]
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(fields["read_bytes"])

    def epoch(self, seed: int = 0) -> Iterator[Any]:
        self.store.sequence(seed=seed, epoch=self._epoch)
        self._epoch += 1
        while (batch := self.store.bread(BATCH)) is not None:
            yield batch

    def run(self, seconds: float) -> dict[str, float]:
        if self._cold is not None:
            drop(self._cold)

        def read() -> int:
            samples, end_s = 0, time.perf_counter() + seconds
            while time.perf_counter() < end_s:
                for batch in self.epoch():
                    samples += len(batch)
                    if time.perf_counter() > end_s and samples % self.data.count:
                        return samples
            return samples

        before = self._moved_bytes()
        found = turn(0 if self._target is None else self._target.process.pid, read, self.data.size_bytes)
        return {**found, "moved_bytes": self._moved_bytes() - before}

    def verify(self) -> dict[str, Any]:
        """Every sample of an epoch, bit for bit; how well they are mixed."""
        order = []
        for batch in self.epoch():
            for place, index in enumerate(batch.indices.tolist()):
                assert bytes(batch[place]) == self.data.sample(index)
                order.append(index)
        return check_order(np.asarray(order), self.data.count)

    def close(self) -> None:
        self.store.close()


def measure_samples(options: argparse.Namespace, folder: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    host_cores, target_cores = cores()
    data = Data(SAMPLE_BYTES, 4096 if options.quick else SAMPLES, options.seed)
    local = folder / "store"
    tell(f"packing and uploading {data.count} samples")
    penstock.samples.pack(((f"{i:09d}", data.sample(i)) for i in range(data.count)), local)
    size = (data.total_bytes + (64 << 20)) // 4096 * 4096
    found: dict[str, Any] = {"samples": data.count, "sample_bytes": SAMPLE_BYTES, "batch": BATCH}
    with serve(folder / "remote", size, target_cores) as target:
        url = f"nvme+tcp://{target.address}:{target.port}/{NQN.format(0)}?ns=1"
        penstock.samples.upload(local, url)
        with on(host_cores):
            tell("samples, warm")
            rows = {
                "files, page cache": Samples(local, data),
                "namespace": Samples([url], data, target),
            }
            try:
                found["mixing"] = {name: row.verify() for name, row in rows.items()}
                found["warm"] = in_turns(rows, options.rounds, options.turn_s, tell)
            finally:
                for row in rows.values():
                    row.close()
            tell("samples, equal bandwidth")
            cold = {"files, disk": Samples(local, data, io="direct", cold=local)}
            try:
                found["equal bandwidth"] = in_turns(cold, options.rounds, options.turn_s, tell)
            finally:
                cold["files, disk"].close()
            each = [one["moved_bytes"] / one["wall_s"] for one in found["equal bandwidth"]["files, disk"]]
            found["disk_bytes_per_s"] = statistics.median(each)
            target.set(rate=int(found["disk_bytes_per_s"]))
            limited = {"namespace of that rate": Samples([url], data, target)}
            try:
                found["equal bandwidth"].update(in_turns(limited, options.rounds, options.turn_s, tell))
            finally:
                limited["namespace of that rate"].close()
        found["violations"] = target.violations()
    return found


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "reads": measure_reads,
    "other": measure_other,
    "targets": measure_targets,
    "devices": devices.measure,
    "samples": measure_samples,
}


def spread(values: Sequence[float]) -> str:
    middle = statistics.median(values)
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (middle,) * 3
    return f"{middle:,.3g} ({low:,.3g}-{high:,.3g})"


def show(console: Console, title: str, rows: dict[str, list[dict[str, float]]]) -> None:
    table = Table(title=f"{title}; medians (quartiles)")
    for column in ("", "GB/s", "thousand/s", "us each", "host's CPU s/GB", "target's CPU s/GB"):
        table.add_column(column, justify="left" if not column else "right")
    for name, turns in rows.items():
        rate = [one["bytes"] / one["wall_s"] / 1e9 for one in turns]
        table.add_row(
            name,
            spread(rate),
            spread([one["reads"] / one["wall_s"] / 1e3 for one in turns]),
            spread([1e6 * one["wall_s"] / one["reads"] for one in turns]),
            spread([one["host_s"] / one["bytes"] * 1e9 for one in turns]),
            spread([one["target_s"] / one["bytes"] * 1e9 for one in turns]),
        )
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = Console(highlight=False)
    console.width = max(console.width, 130)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {
        **heading("samples_remote", options.directory),
        "target": "tests/support/nvme_target/target.cpp, one thread, memory-mapped files in memory",
        "cores": {"host": sorted(cores()[0]), "target": sorted(cores()[1])},
        "seed": options.seed,
        "rounds": options.rounds,
        "turn_s": options.turn_s,
        "quick": options.quick,
        "missing": {},
    }
    if not Path("/dev/nvme-fabrics").exists():
        document["missing"]["the kernel's host"] = "no /dev/nvme-fabrics: the module nvme-tcp is not loaded"
    else:
        document["missing"]["the kernel's host"] = "it needs root, and is not driven from here"
    for part in options.parts:
        # In memory, so that no disk is measured: /dev/shm where there is one. The store lies on the disk.
        memory = Path("/dev/shm") if part != "samples" and Path("/dev/shm").is_dir() else options.directory
        with tempfile.TemporaryDirectory(dir=memory, prefix="samples_remote.") as folder:
            document[part] = PARTS[part](options, Path(folder), console.print)
        options.output.write_text(json.dumps(document, indent=1))
    report(console, document)
    for name, reason in document["missing"].items():
        console.print(f"{name}: left out, {reason}")
    console.print(f"wrote {options.output}")
    return 0


def report(console: Console, document: dict[str, Any]) -> None:
    for part in ("reads", "other"):
        for size in (CHUNK_BYTES, SMALL_BYTES) if document.get(part) else ():
            model = document[part].get("target", {}).get("model", "the tests' target")
            show(console, f"Reads of {size >> 10} KiB, one core, from {model}", document[part][str(size)])
    if targets := document.get("targets"):
        show(console, "Targets of limited rate, 256 KiB", targets["turns"])
    if document.get("devices"):
        devices.show(console, document["devices"])
    if samples := document.get("samples"):
        for name in ("warm", "equal bandwidth"):
            show(console, f"Samples of 4 KiB in chunk order, {name}", samples[name])
        ideal = ideal_groups(samples["samples"])
        for name, mixing in samples["mixing"].items():
            share = mixing["groups_in_a_batch"] / ideal
            console.print(
                f"mixing, {name}: {share:.1%} of a full shuffle's; each once: {mixing['each_once']}"
            )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, help="default: 7")
    parser.add_argument("--turn", type=float, dest="turn_s", help="seconds a turn; default: 2")
    parser.add_argument(
        "--sizes", default="131072,512", help="of samples, for the part devices; default: %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path(tempfile.gettempdir()),
        metavar="DIR",
        help="on the disk to measure; needs 1 GB; default: %(default)s",
    )
    parser.add_argument(
        "--other", metavar="HOST:PORT", help="another target, of which namespace 1 is written"
    )
    parser.add_argument("--nqn", default=NQN.format(0), help="its subsystem; default: %(default)s")
    parser.add_argument("--other-pid", type=int, default=0, help="its process, where it runs here")
    parser.add_argument("--quick", action="store_true", help="few samples, two short rounds")
    parser.add_argument(
        "-o", "--output", type=Path, default=ROOT / "out" / "samples_remote.json", metavar="FILE"
    )
    options = parser.parse_args(arguments)
    options.parts = options.parts.split(",")
    options.sizes = [int(size) for size in options.sizes.split(",")]
    if unknown_sizes := set(options.sizes) - devices.DEVICE_BYTES.keys():
        parser.error(
            f"--sizes: {unknown_sizes} are none; there are {', '.join(map(str, devices.DEVICE_BYTES))}"
        )
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"--parts: {', '.join(unknown)} are none; there are {', '.join(PARTS)}")
    if options.other is not None:
        address, _, port = options.other.rpartition(":")
        options.other = Endpoint(address.strip("[]"), int(port), options.nqn, options.other_pid)
    options.rounds = options.rounds or (2 if options.quick else 7)
    options.turn_s = options.turn_s or (0.2 if options.quick else 2.0)
    return options


if __name__ == "__main__":
    sys.exit(main())
