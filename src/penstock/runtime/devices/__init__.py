"""Devices whose memory is a budget, one file each, and what all of them do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from penstock._native import DeviceMemory
from penstock.core.trace import Trace
from penstock.errors import PenstockError
from penstock.runtime.kernel_times import Timed
from penstock.runtime.storages import ManagedStorage, Storages
from penstock.storage.aligned import AlignedBuffer

if TYPE_CHECKING:
    from penstock.runtime.copy_engine import CopyEngine


class Moved(NamedTuple):
    """One copy that is over, or one compression or expansion.

    link     a key of penstock.core.hardware.LINKS, or of CODERS: then size_bytes are those of the tensor
    tensor   number in the trace, -1 where the copy is of no traced tensor
    kind     index into penstock.core.trace.KINDS, -1 where it is not known
    """

    link: str
    started_s: float
    finished_s: float
    tensor: int
    size_bytes: int
    kind: int = -1


Done = Callable[[PenstockError | None, Sequence[Moved]], None]


class Device(Protocol):
    """A device tier. It copies for the engine, which calls the first half of this with its lock held; it
    makes ready what kernels use, and measures its memory.

    memory            what is reserved of it
    place_text        where copies go, for messages
    copies_results    `fill` needs memory beside the result's own
    admits_anywhere   `prepare` may be called on any thread, not only on that of the kernels
    expands_in_place  what is compressed can come back where it is expanded; else first to a place of its own
    infers_needs      it cannot refuse memory while a kernel runs: what it takes is inferred before
    keeps_budget      by itself, where an allocation would exceed it
    empties_storages  what is away has a storage of 0 bytes, of which torch makes no views
    in_flight_bytes   most bytes of copies that are under way, each way
    tiers             below it, of "host" and "disk". Evictions that nothing planned go to the first with room
    evict_links, prefetch_links   keys of penstock.core.hardware.LINKS: what moves crosses one of them, once
    memory_manager    who gives the device its memory, for reports
    device            an accelerator's; what kernels make on it counts in `memory`
    current_stream    gives the stream that kernels of this thread go to; None: there are none
    storages          that the clock has met
    first_serial      see Storages
    unplanned_accesses   that were served so far
    """

    engine: CopyEngine | None
    storages: Storages | None
    memory: DeviceMemory
    device: torch.device
    current_stream: Callable[[], Any] | None
    place_text: str
    copies_results: bool
    admits_anywhere: bool
    expands_in_place: bool
    infers_needs: bool
    keeps_budget: bool
    empties_storages: bool
    in_flight_bytes: int
    first_serial: int
    tiers: tuple[str, ...]
    memory_manager: str
    evict_links: tuple[str, ...]
    prefetch_links: tuple[str, ...]

    def in_memory_bytes(self) -> int:
        """Device bytes in use now."""
        ...

    def reserve(self, managed: ManagedStorage, tier: str) -> Any:
        """Space for a copy, on that tier or a lower one: where there are several, its ``tier`` says which.
        Raises SpillSpaceFull."""

    def free_slot(self, managed: ManagedStorage, slot: Any) -> None:
        """Give the space of a copy back. No copy is under way."""

    def pack(
        self,
        managed: ManagedStorage,
        storage: torch.UntypedStorage,
        codec: str,
        itemsize: int,
        done: Callable[[int], None],
    ) -> None:
        """Compress the bytes into device memory that counts, by the codec. done: with the bytes that this
        takes, on any thread; with 0 where it saves nothing, or there is no room."""

    def packed_written(self, managed: ManagedStorage, keeps: bool) -> bool:
        """The packed bytes are in the slot; give up those in memory, unless ``keeps``. False: they are not
        what the storage holds any more."""
        ...

    def drop_packed(self, managed: ManagedStorage) -> None:
        """Give up what `pack` or a prefetch made."""

    def packed_bytes(self, managed: ManagedStorage) -> int:
        """That the copy in the slot takes on the device; 0 where it is not compressed."""
        ...

    def copy_out(self, managed: ManagedStorage, storage: torch.UntypedStorage, done: Done) -> None:
        """Copy the bytes, or those that `pack` made, to the slot. A write meanwhile is noticed, or announced
        by `will_write`."""

    def release(self, managed: ManagedStorage, storage: torch.UntypedStorage) -> bool:
        """Give the storage's memory back; its copy is complete, or packed in memory. False: it was written
        meanwhile."""
        ...

    def prepare(
        self, managed: ManagedStorage, storage: torch.UntypedStorage, packed: bool = False, waits: bool = True
    ) -> bool:
        """Take memory to bring the bytes back to, or as they are in the slot where they are to stay
        ``packed``. False: there is none now.

        waits   a kernel does, and others may have to leave
        """
        ...

    def copy_in(
        self, managed: ManagedStorage, storage: torch.UntypedStorage, priority: int, done: Done
    ) -> None:
        """Copy the slot's bytes to the memory that `prepare` took, or expand what is packed on the device."""

    def read_copy(
        self, managed: ManagedStorage, buffer: AlignedBuffer, done: Callable[[Exception | None], None]
    ) -> bool:
        """Read what is away to a buffer beside the budget. False: the slot does not have it as it was."""
        ...

    def raise_priority(self, managed: ManagedStorage) -> None:
        """A kernel waits for the copy back that is under way."""

    def join(self, managed: ManagedStorage) -> bool:
        """Let what kernels do from now on wait, on the device, for the copy of the storage that is under way:
        to the program it is over then. False: the host has to wait for it."""
        ...

    def arrive(self, managed: ManagedStorage, storage: torch.UntypedStorage) -> bool | None:
        """The bytes are there: let the program see them, but for what stays packed. True: the slot has the
        same bytes, and a write that nobody announces is noticed. `ManagedStorage.keeps_copy` says whether
        that is worth anything. None: a kernel needed the memory first, and the storage is away as before."""
        ...

    def give_up(self, managed: ManagedStorage, storage: torch.UntypedStorage) -> None:
        """Undo `prepare`: the copy failed."""

    def will_write(self, managed: ManagedStorage) -> None:
        """A kernel is about to write to the storage."""

    def drop(self, managed: ManagedStorage, storage: torch.UntypedStorage) -> bool:
        """Give the storage's memory back, with no copy. False: it cannot be had now."""
        ...

    def prepare_write(self, managed: ManagedStorage, storage: torch.UntypedStorage) -> bool:
        """Take memory for what was dropped, which a kernel of this thread is about to write again: where
        `copies_results`. False: there is none now."""
        ...

    def fill(
        self, managed: ManagedStorage, storage: torch.UntypedStorage, made: torch.UntypedStorage
    ) -> bool:
        """What was dropped gets the bytes of ``made``, which nobody uses again. False: no memory now."""
        ...

    def watch_writes(self, managed: ManagedStorage, storage: torch.UntypedStorage, change: int) -> None:
        """A recipe more, or less, holds only while the storage is not written: where somebody does that
        unannounced, `penstock.runtime.recompute` is asked first."""

    def use(self, storages: Sequence[ManagedStorage]) -> None:
        """A kernel of this thread is about to use these: they stay until the next one does."""

    def notice(self) -> None:
        """Tell the engine, by `came_back_unasked` and `left_unasked`, what the device moved by itself."""

    def is_gone(self, managed: ManagedStorage) -> bool:
        """Whether the device took the storage's memory by itself, and keeps a copy of its own."""
        ...

    def make_room(self, size_bytes: int) -> bool:
        """Let leave what the engine does not know, such as tensors of other threads, until so many bytes fit.
        False: they cannot."""
        ...

    def plannable(self, trace: Trace, budget_bytes: int) -> tuple[Trace, int]:
        """What plans for the trace are made for: without moves that free nothing here, and in what is left of
        the budget beside what they cannot use. No less than the trace needs, where the budget has that."""
        ...

    def budget_for(self, size_bytes: int) -> int:
        """The budget in which so many bytes fit beside what is on the device now."""
        ...

    # -- for the run -----------------------------------------------------------------------------

    @property
    def unplanned_accesses(self) -> int: ...

    def adopt(self, managed: ManagedStorage, storage: torch.UntypedStorage, made: bool) -> bool:
        """Whether the storage can leave the device; prepares it where that takes something.

        made   a kernel of the run has just made it
        """
        ...

    def on_storage_freed(self, managed: ManagedStorage) -> None:
        """The storage has died."""

    def has(self, storage: torch.UntypedStorage) -> bool:
        """Whether the storage is in the device's memory, or is to be."""
        ...

    def record_stream(self, managed: ManagedStorage, stream: Any) -> None:
        """The program uses the storage on that stream, and may free it before the stream is done with it."""

    def resize(self, storage: torch.UntypedStorage, size_bytes: int) -> bool:
        """The program resizes a storage that is there. False: there is no memory."""
        ...

    def stay_near(self, begins_s: float) -> None:
        """Have the host wait for the device where it is far ahead. With the engine's lock held, once.

        begins_s   of the step, when the kernel is to begin
        """

    def poll(self, waits: bool = False) -> None:
        """Report the copies that are over, on this thread, where others do not. With the engine's lock held.

        waits   the program waits for one that is not
        """

    def begin_kernel(self) -> None:
        """A kernel begins. In the arena it is told only where something was moved unasked."""

    def end_kernel(self) -> None:
        """The kernel is over, or failed."""

    def hold(self, managed: ManagedStorage, change: int, writable: bool = False) -> None:
        """What the kernel uses is used for longer, by one more or one less: it stays where it is, and
        ``writable`` by the system, too."""

    def make_holes(self, sizes: Sequence[int]) -> None:
        """Have memory in pieces of these sizes, where the device has it in one."""

    @property
    def has_room(self) -> Callable[[Sequence[int]], bool] | None:
        """Asks whether the device gives a kernel of this thread blocks of so many bytes now, together. None:
        it makes room by itself when it is asked for memory."""
        ...

    def frees_enough(self, error: BaseException, needed_bytes: int) -> bool:
        """Let leave what a kernel that raised, and had written nothing, lacked to be run again. False: it
        failed for another reason than memory, or nothing more can leave. With the engine's lock held."""
        ...

    def kernel_failed(self, error: BaseException, needed_bytes: int) -> None:
        """A kernel raised. Raises BudgetTooSmall where the budget was the reason."""

    def cannot_use(self, error: OSError) -> None:
        """The arena could not bring back what a kernel uses. Raises BudgetTooSmall, SpillError."""

    def begin_step(self) -> None:
        """Forget earlier peaks."""

    def end_step(self) -> Callable[[], float] | None:
        """The host has launched all of the step. Gives what waits for its end, and tells the seconds from
        `begin_step` to it; None where it is over."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""

    def marked(self, text: str) -> AbstractContextManager[None]:
        """Show what is done meanwhile on this thread in a profiler of the device, by that name."""
        ...

    def peak_bytes(self) -> int:
        """Most device bytes in use since `begin_step`, everything counted."""
        ...

    def begin_measuring(self) -> None:
        """A kernel begins whose time and workspace are to be measured."""

    def end_measuring(self) -> Timed | None:
        """The kernel was launched. None: and is over."""

    def workspace_bytes(self) -> int:
        """Bytes that lived during the kernel only."""
        ...

    def bring_all_back(self, storages: list[ManagedStorage]) -> bool:
        """The run is over: bring back what is away, in this order. False: some of it does not fit, and stays
        away. With the engine's lock held where it `empties_storages`."""
        ...

    def bring_back(self, managed: ManagedStorage) -> bool:
        """Bring back what is away, where it `empties_storages`; nothing leaves for it. False: it does not
        fit. Raises SpillError. With the engine's lock held."""
        ...

    def close(self) -> None: ...
