"""Fragmentation: the address space that plans need beyond their peak, by placement method.

Rows are plain dictionaries. Nothing is timed but the placing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import penstock
from penstock.errors import InvalidArgument, SpillSpaceFull
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


def fragmentation_of_policies(
    name: str,
    trace: penstock.Trace,
    hardware: penstock.Hardware,
    policies: Iterable[str] = ("evict_all", "modnn", "g10", "optimal"),
) -> Iterator[dict[str, Any]]:
    """`placement_rows` of what each policy plans; a policy that fails has one row that says why."""
    for policy in policies:
        try:
            plan = penstock.plan(trace, hardware, policy)
        except (InvalidArgument, SpillSpaceFull) as error:
            yield {"trace": name, "policy": policy, "failed": str(error)}
            continue
        yield from placement_rows(name, trace, plan)


def price_of_addresses(
    name: str, trace: penstock.Trace, hardware: penstock.Hardware, policy: str, most: float = 0.25
) -> dict[str, Any]:
    """How much slower an iteration is when the budget has to hold with addresses.

    The plan is made for less memory, a step at a time, until its addresses fit in all of it.

    most   of the budget that is given up before the search ends
    """
    budget = hardware.device_bytes
    free = penstock.plan(trace, hardware, policy)
    for step in range(9):
        given_up = most * step / 8
        plan = penstock.plan(trace, hardware, policy, device_budget_bytes=int(budget * (1 - given_up)))
        if place(trace, plan, enough_bytes=budget).extent_bytes <= budget:
            return {
                "trace": name,
                "policy": policy,
                "given_up": given_up,
                "slower": plan.predicted_s / free.predicted_s - 1,
            }
    return {"trace": name, "policy": policy, "failed": f"no addresses with {most:.0%} of the budget given up"}
