"""FlashNeuron and G10 in the published cells, as the artifact ran them.

The artifact plans, and runs FlashNeuron, with rates in GiB/s. The simulator that ran G10 takes the same
numbers as GB/s, and moves whole pages in batches of 50 for the bus, of which the disk has the whole
number that its share comes to. Its page faults, and tensors that move in part, are not modelled here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from artifact import POLICIES, own_iteration_s

import penstock
from penstock.errors import InvalidArgument, SpillSpaceFull
from penstock.planners import Problem
from penstock.simulator import Intervals, Replay
from planning.cells import Cell, trace_of

GB = 1e9
BATCH_PAGES = 50
VARIANTS = {"g10_artifact": "prefetch_lru", "g10_host": "G10GDSFULL", "g10_gds": "G10GDSSSD"}
NEAR = 0.03  # of the ideal


def simulated_on(cell: Cell) -> penstock.Hardware:
    """The machine as the artifact's simulator of unified memory has it."""
    share = math.floor(BATCH_PAGES / cell.pcie_gib_per_s * cell.ssd_gib_per_s + 1e-9) / BATCH_PAGES
    bus, disk = cell.pcie_gib_per_s * GB, share * cell.pcie_gib_per_s * GB
    return replace(
        cell.hardware(),
        device_to_host_bytes_per_s=bus,
        host_to_device_bytes_per_s=bus,
        disk_read_bytes_per_s=disk,
        disk_write_bytes_per_s=disk,
    )


def g10_row(cell: Cell, policy: str = "g10_artifact") -> dict[str, Any]:
    """What G10's plan for the cell takes, beside what was published for it."""
    trace, hardware = trace_of(cell.model), cell.hardware()
    published_s = cell.published_s.get(VARIANTS[policy])
    made = POLICIES[policy](Problem(trace, hardware, hardware.device_bytes))
    replay = Replay(trace, simulated_on(cell), hardware.device_bytes)
    step_s = replay.run(Intervals.of(made.evictions)).step_s
    return _row(cell, policy, trace.ideal_s, step_s, published_s)


def flashneuron_row(cell: Cell) -> dict[str, Any]:
    """What FlashNeuron's own runtime takes, which the planner simulates, beside what was published;
    `plan_s` is what its plan takes in penstock's. None where it fails."""
    trace, hardware = trace_of(cell.model), cell.hardware()
    problem = Problem(trace, hardware, hardware.device_bytes)
    try:
        own_s: float | None = own_iteration_s(problem)
        made = POLICIES["flashneuron_g10"](problem)
        replay = Replay(trace, hardware, hardware.device_bytes)
        plan_s: float | None = replay.run(Intervals.of(made.evictions)).step_s
        error = ""
    except (InvalidArgument, SpillSpaceFull) as failed:
        own_s, plan_s, error = None, None, str(failed)
    row = _row(cell, "flashneuron_g10", trace.ideal_s, own_s, cell.published_s.get("FlashNeuron"))
    return row | {"plan_s": plan_s, "error": error}


def summary(rows: Iterable[dict[str, Any]]) -> dict[str, float]:
    """How near the rows are, in fractions of the ideal: over those with a time on both sides."""
    differences = np.abs([row["difference"] for row in rows if row["difference"] is not None])
    if not len(differences):
        return {"cells": 0, "median_difference": 0.0, "near": 0.0}
    return {
        "cells": len(differences),
        "median_difference": float(np.median(differences)),
        "near": float((differences <= NEAR).mean()),
    }


def _row(
    cell: Cell, policy: str, ideal_s: float, step_s: float | None, published_s: float | None
) -> dict[str, Any]:
    both = step_s is not None and published_s is not None
    return {
        "figure": cell.figure,
        "cell": cell.key,
        "policy": policy,
        "ideal_s": ideal_s,
        "step_s": step_s,
        "published_s": published_s,
        "difference": ideal_s / step_s - ideal_s / published_s if both else None,
        "ratio": step_s / published_s if both else None,
    }
