"""Devices whose memory is a budget, one file each, and what all of them do.

A `Device` is `Copies`, which is all that the engine asks for, `Recomputes`, and what a run needs; it has a
`Room` and a `Meter`. What has a body here is what a device does that has nothing to do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from penstock._native import DeviceMemory
from penstock.core.memory_profile import minimum_bytes
from penstock.core.trace import Trace
from penstock.errors import PenstockError
from penstock.runtime.kernel_times import Timed
from penstock.runtime.storages import ManagedStorage, Storages
from penstock.storage.aligned import AlignedBuffer
from penstock.storage.extents import Extent

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


class Copy:
    """One copy of a storage between the device and a tier below it, or one compression or expansion.

    Who wants it makes it: the engine, which counts it until it ends. The device carries it out, keeps here
    what it needs for that, and at the end sets `error` and `moved` and calls `on_end`, once, on any thread.

    storage    whose bytes are copied; referenced until the end
    out        out of the device, or back
    priority   DEMAND, PREFETCH or EVICT: as it was asked for
    moved      what crossed which link, and when

    Of the engine:

    in_flight_bytes, tier   what it counts, and where
    finish      called at the end, with the copy and its error; before that, where kernels wait for the copy
    waited_on   kernels wait for it, on the device: to the program it is over
    codec       of a compression: a key of penstock.codecs.CODECS, and bytes of an element
    writes      of a compression: what it makes is copied out, too

    Of a device:

    then         called in place of `on_end`, which it calls
    slot, block  where the copy lies
    size_bytes   that are copied, from byte ``begin`` of the storage on
    loan         of the arena's: while it is written from there
    ready        events to wait for: of kernels that write the content, or used the target memory. They can be
                 reused at the end
    joinable     kernels may wait for it, on the device
    at_once      a thread waits for its end, whether the program polls or not
    waits        it has not begun, or was not issued to a stream yet
    begun, over  events at its begin and its end, once it was
    left         chunks that have not ended, where it is copied in several
    """

    error: PenstockError | None = None
    moved: Sequence[Moved] = ()

    in_flight_bytes = 0
    tier = ""
    finish: Callable[[Copy, PenstockError | None], None]
    waited_on = False
    codec: tuple[str, int] = "raw", 0
    writes = True

    slot: Any = None
    block: Extent
    begin = loan = left = 0
    joinable = False
    ready: list[Any]
    at_once = False
    waits = True
    begun: Any = None
    over: Any = None

    def __init__(
        self,
        managed: ManagedStorage,
        storage: torch.UntypedStorage,
        out: bool,
        priority: int,
        on_end: Callable[[Copy], None],
    ) -> None:
        self.managed = managed
        self.storage: torch.UntypedStorage | None = storage
        self.size_bytes = managed.size_bytes
        self.out = out
        self.priority = priority
        self.on_end = self.then = on_end

    def wait(self) -> None:
        """Block the host until the copy may begin."""
        for event in self.ready:
            event.synchronize()

    def moved_over(self, link: str, started_s: float, finished_s: float) -> Moved:
        return Moved(link, started_s, finished_s, self.managed.index, self.size_bytes, self.managed.kind)


class Slot(Protocol):
    """Where the copy of a storage is, and in what form. Each device has more in its own.

    packed_bytes   that the copy takes on the device; 0: it is not compressed
    """

    @property
    def tier(self) -> str: ...

    @property
    def packed_bytes(self) -> int: ...


class Room(Protocol):
    """What else makes room, where nothing more can leave by the engine."""

    def make(self, size_bytes: int) -> bool:
        """Let leave what the engine does not know, such as tensors of other threads, or have memory in one
        piece, until so many bytes fit. False: they cannot."""
        ...

    def make_holes(self, sizes: Sequence[int]) -> None:
        """Have memory in pieces of these sizes, where the device has it in one."""
        return

    def has(self, sizes: Sequence[int]) -> bool:
        """Whether the device gives a kernel of this thread blocks of so many bytes now, together, or makes
        room by itself when it is asked for memory."""
        return True

    def budget_for(self, size_bytes: int) -> int:
        """The budget in which so many bytes fit beside what is on the device now."""
        ...

    def frees_enough(self, error: BaseException, needed_bytes: int) -> bool:
        """Let leave what a kernel that raised, and had written nothing, lacked to be run again. False: it
        failed for another reason than memory, or nothing more can leave. With the engine's lock held."""
        return False

    def kernel_failed(self, error: BaseException, needed_bytes: int) -> None:
        """A kernel raised. Raises BudgetTooSmall where the budget was the reason."""


