"""A device whose copies are over when a test says so, in any order, with any error.

Storages are storages in CPU memory, emptied and filled again. The bytes of a copy are moved when it is over.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from penstock._native import DeviceMemory
from penstock.errors import PenstockError, SpillError, SpillSpaceFull
from penstock.runtime.copy_engine import CopyEngine
from penstock.runtime.devices import Copies, Copy, Room
from penstock.runtime.storages import AWAY, COMING, LEAVING, ManagedStorage

MOST_QUESTIONS = 100_000


class Slot(int):
    """The number of a place for a copy, its tier, and what the copy takes where it is packed."""

    tier = "disk"
    packed_bytes = 0


class NoRoom(Room):
    """Nothing leaves that the engine does not know."""

    def __init__(self, live: dict[Any, int]) -> None:
        self._live = live

    def make(self, size_bytes: int) -> bool:
        return False

    def budget_for(self, size_bytes: int) -> int:
        return sum(self._live.values()) + size_bytes


class ScriptedDevice(Copies):
    """See penstock.runtime.devices.Copies.

    random    decides which copy is over next, and which are over before their call returns
    trouble   probability that a call fails: no space, no memory now, an error at once
    host_slots   of a host tier
    pending   copies that have begun
    """

    place_text = "the disk of the test"

    def __init__(
        self,
        seed: int = 0,
        *,
        anywhere: bool = True,
        trouble: float = 0.0,
        at_once: float = 0.0,
        host_slots: int = 0,
    ) -> None:
        self.tiers = ("host", "disk") if host_slots else ("disk",)
        self.host_slots = host_slots
        self.random = random.Random(seed)
        self.trouble = trouble
        self.at_once = at_once
        self.pending: list[Copy] = []
        self.slots: dict[Slot, bytes] = {}
        self.live: dict[Any, int] = {}  # bytes on the device, by key
        self.room = NoRoom(self.live)
        self.packed: dict[int, bytes] = {}  # packed on the device, by key
        self.stays_packed: set[int] = set()  # keys of what is coming, packed
        self.peak_bytes = 0
        self.questions = 0
        self.engine: CopyEngine | None = None
        self.memory = DeviceMemory()
        self.memory.in_arena = anywhere
        self.kernels_thread = threading.get_ident()
        self._numbers = 0

    # -- memory ------------------------------------------------------------------------------------

    def in_memory_bytes(self) -> int:
        self.questions += 1
        assert self.questions < MOST_QUESTIONS, "the engine spins"
        return sum(self.live.values())

    def take(self, key: Any, size_bytes: int) -> None:
        self.live[key] = size_bytes
        self.peak_bytes = max(self.peak_bytes, sum(self.live.values()))

    # -- the protocol ------------------------------------------------------------------------------

    def _in_trouble(self) -> bool:
        return self.random.random() < self.trouble

    def reserve(self, managed: ManagedStorage, tier: str) -> Slot:
        in_host = [slot for slot in self.slots if slot.tier == "host"]
        if tier == "host" and len(in_host) == self.host_slots:
            tier = "disk"
        if tier == "disk" and self._in_trouble():
            raise SpillSpaceFull("the disk of the test is full")
        self._numbers += 1
        slot = Slot(self._numbers)
        slot.tier = tier
        self.slots[slot] = b""
        return slot

    def free_slot(self, managed: ManagedStorage, slot: Slot) -> None:
        assert not any(copy.managed is managed for copy in self.pending), (
            "forgotten while a copy is under way"
        )
        del self.slots[slot]

    def pack(self, copy: Copy) -> None:
        self._begin(copy)

    def _keep_packed(self, managed: ManagedStorage, data: bytes) -> None:
        self.packed[managed.key] = data
        self.take(("packed", managed.key), packed_size(managed))

    def drop_packed(self, managed: ManagedStorage) -> None:
        if self.packed.pop(managed.key, None) is not None:
            del self.live["packed", managed.key]

    def copy_out(self, copy: Copy) -> None:
        packed, storage = copy.managed.writing_packed, copy.storage
        assert packed or (storage and storage.nbytes() == copy.managed.size_bytes), (
            "copied out, and not there"
        )
        self._begin(copy, packed)

    def prepare_copy_in(
        self, managed: ManagedStorage, storage: torch.UntypedStorage, packed: bool = False, waits: bool = True
    ) -> bool:
        assert self.memory.in_arena or threading.get_ident() == self.kernels_thread
        assert storage.nbytes() == 0, "prepared, and there"
        if self._in_trouble() and self.engine is not None and any(self.engine.in_flight_bytes):
            return False
        if packed:
            assert managed.key not in self.packed
            self.stays_packed.add(managed.key)
            self._keep_packed(managed, b"")
            return True
        storage.resize_(managed.size_bytes)
        self.take(managed.key, managed.size_bytes)
        if waits:
            self.poll()
        return True

    def copy_in(self, copy: Copy) -> None:
        managed = copy.managed
        packed = managed.key in self.stays_packed
        expands = managed.key in self.packed or self.memory.in_arena
        assert packed or expands or not managed.slot.packed_bytes, "copied in whole, and its copy is packed"
        self._begin(copy, packed)

    def _begin(self, copy: Copy, packed: bool = False) -> None:
        if self._in_trouble():
            raise SpillError("the copy cannot begin")
        others = [other for other in self.pending if other.managed is copy.managed]
        assert all(other.out and is_packed(other) and not copy.out for other in others), "two copies at once"
        if packed:
            copy.size_bytes = packed_size(copy.managed)
        self.pending.append(copy)
        if self.random.random() < self.at_once:
            self.finish(copy)

    def release(self, managed: ManagedStorage, storage: torch.UntypedStorage) -> bool:
        assert not managed.pins, "released while a kernel uses it"
        if managed.state == AWAY:
            assert self.packed[managed.key] == self.slots[managed.slot], "given up, and its copy is another"
            self.drop_packed(managed)
            return True
        if managed.state == LEAVING:
            assert self.packed[managed.key] == content(storage), "released, and packed otherwise"
        else:
            assert self.slots[managed.slot] == content(storage), "released, and its copy is another"
        storage.resize_(0)
        del self.live[managed.key]
        return True

    def finish_copy_in(self, managed: ManagedStorage, storage: torch.UntypedStorage) -> bool:
        if managed.key in self.stays_packed:
            self.stays_packed.remove(managed.key)
            return True
        was_packed = managed.key in self.packed
        if not managed.writing_packed:  # else they are read until they are written
            self.drop_packed(managed)
        return managed.clean or not was_packed

    def cancel_copy_in(self, managed: ManagedStorage, storage: torch.UntypedStorage) -> None:
        if managed.key in self.stays_packed:
            self.stays_packed.remove(managed.key)
            self.drop_packed(managed)
            return
        storage.resize_(0)
        del self.live[managed.key]

    # -- the end of copies -------------------------------------------------------------------------

    def poll(self, waits: bool = False) -> None:
        while self.pending and self.random.random() < self.at_once:
            self.finish(self.random.choice(self.pending))

    def finish(self, copy: Copy, error: PenstockError | None = None) -> None:
        """The copy is over; on this thread."""
        self.pending.remove(copy)
        managed, storage, packed = copy.managed, copy.storage, is_packed(copy)
        copy.storage = None
        assert storage is not None
        if copy.codec[0] != "raw":
            fits = self.engine is None or (
                sum(self.live.values()) + packed_size(managed) <= self.engine.budget_bytes
            )
            if fits and error is None:
                self._keep_packed(managed, content(storage))
                managed.packed_bytes = packed_size(managed)
            del storage
            copy.on_end(copy)
            if not managed.packed_bytes:
                self.drop_packed(managed)
            return
        damage = b"\xa5" * managed.size_bytes
        if copy.out:
            data = self.packed.get(managed.key, damage) if packed else content(storage)
            self.slots[managed.slot] = data if error is None else damage
            managed.slot.packed_bytes = packed_size(managed) if packed and error is None else 0
        elif packed:
            self.packed[managed.key] = self.slots[managed.slot] if error is None else damage
        else:
            data = self.packed.get(managed.key, self.slots[managed.slot])
            fill(storage, data if error is None else damage)
        del storage
        copy.error = error
        if error is None:
            copy.moved = (copy.moved_over("disk_write" if copy.out else "disk_read", 0.0, 1.0),)
        copy.on_end(copy)
        if copy.out and packed and managed.state != COMING and not managed.packed_bytes:
            self.drop_packed(managed)

    @contextlib.contextmanager
    def serving(self, engine: CopyEngine) -> Iterator[None]:
        """Copies are over, one after the other in any order, whenever the engine waits."""
        stop = threading.Event()

        def serve() -> None:
            while not stop.is_set():
                with engine.lock:
                    for _ in range(self.random.randint(1, 2)):
                        if self.pending:
                            self.finish(self.random.choice(self.pending))
                time.sleep(2e-4)

        thread = threading.Thread(target=serve, daemon=True)
        with engine.lock:
            thread.start()
            try:
                yield
            finally:
                stop.set()
        thread.join()


def is_packed(copy: Copy) -> bool:
    """Whether it is of packed bytes, which stay packed."""
    return copy.size_bytes < copy.managed.size_bytes


def packed_size(managed: ManagedStorage) -> int:
    return managed.size_bytes // 2


def content(storage: torch.UntypedStorage) -> bytes:
    return ctypes.string_at(storage.data_ptr(), storage.nbytes())


def fill(storage: torch.UntypedStorage, data: bytes) -> None:
    assert len(data) == storage.nbytes(), "the slot holds bytes of another size"
    ctypes.memmove(storage.data_ptr(), data, len(data))
