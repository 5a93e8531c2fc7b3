"""Run on each rank: trains until the disk's new rate has been planned for; prints what each step followed."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import penstock
from penstock.storage.paths import TRANSPORTS
from tests.support.ranks import leave
from tests.support.runs import HARDWARE, PAGED
from tests.support.slow_disk import Rate, SlowDisk

FAST = 300e6  # bytes per second
MOST_STEPS = 400


def main(spill_dir: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    disk = Rate(FAST)
    TRANSPORTS["posix"] = lambda: SlowDisk(disk)
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.Tanh())]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.5)
    # One of them was told of a disk that is a tenth slower: all plan for it.
    given = FAST / (1.0 if rank == 0 else 1.1)
    run = penstock.offload(
        model,
        device_budget="6MiB",
        spill_dir=spill_dir,
        hardware=replace(HARDWARE, disk_read_bytes_per_s=given, disk_write_bytes_per_s=given),
        io=penstock.IoOptions(paths="posix direct"),
        planning=PAGED,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plans, rates = [], []
    is_over = torch.zeros(1)
    for step in range(MOST_STEPS):
        if step == 12:
            disk.bytes_per_s = FAST / 3
        with run.step():
            loss = model(torch.randn(256, 256)).square().mean()
            time.sleep(0.05)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        plan = run.plan
        plans.append(
            hashlib.sha256(repr(plan and (plan.evictions, plan.recomputations)).encode()).hexdigest()
        )
        rates.append(run.hardware.disk_read_bytes_per_s)
        is_over.fill_(float(rates[-1] < FAST / 1.5))
        dist.all_reduce(is_over, dist.ReduceOp.MIN)
        if is_over.item():
            break
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, {"plans": plans, "rates": rates, "replans": run.report().replans})
    if rank == 0:
        print("ranks", json.dumps(every), flush=True)
    run.close()
    leave()


if __name__ == "__main__":
    main(sys.argv[1])
