"""In which order samples come: a pure function of seed, epoch and how the epoch is divided."""

from __future__ import annotations

from typing import NamedTuple

from penstock.errors import InvalidArgument
from penstock.samples.layout import buffer_bytes
from penstock.units import format_bytes_up

ORDERS = ("full", "chunk")
AHEAD = 32  # most chunks that are read ahead of their slot


class Segment(NamedTuple):
    """What was taken of an epoch while it was divided in one way. An epoch that was resumed has several.

    streams   into how many: processes times workers
    slots     chunks that each stream mixed
    taken     samples that each stream has given, or one number that holds for all
    """

    streams: int
    slots: int
    taken: tuple[int, ...]


class CacheShape(NamedTuple):
    """How the sample cache is used.

    slots   chunks that samples are picked from
    ahead   further chunks that are read meanwhile
    """

    slots: int
    ahead: int


def cache_shape(cache_bytes: int, chunk_bytes: int, chunks: int) -> CacheShape:
    """Divide ``cache_bytes`` into buffers. Where all ``chunks`` fit, they all are slots.

    Raises InvalidArgument where there is no room for two buffers.
    """
    buffers = cache_bytes // buffer_bytes(chunk_bytes)
    if buffers >= chunks:
        return CacheShape(max(1, chunks), 0)
    if buffers < 2:
        raise InvalidArgument(
            f"cache_bytes={cache_bytes} has no room for two chunks: give at least "
            f"{format_bytes_up(2 * buffer_bytes(chunk_bytes))}"
        )
    ahead = max(1, min(AHEAD, buffers // 8))
    return CacheShape(buffers - ahead, ahead)
