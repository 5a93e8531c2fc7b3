"""Gradients averaged in host memory against gloo's all-reduce, by number of ranks and size of bucket.

    python benchmarks/host_accumulation.py -o out/host_accumulation.json

The two take turns, and begin together on all ranks; a time is that of the slowest rank. CPU seconds are of
all ranks together, and depend less on what else the machine does. Each rank computes with one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from io_bench.machine import machine, versions

from penstock.distributed import HostAccumulation
from penstock.units import format_seconds

METHODS = ("host", "gloo")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mib", type=float, nargs="+", default=[1, 5, 25, 100])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if "RANK" in os.environ:
        work(options)
        return
    found = {"command": sys.argv, "machine": machine(Path(".")), "versions": versions(), "rows": []}
    for ranks in options.ranks:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, __file__, *sys.argv[1:]],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env=environment,
        )
        for row in json.loads(done.stdout.splitlines()[-1]):
            show({"ranks": ranks, **row})
            found["rows"].append({"ranks": ranks, **row})
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(found, indent=1))


def show(row: dict[str, Any]) -> None:
    texts = []
    for method in METHODS:
        low_s, median_s, high_s = statistics.quantiles(row[method]["seconds"], n=4)
        cpu_s = statistics.median(row[method]["cpu_seconds"])
        spread = f"{format_seconds(low_s)} to {format_seconds(high_s)}"
        texts.append(f"{method} {format_seconds(median_s)} ({spread}; CPU {format_seconds(cpu_s)})")
    ratios = [
        gloo_s / host_s
        for host_s, gloo_s in zip(*(row[method]["seconds"] for method in METHODS), strict=True)
    ]
    faster = f"{statistics.median(ratios):.2f} times as fast"
    print(f"{row['ranks']} ranks, {row['mib']:g} MiB: {', '.join(texts)}: {faster}", flush=True)


def work(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    rows = []
    with HostAccumulation() as state:

        def average(method: str, tensor: torch.Tensor) -> None:
            if method == "host":
                state.average(tensor).wait()
            else:
                dist.all_reduce(tensor.div_(ranks))

        for mib in options.mib:
            elements = int(mib * (1 << 18))
            check(average, elements)
            tensor = torch.ones(elements)
            row: dict[str, Any] = {method: {"seconds": [], "cpu_seconds": []} for method in METHODS}
            for turn in range(options.rounds + 1):
                for method in METHODS:
                    dist.barrier()
                    cpu_s, begun_s = time.process_time(), time.perf_counter()
                    average(method, tensor)
                    taken = torch.tensor([time.perf_counter() - begun_s, time.process_time() - cpu_s])
                    every = [torch.empty_like(taken) for _ in range(ranks)]
                    dist.all_gather(every, taken)
                    if turn:  # the first one warms up
                        row[method]["seconds"].append(max(float(taken[0]) for taken in every))
                        row[method]["cpu_seconds"].append(sum(float(taken[1]) for taken in every))
            rows.append({"mib": mib, **row})
    if dist.get_rank() == 0:
        print(json.dumps(rows), flush=True)
    dist.destroy_process_group()


def check(average: Any, elements: int) -> None:
    """Both find the mean, and on two ranks the same bits."""
    drawn = torch.randn(elements, generator=torch.Generator().manual_seed(dist.get_rank()))
    host, gloo = drawn.clone(), drawn.clone()
    average("host", host)
    average("gloo", gloo)
    torch.testing.assert_close(host, gloo)
    assert dist.get_world_size() > 2 or torch.equal(host, gloo)


if __name__ == "__main__":
    main()
