"""Saves in the background without a copy of all: until a tensor's bytes are taken, nobody writes to it.

Who is about to write waits, and that tensor is taken next. The clock asks before a kernel writes; on a CPU
other writes fault on protected pages, as those to what recipes read (penstock.runtime.recompute).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from penstock.checkpoint.background import Snapshot
from penstock.runtime.copy_engine import INTERRUPTIBLE_S, TIMEOUT_S, CopyEngine, Wait
from penstock.runtime.devices import Device
from penstock.runtime.faults import start_serving
from penstock.runtime.resident import default_spill_dir
from penstock.runtime.storages import AWAY, DROPPED, ManagedStorage
from penstock.storage.aligned import AlignedBuffer, align_up
from penstock.storage.checksum import copy_crc32c
from penstock.storage.extents import ALIGNMENT_BYTES
from penstock.units import format_seconds

if TYPE_CHECKING:
    from penstock.runtime.recompute import Recomputation

# A smaller tensor is copied: to protect its pages costs more.
SMALLEST_BYTES = 64 << 10
# What is away is read to a buffer, whole. A larger one comes back to its place, inside the budget.
LARGEST_READ_BYTES = 48 << 20


class Snapshots:
    """Those of a run.

    timeout_s   a writer that waits for one of which nothing is taken for so long goes on, and the save fails
    folder      on a disk
    """

    folder = Path(default_spill_dir())

    def __init__(
        self, device: Device, engine: CopyEngine, recomputation: Recomputation, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._device, self._engine, self._recomputation = device, engine, recomputation
        self.timeout_s = timeout_s
        self._of: dict[ManagedStorage, list[_Snapshot]] = {}  # whose bytes are to be taken
        self._count = 0  # of what was taken
        self._changed = threading.Condition(engine.lock)

    def take(self, tensors: Sequence[torch.Tensor]) -> Snapshot:
        """Of the tensors as they are now. What it does not contain, the caller copies at once."""
        snapshot = _Snapshot(self, self._device, self._engine, tensors)
        if not self._device.memory.in_arena:
            return snapshot
        with self._engine.lock:
            storages = self._device.storages
            storages.remove_dead()
            for index, tensor in enumerate(tensors):
                used = _bytes_of(tensor)
                whole = storages.find(tensor.untyped_storage()) if len(used) >= SMALLEST_BYTES else None
                if whole is None:
                    continue
                parts = [
                    part
                    for part in whole.parts()
                    if part.offset_bytes < used.stop and used.start < part.offset_bytes + part.size_bytes
                ]
                if all(self._can_watch(part, tensor) for part in parts):
                    snapshot.add(index, parts)
            if snapshot.parts:
                start_serving(self._recomputation)
        return snapshot

    def _can_watch(self, managed: ManagedStorage, tensor: torch.Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr() + managed.offset_bytes
        return managed.movable and managed.state != DROPPED and managed.address == address

    def watch(self, managed: ManagedStorage, snapshot: _Snapshot) -> None:
        self._of.setdefault(managed, []).append(snapshot)
        self._recomputation.watch(managed, +1)

    def unwatch(self, managed: ManagedStorage, snapshot: _Snapshot) -> None:
        of = self._of[managed]
        of.remove(snapshot)
        if not of:
            del self._of[managed]
        self._recomputation.watch(managed, -1)
        self._count += 1
        with contextlib.suppress(RuntimeError):  # another thread holds the lock, and waits for this one
            self._changed.notify_all()

    def will_write(self, managed: ManagedStorage) -> None:
        """Wait until its bytes are taken. The engine's lock is held, and released meanwhile."""
        if managed in self._of:
            began_s = time.perf_counter()
            self._wait(managed)
            self._engine.waits.append(Wait("memory", began_s, time.perf_counter()))

    def finish(self) -> None:
        """Wait until everything is taken."""
        with self._engine.lock:
            while self._of:
                self._wait(next(iter(self._of)))

    def _wait(self, managed: ManagedStorage) -> None:
        """Until its bytes are taken; where nothing is for too long, the saves fail."""
        count, deadline = self._count, time.monotonic() + self.timeout_s
        while snapshots := self._of.get(managed):
            snapshots[0].want(managed)
            self._changed.wait(INTERRUPTIBLE_S)
            self._engine.check_interrupt()
            if self._count != count:
                count, deadline = self._count, time.monotonic() + self.timeout_s
            elif time.monotonic() > deadline:
                self.give_up(
                    f"nothing of it was written for {format_seconds(self.timeout_s)}, and training cannot "
                    "wait longer"
                )

    def give_up(self, reason: str, managed: ManagedStorage | None = None) -> None:
        """Fail the saves that are to take the bytes of ``managed``; None: all. It can be written then. The
        engine's lock is held, or its holder waits."""
        for each in list(self._of) if managed is None else [managed]:
            for snapshot in list(self._of.get(each, ())):
                snapshot.failed = snapshot.failed or reason
                snapshot.end()


