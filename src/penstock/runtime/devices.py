"""What the runtime needs of a device. The CPU is one: its memory is a budget of RAM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from penstock.capture.tracer import Meter
from penstock.runtime import arena
from penstock.runtime.mover import Carrier, Done, Moved, Saved
from penstock.storage.extents import ALIGNMENT_BYTES
from penstock.storage.spill import SpillSpace, Transfer


class Device(Carrier, Meter, Protocol):
    """A device tier: it carries saved storages, and measures its memory.

    default_tier     where a storage goes when no plan says otherwise
    memory_manager   who gives freed memory back, for reports
    """

    default_tier: str
    memory_manager: str

    def is_movable(self, storage: torch.UntypedStorage) -> bool:
        """Whether letting go of the storage frees memory of the budget."""
        ...

    def begin_step(self) -> None:
        """Forget earlier peaks."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""
        ...

    def peak_bytes(self) -> int:
        """Most device bytes in use since `begin_step`, everything counted."""
        ...

    def close(self) -> None: ...


class CpuDevice:
    """RAM up to a budget, and the disk below it.

    Tensors lie in penstock's arena, whose blocks are aligned as direct I/O wants them: transfers go
    straight between tensors and disk.

    budget_bytes   everything the model may use
    fixed_bytes    what it used already, outside of the arena: weights, buffers, optimizer state
    """

    default_tier = "disk"

    def __init__(self, spill: SpillSpace, budget_bytes: int, fixed_bytes: int) -> None:
        self._spill = spill
        self._fixed_bytes = fixed_bytes
        self._lease = arena.activate(max(budget_bytes - fixed_bytes, 0))
        self.memory_manager = arena.memory_manager()
        stats = arena.stats()
        self._foreign_bytes = stats.in_use_bytes if stats is not None else 0
        self._peak_bytes = 0
        self._before_bytes = 0

    # -- carrying ------------------------------------------------------------------------------

    def is_movable(self, storage: torch.UntypedStorage) -> bool:
        return self.memory_manager != arena.ARENA or arena.block(storage.data_ptr()) is not None

    def reserve(self, saved: Saved, tier: str) -> Any:
        return self._spill.allocate(saved.size_bytes)

    def forget(self, copy: Any) -> None:
        self._spill.release(copy)

    def copy_out(self, saved: Saved, done: Done) -> None:
        storage = saved.storage
        assert storage is not None
        self._spill.write(
            saved.copy,
            storage.data_ptr(),
            self._transfer_bytes(storage),
            storage,
            _report("disk_write", saved, done),
        )

    def prepare(self, saved: Saved) -> torch.UntypedStorage:
        return torch.UntypedStorage(saved.size_bytes)

    def copy_in(self, saved: Saved, target: torch.UntypedStorage, done: Done) -> None:
        self._spill.read(
            saved.copy,
            target.data_ptr(),
            self._transfer_bytes(target),
            target,
            _report("disk_read", saved, done),
        )

    def _transfer_bytes(self, storage: torch.UntypedStorage) -> int:
        """Blocks of the arena may be read and written up to their end: no odd tail to copy apart."""
        size_bytes = storage.nbytes()
        if self.memory_manager != arena.ARENA:
            return size_bytes
        return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    # -- measuring -----------------------------------------------------------------------------

    def begin_step(self) -> None:
        self._peak_bytes = 0
        arena.reset_peak()

    def begin(self) -> None:
        self._note_peak()
        arena.reset_peak()
        stats = arena.stats()
        self._before_bytes = stats.in_use_bytes if stats is not None else 0

    def end(self) -> int:
        stats = arena.stats()
        if stats is None:
            return 0
        return max(0, stats.peak_in_use_bytes - max(stats.in_use_bytes, self._before_bytes))

    def synchronize(self) -> None:
        pass

    def in_use_bytes(self) -> int:
        stats = arena.stats()
        return self._fixed_bytes + (stats.in_use_bytes - self._foreign_bytes if stats is not None else 0)

    def peak_bytes(self) -> int:
        self._note_peak()
        return self._peak_bytes

    def _note_peak(self) -> None:
        stats = arena.stats()
        if stats is not None:
            peak_bytes = self._fixed_bytes + stats.peak_in_use_bytes - self._foreign_bytes
            self._peak_bytes = max(self._peak_bytes, peak_bytes)

    def close(self) -> None:
        self._lease.close()


def _report(link: str, saved: Saved, done: Done) -> Callable[[Transfer], None]:
    def on_done(transfer: Transfer) -> None:
        moved = Moved(link, transfer.started_s, transfer.finished_s, saved.number, saved.size_bytes)
        done(transfer.error, [moved] if transfer.error is None else [])

    return on_done
