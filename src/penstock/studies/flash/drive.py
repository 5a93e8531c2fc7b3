"""A page-mapped drive that collects its garbage greedily."""

from __future__ import annotations

import numpy as np

from penstock.core.columns import IntArray
from penstock.errors import InvalidArgument
from penstock.studies.flash.geometry import Flash

_NONE = -1
# Blocks that collection keeps erased: one that the host's pages go to, one for those that are moved.
_RESERVE = 2


class Drive:
    """The state of one drive: which flash page holds each logical page, and how worn each block is.

    Pages are programmed in the order of their blocks, and erased a block at a time. When erased blocks run
    out, the block of the fewest valid pages is collected: those move to a block of their own, so that
    what lives long gathers. The least worn of the erased blocks is filled next.

    Scale a large drive down: write amplification depends on over-provisioning and on what is written where,
    and hardly on the number of blocks. `Flash.page_bytes` then stands for many pages.
    """

    def __init__(self, flash: Flash) -> None:
        self.flash = flash
        self.logical_pages = flash.capacity_bytes // flash.page_bytes
        per_block = flash.pages_per_block
        blocks = flash.flash_bytes // (flash.page_bytes * per_block)
        if self.logical_pages < 1 or blocks * per_block < self.logical_pages + (_RESERVE + 1) * per_block:
            raise InvalidArgument(
                f"{blocks} blocks of {per_block} pages for {self.logical_pages} logical pages leave less "
                f"than {_RESERVE + 1} spare blocks: give more capacity, smaller blocks or more "
                "over-provisioning"
            )
        self.blocks = blocks
        self._place: IntArray = np.full(self.logical_pages, _NONE, dtype=np.int64)  # of each logical page
        self._owner: IntArray = np.full(blocks * per_block, _NONE, dtype=np.int64)  # of each flash page
        self._valid: IntArray = np.zeros(blocks, dtype=np.int64)  # pages in each block
        self._full = np.zeros(blocks, dtype=np.bool_)
        self._erased = np.ones(blocks, dtype=np.bool_)
        self.erase_count: IntArray = np.zeros(blocks, dtype=np.int64)
        self.host_pages = 0  # programmed for the host
        self.moved_pages = 0  # programmed by collection
        self._host_block, self._host_used = _NONE, per_block
        self._moved_block, self._moved_used = _NONE, per_block

    @property
    def write_amplification(self) -> float:
        """Flash pages programmed for each page of the host's, since the counters were reset."""
        return (self.host_pages + self.moved_pages) / self.host_pages if self.host_pages else 1.0

    @property
    def valid_pages(self) -> int:
        """Logical pages that hold data."""
        return int(self._valid.sum())

    def reset_counters(self) -> None:
        """Count writes from here on, as after a drive has come to its steady state. Wear stays."""
        self.host_pages = 0
        self.moved_pages = 0

    def place(self, page: int) -> int:
        """The flash page that holds a logical page, -1 where it holds nothing."""
        return int(self._place[page])

    def owners(self) -> IntArray:
        """The logical pages that hold data, ascending, found from the flash alone."""
        flash_pages = np.flatnonzero(self._owner >= 0)
        owner = self._owner[flash_pages]
        return np.sort(owner[self._place[owner] == flash_pages])

    def write(self, pages: IntArray) -> None:
        """Write logical pages, in this order."""
        if len(pages) and not 0 <= pages.min() <= pages.max() < self.logical_pages:
            raise InvalidArgument(f"the drive has pages 0 to {self.logical_pages - 1}: write those")
        per_block = self.flash.pages_per_block
        done = 0
        while done < len(pages):
            if self._host_used == per_block:
                if self._host_block != _NONE:
                    self._full[self._host_block] = True
                    self._host_block = _NONE
                self._collect()
                self._host_block, self._host_used = self._take_erased(), 0
            count = min(len(pages) - done, per_block - self._host_used)
            self._program(pages[done : done + count], self._host_block, self._host_used)
            self._host_used += count
            self.host_pages += count
            done += count

    def write_extent(self, begin: int, end: int) -> None:
        """Write logical pages ``[begin, end)`` in order."""
        self.write(np.arange(begin, end, dtype=np.int64))

    def trim(self, pages: IntArray) -> None:
        """The host no longer needs these pages: they are not moved any more."""
        pages = np.unique(pages)
        held = pages[self._place[pages] != _NONE]
        self._invalidate(held)
        self._place[held] = _NONE

    def _program(self, pages: IntArray, block: int, used: int) -> None:
        first = block * self.flash.pages_per_block + used
        unique = np.unique(pages)
        self._invalidate(unique[self._place[unique] != _NONE])
        flash_pages = np.arange(first, first + len(pages))
        self._owner[flash_pages] = pages
        self._place[pages] = flash_pages  # of a page written twice, the last stays
        self._valid[block] += len(unique)

    def _invalidate(self, pages: IntArray) -> None:
        blocks = self._place[pages] // self.flash.pages_per_block
        np.subtract.at(self._valid, blocks, 1)

    def _take_erased(self) -> int:
        erased = np.flatnonzero(self._erased)
        block = int(erased[np.argmin(self.erase_count[erased])])
        self._erased[block] = False
        return block

    def _collect(self) -> None:
        """Erase blocks until the reserve is there."""
        per_block = self.flash.pages_per_block
        while int(self._erased.sum()) < _RESERVE:
            full = np.flatnonzero(self._full)
            victim = int(full[np.argmin(self._valid[full])])
            # Full blocks are all but the reserve and the one that pages move to, and spare ones are more.
            assert self._valid[victim] < per_block, "a block of valid pages alone gains nothing"
            self._full[victim] = False
            self._move(victim)
            self._erased[victim] = True
            self.erase_count[victim] += 1

    def _move(self, victim: int) -> None:
        """Program the valid pages of a block anew."""
        per_block = self.flash.pages_per_block
        flash_pages = np.arange(victim * per_block, (victim + 1) * per_block)
        owner = self._owner[flash_pages]
        held = owner[(owner >= 0) & (self._place[np.maximum(owner, 0)] == flash_pages)]
        self.moved_pages += len(held)
        while len(held):
            if self._moved_used == per_block:
                if self._moved_block != _NONE:
                    self._full[self._moved_block] = True
                self._moved_block, self._moved_used = self._take_erased(), 0
            count = min(len(held), per_block - self._moved_used)
            self._program(held[:count], self._moved_block, self._moved_used)
            self._moved_used += count
            held = held[count:]
        self._owner[flash_pages] = _NONE
