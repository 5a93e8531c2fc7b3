"""Step after step on an accelerator, nothing grows: its memory, events, blocks of the host tier, the rest.

A thousand steps; ``PENSTOCK_STEPS`` takes so many.
"""

from __future__ import annotations

import os
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import penstock
from tests.runtime.test_steps_leave_no_trace import Held, held, require_no_growth
from tests.support import accelerator
from tests.support.families import _Gpt, iterate
from tests.support.runs import ACCELERATED, EVERYTHING

DEVICE = accelerator.wanted("emu")
STEPS = int(os.environ.get("PENSTOCK_STEPS", "1000"))
LOOKS = tuple(STEPS // 2 + part * STEPS // 8 for part in range(5))
ORDERS = accelerator.orders(DEVICE, "lazy", "random")


class Left(NamedTuple):
    """When all that can leave the device has left it.

    host_tier_bytes   beside the copies of what is there: these may go to the disk by a later plan
    events   that there are, but for those kept to be used again: as many as were ever in use at once
    """

    reserved_bytes: int
    host_tier_bytes: int
    events: int
    held: Held


def left(run: penstock.Offload, emulated: Any) -> Left:
    engine, device, slab = run._engine, run._device, run._device._copies.slab
    with engine.lock:
        engine.evict_and_wait(1 << 40)
    engine.drain()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    slots = [managed.slot for managed in device.storages.all() if managed.slot is not None]
    return Left(
        torch.accelerator.memory_reserved(),
        slab._extents.used_bytes - sum(slot.block.size_bytes for slot in slots if slot.tier == "host"),
        emulated.counters()["events"] - len(device._events.free) if emulated is not None else 0,
        held(run, torch.accelerator.memory_allocated()),
    )


def steps(spill_dir: Path, order: str, host_budget: str, policy: str) -> tuple[list[Left], int]:
    """What was left at each look; the bytes that left the device in a step."""
    emulated = accelerator.load(DEVICE)
    if emulated is not None:
        emulated.configure(order=order, seed=1)
    looks = []
    with penstock.offload(
        device=DEVICE,
        device_budget="6MiB",
        spill_dir=spill_dir,
        hardware=ACCELERATED,
        host_budget=host_budget,
        planning=penstock.PlanOptions(smallest_bytes=EVERYTHING, policy=policy),
    ) as run:
        model = _Gpt(width=128, blocks=2).to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for number in range(STEPS):
            with run.step():
                iterate(model, optimizer, number % 8)
            if number + 1 in LOOKS:
                looks.append(left(run, emulated))
        return looks, run.report().evicted_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host_budget", "policy"),
    [("128MiB", "optimal"), ("64MiB", "evict_all")],  # to the host; to the disk, the budget is all staging
)
@pytest.mark.parametrize("order", ORDERS)
def test_nothing_grows(order: str, host_budget: str, policy: str, tmp_path: Path) -> None:
    # In a process of its own: those of other tests leave threads and heaps that come and go.
    with get_context("spawn").Pool(1) as alone:
        looks, evicted_bytes = alone.apply_async(steps, (tmp_path, order, host_budget, policy)).get(
            600 + STEPS
        )
    assert evicted_bytes > 0
    early, late = looks[0], looks[-1]
    assert late.reserved_bytes <= early.reserved_bytes
    assert late.host_tier_bytes == early.host_tier_bytes
    assert late.events <= early.events + 8
    require_no_growth([look.held for look in looks])
