"""Where the pages of every tensor are while a device pages on demand, and which leave next."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Container, Sequence

PAGE_BYTES = 4096

# Where a page can come from. NOWHERE: it was never touched, or was dropped.
NOWHERE, HOST, DISK = range(3)

TOLERANCE = 1.0  # bytes: less than a byte is nothing, so that sums of floating point numbers end


class Queue:
    """Pages to be copied to the device from one place, first come, first served.

    source   NOWHERE, HOST or DISK
    demand   a kernel waits for them; otherwise they are prefetched
    """

    def __init__(self, source: int, demand: bool) -> None:
        self.source = source
        self.demand = demand
        self._entries: deque[list[float]] = deque()  # [tensor, bytes]

    def __bool__(self) -> bool:
        return bool(self._entries)

    def push(self, tensor: int, size_bytes: float) -> None:
        if self._entries and self._entries[-1][0] == tensor:
            self._entries[-1][1] += size_bytes
        else:
            self._entries.append([tensor, size_bytes])

    @property
    def only_one(self) -> bool:
        """What is pushed for the tensor at the head joins the head."""
        return len(self._entries) == 1

    @property
    def tensor(self) -> int:
        return int(self._entries[0][0])

    @property
    def head_bytes(self) -> float:
        return self._entries[0][1]

    def take(self, size_bytes: float) -> float:
        """Take bytes of the first entry: those that are left of it. It goes where that is less than one."""
        entry = self._entries[0]
        entry[1] -= size_bytes
        if entry[1] <= TOLERANCE:
            self._entries.popleft()
        return entry[1]


class Memory:
    """The pages of all tensors, as runs of bytes, on device, host and disk.

    A driver sees faults and migrations, not hits: the page that came to the device first leaves
    first ("least recently used" as UVM does it, Allen and Ge 2021).

    size_bytes   [T] of each tensor, in whole pages
    """

    def __init__(self, size_bytes: Sequence[float], device_bytes: float, host_bytes: float) -> None:
        self.size_bytes = list(size_bytes)
        count = len(self.size_bytes)
        self.at = [list(self.size_bytes), [0.0] * count, [0.0] * count]  # by source: NOWHERE, HOST, DISK
        self.queued = [[0.0] * count for _ in range(3)]
        self.free_bytes = device_bytes
        self.host_room_bytes = host_bytes
        self.disk_used_bytes = 0.0
        self._runs: OrderedDict[int, list[float]] = OrderedDict()  # key -> [tensor, bytes], oldest first
        self._open: dict[int, int] = {}  # tensor that is arriving -> its run
        self._next_key = 0

    def start_at(self, tier: int, tensor: int) -> None:
        """Before anything has moved, the tensor is on the HOST or the DISK."""
        self.at[NOWHERE][tensor] = 0.0
        self.at[tier][tensor] = self.size_bytes[tensor]
        if tier == HOST:
            self.host_room_bytes -= self.size_bytes[tensor]
        else:
            self.disk_used_bytes += self.size_bytes[tensor]

    def waiting(self, tensor: int) -> bool:
        """Some of its pages are queued for the device."""
        return any(queued[tensor] > 0 for queued in self.queued)

    def request(self, tensor: int, queues: Sequence[Queue]) -> list[float]:
        """Queue the pages that are not on the device and not queued yet, in the queue of their source
        (``queues`` is by source). The bytes queued, by source."""
        added = []
        for source, queue in enumerate(queues):
            missing = self.at[source][tensor] - self.queued[source][tensor]
            if missing > TOLERANCE:
                queue.push(tensor, missing)
                self.queued[source][tensor] += missing
            added.append(max(missing, 0.0))
        return added

    def oldest(self) -> int | None:
        """The key of the run that came first."""
        return next(iter(self._runs), None)

    def victim(self, spared: Container[int]) -> int | None:
        """The key of the oldest run of a page or more whose tensor is not ``spared``."""
        for key, (tensor, size_bytes) in self._runs.items():
            if tensor not in spared and size_bytes > PAGE_BYTES - TOLERANCE:
                return key
        return None

    def open_run(self, tensor: int) -> int | None:
        """The key of the run that pages of the tensor join when they arrive; None where they begin one."""
        # Pages that arrive side by side interleave; they are kept as one run each. The oldest run is
        # about to leave, so that what arrives now must not join it.
        key = self._open.get(tensor)
        return None if key not in self._runs or key == self.oldest() else key

    def run(self, key: int) -> tuple[int, float]:
        """Its tensor and bytes; no bytes where it has left."""
        tensor, size_bytes = self._runs.get(key, (-1, 0.0))
        return int(tensor), size_bytes

    def arrive(self, queue: Queue, size_bytes: float) -> None:
        """The first bytes of ``queue`` reach the device."""
        tensor = queue.tensor
        self.free_bytes -= size_bytes
        key = self.open_run(tensor)
        if key is None:
            key = self._next_key
            self._next_key += 1
            self._runs[key] = [tensor, 0.0]
            self._open[tensor] = key
        self._runs[key][1] += size_bytes
        self._take(queue, size_bytes)

    def swap(self, queue: Queue, size_bytes: float, target: int) -> None:
        """The first bytes of ``queue`` join a run of their tensor, as many of which leave for ``target``."""
        self._enter_tier(target, queue.tensor, size_bytes)
        self._take(queue, size_bytes)

    def _take(self, queue: Queue, size_bytes: float) -> None:
        tensor, source = queue.tensor, queue.source
        self._leave_tier(source, tensor, size_bytes)
        self.queued[source][tensor] -= size_bytes
        left_bytes = queue.take(size_bytes)
        if left_bytes <= TOLERANCE:
            self._open.pop(tensor, None)
            self.queued[source][tensor] -= left_bytes
        if self.queued[source][tensor] <= TOLERANCE:
            self.queued[source][tensor] = 0.0

    def evict(self, key: int, size_bytes: float, target: int) -> None:
        """Bytes of a run leave for HOST or DISK, or are dropped (NOWHERE)."""
        run = self._runs[key]
        tensor = int(run[0])
        run[1] -= size_bytes
        if run[1] <= TOLERANCE:
            size_bytes += run[1]
            del self._runs[key]
        self.free_bytes += size_bytes
        self._enter_tier(target, tensor, size_bytes)

    def _enter_tier(self, target: int, tensor: int, size_bytes: float) -> None:
        self.at[target][tensor] += size_bytes
        if target == HOST:
            self.host_room_bytes -= size_bytes
        elif target == DISK:
            self.disk_used_bytes += size_bytes

    def _leave_tier(self, source: int, tensor: int, size_bytes: float) -> None:
        self.at[source][tensor] = max(self.at[source][tensor] - size_bytes, 0.0)
        if source == HOST:
            self.host_room_bytes += size_bytes
        elif source == DISK:
            self.disk_used_bytes -= size_bytes
