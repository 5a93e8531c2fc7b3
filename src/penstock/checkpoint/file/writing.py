"""From a state to a file: lays tensors out, gathers them into pieces, writes these, and replaces the file."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from penstock.checkpoint.failures import cannot_write, error_of
from penstock.checkpoint.file.header import DEVICES, FOR_TORCH, Entry, encode
from penstock.checkpoint.file.memory import host_bytes, is_on_host
from penstock.checkpoint.file.pieces import Checksums, Part, Piece, cut
from penstock.checkpoint.file.replace import Replacement
from penstock.checkpoint.file.transfers import BufferPool, PinnedBuffer, carry_out
from penstock.checkpoint.state.tree import Stored, flatten
from penstock.errors import InvalidArgument
from penstock.storage import files
from penstock.storage.aligned import AlignedBuffer, align_up
from penstock.storage.checksum import copy_crc32c, crc32c_at
from penstock.storage.threads import in_order, in_parallel
from penstock.storage.transfer import Transfer

# Data begins at a page, and so do tensors that are whole pages: they can be mapped and moved in place.
PAGE_BYTES = files.SMALLEST_ALIGNMENT_BYTES


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint to be written.

    tensors    whose bytes are written, in the order of the file
    entries    where each of them lies, without checksums
    tree       how they make up the state
    metadata   the user's own, and where tensors were

    header_bytes   of the beginning of the file: its size does not depend on the checksums
    """

    tensors: tuple[torch.Tensor, ...]
    entries: tuple[Entry, ...]
    tree: str
    metadata: dict[str, str]
    header_bytes: int

    @property
    def data_bytes(self) -> int:
        return self.entries[-1].end if self.entries else 0

    @property
    def size_bytes(self) -> int:
        """Of the whole file."""
        return self.header_bytes + self.data_bytes

    def header(self, checksums: Checksums) -> bytes:
        """The beginning of the file."""
        entries = [entry._replace(crc32c=checksums.of(i)) for i, entry in enumerate(self.entries)]
        return encode(entries, tree=self.tree, metadata=self.metadata, alignment_bytes=PAGE_BYTES)

    @property
    def on_host(self) -> bool:
        """All tensors are in the memory of the CPU."""
        return all(map(is_on_host, self.tensors))


def contents_of(state: Any, metadata: Mapping[str, str] | None) -> Contents:
    """Lay out ``state``; only tensors with gaps are copied. Raises InvalidArgument."""
    stored, tree = flatten(state)
    own = {**FOR_TORCH, **(metadata or {})}
    if DEVICES in own:
        raise InvalidArgument(f"metadata {DEVICES!r} cannot be saved: penstock keeps devices there")
    elsewhere = {item.name: str(item.tensor.device) for item in stored if not is_on_host(item.tensor)}
    if elsewhere:
        own[DEVICES] = json.dumps(elsewhere)
    ordered = sorted(stored, key=_place)
    entries, end = [], 0
    for item in ordered:
        begin, end = end, end + item.tensor.nbytes
        entries.append(Entry(item.name, item.dtype, item.shape, begin, end))
    header_bytes = len(encode(entries, tree=tree, metadata=own, alignment_bytes=PAGE_BYTES))
    return Contents(tuple(item.tensor for item in ordered), tuple(entries), tree, own, header_bytes)


def _place(stored: Stored) -> tuple[bool, int]:
    """Whole pages first, then by size of element: every tensor begins at a multiple of its element."""
    return stored.tensor.nbytes % PAGE_BYTES != 0, -stored.tensor.element_size()


def write(contents: Contents, replacement: Replacement) -> None:
    """Write straight from the tensors, through a few buffers. Raises CheckpointError."""
    checksums = Checksums(contents.entries)
    pool = BufferPool(align_up(contents.data_bytes, PAGE_BYTES), pinned=not contents.on_host)

    def gathered() -> Iterator[_Gathered]:
        for piece in cut(contents.entries, contents.header_bytes):
            buffer = pool.take()
            _gather(contents, piece, buffer.address, checksums)
            yield _Gathered(piece, buffer.address, buffer)

    _write(contents, checksums, gathered(), replacement, pool.give)


