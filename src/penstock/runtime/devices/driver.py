"""What an accelerator can do: one class for each kind, as penstock.runtime.devices.cuda has them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch


class Memory(NamedTuple):
    """What the allocator says.

    allocated_bytes   in tensors
    reserved_bytes    taken from the device, in tensors or kept for later
    small_bytes       of these in segments of small blocks
    peak_...          the most of each since the peaks were reset
    """

    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    small_bytes: int = 0
    peak_small_bytes: int = 0


class Driver(Protocol):
    """What an accelerator can do. Streams and events are as torch.Stream and torch.Event.

    device           with its index
    memory_manager   who gives the device its memory, for reports
    name             of the device's model
    total_bytes      of its memory
    free_bytes       of it, that nobody has taken
    """

    device: torch.device
    memory_manager: str

    @property
    def name(self) -> str: ...

    @property
    def total_bytes(self) -> int: ...

    @property
    def free_bytes(self) -> int: ...

    def make_stream(self) -> Any: ...

    def make_event(self, timed: bool = False) -> Any:
        """timed: it has `elapsed_time`, as those of torch with `enable_timing`."""
        ...

    def current_stream(self) -> Any:
        """That kernels of this thread go to."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Copy bytes, on the stream: one of the two is on the device, the other in page-locked memory."""

    def allocate(self, size_bytes: int, stream: Any) -> torch.UntypedStorage | None:
        """Memory of the stream's; None where there is none."""

    def reserve(self, size_bytes: int, stream: Any) -> int | None:
        """Keep so many bytes for later, in one segment of the stream's; its address. None: there is not so
        much, or no segments that blocks are cut from."""

    def pack(
        self,
        content: torch.Tensor,
        codec: str,
        itemsize: int,
        admits: Callable[[int], bool],
        stream: Any,
    ) -> torch.Tensor | None:
        """Bytes [N] packed on the stream, into memory of its own: penstock.runtime.devices.packing. None
        where that saves nothing, or there is no memory."""

    def unpack(
        self, packed: torch.Tensor, content: torch.Tensor, codec: str, itemsize: int, stream: Any
    ) -> bool:
        """The reverse, on the stream, into ``content``. False: they are damaged."""
        ...

    def resize(self, storage: torch.UntypedStorage, size_bytes: int, stream: Any) -> bool:
        """Empty the storage, or give an empty one memory of the stream's. False: there is none."""
        ...

    def record_stream(self, storage: torch.UntypedStorage, stream: Any) -> None:
        """When the storage is freed, its memory is handed out again after the stream has done what it has
        then."""

    def set_access_error(self, storage: torch.UntypedStorage, text: str | None) -> None:
        """Have each access to the storage raise this text, where torch can; None: no longer."""

    def page_lock(self, address: int, size_bytes: int) -> bool: ...

    def page_unlock(self, address: int) -> None: ...

    def allocated_bytes(self) -> int:
        """As in `memory`, and cheaper where that is possible."""
        ...

    def memory(self) -> Memory: ...

    def reset_peaks(self) -> None: ...

    def empty_cache(self) -> None:
        """Give back what the allocator keeps for later."""

    def limit(self, reserved_bytes: int | None) -> None:
        """Reserve no more; None: as much as there is."""

    def is_out_of_memory(self, error: BaseException) -> bool: ...

    def synchronize(self) -> None:
        """Wait for all streams."""

    def marked(self, text: str) -> contextlib.AbstractContextManager[None]:
        """Show what is done meanwhile on this thread in a profiler, by that name."""
        ...
