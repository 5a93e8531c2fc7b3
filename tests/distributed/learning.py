"""Run on each rank: they train, and say which of them tried which I/O path for which size."""

from __future__ import annotations

import functools
import json
import sys
import time
from typing import Any

import torch.distributed as dist

import penstock
from penstock.storage import cost_sharing
from penstock.storage.paths import TRANSPORTS
from tests.support.families import iterate, small_gpt
from tests.support.memory_transport import MemoryTransport
from tests.support.ranks import leave
from tests.support.runs import HARDWARE

WAIT_S = 60.0


class Counting(MemoryTransport):
    """seen   (kind, size class) of what was moved"""

    def __init__(self, seen: set[tuple[str, int]], **options: Any) -> None:
        super().__init__(**options)
        self._seen = seen

    def perform(self, transfer: Any, begin: int, end: int) -> int:
        self._seen.add((transfer.kind, transfer.size_bytes.bit_length() - 1))
        return super().perform(transfer, begin, end)


def main(spill_dir: str, *modes: str) -> None:
    dist.init_process_group("gloo")
    cost_sharing.PATIENCE_S = 10 * WAIT_S  # what is told in time is what is tested
    rows = {mode: learn(mode, spill_dir) for mode in modes}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, rows)
    if dist.get_rank() == 0:
        print("rows", json.dumps(every), flush=True)
    leave()


def learn(mode: str, spill_dir: str) -> dict[str, Any]:
    """The size classes that this rank moved by the slower path, and those of which it knows both paths."""
    seen: dict[str, set[tuple[str, int]]] = {"fast": set(), "slow": set()}
    kept: dict[int, bytearray] = {}
    names = {path: f"{path}-{mode}" for path in seen}  # no mode hears what another one found
    for path, delay_s in (("fast", 0.0), ("slow", 0.004)):
        TRANSPORTS[names[path]] = functools.partial(Counting, seen[path], delay_s=delay_s, files=kept)
    paths = [f"{name} direct" for name in names.values()]
    model, optimizer = small_gpt()
    run = penstock.offload(
        model,
        optimizer,
        device_budget="500KiB",
        planning=penstock.PlanOptions(
            smallest_bytes=4096, compress=False, recompute=False, policy="evict_all"
        ),
        spill_dir=spill_dir,
        hardware=HARDWARE,
        io=penstock.IoOptions(paths=paths, explorers="each" if mode == "by-hand" else mode, reexplore=0),
    )
    if mode == "by-hand":
        run.share_io_costs()
    end_s = time.monotonic() + WAIT_S
    step, all_known = 0, False
    while not all_known:
        assert time.monotonic() < end_s, run.io_costs()
        with run.step():
            iterate(model, optimizer, step)
        step += 1
        known = known_classes(run, paths)
        moved = seen["fast"] | seen["slow"]
        whole = {number for kind, number in moved if kind == "write" and ("read", number) in moved}
        mine = step > 4 and bool(whole) and known >= whole
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, mine)
        all_known = all(said)
    run.close()
    return {"tried": sorted({number for _, number in seen["slow"]}), "known": sorted(known)}


def known_classes(run: penstock.Offload, paths: list[str]) -> set[int]:
    """Those of which writes and reads by each of the paths have a cost."""
    entries = run.io_costs().entries
    found = [
        {e.class_bytes.bit_length() - 1 for e in entries if (e.kind, e.path) == (kind, path)}
        for kind in ("write", "read")
        for path in paths
    ]
    return set.intersection(*found)


if __name__ == "__main__":
    main(*sys.argv[1:])
