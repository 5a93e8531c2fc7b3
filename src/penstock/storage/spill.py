"""Spill space on one or several disks, and the transfers between it and memory."""

from __future__ import annotations

import errno
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.errors import InvalidArgument, SpillError, SpillSpaceFull
from penstock.storage.aligned import align_up
from penstock.storage.checksum import crc32c_at
from penstock.storage.choose import Choice
from penstock.storage.directions import DirectionQueue
from penstock.storage.engine import Engine, Way
from penstock.storage.extents import ALIGNMENT_BYTES, Extent, Extents
from penstock.storage.rounds import ChoiceReport
from penstock.storage.sharing import add_tables, device_kind, read_tables
from penstock.storage.spillfile import SpillFile
from penstock.storage.stripes import Stripes
from penstock.storage.tables import Mode, Tables
from penstock.storage.transports import DEMAND, EVICT, Completion, Kind, Request
from penstock.units import format_bytes, format_bytes_up, format_seconds

logger = logging.getLogger("penstock")


class Transfer(NamedTuple):
    """A write or a read that is over.

    error                  None, or what went wrong: then the destination holds anything
    started_s, finished_s  time.perf_counter() when its first piece began and its last one ended
    """

    error: SpillError | None
    started_s: float
    finished_s: float


OnDone = Callable[[Transfer], None]

# Of the transfers by the way in use, one in so many is measured, to see whether it is still the best.
_MEASURED_EVERY = 64

TIMEOUT_S = 120.0

_CLOSED = "the spill space is closed: no tensor can be moved any more"

Directories = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def as_paths(directories: Directories) -> list[Path]:
    """One or several directories as a list. Raises InvalidArgument where there is none."""
    if isinstance(directories, str | os.PathLike):
        return [Path(directories)]
    paths = [Path(path) for path in directories]
    if not paths:
        raise InvalidArgument("no directory to spill to was given: give one or more")
    return paths


