"""Copies between an accelerator and the tiers below it: host memory, by streams of their own, and disk."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from penstock._native import DEMAND
from penstock.runtime.devices import Copy
from penstock.runtime.devices.direct import Paths
from penstock.runtime.devices.driver import Driver
from penstock.runtime.devices.pinned import PinnedSlab
from penstock.runtime.devices.queues import CopyQueue, StreamQueue
from penstock.runtime.devices.staging import Staging
from penstock.runtime.storages import ManagedStorage
from penstock.storage.extents import Extent
from penstock.storage.spill import SpillSpace


@dataclass(slots=True)
class AcceleratorSlot:
    """Where a copy of a storage is: a block of the pinned slab, or an extent of the spill space.

    codec          of the copy, and bytes of an element
    packed_bytes   that it takes then; 0: it is as it was
    copies         to or from the block, under way
    is_freed       the block is free when they are over
    """

    tier: str
    block: Extent
    codec: tuple[str, int] = ("raw", 0)
    packed_bytes: int = 0
    copies: int = 0
    is_freed: bool = False


class Events:
    """Reuses events: making one in torch costs more than launching a copy.

    timed   they have `elapsed_time`
    """

    def __init__(self, driver: Driver, timed: bool = False) -> None:
        self._driver, self._timed = driver, timed
        self.free: list[Any] = []

    def record(self, stream: Any) -> Any:
        try:
            event = self.free.pop()
        except IndexError:
            event = self._driver.make_event(self._timed)
        event.record(stream)
        return event

    def order(self, first: Any, then: Any) -> None:
        """Make work issued to the stream `then` from now on wait for the work already issued to `first`."""
        event = self.record(first)
        then.wait_event(event)
        self.free.append(event)

    def complete(self, stream: Any) -> None:
        """Block the host until all work issued to the stream has ended."""
        event = self.record(stream)
        event.synchronize()
        self.free.append(event)


class CopyQueues:
    """The queues of both directions and both tiers, and which copies kernels wait for.

    host_bytes            page-locked host memory, staging included
    chunk_bytes, chunks   of staging, for each direction

    streams   that kernels ran on
    paths     between the device and the disk
    """

    def __init__(
        self,
        driver: Driver,
        events: Events,
        spill: SpillSpace,
        host_bytes: int,
        chunk_bytes: int,
        chunks: int,
    ) -> None:
        self.streams: list[Any] = [driver.current_stream()]
        self._driver, self._events, self._spill = driver, events, spill
        self._times = Events(driver, timed=True)  # at both ends of copies
        # Into the device and out of it: what is copied, for as long as it takes to issue that.
        with torch.inference_mode(False):  # they are used outside of it, too
            self._contents = [torch.empty(0, dtype=torch.uint8, device=driver.device) for _ in range(2)]
        self.paths = Paths(spill, driver.device)
        self.slab = PinnedSlab(host_bytes, driver.page_lock, driver.page_unlock)
        self._to_host, self._from_host = (
            StreamQueue(
                f"penstock-host-{name}",
                link,
                driver.make_stream(),
                self._issue,
                self._times.free.append,
                driver,
            )
            for name, link in (("out", "device_to_host"), ("in", "host_to_device"))
        )
        self._staged_out, self._staged_in = (
            Staging(out, spill, self.slab, bus, chunk_bytes, chunks, self._on_disk_thread)
            for out, bus in ((True, self._to_host), (False, self._from_host))
        )
        self._to_disk, self._from_disk = (
            CopyQueue(
                f"penstock-disk-{name}",
                functools.partial(self.paths.move, staged),
                driver,
                staged.wait_for_room,
            )
            for name, staged in (("out", self._staged_out), ("in", self._staged_in))
        )
        self._waited_on: set[Any] = set()  # events of the copies that kernels wait for
        self._programs: set[int] = set()  # threads that have polled
        # Of that, of which copies they may wait for, and of how many use a block of the slab.
        self._lock = threading.Lock()

    def reserve(self, size_bytes: int, tier: str) -> AcceleratorSlot:
        block = self.slab.try_allocate(size_bytes) if tier == "host" else None
        if block is not None:
            return AcceleratorSlot("host", block)
        return AcceleratorSlot("disk", self.paths.allocate(size_bytes))

    def free_slot(self, slot: AcceleratorSlot) -> None:
        if slot.tier == "host":
            with self._lock:
                slot.is_freed = True
                if not slot.copies:
                    self.slab.release(slot.block)
        else:
            self._spill.release(slot.block)

    def begin(self, copy: Copy, *, kernels_may_wait: bool = False) -> None:
        """Copy a storage's content, as it is or packed, to its slot, or back.

        kernels_may_wait   for it, on the device, if it is to or from the host
        """
        slot: AcceleratorSlot = copy.managed.slot
        copy.slot, copy.block, copy.then = slot, slot.block, self._on_copy_end
        with self._lock:
            slot.copies += 1
            copy.joinable = copy.managed.copy_pending = kernels_may_wait
            try:
                self._queue(copy).put(copy)
            except BaseException:
                self._leave_slot(slot)
                copy.joinable = copy.managed.copy_pending = False
                raise

    def _queue(self, copy: Copy) -> CopyQueue | StreamQueue:
        if copy.slot.tier == "host":
            return self._to_host if copy.out else self._from_host
        return self._to_disk if copy.out else self._from_disk

    def _on_copy_end(self, copy: Copy) -> None:
        with self._lock:
            if copy.joinable:
                copy.joinable = copy.managed.copy_pending = False
            self._waited_on.discard(copy.over)
            self._leave_slot(copy.slot)
        self._events.free.extend(copy.ready)
        copy.on_end(copy)

    def _leave_slot(self, slot: AcceleratorSlot) -> None:
        slot.copies -= 1
        if slot.is_freed and not slot.copies:
            self.slab.release(slot.block)

    def make_kernels_wait(self, copy: Copy) -> bool:
        """Make kernels wait for the copy. False: they cannot."""
        managed = copy.managed
        with self._lock:
            if not copy.joinable:
                return False
            event = self._queue(copy).issue_now(copy)
            if event is None:  # it is to or from the disk, or failed, as it reports
                return False
            copy.joinable = False
            self._waited_on.add(event)
            copy.storage = None  # memory freed from now on is freed behind the copy
            for stream in {*self.streams, managed.owner_stream}:
                stream.wait_event(event)
        return True

    def change(self, copy: Copy, change: Callable[[], Any]) -> bool:
        """Call ``change`` before the copy begins, and make the copy wait for the event that it returns.
        False: it has begun."""
        with self._lock:
            copy.managed.copy_pending = copy.joinable and self._queue(copy).add_wait(copy, change)
            return copy.managed.copy_pending

    @property
    def has_backlog(self) -> bool:
        return self._to_host.has_backlog or self._from_host.has_backlog

    def poll(self) -> bool:
        """See StreamQueue: of both directions."""
        self._programs.add(threading.get_ident())
        left, came = self._to_host.poll(), self._from_host.poll()
        return left or came

    def wait_on_threads(self) -> None:
        self._to_host.wait_on_thread()
        self._from_host.wait_on_thread()

    def _on_disk_thread(self) -> None:
        """What follows a transfer to or from the disk runs on this thread."""
        if threading.get_ident() not in self._programs:  # one that failed at once may be over on these
            self._driver.use_device()

    def add_stream(self, stream: Any) -> None:
        """Kernels run on this stream, too: make it wait for the copies that the others wait for."""
        with self._lock:
            self.streams.append(stream)
            for event in self._waited_on:
                stream.wait_event(event)

    def raise_priority(self, managed: ManagedStorage) -> None:
        self._from_disk.raise_priority(managed, DEMAND)

    def close(self, timeout_s: float) -> None:
        disk = self._to_disk, self._from_disk, self._staged_out, self._staged_in
        for each in (*disk, self._to_host, self._from_host):
            each.close(timeout_s)
        self.slab.close()

    def _issue(self, copy: Copy, stream: Any) -> None:
        """Issue a copy between device and host."""
        content = self._contents[copy.out]
        content.set_(copy.storage, copy.begin, (copy.size_bytes,), (1,))
        try:
            host = self.slab.tensor(copy.block, copy.size_bytes)
            copy.begun = self._times.record(stream)
            self._driver.copy(*((host, content) if copy.out else (content, host)), stream)
            copy.over = self._times.record(stream)
        finally:
            content.set_()  # else it kept the storage alive


def as_bytes(storage: torch.UntypedStorage | None) -> torch.Tensor:
    """The storage as bytes. A tensor of its own: versions that autograd checks stay as they are."""
    assert storage is not None
    view = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return view.set_(storage, 0, (storage.nbytes(),), (1,))  # type: ignore[call-overload, no-any-return]
