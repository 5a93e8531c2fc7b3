"""FlashNeuron's own runtime, simulated: its memory manager, its queues and its order (section 3.2).

FlashNeuron places tensors at both ends of the device's memory: those that stay from the low end, those
that are offloaded from the high end. What it prefetches when depends on the largest free extent, and it
fails where no extent holds a tensor: the simulation says both. Unlike penstock's runtime, its backward
pass starts only when everything is offloaded, and returning tensors come to new addresses.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.core.hardware import Hardware
from penstock.core.plan import Evict
from penstock.core.trace import Trace
from penstock.errors import InvalidArgument
from penstock.planners.heuristics.prefetch import moved_bytes
from penstock.planners.heuristics.vitality import boundary
from penstock.planners.modnn.space import ManagedSpace
from penstock.units import format_bytes, format_bytes_up


class Simulation(NamedTuple):
    """prefetch_at   by tensor: the kernel at whose start its read is issued
    iteration_s   of the whole iteration"""

    prefetch_at: dict[int, int]
    iteration_s: float


def simulate_flashneuron(
    trace: Trace, evictions: Sequence[Evict], budget_bytes: int, hardware: Hardware
) -> Simulation:
    """What FlashNeuron's runtime does with these evictions, each tensor's only one.

    Raises InvalidArgument where a tensor finds no free extent and no copy in progress frees one.
    """
    return _Run(trace, evictions, budget_bytes, hardware).run()


class _Run:
    """The state of one simulation: writes and reads each wait in a queue of their own, one in progress."""

    def __init__(
        self, trace: Trace, evictions: Sequence[Evict], budget_bytes: int, hardware: Hardware
    ) -> None:
        self.trace, self.budget_bytes = trace, budget_bytes
        self.first_backward = max(boundary(trace) - 1, 0)  # the loss belongs to it
        self.evicted = {evict.tensor: evict for evict in evictions}
        self.write_s, self.read_s = {}, {}
        for tensor, evict in self.evicted.items():
            moved = moved_bytes(trace, evict)
            self.write_s[tensor] = hardware.evict_s(evict.tier, moved)
            self.read_s[tensor] = hardware.prefetch_s(evict.tier, moved)
        self.size: list[int] = trace.tensor_bytes.tolist()
        self.persistent: list[bool] = trace.tensor_persistent.tolist()
        starts, values = trace.uses.starts, trace.uses.values
        self.uses = [values[starts[t] : starts[t + 1]].tolist() for t in range(trace.tensors)]
        self.used_by: list[list[int]] = [
            list(dict.fromkeys([*trace.inputs[k].tolist(), *trace.outputs[k].tolist()]))
            for k in range(trace.kernels)
        ]
        read = np.zeros(trace.tensors, dtype=np.bool_)
        read[trace.inputs.values] = True
        self.scratch = (~read & ~trace.tensor_persistent).tolist()  # lives in the reserved workspace
        self.space = ManagedSpace(budget_bytes)
        self.now = 0.0
        self.writes: deque[int] = deque()
        self.reads: deque[int] = deque()
        self.write_end = self.read_end = math.inf
        self.coming: set[int] = set()
        self.prefetch_at: dict[int, int] = {}

    def run(self) -> Simulation:
        trace = self.trace
        for tensor in range(trace.tensors):
            if self.persistent[tensor]:
                self._require(self._take(tensor), tensor)
        scratch = max(
            sum(self.size[tensor] for tensor in used if self.scratch[tensor]) for used in self.used_by
        )
        workspace = scratch + int(trace.kernel_workspace_bytes.max(initial=0))
        if workspace:
            self._require(self.space.allocate(-1, workspace, exact=False), -1)
        own = [sum(self.size[t] for t in used if not self.persistent[t]) for used in self.used_by]
        reserve = int((np.array(own) + trace.kernel_workspace_bytes).max(initial=0))
        issued: dict[int, list[int]] = {}
        for tensor, evict in self.evicted.items():
            issued.setdefault(evict.begin, []).append(tensor)
        waiting = deque(sorted(self.evicted, key=lambda tensor: (self.evicted[tensor].end, tensor)))

        for kernel in range(trace.kernels):
            for tensor in issued.get(kernel, ()):
                self._write(tensor)
            while kernel >= self.first_backward and self.writes:
                self._next()
            for tensor in self.used_by[kernel]:
                self._provide(tensor, kernel)
            self._until(self.now + float(trace.kernel_time_s[kernel]))
            for tensor in self.used_by[kernel]:
                if tensor in self.space and not self.persistent[tensor] and self.uses[tensor][-1] == kernel:
                    self.space.free(tensor)
            if kernel >= self.first_backward:
                self._prefetch(waiting, kernel + 1, reserve)
        return Simulation(self.prefetch_at, self.now)

    def _provide(self, tensor: int, kernel: int) -> None:
        """Wait until the tensor is there: allocated, and back."""
        if self.persistent[tensor] or self.scratch[tensor]:
            return
        if tensor not in self.space:
            while not self._take(tensor):
                self._require(self._next(), tensor)
            if self.uses[tensor][0] != kernel:
                self._read(tensor)
        while tensor in self.coming:
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
                self._read(tensor)
                rest -= self.size[tensor]
            waiting.popleft()

    def _take(self, tensor: int) -> bool:
        """Whether there is a place: the highest for what is offloaded, the lowest for all others."""
        size = self.size[tensor]
        return self.space.allocate(tensor, size, exact=False, high=tensor in self.evicted)

    def _write(self, tensor: int) -> None:
        self.writes.append(tensor)
        if len(self.writes) == 1:
            self.write_end = self.now + self.write_s[tensor]

    def _read(self, tensor: int) -> None:
        self.coming.add(tensor)
        self.reads.append(tensor)
        if len(self.reads) == 1:
            self.read_end = self.now + self.read_s[tensor]

    def _until(self, end_s: float) -> None:
        while min(self.write_end, self.read_end) <= end_s:
            self._next()
        self.now = end_s

    def _next(self) -> bool:
        """Move to the end of the transfer that ends next; whether there is one."""
        self.now = max(self.now, min(self.write_end, self.read_end))
        if math.isinf(self.now):
            return False
        if self.write_end <= self.read_end:
            self.space.free(self.writes.popleft())
            self.write_end = self.now + self.write_s[self.writes[0]] if self.writes else math.inf
        else:
            self.coming.remove(self.reads.popleft())
            self.read_end = self.now + self.read_s[self.reads[0]] if self.reads else math.inf
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
