"""The copy engine: schedules and performs all copies between the device and the lower tiers.

Every change of a storage's state is made here, under one lock. The engine bounds the bytes in flight,
lets demands overtake prefetches and both overtake evictions (G10 section 4.6), and makes a kernel wait
where memory would not suffice: back-pressure, not luck, keeps the budget. A device does the copying.

One file, since it is one state machine, which tests/model runs in every order.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from penstock._native import DEMAND, EVICT, PREFETCH
from penstock.errors import BudgetTooSmall, PenstockError, SpillError, SpillSpaceFull
from penstock.runtime.devices import Copies, Copy, Moved, Slot
from penstock.runtime.storages import AWAY, COMING, DROPPED, LEAVING, RESIDENT, ManagedStorage
from penstock.units import format_bytes_up, format_seconds

# Copies that have begun cannot be overtaken: what is in flight, each way, bounds how long a demand waits.
# Where the device orders copies and kernels, the host does not hold them back.
IN_FLIGHT_BYTES = 64 << 20
ANY_BYTES = 1 << 62

TIMEOUT_S = 120.0

INTERRUPTIBLE_S = 0.2  # a wait ends so soon after Ctrl-C


class Wait(NamedTuple):
    """A kernel waited: for a "prefetch" to arrive, or for "memory" that evictions had not freed yet."""

    cause: str
    started_s: float
    finished_s: float


class CopyEngine:
    """Moves storages by order of the schedule, or of need.

    budget_bytes      of the device
    eviction_order    storages in the order in which they should leave, where nothing is planned
    timeout_s         a wait in which no copy completes for so long ends with SpillError
    in_flight_bytes   most bytes of copies that have begun, each way of each tier; a larger storage goes alone
    waits, moved      since `begin_step`
    failed_prefetches   how many; they are tried again when they are needed
    prefetch_error      why the first of them failed
    check_interrupt   raises in a wait what should end it
    recompute         makes a storage that was dropped again
    wait_for_others   wait for something else that keeps storages on the device; False: there is nothing
    budget_hint       what else to say where the budget is too small
    prefetches        that wait for room
    unpinned_later    to be released when the kernels that use them are over
    freeing_bytes     of what is leaving, and released when its copy is complete
    waitable          copies under way that kernels may wait for, the first to begin first
    """

    def __init__(
        self,
        device: Copies,
        budget_bytes: int,
        eviction_order: Callable[[], Iterable[ManagedStorage]] = tuple,
        timeout_s: float = TIMEOUT_S,
        in_flight_bytes: int | None = None,
    ) -> None:
        self._device = device
        self.budget_bytes = budget_bytes
        self.eviction_order = eviction_order
        self.check_interrupt: Callable[[], None] = lambda: None
        self.recompute: Callable[[ManagedStorage], None] = lambda managed: None
        self.wait_for_others: Callable[[], bool] = lambda: False
        self.budget_hint: Callable[[], str] = lambda: ""
        self._timeout_s = timeout_s
        most_bytes = IN_FLIGHT_BYTES if device.memory.in_arena else ANY_BYTES
        self._most_in_flight_bytes = most_bytes if in_flight_bytes is None else in_flight_bytes
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._evictions: deque[ManagedStorage] = deque()  # that have not begun
        self.prefetches: deque[ManagedStorage] = deque()
        self._out: Counter[str] = Counter()  # bytes in flight, by tier
        self._in: Counter[str] = Counter()
        self.freeing_bytes = 0
        self.memory = device.memory
        self.memory.budget_bytes = budget_bytes
        self.unpinned_later: list[ManagedStorage] = []
        self._is_starting = False
        self._completions = 0
        self.waitable: dict[ManagedStorage, Copy] = {}
        # Of the prefetch that the device had no memory for: bytes, and the device's bytes in use then.
        self._refused: tuple[int, int] | None = None
        self._error: PenstockError | None = None
        self._tiers = device.tiers
        self.any_got_other_memory = False  # since `begin_step`
        self.waits: list[Wait] = []
        self.moved: list[Moved] = []
        self.failed_prefetches = 0
        self.prefetch_error: PenstockError | None = None

    @property
    def in_flight_bytes(self) -> tuple[int, int]:
        """Of copies that have begun: out of the device, and into it."""
        return self._out.total(), self._in.total()

    def _tier(self, managed: ManagedStorage) -> str:
        """Of its copy."""
        return managed.slot.tier if managed.slot is not None else self._tiers[-1]

    @property
    def stall_s(self) -> float:
        """Seconds that kernels waited since `begin_step`."""
        return sum(wait.finished_s - wait.started_s for wait in self.waits)

    def begin_step(self) -> None:
        with self.lock:
            self._error = None
            self._refused = None
            self.any_got_other_memory = False
            self.waits = []
            self.moved = []

    # -- out -----------------------------------------------------------------------------------

    def evict(
        self,
        managed: ManagedStorage,
        tier: str | None = None,
        *,
        release: bool,
        packs: int = 0,
        codec: str = "csr",
        writes: bool = True,
    ) -> None:
        """Start to copy the storage out.

        release   give its memory back when the copy is complete; otherwise it stays readable
        packs     compress it first, as elements of so many bytes, and give its memory back as soon as that is
                  done; 0: do not
        codec     for that, a key of penstock.codecs.CODECS
        writes    what was compressed; else it stays on the device until room is needed

        Raises SpillSpaceFull.
        """
        if managed.state == LEAVING or managed.writing_packed:
            if release and not managed.copy_invalid:
                self._mark_released(managed)
            return
        if managed.state == AWAY and release:
            managed.queued = False  # a prefetch that has not begun comes too late
            if managed.packed_bytes and not managed.pins:
                self._release_packed(managed)
            return
        if managed.state != RESIDENT or not managed.movable:
            return
        if managed.slot is not None and tier in self._tiers and not managed.pins:
            self._move_slot(managed, tier)
        if managed.clean:
            if release:
                self._release(managed)
            return
        storage = managed.storage()
        if storage is None or managed.pins:  # a kernel of another thread may be about to write to it
            return
        if managed.slot is None:
            managed.slot = self._reserve(managed, tier or self._tiers[0])
        managed.state = LEAVING
        managed.copy_invalid = False
        managed.kept_alive = storage
        if release:
            self._mark_released(managed)
        if not packs:
            self._queue(managed)
            self._start_copies()
            return
        copy = self._new_copy(managed, True, managed.size_bytes, self._on_packed)
        copy.codec, copy.writes = (codec, packs), writes
        try:
            self._device.pack(copy)
        except BaseException:
            self._remove_in_flight(copy)
            self._cancel_eviction(managed)
            raise

    def _queue(self, managed: ManagedStorage) -> None:
        managed.queued = True
        self._evictions.append(managed)

    def _cancel_eviction(self, managed: ManagedStorage) -> None:
        """It was to leave, and does not."""
        self._unmark_released(managed)
        managed.queued = False
        if managed.writing_packed:
            managed.writing_packed = False  # what is packed is the only copy
        else:
            managed.state = AWAY if managed.swapped_out else RESIDENT
        managed.kept_alive = None

    def _on_packed(self, copy: Copy, _: PenstockError | None) -> None:
        """It is compressed, on the device, and leaves with that, or it was not worth it."""
        managed, writes = copy.managed, copy.writes
        storage, packed_bytes, managed.packed_bytes = managed.kept_alive, managed.packed_bytes, 0
        assert storage is not None
        leaves = packed_bytes and managed.freeing_bytes and not managed.copy_invalid and not managed.pins
        if leaves and self._device.release(managed, storage):
            self._unmark_released(managed)
            managed.state = AWAY
            managed.writing_packed, managed.clean, managed.keeps_copy = writes, False, True
            managed.packed_bytes = packed_bytes
            self.memory.reserved_bytes += packed_bytes - managed.size_bytes
            if not writes:
                managed.kept_alive = None
                return
            self._mark_released(managed)
        if managed.copy_invalid:
            self._cancel_eviction(managed)
        else:
            self._queue(managed)

    def _release_packed(self, managed: ManagedStorage) -> None:
        """Give up packed bytes on the device; where the slot does not have them, write them first."""
        storage = managed.storage()
        if storage is None:
            return
        if managed.clean:
            self._device.release(managed, storage)
            self._packed_gone(managed)
            return
        if managed.slot is None:
            managed.slot = self._reserve(managed, self._tiers[0])
        managed.writing_packed, managed.copy_invalid, managed.kept_alive = True, False, storage
        self._mark_released(managed)
        self._queue(managed)
        self._start_copies()

    def _packed_gone(self, managed: ManagedStorage) -> None:
        self.memory.reserved_bytes -= managed.packed_bytes
        managed.packed_bytes = 0

    def _on_packed_written(self, copy: Copy, error: PenstockError | None) -> None:
        """Packed bytes are in the slot. Where that failed they stay on the device."""
        managed = copy.managed
        release = managed.freeing_bytes > 0
        self._unmark_released(managed)
        managed.writing_packed = False
        if error is not None:
            self._error = self._error or error
        elif managed.state != COMING and not managed.copy_invalid:
            managed.clean = True
            if release and managed.state == RESIDENT:
                self._release(managed)
            elif release:
                self._packed_gone(managed)
        elif managed.state == AWAY:
            self._packed_gone(managed)  # the device has it elsewhere
        if managed.state == RESIDENT or managed.state == AWAY:
            managed.kept_alive = None

    def _reserve(self, managed: ManagedStorage, tier: str) -> Slot:
        try:
            slot = self._device.reserve(managed, tier)
        except SpillSpaceFull:
            if not self._drop_copies():
                raise
            return self._device.reserve(managed, tier)
        if len(self._tiers) > 1 and slot.tier != tier and self._drop_copies(tier):
            self._device.free_slot(managed, slot)
            slot = self._device.reserve(managed, tier)
        return slot

    def _drop_copies(self, outdated_on: str | None = None) -> bool:
        """Give up copies of what is on the device too. Whether there were any.

        outdated_on   only those on that tier that do not count any more
        """
        dropped = False
        for managed in self.eviction_order():
            if managed.state != RESIDENT or managed.slot is None or managed.writing_packed:
                continue
            if outdated_on is None or (not managed.clean and self._tier(managed) == outdated_on):
                self._drop_copy(managed)
                dropped = True
        return dropped

    def _drop_copy(self, managed: ManagedStorage) -> None:
        managed.clean = False
        self._device.will_write(managed)
        self._device.free_slot(managed, managed.slot)
        managed.slot = None

    def _move_slot(self, managed: ManagedStorage, tier: str) -> None:
        """Let the next copy go to this tier where the last one, of another plan or none, is elsewhere: if
        there is room."""
        if self._tier(managed) == tier:
            return
        with contextlib.suppress(SpillSpaceFull):
            slot = self._reserve(managed, tier)
            if slot.tier != tier or managed.slot is None:
                self._device.free_slot(managed, slot)
            else:
                self._drop_copy(managed)
                managed.slot = slot

    def release(self, managed: ManagedStorage, tier: str | None = None) -> None:
        """Give the storage's memory back now if it has a copy, else as soon as it has one."""
        self.evict(managed, tier, release=True)

    def _mark_released(self, managed: ManagedStorage) -> None:
        if not managed.freeing_bytes:
            managed.freeing_bytes = managed.packed_bytes or managed.size_bytes
            self.freeing_bytes += managed.freeing_bytes

    def _unmark_released(self, managed: ManagedStorage) -> None:
        self.freeing_bytes -= managed.freeing_bytes
        managed.freeing_bytes = 0

    def _release(self, managed: ManagedStorage) -> None:
        """Of what is resident and clean."""
        if managed.pins:
            self.unpinned_later.append(managed)
            return
        storage = managed.kept_alive or managed.storage()
        if storage is None:
            return
        if self._device.release(managed, storage):
            managed.state = AWAY
            managed.keeps_copy = True
            self.memory.reserved_bytes -= managed.size_bytes
        else:
            # The program wrote to it without our knowing, or a thread of a collective has it. It leaves when
            # room is needed: another copy at once would keep alive, for ever, what only this one does.
            managed.clean = False
            managed.kept_alive = None

    def will_write(self, managed: ManagedStorage) -> None:
        """A kernel is about to write: copies lose their worth."""
        if managed.state == LEAVING and managed.queued:
            self._evictions.remove(managed)
            self._cancel_eviction(managed)
        elif managed.state == LEAVING or managed.writing_packed:
            managed.copy_invalid = True
            self._unmark_released(managed)
        managed.clean = False
        self._device.will_write(managed)

    def _new_copy(
        self,
        managed: ManagedStorage,
        out: bool,
        size_bytes: int,
        finish: Callable[[Copy, PenstockError | None], None],
        priority: int = EVICT,
        kernels_may_wait: bool = False,
    ) -> Copy:
        storage = managed.kept_alive
        assert storage is not None
        copy = Copy(managed, storage, out, priority, self.on_copy_end)
        copy.in_flight_bytes, copy.tier, copy.finish = size_bytes, self._tier(managed), finish
        (self._out if out else self._in)[copy.tier] += size_bytes
        if kernels_may_wait:
            self.waitable[managed] = copy
        return copy

    def _remove_in_flight(self, copy: Copy) -> None:
        """It has ended, or could not begin."""
        (self._out if copy.out else self._in)[copy.tier] -= copy.in_flight_bytes
        if self.waitable.get(copy.managed) is copy:
            del self.waitable[copy.managed]

    def on_copy_end(self, copy: Copy) -> None:
        """The host has seen the copy end."""
        copy.storage = None  # it may be freed now
        with self.lock:
            self._remove_in_flight(copy)
            if copy.waited_on:
                self._error = self._error or copy.error  # what kernels have read since is anything
            else:
                copy.finish(copy, copy.error)
            self.moved.extend(copy.moved)
            self._completions += 1
            try:
                if self._evictions or self.prefetches:
                    self._start_copies(here=False)
            except PenstockError as error:
                self._error = self._error or error
            finally:
                self._changed.notify_all()

    def _make_kernels_wait(self, managed: ManagedStorage) -> bool:
        """Have kernels wait on the device for a copy. Those of its direction that come before it are over
        then, too. False: it takes the host."""
        copy = self.waitable.get(managed)
        if copy is None:
            return False
        if copy.priority != DEMAND:
            state = managed.state
            before = itertools.takewhile(lambda other: other is not copy, self.waitable.values())
            for other in list(before):
                if other.managed.state == state and self._device.make_kernels_wait(other):
                    self._on_end_for_kernels(other)
        if not self._device.make_kernels_wait(copy):
            return False
        self._on_end_for_kernels(copy)
        return True

    def _on_end_for_kernels(self, copy: Copy) -> None:
        del self.waitable[copy.managed]
        copy.waited_on = True
        copy.finish(copy, None)

    def leave_now(self, managed: ManagedStorage) -> bool:
        """Have it leave, and its memory back, also where it is just coming: kernels wait for the copies on
        the device, or where they cannot, the host does. False: it stays."""
        self._wait_while(managed, COMING)
        self.evict(managed, release=True)
        self._wait_while(managed, LEAVING)
        return managed.state == AWAY

    def _wait_while(self, managed: ManagedStorage, state: int) -> None:
        while managed.state == state and not managed.pins:
            if not self._make_kernels_wait(managed):
                self._wait()

    def kernels_wait_for_one_that_leaves(self) -> bool:
        """Of those that give their memory back, the one that is first to be over."""
        leaving = [
            managed
            for managed in self.waitable
            if managed.state == LEAVING
            and managed.freeing_bytes
            and not managed.copy_invalid
            and not managed.pins
        ]
        return any(map(self._make_kernels_wait, leaving))

    def wait_for_one_that_leaves(self) -> bool:
        """As `kernels_wait_for_one_that_leaves`; where they cannot, on the device, the host does. False:
        there is none."""
        if self.kernels_wait_for_one_that_leaves():
            return True
        if not self.freeing_bytes:
            return False
        self._wait()
        return True

    def _on_copied_out(self, copy: Copy, error: PenstockError | None) -> None:
        managed = copy.managed
        release = managed.freeing_bytes > 0
        self._unmark_released(managed)
        managed.state = RESIDENT
        if error is not None:
            self._error = self._error or error
            managed.clean = False
            self._device.will_write(managed)
        elif not managed.copy_invalid:
            managed.clean = True
            if release:
                try:
                    self._release(managed)
                except Exception as refused:
                    self._error = self._error or SpillError(f"memory cannot be given back: {refused}")
        if managed.state != LEAVING:  # else another copy has begun, which says so when it is over
            if managed.swapped_out:
                managed.state, managed.clean = AWAY, False
            managed.kept_alive = None

    # -- in ------------------------------------------------------------------------------------

    def prefetch(self, managed: ManagedStorage, keeps_copy: bool = True) -> None:
        """Bring the storage back as soon as there is room beside what runs. What is compressed stays so until
        it is demanded.

        keeps_copy   it is going to leave again, unwritten
        """
        managed.keeps_copy = keeps_copy
        if managed.state == LEAVING or managed.writing_packed:  # it stays
            self._unmark_released(managed)
        elif managed.state == AWAY and not managed.queued and not managed.packed_bytes:
            managed.queued = True
            self.prefetches.append(managed)
            self._start_copies()

    def demand(self, wanted: Sequence[ManagedStorage]) -> None:
        """Wait until all of them are on the device. They are pinned, and so stay."""
        for managed in wanted:
            if managed.state == DROPPED:
                self.recompute(managed)
        for managed in wanted:
            if managed.state == COMING:
                self._device.raise_priority(managed)
        while any(managed.state in (AWAY, COMING) for managed in wanted):
            for managed in wanted:  # each begins to come when there is room for it
                if managed.state == AWAY:
                    self._start_demanded(managed, wanted)
            began_s = time.perf_counter()
            coming = [managed for managed in wanted if managed.state == COMING]
            if coming and not all(self._make_kernels_wait(managed) for managed in coming):
                self._wait()
            self.waits.append(Wait("prefetch", began_s, time.perf_counter()))
            if any(managed.state == AWAY for managed in wanted):  # one is packed still, or its copy failed
                self.raise_error()

    def _start_demanded(self, managed: ManagedStorage, wanted: Sequence[ManagedStorage]) -> None:
        """Make room for it, and begin to bring it; or have it asked for again, when there is more room."""
        reserved_bytes = 0
        # In a wait for room, what was compressed on the device may leave: then more has to come back.
        while managed.state == AWAY and (needed_bytes := self._missing_bytes(wanted)) > reserved_bytes:
            self.make_room(needed_bytes, later_bytes=needed_bytes - self._missing_bytes([managed]))
            reserved_bytes = needed_bytes
        if managed.state == AWAY:  # else a prefetch of it began in that wait
            began_s = time.perf_counter()
            if not self._start_copy_in(managed, DEMAND):
                self.make_some_room(managed.size_bytes)
            self.waits.append(Wait("prefetch", began_s, time.perf_counter()))

    def wait_until_unused(self, managed: ManagedStorage, needed: bool) -> None:
        """Wait until no copy uses the storage's memory, which is about to be freed.

        needed   its bytes are wanted before
        """
        if managed.state == COMING or (needed and managed.state > LEAVING):
            self.demand([managed])
        if managed.state <= LEAVING:
            self.will_write(managed)
        while managed.kept_alive is not None:
            self._wait()

    def _start_copy_in(self, managed: ManagedStorage, priority: int) -> bool:
        storage = managed.storage()
        if storage is None:
            return True
        waits = priority == DEMAND
        while True:
            size_bytes = self._arriving_bytes(managed, priority)
            if not self._device.prepare_copy_in(managed, storage, size_bytes < managed.size_bytes, waits):
                return managed.state == RESIDENT
            if size_bytes == self._arriving_bytes(managed, priority):
                break
            self._device.cancel_copy_in(managed, storage)  # its packed bytes left in a wait
        if managed.writing_packed and managed.queued:  # it is needed before it was written
            self._evictions.remove(managed)
            self._cancel_eviction(managed)
        managed.queued = False
        managed.state = COMING
        managed.kept_alive = storage
        self.memory.reserved_bytes += size_bytes
        kernels_may_wait = size_bytes == managed.size_bytes
        copy = self._new_copy(managed, False, size_bytes, self._on_copied_in, priority, kernels_may_wait)
        try:
            self._device.copy_in(copy)
        except BaseException:
            self._remove_in_flight(copy)
            managed.state = AWAY
            managed.kept_alive = None
            self._device.cancel_copy_in(managed, storage)
            raise
        return True

    def _missing_bytes(self, wanted: Sequence[ManagedStorage]) -> int:
        """That they take on the device until they are there. What is compressed is beside what it becomes."""
        missing_bytes = 0
        for managed in wanted:
            if managed.state == AWAY:
                arriving_bytes = self._arriving_bytes(managed, DEMAND)
                missing_bytes += managed.size_bytes
                missing_bytes += arriving_bytes if arriving_bytes < managed.size_bytes else 0
        return missing_bytes

    def _arriving_bytes(self, managed: ManagedStorage, priority: int) -> int:
        """That the storage takes on the device when it is back."""
        if managed.packed_bytes or managed.swapped_out or (priority == DEMAND and self.memory.in_arena):
            return managed.size_bytes
        return (managed.slot is not None and managed.slot.packed_bytes) or managed.size_bytes

    def _on_copied_in(self, copy: Copy, error: PenstockError | None) -> None:
        managed = copy.managed
        storage = managed.kept_alive
        assert storage is not None
        if not managed.writing_packed:
            managed.kept_alive = None
        if error is None:
            try:
                clean = self._device.finish_copy_in(managed, storage)
                if managed.packed_bytes:  # and expanded now
                    self._packed_gone(managed)
                if clean and copy.in_flight_bytes < managed.size_bytes:
                    managed.packed_bytes = copy.in_flight_bytes
                is_away = clean is None or managed.packed_bytes or managed.swapped_out
                managed.state = AWAY if is_away else RESIDENT
                managed.clean = managed.clean if clean is None else clean
            except Exception as refused:  # raised here, on a thread of the copies, nobody would see it
                error = SpillError(f"bytes that were read back cannot be put in place: {refused}")
        if error is not None:
            managed.state = AWAY
            self._device.cancel_copy_in(managed, storage)
            if copy.priority == DEMAND:
                self._error = self._error or error
            else:
                self.failed_prefetches += 1
                self.prefetch_error = self.prefetch_error or error

    # -- room ----------------------------------------------------------------------------------

    def make_room(
        self, size_bytes: int, ahead_bytes: int = 0, *, later_bytes: int = 0, expected: bool = False
    ) -> None:
        """Wait until ``size_bytes`` fit beside what is there; they are reserved until `end_kernel`.

        ahead_bytes   start to evict so many bytes more where room is short, without waiting for them
        later_bytes   of ``size_bytes``, that it does not wait for
        expected      what a kernel took before, and may not take again: make what room there can be

        Raises BudgetTooSmall where nothing that could leave is left.
        """
        if self._short_bytes(size_bytes) <= later_bytes:
            return
        self._device.poll()
        if self._short_bytes(size_bytes) <= later_bytes:
            return
        began_s = time.perf_counter()
        while (short_bytes := self._short_bytes(size_bytes)) > later_bytes:
            self.raise_error()
            if self.freeing_bytes < short_bytes:
                self._evict_some(short_bytes + ahead_bytes)
                if self._short_bytes(size_bytes) <= later_bytes:
                    break
            if self.freeing_bytes or self._in.total() or self._out.total():
                if not self.kernels_wait_for_one_that_leaves():
                    self._wait()
            elif not self.wait_for_others():
                if expected:
                    break
                if not self._device.room.make(size_bytes):
                    self._refuse(size_bytes)
        self.waits.append(Wait("memory", began_s, time.perf_counter()))

    def _short_bytes(self, size_bytes: int) -> int:
        """That are missing for so many, which are reserved: prefetches must not take what is freed."""
        self.memory.reserved_bytes = self._device.in_memory_bytes() + size_bytes
        return self.memory.reserved_bytes - self.budget_bytes

    def fits(self, size_bytes: int) -> bool:
        """Whether so many bytes fit beside what is there, and what is reserved."""
        used_bytes = max(self._device.in_memory_bytes(), self.memory.reserved_bytes)
        return used_bytes + size_bytes <= self.budget_bytes

    def wait_for_room(self, size_bytes: int) -> None:
        """Wait until so many bytes fit beside what is there, as far as what is leaving makes room."""
        began_s, completions = time.perf_counter(), self._completions
        while self.freeing_bytes and self._device.in_memory_bytes() + size_bytes > self.budget_bytes:
            self._wait()
        if self._completions > completions:
            self.waits.append(Wait("memory", began_s, time.perf_counter()))

    def evict_and_wait(self, size_bytes: int) -> bool:
        """Let so many bytes leave, and wait until they have. False: nothing more could."""
        before = self._device.in_memory_bytes()
        self._device.poll()
        while (left_bytes := before - self._device.in_memory_bytes()) < size_bytes:
            if self.freeing_bytes < size_bytes - left_bytes:
                self._evict_some(size_bytes - left_bytes)
                if before - self._device.in_memory_bytes() > left_bytes:
                    continue
            if not self.freeing_bytes:
                return left_bytes > 0 or self.wait_for_others()
            self._wait()
        return True

    def make_some_room(self, size_bytes: int) -> None:
        """The device has no memory for what is demanded, though the budget has: free as much, and wait until
        that has left. Asked before, it would refuse again."""
        if self.evict_and_wait(size_bytes) or self._device.room.make(size_bytes):
            return
        if not (self._in.total() or self._out.total()):
            self._refuse(size_bytes)
        self._wait()

    def _evict_some(self, size_bytes: int) -> None:
        """Let storages leave until ``size_bytes`` are free, or on their way."""
        self._device.report_unasked_moves()
        target = self._device.in_memory_bytes() - size_bytes
        for managed in self.eviction_order():
            if self._device.in_memory_bytes() - self.freeing_bytes <= target:
                return
            if not managed.pins and (managed.state in (RESIDENT, LEAVING) or managed.packed_bytes):
                self.evict(managed, release=True)

    def _refuse(self, size_bytes: int) -> None:
        used_bytes = self._device.in_memory_bytes()
        needed_bytes = max(used_bytes + size_bytes, self._device.room.budget_for(size_bytes))
        raise BudgetTooSmall(
            f"a kernel, with the tensors that it uses and those that cannot leave, needs "
            f"{format_bytes_up(needed_bytes)}; the device budget is {format_bytes_up(self.budget_bytes)}. "
            f"Raise device_budget to {format_bytes_up(needed_bytes)}, or lower the batch size."
            f"{self.budget_hint()}",
            needed_bytes,
        )

    def end_kernel(self) -> None:
        """What was reserved is in use now, or not needed."""
        self.memory.reserved_bytes = 0
        if self.unpinned_later:
            later = self.unpinned_later[:]
            self.unpinned_later.clear()
            for managed in later:
                if managed.state == RESIDENT and managed.clean:
                    self._release(managed)
        if self.prefetches:
            self._device.poll()
            self._start_copies()

    # -- the queues ----------------------------------------------------------------------------

    def _start_copies(self, here: bool = True) -> None:
        """Start what waits for its turn. here: on a thread that runs kernels."""
        if self._is_starting:  # a copy was over at once: the loop that started it goes on
            return
        self._is_starting = True
        try:
            if self.prefetches and (here or self.memory.in_arena):
                self._start_prefetches()
            if self._evictions:
                self._start_evictions()
        finally:
            self._is_starting = False

    def _start_prefetches(self) -> None:
        """In their order, but what waits for its link lets those pass that come by another one, and leave the
        room that it needs."""
        place = passed_bytes = 0
        full: set[str] = set()
        while place < len(self.prefetches):
            managed = self.prefetches[place]
            if (
                managed.state == AWAY and managed.queued and not managed.packed_bytes and not managed.pins
            ):  # else who uses it demands it
                size_bytes = self._arriving_bytes(managed, PREFETCH)
                if not self._may_begin(managed, size_bytes, self._in, full):
                    if len(full) == len(self._tiers):
                        return
                    passed_bytes += size_bytes
                    place += 1
                    continue
                while not self.fits(passed_bytes + size_bytes):
                    if not self.kernels_wait_for_one_that_leaves():
                        return
                if self._would_be_refused(size_bytes):
                    return
                if not self._start_copy_in(managed, PREFETCH):
                    self._refused = size_bytes, self._device.in_memory_bytes()
                    return
                self._refused = None
            del self.prefetches[place]
            managed.queued = False

    def _may_begin(
        self, managed: ManagedStorage, size_bytes: int, in_flight: Counter[str], full: set[str]
    ) -> bool:
        """Whether the copy has its turn on the link of its tier; where not, none behind it has."""
        tier = self._tier(managed)
        held_bytes = in_flight[tier]
        if tier in full or (held_bytes and held_bytes + size_bytes > self._most_in_flight_bytes):
            full.add(tier)
        return tier not in full

    def _would_be_refused(self, size_bytes: int) -> bool:
        """Whether the device had no memory for a prefetch of so many bytes or fewer, and as many have not
        left since. An allocator gives back all that it keeps for later, and waits for the device, before it
        refuses."""
        if self._refused is None:
            return False
        refused_bytes, used_bytes = self._refused
        return size_bytes >= refused_bytes and self._device.in_memory_bytes() + size_bytes > used_bytes

    def _start_evictions(self) -> None:
        place = 0
        full: set[str] = set()
        while place < len(self._evictions) and len(full) < len(self._tiers):
            managed = self._evictions[place]
            size_bytes = managed.packed_bytes or managed.size_bytes
            if not self._may_begin(managed, size_bytes, self._out, full):
                place += 1
                continue
            del self._evictions[place]
            managed.queued = False
            raw = not managed.writing_packed
            finish = self._on_copied_out if raw else self._on_packed_written
            copy = self._new_copy(managed, True, size_bytes, finish, kernels_may_wait=raw)
            try:
                self._device.copy_out(copy)
            except BaseException:
                self._remove_in_flight(copy)
                self._cancel_eviction(managed)
                raise

    def _wait(self) -> None:
        """Until a copy completes. Raises what went wrong, or SpillError where none completes in time."""
        self.raise_error()
        self._wait_for_copy()
        self.raise_error()

    def _wait_for_copy(self) -> None:
        before = self._completions
        deadline = time.monotonic() + self._timeout_s
        self._device.poll(waits=True)
        while self._completions == before:
            if not (self._out.total() or self._in.total()):
                self._start_copies()  # one that could not begin left others behind in the queue
                return
            came = self._changed.wait(min(INTERRUPTIBLE_S, self._timeout_s))
            self.check_interrupt()
            if not came and time.monotonic() > deadline:
                raise SpillError(
                    f"no copy has completed for {format_seconds(self._timeout_s)}: {self._device.place_text} "
                    "does not answer. Check the disk (dmesg, smartctl), or choose another spill_dir."
                )

    def wait_for_change(self) -> None:
        """Until a copy completes, or `notify_change` is called. Raises SpillError after the time limit."""
        if not self._changed.wait(self._timeout_s):
            raise SpillError(f"what another thread recomputes is not there after {self._timeout_s} s")

    def notify_change(self) -> None:
        self._changed.notify_all()

    @contextlib.contextmanager
    def unlocked(self) -> Iterator[None]:
        """Leave the lock, which this thread holds once, to others meanwhile."""
        self.lock.release()
        try:
            yield
        finally:
            self.lock.acquire()

    def raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    # -- the end -------------------------------------------------------------------------------

    def drain(self) -> None:
        """Drop what is queued, and wait for what is in flight. Of what fails nothing is lost: it stays where
        it is. Raises SpillError where no copy completes in time."""
        with self.lock:
            for managed in self._evictions:
                self._cancel_eviction(managed)
            for managed in self.prefetches:
                managed.queued = False
            self._evictions.clear()
            self.prefetches.clear()
            self.memory.reserved_bytes = 0
            while self._out.total() or self._in.total():
                self._wait_for_copy()

    def came_back_unasked(self, managed: ManagedStorage, clean: bool) -> None:
        """The device brought the storage back by itself."""
        if managed.state == AWAY:
            managed.state = RESIDENT
            managed.clean = clean and (managed.clean or not managed.packed_bytes)
            if managed.packed_bytes:
                self._packed_gone(managed)

    def got_other_memory(self, managed: ManagedStorage) -> None:
        """The program gave the storage other memory: there it is, and no copy counts. Those under way end."""
        self.any_got_other_memory = True
        self._unmark_released(managed)
        managed.clean, managed.copy_invalid = False, True
        if managed.packed_bytes:
            self._packed_gone(managed)
        if managed.state in (AWAY, DROPPED):
            managed.state = RESIDENT

    def left_unasked(self, managed: ManagedStorage) -> None:
        """The device took the storage's memory by itself, and keeps a copy of its own."""
        if managed.state == RESIDENT:
            managed.state = AWAY
            managed.clean = False
