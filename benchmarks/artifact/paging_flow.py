"""How fast pages move between the device and the tiers below it while a device pages on demand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Container
from typing import NamedTuple

from penstock.core.hardware import Hardware
from penstock.errors import SpillSpaceFull

from .paging_memory import DISK, HOST, NOWHERE, PAGE_BYTES, TOLERANCE, Memory, Queue

_IN = ("", "host_to_device", "disk_read")
_OUT = ("", "device_to_host", "disk_write")


class _Flow(NamedTuple):
    """Pages of the first entry of a queue, and those that leave for them."""

    queue: Queue
    bytes_per_s: float
    victim: int  # key of a run, -1 where memory is free
    target: int
    turns: bool  # the pages that leave join the queue immediately: the head does not end before the run
    joins: bool  # the pages that come join the run immediately: the run does not end before the head


class _Lane:
    """What is left of the rates of one direction, in bytes per second."""

    def __init__(self, hardware: Hardware, host_link: str, disk_link: str, both: bool) -> None:
        self.host = hardware.rate_bytes_per_s(host_link)
        self.disk = hardware.rate_bytes_per_s(disk_link)
        self.shared = hardware.disk_shares_bus
        if self.shared:
            self.disk = min(self.disk, self.host / 2 if both else self.host)

    def left(self, tier: int) -> float:
        if tier == NOWHERE:
            return float("inf")
        if tier == HOST:
            return self.host
        return min(self.disk, self.host) if self.shared else self.disk

    def use(self, tier: int, bytes_per_s: float) -> None:
        if tier == DISK:
            self.disk -= bytes_per_s
        if tier == HOST or (tier == DISK and self.shared):
            self.host -= bytes_per_s


class Flows:
    """Moves pages, for as long as nothing changes at a time.

    Of the queues, those of demands go first; in each kind the disk, the host and then fresh pages, as the
    slowest should start first. When the device is full, each page that comes in sends one out: to the
    host while that has room, otherwise to the disk. A page that comes from the host leaves
    its room to the one that leaves.

    drops_dead         pages of tensors that are not alive vanish without being written
    fresh_bytes_per_s  how fast untouched pages are mapped
    """

    def __init__(
        self, memory: Memory, hardware: Hardware, *, drops_dead: bool, fresh_bytes_per_s: float
    ) -> None:
        self.memory = memory
        self.hardware = hardware
        self.drops_dead = drops_dead
        self.fresh_bytes_per_s = fresh_bytes_per_s
        self.demands = [Queue(source, True) for source in (NOWHERE, HOST, DISK)]
        self.prefetches = [Queue(source, False) for source in (NOWHERE, HOST, DISK)]
        self._order = self.demands[::-1] + self.prefetches[::-1]
        self.moved_bytes: defaultdict[str, float] = defaultdict(float)  # by link

    def step(
        self,
        limit_s: float,
        alive: Container[int],
        needed: Collection[int],
        spared: Container[int],
        urgent: bool = False,
    ) -> float:
        """Move pages until the first queue entry, run or tier is used up. The seconds it took: 0 where
        nothing can move.

        alive    tensors that must not be dropped
        needed   tensors of the kernel at hand: a page of theirs that leaves is demanded again
        spared   tensors that prefetches leave on the device
        urgent   prefetches are treated as demands: the kernel waits for one that found no room
        """
        flows = self._flows(alive, needed, spared, urgent)
        if not flows:
            return 0.0
        step_s = min(limit_s, self._until_change(flows))
        for flow in flows:
            self._move(flow, flow.bytes_per_s * step_s, needed)
        if self.memory.disk_used_bytes > self.hardware.disk_bytes + PAGE_BYTES:
            raise SpillSpaceFull(
                f"paging needs more than the {self.hardware.disk_bytes} bytes of the disk besides "
                f"{self.hardware.host_bytes} of the host: give disk_bytes or host_bytes more"
            )
        return step_s

    def _flows(
        self, alive: Container[int], needed: Container[int], spared: Container[int], urgent: bool
    ) -> list[_Flow]:
        memory = self.memory
        full = memory.free_bytes <= TOLERANCE
        oldest: int | None = None
        oldest_unspared: int | None = None
        if full:
            oldest = memory.oldest()
            oldest_unspared = memory.victim(spared)
        sources = {queue.source for queue in self._order if queue}
        incoming = _Lane(self.hardware, "host_to_device", "disk_read", both={HOST, DISK} <= sources)
        outgoing = _Lane(self.hardware, "device_to_host", "disk_write", both=False)
        fresh = self.fresh_bytes_per_s
        flows = []
        for queue in self._order:
            if not queue:
                continue
            rate = min(fresh, incoming.left(queue.source))
            victim, target = -1, NOWHERE
            if full:
                demand = queue.demand or urgent or queue.tensor in needed
                key = oldest if demand else oldest_unspared
                if key is None:
                    continue
                victim, target = key, self._target(key, queue, alive)
                rate = min(rate, outgoing.left(target))
            if rate <= TOLERANCE:
                continue
            fresh -= rate
            incoming.use(queue.source, rate)
            outgoing.use(target, rate)
            turns = victim >= 0 and queue.demand and queue.only_one and target == queue.source
            turns = turns and memory.run(victim)[0] == queue.tensor
            joins = victim >= 0 and memory.open_run(queue.tensor) == victim
            flows.append(_Flow(queue, rate, victim, target, turns, joins))
        return flows

    def _target(self, key: int, queue: Queue, alive: Container[int]) -> int:
        """Where the pages of a run go when those of ``queue`` come."""
        if self.drops_dead and self.memory.run(key)[0] not in alive:
            return NOWHERE
        return HOST if queue.source == HOST or self.memory.host_room_bytes >= PAGE_BYTES else DISK

    def _until_change(self, flows: list[_Flow]) -> float:
        """Seconds until one of the flows cannot go on as it does."""
        memory = self.memory
        leaving: defaultdict[int, float] = defaultdict(float)
        until_s = float("inf")
        to_host = growth = 0.0
        for flow in flows:
            if not flow.turns:
                until_s = min(until_s, flow.queue.head_bytes / flow.bytes_per_s)
            if flow.victim < 0:
                growth += flow.bytes_per_s
            elif not flow.joins:
                leaving[flow.victim] += flow.bytes_per_s
            to_host += flow.bytes_per_s * ((flow.target == HOST) - (flow.queue.source == HOST))
        for key, bytes_per_s in leaving.items():
            until_s = min(until_s, memory.run(key)[1] / bytes_per_s)
        if growth > 0:
            until_s = min(until_s, memory.free_bytes / growth)
        if to_host > TOLERANCE and any(flow.target == HOST != flow.queue.source for flow in flows):
            until_s = min(until_s, max(memory.host_room_bytes, 0.0) / to_host)
        return until_s

    def _move(self, flow: _Flow, size_bytes: float, needed: Container[int]) -> None:
        if not flow.turns and flow.queue.head_bytes - size_bytes <= TOLERANCE:
            size_bytes = flow.queue.head_bytes
        source = flow.queue.source
        if flow.joins:
            self.memory.swap(flow.queue, size_bytes, flow.target)
            self.moved_bytes[_OUT[flow.target]] += size_bytes
            self.moved_bytes[_IN[source]] += size_bytes
            return
        if flow.victim >= 0:
            tensor, run_bytes = self.memory.run(flow.victim)
            if run_bytes == 0:  # another flow has taken the last of it: the next step finds another
                return
            size_bytes = min(size_bytes, run_bytes)
            self.memory.evict(flow.victim, size_bytes, flow.target)
            self.moved_bytes[_OUT[flow.target]] += size_bytes
            if tensor in needed:
                self.memory.request(tensor, self.demands)
        self.moved_bytes[_IN[source]] += size_bytes
        self.memory.arrive(flow.queue, size_bytes)
