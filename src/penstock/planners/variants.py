"""Which variant of each kernel runs, and the trace that this comes to (moDNN section 5.3)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from penstock.core.columns import IntArray
from penstock.core.memory_profile import held_bytes, least_workspace_bytes
from penstock.core.trace import Trace, Variant


def with_fastest(trace: Trace, budget_bytes: int) -> tuple[tuple[int, ...], Trace]:
    """The fastest variants with which the step can run in the budget, and a trace without others."""
    return _chosen(trace, held_bytes(trace), budget_bytes)


def with_least_workspace(trace: Trace, budget_bytes: int) -> tuple[tuple[int, ...], Trace]:
    """The same, but no variant sends tensors away from its kernel where another needs none to leave."""
    live = trace.live_bytes - trace.kernel_workspace_bytes
    fits = live + least_workspace_bytes(trace) <= budget_bytes
    return _chosen(trace, np.where(fits, live, held_bytes(trace)), budget_bytes)


def as_traced(trace: Trace, budget_bytes: int) -> tuple[tuple[int, ...], Trace]:
    """Every kernel as it was traced where that can run in the budget, else the fastest variant that can."""
    traced = held_bytes(trace) + trace.kernel_workspace_bytes <= budget_bytes
    only = tuple(() if fits else others for fits, others in zip(traced, trace.kernel_variants, strict=False))
    return _chosen(replace(trace, kernel_variants=only), held_bytes(trace), budget_bytes)


def _chosen(trace: Trace, others_bytes: IntArray, budget_bytes: int) -> tuple[tuple[int, ...], Trace]:
    """The fastest variant of each kernel that fits beside ``others_bytes``; the smallest where none does."""
    if not any(trace.kernel_variants):
        return (), trace
    variants, times_s, workspaces = [], [], []
    for kernel, others in enumerate(others_bytes.tolist()):
        entries = _all(trace, kernel)
        fitting = [
            index for index, entry in enumerate(entries) if others + entry.workspace_bytes <= budget_bytes
        ]
        best = min(
            fitting or range(len(entries)),
            key=lambda index: (
                (entries[index].time_s, entries[index].workspace_bytes)
                if fitting
                else (entries[index].workspace_bytes, entries[index].time_s)
            ),
        )
        variants.append(best - 1)
        times_s.append(entries[best].time_s)
        workspaces.append(entries[best].workspace_bytes)
    plain = replace(
        trace,
        kernel_time_s=np.array(times_s),
        kernel_workspace_bytes=np.array(workspaces, dtype=np.int64),
        kernel_variants=(),
    )
    return tuple(variants), plain


def _all(trace: Trace, kernel: int) -> list[Variant]:
    """The kernel as traced, then its variants."""
    traced = Variant("", float(trace.kernel_time_s[kernel]), int(trace.kernel_workspace_bytes[kernel]))
    return [traced, *(trace.kernel_variants[kernel] if trace.kernel_variants else ())]
