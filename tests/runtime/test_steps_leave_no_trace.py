"""Step after step, nothing grows: objects, disk space, mappings, address space, memory.

Some hundred steps by default; ``PENSTOCK_STEPS=10000`` takes so many.
"""

from __future__ import annotations

import ctypes
import gc
import os
import weakref
from collections import Counter
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from types import BuiltinFunctionType
from typing import NamedTuple

import pytest
import torch

import penstock
from penstock import _native
from tests.support.families import FAMILIES, iterate
from tests.support.runs import PAGED

STEPS = int(os.environ.get("PENSTOCK_STEPS", "160"))
# Looked at after these. The heap of the C library has taken by the first of them what it takes.
LOOKS = tuple(STEPS // 2 + part * STEPS // 8 for part in range(5))


class Held(NamedTuple):
    objects: Counter[str]
    disk_bytes: int
    mappings: int
    address_bytes: int
    resident_bytes: int
    device_bytes: int
    threads: int
    files: int


def is_of_an_abc(thing: object) -> bool:
    """Python's caches of `isinstance` for abstract classes hold a weak reference, and its callback, for each
    class that was ever asked about, by whomever."""
    callback = thing.__callback__ if type(thing) is weakref.ReferenceType else thing
    return isinstance(callback, BuiltinFunctionType) and callback.__name__ == "_destroy"


def held(run: penstock.Offload, device_bytes: int) -> Held:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return Held(
        Counter(
            f"{type(thing).__module__}.{type(thing).__qualname__}"
            for thing in gc.get_objects()
            if not is_of_an_abc(thing)
        ),
        run.report().disk_bytes,
        len(Path("/proc/self/maps").read_text().splitlines()),
        int(status["VmSize"].split()[0]) << 10,
        int(status["VmRSS"].split()[0]) << 10,
        device_bytes,
        int(status["Threads"]),
        len(os.listdir("/proc/self/fd")),
    )


def steps(spill_dir: Path, hardware: penstock.Hardware) -> tuple[list[Held], int]:
    """What was held at each look; the bytes that went to disk."""
    looks = []
    with penstock.offload(
        device_budget="400KiB", spill_dir=spill_dir, hardware=hardware, planning=PAGED
    ) as run:
        model = FAMILIES["gpt"].make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for number in range(STEPS):
            with run.step():
                iterate(model, optimizer, number % 8)
            if number + 1 in LOOKS:
                looks.append(held(run, _native.arena_stats().in_use_bytes))
        return looks, run.report().evicted_bytes


@pytest.mark.slow
def test_nothing_grows(tmp_path: Path, hardware: penstock.Hardware) -> None:
    # In a process of its own: those of other tests leave threads and heaps that come and go.
    with get_context("spawn").Pool(1) as alone:
        looks, evicted_bytes = alone.apply_async(steps, (tmp_path, hardware)).get(300 + STEPS)
    assert evicted_bytes > 0
    require_no_growth(looks)


def require_no_growth(looks: list[Held]) -> None:
    early, late = looks[0], looks[-1]
    # A step that was planned again has another plan, with more actions or fewer, once. What steps leave
    # behind grows from each look to the next.
    grown = {
        name: late.objects[name] - early.objects[name]
        for name in late.objects
        if all(after.objects[name] > before.objects[name] for before, after in pairwise(looks))
    }
    assert {name: count for name, count in grown.items() if count > 50} == {}
    assert late.disk_bytes <= early.disk_bytes + (1 << 20)
    assert late.mappings <= early.mappings + 64
    # Threads that plan again have stacks, and heaps for which malloc reserves 64 MiB of addresses each. A
    # plan made between the two counts has been in memory.
    assert late.address_bytes <= early.address_bytes + 4 * (72 << 20)
    assert late.resident_bytes <= early.resident_bytes + (32 << 20)
    assert late.device_bytes == early.device_bytes
    assert late.threads <= early.threads + 1  # one that plans again may be at work
    assert late.files == early.files
