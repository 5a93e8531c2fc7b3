"""Saves in the background of a state that all changes in the next step: in a run, without one, and torch's.

    python benchmarks/snapshots.py --million 100 -o out/snapshots.json

A model of linear layers is trained by AdamW in float32; every few steps its weights and the optimizer's state
are saved, and training goes on at once. Per method and save: how long the call takes, how much longer than
others the next step takes, how long until the file is durable, and how much more memory the process took
meanwhile. Each method in a process of its own, in turns; every one writes with fsync. The last save is loaded
and compared with what was saved.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from increments import Peak, async_save
from io_bench.machine import heading

import penstock

WIDTH = 2048
BETWEEN = 3  # steps from one save to the next
# By name: the share of the state that a run's budget is; None: there is no run.
METHODS = {
    "penstock, in a run, all fits": 3.0,
    "penstock, in a run, 60 %": 0.6,
    "penstock, without a run": None,
    "dcp.async_save": None,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--million", type=int, default=100, help="parameters")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--saves", type=int, default=3, help="of each process")
    parser.add_argument("--directory", default=tempfile.gettempdir())
    parser.add_argument("--one", choices=METHODS, help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options)))
        return
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in METHODS}
    for _ in range(options.rounds):
        for name in METHODS:
            command = [sys.executable, *sys.argv, "--one", name]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            rows[name] += json.loads(done.stdout)
    for name, found in rows.items():
        median = {key: statistics.median(row[key] for row in found) for key in found[0]}
        print(
            f"{name:<30} call {median['call_s']:6.3f} s   next step {median['next_s']:6.2f} s, others "
            f"{median['step_s']:5.2f}   durable after {median['durable_s']:5.2f} s   "
            f"{median['memory_bytes'] / 1e6:7.1f} MB memory"
        )
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({**heading("snapshots"), "methods": rows}, indent=1))


def one(options: argparse.Namespace) -> list[dict[str, float]]:
    share = METHODS[options.one]
    layers = max(round(options.million * 1e6 / WIDTH**2), 1)
    folder = Path(tempfile.mkdtemp(prefix="penstock-snapshots-", dir=options.directory))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        if share is None:
            return trained(options, folder, layers, contextlib.nullcontext)
        budget_bytes = round(share * 12 * layers * WIDTH**2)
        with penstock.offload(device_budget=budget_bytes, spill_dir=folder) as run:
            return trained(options, folder, layers, run.step)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        dist.destroy_process_group()


def trained(
    options: argparse.Namespace, folder: Path, layers: int, step: Callable[[], Any]
) -> list[dict[str, float]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(256, WIDTH)

    def timed_step() -> float:
        begun_s = time.perf_counter()
        with step():
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return time.perf_counter() - begun_s

    for _ in range(7):  # plans are made meanwhile
        timed_step()
    path, rows = folder / "state", []
    for _ in range(options.saves):
        steps_s = [timed_step() for _ in range(BETWEEN)]
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        first = model[0].weight.detach().numpy().copy()
        os.sync()
        peak = Peak()
        begun_s = time.perf_counter()
        if options.one == "dcp.async_save":
            wait = async_save(state, path)
        else:
            wait = penstock.save(state, path, wait=False).wait
        call_s = time.perf_counter() - begun_s
        next_s = timed_step()
        wait()
        durable_s = time.perf_counter() - begun_s
        rows.append(
            {
                "call_s": call_s,
                "next_s": next_s,
                "step_s": statistics.median(steps_s),
                "durable_s": durable_s,
                "memory_bytes": peak.end(),
            }
        )
        if options.one != "dcp.async_save":
            saved = penstock.load(path)["model"]["0.weight"]
            assert (saved.detach().numpy() == first).all()
    return rows


if __name__ == "__main__":
    main()
