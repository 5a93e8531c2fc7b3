"""From a file to tensors: mapped, or read past the page cache.

Tensors read past the page cache lie side by side in memory of their own, as they lie in the file, so
that what is read goes straight there.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any, cast

import torch

from penstock.checkpoint.failures import cannot_read, error_of, shown
from penstock.checkpoint.file.header import Entry
from penstock.checkpoint.file.memory import MappedFile, OwnMemory, host_bytes, is_on_host, tensor_of
from penstock.checkpoint.file.pieces import Checksums, Part, Piece, cut
from penstock.checkpoint.file.source import Source
from penstock.checkpoint.file.transfers import DEPTH, BufferPool, carry_out
from penstock.checkpoint.state.tree import DTYPES, unflatten
from penstock.errors import InvalidCheckpoint
from penstock.storage.aligned import align_down
from penstock.storage.checksum import copy_crc32c, crc32c_at
from penstock.storage.threads import ThreadPool, in_order, in_parallel
from penstock.storage.transfer import Transfer

# Takes a piece, and the address at which its bytes are.
Use = Callable[[Piece, int], None]

# Where the bytes of a tensor, given by the index of its entry, are wanted: one-dimensional bytes without
# gaps, on any device, or None where they are only to be verified. Called from several threads, not at once.
Destination = Callable[[int], torch.Tensor | None]


def read_mapped(source: Source, verify: bool = True) -> list[torch.Tensor]:
    """The tensors, in the order of the entries, as copy-on-write views of the page cache.

    Raises CheckpointError, or InvalidCheckpoint where ``verify`` finds one damaged.
    """
    mapped = _map(source)
    checksums = Checksums(source.header.entries)
    if verify and source.header.written_by_penstock:
        source.read_ahead()
        pieces = cut(source.header.entries, source.header.data_offset)
        check = functools.partial(_check, checksums=checksums)
        _use_mapped(source, mapped, check, in_parallel, pieces)
        _raise_damaged(source, checksums.damaged())
    return _tensors(source, mapped, 0)


def read_own(source: Source, verify: bool = True) -> list[torch.Tensor]:
    """The tensors, in the order of the entries, in memory of their own.

    Raises CheckpointError, or InvalidCheckpoint where ``verify`` finds one damaged.
    """
    begin = align_down(source.header.data_offset, source.file.alignment_bytes)
    try:
        memory = OwnMemory(source.size_bytes - begin)
    except OSError as error:
        raise cannot_read(source.path, error) from error
    checksums = Checksums(source.header.entries)
    verify = verify and source.header.written_by_penstock
    pieces = tuple(cut(source.header.entries, source.header.data_offset, source.file.alignment_bytes))

    def take(piece: Piece) -> tuple[int, OwnMemory]:
        return memory.address + piece.offset - begin, memory

    def use(piece: Piece, address: int) -> None:
        if verify:
            _check(piece, address, checksums)

    # Fresh memory costs the kernel about as much time as the disk needs: threads bring it in beforehand.
    pool = ThreadPool(lambda piece: memory.touch(piece.offset - begin, piece.end - begin), pieces[DEPTH:])
    with closing(pool):
        _use_read(source, pieces, take, use, depth=2 * DEPTH)
    if verify:
        _raise_damaged(source, checksums.damaged())
    return _tensors(source, memory, begin)


def read_to(
    source: Source, devices: Sequence[torch.device], mapped: bool, verify: bool = True
) -> list[torch.Tensor]:
    """The tensors, in the order of the entries, each on a device of its own.

    Raises as `fill` does.
    """
    tensors = [
        torch.empty(entry.shape, dtype=_dtype_of(source, entry), device=device)
        for entry, device in zip(source.header.entries, devices, strict=True)
    ]
    flat = [tensor.view(-1).view(torch.uint8) for tensor in tensors]
    fill(source, lambda entry: flat[entry], mapped, verify, on_host=False)
    return tensors


def state_of(source: Source, tensors: Sequence[torch.Tensor], restride: bool = True) -> Any:
    """The state that the tensors, in the order of the entries, make up.

    restride   False copies nothing: what had its dimensions in another order is a view

    Raises InvalidCheckpoint.
    """
    header = source.header
    by_name = {entry.name: tensor for entry, tensor in zip(header.entries, tensors, strict=True)}
    if header.tree is None:
        return by_name
    return unflatten(header.tree, by_name, source.path, restride=restride)


def fill(
    source: Source,
    destination: Destination,
    mapped: bool,
    verify: bool = True,
    on_host: bool = True,
    wanted: Collection[int] | None = None,
) -> None:
    """Copy the tensors' bytes to where they are wanted.

    wanted    entries; only they are read, and verified. None for all
    mapped    out of the page cache, else past it
    on_host   all are wanted in the memory of the CPU: several threads copy. Else one does, so that
              copies are in order with what the caller's device has been told to do

    Raises CheckpointError, or InvalidCheckpoint where ``verify`` finds one damaged.
    """
    checksums = Checksums(source.header.entries)
    lock = threading.Lock()

    def copy(piece: Piece, address: int) -> None:
        for part in piece.parts:
            with lock:
                to = destination(part.entry)
            entry = source.header.entries[part.entry]
            begin = part.offset - source.header.data_offset - entry.begin
            checksums.add(part, _copy(part, address + part.offset - piece.offset, begin, to))

    def pieces(*alignment_bytes: int) -> Iterator[Piece]:
        for piece in cut(source.header.entries, source.header.data_offset, *alignment_bytes):
            if wanted is not None:
                piece = piece._replace(parts=tuple(part for part in piece.parts if part.entry in wanted))
            if piece.parts:
                yield piece

    if mapped:
        memory = _map(source)

        def copy_out(piece: Piece, address: int) -> None:
            copy(piece, address)
            memory.release_pages(piece.offset, piece.end)

        _use_mapped(source, memory, copy_out, in_parallel if on_host else in_order, pieces())
    else:
        pool = BufferPool(pinned=not on_host)

        def take(_: Piece) -> tuple[int, object]:
            buffer = pool.take()
            return buffer.address, buffer

        _use_read(source, pieces(source.file.alignment_bytes), take, copy, pool.give)
    if verify:
        _raise_damaged(source, checksums.damaged(wanted))


def _copy(part: Part, address: int, begin: int, to: torch.Tensor | None) -> int:
    """Copy ``part``, which lies at ``address``, to byte ``begin`` of ``to``; give its checksum."""
    if to is None:
        return crc32c_at(address, part.size_bytes)
    if is_on_host(to):
        return copy_crc32c(to.data_ptr() + begin, address, part.size_bytes)
    with torch.no_grad():
        to[begin : begin + part.size_bytes].copy_(host_bytes(address, part.size_bytes))
    return crc32c_at(address, part.size_bytes)


def _map(source: Source) -> MappedFile:
    try:
        return MappedFile(source.file.buffered, source.size_bytes)
    except OSError as error:
        raise cannot_read(source.path, error) from error


def _use_mapped(
    source: Source,
    mapped: MappedFile,
    use: Use,
    run: Callable[..., None],
    pieces: Iterable[Piece],
) -> None:
    """Call ``use`` with every piece. ``run`` is in_parallel or in_order."""

    def bring_in(piece: Piece) -> None:
        try:
            mapped.populate(piece.offset, piece.end)
        except OSError as error:
            raise cannot_read(source.path, error, piece.offset, _names(source, piece)) from error
        use(piece, mapped.address + piece.offset)

    run(bring_in, tuple(pieces))


def _use_read(
    source: Source,
    pieces: Iterable[Piece],
    take: Callable[[Piece], tuple[int, Any]],
    use: Use,
    give: Callable[[Any], None] = lambda memory: None,
    depth: int | None = None,
) -> None:
    """Read every piece past the page cache, and call ``use`` with it while others are read.

    take    gives the address for a piece, and the memory that is there
    give    called with that memory after it was used

    Raises CheckpointError.
    """

    def to_read(piece: Piece) -> Transfer:
        address, memory = take(piece)
        size_bytes = piece.end - piece.offset
        return Transfer("read", source.file, piece.offset, address, size_bytes, keep=(piece, memory))

    def done(transfer: Transfer) -> None:
        piece, memory = cast("tuple[Piece, Any]", transfer.keep)
        if transfer.error_number:
            error = error_of(transfer.error_number)
            raise cannot_read(source.path, error, piece.offset, _names(source, piece))
        use(piece, transfer.address)
        give(memory)

    carry_out(source.opened, map(to_read, pieces), done, depth)


def _check(piece: Piece, address: int, checksums: Checksums) -> None:
    for part in piece.parts:
        checksums.add(part, crc32c_at(address + part.offset - piece.offset, part.size_bytes))


def _tensors(source: Source, memory: MappedFile | OwnMemory, begin: int) -> list[torch.Tensor]:
    """Tensors out of memory that holds the file from ``begin`` on."""
    offset = source.header.data_offset - begin
    return [
        tensor_of(
            memory.part(offset + entry.begin, offset + entry.end), _dtype_of(source, entry), entry.shape
        )
        for entry in source.header.entries
    ]


def _dtype_of(source: Source, entry: Entry) -> torch.dtype:
    if entry.dtype not in DTYPES:
        raise InvalidCheckpoint(
            f"{source.path}: tensor {entry.name} has type {entry.dtype}, which this torch, "
            f"{torch.__version__}, does not have. Update torch."
        )
    return DTYPES[entry.dtype]


def _raise_damaged(source: Source, damaged: list[str]) -> None:
    if damaged:
        raise InvalidCheckpoint(
            f"{source.path} is damaged: the checksum of {shown(damaged)} is not the one that was saved. "
            "Load another copy; verify=False loads the bytes as they are."
        )


def _names(source: Source, piece: Piece) -> str:
    return shown([source.header.entries[part.entry].name for part in piece.parts])
