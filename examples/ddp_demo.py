"""Train one GPT on two processes with DistributedDataParallel: in memory, and with penstock in 35 % of it.

    python examples/ddp_demo.py

Each process has one thread and half of the batch. The two ways take turns, in jobs of their own that
`torchrun` starts; times are medians over the steps after the first ones, of both turns. Every weight and all
of the optimizer's state are compared. Takes about four minutes on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import gpt
import torch.distributed as dist
from methods import UNSETTLED_STEPS, state_sha256, trace_of, train_step
from rich.console import Console
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel

import penstock
from penstock.units import format_bytes, format_seconds

TURNS = 2


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--percent", type=float, default=35, help="of the memory; default: %(default)s")
    parser.add_argument("--steps", type=int, default=10, help="of each job; default: %(default)s")
    parser.add_argument("--spill-dir", default=tempfile.gettempdir(), metavar="DIR")
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    parser.add_argument("--budgets", default="", help=argparse.SUPPRESS)  # of each process
    options = parser.parse_args()
    if options.steps <= UNSETTLED_STEPS:
        parser.error(f"--steps: give {UNSETTLED_STEPS + 1} or more")
    config = config_of(options)
    if "RANK" in os.environ:
        return work(config, options)

    peak_bytes = peak_bytes_of(config)
    budgets = [int(peak_bytes * options.percent / 100)] * options.processes
    console = Console(highlight=False)
    found: dict[str, list[dict[str, Any]]] = {"in memory": [], "penstock": []}
    for turn in range(TURNS):
        for method, given in (("in memory", []), ("penstock", budgets)):
            console.print(f"turn {turn + 1} of {TURNS}: {method}, {options.processes} processes")
            found[method].append(job(given, options))
    table = Table("", "memory of a process", "step", "predicted", "against in memory", "same bits")
    medians = {
        name: statistics.median(step_s for each in jobs for step_s in each["settled_s"])
        for name, jobs in found.items()
    }
    for name, jobs in found.items():
        last = jobs[-1]
        table.add_row(
            name,
            format_bytes(last["peak"] or peak_bytes),
            format_seconds(medians[name]),
            format_seconds(last["predicted_s"]) if last["predicted_s"] else "",
            f"{medians[name] / medians['in memory']:.2f}",
            "yes" if all(each["state"] == found["in memory"][0]["state"] for each in jobs) else "NO",
        )
    console.print(table)
    return 0


def config_of(options: argparse.Namespace) -> gpt.Config:
    """The model, and the part of the batch that each process has."""
    config = gpt.QUICK if options.quick else gpt.Config()
    return replace(config, batch=max(config.batch // options.processes, 1))


def peak_bytes_of(config: gpt.Config) -> int:
    """What a process takes in memory. DDP's buckets are as large as the gradients, beside them."""
    parameters = gpt.GPT(config).parameters()
    return trace_of(config).peak_bytes + sum(tensor.nbytes for tensor in parameters if tensor.requires_grad)


def job(budgets: Sequence[int], options: argparse.Namespace) -> dict[str, Any]:
    """What the first of the processes says. Without budgets, they train in memory."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={options.processes}", __file__, "--steps", str(options.steps)]
    command += ["--processes", str(options.processes), "--spill-dir", options.spill_dir]
    command += ["--budgets", ",".join(map(str, budgets))] * bool(budgets) + ["--quick"] * options.quick
    threads = max((os.cpu_count() or 1) // options.processes, 1)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def work(config: gpt.Config, options: argparse.Namespace) -> int:
    """One of the processes."""
    dist.init_process_group("gloo")
    model, optimizer, batches, loss = gpt.build(config)
    for _ in range(dist.get_rank()):
        next(batches)
    parallel = DistributedDataParallel(model)
    run = None
    if options.budgets:
        budget = int(options.budgets.split(",")[dist.get_rank()])
        run = penstock.offload(parallel, optimizer, device_budget=budget, spill_dir=options.spill_dir)
    steps_s = []
    for _ in range(options.steps):
        batch = next(batches)
        for _ in range(dist.get_world_size() - 1):
            next(batches)
        begun_s = time.perf_counter()
        with run.step() if run else contextlib.nullcontext():
            train_step(parallel, optimizer, loss, batch)
        steps_s.append(time.perf_counter() - begun_s)
    said: dict[str, Any] = {"peak": 0, "predicted_s": 0.0, "settled_s": steps_s[UNSETTLED_STEPS:]}
    if run is not None:
        report = run.report()
        said |= {"peak": report.peak_bytes, "predicted_s": report.predicted_step_s}
        run.close()
    said["state"] = state_sha256(model, optimizer)
    if dist.get_rank() == 0:
        print(json.dumps(said), flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
