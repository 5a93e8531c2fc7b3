"""When each tensor of a plan holds its place on the device: what an address has to be kept free for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.core.columns import IntArray, sum_over
from penstock.core.memory_profile import kernels_as_run
from penstock.core.plan import Plan
from penstock.core.trace import Trace

Span = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Occupancy:
    """N blocks of device memory, and the moments at which each is in use.

    Blocks 0 to T - 1 are the trace's tensors, the next K the kernels' workspaces. Then come those that
    compression and recomputation hold for a moment. A moment is a kernel, or one of the steps that run
    before it: compressing, expanding, recomputing a tensor.

    size_bytes          [N] 0 for a block that does not exist
    tensor              [N] which tensor a block is, -1 for all others
    block, start, end   [R] block `block` is in use during moments ``[start, end)``; a tensor that leaves
                        and comes back has several rows. Sorted by block, then by start
    moments             how many there are
    """

    size_bytes: IntArray
    tensor: IntArray
    block: IntArray
    start: IntArray
    end: IntArray
    moments: int

    @property
    def in_use(self) -> IntArray:
        """[moments] bytes in use."""
        return sum_over(self.moments, self.start, self.end, self.size_bytes[self.block])

    @property
    def peak_bytes(self) -> int:
        """The most bytes in use at any moment: no addresses can do with less."""
        return int(self.in_use.max(initial=0))

    @property
    def held(self) -> IntArray:
        """[N] for how many moments each block is in use."""
        total = np.zeros(len(self.size_bytes), dtype=np.int64)
        np.add.at(total, self.block, self.end - self.start)
        return total


def occupancy(trace: Trace, plan: Plan) -> Occupancy:
    """What ``plan`` keeps on the device, if every copy took no time.

    An evicted tensor is away during kernels ``[begin, prefetch_at)``, one that is recomputed during
    ``[begin, end)``. A tensor that leaves compressed is on the device until it has been compressed, and
    again from its expansion on; the compressed bytes are a block of their own.
    """
    return _Moments(trace, plan).occupancy()


class _Moments:
    """The moments of one plan: kernel k is moment ``main[k]``, its steps are ``[first[k], main[k])``."""

    def __init__(self, trace: Trace, plan: Plan) -> None:
        self.trace, self.plan = trace, plan
        self.workspaces: list[int] = kernels_as_run(trace, plan.variants)[1].tolist()
        count = trace.kernels
        steps: list[list[tuple[str, int]]] = [[] for _ in range(count)]
        for index, evict in enumerate(plan.evictions):
            if evict.codec != "raw":
                steps[evict.begin % count].append(("compress", index))
        for index, evict in enumerate(plan.evictions):
            if evict.codec != "raw":
                steps[evict.end % count].append(("expand", index))
        for index, recompute in enumerate(plan.recomputations):
            steps[recompute.end % count].append(("recompute", index))
        lengths = np.array([len(entry) + 1 for entry in steps], dtype=np.int64)
        self.first: list[int] = np.concatenate([[0], np.cumsum(lengths)]).tolist()
        self.main: list[int] = [following - 1 for following in self.first[1:]]
        self.total: int = self.first[-1]
        self.moment: dict[tuple[str, int], int] = {
            step: self.first[kernel] + place
            for kernel, entry in enumerate(steps)
            for place, step in enumerate(entry)
        }

    def occupancy(self) -> Occupancy:
        trace = self.trace
        sizes = [*trace.tensor_bytes.tolist(), *self.workspaces]
        rows: list[tuple[int, int, int]] = []
        spans = self._tensors()
        for tensor, held in enumerate(spans):
            rows += [(tensor, since, until) for since, until in held]
        for kernel, moment in enumerate(self.main):
            rows.append((trace.tensors + kernel, moment, moment + 1))
        for size, held in self._passing(spans):
            rows += [(len(sizes), since, until) for since, until in held]
            sizes.append(size)
        table = np.array(rows, dtype=np.int64).reshape(-1, 3)
        size_bytes = np.array(sizes, dtype=np.int64)
        table = table[(size_bytes[table[:, 0]] > 0) & (table[:, 2] > table[:, 1])]
        table = table[np.lexsort((table[:, 1], table[:, 0]))]
        numbers = np.arange(len(sizes), dtype=np.int64)
        numbers[trace.tensors :] = -1
        return Occupancy(size_bytes, numbers, table[:, 0], table[:, 1], table[:, 2], self.total)

    def _tensors(self) -> list[list[Span]]:
        """[T] the moments during which each tensor is on the device."""
        trace, count = self.trace, self.trace.kernels
        intervals: dict[int, list[Span]] = defaultdict(list)
        for index, evict in enumerate(self.plan.evictions):
            if evict.codec != "raw":
                since = self._at(("compress", index), evict.begin) + 1
                back = self._at(("expand", index), evict.end)
            else:
                since, back = self._before(evict.begin), self._before(evict.prefetch_at)
            intervals[evict.tensor] += self._cyclic(since, back)
        for recompute in self.plan.recomputations:
            # The room of all that a kernel needs again is taken before the first is recomputed, as the
            # plan checker counts it.
            since, back = self._before(recompute.begin), self._before(recompute.end)
            intervals[recompute.tensor] += self._cyclic(since, back)
        births, deaths = trace.tensor_birth.tolist(), trace.tensor_death.tolist()
        found: list[list[Span]] = []
        for tensor in range(trace.tensors):
            if trace.tensor_persistent[tensor]:
                life = (0, self.total)
            elif births[tensor] < min(deaths[tensor], count):
                life = (self.main[births[tensor]], self.first[deaths[tensor]])
            else:
                life = (0, 0)
            found.append(_without(life, intervals[tensor]) if tensor in intervals else [life])
        return found

    def _passing(self, spans: list[list[Span]]) -> Iterator[tuple[int, list[Span]]]:
        """Blocks that compression and recomputation need for a while: bytes, and when."""
        trace = self.trace
        for index, evict in enumerate(self.plan.evictions):
            if evict.codec != "raw":
                size = trace.compressed_bytes(evict.tensor)
                moment = self.moment["compress", index]
                yield size, [(moment, moment + 1)]
                used_by = evict.end % trace.kernels
                until = self._before(evict.end) + self.main[used_by] + 1 - self.first[used_by]
                yield size, self._cyclic(self._before(evict.prefetch_at), until)
        for index, recompute in enumerate(self.plan.recomputations):
            producer = int(trace.tensor_recompute[recompute.tensor])
            moment = self.moment["recompute", index]
            yield self.workspaces[producer], [(moment, moment + 1)]
            for output in trace.outputs[producer].tolist():
                if output != recompute.tensor and not _holds(spans[output], moment):
                    yield int(trace.tensor_bytes[output]), [(moment, moment + 1)]

    def _before(self, kernel: int) -> int:
        """The first moment of a kernel, which may be in the next iteration."""
        turn, kernel = divmod(kernel, self.trace.kernels)
        return self.first[kernel] + turn * self.total

    def _at(self, step: tuple[str, int], kernel: int) -> int:
        """The moment of a step before ``kernel``, which may be in the next iteration."""
        return self.moment[step] + kernel // self.trace.kernels * self.total

    def _cyclic(self, since: int, until: int) -> list[Span]:
        """Moments ``[since, until)``, which may reach into the next iteration, in this one."""
        if since >= self.total:
            since, until = since - self.total, until - self.total
        return [(since, until)] if until <= self.total else [(since, self.total), (0, until - self.total)]


def _without(life: Span, intervals: list[Span]) -> list[Span]:
    """``life`` without the moments in ``intervals``."""
    found = []
    since, until = life
    for away, back in sorted(intervals):
        if away > since:
            found.append((since, min(away, until)))
        since = max(since, back)
    if since < until:
        found.append((since, until))
    return found


def _holds(spans: list[Span], moment: int) -> bool:
    return any(since <= moment < until for since, until in spans)
