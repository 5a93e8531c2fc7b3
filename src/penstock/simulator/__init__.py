"""The replay of a plan, event by event, as the runtime would carry it out: from `penstock._native`.

Assumptions, each of which costs some accuracy:

- Kernels take the time the trace states; copies do not slow them.
- A link carries one copy at a time. Writes start in the order they were issued; so do reads, demands
  first. A latency passes before the bytes flow. Rates change while copies run: where the disk shares
  the bus, its copy has its own rate, but at most half of the bus while a host copy goes in the same
  direction, which has the rest; and a disk copy has its rate times ``hardware.duplex`` while the disk
  works in the other direction.
- Prefetches get memory in the order they were issued: one that does not fit holds up those behind it.
- Before a kernel the compute stream compresses what leaves compressed, waits for what is due, expands
  it, and recomputes what was released, in this order.
- Starting copies costs the compute stream ``hardware.copy_overhead_s`` each, right after they are issued:
  those of writes behind the kernel that they follow, those of prefetches before the kernel that issues them.
- A prefetch issued before its copy is complete cancels the eviction. The copy is then abandoned, unless a
  later eviction needs it.
- What no kernel reads again while the program keeps it is written after its last use, where the budget
  has no room for it, and does not come back. The room of its copy is not counted.
- A write that has not started when its tensor dies is cancelled. One in progress holds the tensor's
  memory to its end. The iteration ends when the last kernel and the transfers in progress have ended.
- Where an eviction reaches into the next iteration, the second of two iterations is reported, from the
  end of the last kernel to the end of the last kernel; copies then in progress are cut where they are.
"""

from __future__ import annotations

from typing import Any

from penstock.core.arguments import require_kinds
from penstock.core.hardware import LINKS, TIERS, Hardware
from penstock.core.memory_profile import as_run
from penstock.core.plan import Plan
from penstock.core.timeline import Sample, Span, Stall, Timeline
from penstock.core.trace import Trace, within_budget
from penstock.simulator.replay import CAUSES, Intervals, Replay

STREAMS = ("compute", *LINKS)
RUN, COMPRESS, EXPAND, RECOMPUTATION, START_COPIES = range(5)  # what the compute stream does


def simulate(trace: Trace, plan: Plan, hardware: Hardware) -> Timeline:
    """What happens when ``plan`` runs: deterministic, and never corrected.

    A plan that needs more than its budget is carried out all the same; the peak shows it. Under a budget
    that does not hold everything, what no kernel reads again while the program keeps it leaves where there is
    no room for it (see `penstock.core.memory_profile.leaves_for_good`).
    """
    require_kinds(trace=trace, plan=plan, hardware=hardware)
    if hardware.disk_bytes > 0:
        trace, gone = as_run(trace, plan, hardware.host_bytes)
    else:
        trace, gone = within_budget(trace, plan.device_budget_bytes, plan.lossy), []
    result = Replay(trace, hardware, plan.device_budget_bytes).run(
        Intervals.of_plan(plan, gone), record=True, variants=plan.variants, stop_on_deadlock=False
    )
    spans = [_span(trace, *row) for row in _rows(result.records["spans"])]
    return Timeline(
        iteration_s=result.iteration_s,
        spans=tuple(sorted(spans, key=lambda span: span.start_s)),
        memory=_memory(result.records["samples"]),
        stalls=tuple(
            Stall(start_s, end_s, CAUSES[cause], kernel)
            for start_s, end_s, cause, kernel in _rows(result.records["stalls"])
        ),
    )


def _rows(columns: Any) -> Any:
    return zip(*(column.tolist() for column in columns), strict=True)


def _span(
    trace: Trace, stream: int, kind: int, index: int, start_s: float, end_s: float, size_bytes: int
) -> Span:
    if stream > 0:
        label = f"tensor {index}"
    elif kind == START_COPIES:
        label = "start copies"
    elif kind in (COMPRESS, EXPAND):
        label = f"{'compress' if kind == COMPRESS else 'expand'} tensor {index}"
    else:
        label = f"recompute {trace.kernel_name[index]}" if kind == RECOMPUTATION else trace.kernel_name[index]
    return Span(STREAMS[stream], start_s, end_s, label, index, size_bytes)


def _memory(columns: Any) -> dict[str, tuple[Sample, ...]]:
    """By tier, the device first: bytes in use over time. Tiers that are never used have no samples."""
    memory: dict[str, list[Sample]] = {tier: [] for tier in TIERS}
    for tier, time_s, size_bytes in _rows(columns):
        memory[TIERS[tier]].append(Sample(time_s, size_bytes))
    return {
        tier: tuple(samples)
        for tier, samples in memory.items()
        if tier == "device" or any(sample.size_bytes for sample in samples)
    }
