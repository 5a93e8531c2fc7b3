"""The direct path between a GPU and the disk, beside the bounce path through host memory.

The direct path (GPUDirect Storage) needs drivers and a file system that allow it, and is not always the
faster one. It is tried before anything depends on it; then `Choice` decides by what whole transfers cost,
size by size.
"""

from __future__ import annotations

import functools
import queue
import time
from collections.abc import Callable

import torch

from penstock.errors import PenstockError
from penstock.runtime.devices import Copy
from penstock.runtime.devices.queues import call_then, copy_error
from penstock.runtime.devices.staging import Staging
from penstock.storage.choice import Choice
from penstock.storage.costs import Kind
from penstock.storage.extents import Extent
from penstock.storage.spill import MEASURED_EVERY, SpillSpace, Transfer

BOUNCE = "bounce"  # its part between host memory and disk goes by I/O paths of its own
SMALLEST_DIRECT_BYTES = 16 << 10  # kvikio itself copies less than this through host memory
TRIAL_BYTES = (1 << 20) + 1001


class Paths:
    """Copies storages between a device and the disk, each by the path that is fastest for its size.

    choice   between the paths; None where there is only the bounce path

    Raises InvalidArgument where the direct path was requested by name, and is not usable.
    """

    def __init__(self, spill: SpillSpace, device: torch.device) -> None:
        self._spill = spill
        self._asked: dict[Kind, int] = {"write": 0, "read": 0}
        self.choice: Choice | None = None
        if (direct := spill.gpu_direct) is None:
            return
        if (failure := self._trial_failure(device)) is not None:
            spill.give_up_gpu_direct(failure)
            return
        names = (direct,) if spill.gpu_direct_only else (BOUNCE, direct)
        self.choice = spill.new_choice("gpu", dict.fromkeys(names, "disk"))

    def allocate(self, size_bytes: int) -> Extent:
        """Spill space: on disk where the direct path is the only one wanted. Raises SpillSpaceFull."""
        return self._spill.allocate(size_bytes, on_disk=self._spill.gpu_direct_only)

    def move(self, bounce: Staging, copy: Copy, priority: int) -> None:
        """Begin to copy the storage to the disk, or the disk's bytes to the storage."""
        choice, size_bytes, kind = self.choice, copy.size_bytes, _kind(copy)
        is_seen = copy.managed.persistent and not self._spill.gpu_direct_only  # a processor checksums it
        if choice is None or copy.block.space != "disk" or size_bytes < SMALLEST_DIRECT_BYTES or is_seen:
            bounce.start(copy, priority)
            return
        with self._spill.lock:
            if kind == "write":
                path = choice.path_to_write(size_bytes)
            else:
                path = choice.path_to_read(size_bytes, "disk")
            explores = choice.explores
            self._asked[kind] += 1
            measured = explores or not self._asked[kind] % MEASURED_EVERY
        if measured:  # it has the direction to itself: what others take at the same time is not its cost
            bounce.drain()
            begun_s = time.perf_counter()
            copy.then = functools.partial(self._observe, copy.then, choice, path, explores, begun_s)
        if path != BOUNCE:
            self._directly(copy, kind)
            return
        bounce.start(copy, priority)
        if measured:
            bounce.drain()

    def _observe(
        self,
        then: Callable[[Copy], None],
        choice: Choice,
        path: str,
        explores: bool,
        begun_s: float,
        copy: Copy,
    ) -> None:
        """Learn what a copy cost, by one path, that is over."""
        # All of it counts: the direct path also waits for kernels that the bounce path overlaps.
        cost_s = time.perf_counter() - begun_s
        with self._spill.lock:
            if copy.error is None:
                choice.observe(_kind(copy), copy.size_bytes, path, cost_s)
            elif explores:
                choice.withdraw(_kind(copy), copy.size_bytes, path)
        then(copy)

    def _directly(self, copy: Copy, kind: Kind) -> None:
        try:
            copy.wait()  # no stream carries it out that could wait
            assert copy.storage is not None
            transfer = _move_directly(self._spill, kind, copy.block, copy.storage)
        except Exception as error:
            copy.error = copy_error(error)
        else:
            copy.error = transfer.error
            if transfer.error is None:  # it occupied both links at once
                links = ("device_to_host", "disk_write") if copy.out else ("disk_read", "host_to_device")
                times = transfer.started_s, transfer.finished_s
                copy.moved = [copy.moved_over(link, *times) for link in links]
        call_then(copy)

    def _trial_failure(self, device: torch.device) -> str | None:
        """Why bytes cannot be written by the direct path and read back; None where they can."""
        # Made without random numbers: the program's stay what they would be without penstock. A copy from
        # ordinary host memory is complete when it returns.
        written = (torch.arange(TRIAL_BYTES) * 131 % 251).to(torch.uint8).to(device)
        read = torch.zeros(TRIAL_BYTES, dtype=torch.uint8).to(device)
        try:
            extent = self._spill.allocate(TRIAL_BYTES, on_disk=True)
            for kind, content in (("write", written), ("read", read)):
                transfer = _move_directly(self._spill, kind, extent, content.untyped_storage())
                if transfer.error is not None:
                    break
            self._spill.release(extent)  # not where the trial hangs: it may still write there
            if transfer.error is not None:
                return str(transfer.error)
        except PenstockError as error:
            return str(error)
        return None if torch.equal(written, read) else "bytes come back from it other than they were written"


def _kind(copy: Copy) -> Kind:
    return "write" if copy.out else "read"


def _move_directly(spill: SpillSpace, kind: str, extent: Extent, storage: torch.UntypedStorage) -> Transfer:
    over: queue.SimpleQueue[Transfer] = queue.SimpleQueue()
    move = spill.write if kind == "write" else spill.read
    move(extent, storage.data_ptr(), storage.nbytes(), storage, over.put, on_gpu=True)
    try:
        return over.get(timeout=spill.timeout_s)
    except queue.Empty:  # the transfer has the memory and the extent, for ever
        raise spill.hang_error() from None
