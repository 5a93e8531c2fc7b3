"""Run on each rank: collectives read and write tensors that other threads press out of memory meanwhile."""

from __future__ import annotations

import sys
import threading
import time

import torch
import torch.distributed as dist

import penstock
from tests.support.ranks import leave
from tests.support.runs import HARDWARE

ROUNDS = 40
SMALL, LARGE = 16 << 10, 1 << 18  # elements below and above what the run moves by itself


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ended = threading.Event()

    def press() -> None:
        kept: list[torch.Tensor] = []
        while not ended.is_set():
            try:
                kept.append(torch.full((1 << 20,), 1, dtype=torch.uint8))
            except RuntimeError:  # no room just now
                kept.clear()
            if len(kept) > 14:
                kept.clear()

    with penstock.offload(
        device_budget="12MiB",
        spill_dir=sys.argv[1],
        hardware=HARDWARE,
        planning=penstock.PlanOptions(smallest_bytes="256KiB", recompute=sys.argv[2] == "recompute"),
    ) as run:
        tensors = [torch.full((LARGE if i % 2 else SMALL,), float(i)) for i in range(16)]
        thread = threading.Thread(target=press, daemon=True)
        thread.start()
        for number in range(ROUNDS):
            with run.step():
                several = [(number + i) % len(tensors) for i in range(3)]
                for i in several:
                    tensors[i].fill_(number + i + rank)
                work = [dist.all_reduce(tensors[i], async_op=True) for i in several]
                other = float(tensors[(number + 7) % len(tensors)].sum())
                for each in work:
                    each.wait()
                for i in several:
                    expected = sum(number + i + r for r in range(ranks))
                    assert float(tensors[i].min()) == float(tensors[i].max()) == expected, (number, i, other)
                # A thread of the process group's makes one tensor of them all, for the system to write to.
                gathered = [torch.empty(LARGE) for _ in range(ranks)]
                if number % 4 == rank:
                    time.sleep(0.1)  # meanwhile that of the others becomes the oldest
                dist.all_gather(gathered, torch.full((LARGE,), float(number + rank)))
                for r, each in enumerate(gathered):
                    assert float(each.min()) == float(each.max()) == number + r, (number, r)
        ended.set()
        thread.join()
    leave()


main()
