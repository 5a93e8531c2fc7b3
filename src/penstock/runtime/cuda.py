"""A CUDA device as the device tier: copies on streams of their own, through page-locked host memory.

To disk it goes through staging buffers in that memory, or where there is a direct path and it is faster,
by that: see penstock.runtime.direct.

Rules that keep copies and kernels apart:

- what is copied out was made by kernels before an event on the compute stream, which the copy
  stream waits for, and for the direct path the host;
- what is copied in lands in memory taken on the compute stream, and waits for an event recorded
  then: until it the allocator's former owner may still be using the memory;
- storages are let go, and handed out, only after the host has seen the copy complete.
"""

from __future__ import annotations

import functools
import queue
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from penstock.capture.tracer import CudaMeter
from penstock.errors import InvalidArgument, PenstockError
from penstock.runtime.direct import Outcome, Paths
from penstock.runtime.mover import Done, Moved, Saved
from penstock.runtime.pinned import PinnedSlab
from penstock.storage.extents import Extent
from penstock.storage.spill import SpillSpace, Transfer
from penstock.units import format_bytes

CHUNK_BYTES = 8 << 20  # staged at once: large enough for full speed on bus and disk
CHUNKS = 8  # of staging, shared by both directions
STAGING_BYTES = CHUNK_BYTES * CHUNKS


@dataclass
class _Copy:
    """Where the bytes of a saved storage are, or go.

    tier    "host": `block` is in the pinned slab; "disk": it is an extent of the spill space
    ready   on the compute stream: the content is final, or the memory to copy to is free
    """

    tier: str
    block: Extent
    ready: torch.cuda.Event = field(default_factory=torch.cuda.Event)


