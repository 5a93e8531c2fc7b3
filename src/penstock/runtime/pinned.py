"""One slab of page-locked host memory, given out in blocks: the host tier and staging for the disk.

Page-locking takes milliseconds a piece, so it is done once (torch would also round every block up to
a power of two).
"""

from __future__ import annotations

import logging
import threading

import torch

from penstock.errors import SpillSpaceFull
from penstock.storage.aligned import AlignedBuffer, view_at
from penstock.storage.extents import Extent, Extents

logger = logging.getLogger("penstock")


class PinnedSlab:
    """``size_bytes`` of host memory in huge pages, page-locked where the driver allows it.

    is_pinned   False where it does not: copies are correct, but make the device wait
    """

    def __init__(self, size_bytes: int) -> None:
        self._buffer = AlignedBuffer(size_bytes)
        self._extents = Extents(size_bytes)
        self._lock = threading.Lock()
        self.size_bytes = size_bytes
        # cudaHostRegister returns an error code, 0 for success.
        self.is_pinned = int(torch.cuda.cudart().cudaHostRegister(self._buffer.address, size_bytes, 0)) == 0
        if not self.is_pinned:
            logger.warning(
                "the driver refuses to page-lock %d bytes of host memory: copies between device and host "
                "will be slower. Lower host_budget, or raise the limit (on WSL it is 1 to 2 GB).",
                size_bytes,
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
        return torch.frombuffer(view_at(self.address(block), size_bytes, writable=True), dtype=torch.uint8)

    def close(self) -> None:
        if self.is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._buffer.address)
            self.is_pinned = False
