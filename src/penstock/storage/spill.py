"""Spill space on one or several disks, and the transfers between it and memory."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.errors import InvalidArgument, SpillError, SpillSpaceFull
from penstock.storage.aligned import align_up
from penstock.storage.checksum import crc32c_at
from penstock.storage.choose import Choice
from penstock.storage.engine import Engine, Outcome, Way
from penstock.storage.extents import ALIGNMENT_BYTES, Extent, Extents
from penstock.storage.lanes import Lane
from penstock.storage.rounds import ChoiceReport
from penstock.storage.sharing import add_tables, device_kind, read_tables
from penstock.storage.spillfile import SpillFile
from penstock.storage.stripes import Stripes
from penstock.storage.tables import Mode, Tables
from penstock.storage.transports import Completion, Kind, Request
from penstock.units import format_bytes


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

DEMAND, PREFETCH, EVICT = range(3)

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
    ) -> None:
        paths = as_paths(directories)
        if capacity_bytes is not None:
            page_cache_bytes = min(page_cache_bytes, capacity_bytes)
            capacity_bytes -= page_cache_bytes
        self._engine = Engine(ways, domains=None if page_cache_bytes else ("disk",), gpu=gpu)
        self.ways = self._engine.ways
        self._regions: dict[str, _Region] = {}
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
        self._lanes: dict[Kind, Lane] = {"write": Lane(), "read": Lane()}
        self._asked: dict[Kind, int] = {"write": 0, "read": 0}
        self._lock = threading.Lock()
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
        return sum(file.size_bytes for region in self._regions.values() for file in region.files)

    @property
    def free_bytes(self) -> int:
        """Bytes the file systems have free. Two directories on one file system count it twice."""
        return sum(file.free_bytes() for file in self._regions["disk"].files)

    def allocate(self, size_bytes: int, on_disk: bool = False) -> Extent:
        """Space for ``size_bytes``. Raises SpillSpaceFull where the disk, or the capacity, is full.

        on_disk   not in the page cache
        """
        with self._lock:
            self._check_open()
            size_bytes = align_up(size_bytes, ALIGNMENT_BYTES)  # the size that the choice knows it by
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
    ) -> None:
        """Copy memory to the extent; ``on_done`` is called once, on a thread of the engine.

        address    of the memory; a multiple of 4096 spares a copy
        keep       what keeps the memory alive: held until the transfer is over
        checksum   checksum the bytes, and check them when they are read, also where the space does not
                   verify everything
        priority   DEMAND, PREFETCH or EVICT: which of those that wait for the disk goes first
        """
        self._check(extent, size_bytes)
        with self._lock:
            name = self._chosen.pop(extent, None)
            if name is None:  # it is written once more
                name = self.choice.way_to_write(extent.size_bytes, (extent.space,))
        if self._verify or checksum:
            self._checksums[extent.space, extent.offset] = crc32c_at(address, size_bytes), size_bytes
        else:
            self._checksums.pop((extent.space, extent.offset), None)
        self._start("write", self.ways[name], extent, address, size_bytes, keep, on_done)

    def read(
        self,
        extent: Extent,
        address: int,
        size_bytes: int,
        keep: object,
        on_done: OnDone,
        *,
        priority: int = DEMAND,
    ) -> None:
        """Copy from the extent to memory; as `write`."""
        self._check(extent, size_bytes)
        with self._lock:
            name = self.choice.way_to_read(extent.size_bytes, extent.space)
        self._start("read", self.ways[name], extent, address, size_bytes, keep, on_done)

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

    def swap_file(self) -> SwapFile:
        """A file of its own for what the arena evicts by itself."""
        return SwapFile(self._regions["disk"].files[0].directory)

    def write_from_gpu(
        self, extent: Extent, address: int, size_bytes: int, keep: object, on_done: OnDone
    ) -> None:
        """As `write`, from the memory of a GPU, by `gpu_direct`. The extent is on disk.

        address   a device pointer. What makes the content there is over
        """
        self._check(extent, size_bytes)
        with self._lock:
            if (unused := self._chosen.pop(extent, None)) is not None:
                self.choice.withdraw("write", extent.size_bytes, unused)
        self._start("write", self._way_to_gpu(extent), extent, address, size_bytes, keep, on_done)

    def read_to_gpu(
        self, extent: Extent, address: int, size_bytes: int, keep: object, on_done: OnDone
    ) -> None:
        """As `read`, to the memory of a GPU, by `gpu_direct`. What used the memory before is over."""
        self._check(extent, size_bytes)
        self._start("read", self._way_to_gpu(extent), extent, address, size_bytes, keep, on_done)

    def give_up_gpu_direct(self, reason: str) -> None:
        """Do without `gpu_direct`, which proved unusable. Raises InvalidArgument where it was wanted."""
        if (way := self._gpu_way) is not None:
            self._gpu_way = None
            self._engine.give_up(way, reason)

    def save_tables(self) -> None:
        """Add what was learned to the file that was given as ``tables_path``, if any."""
        if self._tables_path is not None:
            add_tables(self._tables_path, self.device_kind, self.tables())

    def tables(self) -> Tables:
        """What the ways cost, as far as it is known."""
        with self._lock:
            return self.choice.tables()

    def report(self) -> ChoiceReport:
        """How often each way was the fastest."""
        with self._lock:
            return self.choice.report()

    def close(self) -> None:
        """Wait for transfers in flight, then give the disk space back. Idempotent."""
        with self._lock:
            first = not self._closed
            self._closed = True
        for lane in self._lanes.values():
            lane.drain()
        self._engine.close()
        self._close_files()
        if first:
            self.save_tables()

    def __enter__(self) -> SpillSpace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _close_files(self) -> None:
        for region in self._regions.values():
            region.close()

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

    def _start(
        self,
        kind: Kind,
        way: Way,
        extent: Extent,
        address: int,
        size_bytes: int,
        keep: object,
        on_done: OnDone,
    ) -> None:
        region = self._regions[extent.space]
        held = [keep]
        requests = [
            Request(
                kind,
                region.files[segment.file].file,
                segment.offset,
                address + segment.begin,
                segment.size_bytes,
                way.kind,
                True,
                held,
            )
            for segment in region.stripes.segments(extent.offset, size_bytes)
        ]
        lane = self._lanes[kind]
        with self._lock:
            measured = self._is_measured(kind, way, extent)
            # Where nothing was written before, a write costs more, once: pages and blocks are made.
            rehearsed = region.is_first_write(kind, extent) and measured
        began_s = 0.0

        def start() -> None:
            if rehearsed:  # pages of the page cache that are made by mapping them are small ones
                buffered = [request._replace(way="buffered") for request in requests]
                begin(buffered if way.kind == "mapped" else requests, after_rehearsal)
            else:
                begin(requests, on_outcome)

        def begin(requests: Sequence[Request], then: Callable[[Outcome], None]) -> None:
            nonlocal began_s
            began_s = time.perf_counter()
            try:
                self._engine.start(way, requests, then)
            except ValueError as error:  # closed meanwhile
                self._over(lane, Transfer(SpillError(f"{_CLOSED}: {error}"), began_s, began_s), on_done)

        def after_rehearsal(outcome: Outcome) -> None:
            if outcome.failed is None:
                begin(requests, on_outcome)
            else:
                on_outcome(outcome)

        def on_outcome(outcome: Outcome) -> None:
            cost_s = time.perf_counter() - began_s if measured else None
            self._note(kind, way, extent, size_bytes, outcome, cost_s)
            error: SpillError | None = None
            if outcome.failed is not None:
                error = region.error(outcome.failed)
            elif kind == "read":
                error = self._damage(extent, address, size_bytes)
            if outcome.failed is None:
                held.clear()  # whoever is told that it is over can free the memory
            self._over(lane, Transfer(error, outcome.started_s, outcome.finished_s), on_done)

        lane.add(start, measured)

    @staticmethod
    def _over(lane: Lane, transfer: Transfer, on_done: OnDone) -> None:
        try:
            on_done(transfer)
        finally:
            lane.finished()

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

    def _note(
        self,
        kind: Kind,
        way: Way,
        extent: Extent,
        size_bytes: int,
        outcome: Outcome,
        cost_s: float | None,
    ) -> None:
        with self._lock:
            if way.name in self.ways:
                if outcome.failed is None and cost_s is not None:
                    self.choice.observe(kind, extent.size_bytes, way.name, cost_s)
                else:
                    self.choice.withdraw(kind, extent.size_bytes, way.name)
            if outcome.failed is not None:
                return
            if kind == "write":
                self.written_bytes += size_bytes
            else:
                self.read_bytes += size_bytes
            self.moved_bytes_by_way[way.name] += size_bytes


class SwapFile:
    """A file without a name that grows as it is written."""

    def __init__(self, directory: Path) -> None:
        self._file = SpillFile(directory)
        self.descriptors = (self._file.file.direct, self._file.file.buffered, self._file.free_bytes())

    def close(self) -> None:
        self._file.close()


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