class Snapshot:
    """A copy of the tensors as they are now, as they will lie in the file. A context manager."""

    def __init__(self, contents: Contents) -> None:
        """Raises OSError where there is not enough memory."""
        buffer = AlignedBuffer(align_up(max(contents.data_bytes, 1), PAGE_BYTES))
        begin = contents.header_bytes
        self._checksums = Checksums(contents.entries)
        self._contents = replace(contents, tensors=())  # theirs may go on to change, and to be freed
        self._gathered = [
            _Gathered(piece, buffer.address + piece.offset - begin, buffer)
            for piece in cut(contents.entries, begin)
        ]
        # From a device in order, so that copies come after what the caller's streams have been told to do.
        run = in_parallel if contents.on_host else in_order
        run(lambda each: _gather(contents, each.piece, each.address, self._checksums), self._gathered)

    def write(self, replacement: Replacement) -> None:
        """Write the copy. Raises CheckpointError."""
        _write(self._contents, self._checksums, self._gathered, replacement)

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        """Free the copy: others may hold this object as long as the error of its save."""
        self._gathered.clear()


class _Gathered(NamedTuple):
    """A piece whose bytes are at an address of a buffer."""

    piece: Piece
    address: int
    buffer: AlignedBuffer | PinnedBuffer


def _write(
    contents: Contents,
    checksums: Checksums,
    pieces: Iterable[_Gathered],
    replacement: Replacement,
    release: Callable[[Any], None] = lambda buffer: None,
) -> None:
    """Write ``pieces``, then the header with the checksums; then take the old file's place.

    release   called with the buffer of each piece that is written
    """
    file, size_bytes = replacement.file, contents.size_bytes

    def to_write(offset: int, address: int, end: int, buffer: object) -> Transfer:
        size = end - offset
        if offset % file.alignment_bytes == 0 and PAGE_BYTES % file.alignment_bytes == 0:
            # Whole pages go past the page cache. `commit` cuts the file where its contents end.
            size = align_up(size, PAGE_BYTES)
            ctypes.memset(address + end - offset, 0, size - (end - offset))
        return Transfer("write", file, offset, address, size, keep=buffer)

    def transfers() -> Iterator[Transfer]:
        for piece, address, buffer in pieces:
            yield to_write(piece.offset, address, piece.end, buffer)
        header = contents.header(checksums)
        buffer = AlignedBuffer(len(header))
        buffer.view()[:] = header
        yield to_write(0, buffer.address, len(header), buffer)

    def done(transfer: Transfer) -> None:
        if transfer.error_number:
            error = error_of(transfer.error_number)
            raise cannot_write(replacement.path, error, size_bytes, transfer.offset)
        if transfer.offset:  # not the header
            release(transfer.keep)

    carry_out(replacement.opened, transfers(), done)
    try:
        replacement.commit(size_bytes)
    except OSError as error:
        raise cannot_write(replacement.path, error, size_bytes, None, replacement.committed) from error


def _gather(contents: Contents, piece: Piece, address: int, checksums: Checksums) -> None:
    """Copy the tensors' bytes of ``piece`` to ``address``."""
    for part in piece.parts:
        checksums.add(part, _copy(contents, part, address + part.offset - piece.offset))


def _copy(contents: Contents, part: Part, address: int) -> int:
    """Copy ``part`` to ``address``; give its checksum."""
    tensor = contents.tensors[part.entry]
    begin = part.offset - contents.header_bytes - contents.entries[part.entry].begin
    if is_on_host(tensor):
        return copy_crc32c(address, tensor.data_ptr() + begin, part.size_bytes)
    with torch.no_grad():
        data = tensor.view(-1).view(torch.uint8)[begin : begin + part.size_bytes]
        host_bytes(address, part.size_bytes).copy_(data)
    return crc32c_at(address, part.size_bytes)
