"""Part two: kernels at the speed that they really have."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import penstock
from penstock.core.memory_profile import minimum_bytes
from planning import models
from planning.cells import DATA, SHIPPED, Cell, cells, trace_of
from planning.machines import machine_of
from planning.runs import ALL, COMPRESS, OFFLOAD, RECOMPUTE, Outcome, Way, run, run_all

LISTS = (
    Way("vdnn_all", "vdnn_all"),
    Way("flashneuron_g10", "flashneuron_g10"),
    Way("g10_artifact", "g10_artifact"),
)
ABOVE_MINIMUM = 1.2  # times the smallest budget, at least: at the very edge there is little to decide
HOST_FRACTION = 0.2  # of the trace's peak: host memory that tensors may take

# Device, bus, drives of a PCIe 4 or 5 kind, and budgets as fractions of the peak.
MACHINES = (
    ("a100-80gb", "pcie4", 1, "pcie4", (0.5, 0.25)),
    ("h200", "pcie5", 4, "pcie5", (0.5,)),
    ("rtx4090", "pcie4", 2, "pcie4", (0.5,)),
)


def measure(options: argparse.Namespace, tell: Callable[[str], None]) -> dict[str, Any]:
    tasks: dict[str, Any] = {}
    groups: dict[str, str] = {}
    if DATA != SHIPPED:  # which has one batch size of each model
        for cell in cells():
            if cell.figure == 11 and (not options.quick or cell.model == "BERT-256"):
                groups[cell.model] = "published traces, without the fixed costs of their kernels"
                tasks[cell.model] = (measure_published, (cell, options.time_limit))
    families = models.SMALL if options.quick else models.FAMILIES
    for name in families:
        for machine in MACHINES[:1] if options.quick else MACHINES:
            for fraction in machine[4]:
                key = f"{name}, {machine[0]}, {machine[2]} x {machine[3]}, {fraction:.0%} of the peak"
                groups[key] = "captured traces, times from data sheets"
                tasks[key] = (measure_captured, (name, machine, fraction, options.quick, options.time_limit))
    tasks = {key: task for key, task in tasks.items() if options.only in key}
    outcomes = run_all(tasks, options.jobs, tell)
    return {
        "cases": [
            {"group": groups[key], "case": key, "outcomes": {one["way"]: one for one in outcomes[key]}}
            for key in tasks
        ]
    }


def measure_published(cell: Cell, time_limit_s: float) -> list[Outcome]:
    trace = at_marginal_cost(cell.model)
    return [
        run(trace, cell.hardware(), way, time_limit_s=time_limit_s) for way in (*LISTS, OFFLOAD, RECOMPUTE)
    ]


def at_marginal_cost(model: str) -> penstock.Trace:
    """The published trace with its times scaled to what its model's samples cost beyond the first.

    The kernels were timed once, without warm-up, and hold a large fixed cost. A line through the
    iteration times of all published batch sizes of the model has the cost of a sample as its slope.
    """
    family, _, batch = model.rpartition("-")
    sizes = sorted(int(path.name.split("-")[1].split(".")[0]) for path in DATA.glob(f"{family}-*.json.gz"))
    times_s = [trace_of(f"{family}-{size}").ideal_s for size in sizes]
    slope_s, _ = np.polyfit(sizes, times_s, 1)
    trace = trace_of(model)
    return trace.scaled(float(slope_s) * int(batch) / trace.ideal_s)


def measure_captured(
    name: str, machine: tuple[Any, ...], fraction: float, quick: bool, time_limit_s: float
) -> list[Outcome]:
    device, bus, drives, drive, _ = machine
    trace = models.capture((models.SMALL if quick else models.FAMILIES)[name], device)
    budget_bytes = max(int(fraction * trace.peak_bytes), int(ABOVE_MINIMUM * minimum_bytes(trace)))
    hardware = machine_of(
        device, bus=bus, drives=drives, drive=drive, host_bytes=int(HOST_FRACTION * trace.peak_bytes)
    )
    ways = (*LISTS, OFFLOAD, RECOMPUTE, COMPRESS, ALL)
    # A step may be made for a larger device than this one: what counts is the budget.
    hardware = replace(hardware, device_bytes=max(budget_bytes, hardware.device_bytes))
    return [run(trace, hardware, way, budget_bytes=budget_bytes, time_limit_s=time_limit_s) for way in ways]