class CudaDevice:
    """One CUDA device; see penstock.runtime.devices.Device.

    host_bytes        page-locked host memory, staging included
    host_tier_bytes   what of it is left as a tier
    paths             between the device and the disk
    """

    memory_manager = "CUDA caching allocator"

    def __init__(self, spill: SpillSpace, device: torch.device, host_bytes: int, fixed_bytes: int) -> None:
        if host_bytes < STAGING_BYTES:
            raise InvalidArgument(
                f"host_budget is {format_bytes(host_bytes)}: transfers between a GPU and disk need "
                f"{format_bytes(STAGING_BYTES)} of host memory for staging. Give that, or more."
            )
        self._spill = spill
        self._device = device
        self.paths = Paths(spill, device)
        self._slab = PinnedSlab(host_bytes)
        self.host_tier_bytes = host_bytes - STAGING_BYTES
        self.default_tier = "host"
        self._slots: queue.SimpleQueue[Extent] = queue.SimpleQueue()
        for _ in range(CHUNKS):
            self._slots.put(self._slab.allocate(CHUNK_BYTES))
        self._out = torch.cuda.Stream(device)
        self._in = torch.cuda.Stream(device)
        # One thread a direction: a stream executes in order anyway.
        self._outbound = ThreadPoolExecutor(1, "penstock-copy-out")
        self._inbound = ThreadPoolExecutor(1, "penstock-copy-in")
        self._foreign_bytes = max(torch.cuda.memory_allocated(device) - fixed_bytes, 0)
        self._meter = CudaMeter(device)
        self._peak_bytes = 0

    # -- carrying ------------------------------------------------------------------------------

    def is_movable(self, storage: torch.UntypedStorage) -> bool:
        return True

    def reserve(self, saved: Saved, tier: str) -> _Copy:
        block = self._slab.try_allocate(saved.size_bytes) if tier == "host" else None
        copy = (
            _Copy("host", block)
            if block is not None
            else _Copy("disk", self.paths.allocate(saved.size_bytes))
        )
        copy.ready.record(torch.cuda.current_stream(self._device))
        return copy

    def forget(self, copy: _Copy) -> None:
        if copy.tier == "host":
            self._slab.release(copy.block)
        else:
            self._spill.release(copy.block)

    def prepare(self, saved: Saved) -> torch.UntypedStorage:
        with torch.cuda.device(self._device):
            target = torch.UntypedStorage(saved.size_bytes, device=self._device)
        saved.copy.ready = torch.cuda.Event()
        saved.copy.ready.record(torch.cuda.current_stream(self._device))
        return target

    def copy_out(self, saved: Saved, done: Done) -> None:
        assert saved.storage is not None
        job = self._to_host if saved.copy.tier == "host" else self._to_disk
        self._outbound.submit(_reporting, job, saved, saved.storage, done)

    def copy_in(self, saved: Saved, target: torch.UntypedStorage, done: Done) -> None:
        job = self._from_host if saved.copy.tier == "host" else self._from_disk
        self._inbound.submit(_reporting, job, saved, target, done)

    def _to_host(self, saved: Saved, source: torch.UntypedStorage, done: Done) -> None:
        size_bytes = saved.size_bytes
        self._out.wait_event(saved.copy.ready)
        saved.copy.ready.synchronize()
        begun_s = time.perf_counter()
        self._copy(self._out, self._slab.tensor(saved.copy.block, size_bytes), self._bytes(source))
        done(None, [Moved("device_to_host", begun_s, time.perf_counter(), saved.number, size_bytes)])

    def _from_host(self, saved: Saved, target: torch.UntypedStorage, done: Done) -> None:
        size_bytes = saved.size_bytes
        self._in.wait_event(saved.copy.ready)
        saved.copy.ready.synchronize()
        begun_s = time.perf_counter()
        self._copy(self._in, self._bytes(target), self._slab.tensor(saved.copy.block, size_bytes))
        done(None, [Moved("host_to_device", begun_s, time.perf_counter(), saved.number, size_bytes)])

    def _to_disk(self, saved: Saved, source: torch.UntypedStorage, done: Done) -> None:
        saved.copy.ready.synchronize()
        done(*self.paths.write(saved, source, self._bounce_out))

    def _from_disk(self, saved: Saved, target: torch.UntypedStorage, done: Done) -> None:
        done(*self.paths.read(saved, target, self._bounce_in))

    def _bounce_out(self, saved: Saved, source: torch.UntypedStorage) -> Outcome:
        """Chunk by chunk through staging: the next one crosses the bus while this one is written."""
        self._out.wait_event(saved.copy.ready)
        content = self._bytes(source)
        moved: list[Moved] = []
        written: queue.SimpleQueue[tuple[int, Transfer]] = queue.SimpleQueue()
        asked = 0
        try:
            for begin, size_bytes in _chunks(saved.size_bytes):
                slot = self._slots.get()
                begun_s = time.perf_counter()
                try:
                    staged = self._slab.tensor(slot, size_bytes)
                    self._copy(self._out, staged, content[begin : begin + size_bytes])
                    on_written = functools.partial(self._written, written, slot, size_bytes)
                    extent, address = _part(saved.copy.block, begin, size_bytes), self._slab.address(slot)
                    self._spill.write(extent, address, size_bytes, self._slab, on_written)
                except BaseException:
                    self._slots.put(slot)
                    raise
                asked += 1
                moved.append(Moved("device_to_host", begun_s, time.perf_counter(), saved.number, size_bytes))
        finally:
            transfers = [written.get() for _ in range(asked)]
        moved += [
            Moved("disk_write", transfer.started_s, transfer.finished_s, saved.number, size_bytes)
            for size_bytes, transfer in transfers
        ]
        return next((transfer.error for _, transfer in transfers if transfer.error), None), moved

    def _written(
        self,
        written: queue.SimpleQueue[tuple[int, Transfer]],
        slot: Extent,
        size_bytes: int,
        transfer: Transfer,
    ) -> None:
        self._slots.put(slot)
        written.put((size_bytes, transfer))

    def _bounce_in(self, saved: Saved, target: torch.UntypedStorage) -> Outcome:
        """Reads run ahead as far as staging allows; each chunk crosses the bus as it arrives."""
        self._in.wait_event(saved.copy.ready)
        content = self._bytes(target)
        chunks = _chunks(saved.size_bytes)
        arrived: queue.SimpleQueue[tuple[int, int, Extent, Transfer]] = queue.SimpleQueue()
        moved: list[Moved] = []
        error: PenstockError | None = None
        asked = received = 0
        try:
            while received < len(chunks):
                # At least one read is under way; more where slots are free.
                while asked < len(chunks) and (asked == received or not self._slots.empty()):
                    self._read(saved, *chunks[asked], arrived)
                    asked += 1
                begin, size_bytes, slot, transfer = arrived.get()
                received += 1
                try:
                    error = error or transfer.error
                    if error is not None:
                        continue
                    begun_s = time.perf_counter()
                    staged = self._slab.tensor(slot, size_bytes)
                    self._copy(self._in, content[begin : begin + size_bytes], staged)
                finally:
                    self._slots.put(slot)
                number = saved.number
                moved += [
                    Moved("disk_read", transfer.started_s, transfer.finished_s, number, size_bytes),
                    Moved("host_to_device", begun_s, time.perf_counter(), number, size_bytes),
                ]
        finally:
            for _ in range(asked - received):
                self._slots.put(arrived.get()[2])
        return error, moved

    def _read(
        self,
        saved: Saved,
        begin: int,
        size_bytes: int,
        arrived: queue.SimpleQueue[tuple[int, int, Extent, Transfer]],
    ) -> None:
        slot = self._slots.get()
        extent, address = _part(saved.copy.block, begin, size_bytes), self._slab.address(slot)

        def on_done(transfer: Transfer) -> None:
            arrived.put((begin, size_bytes, slot, transfer))

        try:
            self._spill.read(extent, address, size_bytes, self._slab, on_done)
        except BaseException:
            self._slots.put(slot)
            raise

    def _copy(self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            complete = torch.cuda.Event()
            complete.record(stream)
        complete.synchronize()

    def _bytes(self, storage: torch.UntypedStorage) -> torch.Tensor:
        view = torch.empty(0, dtype=torch.uint8, device=self._device)
        return view.set_(storage, 0, (storage.nbytes(),), (1,))  # type: ignore[call-overload, no-any-return]

    # -- measuring -----------------------------------------------------------------------------

    def begin_step(self) -> None:
        self._peak_bytes = 0
        torch.cuda.reset_peak_memory_stats(self._device)

    def begin(self) -> None:
        self._note_peak()
        self._meter.begin()

    def end(self) -> int:
        return self._meter.end()

    def synchronize(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def in_use_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._foreign_bytes

    def peak_bytes(self) -> int:
        self._note_peak()
        return self._peak_bytes

    def _note_peak(self) -> None:
        peak_bytes = torch.cuda.max_memory_allocated(self._device) - self._foreign_bytes
        self._peak_bytes = max(self._peak_bytes, peak_bytes)

    def close(self) -> None:
        self._outbound.shutdown()
        self._inbound.shutdown()
        self._slab.close()


def _chunks(size_bytes: int) -> list[tuple[int, int]]:
    """(begin, bytes) of the pieces that fit a staging slot."""
    return [(begin, min(CHUNK_BYTES, size_bytes - begin)) for begin in range(0, size_bytes, CHUNK_BYTES)]


def _part(extent: Extent, begin: int, size_bytes: int) -> Extent:
    return Extent(extent.offset + begin, min(extent.size_bytes - begin, CHUNK_BYTES), extent.space)


def _reporting(
    job: Callable[[Saved, torch.UntypedStorage, Done], None],
    saved: Saved,
    storage: torch.UntypedStorage,
    done: Done,
) -> None:
    """Run a job on its thread; what it raises is the outcome of the transfer."""
    try:
        job(saved, storage, done)
    except PenstockError as error:
        done(error, [])
    except RuntimeError as error:  # the CUDA driver's
        done(PenstockError(f"a copy between the GPU and the host failed: {error}"), [])
