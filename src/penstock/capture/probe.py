"""Measures the machine: what each tier holds, and how fast each link is by transfer size."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch

from penstock import codecs
from penstock.core.hardware import Hardware
from penstock.errors import DeviceUnavailable, InvalidArgument, SpillError, SpillSpaceFull
from penstock.machine import available_bytes, lines, memory_bytes
from penstock.options import LOSSY, Directories
from penstock.runtime.devices.driver import Driver
from penstock.runtime.devices.drivers import device_of, make_driver
from penstock.storage.aligned import AlignedBuffer, view_at
from penstock.storage.extents import Extent
from penstock.storage.host_memory import host_budget_bytes
from penstock.storage.spill import SpillSpace, Transfer
from penstock.storage.transfer import DEMAND, EVICT
from penstock.units import parse_share

KIB, MIB = 1 << 10, 1 << 20
SIZES_BYTES = (4 * KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
HOST_SIZES_BYTES, HOST_MEASURED_BYTES = SIZES_BYTES[1:5], 64 * MIB
SURE_BYTES = MIB  # sizes up to this are measured however slow the disk is
BATCH_BYTES = 64 * MIB
SAMPLES = (3, 9)  # at least, at most
DUPLEX_BYTES = 4 * MIB
STARTED_BYTES, STARTED = 64 * KIB, 32  # copies with which the cost of starting one is measured
KERNELS, KERNEL_ELEMENTS = 50, 1 << 15  # between two such copies, and what each of them works on
PARALLEL_KERNELS, PARALLEL_ELEMENTS = 30, 1 << 20
HUNG_S = 2.0  # kernels run beside copies no longer
CODED_BYTES = 8 * MIB  # on a CPU
CODED_BYTES_THERE = (MIB, 8 * MIB, 64 * MIB)  # on an accelerator, one after the other while it is fast
CODED_S = 0.03

Rates = tuple[tuple[int, float], ...]  # (transfer bytes, bytes per second), ascending


def probe(
    spill_dir: Directories,
    device: str = "cpu",
    time_limit_s: float = 10.0,
    *,
    host_budget: int | str | None = None,
    host_node: int | None = None,
) -> Hardware:
    """Measure this machine, with the tier below memory in ``spill_dir``, one directory or several, or
    a remote drive, as in `penstock.offload`.

    Takes about ``time_limit_s``, less on a fast disk; writes up to 3 GB of random bytes to an unlinked
    file of up to 512 MiB. Rates are medians over batches with several transfers in flight, from huge
    pages and to space that was written before: the state a training run is in from its second step on.
    A disk too slow for its budget is not measured at the largest sizes. On a CPU, the cost of starting a
    copy, and each byte of it, is what kernels lose to it; on a GPU it is 0, as they run by themselves there.
    The rates of bitmask-CSR are of penstock.codecs, with every other element zero; on a CPU, of one thread.

    device   "cpu", or a GPU such as "cuda:0"
    host_budget, host_node   of a tier of host memory on a CPU, as in `penstock.offload`: copies to it and
             back are measured, too. None: there is no such tier

    Raises DeviceUnavailable where the device is not there, SpillError where ``spill_dir`` cannot be used.
    """
    if not time_limit_s > 0:
        raise InvalidArgument(f"a time limit of {time_limit_s} s is no time: give seconds above zero")
    target = device_of(device)
    driver = None if target.type == "cpu" else make_driver(target)
    if driver is not None and (host_budget, host_node) != (None, None):
        raise InvalidArgument(f"host_budget and host_node are for a CPU: leave them out for {device}")
    host_bytes = 0 if host_budget is None else host_budget_bytes(parse_share(host_budget), host_node)
    copies_s = time_limit_s * (0.2 if driver is not None else 0.15 if host_bytes else 0.0)
    with SpillSpace(
        spill_dir, host_bytes=HOST_MEASURED_BYTES if host_bytes else 0, host_node=host_node
    ) as spill:
        fields, path = _measure_spill(spill, time_limit_s - copies_s, copies_s)
    if driver is None:
        fields |= {"device_bytes": memory_bytes(), "host_bytes": host_bytes, "disk_shares_bus": False}
    else:
        fields["measured_rates"] |= _measure_copies(driver, copies_s)
        fields |= {
            "device_bytes": driver.total_bytes,
            "host_bytes": available_bytes(),
            "copy_overhead_s": 0.0,
            "byte_overhead_s": 0.0,
        }
    for link, points in fields["measured_rates"].items():
        fields.setdefault(f"{link}_latency_s", points[0][0] / points[0][1])
        fields[f"{link}_bytes_per_s"] = points[-1][1]
    compress_bytes_per_s, expand_bytes_per_s = _measure_codec(target, "csr")
    return Hardware(
        compress_bytes_per_s=compress_bytes_per_s,
        expand_bytes_per_s=expand_bytes_per_s,
        measured_codecs={codec: _measure_codec(target, codec) for codec in LOSSY},
        name=", ".join([*([] if driver is None else [driver.name]), _cpu_name(), path]),
        **fields,
    )


def device_name(device: str) -> str:
    """The model of a device, the same for all devices that are equal. Raises as `probe`."""
    target = device_of(device)
    return _cpu_name() if target.type == "cpu" else make_driver(target).name


def wait_for(space: SpillSpace, over: SimpleQueue[Transfer], count: int) -> list[Transfer]:
    """So many transfers whose end calls ``over.put``. Raises SpillError where one fails, or none ends."""
    try:
        ended = [over.get(timeout=space.timeout_s) for _ in range(count)]
    except Empty:
        raise space.hang_error() from None
    for transfer in ended:
        if transfer.error is not None:
            raise transfer.error
    return ended


class _Batches:
    """Transfers of one size between the spill space and two buffers of random bytes, all waited for."""

    def __init__(
        self,
        spill: SpillSpace,
        size_bytes: int,
        source: AlignedBuffer,
        target: AlignedBuffer,
        share_s: float,
        in_host: bool = False,
    ) -> None:
        """A batch takes a small part of ``share_s``, if the disk is not too slow for that.

        in_host   the extents are of host memory
        """
        self.spill, self._in_host = spill, in_host
        self.size_bytes = size_bytes
        self.buffers = {"write": source, "read": target}
        self.extents: list[Extent] = []
        try:
            self._add()
            affordable = share_s / 10 / self.time_s("write", self.extents)
            for _ in range(max(4, int(min(BATCH_BYTES // size_bytes, 128, affordable))) - 1):
                self._add()
        except SpillSpaceFull:
            self.close()
            raise

    def _add(self) -> None:
        if not self._in_host:
            self.extents.append(self.spill.allocate(self.size_bytes))
        elif (extent := self.spill.try_allocate_host(self.size_bytes)) is not None:
            self.extents.append(extent)

    def close(self) -> None:
        for extent in self.extents:
            self.spill.release(extent)

    def move(self, moves: Sequence[tuple[str, Extent]]) -> dict[str, list[Transfer]]:
        """Begin transfers in the order given, and wait for all: what they took, by kind."""
        over: SimpleQueue[Transfer] = SimpleQueue()
        places = self.buffers["write"].size_bytes // self.size_bytes
        for index, (kind, extent) in enumerate(moves):
            # Of one priority, so that neither direction waits for the other.
            self._start(kind, extent, index % places, over, EVICT)
        ended = wait_for(self.spill, over, len(moves))
        return {kind: [transfer for transfer in ended if transfer.kind == kind] for kind in self.buffers}

    def _start(
        self, kind: str, extent: Extent, place: int, over: SimpleQueue[Transfer], priority: int
    ) -> None:
        start = self.spill.write if kind == "write" else self.spill.read
        buffer = self.buffers[kind]
        address = buffer.address + place * self.size_bytes
        start(extent, address, self.size_bytes, buffer, over.put, priority=priority)

    def overhead_s(self) -> float:
        """Median time that a thread of kernels loses to a copy that it starts, until it is over."""
        over: SimpleQueue[Transfer] = SimpleQueue()
        extents = self.extents[:STARTED]
        values = torch.ones(KERNEL_ELEMENTS)

        def kernels_s(copies: bool) -> float:
            begun_s = time.perf_counter()
            for index, extent in enumerate(extents):
                if copies:
                    kind, priority = ("read", DEMAND) if index % 2 else ("write", EVICT)
                    self._start(kind, extent, 0, over, priority)
                for _ in range(KERNELS):
                    values.add_(1)
            took_s = time.perf_counter() - begun_s
            wait_for(self.spill, over, len(extents) if copies else 0)
            return took_s

        lost_s = [kernels_s(True) - kernels_s(False) for _ in range(SAMPLES[1])]
        return max(0.0, statistics.median(lost_s) / len(extents))

    def byte_overhead_s(self, copy_overhead_s: float, until_s: float) -> float:
        """Median time that kernels on all cores lose to each byte that is copied beside them, both ways."""
        over: SimpleQueue[Transfer] = SimpleQueue()
        values = torch.ones(PARALLEL_ELEMENTS)

        def kernels_s(count: int, copies: int) -> tuple[float, int]:
            """At least so many kernels, until the copies are over: the time, and how many they were."""
            begun_s, kernels = time.perf_counter(), 0
            for index, extent in enumerate(self.extents[:copies]):
                self._start("read" if index % 2 else "write", extent, 0, over, EVICT)
            while (kernels < count or over.qsize() < copies) and time.perf_counter() - begun_s < HUNG_S:
                values.add_(1)
                kernels += 1
            took_s = time.perf_counter() - begun_s
            wait_for(self.spill, over, copies)
            return took_s, kernels

        kernels_s(PARALLEL_KERNELS, 0)  # threads start
        lost_s, copies = [], len(self.extents)
        for _ in _samples(until_s):
            alone_s, _ = kernels_s(PARALLEL_KERNELS, 0)
            took_s, kernels = kernels_s(1, copies)
            lost_s.append(took_s - alone_s * kernels / PARALLEL_KERNELS)
        return max(0.0, statistics.median(lost_s) / copies - copy_overhead_s) / self.size_bytes

    def time_s(self, kind: str, extents: Sequence[Extent]) -> float:
        """Seconds a transfer of each extent takes, all in flight at once."""
        start_s = time.perf_counter()
        self.move([(kind, extent) for extent in extents])
        return time.perf_counter() - start_s

    def rate_bytes_per_s(self, kind: str, until_s: float) -> float:
        """Median over batches, until ``until_s`` or enough are measured."""
        size = self.size_bytes * len(self.extents)
        return statistics.median(size / self.time_s(kind, self.extents) for _ in _samples(until_s))

    def latency_s(self, kind: str, until_s: float) -> float:
        """Median time of one transfer alone."""
        return statistics.median(
            self.time_s(kind, [self.extents[sample % len(self.extents)]]) for sample in _samples(until_s)
        )


def _samples(until_s: float) -> Iterator[int]:
    least, most = SAMPLES
    for sample in range(most):
        if sample >= least and time.perf_counter() > until_s:
            return
        yield sample


def _measure_spill(spill: SpillSpace, budget_s: float, host_s: float) -> tuple[dict[str, Any], str]:
    """What was measured of the spill space, as fields of Hardware, and how it is reached.

    host_s   time to take for its host memory, if it has any
    """
    source, target = AlignedBuffer(SIZES_BYTES[-1]), AlignedBuffer(SIZES_BYTES[-1])
    source.view()[:] = np.random.default_rng(0).bytes(source.size_bytes)
    target.view()[:] = source.view()  # touched before it is timed
    write: list[tuple[int, float]] = []
    read: list[tuple[int, float]] = []
    start_s = time.perf_counter()
    fields: dict[str, Any] = {"disk_bytes": spill.free_bytes}
    share_s = budget_s / (len(SIZES_BYTES) + 1)
    for index, size in enumerate(SIZES_BYTES):
        until_s = start_s + share_s * (index + 1)
        if size > SURE_BYTES and not _affordable(size, write, read, start_s + budget_s):
            break
        try:
            batches = _Batches(spill, size, source, target, share_s)
        except SpillSpaceFull:
            if not write:
                raise
            break
        _measure_size(batches, until_s, write, read)
        if index == 0:
            for kind in ("write", "read"):
                fields[f"disk_{kind}_latency_s"] = batches.latency_s(kind, until_s)
        if size == STARTED_BYTES:
            fields["copy_overhead_s"] = batches.overhead_s()
        if size in (SURE_BYTES, DUPLEX_BYTES):
            fields["byte_overhead_s"] = batches.byte_overhead_s(
                fields["copy_overhead_s"], time.perf_counter() + share_s / 2
            )
            fields["duplex"] = _duplex(batches, write[-1][1], read[-1][1])
        _verify(batches, source, target)
        batches.close()
    rates = fields["measured_rates"] = {"disk_write": tuple(write), "disk_read": tuple(read)}
    if spill.has_host:
        out: list[tuple[int, float]] = []
        back: list[tuple[int, float]] = []
        for size in HOST_SIZES_BYTES:
            batches = _Batches(spill, size, source, target, host_s, in_host=True)
            _measure_size(batches, time.perf_counter() + host_s / len(HOST_SIZES_BYTES), out, back)
            _verify(batches, source, target)
            batches.close()
        rates |= {"device_to_host": tuple(out), "host_to_device": tuple(back)}
    return fields, f"disk by {'direct I/O' if spill.direct else 'through the page cache'}"


def _measure_size(
    batches: _Batches, until_s: float, write: list[tuple[int, float]], read: list[tuple[int, float]]
) -> None:
    """Add the rates of transfers of one size."""
    batches.time_s("write", batches.extents)  # space that was never written is slower
    half_s = (time.perf_counter() + until_s) / 2
    write.append((batches.size_bytes, batches.rate_bytes_per_s("write", half_s)))
    read.append((batches.size_bytes, batches.rate_bytes_per_s("read", until_s)))


def _affordable(
    size: int, write: list[tuple[int, float]], read: list[tuple[int, float]], end_s: float
) -> bool:
    """The least that is measured of a size fits before ``end_s``."""
    least, _ = SAMPLES
    batch = max(BATCH_BYTES, 4 * size)
    return time.perf_counter() + batch * ((least + 1) / write[-1][1] + least / read[-1][1]) < end_s


def _duplex(batches: _Batches, write_bytes_per_s: float, read_bytes_per_s: float) -> float:
    """What is left of the rates, on average, while the other direction is busy: above 0, up to 1."""
    moves = [("read" if index % 2 else "write", extent) for index, extent in enumerate(batches.extents)]
    alone = {"write": write_bytes_per_s, "read": read_bytes_per_s}
    ratios = []
    for _ in range(SAMPLES[1]):
        done = batches.move(moves)
        begin_s = max(min(transfer.started_s for transfer in transfers) for transfers in done.values())
        end_s = min(max(transfer.finished_s for transfer in transfers) for transfers in done.values())
        if end_s <= begin_s:
            continue
        for kind, transfers in done.items():
            moved = sum(_share(transfer, begin_s, end_s) for transfer in transfers) * batches.size_bytes
            ratios.append(moved / (end_s - begin_s) / alone[kind])
    return min(1.0, max(0.05, statistics.fmean(ratios))) if ratios else 1.0


def _share(transfer: Transfer, begin_s: float, end_s: float) -> float:
    """The fraction of a transfer that took place in [begin, end), at an even pace."""
    inside_s = min(transfer.finished_s, end_s) - max(transfer.started_s, begin_s)
    return max(0.0, inside_s) / (transfer.finished_s - transfer.started_s)


def _verify(batches: _Batches, source: AlignedBuffer, target: AlignedBuffer) -> None:
    """Read a transfer back and compare: a rate of wrong bytes is worth nothing."""
    view_at(target.address, batches.size_bytes, writable=True)[:] = bytes(batches.size_bytes)
    batches.time_s("read", batches.extents[:1])
    same = np.array_equal(
        np.frombuffer(source.view()[: batches.size_bytes], dtype=np.uint8),
        np.frombuffer(target.view()[: batches.size_bytes], dtype=np.uint8),
    )
    if not same:
        raise SpillError(
            f"{batches.size_bytes} bytes came back from the spill space other than they were written. Check "
            "the disk (dmesg, smartctl), and do not train on it."
        )


def _measure_copies(driver: Driver, budget_s: float) -> dict[str, Rates]:
    """Rates between the device and pinned host memory, timed by the device's own events."""
    size = SIZES_BYTES[-1]
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(size, dtype=torch.uint8, device=driver.device)
    stream = driver.make_stream()
    start_s = time.perf_counter()
    pairs = {"device_to_host": (host, there), "host_to_device": (there, host)}
    rates: dict[str, Rates] = {}
    for turn, (link, (to, origin)) in enumerate(pairs.items()):
        points = []
        driver.copy(to, origin, stream)  # the first copy sets up what the others reuse
        for index, step in enumerate(SIZES_BYTES):
            until_s = start_s + budget_s * (turn * len(SIZES_BYTES) + index + 1) / (2 * len(SIZES_BYTES))
            times_s = []
            for _ in _samples(until_s):
                begin, end = (torch.Event(driver.device, enable_timing=True) for _ in range(2))
                begin.record(stream)
                driver.copy(to[:step], origin[:step], stream)
                end.record(stream)
                end.synchronize()
                times_s.append(begin.elapsed_time(end) / 1e3)
            points.append((step, step / statistics.median(times_s)))
        rates[link] = tuple(points)
    driver.synchronize()
    return rates


