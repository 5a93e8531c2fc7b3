"""Devices whose memory is a budget, one file each; they share `penstock.runtime.copy_engine.Device`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from penstock.runtime import copy_engine
from penstock.runtime.kernel_times import Timed
from penstock.runtime.storages import ManagedStorage, Storages


class Device(copy_engine.Device, Protocol):
    """A device tier as a run needs it: it copies for the engine, and measures its memory.

    device           an accelerator's; what kernels make on it counts in `memory`
    current_stream   gives the stream that kernels of this thread go to; None: there are none
    storages         that the clock has met
    first_serial     see Storages
    tier             where evictions go that nothing planned: "host" or "disk"
    memory_manager   who gives the device its memory, for reports
    evict_link, prefetch_link   keys of penstock.core.hardware.LINKS
    unplanned_accesses          that were served so far
    infers_needs                it cannot refuse memory while a kernel runs: what it takes is inferred before
    keeps_budget                by itself, where an allocation would exceed it
    in_flight_bytes             most bytes of copies that are under way, each way
    empties_storages            what is away has a storage of 0 bytes, of which torch makes no views
    """

    engine: copy_engine.CopyEngine | None
    device: torch.device
    current_stream: Callable[[], Any] | None
    storages: Storages | None
    first_serial: int
    tier: str
    memory_manager: str
    evict_link: str
    prefetch_link: str
    infers_needs: bool
    keeps_budget: bool
    in_flight_bytes: int
    empties_storages: bool

    @property
    def unplanned_accesses(self) -> int: ...

    def adopt(self, managed: ManagedStorage, storage: torch.UntypedStorage, made: bool) -> bool:
        """Whether the storage can leave the device; prepares it where that takes something.

        made   a kernel of the run has just made it
        """
        ...

    def bury(self, managed: ManagedStorage) -> None:
        """The storage has died."""

    def has(self, storage: torch.UntypedStorage) -> bool:
        """Whether the storage is in the device's memory, or is to be."""
        ...

    def record_stream(self, managed: ManagedStorage, stream: Any) -> None:
        """The program uses the storage on that stream, and may free it before the stream is done with it."""

    def resize(self, storage: torch.UntypedStorage, size_bytes: int) -> bool:
        """The program resizes a storage that is there. False: there is no memory."""
        ...

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

    def settle(self, storages: list[ManagedStorage]) -> bool:
        """The run is over: bring back what is away. False: some of it does not fit, and stays away."""
        ...

    def close(self) -> None: ...
