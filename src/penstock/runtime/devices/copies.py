"""Copies between an accelerator and the tiers below it: host memory, by streams of their own, and disk."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock._native import DEMAND, EVICT
from penstock.errors import PenstockError
from penstock.runtime.devices import Done, Moved
from penstock.runtime.devices.direct import Paths
from penstock.runtime.devices.driver import Driver
from penstock.runtime.devices.pinned import PinnedSlab
from penstock.runtime.devices.queues import Copy, CopyQueue, StreamQueue
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
                functools.partial(self._issue, name == "out"),
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
                functools.partial(move, staged),
                driver,
                staged.wait_for_room,
            )
            for name, move, staged in (
                ("out", self.paths.write, self._staged_out),
                ("in", self.paths.read, self._staged_in),
            )
        )
        # By key: the copy of it as it is, which kernels may wait for if it is to or from the host.
        self._waitable: dict[int, tuple[CopyQueue | StreamQueue, Copy]] = {}
        self._waited_on: set[Any] = set()  # events of those that they wait for
        self._programs: set[int] = set()  # threads that have polled
        self._lock = threading.Lock()  # both, and how many copies use a block of the slab

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

    def begin(
        self,
        out: bool,
        managed: ManagedStorage,
        content: torch.UntypedStorage,
        ready: list[Any],
        done: Done,
        *,
        kernels_may_wait: bool = False,
        priority: int = EVICT,
    ) -> None:
        """Copy a storage's content, as it is or packed, to its slot, or back.

        ready              events after which it may begin
        kernels_may_wait   for it, on the device, if it is to or from the host
        """
        slot: AcceleratorSlot = managed.slot
        queues = (self._from_host, self._to_host) if slot.tier == "host" else (self._from_disk, self._to_disk)

        def over(error: PenstockError | None, moved: Sequence[Moved]) -> None:
            with self._lock:
                if self._waitable.get(managed.key) == waitable:
                    del self._waitable[managed.key]
                    managed.copy_pending = False
                self._waited_on.discard(copy.over)
                self._copy_over(slot)
            self._events.free.extend(ready)
            done(error, moved)

        copy = Copy(managed, content, slot.block, ready, over)
        waitable = queues[out], copy
        with self._lock:
            slot.copies += 1
            managed.copy_pending = kernels_may_wait
            try:
                waitable[0].put(copy, priority)
            except BaseException:
                self._copy_over(slot)
                managed.copy_pending = False
                raise
            if kernels_may_wait:
                self._waitable[managed.key] = waitable

    def _copy_over(self, slot: AcceleratorSlot) -> None:
        slot.copies -= 1
        if slot.is_freed and not slot.copies:
            self.slab.release(slot.block)

    def make_kernels_wait(self, managed: ManagedStorage) -> bool:
        """Make kernels wait for the storage's copy. False: there is no copy that they can wait for."""
        with self._lock:
            waitable = self._waitable.get(managed.key)
            if waitable is None:
                return False
            waiting, copy = waitable
            event = waiting.issue_now(copy)
            if event is None:  # it is to or from the disk, or failed, as `done` reports
                return False
            del self._waitable[managed.key]
            self._waited_on.add(event)
            copy.storage = None  # memory freed from now on is freed behind the copy
            for stream in {*self.streams, managed.owner_stream}:
                stream.wait_event(event)
        return True

    def change(self, managed: ManagedStorage, change: Callable[[], Any]) -> bool:
        """Call ``change`` before the storage's copy is issued, and make the copy wait for the event that it
        returns. False: there is no such copy, or it was issued already."""
        with self._lock:
            waitable = self._waitable.get(managed.key)
            managed.copy_pending = waitable is not None and waitable[0].add_wait(waitable[1], change)
            return managed.copy_pending

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

    def _issue(self, out: bool, copy: Copy, stream: Any) -> tuple[Any, Any]:
        """Issue a copy between device and host. Returns the events at its begin and its end."""
        content = self._contents[out]
        content.set_(copy.storage, copy.begin, (copy.size_bytes,), (1,))
        try:
            host = self.slab.tensor(copy.block, copy.size_bytes)
            begun = self._times.record(stream)
            self._driver.copy(*((host, content) if out else (content, host)), stream)
            return begun, self._times.record(stream)
        finally:
            content.set_()  # else it kept the storage alive


def as_bytes(storage: torch.UntypedStorage | None) -> torch.Tensor:
    """The storage as bytes. A tensor of its own: versions that autograd checks stay as they are."""
    assert storage is not None
    view = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return view.set_(storage, 0, (storage.nbytes(),), (1,))  # type: ignore[call-overload, no-any-return]
