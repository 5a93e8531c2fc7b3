"""How many device bytes each kernel needs: with some tensors away, and with all away that can be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from penstock.core.plan import Evict
from penstock.core.trace import IntArray, Trace


def required_bytes(trace: Trace) -> IntArray:
    """[K] device bytes each kernel cannot do without: its own tensors, those it does not use but
    that the program holds, and its workspace."""
    periods = ((period.tensor, period.begin, period.end) for period in trace.inactive_periods)
    return trace.live_bytes - _absent_bytes(trace, periods)


def minimum_bytes(trace: Trace) -> int:
    """The smallest device budget at which the step can run: moDNN's equation 7, for the batch at hand."""
    floor = 0 if trace.kernels else trace.persistent_bytes
    return int(required_bytes(trace).max(initial=floor))


def tightest_kernel(trace: Trace) -> int:
    """The first kernel that needs `minimum_bytes`. The trace has at least one kernel."""
    return int(required_bytes(trace).argmax())


def resident_bytes(trace: Trace, evictions: Iterable[Evict]) -> IntArray:
    """[K] device bytes during each kernel, if every copy took no time.

    An evicted tensor is away during kernels ``[begin, prefetch_at)``.
    """
    return trace.live_bytes - _absent_bytes(
        trace, ((evict.tensor, evict.begin, evict.prefetch_at) for evict in evictions)
    )


def tier_bytes(trace: Trace, evictions: Iterable[Evict]) -> dict[str, IntArray]:
    """By tier: [K] bytes occupied during each kernel.

    A copy occupies its tier from the first time it may start until the tensor dies.
    """
    first: dict[tuple[str, int], int] = {}
    for evict in evictions:
        key = (evict.tier, evict.tensor)
        first[key] = min(evict.after, first.get(key, evict.after))
    changes: dict[str, IntArray] = {}
    for (tier, tensor), after in first.items():
        change = changes.setdefault(tier, np.zeros(trace.kernels + 1, dtype=np.int64))
        change[after + 1] += trace.tensor_bytes[tensor]
        change[min(int(trace.tensor_death[tensor]), trace.kernels)] -= trace.tensor_bytes[tensor]
    return {tier: np.cumsum(change)[:-1] for tier, change in changes.items()}


def copy_sources(trace: Trace, evictions: Sequence[Evict]) -> list[int]:
    """For each eviction, the index of the one whose copy serves it.

    That is its own index where the tensor has to be written, and an earlier eviction's where
    that one left a copy on the same tier and no kernel has written the tensor since.
    """
    by_tensor: dict[int, list[int]] = {}
    for index, evict in enumerate(evictions):
        by_tensor.setdefault(evict.tensor, []).append(index)
    sources = list(range(len(evictions)))
    for tensor, indices in by_tensor.items():
        if len(indices) == 1:
            continue
        written = writes(trace, tensor)
        latest: dict[str, int] = {}
        for index in sorted(indices, key=lambda index: evictions[index].begin):
            evict = evictions[index]
            earlier = latest.get(evict.tier)
            if earlier is not None and not any(
                evictions[earlier].after < kernel < evict.begin for kernel in written
            ):
                sources[index] = sources[earlier]
            latest[evict.tier] = index
    return sources


def writes(trace: Trace, tensor: int) -> list[int]:
    """The kernels that write ``tensor``, ascending."""
    uses: list[int] = trace.uses[tensor].tolist()
    return [kernel for kernel in uses if tensor in trace.outputs[kernel].tolist()]


def _absent_bytes(trace: Trace, absences: Iterable[tuple[int, int, int]]) -> IntArray:
    """[K] bytes of the tensors that are away, given as (tensor, first kernel, kernel after the last)."""
    table = np.array(list(absences), dtype=np.int64).reshape(-1, 3)
    change = np.zeros(trace.kernels + 1, dtype=np.int64)
    size = trace.tensor_bytes[table[:, 0]]
    np.add.at(change, table[:, 1], size)
    np.subtract.at(change, table[:, 2], size)
    return np.cumsum(change)[:-1]
