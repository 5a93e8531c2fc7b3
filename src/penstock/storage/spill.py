"""Spill space on one or several disks, and the transfers between it and memory."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from penstock.errors import InvalidArgument, SpillError, SpillSpaceFull, with_errno
from penstock.options import Directories, Explorers, IoOptions
from penstock.storage.aligned import align_up
from penstock.storage.checksum import crc32c_at
from penstock.storage.choice import Choice
from penstock.storage.cost_sharing import CostSharing
from penstock.storage.costs import Tables, add_tables, device_kind, read_tables
from penstock.storage.extents import ALIGNMENT_BYTES, Extent
from penstock.storage.files import Closing
from penstock.storage.host_memory import HostMemory
from penstock.storage.nvme.url import Url
from penstock.storage.paths import REMOTE_TRANSPORTS, TRANSPORTS, IoPath, IoPaths
from penstock.storage.queue import CLOSED, Queue
from penstock.storage.region import Region, SpillFile, as_paths
from penstock.storage.rounds import ChoiceReport
from penstock.storage.spill_namespace import SpillNamespace
from penstock.storage.transfer import DEMAND, EVICT, File, Kind, OnDone, Transfer, TransportBroken
from penstock.units import format_bytes, format_bytes_up, format_seconds, parse_bytes

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["OnDone", "SpillSpace", "Transfer", "as_paths"]

# Of the transfers by the I/O path in use, one in so many is measured, to see whether it is still the best.
MEASURED_EVERY = 64

TIMEOUT_S = 120.0

REMOTE_PATH = "nvme staged"


class SpillSpace(Closing):
    """Extents of spill space, written from memory and read back in the background. A context manager.

    directories     where the spill files go; with several, every tensor is striped over all of them. Or the
                    URL of one namespace of a remote drive
    options         how tensors move
    capacity_bytes  most bytes on disk, None for as many as the disks hold
    host_bytes      of a tier of host memory, beside the disk; 0 for none
    host_node       NUMA node of that memory; None: any
    accelerator     what computes, by name: I/O cost tables are kept apart by it
    gpu             also look for an I/O path between the memory of a GPU and the disk
    timeout_s       the disk hangs where no transfer ends for so long: then what waits for its turn
                    fails, and so does `close`. What the system has begun cannot be taken back: its
                    memory stays in use

    paths, unavailable  as of IoPaths
    choice              among the I/O paths
    gpu_direct          name of the I/O path between the memory of a GPU and the disk, None where there is
                        none. It is not among ``paths``: who has the memory chooses it
    gpu_direct_only     no other I/O path was wanted
    choices             that one, and those made by `new_choice`, by name
    has_host            there is a tier of host memory. Its one I/O path is not among ``paths``
    device_kind         what the directories lie on, and what computes
    lock                of the choices
    direct, place_text  as of Region

    Every method may be called from any thread. Raises SpillError where a directory cannot be used.
    """

    def __init__(
        self,
        directories: Directories,
        options: IoOptions = IoOptions(),
        *,
        capacity_bytes: int | None = None,
        host_bytes: int = 0,
        host_node: int | None = None,
        accelerator: str = "cpu",
        gpu: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.options, self.capacity_bytes, self.timeout_s = options, capacity_bytes, timeout_s
        places = as_paths(directories)
        self._first = places[0]
        remote = isinstance(self._first, Url)
        page_cache_bytes = parse_bytes(options.page_cache_budget)
        wanted, by_size = options.wanted_paths()
        if remote and page_cache_bytes:
            only = "without a page cache: leave out the page cache budget"
            raise InvalidArgument(f"{self._first} is spilled to {only}")
        if remote and set(wanted or ()) - {REMOTE_PATH}:
            only = f"by the I/O path {REMOTE_PATH!r} alone: leave out paths"
            raise InvalidArgument(f"{self._first} is spilled to {only}")
        if capacity_bytes is not None:
            page_cache_bytes = min(page_cache_bytes, capacity_bytes)
            capacity_bytes -= page_cache_bytes
        self._io = IoPaths(
            wanted,
            media=None if page_cache_bytes else ("disk",),
            gpu=gpu and not remote,
            transports=REMOTE_TRANSPORTS if remote else TRANSPORTS,
            host=host_bytes >= ALIGNMENT_BYTES,
        )
        self.has_host = bool(self._io.host_paths)
        self.paths, self.unavailable = self._io.paths, self._io.unavailable
        self._regions: dict[str, Region] = {}
        self._swap: SpillFile | None = None
        self._tables_path = None if options.costs is None else Path(options.costs)
        self.choices: dict[str, Choice] = {}
        try:
            if others := {*by_size.values()} - self.paths.keys():
                raise InvalidArgument(f"{', '.join(others)} cannot be given by size: it moves a GPU's memory")
            self._regions["disk"] = Region("disk", places, capacity_bytes, timeout_s / 2)
            if any(path.medium == "page cache" for path in self.paths.values()):
                self._regions["page cache"] = Region("page cache", places, page_cache_bytes)
            self.device_kind = device_kind(places, accelerator)
            self._known = read_tables(self._tables_path, self.device_kind) if self._tables_path else Tables()
            self.choice = self.new_choice(
                "host",
                {path.name: path.medium for path in self.paths.values()},
                copying=[path.name for path in self.paths.values() if path.method == "staged"],
                by_size=by_size,
            )
            self._gpu_path = self._io.usable_gpu_path(
                [file.file for file in self._regions["disk"].files], options.verify
            )
            if self.has_host:
                self._regions["host"] = Region("host", [HostMemory(host_bytes, host_node)], host_bytes)
        except BaseException:
            self._close_files()
            self._io.close()
            raise
        self.direct, self.place_text = self._regions["disk"].direct, self._regions["disk"].place_text
        self.gpu_direct_only = self.gpu_direct is not None and set(wanted or ()) == {self.gpu_direct}
        self.moved_bytes_by_path = dict.fromkeys((*self.paths, *self._io.gpu_paths, *self._io.host_paths), 0)
        self.written_bytes = self.read_bytes = 0
        self._queue = Queue(timeout_s, self._error, self._record, self.hang_error)
        self.lock = self._queue.lock
        # From allocation on: the I/O path to write by, and whether that explores.
        self._chosen: dict[Extent, tuple[str, bool]] = {}
        self._asked: dict[Kind, int] = {"write": 0, "read": 0}
        self._sharing: CostSharing | None = None
        self._closed = False

    @property
    def gpu_direct(self) -> str | None:
        return None if self._gpu_path is None else self._gpu_path.name

    @property
    def used_bytes(self) -> int:
        """Bytes of the extents in use on disk."""
        return sum(region.extents.used_bytes for region in self._on_disk())

    @property
    def file_bytes(self) -> int:
        """Bytes the spill files occupy on disk."""
        extents = sum(file.size_bytes for region in self._on_disk() for file in region.files)
        return extents + self._swap_bytes()

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory in use."""
        return self._regions["host"].files[0].size_bytes if self.has_host else 0

    @property
    def folder(self) -> Path | None:
        """The first of the directories; None of a namespace."""
        return None if isinstance(self._first, Url) else self._first

    def _on_disk(self) -> list[Region]:
        return [region for medium, region in self._regions.items() if medium != "host"]

    @property
    def free_bytes(self) -> int:
        """Bytes the file systems have free, within the capacity. Two directories on one file system count it
        twice."""
        free_bytes = sum(file.free_bytes() for file in self._regions["disk"].files)
        if self.capacity_bytes is not None:
            left_bytes = self.capacity_bytes - self.used_bytes - self._swap_bytes()
            free_bytes = min(free_bytes, max(left_bytes, 0))
        return free_bytes

    def swap_file(self) -> tuple[int, int, int, int]:
        """A file for who writes by itself, without extents: it has no name either, lies in the first
        directory, grows as it is written to, and is closed with the space. Of a namespace, a part of it.

        Gives its descriptor past the page cache, or -1, the one through the page cache, its capacity, and
        where in it that begins: what the space's capacity leaves now, at most all of the file system, since
        what is free there changes. Its bytes count in `file_bytes`, and extents get what they leave of the
        space's capacity.
        """
        with self.lock:
            self._check_open()
            if isinstance(self._first, Url):
                file = self._regions["disk"].files[0]
                assert isinstance(file, SpillNamespace)
                begin, size_bytes = file.swap_area()
                return -1, file.handle, size_bytes, begin
            if self._swap is None:
                self._swap = SpillFile(self._first)
            left_bytes = self._swap.disk_bytes()
            if self.capacity_bytes is not None:
                left_bytes = min(left_bytes, max(self.capacity_bytes - self.used_bytes, 0))
            return self._swap.file.direct, self._swap.file.buffered, left_bytes, 0

    def allocate(self, size_bytes: int, on_disk: bool = False) -> Extent:
        """Space for ``size_bytes``. Raises SpillSpaceFull where the disk, or the capacity, is full.

        on_disk   not in the page cache
        """
        with self.lock:
            self._check_open()
            size_bytes = align_up(size_bytes, ALIGNMENT_BYTES)  # the size that the choice knows it by
            if self._swap is not None:
                self._leave_room_to_swap(size_bytes)
            cache = None if on_disk else self._regions.get("page cache")
            has_room = cache is not None and cache.has_room(size_bytes)
            # The disk says itself why it has no room.
            name = self.choice.path_to_write(size_bytes, ("disk", "page cache") if has_room else ("disk",))
            try:
                extent = self._regions[self.paths[name].medium].allocate(size_bytes)
            except SpillSpaceFull:
                if self.choice.explores:
                    self.choice.withdraw("write", size_bytes, name)
                if self.paths[name].medium == "disk":
                    raise
                name = self.choice.path_to_write(size_bytes, ("disk",))  # the room was in pieces
                extent = self._regions["disk"].allocate(size_bytes)
            self._chosen[extent] = name, self.choice.explores
            return extent

    def try_allocate_host(self, size_bytes: int) -> Extent | None:
        """Space in host memory; None where there is no room, or no such tier."""
        with self.lock, contextlib.suppress(SpillSpaceFull):
            self._check_open()
            return self._regions["host"].allocate(size_bytes) if self.has_host else None
        return None

    def release(self, extent: Extent) -> None:
        """Take the space back. No transfer of the extent may be in flight."""
        with self.lock:
            self._regions[extent.space].release(extent)
            self._withdraw(extent)

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
        on_gpu: bool = False,
    ) -> Transfer:
        """Copy memory to the extent; ``on_done`` is called once, on any thread, maybe before this returns.

        address    of the memory; a multiple of 4096 spares a copy
        keep       what keeps the memory alive: held until the transfer is over
        checksum   checksum what goes to disk, and check it when it is read, also where the space does not
                   verify everything
        priority   DEMAND, PREFETCH or EVICT: which of those that wait for the disk goes first, of both
                   directions. A demand waits for no measurement
        on_gpu     the memory is that of a GPU, ``address`` a device pointer, and what makes the content there
                   is over. The extent is on disk, and the I/O path `gpu_direct`
        """
        transfer = self._transfer("write", extent, address, size_bytes, keep, priority)
        transfer.callback = on_done
        with self.lock:
            region = self._regions[extent.space]
            place = region.place_to_write(extent)
            if (only := self._only_path(extent, on_gpu)) is not None:
                self._withdraw(extent)
                path, explores = only, False
            elif (chosen := self._chosen.pop(extent, None)) is not None:
                path, explores = self.paths[chosen[0]], chosen[1]
            else:  # it is written once more
                path = self.paths[self.choice.path_to_write(extent.size_bytes, (extent.space,))]
                explores = self.choice.explores
            self._route(transfer, place, path, explores)
            transfer.checked = not on_gpu and (self.options.verify or (checksum and path.name in self.paths))
            # Where nothing was written before, a write costs more, once: pages and blocks are made.
            transfer.rehearsed = transfer.measured and place.end > region.written_bytes
            region.written_bytes = max(region.written_bytes, place.end)
            if transfer.rehearsed and path.method == "mapped":
                # Pages of the page cache that are made by mapping them are small: first it is "buffered".
                for each in (transfer, *transfer.parts):
                    each.method = "buffered"
            ready = self._queue.admit(transfer)
        self._queue.start(ready)
        return transfer

    def read(
        self,
        extent: Extent,
        address: int,
        size_bytes: int,
        keep: object,
        on_done: OnDone,
        *,
        priority: int = DEMAND,
        on_gpu: bool = False,
    ) -> Transfer:
        """Copy from the extent to memory; as `write`. On a GPU, what used the memory before is over."""
        transfer = self._transfer("read", extent, address, size_bytes, keep, priority)
        transfer.callback = on_done
        with self.lock:
            region = self._regions[extent.space]
            place = region.place_of(extent)
            if (only := self._only_path(extent, on_gpu)) is not None:
                path, explores = only, False
            else:
                # What cannot be measured teaches nothing: it goes by the path that is known to be good.
                explore = priority != DEMAND or self._queue.is_idle("read")
                path = self.paths[self.choice.path_to_read(extent.size_bytes, extent.space, explore)]
                explores = self.choice.explores
            self._route(transfer, place, path, explores)
            transfer.checked = not on_gpu and place.offset in region.checksums
            ready = self._queue.admit(transfer)
        self._queue.start(ready)
        return transfer

    def _transfer(
        self, kind: Kind, extent: Extent, address: int, size_bytes: int, keep: object, priority: int
    ) -> Transfer:
        """One that has no file yet: `_route` gives it one."""
        self._check_open()
        if not 0 < size_bytes <= extent.size_bytes:
            raise InvalidArgument(f"{size_bytes} bytes do not fit an extent of {extent.size_bytes} bytes")
        return Transfer(kind, File(-1), 0, address, size_bytes, "", True, keep, priority, self._queue.end)

    def _route(self, whole: Transfer, place: Extent, path: IoPath, explores: bool) -> None:
        """Say which bytes of which files the transfer moves, and how."""
        runs = self._regions[place.space].runs(place, whole.size_bytes)
        whole.file, whole.offset = runs[0][0].file, runs[0][1]
        whole.method, whole.extent, whole.path = path.method, place, path
        whole.queue, whole.asked_s = self._queue, perf_counter()
        if len(runs) > 1:
            over = functools.partial(self._queue.end_part, whole)
            how = path.method, True, whole.keep, whole.priority, over
            whole.parts = [
                Transfer(whole.kind, file.file, offset, whole.address + begin, size, *how)
                for file, offset, begin, size in runs
            ]
            whole.left = len(runs)
        whole.explores = whole.measured = explores
        if path.name in self.paths:
            self._asked[whole.kind] += 1
            whole.measured = explores or not self._asked[whole.kind] % MEASURED_EVERY

    def segments(self, extent: Extent, size_bytes: int) -> list[tuple[int, int, int, int]]:
        """Where the extent lies: (file descriptor, offset in the file, offset in the extent, bytes) of each
        piece."""
        region = self._regions[extent.space]
        runs = region.runs(region.place_of(extent), size_bytes)
        return [(file.handle, offset, begin, size) for file, offset, begin, size in runs]

    def give_up_gpu_direct(self, reason: str) -> None:
        """Do without `gpu_direct`, which proved unusable. Raises InvalidArgument where it was wanted."""
        if (path := self._gpu_path) is not None:
            self._gpu_path = None
            self._io.give_up(path, reason)

    def new_choice(self, name: str, media: Mapping[str, str], **more: Any) -> Choice:
        """A choice between I/O paths, by name and medium, that begins with what is known of them, and is
        saved with the others. ``more``: of Choice. Who asks it holds `lock`."""
        how = {"reexplore": self.options.reexplore, "by": self.options.choose_by, **more}
        choice = self.choices[name] = Choice(media, tables=self._known, **how)
        return choice

    def share(self, store: Store, explorers: Explorers, rank: int, ranks: int) -> None:
        """Share what is learned with the other ranks of a job from now on, as CostSharing does."""
        if self._sharing is not None:
            self._sharing.close()
        self._sharing = CostSharing(store, self.choices, self.lock, self.device_kind, explorers, rank, ranks)

    def save_tables(self) -> None:
        """Add what was learned to the file that was given as ``costs``, if any."""
        if self._tables_path is not None:
            add_tables(self._tables_path, self.device_kind, self.tables(), self.timeout_s)

    def tables(self) -> Tables:
        """What the I/O paths cost, as far as it is known."""
        with self.lock:
            return Tables(tuple(e for choice in self.choices.values() for e in choice.tables().entries))

    def report(self) -> ChoiceReport:
        """How often each I/O path was the fastest."""
        with self.lock:
            return self.choice.report()

    def close(self) -> None:
        """Wait for transfers in flight, then give the disk space back. Idempotent.

        Raises SpillError where the disk hangs. What has not begun has failed then. What has begun holds
        this space, and so its files stay open, until it ends: the system may still write to them.
        """
        with self.lock:
            first = not self._closed
            self._closed = True
        if self._sharing is not None:
            self._sharing.close()
        timeout_s = 0.0 if self._queue.hangs else self.timeout_s
        if not self._queue.close(timeout_s) or not self._io.close(timeout_s):
            self._queue.give_up()
            self._io.close(0.0)
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
        return with_errno(error, errno.ETIMEDOUT)

    # -- what the queue asks -------------------------------------------------------------------

    def _error(self, transfer: Transfer) -> SpillError | None:
        """What is wrong with a transfer that is over. One that is checked is checksummed here, on a thread
        that is not the program's."""
        extent, size_bytes, error_number = transfer.extent, transfer.size_bytes, transfer.error_number
        region = self._regions[extent.space]
        if transfer.abandoned or error_number == errno.EBADF:
            return with_errno(SpillError(str(TransportBroken(error_number))), error_number)
        if error_number:
            hung = error_number == errno.ECANCELED and self._queue.hangs
            return self.hang_error() if hung else region.error(transfer.failed or transfer)
        found = crc32c_at(transfer.address, size_bytes)
        if transfer.kind == "write":
            region.checksums[extent.offset] = found, size_bytes
            return None
        written, written_bytes = region.checksums.get(extent.offset, (found, size_bytes))
        if written_bytes != size_bytes or written == found:
            return None
        return SpillError(
            f"{format_bytes(size_bytes)} came back from {region.place_text} other than they were written: "
            "the disk, its driver or memory is at fault. Check them (dmesg, smartctl), and choose another "
            "spill_dir."
        )

    def _record(self, transfer: Transfer, now_s: float) -> None:
        """What a transfer cost that is over. Called with the lock."""
        kind, name, moved = transfer.kind, transfer.path.name, transfer.error is None
        if kind == "write" and (transfer.abandoned or transfer.may_land):
            region = self._regions[transfer.extent.space]
            region.expect_late_write(transfer.extent, transfer.abandoned)
        if moved and transfer.measured:
            self.choice.observe(kind, transfer.extent.size_bytes, name, now_s - transfer.began_s)
        elif transfer.explores:
            self.choice.withdraw(kind, transfer.extent.size_bytes, name)
        if moved:
            if kind == "write":
                self.written_bytes += transfer.size_bytes
            else:
                self.read_bytes += transfer.size_bytes
            self.moved_bytes_by_path[name] += transfer.size_bytes

    def _withdraw(self, extent: Extent) -> None:
        """The extent is not going to be written by the I/O path that was chosen."""
        name, explores = self._chosen.pop(extent, ("", False))
        if explores:
            self.choice.withdraw("write", extent.size_bytes, name)

    # -- the rest ------------------------------------------------------------------------------

    def _close_files(self) -> None:
        for region in self._regions.values():
            region.close()
        if self._swap is not None:
            self._swap.close()
            self._swap = None

    def _swap_bytes(self) -> int:
        return 0 if self._swap is None else os.fstat(self._swap.file.buffered).st_blocks * 512

    def _leave_room_to_swap(self, size_bytes: int) -> None:
        if (capacity_bytes := self.capacity_bytes) is None:
            return
        held_bytes = self._swap_bytes() + self.used_bytes
        if (missing_bytes := held_bytes + size_bytes - capacity_bytes) > 0:
            raise SpillSpaceFull(
                f"the disk budget of {format_bytes(capacity_bytes)} is full: spilled tensors hold "
                f"{format_bytes(held_bytes)}, and {format_bytes_up(size_bytes)} more are needed. Raise "
                f"disk_budget by {format_bytes_up(missing_bytes)}."
            )

    def _only_path(self, extent: Extent, on_gpu: bool) -> IoPath | None:
        """Of the extent; None: there is a choice."""
        if not on_gpu:
            return next(iter(self._io.host_paths.values())) if extent.space == "host" else None
        if self._gpu_path is None or extent.space != self._gpu_path.medium:
            raise InvalidArgument(f"{extent} cannot be moved to or from the memory of a GPU directly")
        return self._gpu_path

    def _check_open(self) -> None:
        if self._closed:
            raise SpillError(CLOSED)