def _measure_codec(device: torch.device, codec: str) -> tuple[float, float]:
    """Uncompressed bytes per second that the device turns into the codec, and back."""
    if device.type == "cpu":
        return _codec_rates(device, codec, CODED_BYTES)
    for size_bytes in CODED_BYTES_THERE:
        rates = _codec_rates(device, codec, size_bytes)
        if size_bytes / min(rates) > CODED_S:
            break
    return rates


def _codec_rates(device: torch.device, codec: str, size_bytes: int) -> tuple[float, float]:
    values = torch.arange(size_bytes // 4, device=device).remainder_(256).to(torch.float32)
    values[::2] = 0  # what is left is exact in every codec
    packed = codecs.encode(codec, values)
    if not torch.equal(codecs.decode(codec, packed, like=values), values):
        raise DeviceUnavailable(f"{device} expands what it compressed to other values: do not train on it")

    def rate_bytes_per_s(work: Callable[[], object]) -> float:
        times_s = []
        for _ in range(SAMPLES[0]):
            begun_s = time.perf_counter()
            work()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            times_s.append(time.perf_counter() - begun_s)
        return size_bytes / statistics.median(times_s)

    return (
        rate_bytes_per_s(lambda: codecs.encode(codec, values)),
        rate_bytes_per_s(lambda: codecs.decode(codec, packed, like=values)),
    )


def _cpu_name() -> str:
    for line in lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
