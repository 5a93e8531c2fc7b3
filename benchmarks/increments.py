"""Checkpoints of LoRA over a frozen model: increments, whole files, and torch's own way, in turns.

    python benchmarks/increments.py --million 1000 --rank 16 -o out/increments.json

The model has linear layers in BF16 that are frozen; the adapters and AdamW's state for them change before
every save, by random numbers. Per method and save: how long the call takes (the stall), how long until the
file is durable, how many bytes were written, and how much more memory the process took meanwhile. Every
method writes with fsync. What was saved last is loaded and compared at the end, outside of the times.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from io_bench.machine import heading

import penstock
from penstock.checkpoint import Manager

WIDTH = 4096
LAYER = WIDTH * WIDTH


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--million", type=int, default=1000, help="parameters that are frozen")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", default=tempfile.gettempdir())
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="penstock-increments-", dir=options.directory))
    try:
        found = measured(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for name, rows in found["methods"].items():
        median = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        print(
            f"{name:<28} stall {median['stall_s']:6.3f} s   durable after {median['durable_s']:6.2f} s   "
            f"{median['written_bytes'] / 1e6:8.1f} MB written   {median['memory_bytes'] / 1e6:8.1f} MB memory"
        )
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(found, indent=1))


def measured(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    layers = max(round(options.million * 1e6 / LAYER), 1)
    frozen = {f"layer{i}.weight": torch.randn(WIDTH, WIDTH).bfloat16() for i in range(layers)}
    names = [f"layer{i}.lora_{side}" for i in range(layers) for side in "AB"]
    adapters = {
        f"{name}{kind}": torch.empty(WIDTH, options.rank)
        for name in names
        for kind in ("", ".exp_avg", ".exp_avg_sq")
    }
    state = {"model": frozen, "adapters": adapters}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    whole, plain = folder / "whole.safetensors", folder / "dcp"
    manager = Manager(folder / "run", keep_last=2)
    steps = iter(range(1_000_000))
    methods: dict[str, tuple[Path, Callable[[], Callable[[], None]]]] = {
        "penstock Manager": (folder / "run", lambda: manager.save(state, next(steps)).wait),
        "penstock save(wait=False)": (whole, lambda: penstock.save(state, whole, wait=False).wait),
        "dcp.async_save": (plain, lambda: async_save(state, plain)),
    }
    manager.save(state, next(steps), wait=True)  # the first one, which is whole
    first_bytes = size_of(folder / "run")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in methods}
    for number in range(options.rounds + 1):
        for tensor in adapters.values():
            tensor.normal_()
        for name, (path, start) in methods.items():
            os.sync()
            row = one_save(path, start)
            if number:  # the first round warms up
                found[name].append(row)
    loaded = {
        "penstock Manager": penstock.load(manager.latest()),
        "penstock save(wait=False)": penstock.load(whole),
    }
    for name, other in loaded.items():
        for part, tensors in state.items():
            assert all(torch.equal(other[part][key], tensor) for key, tensor in tensors.items()), name
    manager.close()
    dist.destroy_process_group()
    return {
        **heading("increments"),
        "state_bytes": sum(tensor.nbytes for part in state.values() for tensor in part.values()),
        "adapter_bytes": sum(tensor.nbytes for tensor in adapters.values()),
        "first_bytes": first_bytes,
        "methods": found,
    }


def async_save(state: dict[str, Any], path: Path) -> Callable[[], None]:
    shutil.rmtree(path, ignore_errors=True)
    future = dcp.async_save(state, storage_writer=dcp.FileSystemWriter(path, sync_files=True))
    return lambda: future.result() and None


def one_save(path: Path, start: Callable[[], Callable[[], None]]) -> dict[str, float]:
    peak = Peak()
    begun_s = time.perf_counter()
    wait = start()
    stall_s = time.perf_counter() - begun_s
    wait()
    durable_s = time.perf_counter() - begun_s
    memory_bytes = peak.end()
    # A manager's newest file is beside those before; the others write all of theirs anew.
    newest = max(path.iterdir()) if path.name == "run" else path
    return {
        "stall_s": stall_s,
        "durable_s": durable_s,
        "written_bytes": size_of(newest),
        "memory_bytes": memory_bytes,
    }


def size_of(path: Path) -> int:
    if not path.exists():
        return 0
    return sum(each.stat().st_size for each in path.rglob("*")) if path.is_dir() else path.stat().st_size


class Peak:
    """The most memory beyond what the process had at first, by looking every millisecond."""

    def __init__(self) -> None:
        self._first = self._most = anonymous_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._ended.wait(0.001):
            self._most = max(self._most, anonymous_bytes())

    def end(self) -> int:
        self._ended.set()
        self._thread.join()
        return self._most - self._first


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


if __name__ == "__main__":
    main()
