"""Plans that recompute all that they may."""

from __future__ import annotations

from dataclasses import replace

import penstock
from penstock.core.check import check
from penstock.core.plan import Recompute
from tests.support.runs import HARDWARE


def recompute_everything(trace: penstock.Trace, budget_bytes: int, least_bytes: int = 0) -> penstock.Plan:
    """A plan that moves nothing, and drops each tensor of ``least_bytes`` or more in each period in which it
    can be recomputed."""
    hardware = replace(HARDWARE, device_bytes=budget_bytes)
    plan = penstock.Plan(policy="forced", device_budget_bytes=budget_bytes, trace=trace)
    candidates = [
        Recompute(period.tensor, period.begin, period.end)
        for period in trace.inactive_periods
        if trace.recomputable_until[period.tensor] >= period.end
        and trace.tensor_bytes[period.tensor] >= least_bytes
    ]
    # What is due at one kernel is made in the order of its producers.
    candidates.sort(key=lambda entry: (entry.end, int(trace.tensor_recompute[entry.tensor])))
    chosen: list[Recompute] = []
    for entry in candidates:
        longer = replace(plan, recomputations=(*chosen, entry))
        if not check(trace, longer, hardware):
            chosen.append(entry)
    return replace(plan, recomputations=tuple(chosen))
