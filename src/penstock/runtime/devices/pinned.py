"""One slab of page-locked host memory, given out in blocks: the host tier and staging for the disk.

Page-locking takes milliseconds a piece, so it is done once (torch would also round every block up to
a power of two).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch

from penstock.errors import SpillSpaceFull
from penstock.storage.aligned import AlignedBuffer, view_at
from penstock.storage.extents import Extent, Extents
from penstock.units import format_bytes

logger = logging.getLogger("penstock")


class PinnedSlab:
    """``size_bytes`` of host memory in huge pages, page-locked where the driver allows it.

    page_lock     of (address, bytes): False where the driver refuses
    page_unlock   of (address)

    is_pinned   False where the driver refused: copies are correct, but make the device wait
    """

    def __init__(
        self, size_bytes: int, page_lock: Callable[[int, int], bool], page_unlock: Callable[[int], None]
    ) -> None:
        # The system copies page-locked memory at once for a process made by fork, such as a loader's worker.
        self._buffer = AlignedBuffer(size_bytes, inherited=False)
        self._extents = Extents(size_bytes)
        self._lock = threading.Lock()
        self._page_unlock = page_unlock
        self.size_bytes = size_bytes
        whole = view_at(self._buffer.address, size_bytes, writable=True)
        with torch.inference_mode(False):  # it is used outside of it, too
            self._bytes = torch.frombuffer(whole, dtype=torch.uint8)
        self.is_pinned = page_lock(self._buffer.address, size_bytes)
        if not self.is_pinned:
            logger.warning(
                "the driver refuses to page-lock %s of host memory: copies between device and host "
                "will be slower. Lower host_budget, or raise the limit (on WSL it is 1 to 2 GB).",
                format_bytes(size_bytes),
            )

    def allocate(self, size_bytes: int) -> Extent:
        """A block. Raises SpillSpaceFull where none is left."""
        with self._lock:
            return self._extents.allocate(size_bytes)

    def try_allocate(self, size_bytes: int) -> Extent | None:
        try:
            return self.allocate(size_bytes)
        except SpillSpaceFull:
            return None

    def release(self, block: Extent) -> None:
        with self._lock:
            self._extents.release(block)

    def address(self, block: Extent) -> int:
        return self._buffer.address + block.offset

    def tensor(self, block: Extent, size_bytes: int) -> torch.Tensor:
        """The first ``size_bytes`` of the block as bytes. The slab must outlive the tensor."""
        return self._bytes.narrow(0, block.offset, size_bytes)

    def close(self) -> None:
        if self.is_pinned:
            self._page_unlock(self._buffer.address)
            self.is_pinned = False
        self._buffer.discard()