class _Snapshot:
    """See `penstock.checkpoint.background.Snapshot`.

    parts   by index of the tensor: the storages that have its bytes, until they are taken
    """

    def __init__(
        self, snapshots: Snapshots, device: Device, engine: CopyEngine, tensors: Sequence[torch.Tensor]
    ) -> None:
        self._snapshots, self._device, self._engine, self._tensors = snapshots, device, engine, tensors
        self.parts: dict[int, list[ManagedStorage]] = {}
        self.folder = snapshots.folder
        self._left_bytes = [tensor.nbytes for tensor in tensors]
        self._users: dict[ManagedStorage, set[int]] = {}
        self._wanted: list[int] = []
        self._read: tuple[ManagedStorage, AlignedBuffer] | None = None  # the last that was away
        self.failed = ""

    def add(self, index: int, parts: list[ManagedStorage]) -> None:
        self.parts[index] = parts
        for managed in parts:
            users = self._users.setdefault(managed, set())
            if not users:
                self._snapshots.watch(managed, self)
            users.add(index)

    def __contains__(self, index: int) -> bool:
        return index in self.parts

    def want(self, managed: ManagedStorage) -> None:
        """Somebody waits to write to it."""
        self._wanted += self._users[managed].difference(self._wanted)

    def wanted(self) -> int | None:
        with self._engine.lock:
            while self._wanted and self._wanted[0] not in self.parts:
                del self._wanted[0]
            return self._wanted[0] if self._wanted else None

    def copy(self, index: int, begin: int, size_bytes: int, to: int) -> int:
        first = _bytes_of(self._tensors[index]).start + begin  # in the storage
        crc = done = 0
        for managed in self.parts.get(index, ()):
            offset = first + done - managed.offset_bytes
            if (count := min(managed.size_bytes - offset, size_bytes - done)) > 0:
                crc = copy_crc32c(to + done, self._address(managed) + offset, count, crc)
                done += count
        self._left_bytes[index] -= size_bytes
        if not self._left_bytes[index]:
            with self._engine.lock:
                self._taken(index)
        return crc

    def _address(self, managed: ManagedStorage) -> int:
        """At which its bytes can be read: its own, where it comes back if need be, or that of a copy."""
        if self._read is None or self._read[0] is not managed:
            self._read = None  # one at a time
            buffer = self._read_copy(managed)
            if buffer is None:
                return managed.address
            self._read = managed, buffer
        return self._read[1].address

    def _read_copy(self, managed: ManagedStorage) -> AlignedBuffer | None:
        """What is away, read beside the budget. None: it is not, or cannot be."""
        with self._engine.lock:
            slot = managed.slot if managed.state == AWAY else None
            if slot is None or managed.packed_bytes or managed.size_bytes > LARGEST_READ_BYTES:
                return None
            buffer = AlignedBuffer(align_up(managed.size_bytes, ALIGNMENT_BYTES))
            over = threading.Event()
            errors: list[Exception | None] = []

            def done(error: Exception | None) -> None:
                errors.append(error)
                over.set()

            if not self._device.read_copy(managed, buffer, done):
                return None
        if not over.wait(self._snapshots.timeout_s):
            return None
        with self._engine.lock:
            return buffer if errors == [None] and managed.slot is slot else None

    def _taken(self, index: int) -> None:
        for managed in self.parts.pop(index, ()):
            users = self._users[managed]
            users.discard(index)
            if not users:
                del self._users[managed]
                self._snapshots.unwatch(managed, self)

    def end(self) -> None:
        for index in list(self.parts):
            self._taken(index)

    def close(self) -> None:
        with self._engine.lock:
            self.end()
        self._tensors, self._read = (), None


def _bytes_of(tensor: torch.Tensor) -> range:
    """Of its storage, those of a tensor without gaps."""
    begin = tensor.storage_offset() * tensor.itemsize
    return range(begin, begin + tensor.nbytes)
