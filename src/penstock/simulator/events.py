"""The replay of a plan, event by event, as the runtime would carry it out.

Assumptions, each of which costs some accuracy:

- Kernels take the time the trace states; copies do not slow them.
- A link carries one transfer at a time. A transfer over two links occupies both for the time of
  the slower one. Writes start in the order they were issued; so do reads, demands first.
- A disk transfer that starts while the disk works in the other direction has its rate on the disk
  multiplied by ``hardware.duplex`` to its end; one that was under way keeps its rate.
- Prefetches get memory in the order they were issued: one that does not fit holds up those behind it.
- A write that has not started when its tensor dies is dropped. One under way holds the tensor's
  memory to its end. The iteration ends when the last kernel and the transfers under way have ended.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable

import numpy as np

from penstock.core.hardware import Hardware
from penstock.core.plan import Plan
from penstock.core.pressure import copy_sources
from penstock.core.timeline import Sample, Span, Stall, Timeline
from penstock.core.trace import IntArray, Trace

# Where an evicted tensor is. LEAVING: its memory is freed as soon as the copy is complete.
# WAITING: the prefetch is issued and has no memory yet.
RESIDENT, LEAVING, AWAY, WAITING, RETURNING = range(5)


def simulate(trace: Trace, plan: Plan, hardware: Hardware) -> Timeline:
    """What happens when ``plan`` runs: deterministic, and never corrected.

    A plan that needs more than its budget is carried out all the same; the peak shows it.
    """
    return _Replay(trace, plan, hardware).run()


class _Replay:
    """The state of one replay. Evictions and transfers go by their index in the plan."""

    def __init__(self, trace: Trace, plan: Plan, hardware: Hardware) -> None:
        self.trace = trace
        self.evictions = plan.evictions
        self.budget = plan.device_budget_bytes
        self.hardware = hardware

        count = len(plan.evictions)
        self.size: list[int] = [int(trace.tensor_bytes[evict.tensor]) for evict in plan.evictions]
        self.source = copy_sources(trace, plan.evictions)
        self.state = [RESIDENT] * count
        self.copied = [False] * count
        self.writing: dict[int, int] = {}  # by tensor: writes under way
        self.dead: set[int] = set()
        self.leaving: dict[int, int] = {}  # copy to complete -> eviction whose memory it frees
        self.missing: set[int] = set()  # reads that the kernel at hand waits for

        self.demands: deque[int] = deque()  # reads without memory: needed now
        self.prefetches: deque[int] = deque()  # reads without memory: needed later
        self.writes: dict[str, deque[tuple[int, int]]] = {}  # by tier: (sequence number, eviction)
        self.reads: dict[str, deque[tuple[int, int]]] = {}
        self.urgent: dict[str, deque[tuple[int, int]]] = {}
        self.sequence = 0
        self.busy: set[str] = set()
        self.in_flight: list[tuple[float, int, int, bool]] = []  # end, sequence, eviction, is it a read
        self.seconds: dict[tuple[bool, str, int, bool], float] = {}

        self.now = 0.0
        self.used = 0
        self.reserve = 0  # what the kernel at hand still has to allocate
        self.occupied: dict[str, int] = {}
        self.on_tier: set[tuple[str, int]] = set()
        self.spans: list[Span] = []
        self.stalls: list[Stall] = []
        self.memory: dict[str, list[Sample]] = {"device": []}

    def run(self) -> Timeline:
        trace = self.trace
        births = _bytes_at(trace, trace.tensor_birth)
        deaths = _bytes_at(trace, trace.tensor_death)
        workspaces = trace.kernel_workspace_bytes.tolist()
        times = trace.kernel_time_s.tolist()
        order = range(len(self.evictions))
        copies = _by_kernel(
            (evict.after, index) for index, evict in enumerate(self.evictions) if self.source[index] == index
        )
        begins = _by_kernel((self.evictions[index].begin, index) for index in order)
        issues = _by_kernel(
            (self.evictions[index].prefetch_at, index)
            for index in sorted(order, key=lambda index: self.evictions[index].end)
        )
        ends = _by_kernel((self.evictions[index].end, index) for index in order)
        last = _by_kernel(
            (int(trace.tensor_death[tensor]) - 1, tensor)
            for tensor in sorted({evict.tensor for evict in self.evictions})
        )

        initial = int(trace.tensor_bytes[trace.tensor_persistent & (trace.tensor_birth == 0)].sum())
        births[0] -= initial
        self._use(initial)
        if -1 in copies:
            self._enqueue_writes(copies[-1])
        for kernel, name in enumerate(trace.kernel_name):
            self.reserve = births[kernel] + workspaces[kernel]
            self._advance(self.now)
            if kernel in begins:
                self._leave(begins[kernel])
            if kernel in issues:
                self._issue(issues[kernel])
            if kernel in ends:
                self._demand(ends[kernel])
            self._admit()
            if self.missing or self.used + self.reserve > self.budget:
                self._stall(kernel)

            allocate, self.reserve = self.reserve, 0
            self._use(allocate)
            end_s = self.now + times[kernel]
            self.spans.append(Span("compute", self.now, end_s, name, kernel))
            self._advance(end_s)
            self.now = end_s
            free = workspaces[kernel]
            if kernel + 1 < trace.kernels:
                free += deaths[kernel + 1]
                if kernel in last:
                    free -= self._die(last[kernel])
            self._use(-free)
            if kernel in copies:
                self._enqueue_writes(copies[kernel])

        self.writes.clear()
        self.reads.clear()
        self.urgent.clear()
        self._advance(math.inf)
        return Timeline(
            iteration_s=self.now,
            spans=tuple(self.spans),
            memory={tier: tuple(samples) for tier, samples in self.memory.items()},
            stalls=tuple(self.stalls),
        )

    # What the plan asks for at a kernel

    def _enqueue_writes(self, evictions: Iterable[int]) -> None:
        for index in evictions:
            self._enqueue(self.writes, index)
        self._dispatch()

    def _leave(self, evictions: Iterable[int]) -> None:
        """Free what may be away from this kernel on, now or when its copy is complete."""
        for index in evictions:
            if self.copied[self.source[index]]:
                self.state[index] = AWAY
                self._use(-self.size[index])
            else:
                self.state[index] = LEAVING
                self.leaving[self.source[index]] = index

    def _issue(self, evictions: Iterable[int]) -> None:
        """Ask for tensors back. One whose copy is not complete never left."""
        for index in evictions:
            if self.state[index] == LEAVING:
                del self.leaving[self.source[index]]
                self.state[index] = RESIDENT
            elif self.state[index] == AWAY:
                self.state[index] = WAITING
                self.prefetches.append(index)

    def _demand(self, evictions: Iterable[int]) -> None:
        """Send the reads this kernel waits for ahead of all others."""
        for index in evictions:
            if self.state[index] == WAITING:
                self.prefetches.remove(index)
                self.demands.append(index)
            elif self.state[index] == RETURNING:
                queue = self.reads.get(self.evictions[index].tier, deque())
                for entry in queue:
                    if entry[1] == index:
                        queue.remove(entry)
                        self._enqueue(self.urgent, index)
                        break
            if self.state[index] in (WAITING, RETURNING):
                self.missing.add(index)

    def _die(self, tensors: Iterable[int]) -> int:
        """Drop writes of tensors that die now. Returns the bytes that writes under way hold."""
        held = 0
        for tensor in tensors:
            self.dead.add(tensor)
            if tensor in self.writing:
                held += int(self.trace.tensor_bytes[tensor])
            else:
                self._vacate(tensor)
        return held

    # Memory

    def _use(self, change: int) -> None:
        if change or not self.memory["device"]:
            self.used += change
            self.memory["device"].append(Sample(self.now, self.used))

    def _occupy(self, tier: str, tensor: int) -> None:
        if (tier, tensor) not in self.on_tier:
            self.on_tier.add((tier, tensor))
            self._tier(tier, int(self.trace.tensor_bytes[tensor]))

    def _vacate(self, tensor: int) -> None:
        for tier in self.memory:
            if (tier, tensor) in self.on_tier:
                self.on_tier.remove((tier, tensor))
                self._tier(tier, -int(self.trace.tensor_bytes[tensor]))

    def _tier(self, tier: str, change: int) -> None:
        samples = self.memory.setdefault(tier, [Sample(0.0, 0)])
        self.occupied[tier] = self.occupied.get(tier, 0) + change
        samples.append(Sample(self.now, self.occupied[tier]))

    def _admit(self) -> None:
        """Give memory to reads that wait for it, demands first, as far as it goes."""
        admitted = False
        for waiting, queues in ((self.demands, self.urgent), (self.prefetches, self.reads)):
            while waiting and self.used + self.size[waiting[0]] + self.reserve <= self.budget:
                self._begin_read(waiting.popleft(), queues)
                admitted = True
            if waiting:
                break
        if admitted:
            self._dispatch()

    def _begin_read(self, index: int, queues: dict[str, deque[tuple[int, int]]]) -> None:
        self.state[index] = RETURNING
        self._use(self.size[index])
        self._enqueue(queues, index)

    # Waiting

    def _stall(self, kernel: int) -> None:
        """Wait until the kernel's tensors are back and its memory fits, or nothing can free any."""
        while self.missing or self.used + self.reserve > self.budget:
            can_free = bool(self.in_flight and (self.leaving or not self.dead.isdisjoint(self.writing)))
            if self.demands and not can_free:
                self._begin_read(self.demands.popleft(), self.urgent)
                self._dispatch()
                continue
            if not self.in_flight or not (self.missing or can_free):
                break
            cause = "prefetch" if self.missing and not self.demands else "memory"
            start_s = self.now
            self._complete()
            if self.now > start_s:
                if self.stalls and self.stalls[-1][1:] == (start_s, cause, kernel):
                    start_s = self.stalls.pop().start_s
                self.stalls.append(Stall(start_s, self.now, cause, kernel))

    def _advance(self, until_s: float) -> None:
        while self.in_flight and self.in_flight[0][0] <= until_s:
            self._complete()

    def _complete(self) -> None:
        """Move to the end of the transfer that ends next."""
        self.now, _, index, is_read = heapq.heappop(self.in_flight)
        evict = self.evictions[index]
        self.busy.difference_update(self._links(is_read, evict.tier))
        if is_read:
            self.missing.discard(index)
            self.state[index] = RESIDENT
        else:
            self.copied[index] = True
            freed = self.leaving.pop(index, None)
            if freed is not None:
                self.state[freed] = AWAY
                self._use(-self.size[freed])
            self.writing[evict.tensor] -= 1
            if not self.writing[evict.tensor]:
                del self.writing[evict.tensor]
                if evict.tensor in self.dead:
                    self._use(-self.size[index])
                    self._vacate(evict.tensor)
        self._admit()
        self._dispatch()

    # Links

    def _links(self, is_read: bool, tier: str) -> tuple[str, ...]:
        return self.hardware.prefetch_links(tier) if is_read else self.hardware.evict_links(tier)

    def _enqueue(self, queues: dict[str, deque[tuple[int, int]]], index: int) -> None:
        self.sequence += 1
        queues.setdefault(self.evictions[index].tier, deque()).append((self.sequence, index))

    def _dispatch(self) -> None:
        """Start every transfer whose links are free: of two that compete, the one issued first."""
        for queues, is_read in ((self.urgent, True), (self.reads, True), (self.writes, False)):
            for queue in sorted(filter(None, queues.values())):
                while queue and self.evictions[queue[0][1]].tensor in self.dead:
                    queue.popleft()
                if queue and self.busy.isdisjoint(self._links(is_read, self.evictions[queue[0][1]].tier)):
                    self._start(queue.popleft()[1], is_read)

    def _start(self, index: int, is_read: bool) -> None:
        evict, size = self.evictions[index], self.size[index]
        opposed = ("disk_write" if is_read else "disk_read") in self.busy
        links = self._links(is_read, evict.tier)
        end_s = self.now + self._transfer_s(is_read, evict.tier, size, opposed)
        self.busy.update(links)
        for link in links:
            self.spans.append(Span(link, self.now, end_s, f"tensor {evict.tensor}", evict.tensor, size))
        if not is_read:
            self.writing[evict.tensor] = self.writing.get(evict.tensor, 0) + 1
            self._occupy(evict.tier, evict.tensor)
        self.sequence += 1
        heapq.heappush(self.in_flight, (end_s, self.sequence, index, is_read))

    def _transfer_s(self, is_read: bool, tier: str, size: int, opposed: bool) -> float:
        key = (is_read, tier, size, opposed)
        if key not in self.seconds:
            self.seconds[key] = max(
                self.hardware.transfer_s(link, size)
                / (self.hardware.duplex if opposed and link.startswith("disk") else 1.0)
                for link in self._links(is_read, tier)
            )
        return self.seconds[key]


def _bytes_at(trace: Trace, kernel: IntArray) -> list[int]:
    """[K + 1] bytes of the tensors whose entry in ``kernel`` is each kernel."""
    table = np.zeros(trace.kernels + 1, dtype=np.int64)
    np.add.at(table, np.minimum(kernel, trace.kernels), trace.tensor_bytes)
    result: list[int] = table.tolist()
    return result


def _by_kernel(entries: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    table: dict[int, list[int]] = {}
    for kernel, index in entries:
        table.setdefault(kernel, []).append(index)
    return table
