"""G10's artifact, which published the figures: its policies, its traces, and what it compares with.

flashneuron_g10   FlashNeuron as the artifact has it: it leaves room for weights and all that the largest
                  kernel uses, and fails where FlashNeuron's memory manager finds no extent for a tensor
g10_artifact      G10 by the rules of the artifact: see penstock.planners.g10
g10_host          the same without unified memory (figure 11): what Algorithm 1 leaves goes to the disk first
g10_gds           GPU-direct storage alone (figure 11): the disk, and the host only where there is no disk
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np

import penstock
from penstock import planners
from penstock.planners import Decision, Policy, Problem
from penstock.planners.flashneuron import OwnRuntime, choose, decide
from penstock.planners.g10 import g10
from penstock.planners.rules import FITS


def flashneuron_g10(problem: Problem) -> Decision:
    """Raises InvalidArgument where it fails, and SpillSpaceFull where the tier is too small."""
    if problem.trace.peak_bytes <= problem.budget_bytes:
        return FITS
    return decide(problem, choose(problem, _largest_kernel_bytes(problem.trace)))


def own_iteration_s(problem: Problem) -> float:
    """Seconds that an iteration takes in FlashNeuron's own runtime. Raises as `flashneuron_g10` does."""
    trace, budget_bytes = problem.trace, problem.budget_bytes
    if trace.peak_bytes <= budget_bytes:
        return trace.ideal_s
    evictions = choose(problem, _largest_kernel_bytes(trace))
    return OwnRuntime(trace, evictions, budget_bytes, problem.hardware).now_s


def _largest_kernel_bytes(trace: penstock.Trace) -> int:
    """The most that the tensors of one kernel take, with its workspace."""
    total = trace.kernel_workspace_bytes.copy()
    np.add.at(total, trace.uses.values, trace.tensor_bytes[trace.uses.owners])
    return int(total.max(initial=0))


def g10_artifact(problem: Problem) -> Decision:
    return g10(problem, as_artifact=True)


def g10_host(problem: Problem) -> Decision:
    return g10(problem, spill=("disk", "host"), as_artifact=True)


def g10_gds(problem: Problem) -> Decision:
    tiers = ("disk",) if problem.hardware.disk_bytes else ("host",)
    return g10(problem, tiers, tiers, as_artifact=True)


POLICIES: dict[str, Policy] = {
    "flashneuron_g10": flashneuron_g10,
    "g10_artifact": g10_artifact,
    "g10_gds": g10_gds,
    "g10_host": g10_host,
}


def plan(trace: penstock.Trace, hardware: penstock.Hardware, policy: str, **options: Any) -> penstock.Plan:
    """`penstock.plan`, for the artifact's policies too."""
    with patch.dict(planners.POLICIES, POLICIES):
        return penstock.plan(trace, hardware, policy, **({"recompute": False} | options))