class SpillSpace:
    """Extents of spill space, written from memory and read back in the background. A context manager.

    directories       where the spill files go; with several, every tensor is striped over all of them
    capacity_bytes    most bytes on disk, None for as many as the disks hold
    page_cache_bytes  most bytes to leave in the page cache, which is memory: ways that pass through it
                      are tried only if this is above zero
    ways              names of the ways that may be used, None for all there are
    mode, reexplore, pinned   as of Choice
    tables_path       a file that other processes share: read now, added to by `save_tables`, and on
                      `close`
    verify            checksum what is written, and check it when it is read: about 0.05 CPU seconds
                      a gigabyte each
    gpu               also look for a way between the memory of a GPU and the disk
    timeout_s         the disk hangs where no transfer ends for so long: then what waits for its turn
                      fails, and so does `close`. What the system has begun cannot be taken back: its
                      memory stays in use

    ways, unavailable   as of Engine
    choice              chooses among the ways, and learns
    gpu_direct          name of the way between the memory of a GPU and the disk, None where there is
                        none. It is not among ``ways``: who has the memory chooses it
    gpu_direct_only     no other way was wanted
    device_kind         what the directories lie on
    direct              every file can bypass the page cache
    written_bytes, read_bytes, moved_bytes_by_way   moved so far

    Every method may be called from any thread. Raises SpillError where a directory cannot be used.
    """

    def __init__(
        self,
        directories: Directories,
        capacity_bytes: int | None = None,
        *,
        page_cache_bytes: int = 0,
        ways: Sequence[str] | None = None,
        mode: Mode = "write+read",
        reexplore: float = 0.005,
        pinned: str | Mapping[str, str] | None = None,
        tables_path: Path | None = None,
        verify: bool = False,
        gpu: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        paths = as_paths(directories)
        self.timeout_s = timeout_s
        self._capacity_bytes = capacity_bytes
        if capacity_bytes is not None:
            page_cache_bytes = min(page_cache_bytes, capacity_bytes)
            capacity_bytes -= page_cache_bytes
        self._engine = Engine(ways, domains=None if page_cache_bytes else ("disk",), gpu=gpu)
        self.ways = self._engine.ways
        self._regions: dict[str, _Region] = {}
        self._swap: SpillFile | None = None
        try:
            self._regions["disk"] = _Region("disk", paths, capacity_bytes)
            if any(way.domain == "page cache" for way in self._engine.ways.values()):
                self._regions["page cache"] = _Region("page cache", paths, page_cache_bytes)
            self.device_kind = device_kind(paths)
            self.choice = Choice(
                {way.name: way.domain for way in self.ways.values()},
                mode=mode,
                reexplore=reexplore,
                pinned=pinned,
                copying=[way.name for way in self.ways.values() if way.kind == "staged"],
                tables=read_tables(tables_path, self.device_kind) if tables_path else None,
            )
            self._gpu_way = self._usable_gpu_way(verify)
        except BaseException:
            self._close_files()
            self._engine.close()
            raise
        self.unavailable = self._engine.unavailable
        self.direct = self._regions["disk"].direct
        self.gpu_direct_only = (
            ways is not None and self.gpu_direct is not None and set(ways) == {self.gpu_direct}
        )
        self.moved_bytes_by_way: dict[str, int] = dict.fromkeys((*self.ways, *self._engine.gpu_ways), 0)
        self._tables_path = tables_path
        self.written_bytes = 0
        self.read_bytes = 0
        self._verify = verify
        self._checksums: dict[tuple[str, int], tuple[int, int]] = {}  # of the last write, and its size
        self._chosen: dict[Extent, str] = {}  # the way to write, from allocation on
        self._queues: dict[Kind, DirectionQueue[PendingTransfer]] = {
            "write": DirectionQueue(),
            "read": DirectionQueue(),
        }
        self._first_directory = paths[0]
        self._watch: threading.Timer | None = None  # while something waits for its turn
        self._hangs = False  # `close` gave up
        self._starting = threading.local()
        self._telling: set[PendingTransfer] = set()  # they are over, and somebody is being told
        self._asked: dict[Kind, int] = {"write": 0, "read": 0}
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._closed = False

    @property
    def gpu_direct(self) -> str | None:
        return None if self._gpu_way is None else self._gpu_way.name

    @property
    def place_text(self) -> str:
        """The directories, for messages."""
        return ", ".join(str(file.directory) for file in self._regions["disk"].files)

    @property
    def used_bytes(self) -> int:
        """Bytes of the extents in use."""
        return sum(region.extents.used_bytes for region in self._regions.values())

    @property
    def file_bytes(self) -> int:
        """Bytes the spill files occupy on disk."""
        extents = sum(file.size_bytes for region in self._regions.values() for file in region.files)
        return extents + self._swap_bytes()

    @property
    def free_bytes(self) -> int:
        """Bytes the file systems have free. Two directories on one file system count it twice."""
        return sum(file.free_bytes() for file in self._regions["disk"].files)

    def swap_file(self, capacity_bytes: int | None = None) -> tuple[int, int, int]:
        """A file for who writes by itself, without extents: it has no name either, lies in the first
        directory, grows as it is written to, and is closed with the space.

        capacity_bytes   most bytes wanted, None for all there is room for

        Gives its descriptor past the page cache, or -1, the one through the page cache, and its capacity:
        what the space's capacity and the file system leave now. Its bytes count in `file_bytes`, and
        extents get what they leave of the space's capacity.
        """
        with self._lock:
            self._check_open()
            if self._swap is None:
                self._swap = SpillFile(self._first_directory)
            left_bytes = self._swap.free_bytes() + self._swap_bytes()
            if self._capacity_bytes is not None:
                left_bytes = min(left_bytes, max(self._capacity_bytes - self.used_bytes, 0))
            if capacity_bytes is not None:
                left_bytes = min(left_bytes, capacity_bytes)
            return self._swap.file.direct, self._swap.file.buffered, left_bytes

    def allocate(self, size_bytes: int, on_disk: bool = False) -> Extent:
        """Space for ``size_bytes``. Raises SpillSpaceFull where the disk, or the capacity, is full.

        on_disk   not in the page cache
        """
        with self._lock:
            self._check_open()
            size_bytes = align_up(size_bytes, ALIGNMENT_BYTES)  # the size that the choice knows it by
            self._leave_room_to_swap(size_bytes)
            way = self.choice.way_to_write(size_bytes, ("disk",) if on_disk else self._roomy(size_bytes))
            try:
                extent = self._regions[self.ways[way].domain].allocate(size_bytes)
            except SpillSpaceFull:
                self.choice.withdraw("write", size_bytes, way)
                if self.ways[way].domain == "disk":
                    raise
                way = self.choice.way_to_write(size_bytes, ("disk",))  # the room was in pieces
                extent = self._regions["disk"].allocate(size_bytes)
            self._chosen[extent] = way
            return extent

    def release(self, extent: Extent) -> None:
        """Take the space back. No transfer of the extent may be in flight."""
        with self._lock:
            self._checksums.pop((extent.space, extent.offset), None)
            self._regions[extent.space].extents.release(extent)
            if (unused := self._chosen.pop(extent, None)) is not None:
                self.choice.withdraw("write", extent.size_bytes, unused)

    def write(
        self,
        extent: Extent,
        address: int,
        size_bytes: int,
        keep: object,
        on_done: OnDone,
        *,
        checksum: bool = False,
        priority: int = EVICT,
    ) -> PendingTransfer:
        """Copy memory to the extent; ``on_done`` is called once, on any thread, maybe before this returns.

        address    of the memory; a multiple of 4096 spares a copy
        keep       what keeps the memory alive: held until the transfer is over
        checksum   checksum the bytes, and check them when they are read, also where the space does not
                   verify everything
        priority   DEMAND, PREFETCH or EVICT: which of those that wait for the disk goes first, of both
                   directions. A demand waits for no measurement
        """
        self._check(extent, size_bytes)
        with self._lock:
            name = self._chosen.pop(extent, None)
            if name is None:  # it is written once more
                name = self.choice.way_to_write(extent.size_bytes, (extent.space,))
        self._checksums.pop((extent.space, extent.offset), None)
        return self._add(
            "write",
            self.ways[name],
            extent,
            address,
            size_bytes,
            keep,
            on_done,
            priority,
            self._verify or checksum,
        )

    def read(
        self,
        extent: Extent,
        address: int,
        size_bytes: int,
        keep: object,
        on_done: OnDone,
        *,
        priority: int = DEMAND,
    ) -> PendingTransfer:
        """Copy from the extent to memory; as `write`."""
        self._check(extent, size_bytes)
        with self._lock:
            # What cannot be measured teaches nothing: it goes by the way that is known to be good.
            explore = priority != DEMAND or self._queues["read"].is_idle
            name = self.choice.way_to_read(extent.size_bytes, extent.space, explore)
        return self._add("read", self.ways[name], extent, address, size_bytes, keep, on_done, priority)

    def segments(self, extent: Extent, size_bytes: int) -> list[tuple[int, int, int, int]]:
        """Where the extent lies: (file descriptor, offset in the file, offset in the extent, bytes) of each
        piece."""
        region = self._regions[extent.space]
        return [
            (
                region.files[segment.file].file.buffered,
                segment.offset,
                segment.begin,
                segment.size_bytes,
            )
            for segment in region.stripes.segments(extent.offset, size_bytes)
        ]

    def write_from_gpu(
        self,
        extent: Extent,
        address: int,
        size_bytes: int,
        keep: object,
        on_done: OnDone,
        *,
        priority: int = EVICT,
    ) -> PendingTransfer:
        """As `write`, from the memory of a GPU, by `gpu_direct`. The extent is on disk.

        address   a device pointer. What makes the content there is over
        """
        self._check(extent, size_bytes)
        with self._lock:
            if (unused := self._chosen.pop(extent, None)) is not None:
                self.choice.withdraw("write", extent.size_bytes, unused)
        way = self._way_to_gpu(extent)
        return self._add("write", way, extent, address, size_bytes, keep, on_done, priority)

    def read_to_gpu(
        self,
        extent: Extent,
        address: int,
        size_bytes: int,
        keep: object,
        on_done: OnDone,
        *,
        priority: int = DEMAND,
    ) -> PendingTransfer:
        """As `read`, to the memory of a GPU, by `gpu_direct`. What used the memory before is over."""
        self._check(extent, size_bytes)
        way = self._way_to_gpu(extent)
        return self._add("read", way, extent, address, size_bytes, keep, on_done, priority)

    def give_up_gpu_direct(self, reason: str) -> None:
        """Do without `gpu_direct`, which proved unusable. Raises InvalidArgument where it was wanted."""
        if (way := self._gpu_way) is not None:
            self._gpu_way = None
            self._engine.give_up(way, reason)

    def save_tables(self) -> None:
        """Add what was learned to the file that was given as ``tables_path``, if any."""
        if self._tables_path is not None:
            add_tables(self._tables_path, self.device_kind, self.tables(), self.timeout_s)

    def tables(self) -> Tables:
        """What the ways cost, as far as it is known."""
        with self._lock:
            return self.choice.tables()

    def report(self) -> ChoiceReport:
        """How often each way was the fastest."""
        with self._lock:
            return self.choice.report()

    def close(self) -> None:
        """Wait for transfers in flight, then give the disk space back. Idempotent.

        Raises SpillError where the disk hangs. What has not begun has failed then; the files stay open
        until the process ends, since the system may still write to them.
        """
        with self._lock:
            first = not self._closed
            self._closed = True
            if self._watch is not None:
                self._watch.cancel()
        timeout_s = 0.0 if self._hangs else self.timeout_s
        if not self._drain(timeout_s) or not self._engine.close(timeout_s):
            self._give_up()
            raise self.hang_error()
        self._close_files()
        if first:
            self.save_tables()

    def hang_error(self) -> SpillError:
        """What to raise where a wait for a transfer has lasted for ``timeout_s``."""
        error = SpillError(
            f"no transfer to or from {self.place_text} has ended for {format_seconds(self.timeout_s)}: the "
            "disk hangs. Check it (dmesg, smartctl), or choose another spill_dir."
        )
        error.errno = errno.ETIMEDOUT
        return error

    def __enter__(self) -> SpillSpace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _close_files(self) -> None:
        for region in self._regions.values():
            region.close()
        if self._swap is not None:
            self._swap.close()
            self._swap = None

    def _swap_bytes(self) -> int:
        return 0 if self._swap is None else os.fstat(self._swap.file.buffered).st_blocks * 512

    def _leave_room_to_swap(self, size_bytes: int) -> None:
        if self._swap is None or self._capacity_bytes is None:
            return
        swap_bytes, used_bytes = self._swap_bytes(), self.used_bytes
        if (missing_bytes := swap_bytes + used_bytes + size_bytes - self._capacity_bytes) > 0:
            raise SpillSpaceFull(
                f"the disk budget of {format_bytes(self._capacity_bytes)} is full: spilled tensors hold "
                f"{format_bytes(used_bytes + swap_bytes)}, and {format_bytes_up(size_bytes)} more are "
                f"needed. Raise disk_budget by {format_bytes_up(missing_bytes)}."
            )

    def _usable_gpu_way(self, verify: bool) -> Way | None:
        """The first way to move the memory of a GPU that takes all files. None is tried where bytes are to
        be verified: the processor does not see them."""
        for way in list(self._engine.gpu_ways.values()):
            refusals = [self._engine.refusal(way, file.file) for file in self._regions["disk"].files]
            reasons = ["it cannot verify what it moves"] if verify else [*filter(None, refusals)]
            if not reasons:
                return way
            self._engine.give_up(way, reasons[0])
        return None

    def _way_to_gpu(self, extent: Extent) -> Way:
        if self._gpu_way is None or extent.space != self._gpu_way.domain:
            raise InvalidArgument(f"{extent} cannot be moved to or from the memory of a GPU directly")
        return self._gpu_way

    def _roomy(self, size_bytes: int) -> list[str]:
        """The domains that may have room. The disk says itself why it has none."""
        return [
            name for name, region in self._regions.items() if name == "disk" or region.has_room(size_bytes)
        ]

    def _check(self, extent: Extent, size_bytes: int) -> None:
        self._check_open()
        if not 0 < size_bytes <= extent.size_bytes:
            raise InvalidArgument(f"{size_bytes} bytes do not fit an extent of {extent.size_bytes} bytes")

    def _check_open(self) -> None:
        if self._closed:
            raise SpillError(_CLOSED)

    def _add(
        self,
        kind: Kind,
        way: Way,
        extent: Extent,
        address: int,
        size_bytes: int,
        keep: object,
        on_done: OnDone,
        priority: int,
        checksum: bool = False,
    ) -> PendingTransfer:
        transfer = PendingTransfer(
            self, kind, way, extent, address, size_bytes, keep, on_done, priority, checksum
        )
        queue = self._queues[kind]
        with self._lock:
            measured = transfer.measured = self._is_measured(kind, way, extent)
            # Where nothing was written before, a write costs more, once: pages and blocks are made.
            transfer.rehearsed = self._regions[extent.space].is_first_write(kind, extent) and measured
            ready = queue.add(transfer)
            if queue.waiting_count and self._watch is None:
                self._begin_watch()
        self._start_all(ready)
        return transfer

    def _start_all(self, ready: Sequence[PendingTransfer]) -> None:
        if not ready:
            return
        # In a loop: a transfer may be over before its start returns, and be the turn of another.
        if (under_way := getattr(self._starting, "transfers", None)) is not None:
            under_way.extend(ready)
            return
        self._starting.transfers = transfers = deque(ready)
        interrupt: BaseException | None = None
        while transfers:
            transfer = transfers.popleft()
            try:
                transfer.start()
            except BaseException as error:  # an interrupt: whether the transfer began is not known
                interrupt = error
                with self._lock:
                    transfers.extend(self._queues[transfer.kind].ended(transfer, time.perf_counter()))
                    self._tell_if_idle()
        self._starting.transfers = None
        if interrupt is not None:
            raise interrupt

    def _hurry(self, transfer: PendingTransfer) -> None:
        with self._lock:
            if transfer.priority == DEMAND:
                return
            ready = self._queues[transfer.kind].hurry(transfer)
            requests = transfer.requests
        self._start_all(ready)
        if requests:
            self._engine.transport(transfer.way).hurry(requests)

    def _over(
        self,
        transfer: PendingTransfer,
        failed: Completion | None,
        error: SpillError | None,
        times: tuple[float, float],
    ) -> None:
        """``transfer`` is over: note what it cost, tell who asked for it, and start who waited for it.

        failed   of its requests, if any. One that never began has an ``error`` only
        """
        kind, extent, size_bytes = transfer.kind, transfer.extent, transfer.size_bytes
        now_s = time.perf_counter()
        if failed is not None:
            hung = failed.error_number == errno.ECANCELED and self._hangs
            error = self.hang_error() if hung else self._regions[extent.space].error(failed)
        moved = error is None
        if moved and kind == "read":
            error = self._damage(extent, transfer.address, size_bytes)
        with self._lock:
            name = transfer.way.name
            if name in self.ways:
                if moved and transfer.measured:
                    self.choice.observe(kind, extent.size_bytes, name, now_s - transfer.began_s)
                else:
                    self.choice.withdraw(kind, extent.size_bytes, name)
            if moved:
                if kind == "write":
                    self.written_bytes += size_bytes
                else:
                    self.read_bytes += size_bytes
                self.moved_bytes_by_way[name] += size_bytes
            ready = self._queues[kind].ended(transfer, now_s)
            self._telling.add(transfer)
        try:
            transfer.on_done(Transfer(error, *times))
        finally:
            self._telling.discard(transfer)
            if self._closed:
                with self._lock:
                    self._tell_if_idle()
            if ready:
                self._start_all(ready)

    def _tell_if_idle(self) -> None:
        if self._closed and self._is_idle():
            self._idle.notify_all()

    def _is_idle(self) -> bool:
        return not self._telling and all(queue.is_idle for queue in self._queues.values())

    def _drain(self, timeout_s: float) -> bool:
        """Wait until every transfer is over. False: none was over for so long."""
        with self._lock:
            began_s = time.perf_counter()
            while not self._is_idle():
                progress_s = max(began_s, *(queue.progress_s for queue in self._queues.values()))
                left_s = progress_s + timeout_s - time.perf_counter()
                if left_s <= 0:
                    return False
                self._idle.wait(left_s)
        return True

    def _give_up(self) -> None:
        """The disk hangs: end what has not begun."""
        self._hangs = True
        with self._lock:
            waiting = [each for queue in self._queues.values() for each in queue.take_overdue(math.inf, 0.0)]
            in_flight = [each for queue in self._queues.values() for each in queue.in_flight]
        self._fail(waiting)
        for transfer in in_flight:
            if requests := transfer.requests:
                self._engine.transport(transfer.way).cancel(requests)
        self._engine.close(0.0)

    def _fail(self, transfers: Sequence[PendingTransfer]) -> None:
        """They never began."""
        now_s = time.perf_counter()
        for transfer in transfers:
            try:
                self._over(transfer, None, self.hang_error(), (now_s, now_s))
            except Exception:  # the requester's fault: the others are told all the same
                logger.exception("what follows a transfer failed")

    def _begin_watch(self) -> None:
        """Look after those that wait for their turn, soon. Called with the lock."""
        self._watch = threading.Timer(self.timeout_s / 4, self._look)
        self._watch.daemon = True
        self._watch.name = "penstock-watch"
        self._watch.start()

    def _look(self) -> None:
        with self._lock:
            now_s, self._watch = time.perf_counter(), None
            overdue, ready = [], []
            for queue in self._queues.values():
                overdue += queue.take_overdue(now_s, self.timeout_s)
                ready += queue.take_ready()
            if not self._closed and any(queue.waiting_count for queue in self._queues.values()):
                self._begin_watch()
        self._fail(overdue)
        self._start_all(ready)

    def _is_measured(self, kind: Kind, way: Way, extent: Extent) -> bool:
        """Whether what the transfer costs is worth that others wait for it."""
        if way.name not in self.ways:
            return False
        self._asked[kind] += 1
        refresh = self._asked[kind] % _MEASURED_EVERY == 0
        return refresh or self.choice.is_trial(kind, extent.size_bytes, way.name)

    def _damage(self, extent: Extent, address: int, size_bytes: int) -> SpillError | None:
        """What is wrong with the bytes that were read."""
        written, written_bytes = self._checksums.get((extent.space, extent.offset), (None, 0))
        if written is None or written_bytes != size_bytes or crc32c_at(address, size_bytes) == written:
            return None
        places = ", ".join(str(file.directory) for file in self._regions[extent.space].files)
        return SpillError(
            f"{format_bytes(size_bytes)} came back from {places} other than they were written: the disk, its "
            "driver or memory is at fault. Check them (dmesg, smartctl), and choose another spill_dir."
        )


class PendingTransfer:
    """A write or a read that was asked for. Made by a SpillSpace.

    priority   DEMAND, PREFETCH or EVICT
    """

    __slots__ = (
        "_failed",
        "_finished_s",
        "_keep",
        "_left",
        "_space",
        "_started_s",
        "address",
        "began_s",
        "checksum",
        "extent",
        "kind",
        "measured",
        "on_done",
        "priority",
        "queued_s",
        "rehearsed",
        "requests",
        "size_bytes",
        "way",
    )

    def __init__(
        self,
        space: SpillSpace,
        kind: Kind,
        way: Way,
        extent: Extent,
        address: int,
        size_bytes: int,
        keep: object,
        on_done: OnDone,
        priority: int,
        checksum: bool = False,
    ) -> None:
        self.checksum = checksum
        self.kind: Kind = kind
        self.way = way
        self.extent = extent
        self.address = address
        self.size_bytes = size_bytes
        self.on_done = on_done
        self.priority = priority
        self.measured = False
        self.rehearsed = False  # it is carried out twice, and the second time is measured
        self.queued_s = time.perf_counter()
        self.began_s = 0.0
        self.requests: Sequence[Request] = ()  # while they are under way
        self._space = space
        self._keep = keep

    def hurry(self) -> None:
        """Somebody waits for it now: it is a demand from here on. Costs little where that changes nothing."""
        if self.priority != DEMAND:
            self._space._hurry(self)

    def start(self) -> None:
        """Its turn has come."""
        self._begin("buffered" if self.rehearsed and self.way.kind == "mapped" else self.way.kind)

    def _begin(self, way_kind: str) -> None:
        space, priority = self._space, self.priority
        region = space._regions[self.extent.space]
        self.requests = requests = [
            Request(
                self.kind,
                region.files[segment.file].file,
                segment.offset,
                self.address + segment.begin,
                segment.size_bytes,
                way_kind,
                True,
                self,
                priority,
            )
            for segment in region.stripes.segments(self.extent.offset, self.size_bytes)
        ]
        self._left = len(requests)
        self._failed: Completion | None = None
        self._started_s, self._finished_s = math.inf, 0.0
        self.began_s = time.perf_counter()
        transport = space._engine.transport(self.way)
        try:
            transport.submit(requests, self._completed)
        except ValueError as error:  # closed meanwhile
            self.requests = ()
            reason = SpillError(f"{_CLOSED}: {error}")
            space._over(self, None, reason, (self.began_s, self.began_s))
            return
        if self.priority != priority:
            transport.hurry(requests)

    def _completed(self, completion: Completion) -> None:
        if len(self.requests) == 1:
            self._note(completion)
        else:
            with self._space._lock:
                self._note(completion)
            if self._left:
                return
        self.requests = ()
        if self._failed is None:
            if self.rehearsed and self.measured:
                # Pages of the page cache that are made by mapping them are small ones: that was "buffered".
                self.rehearsed = False
                self._begin(self.way.kind)
                return
            if self.checksum:  # here, not before it began: this is no thread of the program's
                sum_of_bytes = crc32c_at(self.address, self.size_bytes)
                key = self.extent.space, self.extent.offset
                self._space._checksums[key] = sum_of_bytes, self.size_bytes
            self._keep = None  # whoever is told that it is over can free the memory
        self._space._over(self, self._failed, None, (self._started_s, self._finished_s))

    def _note(self, completion: Completion) -> None:
        self._left -= 1
        self._started_s = min(self._started_s, completion.started_s)
        self._finished_s = max(self._finished_s, completion.finished_s)
        if completion.error_number and self._failed is None:
            self._failed = completion


class _Region:
    """The space of one domain: extents, striped over one file in each directory."""

    def __init__(self, domain: str, directories: Sequence[Path], capacity_bytes: int | None) -> None:
        self.extents = Extents(capacity_bytes, space=domain)
        self.stripes = Stripes(len(directories))
        self.files: list[SpillFile] = []
        self._backed_bytes = 0  # of the space: the files reach that far
        self._written_bytes = 0  # of the space: beyond, nothing was ever written
        try:
            for directory in directories:
                self.files.append(SpillFile(directory))
        except BaseException:
            self.close()
            raise
        self.direct = all(file.direct for file in self.files)

    def allocate(self, size_bytes: int) -> Extent:
        extent = self.extents.allocate(size_bytes)
        try:
            while not self._back(extent.end):
                pass
        except BaseException:
            self.extents.release(extent)
            raise
        return extent

    def has_room(self, size_bytes: int) -> bool:
        """Whether the capacity allows it, if its free space is in one piece."""
        capacity_bytes = self.extents.capacity_bytes
        return capacity_bytes is None or self.extents.used_bytes + size_bytes <= capacity_bytes

    def is_first_write(self, kind: Kind, extent: Extent) -> bool:
        """Whether ``extent``, which is about to be moved, reaches where nothing was written before."""
        if kind == "read" or extent.end <= self._written_bytes:
            return False
        self._written_bytes = extent.end
        return True

    def _back(self, end: int) -> bool:
        """Have the files reach ``end``. False: another try may do, without a file that is full."""
        if end <= self._backed_bytes:
            return True
        capacity_bytes = self.extents.capacity_bytes
        for index, size_bytes in enumerate(self.stripes.file_bytes(end)):
            most_bytes = None if capacity_bytes is None else self.stripes.file_bytes(capacity_bytes)[index]
            try:
                self.files[index].grow_to(size_bytes, most_bytes)
            except SpillSpaceFull:
                if len(self.stripes.files) == 1:
                    raise
                self.stripes.leave_out(index, self._backed_bytes)
                return False
        self._backed_bytes = end
        return True

    def error(self, failed: Completion) -> SpillError:
        request, number = failed.request, failed.error_number
        directory = next(file.directory for file in self.files if file.file == request.file)
        full = number in (errno.ENOSPC, errno.EDQUOT)
        remedy = "Free space there" if full else "Check the disk (dmesg, smartctl)"
        error = (SpillSpaceFull if full else SpillError)(
            f"the {request.kind} of {format_bytes(request.size_bytes)} at offset {request.offset} of the "
            f"spill file in {directory} failed: {os.strerror(number)}. {remedy}, or choose another spill_dir."
        )
        error.errno = number
        return error

    def close(self) -> None:
        for file in self.files:
            file.close()
