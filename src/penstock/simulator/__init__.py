"""Simulates a plan event by event, as the runtime would carry it out. The simulator is C++ (csrc/planning);
this module converts plans, traces and machines to its columns.

Assumptions, each of which costs some accuracy:

- Kernels take the time the trace states.
- A link carries one copy at a time. Writes start in the order they were issued; so do reads, demands
  first. A latency passes before the bytes flow. Rates change while copies run: where the disk shares
  the bus, its copy has its own rate, but at most half of the bus while a host copy goes in the same
  direction, which has the rest; and a disk copy has its rate times ``hardware.duplex`` while the disk
  works in the other direction.
- Prefetches get memory in the order they were issued: one that does not fit holds up those behind it.
- Before a kernel the compute stream compresses what leaves compressed, waits for what is due, expands
  it, and recomputes what was released, in this order.
- What kernels lose to copies, ``hardware.overhead_s`` of each, is the compute stream's right after they are
  issued: writes behind the kernel that they follow, prefetches before the kernel that issues them.
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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock import _native
from penstock.core.arguments import require_types
from penstock.core.columns import FloatArray, IntArray
from penstock.core.hardware import LINKS, TIERS, Hardware
from penstock.core.memory_profile import as_run, kernels_as_run
from penstock.core.plan import CODECS, Evict, Plan, Recompute
from penstock.core.timeline import MemorySample, Span, Stall, Timeline
from penstock.core.trace import Trace, within_budget
from penstock.errors import InvalidArgument

STREAMS = ("compute", *LINKS)
RUN, COMPRESS, EXPAND, RECOMPUTATION, START_COPIES = range(5)  # what the compute stream does
CAUSES = ("", "prefetch", "memory")


# What a plan does with a tensor in an inactive period, by number. The native module has the table of names,
# tiers and codecs; the last two are empty where nothing moves.
ACTIONS = tuple(_native.plan_actions())
KEEP, HOST, DISK, HOST_CSR, DISK_CSR, RECOMPUTE = range(len(ACTIONS))
MOVES = {number: (tier, codec) for number, (_, tier, codec) in enumerate(ACTIONS) if tier}


def action_of(evict: Evict) -> int:
    """The number of the action. Raises InvalidArgument where there is no such tier or codec."""
    move = (evict.tier, "raw" if evict.codec == "raw" else "csr")
    found = next((number for number, known in MOVES.items() if known == move), None)
    if found is None or evict.codec not in CODECS:
        raise InvalidArgument(
            f"tensor {evict.tensor} goes to the tier {evict.tier!r} with the codec {evict.codec!r}: "
            f"tiers are host and disk, codecs {', '.join(CODECS)}"
        )
    return found


def simulate(trace: Trace, plan: Plan, hardware: Hardware) -> Timeline:
    """The timeline of ``plan``. Deterministic.

    A plan that exceeds its budget is simulated all the same; the peak shows it. Under a budget
    that does not hold everything, what no kernel reads again while the program keeps it leaves where there is
    no room for it (see `penstock.core.memory_profile.leaves_for_good`).
    """
    require_types(trace=trace, plan=plan, hardware=hardware)
    _require_its_trace(trace, plan)
    if hardware.disk_bytes > 0 or hardware.host_bytes > 0:
        trace, gone = as_run(trace, plan, hardware.host_bytes, has_disk=hardware.disk_bytes > 0)
    else:  # only recomputing frees memory
        trace, gone = within_budget(trace, plan.device_budget_bytes, plan.lossy), []
    intervals = Intervals.of((*plan.evictions, *gone), plan.recomputations)
    result = Replay(trace, hardware, plan.device_budget_bytes).run(
        intervals, record=True, variants=plan.variants, stop_on_deadlock=False
    )
    spans = [_span(trace, *row) for row in _rows(result.records["spans"])]
    return Timeline(
        step_s=result.step_s,
        spans=tuple(sorted(spans, key=lambda span: span.start_s)),
        memory=_memory(result.records["samples"]),
        stalls=tuple(
            Stall(start_s, end_s, CAUSES[cause], kernel)
            for start_s, end_s, cause, kernel in _rows(result.records["stalls"])
        ),
    )


def _require_its_trace(trace: Trace, plan: Plan) -> None:
    """Raises InvalidArgument where the plan names tensors or variants that the trace lacks."""
    named = [each.tensor for each in plan.evictions] + [each.tensor for each in plan.recomputations]
    for tensor in named:
        if not 0 <= tensor < trace.tensors:
            raise _of_another_trace(f"it moves tensor {tensor} of {trace.tensors}")
    if plan.recomputations and not len(trace.tensor_recompute):
        raise _of_another_trace("it recomputes tensors that no kernel can recompute")
    variants = plan.variants
    if len(variants) not in (0, trace.kernels):
        raise _of_another_trace(f"it has variants of {len(variants)} kernels, of {trace.kernels}")
    for kernel in np.flatnonzero(np.asarray(variants) >= 0).tolist():
        count = len(trace.kernel_variants[kernel]) if trace.kernel_variants else 0
        if variants[kernel] >= count:
            raise _of_another_trace(
                f"it runs variant {variants[kernel]} of kernel {kernel}, which has {count}"
            )


def _of_another_trace(why: object) -> InvalidArgument:
    return InvalidArgument(f"the plan is not one for this trace: {why}. Make the plan from the same trace")


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


def _memory(columns: Any) -> dict[str, tuple[MemorySample, ...]]:
    """By tier, the device first: bytes in use over time. Tiers that are never used have no samples."""
    memory: dict[str, list[MemorySample]] = {tier: [] for tier in TIERS}
    for tier, time_s, size_bytes in _rows(columns):
        memory[TIERS[tier]].append(MemorySample(time_s, size_bytes))
    return {
        tier: tuple(samples)
        for tier, samples in memory.items()
        if tier == "device" or any(sample.size_bytes for sample in samples)
    }


# -- what the native module reads ------------------------------------------------------------------


class Intervals(NamedTuple):
    """The evictions and recomputations of a plan as columns, [R] each: all evictions, in the order of the
    plan, then all recomputations, to which `after` and `prefetch_at` mean nothing.

    action   number in ACTIONS; rows with KEEP are skipped
    """

    tensor: IntArray
    after: IntArray
    begin: IntArray
    end: IntArray
    prefetch_at: IntArray
    action: npt.NDArray[np.int8]

    @classmethod
    def of(cls, evictions: Sequence[Evict], recomputations: Sequence[Recompute] = ()) -> Intervals:
        rows = [(e.tensor, e.after, e.begin, e.end, e.prefetch_at) for e in evictions]
        rows += [(r.tensor, r.begin - 1, r.begin, r.end, r.end) for r in recomputations]
        columns = np.array(rows, dtype=np.int64).reshape(-1, 5).T
        action = [action_of(evict) for evict in evictions] + [RECOMPUTE] * len(recomputations)
        tensor, after, begin, end, prefetch_at = map(integers, columns)
        return cls(tensor, after, begin, end, prefetch_at, np.array(action, dtype=np.int8))


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """What one replay found.

    step_s            inf where it stopped at a deadlock
    start_s           [K] when each kernel of the reported iteration starts, which begins at 0
    peak_bytes        the most device bytes in use at any moment of it
    tier_peak_bytes   the same by tier, of "host" and "disk"
    deadlock          no more memory could come free, and what was needed did not fit
    records           spans, stalls and samples as columns, where asked for
    """

    step_s: float
    start_s: FloatArray
    peak_bytes: int
    tier_peak_bytes: dict[str, int]
    deadlock: bool
    records: dict[str, Any]


class Replay:
    """A trace on a machine, for many simulations. Deterministic, and thread-safe."""

    def __init__(self, trace: Trace, hardware: Hardware, budget_bytes: int) -> None:
        self.trace, self.hardware = trace, hardware
        self.native = _native.Replay(trace_columns(trace), machine_columns(trace, hardware, budget_bytes))

    def run(
        self,
        intervals: Intervals,
        record: bool = False,
        *,
        variants: Sequence[int] = (),
        stop_on_deadlock: bool = True,
    ) -> Result:
        """Carry out a plan.

        record             keep every span, stall and change of memory
        variants           as in Plan
        stop_on_deadlock   without, what is needed takes memory above the budget, and the peak shows it
        """
        try:
            found = self.native.run(self.columns(intervals, variants), record, stop_on_deadlock)
        except ValueError as error:
            raise _of_another_trace(error) from None
        device, host, disk = found["peak_bytes"]
        stopped = found["deadlock"] and stop_on_deadlock
        return Result(
            step_s=float("inf") if stopped else found["iteration_s"],
            start_s=found["start_s"],
            peak_bytes=device,
            tier_peak_bytes={"host": host, "disk": disk},
            deadlock=found["deadlock"],
            records={name: found[name] for name in ("spans", "stalls", "samples")} if record else {},
        )

    def columns(self, intervals: Intervals, variants: Sequence[int] = ()) -> tuple[Any, ...]:
        """The columns of a plan. Raises InvalidArgument where the machine lacks a tier of it."""
        for tier in {MOVES[action][0] for action in np.unique(intervals.action).tolist() if action in MOVES}:
            self.hardware.evict_s(tier, 1)
            self.hardware.prefetch_s(tier, 1)
        times, workspaces = kernels_as_run(self.trace, variants)
        return (*intervals, np.ascontiguousarray(times, dtype=np.float64), integers(workspaces))


def integers(values: npt.NDArray[Any]) -> IntArray:
    """int64 and contiguous, as the native module takes them."""
    return np.ascontiguousarray(values, dtype=np.int64)


def trace_columns(trace: Trace) -> dict[str, Any]:
    """The columns of a trace that `penstock._native` takes."""
    recompute, count = trace.tensor_recompute, trace.kernels
    return {
        "kernels": count,
        "bytes": integers(trace.tensor_bytes),
        "compressed": integers(trace.packed_bytes),
        "birth": integers(np.clip(trace.tensor_birth, 0, count)),
        "death": integers(np.clip(trace.tensor_death, 0, count)),
        "persistent": trace.tensor_persistent.astype(np.uint8),
        "producer": integers(recompute if len(recompute) else np.full(trace.tensors, -1)),
        "outputs": (integers(trace.outputs.starts), integers(trace.outputs.values)),
        "writers": (integers(trace.writers.starts), integers(trace.writers.values)),
    }


def coding_times_s(trace: Trace, hardware: Hardware) -> tuple[FloatArray, FloatArray]:
    """[T] seconds to compress each tensor, and [T] to expand it, in its codec."""
    rates = [np.full(trace.tensors, rate) for rate in hardware.codec_rates("csr")]
    if trace.lossy and trace.tensor_stashed.any():
        for column, rate in zip(rates, hardware.codec_rates(trace.lossy), strict=True):
            column[trace.tensor_stashed] = rate
    return trace.tensor_bytes / rates[0], trace.tensor_bytes / rates[1]


def machine_columns(trace: Trace, hardware: Hardware, budget_bytes: int) -> dict[str, Any]:
    """The columns of a machine that `penstock._native` takes, for the tensors of ``trace``."""
    sizes = (trace.tensor_bytes, trace.packed_bytes)
    coding_s = coding_times_s(trace, hardware)
    return {
        "budget": budget_bytes,
        "shares_bus": hardware.disk_shares_bus,
        "duplex": float(hardware.duplex),
        "compress_s": coding_s[0],
        "expand_s": coding_s[1],
        "copy_overhead_s": float(hardware.copy_overhead_s),
        "byte_overhead_s": float(hardware.byte_overhead_s),
        "links": [
            (
                0.0 if link in hardware.measured_rates else float(getattr(hardware, f"{link}_latency_s")),
                *(_rates(hardware, link, size) for size in sizes),
            )
            for link in LINKS
        ],
    }


def _rates(hardware: Hardware, link: str, size_bytes: IntArray) -> FloatArray:
    """Bytes per second of each size alone on `link`, latency apart; 0 where there is no such link."""
    if link not in hardware.measured_rates:
        return np.full(len(size_bytes), hardware.rate_bytes_per_s(link))
    sizes, which = np.unique(size_bytes, return_inverse=True)
    rates = [size / hardware.transfer_s(link, size) if size else 1.0 for size in sizes.tolist()]
    return np.array(rates, dtype=np.float64)[which]
