"""Saving and loading of several ranks through torch.distributed.checkpoint: penstock's files against torch's.

    python benchmarks/dcp.py --ranks 4 --mib 512 -o out/dcp.json

Each rank has tensors of its own, and all save into one directory. The two take turns; loading is cold: what
the page cache held is dropped before. torch writes with fsync (``sync_files=True``), as penstock does.
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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from penstock.checkpoint.dcp import Reader, Writer

TENSOR_BYTES = 32 << 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mib", type=int, default=512, help="of each rank; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", default=tempfile.gettempdir())
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if "RANK" in os.environ:
        work(options)
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={options.ranks}", __file__, *sys.argv[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    rows = json.loads(done.stdout.splitlines()[-1])
    total_bytes = options.ranks * options.mib << 20
    for name, times_s in rows.items():
        median_s = statistics.median(times_s)
        shown = " ".join(f"{time_s:.2f}" for time_s in times_s)
        print(f"{name:<16} {median_s:6.2f} s  {total_bytes / median_s / 1e9:5.2f} GB/s  ({shown})")
    for what in ("save", "load"):
        ratios = [t / p for t, p in zip(rows[f"torch {what}"], rows[f"penstock {what}"], strict=True)]
        print(f"{what}: {statistics.median(ratios):.2f} times as fast as torch")
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({"options": sys.argv[1:], "seconds": rows}, indent=1))


def work(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    count = max((options.mib << 20) // TENSOR_BYTES, 1)
    state = {f"rank{rank}.{i}": torch.randn(TENSOR_BYTES // 4) for i in range(count)}
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    folder = Path(options.directory) / "penstock-dcp-benchmark"
    methods: dict[str, tuple[Any, Any]] = {
        "torch": (lambda path: dcp.FileSystemWriter(path, sync_files=True), dcp.FileSystemReader),
        "penstock": (Writer, Reader),
    }
    found: dict[str, list[float]] = {f"{name} {what}": [] for name in methods for what in ("save", "load")}
    for _ in range(options.rounds):
        for name, (writer, reader) in methods.items():
            path = folder / name
            for what in ("save", "load"):
                dist.barrier()
                if what == "load":
                    drop_cache(path)
                    dist.barrier()
                begun_s = time.perf_counter()
                if what == "save":
                    dcp.save(state, storage_writer=writer(path))
                else:
                    dcp.load(into, storage_reader=reader(path))
                dist.barrier()
                found[f"{name} {what}"].append(time.perf_counter() - begun_s)
            assert all(torch.equal(into[key], state[key]) for key in state)
            for tensor in into.values():
                tensor.zero_()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def drop_cache(path: Path) -> None:
    for file in path.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


if __name__ == "__main__":
    main()
