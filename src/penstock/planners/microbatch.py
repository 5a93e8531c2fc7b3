"""How large a micro-batch should be (moDNN section 5.1): a batch in parts, gradients accumulated.

moDNN decides without predictions: the largest size at which a share of consecutive kernels fits at once
(equation 8). Sizes from half of that up to the largest that can run at all (equation 7) are planned, and the
prediction decides.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from penstock.core.hardware import Hardware
from penstock.core.memory_profile import minimum_bytes
from penstock.core.trace import Trace
from penstock.errors import BudgetTooSmall, InvalidArgument, SpillSpaceFull
from penstock.planners import plan
from penstock.planners.problem import algorithms
from penstock.units import format_bytes, format_bytes_up

SHARE = 0.15  # of all kernels: moDNN's alpha
GRANULE = 64  # larger micro-batches are multiples of it, smaller ones powers of two


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeResult:
    """One size of the micro-batch, and what it comes to.

    size, count           samples of a part, and parts of the batch
    least_bytes           the smallest device budget at which this size can run
    working_set_bytes     equation 8
    predicted_s           for all of the batch; 0 where there is no plan
    peak_bytes            that the plan needs on the device
    reason                why there is no plan; empty where there is one
    """

    size: int
    count: int
    least_bytes: int
    working_set_bytes: int
    predicted_s: float = 0.0
    peak_bytes: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The fastest way to divide a batch.

    size, count        samples of a part, and parts of the batch; the last one may be smaller
    predicted_s        for all of the batch, without the optimizer
    working_set_size   what moDNN's equation 8 alone would choose: the largest size whose working set is
                       within the budget, 1 where none is
    table              every size that was considered, ascending
    """

    size: int
    count: int
    predicted_s: float
    working_set_size: int
    table: tuple[SizeResult, ...]


def choose_micro_batch(
    trace_of: Callable[[int], Trace],
    hardware: Hardware,
    batch: int,
    budget_bytes: int,
    policy: str = "optimal",
    *,
    recompute: bool = True,
    compress: bool = True,
    lossy: str | None = None,
    time_limit_s: float = 10.0,
) -> MicroBatch:
    """The size of the micro-batch with the least predicted time.

    trace_of       forward and backward of one part of so many samples, adding to gradients that are there
                   already where it is not all of the batch. It is asked for few sizes. Sizes for which
                   it raises InvalidArgument are left out
    batch          samples
    budget_bytes   of the device
    policy, recompute, compress, lossy   what plans may do, as in `penstock.plan`
    time_limit_s   for planning, all sizes together

    Raises InvalidArgument where the batch has no samples or no size can be traced, BudgetTooSmall where not
    even one sample fits, and SpillSpaceFull where no size that fits finds room for what has to leave.
    """
    if batch < 1:
        raise InvalidArgument(f"the batch has {batch} samples: give 1 or more")
    known: dict[int, Trace | InvalidArgument] = {}

    def traced(size: int) -> Trace | None:
        if size not in known:
            try:
                known[size] = trace_of(size)
            except InvalidArgument as error:
                known[size] = error
        found = known[size]
        return None if isinstance(found, InvalidArgument) else found

    def is_above(measure: Callable[[Trace], int]) -> Callable[[int], bool]:
        """Whether a size is above the budget; what cannot be traced is too small."""
        return lambda size: (trace := traced(size)) is not None and measure(trace) > budget_bytes

    sizes = rounded_sizes(batch)
    runs = bisect_left(sizes, True, key=is_above(minimum_bytes))
    if not runs:
        needed = minimum_bytes(trace_of(1))
        raise BudgetTooSmall(
            f"even one sample at a time needs {format_bytes_up(needed)}; the device budget is "
            f"{format_bytes(budget_bytes)}. No plan can help: raise the budget to {format_bytes_up(needed)}",
            needed,
        )
    fits = bisect_left(sizes, True, key=is_above(working_set_bytes))
    within, largest = sizes[max(fits - 1, 0)], sizes[runs - 1]
    powers = (size for size in sizes[:runs] if size & (size - 1) == 0)
    # Of the sizes that make as many parts, the smallest.
    smallest = (math.ceil(batch / math.ceil(batch / size)) for size in (within, largest, *powers))
    wanted = {sizes[bisect_left(sizes, size)] for size in smallest}
    table: list[SizeResult] = []
    last_error: Exception | None = None
    for size in sorted(wanted, reverse=True):
        if 2 * size < within and any(not row.reason for row in table):
            break
        if (trace := traced(size)) is None:
            continue
        row = SizeResult(
            size=size,
            count=math.ceil(batch / size),
            least_bytes=minimum_bytes(trace),
            working_set_bytes=working_set_bytes(trace),
        )
        limit_s = time_limit_s / len(wanted)
        try:
            made = plan(
                *(trace, hardware, policy, recompute, compress, limit_s),
                device_budget=budget_bytes,
                lossy=lossy,
            )
        except (BudgetTooSmall, SpillSpaceFull, InvalidArgument) as error:
            last_error = error
            table.append(replace(row, reason=str(error)))
            continue
        predicted_s = batch / size * made.predicted_step_s
        table.append(replace(row, predicted_s=predicted_s, peak_bytes=made.predicted_peak_bytes))
    planned = [row for row in table if not row.reason]
    if not planned:
        errors = (error for error in known.values() if isinstance(error, InvalidArgument))
        raise last_error or next(errors)
    best = min(planned, key=lambda row: (row.predicted_s, row.count))
    return MicroBatch(
        size=best.size,
        count=best.count,
        predicted_s=best.predicted_s,
        working_set_size=within,
        table=tuple(reversed(table)),
    )


def rounded_sizes(batch: int) -> list[int]:
    """The sizes that a part of so many samples may have, ascending: powers of two up to 64, multiples of 64
    above (section 5.1.2), and all of the batch."""
    powers = (1 << power for power in range(GRANULE.bit_length()))
    return sorted({size for size in (*powers, *range(GRANULE, batch, GRANULE)) if size < batch} | {batch})


def working_set_bytes(trace: Trace, share: float = SHARE) -> int:
    """moDNN's equation 8: the most bytes that any ``share`` of all kernels, one after the other, use.

    Each tensor counts once, the largest workspace of the fastest algorithms once, and what is persistent
    always.
    """
    count = trace.kernels
    if count == 0:
        return trace.persistent_bytes
    width = min(max(math.ceil(share * count), 1), count)
    change = np.zeros(count + 1, dtype=np.int64)  # by the first kernel of a window
    for tensor in np.flatnonzero(~trace.tensor_persistent & (trace.tensor_bytes > 0)).tolist():
        covered = 0
        for use in trace.uses[tensor].tolist():
            since = max(use - width + 1, covered)
            if since <= use:
                change[since] += trace.tensor_bytes[tensor]
                change[use + 1] -= trace.tensor_bytes[tensor]
            covered = use + 1
    in_window = np.cumsum(change)[: count - width + 1]
    workspace = np.array([algorithms(trace, kernel)[0].workspace_bytes for kernel in range(count)])
    largest = np.lib.stride_tricks.sliding_window_view(workspace, width).max(axis=1)
    return trace.persistent_bytes + int((in_window + largest).max())
