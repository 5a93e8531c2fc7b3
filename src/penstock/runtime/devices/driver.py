"""What an accelerator can do: one class for each kind, as penstock.runtime.devices.cuda has them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch


class Memory(NamedTuple):
    """Counters of the allocator.

    allocated_bytes   in tensors
    reserved_bytes    taken from the device: in tensors, or cached
    small_bytes       of these, in segments of small blocks
    peak_...          peaks of each since `reset_peaks`
    large_bytes       of tensors that lie in other segments than these, as they asked for them
    """

    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    small_bytes: int = 0
    peak_small_bytes: int = 0
    large_bytes: int = 0


class Driver(Protocol):
    """What an accelerator can do. Streams and events are as torch.Stream and torch.Event.

    device           with its index
    memory_manager   name of the allocator, for reports
    name             of the device's model
    total_bytes      of device memory
    free_bytes       of device memory, that this process can still have
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
        """The stream that this thread's kernels are issued to."""

    def use_device(self) -> None:
        """Have it as the current device of this thread, which is one of ours. Else torch, which puts back the
        device that was current before, would make a context on the first one."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Copy bytes, on the stream: one of the two is on the device, the other in page-locked memory."""

    def allocate(self, size_bytes: int, stream: Any) -> torch.UntypedStorage | None:
        """Allocate memory on the stream; None: out of memory."""

    def reserve(self, size_bytes: int, stream: Any) -> int | None:
        """Reserve one segment on the stream, to cut blocks from. Returns its address; None: out of memory, or
        the allocator has no such segments."""

    def undivided(self, size_bytes: int) -> str | None:
        """The setting by which the allocator does not cut blocks from a segment of so many bytes, cuts others
        than were asked for, or gives the segment back. None: there is none."""

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
        """The reverse, on the stream, into ``content``. False: the bytes are damaged."""
        ...

    def resize(self, storage: torch.UntypedStorage, size_bytes: int, stream: Any) -> bool:
        """Free the storage's memory, or allocate memory on the stream for it. False: out of memory."""
        ...

    def record_stream(self, storage: torch.UntypedStorage, stream: Any) -> None:
        """As torch.Tensor.record_stream: once freed, the storage's memory is reused only after the work that
        the stream then has."""

    def set_access_error(self, storage: torch.UntypedStorage, text: str | None) -> None:
        """Make each access to the storage raise this text, where torch supports that; None: no longer."""

    def page_lock(self, address: int, size_bytes: int) -> bool: ...

    def page_unlock(self, address: int) -> None: ...

    def allocated_bytes(self) -> int:
        """As in `memory`, and cheaper where that is possible."""
        ...

    def memory(self) -> Memory: ...

    def reset_peaks(self) -> None: ...

    def empty_cache(self) -> None:
        """Free what the allocator caches."""

    def limit(self, reserved_bytes: int | None) -> None:
        """Limit what the allocator reserves; None: no limit."""

    def is_out_of_memory(self, error: BaseException) -> bool: ...

    def synchronize(self) -> None:
        """Wait for all streams."""

    def profiler_range(self, text: str) -> contextlib.AbstractContextManager[None]:
        """A range of this name in profilers, on this thread."""
        ...
