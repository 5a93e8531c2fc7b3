"""Plans tried fast: one trace on one machine, and thousands of plans, carried out by `penstock._native`.

What a plan means is said in `penstock.simulator`. What it does with a tensor in an inactive period is an
action: one table, which the native module defines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock import _native
from penstock.core.columns import FloatArray, IntArray
from penstock.core.hardware import LINKS, Hardware
from penstock.core.memory_profile import kernels_as_run
from penstock.core.plan import CODECS, Evict, Plan, Recompute
from penstock.core.trace import Trace
from penstock.errors import InvalidArgument


class Action(NamedTuple):
    """tier and codec are those of an `Evict`; empty where nothing moves."""

    name: str
    tier: str
    codec: str


ACTIONS = tuple(Action(*row) for row in _native.plan_actions())
KEEP, HOST, DISK, HOST_CSR, DISK_CSR, RECOMPUTE = range(len(ACTIONS))
MOVES = {number: (action.tier, action.codec) for number, action in enumerate(ACTIONS) if action.tier}


def action_of(tier: str, codec: str) -> int | None:
    """The number of the action that sends a tensor there in this form; None where there is none."""
    form = "raw" if codec == "raw" else "csr"
    return next((number for number, move in MOVES.items() if move == (tier, form)), None)


CAUSES = ("", "prefetch", "memory")

ByteArray = npt.NDArray[np.int8]


@dataclass(frozen=True, slots=True, eq=False)
class Intervals:
    """The evictions and recomputations of a plan as columns: one row for each, in the order of the plan.

    tensor, after, begin, end, prefetch_at   [R] as in Evict; `after` and `prefetch_at` mean nothing to a
                                             recomputation
    action                                   [R] number in penstock.simulator.replay.ACTIONS; rows with
                                             KEEP are skipped
    """

    tensor: IntArray
    after: IntArray
    begin: IntArray
    end: IntArray
    prefetch_at: IntArray
    action: ByteArray

    def __len__(self) -> int:
        return len(self.tensor)

    @classmethod
    def of(cls, evictions: Sequence[Evict], recomputations: Sequence[Recompute] = ()) -> Intervals:
        """The rows of all evictions, then those of all recomputations."""
        rows = [(e.tensor, e.after, e.begin, e.end, e.prefetch_at) for e in evictions]
        rows += [(r.tensor, r.begin - 1, r.begin, r.end, r.end) for r in recomputations]
        table = np.array(rows, dtype=np.int64).reshape(-1, 5).T
        action = [_action(evict) for evict in evictions] + [RECOMPUTE] * len(recomputations)
        tensor, after, begin, end, prefetch_at = (np.ascontiguousarray(column) for column in table)
        return cls(tensor, after, begin, end, prefetch_at, np.array(action, dtype=np.int8))

    @classmethod
    def of_plan(cls, plan: Plan, gone: Iterable[Evict] = ()) -> Intervals:
        """The rows of a plan, and of what `leaves_for_good`."""
        return cls.of((*plan.evictions, *gone), plan.recomputations)


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """What one replay found.

    iteration_s       inf where it deadlocks
    stall_s           [K] wait before each kernel
    stall_cause       [K] index into CAUSES
    start_s           [K] when each kernel of the reported iteration starts, which begins at 0
    peak_bytes        the most device bytes in use at any moment of it
    tier_peak_bytes   the same by tier, of "host" and "disk"
    deadlock          no more memory could come free, and what was needed did not fit
    records           spans, stalls and samples as columns, where asked for
    """

    iteration_s: float
    stall_s: FloatArray
    stall_cause: ByteArray
    start_s: FloatArray
    peak_bytes: int
    tier_peak_bytes: dict[str, int]
    deadlock: bool
    records: dict[str, Any] = field(default_factory=dict)


class Replay:
    """A trace on a machine, on which plans are tried. Deterministic; may be used by several threads."""

    def __init__(self, trace: Trace, hardware: Hardware, budget_bytes: int) -> None:
        self.trace, self.hardware, self.budget_bytes = trace, hardware, budget_bytes
        self._native = _native.Replay(trace_columns(trace), machine_columns(trace, hardware, budget_bytes))

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
        columns = self._columns(intervals, variants)
        found = _checked(self._native.run, columns, record, stop_on_deadlock)
        device, host, disk = found["peak_bytes"]
        stopped = found["deadlock"] and stop_on_deadlock
        return Result(
            iteration_s=float("inf") if stopped else found["iteration_s"],
            stall_s=found["stall_s"],
            stall_cause=found["stall_cause"],
            start_s=found["start_s"],
            peak_bytes=device,
            tier_peak_bytes={"host": host, "disk": disk},
            deadlock=found["deadlock"],
            records={name: found[name] for name in ("spans", "stalls", "samples")} if record else {},
        )

    def static_bytes(self, intervals: Intervals, *, variants: Sequence[int] = ()) -> IntArray:
        """[K] device bytes at each kernel if every copy took no time: what the plan checker goes by."""
        found: IntArray = _checked(self._native.static_bytes, self._columns(intervals, variants))
        return found

    def tier_bytes(self, intervals: Intervals) -> dict[str, IntArray]:
        """[K] bytes that copies occupy during each kernel, on "host" and on "disk"."""
        host, disk = _checked(self._native.tier_bytes, self._columns(intervals))
        return {"host": host, "disk": disk}

    @cached_property
    def _unreachable(self) -> dict[int, str]:
        """By action: why the machine cannot carry it out."""
        reasons = {}
        for action, (tier, _) in MOVES.items():
            try:
                self.hardware.evict_s(tier, 1)
                self.hardware.prefetch_s(tier, 1)
            except InvalidArgument as error:
                reasons[action] = str(error)
        return reasons

    def _columns(
        self,
        intervals: Intervals,
        variants: Sequence[int] = (),
    ) -> tuple[Any, ...]:
        for action, reason in self._unreachable.items():
            if (intervals.action == action).any():
                raise InvalidArgument(reason)
        kernels, table = self.trace.kernels, self.trace.kernel_variants
        if len(variants) not in (0, kernels):
            raise InvalidArgument(
                f"the plan has variants of {len(variants)} kernels; the trace has {kernels} kernels. "
                "Make the plan from the same trace"
            )
        for kernel in np.flatnonzero(np.asarray(variants) >= 0).tolist():
            if variants[kernel] >= (count := len(table[kernel]) if table else 0):
                raise InvalidArgument(
                    f"the plan runs variant {variants[kernel]} of kernel {kernel}, which has {count}: "
                    "make the plan from the same trace"
                )
        times, workspaces = kernels_as_run(self.trace, variants)
        return (
            intervals.tensor,
            intervals.after,
            intervals.begin,
            intervals.end,
            intervals.prefetch_at,
            intervals.action,
            np.ascontiguousarray(times, dtype=np.float64),
            _column(workspaces),
        )


def _checked(call: Any, *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except ValueError as error:
        raise InvalidArgument(
            f"the plan is not one for this trace: {error}. Make the plan from the same trace"
        ) from None


def _action(evict: Evict) -> int:
    action = action_of(evict.tier, evict.codec)
    if action is None or evict.codec not in CODECS:
        raise InvalidArgument(
            f"tensor {evict.tensor} goes to the tier {evict.tier!r} with the codec {evict.codec!r}: "
            f"tiers are host and disk, codecs {', '.join(CODECS)}"
        )
    return action


def _column(values: npt.NDArray[Any]) -> IntArray:
    return np.ascontiguousarray(values, dtype=np.int64)


def trace_columns(trace: Trace) -> dict[str, Any]:
    """What `penstock._native` wants to know of a trace."""
    recompute, count = trace.tensor_recompute, trace.kernels
    return {
        "kernels": count,
        "bytes": _column(trace.tensor_bytes),
        "compressed": _column(trace.packed_bytes),
        "birth": _column(np.clip(trace.tensor_birth, 0, count)),
        "death": _column(np.clip(trace.tensor_death, 0, count)),
        "persistent": trace.tensor_persistent.astype(np.uint8),
        "producer": _column(recompute if len(recompute) else np.full(trace.tensors, -1)),
        "outputs": (_column(trace.outputs.starts), _column(trace.outputs.values)),
        "writers": (_column(trace.writers.starts), _column(trace.writers.values)),
    }


def coding_times_s(trace: Trace, hardware: Hardware) -> tuple[FloatArray, FloatArray]:
    """[T] seconds to compress each tensor, and [T] to expand it, in its codec."""
    rates = [np.full(trace.tensors, rate) for rate in hardware.codec_rates("csr")]
    if trace.lossy and trace.tensor_stashed.any():
        for column, rate in zip(rates, hardware.codec_rates(trace.lossy), strict=True):
            column[trace.tensor_stashed] = rate
    return trace.tensor_bytes / rates[0], trace.tensor_bytes / rates[1]


def machine_columns(trace: Trace, hardware: Hardware, budget_bytes: int) -> dict[str, Any]:
    """What `penstock._native` wants to know of a machine that moves the tensors of ``trace``."""
    sizes = (trace.tensor_bytes, trace.packed_bytes)
    coding_s = coding_times_s(trace, hardware)
    return {
        "budget": budget_bytes,
        "shares_bus": hardware.disk_shares_bus,
        "duplex": float(hardware.duplex),
        "compress_s": coding_s[0],
        "expand_s": coding_s[1],
        "copy_overhead_s": float(hardware.copy_overhead_s),
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
