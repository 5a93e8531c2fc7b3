"""Part three: the demo's step at several budgets."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import penstock
from planning.cells import ROOT
from planning.runs import OFFLOAD, Outcome, Way, run, run_all

FRACTIONS = (0.1, 0.2, 0.35, 0.5, 0.65)  # of the peak in memory, weights and optimizer state included
WAYS = (Way("evict_all", "evict_all"), Way("vdnn_all", "vdnn_all"), Way("g10", "g10"), OFFLOAD)
HARDWARE = penstock.Hardware(
    device_bytes=16 << 30,
    disk_bytes=64 << 30,
    disk_write_bytes_per_s=3e9,
    disk_read_bytes_per_s=2e9,
    disk_shares_bus=False,
    duplex=0.7,
    name="a CPU with one NVMe drive",
)


def measure(options: argparse.Namespace, tell: Callable[[str], None]) -> dict[str, Any]:
    trace = demo_trace()
    tasks = {}
    for fraction in FRACTIONS[:2] if options.quick else FRACTIONS:
        budget_bytes = int(fraction * trace.peak_bytes)
        # A CPU's roofline is not what decides here: the times are such that the disk is a match for it.
        for slower in (4.0, 16.0):
            key = f"{fraction:.0%} of the peak, kernels {slower:g} times as long"
            tasks[key] = (measure_case, (trace.scaled(slower), budget_bytes, options.time_limit))
    outcomes = run_all(tasks, options.jobs, tell)
    return {
        "cases": [
            {"group": "the demo's step", "case": key, "outcomes": {one["way"]: one for one in outcomes[key]}}
            for key in tasks
        ]
    }


def measure_case(trace: penstock.Trace, budget_bytes: int, time_limit_s: float) -> list[Outcome]:
    return [run(trace, HARDWARE, way, budget_bytes=budget_bytes, time_limit_s=time_limit_s) for way in WAYS]


def demo_trace() -> penstock.Trace:
    """The iteration of examples/demo.py, with times from a roofline; no tensor is allocated to find it."""
    sys.path.insert(0, str(ROOT / "examples"))
    import gpt
    from methods import trace_of

    return trace_of(gpt.Config())
