"""FlashNeuron (Bae et al., FAST 2021, sections 3.2 and 3.3): offload what the forward pass buffers.

Phase 1 takes feature maps from the beginning of the forward pass on, until those that stay fit beside what
never leaves. Phase 2 runs where the copies take longer than the forward pass and tensors may be compressed:
it exchanges the last of those taken that do not compress for those that compress best. Tensors come back
when its runtime would fetch them, which the planner simulates. It fails where activations alone do not make
enough room.

What never leaves is (section 3.3) all that a profiled iteration has in memory beside the tensors that are
buffered for the backward pass, such as weights and temporary workspace.

Its own runtime (section 3.2) places tensors at both ends of the device's memory: those that stay from the low
end, those that are offloaded from the high end. What it prefetches when depends on the largest free extent,
and it fails where no extent holds a tensor: `OwnRuntime` says both. Unlike penstock's runtime, its
backward pass starts only when everything is offloaded, and returning tensors come to new addresses.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from penstock.core.columns import IntArray
from penstock.core.hardware import Hardware
from penstock.core.memory_profile import resident_bytes, spread
from penstock.core.plan import Evict
from penstock.core.trace import Trace
from penstock.errors import InvalidArgument
from penstock.planners.modnn_space import ManagedSpace
from penstock.planners.problem import Decision, Problem
from penstock.planners.rules import (
    FITS,
    FreeBytes,
    boundary,
    eviction,
    feature_maps,
    latest_safe,
    moved_bytes,
    prefetch_ahead,
)
from penstock.units import format_bytes, format_bytes_up


def flashneuron(problem: Problem) -> Decision:
    """Both phases, to the disk; to the host where there is no disk.

    Raises InvalidArgument where offloading activations alone cannot keep to the budget, and SpillSpaceFull
    where the tier cannot hold them.
    """
    trace = problem.trace
    if trace.peak_bytes <= problem.budget_bytes:
        return FITS
    evictions = choose(problem, int(_other_bytes(trace).max(initial=0)))
    try:
        return decide(problem, evictions)
    except InvalidArgument:  # penstock's runtime places no tensor at an address: it needs no extent
        issue = latest_safe(trace, evictions, problem.hardware)
        return Decision(
            evictions=prefetch_ahead(trace, evictions, issue, problem.budget_bytes),
            reason="activations alone make enough room; FlashNeuron's memory manager would find no extent",
        )


def decide(problem: Problem, evictions: list[Evict]) -> Decision:
    """These evictions, fetched when FlashNeuron's own runtime would.

    Raises InvalidArgument where its memory manager finds no extent that holds a tensor.
    """
    trace, budget_bytes = problem.trace, problem.budget_bytes
    own = OwnRuntime(trace, evictions, budget_bytes, problem.hardware)
    issue = [own.prefetch_at.get(evict.tensor, evict.end) for evict in evictions]
    return Decision(
        evictions=prefetch_ahead(trace, evictions, issue, budget_bytes),
        reason="activations alone make enough room; FlashNeuron's own runtime, whose backward pass waits for "
        f"all copies, would take {own.now_s:.3f} s",
    )


def choose(problem: Problem, reserved_bytes: int) -> list[Evict]:
    """What is offloaded, returning on demand, with which the budget and the tier are kept to.

    reserved_bytes   that never leave, beside what outlives the iteration
    """
    trace, budget_bytes = problem.trace, problem.budget_bytes
    tier = "disk" if problem.hardware.disk_bytes else "host"
    evictions = _selected(problem, reserved_bytes, tier)
    room = FreeBytes(problem)
    if any(room.place((tier,), evict) is None for evict in evictions):
        raise room.full(evictions)
    resident = resident_bytes(trace, evictions)
    while (over := resident > budget_bytes).any():
        # Uncompressed where compressing or expanding takes more than there is.
        plain = [
            replace(evict, codec="raw") if over[evict.begin] or over[evict.end] else evict
            for evict in evictions
        ]
        if plain == evictions:
            if problem.packs:  # what phase 2 exchanged is too much: phase 1 alone may do
                return choose(replace(problem, compress=False, lossy=None), reserved_bytes)
            raise _cannot(problem, int(resident.max()), reserved_bytes)
        evictions, resident = plain, resident_bytes(trace, plain)
    return evictions


def _in_order(trace: Trace) -> dict[int, int]:
    """The tensors that can be offloaded, in the order of phase 1, each with the number of its period."""
    offered = {int(trace.periods.tensor[i]): i for i in np.flatnonzero(feature_maps(trace)).tolist()}
    return {tensor: offered[tensor] for tensor in _buffered(trace).tolist() if tensor in offered}


def _least_bytes(problem: Problem, reserved_bytes: int) -> int:
    """The smallest budget, above the one given, at which what phase 1 takes is enough."""
    trace = problem.trace
    evictions = [eviction(trace, index, "disk") for index in _in_order(trace).values()]
    line_bytes = trace.persistent_bytes + reserved_bytes + int(trace.tensor_bytes[_buffered(trace)].sum())
    found = trace.peak_bytes  # where nothing leaves
    most_bytes = trace.peak_bytes - 1
    for taken in range(len(evictions) + 1):
        # The budgets at which phase 1 takes so many: beyond the line, up to the line before.
        if taken:
            most_bytes = min(line_bytes, trace.peak_bytes - 1)
            line_bytes -= int(trace.tensor_bytes[evictions[taken - 1].tensor])
        least_bytes = max(
            line_bytes + (taken < len(evictions)),
            int(resident_bytes(trace, evictions[:taken]).max(initial=0)),
            problem.budget_bytes + 1,
        )
        if least_bytes <= most_bytes:
            found = min(found, least_bytes)
        if line_bytes < problem.budget_bytes:
            break
    return found


def _selected(problem: Problem, reserved_bytes: int, tier: str) -> list[Evict]:
    """What both phases offload: on demand, in the order of the forward pass."""
    trace, size = problem.trace, problem.trace.tensor_bytes.tolist()
    offered = _in_order(trace)
    stay_bytes = int(trace.tensor_bytes[_buffered(trace)].sum())
    line_bytes = problem.budget_bytes - trace.persistent_bytes - reserved_bytes
    chosen: list[int] = []
    order = list(offered)
    for tensor in order:
        if stay_bytes < line_bytes:
            break
        chosen.append(tensor)
        stay_bytes -= size[tensor]
    if stay_bytes > line_bytes:
        raise _cannot(problem, problem.budget_bytes + stay_bytes - line_bytes, reserved_bytes)
    stored = trace.period_bytes(problem.compress).tolist()
    packed = {tensor: stored[index] for tensor, index in offered.items()}
    if problem.packs:
        chosen = _compression_aware(problem, chosen, order, packed, tier)
    evictions = []
    for tensor in chosen:
        evict = eviction(trace, offered[tensor], tier)
        codec = trace.codec(tensor) if packed[tensor] < size[tensor] else "raw"
        evictions.append(replace(evict, codec=codec))
    return evictions


def _buffered(trace: Trace) -> IntArray:
    """The tensors that the forward pass leaves to the backward pass, in the order of their first use."""
    first_backward = boundary(trace)
    starts, values = trace.uses.starts, trace.uses.values
    used = np.flatnonzero(np.diff(starts))
    first, last = values[starts[used]], values[starts[used + 1] - 1]
    crosses = ~trace.tensor_persistent[used] & (first < first_backward) & (last >= first_backward)
    found: IntArray = used[crosses]
    return found[np.argsort(first[crosses], kind="stable")]


def _other_bytes(trace: Trace) -> IntArray:
    """[K] bytes on the device that are neither persistent nor buffered for the backward pass."""
    buffered = _buffered(trace)
    born, dead = trace.tensor_birth[buffered], np.minimum(trace.tensor_death[buffered], trace.kernels)
    held = spread(trace.kernels, born, dead, trace.tensor_bytes[buffered])
    found: IntArray = trace.live_bytes - trace.persistent_bytes - held
    return found


def _compression_aware(
    problem: Problem, chosen: list[int], order: list[int], packed: dict[int, int], tier: str
) -> list[int]:
    """Phase 2: exchange what does not compress, the last first, for what compresses best, until the copies
    take no longer than the forward pass or there is nothing left to exchange."""
    trace, size = problem.trace, problem.trace.tensor_bytes.tolist()
    forward_s = float(trace.start_s[boundary(trace)])
    selected = set(chosen)
    write_s = {tensor: problem.hardware.evict_s(tier, packed[tensor]) for tensor in order}
    total_s = sum(write_s[tensor] for tensor in selected)
    friendly = [each for each in order if packed[each] < size[each] and each not in selected]
    friendly.sort(key=lambda tensor: (packed[tensor] / size[tensor], -size[tensor]))
    for tensor in reversed([tensor for tensor in chosen if packed[tensor] >= size[tensor]]):
        if total_s <= forward_s or not friendly:
            break
        instead, covered = [], 0
        while friendly and covered < size[tensor]:
            instead.append(friendly.pop(0))
            covered += size[instead[-1]]
        if covered < size[tensor]:
            break
        selected.remove(tensor)
        selected.update(instead)
        total_s += sum(write_s[other] for other in instead) - write_s[tensor]
    return [tensor for tensor in order if tensor in selected]


def _cannot(problem: Problem, needed_bytes: int, reserved_bytes: int) -> InvalidArgument:
    """needed_bytes: with what it would take at this budget"""
    excess_bytes = needed_bytes - problem.budget_bytes
    least_bytes = _least_bytes(problem, reserved_bytes)
    return InvalidArgument(
        f"flashneuron offloads activations only, and {format_bytes_up(excess_bytes)} too much would stay: "
        f"it needs a device budget of {format_bytes_up(least_bytes)}, and the budget is "
        f"{format_bytes(problem.budget_bytes)}. Raise it, or choose a policy that moves other tensors too, "
        "such as g10"
    )


class OwnRuntime:
    """What FlashNeuron's runtime does in one iteration with these evictions, each tensor's only one.

    prefetch_at     by tensor: the kernel at whose start its read is issued
    now_s           at the end: the time of the iteration
    writes, reads   copies asked for, one at a time in each direction: when each is over, and its tensor

    Raises InvalidArgument where a tensor finds no free extent and no copy in progress frees one.
    """

    def __init__(
        self, trace: Trace, evictions: Sequence[Evict], budget_bytes: int, hardware: Hardware
    ) -> None:
        self.trace, self.budget_bytes, self.hardware = trace, budget_bytes, hardware
        self.evicted = {evict.tensor: evict for evict in evictions}
        self.writes: deque[tuple[float, int]] = deque()
        self.reads: deque[tuple[float, int]] = deque()
        self.size: list[int] = trace.tensor_bytes.tolist()
        self.persistent: list[bool] = trace.tensor_persistent.tolist()
        self.used_by = [
            list(dict.fromkeys([*trace.inputs[k].tolist(), *trace.outputs[k].tolist()]))
            for k in range(trace.kernels)
        ]
        read = np.zeros(trace.tensors, dtype=np.bool_)
        read[trace.inputs.values] = True
        self.scratch = (~read & ~trace.tensor_persistent).tolist()  # lives in the reserved workspace
        self.space = ManagedSpace(budget_bytes)
        self.now_s = 0.0
        self.prefetch_at: dict[int, int] = {}
        self._run()

    def _run(self) -> None:
        trace, used_by = self.trace, self.used_by
        first_backward = max(boundary(trace) - 1, 0)  # the loss belongs to it
        for tensor in np.flatnonzero(trace.tensor_persistent).tolist():
            self._require(self._take(tensor), tensor)
        scratch = max(sum(self.size[tensor] for tensor in used if self.scratch[tensor]) for used in used_by)
        workspace = scratch + int(trace.kernel_workspace_bytes.max(initial=0))
        if workspace:
            self._require(self.space.allocate(-1, workspace, exact=False), -1)
        own = [sum(self.size[tensor] for tensor in used if not self.persistent[tensor]) for used in used_by]
        reserve = int((np.array(own) + trace.kernel_workspace_bytes).max(initial=0))
        leaving = defaultdict(list)
        for tensor, evict in self.evicted.items():
            leaving[evict.begin].append(tensor)
        waiting = deque(sorted(self.evicted, key=lambda tensor: (self.evicted[tensor].end, tensor)))

        for kernel in range(trace.kernels):
            for tensor in leaving[kernel]:
                self._copy(self.writes, tensor, self.hardware.evict_s)
            while kernel >= first_backward and self.writes:
                self._next()
            for tensor in used_by[kernel]:
                self._provide(tensor, kernel)
            end_s = self.now_s + float(trace.kernel_time_s[kernel])
            while self._next(end_s):
                pass
            self.now_s = end_s
            for tensor in used_by[kernel]:
                if tensor in self.space and not self.persistent[tensor] and trace.uses[tensor][-1] == kernel:
                    self.space.free(tensor)
            if kernel >= first_backward:
                self._prefetch(waiting, kernel + 1, reserve)

    def _provide(self, tensor: int, kernel: int) -> None:
        """Wait until the tensor is there: allocated, and back."""
        if self.persistent[tensor] or self.scratch[tensor]:
            return
        if tensor not in self.space:
            while not self._take(tensor):
                self._require(self._next(), tensor)
            if self.trace.uses[tensor][0] != kernel:
                self._copy(self.reads, tensor, self.hardware.prefetch_s)
        while any(coming == tensor for _, coming in self.reads):
            self._next()

    def _prefetch(self, waiting: deque[int], kernel: int, reserve: int) -> None:
        """Issue the reads that fit, in the order of need, with ``reserve`` bytes left over."""
        rest = self.space.largest_gap - reserve
        while waiting:
            tensor = waiting[0]
            if self.evicted[tensor].end >= kernel and tensor not in self.space:
                if rest <= self.size[tensor]:
                    return
                self._take(tensor)
                self.prefetch_at[tensor] = kernel
                self._copy(self.reads, tensor, self.hardware.prefetch_s)
                rest -= self.size[tensor]
            waiting.popleft()

    def _take(self, tensor: int) -> bool:
        """Whether there is a place: the highest for what is offloaded, the lowest for all others."""
        size = self.size[tensor]
        return self.space.allocate(tensor, size, exact=False, high=tensor in self.evicted)

    def _copy(
        self, queue: deque[tuple[float, int]], tensor: int, copy_s: Callable[[str, int], float]
    ) -> None:
        evict = self.evicted[tensor]
        begin_s = queue[-1][0] if queue else self.now_s
        queue.append((begin_s + copy_s(evict.tier, moved_bytes(self.trace, evict)), tensor))

    def _next(self, until_s: float = math.inf) -> bool:
        """Move to the end of the copy that ends next; whether there is one that ends by then."""
        queue = min(self.writes, self.reads, key=lambda copies: copies[0][0] if copies else math.inf)
        if not queue or queue[0][0] > until_s:
            return False
        self.now_s, tensor = queue.popleft()
        if queue is self.writes:
            self.space.free(tensor)
        return True

    def _require(self, done: bool, tensor: int) -> None:
        if not done:
            size = self.size[tensor] if tensor >= 0 else self.space.largest_gap
            raise InvalidArgument(
                f"flashneuron finds no free extent of {format_bytes_up(size)} among those left of the device "
                f"budget of {format_bytes(self.budget_bytes)}, the largest of which has "
                f"{format_bytes(self.space.largest_gap)}, and no copy in progress frees one: raise the "
                "budget, or choose a policy that moves other tensors too, such as g10"
            )
