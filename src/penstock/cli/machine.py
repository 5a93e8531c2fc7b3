"""The commands that measure the machine. Each returns an Answer; nothing is printed here."""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path
from queue import SimpleQueue

import msgspec
import numpy as np

import penstock
from penstock.capture.probe import device_name, wait_for
from penstock.cli.output import Answer, Table, user_file_errors, writing
from penstock.core.hardware import LINKS
from penstock.options import IoOptions
from penstock.runtime.resident import default_spill_dir
from penstock.storage.aligned import AlignedBuffer
from penstock.storage.costs import Tables
from penstock.storage.spill import SpillSpace, Transfer
from penstock.units import format_bytes, format_rate


def probe(options: Namespace) -> Answer:
    directories = options.spill_dir or [Path(default_spill_dir())]
    hardware = penstock.probe(
        directories,
        device=options.device,
        time_limit_s=options.time_limit,
        host_budget=options.host_budget,
        host_node=options.host_node,
    )
    with writing(options.output):
        hardware.save(options.output)
    links = [link for link in LINKS if link in hardware.measured_rates]
    sizes = sorted({size for link in links for size, _ in hardware.measured_rates[link]})
    by_link = {link: dict(hardware.measured_rates[link]) for link in links}
    rows = [
        (
            format_bytes(size),
            *(format_rate(by_link[link][size]) if size in by_link[link] else "" for link in links),
        )
        for size in sizes
    ]
    text = (
        f"{hardware.name}\n"
        f"device {format_bytes(hardware.device_bytes)}, "
        f"{f'host {format_bytes(hardware.host_bytes)}, ' if hardware.host_bytes else ''}"
        f"disk {format_bytes(hardware.disk_bytes)} free in "
        f"{', '.join(map(str, directories))}; both directions at once: {hardware.duplex:.0%} of the rate each"
    )
    table = Table(("transfer", *(link.replace("_", " ") for link in links)), rows)
    return Answer(
        values={"hardware": msgspec.to_builtins(hardware)}, shown=[text, table], written=[options.output]
    )


CHOSEN = {(True, True): "both", (True, False): "to write", (False, True): "to read", (False, False): ""}
SIZES_BYTES = tuple(4**power << 16 for power in range(6))  # 64 KiB to 64 MiB


def io_paths(options: Namespace) -> Answer:
    directories = options.spill_dir or [Path(default_spill_dir())]
    with (
        user_file_errors(),
        SpillSpace(
            directories,
            IoOptions(page_cache_budget=options.page_cache_budget, costs=options.costs, reexplore=0.5),
            accelerator=device_name(options.device),
        ) as space,
    ):
        _transfer(space, options.time_limit)
        tables = space.tables()
        known = [f"{path.name}: bytes go to the {path.medium}" for path in space.paths.values()]
        missing = [f"{transport} is not used: {why}" for transport, why in space.unavailable.items()]
        device = space.device_kind
        unavailable = dict(space.unavailable)
    return Answer(
        values={"device": device, "unavailable": unavailable, "tables": msgspec.to_builtins(tables)},
        shown=["\n".join([device, *known, *missing]), _paths_table(tables)],
        written=[options.costs] if options.costs else [],
    )


def _transfer(space: SpillSpace, seconds: float) -> None:
    """Write and read back tensors of every size in turn, for that long."""
    buffer = AlignedBuffer(SIZES_BYTES[-1])
    buffer.view()[:] = np.random.default_rng(0).bytes(buffer.size_bytes)
    over: SimpleQueue[Transfer] = SimpleQueue()
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        for size_bytes in SIZES_BYTES:
            extent = space.allocate(size_bytes)
            for move in (space.write, space.read):
                move(extent, buffer.address, size_bytes, buffer, over.put)
                wait_for(space, over, 1)
            space.release(extent)


def _paths_table(tables: Tables) -> Table:
    rows = [
        (
            f"{format_bytes(row.class_bytes)} {row.path}",
            _rate(row.write_bytes_per_s),
            _rate(row.read_bytes_per_s),
            CHOSEN[row.writes, row.reads],
        )
        for row in tables.rows()
    ]
    return Table(("size and I/O path", "write", "read", "chosen"), rows)


def _rate(bytes_per_s: float | None) -> str:
    return "" if bytes_per_s is None else format_rate(bytes_per_s)
