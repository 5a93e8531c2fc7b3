"""Fragmentation: the address space that plans need beyond their peak, by placement method.

Rows are plain dictionaries. Nothing is timed but the placing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import penstock
from penstock.planners.placement import METHODS, place


def placement_rows(
    name: str, trace: penstock.Trace, plan: penstock.Plan, methods: Sequence[str] = tuple(METHODS)
) -> Iterator[dict[str, Any]]:
    """One row a method; fragmentation is the extent over the peak, minus one."""
    for method in methods:
        start_s = time.perf_counter()
        placement = place(trace, plan, method)
        placing_s = time.perf_counter() - start_s
        yield {
            "trace": name,
            "policy": plan.policy,
            "method": method,
            "tensors": trace.tensors,
            "peak_bytes": placement.peak_bytes,
            "extent_bytes": placement.extent_bytes,
            "fragmentation": placement.fragmentation,
            "within_budget": placement.extent_bytes <= plan.device_budget_bytes,
            "placing_s": placing_s,
        }
