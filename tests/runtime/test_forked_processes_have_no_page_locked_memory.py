"""A process made by fork, such as a loader's worker, gets no copy of the page-locked memory of a run."""

from __future__ import annotations

import os
import re
from pathlib import Path

from penstock.runtime.devices.pinned import PinnedSlab

SIZE_BYTES = 8 << 20


def resident_bytes(address: int) -> int:
    """Of the mapping that has the address."""
    for mapping in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", mapping)
        if bounds and int(bounds[1], 16) <= address < int(bounds[2], 16):
            rss = re.search(r"^Rss: +(\d+) kB", mapping, re.MULTILINE)
            assert rss is not None
            return int(rss[1]) << 10
    raise AssertionError("it is not mapped")


def test_they_find_zeros_in_its_place() -> None:
    slab = PinnedSlab(SIZE_BYTES, lambda address, size_bytes: True, lambda address: None)
    block = slab.allocate(SIZE_BYTES)
    content = slab.tensor(block, SIZE_BYTES)
    content.fill_(7)
    child = os.fork()
    if not child:
        wrong = 1
        try:
            if not resident_bytes(slab.address(block)) and not content[::4096].any():
                wrong = 0
        finally:
            os._exit(wrong)
    assert os.waitpid(child, 0)[1] == 0
    assert content.eq(7).all()
    assert resident_bytes(slab.address(block)) == SIZE_BYTES
    slab.release(block)
    slab.close()
