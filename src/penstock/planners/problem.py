"""The input and the output of a policy, and the choice of each kernel's variant (moDNN section 5.3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from penstock.core.columns import IntArray
from penstock.core.hardware import Hardware
from penstock.core.memory_profile import held_bytes, least_workspace_bytes
from penstock.core.plan import Evict, Recompute
from penstock.core.trace import Trace
from penstock.errors import SpillSpaceFull
from penstock.units import format_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """One iteration to be planned.

    program        the iteration with what the program keeps beyond its last use, which `trace` is without:
                   the budget may force that out, too, and those copies take time. None: there is none
    budget_bytes   of the device, at least `penstock.core.memory_profile.minimum_bytes`
    recompute      tensors may be recomputed instead of being moved
    compress       tensors may be moved as bitmask-CSR
    lossy          codec in which what is saved for backward may leave, of penstock.options.LOSSY; the
                   trace is `with_lossy` then
    time_limit_s   for the whole of planning; a policy that reaches it returns the best it has found
    """

    trace: Trace
    hardware: Hardware
    budget_bytes: int
    recompute: bool = False
    compress: bool = False
    lossy: str | None = None
    time_limit_s: float = 10.0
    program: Trace | None = None

    @property
    def packs(self) -> bool:
        """Whether tensors may leave compressed, in any codec."""
        return self.compress or self.lossy is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The parts of a Plan that a policy decides.

    lower_bound_s   proven; 0 where the policy proves nothing
    reason          why these decisions, in one sentence; may be empty
    """

    evictions: tuple[Evict, ...] = ()
    recomputations: tuple[Recompute, ...] = ()
    variants: tuple[int, ...] = ()
    lower_bound_s: float = 0.0
    reason: str = ""


Policy = Callable[[Problem], Decision]


def spill_full(hardware: Hardware, why: str) -> SpillSpaceFull:
    """The error where the tiers have no room for tensors that must be evicted."""
    return SpillSpaceFull(
        f"{why}: the disk budget of {format_bytes(hardware.disk_bytes)} and the host budget of "
        f"{format_bytes(hardware.host_bytes)} do not suffice. Raise either, or raise the device budget."
    )


def with_fastest(trace: Trace, budget_bytes: int) -> tuple[tuple[int, ...], Trace]:
    """The fastest variants with which the step can run in the budget, and a trace without others."""
    return _chosen(trace, held_bytes(trace), budget_bytes)


def with_least_workspace(trace: Trace, budget_bytes: int) -> tuple[tuple[int, ...], Trace]:
    """As `with_fastest`, but no variant forces an eviction where another one needs none."""
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
    chosen = []
    for kernel, others in enumerate(others_bytes.tolist()):
        entries = algorithms(trace, kernel)
        fitting = (entry for entry in entries if others + entry.workspace_bytes <= budget_bytes)
        chosen.append(next(fitting, baseline(entries)))
    plain = replace(
        trace,
        kernel_time_s=np.array([entry.time_s for entry in chosen]),
        kernel_workspace_bytes=np.array([entry.workspace_bytes for entry in chosen], dtype=np.int64),
        kernel_variants=(),
    )
    return tuple(entry.variant for entry in chosen), plain


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
