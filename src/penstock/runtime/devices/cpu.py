"""RAM as the device: storages stay at their addresses, and their pages come and go.

Tensors lie in penstock's arena. What is planned is copied by the storage engine, straight between the
arena's pages and the disk, or host memory beside the budget; an access that nobody planned, and memory that
nobody foresaw, are served by the arena itself, below Python (see penstock.runtime.arena). One file: what the
arena moves unasked meets each of the engine's moves here.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from penstock import _native
from penstock._native import PREFETCH
from penstock.errors import (
    BudgetTooSmall,
    DeviceUnavailable,
    SpillError,
    SpillSpaceFull,
    with_errno,
)
from penstock.runtime import arena
from penstock.runtime.devices import Copy, Device, Moved, Room
from penstock.runtime.devices.meters import ArenaMeter
from penstock.runtime.storage_methods import resize
from penstock.runtime.storages import AWAY, COMING, LEAVING, RESIDENT, ManagedStorage
from penstock.storage.aligned import AlignedBuffer
from penstock.storage.extents import ALIGNMENT_BYTES, Extent
from penstock.storage.spill import SpillSpace, Transfer
from penstock.storage.transfer import TransportBroken
from penstock.units import format_bytes_up

logger = logging.getLogger("penstock")


RAW = _native.Packing()

_LINKS = {
    ("host", "write"): "device_to_host",
    ("host", "read"): "host_to_device",
    ("disk", "write"): "disk_write",
    ("disk", "read"): "disk_read",
}

_left_behind: list[object] = []  # memory of the arena's that the system may read for ever


@dataclass(slots=True)
class CpuSlot:
    """Where a copy of a storage is.

    packing   of the copy, which ends where the storage's pages do where it is packed
    """

    tier: str
    extent: Extent
    packing: _native.Packing = RAW

    @property
    def packed_bytes(self) -> int:
        return _page_bytes(self.packing.packed_bytes)


class ArenaRoom(Room):
    """Whatever is not pinned can leave: where a kernel was refused memory, it has been tried."""

    def __init__(self, device: CpuDevice) -> None:
        self._device = device

    def make(self, size_bytes: int) -> bool:
        device = self._device
        pinned = [managed.address for managed in device.storages.all() if managed.pins and managed.address]
        made = _native.arena_make_room(size_bytes, pinned)
        device.report_unasked_moves()
        return made

    def budget_for(self, size_bytes: int) -> int:
        return self._device.in_memory_bytes() + size_bytes

    def kernel_failed(self, error: BaseException, needed_bytes: int) -> None:
        if not isinstance(error, RuntimeError | MemoryError):
            return
        device, stats = self._device, arena.stats()
        if stats.system_refused_bytes and "allocate memory" in str(error):
            raise MemoryError(
                f"the operating system refused {format_bytes_up(stats.system_refused_bytes)} that fit in the "
                f"device budget of {format_bytes_up(device.budget_bytes)}. Raise the limit of this process "
                "(ulimit -d or -v, or vm.max_map_count), or lower device_budget or the batch size."
            ) from error
        refused_bytes = stats.refused_bytes
        if refused_bytes:
            device.engine.raise_error()  # nothing could leave since a copy failed
            error_number = stats.write_error
            full = error_number in (errno.ENOSPC, errno.EDQUOT) or (
                refused_bytes <= device.budget_bytes
                and not device.spill.has_host
                and device.spill.free_bytes < refused_bytes
            )
            if full or error_number:
                why = f" ({os.strerror(error_number)})" if error_number else ""
                remedy = "Free space there, raise disk_budget" if full else "Check the disk (dmesg, smartctl)"
                failure = (SpillSpaceFull if full else SpillError)(
                    f"{device.place_text} {'is full' if full else 'cannot be written'}{why}, and nothing can "
                    f"leave memory: a kernel asked for {format_bytes_up(refused_bytes)} more. {remedy}, or "
                    "choose another spill_dir."
                )
                raise with_errno(failure, error_number or None) from None  # torch's own says less
            needed_bytes = max(needed_bytes, stats.refused_at_bytes + device.memory.unmanaged_bytes)
            raise BudgetTooSmall(
                f"a kernel asked for {format_bytes_up(refused_bytes)} more, with tensors in use that cannot "
                f"leave: it needs {format_bytes_up(needed_bytes)}, and the device budget is "
                f"{format_bytes_up(device.budget_bytes)}. Raise device_budget to "
                f"{format_bytes_up(needed_bytes)}, or lower the batch size.{device.engine.budget_hint()}",
                needed_bytes,
            ) from None


class CpuDevice(Device):
    """RAM up to a budget, host memory beside it, the disk below; see penstock.runtime.devices.Device.

    Raises DeviceUnavailable where the arena cannot work.
    """

    evict_links: tuple[str, ...] = "device_to_host", "disk_write"
    prefetch_links: tuple[str, ...] = "host_to_device", "disk_read"
    device = torch.device("cpu")
    current_stream: Callable[[], Any] | None = None
    memory_manager = "arena"

    def __init__(self, spill: SpillSpace, budget_bytes: int) -> None:
        if (reason := arena.unavailable()) is not None:
            raise DeviceUnavailable(
                f"a budget of RAM needs penstock's arena, which cannot work here: {reason}. "
                "Train without penstock.offload, or on a GPU."
            )
        self.spill = spill
        self.tiers: tuple[str, ...] = ("host", "disk") if spill.has_host else ("disk",)
        self.place_text = f"the disk of {spill.place_text}"
        self.budget_bytes = budget_bytes
        gc.collect()  # what is garbage already is nobody's
        before = arena.stats()
        self.first_serial = before.serial + 1
        self.memory = _native.DeviceMemory()
        self.memory.in_arena = True
        self._lease = arena.activate(budget_bytes, spill.swap_file())
        self._staging: dict[
            int, tuple[int, bool]
        ] = {}  # by key: where it is read to, and whether it stays packed
        self._packed: dict[int, _native.ArenaPacked] = {}  # by key: until they are written
        self._pending: dict[int, Transfer] = {}  # by key: reads under way
        self._has_warned = False  # that something was left behind
        self._reader = ThreadPoolExecutor(1, "penstock-arena")
        self.meter = ArenaMeter(self.memory, before.faults)
        self.room = ArenaRoom(self)

    # -- which storages ------------------------------------------------------------------------

    def adopt(self, managed: ManagedStorage, storage: torch.UntypedStorage, made: bool) -> bool:
        if storage.device.type != "cpu":
            return False
        serial = self._serial(managed, storage)
        if 0 < serial < self.first_serial:  # of an earlier run, and now of this one
            address = _address(managed, storage)
            if _native.arena_state(address) == "out":
                managed.swapped_out = True
                managed.state = AWAY
            else:
                self.engine.make_room(managed.size_bytes)
                _native.arena_own(address)
        elif not serial:
            if made or storage.is_shared() or not storage.resizable():
                # Shared with another process, mapped from a file, or lent to NumPy: it cannot be re-homed.
                if not made:
                    self.engine.make_room(managed.size_bytes)
                self._lies_elsewhere(managed.size_bytes)
                managed.reports_freed = True
                return False
            self.engine.make_room(managed.size_bytes)
            # Allocates anew, and copies. It is the same storage to the run.
            torch._C.StorageBase.resize_(storage, managed.size_bytes)
            if not self._serial(managed, storage):
                return False
        managed.address = _address(managed, storage)
        return True

    @staticmethod
    def _serial(managed: ManagedStorage, storage: torch.UntypedStorage) -> int:
        """Number of the arena's block that the storage is; 0 where it is none."""
        address = _address(managed, storage)
        block = _native.arena_block(address)
        return block[2] if block is not None and block[0] == address else 0

    def _lies_elsewhere(self, size_bytes: int) -> None:
        """So much more lies elsewhere than in the arena, and stays there."""
        if size_bytes > 0:
            self.meter.begin_kernel()  # the peak so far is of what lay elsewhere so far
        else:
            self.meter.peak_bytes()
        self.memory.unmanaged_bytes += size_bytes
        self._lease.set_budget(max(self.budget_bytes - self.memory.unmanaged_bytes, 0))

    def on_storage_freed(self, managed: ManagedStorage) -> None:
        if managed.reports_freed:
            self._lies_elsewhere(-managed.size_bytes)
        self._packed.pop(managed.key, None)
        if managed.slot is not None:
            self.free_slot(managed, managed.slot)
            managed.slot = None

    def has(self, storage: torch.UntypedStorage) -> bool:
        return storage.device.type == "cpu"

    def resize(self, storage: torch.UntypedStorage, size_bytes: int) -> bool:
        resize(storage, size_bytes)
        return True

    # -- copies --------------------------------------------------------------------------------

    def reserve(self, managed: ManagedStorage, tier: str) -> Any:
        if tier == "host" and (extent := self.spill.try_allocate_host(managed.size_bytes)) is not None:
            return CpuSlot("host", extent)
        return CpuSlot("disk", self.spill.allocate(managed.size_bytes))

    def free_slot(self, managed: ManagedStorage, slot: CpuSlot) -> None:
        self.spill.release(slot.extent)

    def _is_elsewhere(self, managed: ManagedStorage, storage: torch.UntypedStorage) -> bool:
        """Whether the program gave the storage other memory, as `share_memory_` does: there it stays."""
        if not managed.movable or _address(managed, storage) == managed.address:
            return not managed.movable
        self.storages.clear_address(managed)
        managed.movable = managed.guarded = managed.swapped_out = False
        self.engine.got_other_memory(managed)
        if not self._serial(managed, storage):
            managed.reports_freed = True
            self._lies_elsewhere(managed.size_bytes)
        return True

    def pack(self, copy: Copy) -> None:
        managed, packed = copy.managed, None
        codec, itemsize = copy.codec
        begun_s = time.perf_counter()
        if loan := self._lend(copy):
            try:
                packed = _native.arena_pack(managed.address, _native.Codec[codec], itemsize)
            finally:
                _native.arena_lent_back(loan)
        if packed is None:
            copy.on_end(copy)
            return
        self._packed[managed.key] = packed
        managed.packed_bytes = _page_bytes(packed.packing.packed_bytes)
        copy.moved = (_coded("compress", managed, begun_s),)
        copy.on_end(copy)
        if not managed.packed_bytes:
            self._drop_packed(managed)

    def _tell_arena(self, managed: ManagedStorage) -> bool:
        """Of its packed bytes, which are in the slot. False: they are not what the storage holds any more."""
        storage = managed.kept_alive or managed.storage()
        if storage is None or self._is_elsewhere(managed, storage):
            return False
        packed, segments = self._packed[managed.key], self._segments(managed)
        keeps = not managed.freeing_bytes
        if not _native.arena_packed_written(managed.address, packed, segments, keeps):
            return False
        managed.swapped_out = False
        return True

    def _drop_packed(self, managed: ManagedStorage) -> None:
        if not managed.writing_packed:
            self._packed.pop(managed.key, None)

    def _lend(self, copy: Copy) -> int:
        """Notice writes from now on, and keep the bytes where they are read until the loan is given back. 0:
        there is nothing to copy."""
        managed, storage = copy.managed, copy.storage
        assert storage is not None
        if not self._is_elsewhere(managed, storage):
            with contextlib.suppress(ValueError):  # the program gives the storage other memory just now
                if loan := _native.arena_lend(managed.address, guards=True):
                    managed.guarded = True
                    return loan
                self.report_unasked_moves()  # the arena took it a moment ago
        managed.copy_invalid = True
        return 0

    def copy_out(self, copy: Copy) -> None:
        managed = copy.managed
        slot: CpuSlot = managed.slot
        content: object = copy.storage
        address = managed.address
        if managed.writing_packed:
            copy.storage, copy.then = None, self._packed_is_written
            content = packed = self._packed[managed.key]
            if not packed.address:  # the arena wrote it elsewhere, for its memory
                managed.copy_invalid = True
                copy.then(copy)
                return
            slot.packing, address = packed.packing, packed.address
            copy.size_bytes = slot.packed_bytes
        elif loan := self._lend(copy):
            slot.packing, copy.loan = RAW, loan
        else:
            copy.on_end(copy)
            return
        size_bytes, over = _page_bytes(copy.size_bytes), functools.partial(self._written, copy)
        try:
            self.spill.write(slot.extent, address, size_bytes, content, over, checksum=managed.persistent)
        except BaseException:
            if copy.loan:
                _native.arena_lent_back(copy.loan)
            raise

    def _packed_is_written(self, copy: Copy) -> None:
        managed = copy.managed
        with self.engine.lock:
            self.report_unasked_moves()
            if not self._packed[managed.key].address:
                managed.copy_invalid, copy.error = True, None
            elif copy.error is None and managed.state != COMING and not managed.copy_invalid:
                managed.copy_invalid = not self._tell_arena(managed)
            copy.on_end(copy)
            if copy.error is None or managed.state == RESIDENT:
                self._packed.pop(managed.key, None)  # else it may be written again

    def _written(self, copy: Copy, transfer: Transfer) -> None:
        """The copy is complete. Where the arena took the pages meanwhile, or the program wrote to them or
        gave the storage others, it holds anything, and so it counts for nothing."""
        managed, loan = copy.managed, copy.loan
        with self.engine.lock:
            if transfer.abandoned:
                managed.slot = None  # and a loan is never given back
                if not loan:
                    _left_behind.append(self._packed[managed.key])
            elif loan and not _native.arena_lent_back(loan):
                managed.copy_invalid = True
            self.report_unasked_moves()
            if managed.copy_invalid and transfer.error is not None and transfer.error.errno == errno.EFAULT:
                transfer.error = None
        self._record(copy, transfer)
        copy.then(copy)

    def _was_read(self, copy: Copy, transfer: Transfer) -> None:
        managed = copy.managed
        if transfer.abandoned:
            _native.arena_abandon(self._staging.pop(managed.key)[0])
        elif transfer.error is not None and self._is_forgotten(managed):
            transfer.error = None
        self._record(copy, transfer)
        copy.then(copy)

    def _record(self, copy: Copy, transfer: Transfer) -> None:
        """How the copy's transfer went."""
        self._warn_if_abandoned(transfer)
        copy.error = transfer.error
        if transfer.error is None:
            link = _LINKS[copy.tier, transfer.kind]
            copy.moved = (copy.moved_over(link, transfer.started_s, transfer.finished_s),)

    def _warn_if_abandoned(self, transfer: Transfer) -> None:
        """The system may use the memory and the extent of a transfer for ever: nobody else gets them."""
        if transfer.abandoned and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "transfers to or from %s were given up amid: their memory and disk space stay in use until "
                "the process ends",
                self.place_text,
            )

    def _segments(self, managed: ManagedStorage) -> list[tuple[int, int, int, int]]:
        """Where the copy lies: of each piece the file, its place there and in the storage's pages, bytes."""
        slot: CpuSlot = managed.slot
        begin, size_bytes = _place(managed)
        segments = self.spill.segments(slot.extent, size_bytes)
        return [(file, offset, begin + at, size) for file, offset, at, size in segments]

    def release(self, managed: ManagedStorage, storage: torch.UntypedStorage) -> bool:
        if managed.state == AWAY:
            with contextlib.suppress(ValueError):  # the program gave the storage other memory
                _native.arena_drop_packed(managed.address)
            return True
        if self._is_elsewhere(managed, storage):
            return False
        if managed.state == LEAVING:  # packed a moment ago
            if not _native.arena_leave_packed(managed.address, self._packed[managed.key]):
                return False
            managed.swapped_out = True  # the arena has the only copy
        elif not _native.arena_leave(managed.address, self._segments(managed), managed.slot.packing):
            return False
        managed.guarded = False
        return True

    def prepare_copy_in(
        self, managed: ManagedStorage, storage: torch.UntypedStorage, packed: bool = False, waits: bool = True
    ) -> bool:
        if self._is_elsewhere(managed, storage):
            return False
        if managed.swapped_out or managed.packed_bytes:
            return True
        staging = _native.arena_stage(managed.address, packed)
        if staging:
            self._staging[managed.key] = staging, packed
            return True
        self.report_unasked_moves()  # somebody may have touched it, and the arena may have a copy of its own
        if managed.swapped_out or not waits:
            return managed.swapped_out and managed.state == AWAY
        # Where only the limit on the process's memory is in the way, between pages of what is out, no waiting
        # helps: the arena reads it itself, and meets the limit as far as it can.
        needed_bytes = arena.stats().in_memory_bytes + managed.size_bytes
        return managed.state == AWAY and needed_bytes + self.memory.unmanaged_bytes <= self.budget_bytes

    def copy_in(self, copy: Copy) -> None:
        managed = copy.managed
        if managed.key not in self._staging:
            self._reader.submit(self._bring_in, copy)
            return
        slot: CpuSlot = managed.slot
        begin, size_bytes = _place(managed)
        staging, packed = self._staging[managed.key]
        if packed:
            begin = 0
        elif slot.packing.packed_bytes:
            copy.then = self._expand
        copy.size_bytes = min(size_bytes, managed.size_bytes)
        self._pending[managed.key] = self.spill.read(
            slot.extent,
            staging + begin,
            size_bytes,
            copy.storage,
            functools.partial(self._was_read, copy),
            priority=copy.priority,
        )

    def read_copy(
        self, managed: ManagedStorage, buffer: AlignedBuffer, done: Callable[[Exception | None], None]
    ) -> bool:
        self.report_unasked_moves()  # somebody may have touched it, and written to it
        if managed.state != AWAY or managed.swapped_out or managed.slot.packing.packed_bytes:
            return False
        self.spill.read(
            managed.slot.extent,
            buffer.address,
            _page_bytes(managed.size_bytes),
            buffer,
            lambda transfer: done(transfer.error),
            priority=PREFETCH,
        )
        return True

    def _expand(self, copy: Copy) -> None:
        """What was read to the end of the staging area is packed."""
        managed = copy.managed
        packing = managed.slot.packing
        begun_s = time.perf_counter()
        whole = copy.error is not None or _native.unpack_in_place(
            packing, self._staging[managed.key][0], _page_bytes(managed.size_bytes)
        )
        if not whole and not self._is_forgotten(managed):
            copy.error = SpillError(self._damage_text(packing.packed_bytes))
        if copy.error is None:
            copy.moved = *copy.moved, _coded("expand", managed, begun_s)
        copy.on_end(copy)

    def _is_forgotten(self, managed: ManagedStorage) -> bool:
        """Whether the arena took the memory that its bytes were read to: `finish_copy_in` says so, and they
        are read again."""
        with contextlib.suppress(ValueError):
            return _native.arena_state(managed.address) == "out"
        return True

    def _damage_text(self, packed_bytes: int) -> str:
        return (
            f"{packed_bytes} compressed bytes on {self.place_text} are damaged: check the disk (dmesg, "
            "smartctl), or choose another spill_dir"
        )

    def raise_priority(self, managed: ManagedStorage) -> None:
        if (pending := self._pending.get(managed.key)) is not None:
            pending.raise_priority()

    def _bring_in(self, copy: Copy) -> None:
        managed = copy.managed
        try:
            with contextlib.suppress(ValueError):  # it has other memory: see `finish_copy_in`
                _native.arena_bring_in(managed.address)
        except OSError as error:
            copy.error = self._unreadable(error)
            if error.errno == errno.EBADMSG:
                copy.error = SpillError(self._damage_text(managed.packed_bytes))
        except Exception as error:
            copy.error = SpillError(f"bytes could not be read back from {self.place_text}: {error}")
        copy.on_end(copy)

    def finish_copy_in(self, managed: ManagedStorage, storage: torch.UntypedStorage) -> bool | None:
        self._pending.pop(managed.key, None)
        staging, packed = self._staging.pop(managed.key, (0, False))
        arrived = staging != 0 and _native.arena_arrive(staging, packed or managed.keeps_copy)
        if self._is_elsewhere(managed, storage):
            return False
        if arrived is None:
            return None
        if not staging:  # the arena has read, or expanded, its own copy
            clean = managed.clean and not managed.swapped_out
            self._drop_packed(managed)
            managed.swapped_out = _native.arena_state(managed.address) == "out"  # and has let it leave again
            managed.guarded = not managed.swapped_out
            if clean and not managed.keeps_copy:
                self.will_write(managed)
            return clean and managed.keeps_copy
        if packed:
            if not arrived:  # touched meanwhile, and maybe taken again
                managed.swapped_out = _native.arena_state(managed.address) == "out"
                managed.guarded = not managed.swapped_out
            return arrived
        managed.swapped_out = not arrived  # then it was touched, written and taken again meanwhile
        managed.guarded = arrived and managed.keeps_copy
        return managed.guarded

    def cancel_copy_in(self, managed: ManagedStorage, storage: torch.UntypedStorage) -> None:
        self._pending.pop(managed.key, None)
        if (staging := self._staging.pop(managed.key, None)) is not None:
            _native.arena_unstage(staging[0])
            state = _native.arena_state(managed.address)
            if state in ("in", "guarded"):  # somebody touched it meanwhile
                managed.guarded = state == "guarded"
                self.engine.came_back_unasked(managed, clean=False)

    def will_write(self, managed: ManagedStorage) -> None:
        if managed.guarded:
            managed.guarded = False
            with contextlib.suppress(ValueError):  # the program gave the storage other memory
                _native.arena_unguard(managed.address)

    def change_pins(self, managed: ManagedStorage, change: int, writable: bool = False) -> None:
        if (storage := managed.storage()) is not None:  # a small one, too, that only the arena moves
            address = _address(managed, storage)
            try:
                if _native.arena_hold(address, change, writable) and change > 0 and not writable:
                    _native.arena_bring_in(address)
            except OSError as error:
                self.cannot_use(error)

    # -- recomputation -------------------------------------------------------------------------

    def drop(self, managed: ManagedStorage, storage: torch.UntypedStorage) -> bool:
        if self._is_elsewhere(managed, storage) or not _native.arena_drop(managed.address):
            return False
        managed.guarded = False
        return True

    def fill(
        self, managed: ManagedStorage, storage: torch.UntypedStorage, made: torch.UntypedStorage
    ) -> bool:
        if self._is_elsewhere(managed, storage):  # it was touched, and made, on the way there
            return True
        managed.guarded = managed.recipes > 0
        try:
            taken = _native.arena_take(managed.address, made.data_ptr())
        except OSError as error:
            raise SpillError(
                f"{format_bytes_up(managed.size_bytes)} were recomputed, and cannot be put in place: the "
                f"operating system refuses to move memory ({error.strerror}). Raise its limits (ulimit -d or "
                "-v, or vm.max_map_count), or train with PlanOptions(recompute=False)."
            ) from error
        if not taken:
            raise SpillError(f"{format_bytes_up(managed.size_bytes)} were recomputed outside of the arena")
        return True

    def watch_writes(self, managed: ManagedStorage, storage: torch.UntypedStorage, change: int) -> None:
        if managed.address and _address(managed, storage) == managed.address:
            _native.arena_keep_for(managed.address, change)
            managed.guarded |= managed.state in (RESIDENT, LEAVING)

    def will_use(self, storages: Sequence[ManagedStorage]) -> None:
        try:
            _native.arena_touch([managed.address for managed in storages if managed.address])
        except OSError as error:
            self.cannot_use(error)

    def cannot_use(self, error: OSError) -> NoReturn:
        if error.errno == errno.ENOMEM:
            self.room.kernel_failed(MemoryError(str(error)), 0)
        raise self._unreadable(error) from error

    def _unreadable(self, error: OSError) -> SpillError:
        if error.errno == errno.EBADF:
            return SpillError(str(TransportBroken(errno.EBADF)))
        return SpillError(f"bytes could not be read back from {self.place_text}: {error.strerror}")

    # -- kernels -------------------------------------------------------------------------------

    def begin_kernel(self) -> None:
        self.report_unasked_moves()

    def report_unasked_moves(self) -> None:
        for address, what in _native.arena_events():
            managed = self.storages.at(address)
            if managed is None:
                continue  # nobody's any more
            if what == "out":
                managed.swapped_out = True
                managed.guarded = False
                self.engine.left_unasked(managed)
            else:
                managed.guarded = True
                self._drop_packed(managed)
                was_swapped_out = managed.swapped_out
                managed.swapped_out = False
                self.engine.came_back_unasked(managed, clean=not was_swapped_out)

    def end_kernel(self) -> None:
        _native.arena_kernel_over()

    def bring_all_back(self, storages: list[ManagedStorage]) -> bool:
        """What does not fit stays where it is, and comes when it is touched, inside the same budget."""
        self._reader.shutdown()
        return self._lease.close(brings_back=True)

    def close(self) -> None:
        self._reader.shutdown(wait=False)
        self._lease.close()


def _address(managed: ManagedStorage, storage: torch.UntypedStorage) -> int:
    """Where torch has it."""
    return storage.data_ptr() + managed.offset_bytes


def _page_bytes(size_bytes: int) -> int:
    """Blocks of the arena may be read and written up to their end: no odd tail to copy apart."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _place(managed: ManagedStorage) -> tuple[int, int]:
    """Where the copy lies in the storage's pages: its first byte, and how many."""
    size_bytes = _page_bytes(managed.slot.packing.packed_bytes or managed.size_bytes)
    return _page_bytes(managed.size_bytes) - size_bytes, size_bytes


def _coded(link: str, managed: ManagedStorage, begun_s: float) -> Moved:
    return Moved(link, begun_s, time.perf_counter(), managed.index, managed.size_bytes, managed.kind)
