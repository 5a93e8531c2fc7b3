"""Kernel times for a device that is not there, or that should not be kept busy: the roofline.

A kernel takes as long as its arithmetic or its traffic to memory, whichever is slower, and no
less than its launch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from penstock.capture.datasheets import DataSheet
from penstock.capture.operators import tensors_in

REPEATS = 3  # of what is measured


@cache
def measure_cpu() -> DataSheet:
    """The data sheet of this machine's processor, measured once in a process, in about half a second."""
    left, right = torch.ones(1024, 1024), torch.ones(1024, 1024)
    source = torch.ones(16 << 20 >> 2)
    target = torch.empty_like(source)

    def best_s(work: Callable[[], object]) -> float:
        work()
        times = []
        for _ in range(REPEATS):
            begun_s = time.perf_counter()
            work()
            times.append(time.perf_counter() - begun_s)
        return min(times)

    product_s = best_s(lambda: torch.mm(left, right))
    copy_s = best_s(lambda: target.copy_(source))
    rate = 2 * 1024**3 / product_s
    # Only matrix products in 32 bits are measured: narrower ones rarely pay on a CPU.
    return DataSheet(
        {16: rate, 32: rate, 64: rate / 2}, 2 * source.nbytes / copy_s, launch_s=5e-6, efficiency=1.0
    )


def estimator(sheet: DataSheet) -> Callable[[Any, tuple[Any, ...], dict[str, Any], Any], float]:
    """A function that returns the seconds of one kernel on a device with this data sheet."""

    def estimate(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
        tensors = list(tensors_in((args, kwargs, result)))
        seen: dict[int, int] = {}
        for tensor in tensors:
            address = tensor.untyped_storage()._cdata
            seen[address] = max(seen.get(address, 0), tensor.numel() * tensor.element_size())
        traffic_s = sum(seen.values()) / (sheet.bytes_per_s * sheet.efficiency)
        arithmetic_s = 0.0
        count = flop_registry.get(getattr(operator, "overloadpacket", operator))
        if count is not None:
            bits = next((8 * t.element_size() for t in tensors if t.is_floating_point()), 32)
            arithmetic_s = count(*args, **kwargs, out_val=result) / (
                sheet.flops_per_s.get(bits, sheet.flops_per_s[32]) * sheet.efficiency
            )
        return max(traffic_s, arithmetic_s, sheet.launch_s)

    return estimate
