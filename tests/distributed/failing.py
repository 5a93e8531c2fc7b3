"""Run by torchrun: one rank of several fails in the midst of training, in another way in each attempt."""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import penstock
from tests.support.runs import HARDWARE, PAGED


def main(spill_dir: str, *ways: str) -> None:
    # torchrun ends the others as soon as it sees one end, perhaps before they have said which it was.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    how = ways[int(os.environ["TORCHELASTIC_RESTART_COUNT"])]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    fails = rank == 1
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    print(f"process {os.getpid()}\n", end="", flush=True)
    run = penstock.offload(
        model,
        device_budget="300KiB" if fails and how == "memory" else "2MiB",
        disk_budget="16KiB" if fails and how == "disk" else None,
        spill_dir=spill_dir,
        hardware=HARDWARE,
        planning=PAGED,
    )
    for step in range(50):
        if fails and how == "between steps" and step == 3:
            raise ValueError("the batch is bad\nfor many reasons")
        with run.step():
            model(torch.randn(16, 256)).square().mean().backward()
            if fails and how == "killed" and step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()
    print("trained to the end", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
