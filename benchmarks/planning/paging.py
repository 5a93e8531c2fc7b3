"""Base UVM and DeepUM+ against the times that G10 published for them.

What the artifact's own simulator does, read from its source, and what is done here so that times compare:

- Its links are in units of 10^9 bytes per second, its memories in GiB.
- It runs two iterations, and the published time is that of the faster one. `faster_s` is compared;
  `second_s` is given beside it. For Base UVM on the CNNs, the first is the faster: then nothing that no
  kernel will read again has to come back yet.
- The cost of handling faults comes from kernels that were timed while they faulted. The artifact counts
  these times in whole seconds (it divides two integers), so that few kernels have any. So does
  `times_in_whole_seconds`, and the published times come out; `charged_s` is the second iteration with
  the measured costs in full.
- Where the disk is as fast as the bus, its formula divides by zero, and the published time of Base UVM
  holds no cost of faults on host memory. Here they have half of the bus.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
from artifact import published
from artifact.paging import simulate_paging

from penstock import Hardware, Trace
from penstock.core.columns import FloatArray
from planning.cells import Cell, trace_of, trace_path

POLICIES = {"uvm": "lru", "deepum": "deepUM"}  # ours -> the artifact's name
G10, IDEAL = "prefetch_lru", "ideal"
SAME = 0.005  # times this close, as a fraction, have no order

Row = dict[str, Any]


def hardware_of(cell: Cell) -> Hardware:
    """The machine of a cell, as the artifact's simulator of paging has it."""
    bus, disk = cell.pcie_gib_per_s * 1e9, cell.ssd_gib_per_s * 1e9
    return replace(
        cell.hardware(),
        device_to_host_bytes_per_s=bus,
        host_to_device_bytes_per_s=bus,
        disk_read_bytes_per_s=disk,
        disk_write_bytes_per_s=disk,
    )


def times_in_whole_seconds(
    trace: Trace, fault_times_s: tuple[FloatArray, FloatArray]
) -> tuple[FloatArray, FloatArray]:
    """Fault times whose costs, over the times before them, are those between whole seconds."""
    resident_s = trace.kernel_time_s
    outputs_s, all_s = fault_times_s
    outputs = resident_s + np.floor(outputs_s) - np.floor(resident_s)
    return outputs, outputs + np.floor(all_s) - np.floor(outputs_s)


def rows(cell: Cell) -> list[Row]:
    """Both systems in one cell; none where the figure did not have them."""
    trace, hardware = trace_of(cell.model), hardware_of(cell)
    measured = published.fault_times_s(trace_path(cell.model))
    found = []
    for policy, key in POLICIES.items():
        published_s = cell.published_s.get(key)
        if published_s is None:
            continue
        counted = times_in_whole_seconds(trace, measured)
        result = simulate_paging(trace, hardware, policy, fault_times_s=counted)
        charged = simulate_paging(trace, hardware, policy, fault_times_s=measured)
        found.append(
            {
                "figure": cell.figure,
                "cell": cell.key,
                "policy": policy,
                "published_s": published_s,
                "faster_s": min(result.steps_s),
                "second_s": result.step_s,
                "charged_s": charged.step_s,
                "ideal_s": trace.ideal_s,
                "moved_bytes": dict(result.moved_bytes),
            }
        )
    return found


def errors(found: Iterable[Row], time: str = "faster_s") -> dict[str, float]:
    """By policy: the median of how far our times are from the published, as a fraction."""
    by_policy: dict[str, list[float]] = {}
    for row in found:
        by_policy.setdefault(row["policy"], []).append(abs(row[time] / row["published_s"] - 1))
    return {policy: median(fractions) for policy, fractions in by_policy.items()}


def disorder(
    cell: Cell, found: Iterable[Row], g10_s: float | None = None, time: str = "faster_s"
) -> list[str]:
    """Pairs of systems in a cell that are not in their published order, each in one sentence.

    g10_s   our G10; the published one where not given
    """
    ours = {POLICIES[row["policy"]]: row[time] for row in found}
    ours[G10] = cell.published_s[G10] if g10_s is None else g10_s
    ours[IDEAL] = trace_of(cell.model).ideal_s
    order = [name for name in (*POLICIES.values(), G10, IDEAL) if name in ours]
    wrong = []
    for slow, fast in pairwise(order):
        if _compared(cell.published_s, slow, fast) * _compared(ours, slow, fast) < 0:
            wrong.append(f"{cell.key}: {slow} {ours[slow]:.2f} s and {fast} {ours[fast]:.2f} s")
    return wrong


def _compared(times: Mapping[str, Any], one: str, other: str) -> int:
    """1 where ``one`` is slower, -1 where it is faster, 0 where there is no telling."""
    ratio = times[one] / times[other] - 1
    return 0 if abs(ratio) <= SAME else (1 if ratio > 0 else -1)
