"""The pieces in which a file is read and written, and checksums of tensors from those of their parts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from penstock.checkpoint.file.header import Entry
from penstock.checkpoint.file.transfers import PIECE_BYTES
from penstock.storage.aligned import align_down
from penstock.storage.checksum import crc32c_combine


class Part(NamedTuple):
    """The bytes [offset, end) of the file, all of one tensor.

    entry   index of the tensor
    """

    entry: int
    offset: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.offset


class Piece(NamedTuple):
    """The bytes [offset, end) of the file, moved by one request.

    parts   the parts of tensors that lie in it, in order
    """

    offset: int
    end: int
    parts: tuple[Part, ...]


def cut(entries: Sequence[Entry], data_offset: int, alignment_bytes: int = 4096) -> Iterator[Piece]:
    """Pieces that cover all tensors, in order. Each begins at a multiple of ``alignment_bytes``.

    entries       in order of `begin`, without holes
    data_offset   where in the file the first begins
    """
    end_of_file = data_offset + (entries[-1].end if entries else 0)
    index, position = 0, data_offset
    offset = align_down(data_offset, alignment_bytes)
    while position < end_of_file:
        end = min(offset + PIECE_BYTES, end_of_file)
        parts = []
        while index < len(entries) and position < end:
            stop = min(data_offset + entries[index].end, end)
            if stop > position:
                parts.append(Part(index, position, stop))
                position = stop
            if position == data_offset + entries[index].end:
                index += 1
        yield Piece(offset, end, tuple(parts))
        offset = end


class Checksums:
    """Combines the checksums of parts, added in any order, into those of whole tensors.

    Every method may be called from any thread.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries
        self._parts: list[list[tuple[int, int, int]]] = [[] for _ in entries]

    def add(self, part: Part, crc: int) -> None:
        """Take ``crc``, the checksum of the bytes of ``part``."""
        self._parts[part.entry].append((part.offset, part.size_bytes, crc))

    def of(self, index: int) -> int:
        """The checksum of a tensor of which all parts were added."""
        total = 0
        for _, size_bytes, crc in sorted(self._parts[index]):
            total = crc32c_combine(total, crc, size_bytes)
        return total

    def damaged(self, added: Collection[int] | None = None) -> list[str]:
        """Names of the tensors whose checksum differs from that of their entry; of all, or those that were
        added."""
        return [
            self._entries[index].name
            for index in (range(len(self._entries)) if added is None else sorted(added))
            if self._entries[index].crc32c not in (None, self.of(index))
        ]