class Meter(Protocol):
    """Measures steps, and kernels one at a time.

    unplanned_accesses   that were served so far
    """

    @property
    def unplanned_accesses(self) -> int: ...

    def begin_step(self) -> None:
        """Forget earlier peaks."""

    def end_step(self) -> Callable[[], float] | None:
        """The host has launched all of the step. Gives what waits for its end, and tells the seconds from
        `begin_step` to it; None where it is over."""
        return None

    def peak_bytes(self) -> int:
        """Most device bytes in use since `begin_step`, everything counted."""
        ...

    def begin_kernel(self) -> None:
        """A kernel begins whose time and workspace are to be measured."""

    def end_kernel(self) -> Timed | None:
        """The kernel was launched. None: and is over."""
        return None

    def workspace_bytes(self) -> int:
        """Bytes that lived during the kernel only."""
        ...


class Copies(Protocol):
    """What the engine asks for, with its lock held.

    memory       what is reserved of it. `in_arena`: what is away keeps its address, and is prepared on any
                 thread; the arena keeps the budget by itself, whatever a kernel takes. Else what is away has
                 a storage of 0 bytes, of which torch makes no views, memory is taken on the thread of the
                 kernels, and what a kernel takes is inferred before
    place_text   where copies go, for messages
    tiers        below it, of "host" and "disk". Evictions that nothing planned go to the first with room
    """

    memory: DeviceMemory
    room: Room
    place_text: str
    tiers: tuple[str, ...]

    def in_memory_bytes(self) -> int:
        """Device bytes in use now."""
        return self.memory.in_use_bytes()

    def reserve(self, managed: ManagedStorage, tier: str) -> Slot:
        """Space for a copy, on that tier or a lower one. Raises SpillSpaceFull."""
        ...

    def free_slot(self, managed: ManagedStorage, slot: Any) -> None:
        """Give the space of a copy back. No copy is under way."""

    def pack(self, copy: Copy) -> None:
        """Compress the bytes into device memory that counts, by the codec. At the end
        `ManagedStorage.packed_bytes` is what that takes: 0 where it saves nothing, or there is no room. Where
        it is 0 after `on_end`, the packed bytes are given up."""

    def copy_out(self, copy: Copy) -> None:
        """Copy the bytes to the slot, or where it is `writing_packed` those that `pack` made. A write
        meanwhile is noticed, and sets `copy_invalid`, or is announced by `will_write`."""

    def release(self, managed: ManagedStorage, storage: torch.UntypedStorage) -> bool:
        """Give the storage's memory back; its copy is complete, or packed in memory. Where it is AWAY, that
        of its packed bytes, which the slot has, too. False: it was written meanwhile."""
        ...

    def prepare_copy_in(
        self, managed: ManagedStorage, storage: torch.UntypedStorage, packed: bool = False, waits: bool = True
    ) -> bool:
        """Take memory to bring the bytes back to, or as they are in the slot where they are to stay
        ``packed``. False: there is none now.

        waits   a kernel does, and others may have to leave
        """
        ...

    def copy_in(self, copy: Copy) -> None:
        """Copy the slot's bytes to the memory that `prepare_copy_in` took, or expand what is packed there."""

    def raise_priority(self, managed: ManagedStorage) -> None:
        """A kernel waits for the copy back that is under way."""
        return

    def make_kernels_wait(self, copy: Copy) -> bool:
        """Let what kernels do from now on wait, on the device, for the copy, which is under way: to the
        program it is over then. False: the host has to wait for it."""
        return False

    def finish_copy_in(self, managed: ManagedStorage, storage: torch.UntypedStorage) -> bool | None:
        """The bytes are there: let the program see them, but for what stays packed. True: the slot has the
        same bytes, and a write that nobody announces is noticed. `ManagedStorage.keeps_copy` says whether
        that is worth anything. None: a kernel needed the memory first, and the storage is away as before."""
        ...

    def cancel_copy_in(self, managed: ManagedStorage, storage: torch.UntypedStorage) -> None:
        """Undo `prepare_copy_in`: the copy failed."""

    def will_write(self, managed: ManagedStorage) -> None:
        """A kernel is about to write to the storage."""
        return

    def poll(self, waits: bool = False) -> None:
        """Report the copies that are over, on this thread, where others do not.

        waits   the program waits for one that is not
        """
        return

    def report_unasked_moves(self) -> None:
        """Tell the engine, by `came_back_unasked` and `left_unasked`, what the device moved by itself. What
        it keeps a copy of by itself is `ManagedStorage.swapped_out`."""
        return


