"""The algorithms a kernel can run with, and what a faster one gains (moDNN section 5.2.3)."""

from __future__ import annotations

from typing import NamedTuple

from penstock.core.trace import Trace


class Algorithm(NamedTuple):
    """One way to run a kernel.

    variant   index into the trace's variants of the kernel, -1 for the kernel as traced
    """

    variant: int
    time_s: float
    workspace_bytes: int


def algorithms(trace: Trace, kernel: int) -> list[Algorithm]:
    """Every algorithm of ``kernel``, the fastest first; of equally fast ones the one with less workspace."""
    found = [Algorithm(-1, float(trace.kernel_time_s[kernel]), int(trace.kernel_workspace_bytes[kernel]))]
    if trace.kernel_variants:
        found += [
            Algorithm(index, variant.time_s, variant.workspace_bytes)
            for index, variant in enumerate(trace.kernel_variants[kernel])
        ]
    return sorted(found, key=lambda entry: (entry.time_s, entry.workspace_bytes))


def baseline(choices: list[Algorithm]) -> Algorithm:
    """The one with the least workspace, as implicit GEMM is for convolutions."""
    return min(choices, key=lambda entry: (entry.workspace_bytes, entry.time_s))


def gain_s(base: Algorithm, algorithm: Algorithm, evicting_s: float, late_s: float) -> float:
    """moDNN's equation 10: time saved, less what its workspace costs.

    evicting_s   delay from evictions that make room for the workspace
    late_s       delay of the next prefetch, which finds less room
    """
    return base.time_s - algorithm.time_s - evicting_s - late_s
