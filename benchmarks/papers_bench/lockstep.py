"""vDNN as moDNN's paper describes it (section 5.2, figure 4): one copy out and one copy in beside one kernel.

A kernel ends when the copies that began with it have, needed or not. So each kernel takes the longer of its
own time and theirs, and the simulator that replays all other plans replays this one. What leaves, and what
comes back beside which kernel, is decided by penstock's `vdnn_all` and `vdnn_conv`, whose kernels otherwise
wait for nothing but the memory that they need.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

import penstock

POLICIES = {"vdnn_all_lockstep": "vdnn_all", "vdnn_conv_lockstep": "vdnn_conv"}


def lockstep(
    trace: penstock.Trace,
    hardware: penstock.Hardware,
    policy: str,
    budget_bytes: int,
    *,
    always: bool = False,
) -> tuple[penstock.Trace, penstock.Plan]:
    """The plan of a policy of POLICIES, and the iteration with kernels that wait for the copies beside them.

    always   offload also where the iteration would fit: vDNN does not count that gradients die on the way

    Raises what `penstock.plan` raises.
    """
    least_bytes = min(budget_bytes, trace.released.peak_bytes - 1) if always else budget_bytes
    free = penstock.plan(*(trace, hardware, POLICIES[policy], False, False), device_budget=least_bytes)
    assert free.trace is not None
    ready = {(period.tensor, period.begin): period.ready for period in free.trace.inactive_periods}
    out_s, in_s = np.zeros(trace.kernels), np.zeros(trace.kernels)
    evictions = []
    for evict in free.evictions:
        # A map that its last reader does not write leaves beside that one, else beside the next kernel.
        beside = evict.begin - 1 if ready[evict.tensor, evict.begin] < evict.begin - 1 else evict.begin
        evictions.append(replace(evict, after=beside - 1))
        size_bytes = int(trace.tensor_bytes[evict.tensor])
        out_s[beside % trace.kernels] += hardware.evict_s(evict.tier, size_bytes)
        if evict.prefetch_at < evict.end:  # else the kernel that needs it waits for it anyway
            in_s[evict.prefetch_at % trace.kernels] += hardware.prefetch_s(evict.tier, size_bytes)
    held = trace.with_times(np.maximum(trace.kernel_time_s, np.maximum(out_s, in_s)))
    evictions.sort(key=lambda evict: (evict.after, evict.begin, evict.tensor))
    return held, replace(free, policy=policy, evictions=tuple(evictions), lower_bound_s=0.0, trace=held)


def step_s(
    trace: penstock.Trace,
    hardware: penstock.Hardware,
    policy: str,
    budget_bytes: int,
    *,
    always: bool = False,
) -> float:
    """Predicted seconds of an iteration. Raises what `penstock.plan` raises."""
    held, plan = lockstep(trace, hardware, policy, budget_bytes, always=always)
    return penstock.simulate(held, plan, hardware).step_s