class Recomputes(Protocol):
    """What penstock.runtime.recompute asks for."""

    def drop(self, managed: ManagedStorage, storage: torch.UntypedStorage) -> bool:
        """Give the storage's memory back, with no copy. False: it cannot be had now."""
        ...

    def prepare_write(self, managed: ManagedStorage, storage: torch.UntypedStorage) -> bool:
        """Take memory for what was dropped, which a kernel of this thread is about to write again: where
        memory is not `in_arena`. False: there is none now."""
        raise AssertionError("`fill` moves the memory of the result")

    def fill(
        self, managed: ManagedStorage, storage: torch.UntypedStorage, made: torch.UntypedStorage
    ) -> bool:
        """What was dropped gets the bytes of ``made``, which nobody uses again. False: no memory now."""
        ...

    def watch_writes(self, managed: ManagedStorage, storage: torch.UntypedStorage, change: int) -> None:
        """A recipe more, or less, holds only while the storage is not written: where somebody does that
        unannounced, `penstock.runtime.recompute` is asked first."""
        return


class Device(Copies, Recomputes):
    """A device tier. It copies for the engine, and makes ready what kernels use.

    evict_links, prefetch_links   keys of penstock.core.hardware.LINKS: what moves crosses one of them, once
    memory_manager    who gives the device its memory, for reports
    device            an accelerator's; what kernels make on it counts in `memory`
    current_stream    gives the stream that kernels of this thread go to; None: there are none
    storages          that the clock has met
    first_serial      see Storages
    """

    engine: CopyEngine
    storages: Storages
    meter: Meter
    device: torch.device
    current_stream: Callable[[], Any] | None
    first_serial: int
    memory_manager: str
    evict_links: tuple[str, ...]
    prefetch_links: tuple[str, ...]

    def adopt(self, managed: ManagedStorage, storage: torch.UntypedStorage, made: bool) -> bool:
        """Whether the storage can leave the device; prepares it where that takes something.

        made   a kernel of the run has just made it
        """
        raise NotImplementedError

    def on_storage_freed(self, managed: ManagedStorage) -> None:
        """The storage has died."""

    def has(self, storage: torch.UntypedStorage) -> bool:
        """Whether the storage is in the device's memory, or is to be."""
        raise NotImplementedError

    def plannable(self, trace: Trace, budget_bytes: int) -> tuple[Trace, int]:
        """What plans for the trace are made for: without moves that free nothing here, and in what is left of
        the budget beside what they cannot use. No less than the trace needs, where the budget has that."""
        return trace, budget_bytes

    def least_budget(self, trace: Trace) -> int:
        """The smallest budget in which the step runs, with all that the device takes beside its tensors."""
        return minimum_bytes(trace)

    def record_stream(self, managed: ManagedStorage, stream: Any) -> None:
        """The program uses the storage on that stream, and may free it before the stream is done with it."""

    def resize(self, storage: torch.UntypedStorage, size_bytes: int) -> bool:
        """The program resizes a storage that is there. False: there is no memory."""
        raise NotImplementedError

    def read_copy(
        self, managed: ManagedStorage, buffer: AlignedBuffer, done: Callable[[Exception | None], None]
    ) -> bool:
        """Read what is away to a buffer beside the budget. False: the slot does not have it as it was."""
        return False

    # -- kernels -------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self.meter.begin_step()

    def begin_kernel(self) -> None:
        """A kernel begins. In the arena it is told only where something was moved unasked."""

    def will_use(self, storages: Sequence[ManagedStorage]) -> None:
        """A kernel of this thread is about to use these: they stay until the next one does."""

    def end_kernel(self) -> None:
        """The kernel is over, or failed."""

    def change_pins(self, managed: ManagedStorage, change: int, writable: bool = False) -> None:
        """What the kernel uses is used for longer, by one more or one less: it stays where it is, and
        ``writable`` by the system, too. What only the engine moves is pinned."""

    def cannot_use(self, error: OSError) -> None:
        """The arena could not bring back what a kernel uses. Raises BudgetTooSmall, SpillError."""
        raise error

    def limit_lead(self, begins_s: float) -> None:
        """Have the host wait for the device where it is far ahead. With the engine's lock held, once.

        begins_s   of the step, when the kernel is to begin
        """

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""

    def profiler_range(self, text: str) -> AbstractContextManager[None]:
        """Show what is done meanwhile on this thread in a profiler of the device, by that name."""
        return contextlib.nullcontext()

    # -- the end -------------------------------------------------------------------------------

    def bring_all_back(self, storages: list[ManagedStorage]) -> bool:
        """The run is over: bring back what is away, in this order. False: some of it does not fit, and stays
        away. With the engine's lock held where memory is not `in_arena`."""
        raise NotImplementedError

    def bring_back(self, managed: ManagedStorage) -> bool:
        """Bring back what is away, where memory is not `in_arena`; nothing leaves for it. False: it does not
        fit. Raises SpillError. With the engine's lock held."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
