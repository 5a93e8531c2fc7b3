"""How large a micro-batch should be (moDNN section 5.1): a batch in equal parts, gradients accumulated.

Traces of the same step at several sizes are planned one by one, and predictions decide. moDNN decides
without predictions: the largest size at which a share of consecutive kernels fits at once (equation 8).
Both answers stand in the table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.core.columns import KINDS, PHASES, IntArray
from penstock.core.hardware import Hardware
from penstock.core.memory_profile import kernels_as_run, minimum_bytes
from penstock.core.plan import Plan
from penstock.core.trace import Trace
from penstock.errors import BudgetTooSmall, InvalidArgument, SpillSpaceFull
from penstock.planners import plan
from penstock.planners.variants import algorithms
from penstock.units import format_bytes, format_bytes_up

SHARE = 0.15  # of all kernels: moDNN's alpha


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One size of the micro-batch, and what it comes to.

    size, count           samples of a part, and parts of the batch
    interpolated          no trace of this size was given: bytes and times are linear between two that were
    least_bytes           the smallest device budget at which this size can run
    working_set_bytes     equation 8
    predicted_s           for all of the batch; 0 where there is no plan
    peak_bytes            that the plan needs on the device
    reason                why there is no plan; empty where there is one
    """

    size: int
    count: int
    interpolated: bool
    least_bytes: int
    working_set_bytes: int
    predicted_s: float = 0.0
    peak_bytes: int = 0
    reason: str = ""

    @property
    def s_per_sample(self) -> float:
        return self.predicted_s / (self.size * self.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The fastest way to divide a batch.

    size, count            samples of a part, and parts of the batch
    plan                   of one part
    predicted_s_per_sample   over all of the batch
    working_set_size       what moDNN's equation 8 would choose: the largest size whose working set is
                           within the budget, the smallest of all where none is
    table                  every size that was considered, ascending
    warnings               what the division changes, in sentences
    """

    size: int
    count: int
    plan: Plan
    predicted_s_per_sample: float
    working_set_size: int
    table: tuple[Candidate, ...]
    warnings: tuple[str, ...] = ()


def choose_micro_batch(
    traces: Mapping[int, Trace],
    hardware: Hardware,
    batch: int,
    budget_bytes: int,
    policy: str = "optimal",
    *,
    sizes: Sequence[int] | None = None,
) -> MicroBatch:
    """The size of the micro-batch with the least predicted time per sample.

    A part runs forward and backward; the optimizer runs once for the batch. Where there is more than one
    part, gradients stay on the device from part to part (see `accumulating`). Adding them up is not
    charged: kernels write into the gradient that is there. Parts are equal, so that their gradients'
    mean is that of the batch: sizes that do not divide the batch are refused.

    traces         one iteration each, by batch size
    budget_bytes   of the device
    policy         name in penstock.planners.POLICIES
    sizes          the sizes to consider: those of the traces where not given. Sizes in between are
                   interpolated (see `interpolated`)

    Raises InvalidArgument where no size can be considered, BudgetTooSmall where none fits, and
    SpillSpaceFull where none that fits finds room for what has to leave.
    """
    if batch < 1:
        raise InvalidArgument(f"the batch has {batch} samples: give 1 or more")
    asked = sorted(set(traces if sizes is None else sizes))
    usable = [size for size in asked if 0 < size <= batch and batch % size == 0]
    if not traces or not usable:
        raise InvalidArgument(
            f"none of the sizes {', '.join(map(str, asked)) or '(none)'} divides the batch of {batch}: "
            "give traces of parts into which it can be divided equally"
        )
    table: list[Candidate] = []
    plans: dict[int, Plan] = {}
    last_error: Exception | None = None
    for size in usable:
        whole = traces[size] if size in traces else interpolated(traces, size)
        count = batch // size
        part = accumulating(whole) if count > 1 else whole
        row = Candidate(
            size=size,
            count=count,
            interpolated=size not in traces,
            least_bytes=minimum_bytes(part),
            working_set_bytes=working_set_bytes(part),
        )
        try:
            made = plan(part, hardware, policy, device_budget_bytes=budget_bytes)
        except (BudgetTooSmall, SpillSpaceFull, InvalidArgument) as error:
            last_error = error
            table.append(replace(row, reason=str(error)))
            continue
        predicted_s = count * made.predicted_s - (count - 1) * _optimizer_s(part, made)
        table.append(replace(row, predicted_s=predicted_s, peak_bytes=made.predicted_peak_bytes))
        plans[size] = made
    if not plans:
        assert last_error is not None
        smallest = table[0]
        if smallest.least_bytes > budget_bytes:
            raise BudgetTooSmall(
                f"even parts of {smallest.size} need {format_bytes_up(smallest.least_bytes)}; the device "
                f"budget is {format_bytes(budget_bytes)}. Give traces of smaller parts, or raise the budget",
                smallest.least_bytes,
            )
        raise last_error

    best = min((row for row in table if row.size in plans), key=lambda row: (row.s_per_sample, row.count))
    within = [row.size for row in table if row.working_set_bytes <= budget_bytes]
    return MicroBatch(
        size=best.size,
        count=best.count,
        plan=plans[best.size],
        predicted_s_per_sample=best.s_per_sample,
        working_set_size=max(within, default=usable[0]),
        table=tuple(table),
        warnings=tuple(_warnings(traces[min(traces)], best, batch)),
    )


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


def accumulating(trace: Trace) -> Trace:
    """The same iteration as one of several parts of a batch: gradients that the optimizer reads, or that
    are left at the end where there is no optimizer, are there before it and after it."""
    optimizer = np.flatnonzero(trace.kernel_phase == PHASES.index("optimizer"))
    read = [trace.inputs[kernel] for kernel in optimizer.tolist()]
    kept = np.unique(np.concatenate(read)) if read else np.flatnonzero(trace.tensor_death == trace.kernels)
    kept = kept[(trace.tensor_kind[kept] == KINDS.index("gradient")) & ~trace.tensor_persistent[kept]]
    if not len(kept):
        return trace
    persistent, birth = trace.tensor_persistent.copy(), trace.tensor_birth.copy()
    death = trace.tensor_death.copy()
    persistent[kept], birth[kept], death[kept] = True, 0, trace.kernels
    return replace(trace, tensor_persistent=persistent, tensor_birth=birth, tensor_death=death)


def interpolated(traces: Mapping[int, Trace], size: int) -> Trace:
    """A trace of a size that was not traced: bytes and times are linear between its neighbours'.

    Exact for bytes where tensors grow with the batch. Times are an estimate: kernels have steps, and small
    ones a fixed cost. Raises InvalidArgument where the size is not between two traces, or where these
    run different kernels.
    """
    below = max((other for other in traces if other <= size), default=None)
    above = min((other for other in traces if other >= size), default=None)
    if below is None or above is None:
        known = ", ".join(map(str, sorted(traces))) or "(none)"
        raise InvalidArgument(f"a micro-batch of {size} is not between sizes that were traced: {known}")
    low, high = traces[below], traces[above]
    if below == above:
        return low
    if not _alike(low, high):
        raise InvalidArgument(
            f"the traces of {below} and {above} run different kernels: trace the size {size} instead"
        )
    weight = (size - below) / (above - below)

    def bytes_between(first: IntArray, second: IntArray) -> IntArray:
        return np.ceil(first + weight * (second - first)).astype(np.int64)

    variants = tuple(
        tuple(
            one._replace(
                time_s=one.time_s + weight * (other.time_s - one.time_s),
                workspace_bytes=math.ceil(
                    one.workspace_bytes + weight * (other.workspace_bytes - one.workspace_bytes)
                ),
            )
            for one, other in zip(first, second, strict=True)
        )
        for first, second in zip(low.kernel_variants, high.kernel_variants, strict=True)
    )
    return replace(
        low,
        kernel_time_s=low.kernel_time_s + weight * (high.kernel_time_s - low.kernel_time_s),
        kernel_workspace_bytes=bytes_between(low.kernel_workspace_bytes, high.kernel_workspace_bytes),
        tensor_bytes=bytes_between(low.tensor_bytes, high.tensor_bytes),
        kernel_variants=variants,
        measured=False,
        notes={**low.notes, "interpolated": f"batch {size}, linear between {below} and {above}"},
    )


def _alike(low: Trace, high: Trace) -> bool:
    """Both run the same kernels on the same tensors."""
    columns = (
        "kernel_phase",
        "tensor_kind",
        "tensor_persistent",
        "tensor_birth",
        "tensor_death",
        "movable",
    )
    variants = [[len(entry) for entry in trace.kernel_variants] for trace in (low, high)]
    return (
        low.kernel_name == high.kernel_name
        and variants[0] == variants[1]
        and all(np.array_equal(getattr(low, name), getattr(high, name)) for name in columns)
        and all(
            np.array_equal(one.starts, other.starts) and np.array_equal(one.values, other.values)
            for one, other in ((low.inputs, high.inputs), (low.outputs, high.outputs))
        )
    )


def _optimizer_s(trace: Trace, plan: Plan) -> float:
    """Seconds of the optimizer's kernels: what all parts but one do without."""
    time_s, _ = kernels_as_run(trace, plan.variants)
    return float(time_s[trace.kernel_phase == PHASES.index("optimizer")].sum())


def _warnings(trace: Trace, best: Candidate, batch: int) -> list[str]:
    found = []
    names = sorted({name for name in trace.kernel_name if "batchnorm" in name.lower().replace("_", "")})
    if best.count > 1 and names:
        found.append(
            f"the step normalizes over the batch (`{names[0]}`): parts of {best.size} have statistics of "
            f"{best.size} samples, not of {batch}, so that the result differs. Accumulating gradients "
            "changes nothing else"
        )
    if best.interpolated:
        found.append(
            f"no trace of {best.size} samples was given: bytes and times are linear between two that were. "
            f"Trace a micro-batch of {best.size} before you rely on the plan"
        )
    return found
