"""From a file to tensors: mapped, or read past the page cache.

Tensors read past the page cache lie side by side in memory of their own, as they lie in the file, so
that what is read goes straight there.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from penstock.checkpoint.failures import cannot_read, shown
from penstock.checkpoint.pieces import (
    DEPTH,
    BufferPool,
    Checksums,
    FilePiece,
    TensorPart,
    run_transfers,
    split,
)
from penstock.checkpoint.source import CheckpointSource, Volume
from penstock.checkpoint.tensors import DTYPES
from penstock.checkpoint.tree import unflatten
from penstock.errors import InvalidCheckpoint
from penstock.machine import lines
from penstock.storage.aligned import (
    MADV_POPULATE_READ,
    MADV_POPULATE_WRITE,
    AlignedBuffer,
    address_of,
    advise,
    align_down,
    align_up,
    view_at,
)
from penstock.storage.checksum import copy_crc32c, crc32c_at
from penstock.storage.threads import ThreadPool, in_order, in_parallel
from penstock.storage.transfer import Transfer

# Where the bytes of a tensor, given by its index in `CheckpointSource.entries`, are wanted: one-dimensional
# bytes without gaps, on any device, or None where they are only to be verified. Called from several
# threads, not at once.
Destination = Callable[[int], torch.Tensor | None]


def map_file(source: CheckpointSource) -> MappedFile:
    try:
        return MappedFile(source.file.buffered, source.size_bytes)
    except OSError as error:
        raise cannot_read(source.path, error) from error


def read_mapped(source: CheckpointSource, verify: bool = True) -> list[torch.Tensor]:
    """The tensors, in the order of the entries, as copy-on-write views of the page cache.

    Raises as `fill`.
    """
    tensors = []
    for volume in source.volumes:
        mapped = map_file(volume.source)
        if verify and volume.source.header.written_by_penstock and volume.indexes:
            volume.source.read_ahead()
            _fill(volume, _nowhere, mapped, keep_pages=True)
        tensors += _tensors(volume, mapped, 0)
    return tensors


def unread(source: CheckpointSource) -> list[torch.Tensor]:
    """The tensors, in the order of the entries, of zeros that take no memory until they are written to."""
    tensors = []
    for volume in source.volumes:
        begin = volume.source.header.data_offset
        memory = _own_memory(volume.source, begin, reserved=False)
        tensors += _tensors(volume, memory, begin)
    return tensors


def read_own(source: CheckpointSource, verify: bool = True) -> list[torch.Tensor]:
    """The tensors, in the order of the entries, in memory of their own. Raises as `fill`."""
    return [tensor for volume in source.volumes for tensor in _read_own(volume, verify)]


def _read_own(volume: Volume, verify: bool) -> list[torch.Tensor]:
    source = volume.source
    begin = align_down(source.header.data_offset, source.file.alignment_bytes)
    memory = _own_memory(source, begin)
    checksums = Checksums(source.header.entries)
    verify = verify and source.header.written_by_penstock
    pieces = tuple(_pieces(volume))

    def take(piece: FilePiece) -> tuple[int, OwnMemory]:
        return memory.address + piece.offset - begin, memory

    def use(piece: FilePiece, address: int) -> None:
        for part in piece.parts if verify else ():
            checksums.add(part, crc32c_at(address + part.offset - piece.offset, part.size_bytes))

    # Fresh memory costs the kernel about as much time as the disk needs: threads bring it in beforehand.
    pool = ThreadPool(lambda piece: memory.touch(piece.offset - begin, piece.end - begin), pieces[DEPTH:])
    with contextlib.closing(pool):
        _read(source, iter(pieces), take, use, lambda _: None, depth=2 * DEPTH)
    if verify:
        _raise_damaged(source, checksums.damaged(volume.indexes))
    return _tensors(volume, memory, begin)


def _own_memory(source: CheckpointSource, begin: int, *, reserved: bool = True) -> OwnMemory:
    try:
        return OwnMemory(source.size_bytes - begin, reserved=reserved)
    except OSError as error:
        raise cannot_read(source.path, error) from error


def read_to(
    source: CheckpointSource, devices: Sequence[torch.device], mapped: bool, verify: bool = True
) -> list[torch.Tensor]:
    """The tensors, in the order of the entries, each on a device of its own, in memory that torch allocates
    once their bytes are there: inside a run, those before them may have left by then. Raises as `fill`."""

    @functools.cache
    def made(index: int) -> torch.Tensor:
        entry = source.entries[index]
        return torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device=devices[index])

    fill(source, lambda index: made(index).view(-1).view(torch.uint8), mapped, verify, on_host=False)
    return [made(index) for index in range(len(devices))]


def state_of(source: CheckpointSource, tensors: Sequence[torch.Tensor], restride: bool = True) -> Any:
    """The state that the tensors, in the order of the entries, make up.

    restride   False copies nothing: what had its dimensions in another order is a view

    Raises InvalidCheckpoint.
    """
    header = source.header
    by_name = {entry.name: tensor for entry, tensor in zip(source.entries, tensors, strict=True)}
    if header.tree is None:
        return by_name
    return unflatten(header.tree, by_name, str(source.path), restride=restride)


def verify_all(source: CheckpointSource) -> None:
    """Read all tensors, and compare all checksums. Raises as `fill`."""
    fill(source, _nowhere, source.is_cached)


def copy_to(source: CheckpointSource, descriptor: int) -> None:
    """Write the file as it is to an open one, and compare all checksums. Not for increments.

    Raises as `fill`, and OSError where it cannot be written.
    """
    (volume,) = source.volumes
    checksums = Checksums(source.header.entries)

    def use(piece: FilePiece, address: int) -> None:
        for part in piece.parts:
            checksums.add(part, crc32c_at(address + part.offset - piece.offset, part.size_bytes))
        # What is before the first piece is the header, which has its own checksum.
        write_fully(descriptor, view_at(address, piece.end - piece.offset, writable=False), piece.offset)

    write_fully(descriptor, memoryview(source.raw_header()), 0)
    _read_through(BufferPool(), source, _pieces(volume), use)
    _raise_damaged(source, checksums.damaged())


def write_fully(descriptor: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def fill(
    source: CheckpointSource,
    destination: Destination,
    mapped: bool,
    verify: bool = True,
    *,
    on_host: bool = True,
    wanted: Collection[int] | None = None,
) -> None:
    """Copy the tensors' bytes to where they are wanted.

    mapped      read through the page cache, else past it
    on_host     all are wanted in the memory of the CPU: several threads copy. Else one does, so that
                copies are ordered after the work of the caller's streams
    wanted      indexes of tensors; only they are read, and verified. None for all

    Raises CheckpointError, or InvalidCheckpoint where ``verify`` finds one damaged.
    """
    first = 0
    for each in source.volumes:
        numbers = {index: first + number for number, index in enumerate(each.indexes)}
        first += len(numbers)
        chosen = [index for index, number in numbers.items() if wanted is None or number in wanted]
        if chosen:
            file = map_file(each.source) if mapped else None
            volume, to = each._replace(indexes=chosen), lambda index, to=numbers: destination(to[index])
            _fill(volume, to, file, verify, on_host=on_host)


def _fill(
    volume: Volume,
    destination: Destination,
    mapped: MappedFile | None,
    verify: bool = True,
    *,
    on_host: bool = True,
    keep_pages: bool = False,
) -> None:
    """As `fill`, for tensors of one file, by the indexes of its header.

    mapped      the file, to read it through the page cache
    keep_pages  of ``mapped``, which is used further
    """
    source, header, lock = volume.source, volume.source.header, threading.Lock()
    checksums = Checksums(header.entries)

    def use(piece: FilePiece, address: int) -> None:
        for part in piece.parts:
            with lock:
                to = destination(part.entry)
            begin = part.offset - header.data_offset - header.entries[part.entry].begin
            checksums.add(part, _copy(part, address + part.offset - piece.offset, begin, to))

    def bring_in(piece: FilePiece) -> None:
        assert mapped is not None
        try:
            mapped.populate(piece.offset, piece.end)
        except OSError as error:
            raise cannot_read(source.path, error, piece.offset, _names(source, piece)) from error
        use(piece, mapped.address + piece.offset)
        if not keep_pages:
            mapped.release_pages(piece.offset, piece.end)

    pieces = _pieces(volume)
    if mapped is not None:
        (in_parallel if on_host else in_order)(bring_in, pieces)
    else:
        _read_through(BufferPool(pinned=not on_host), source, pieces, use)
    if verify:
        _raise_damaged(source, checksums.damaged(volume.indexes))


def _pieces(volume: Volume) -> Iterator[FilePiece]:
    """Of the file, those with anything of the volume's tensors, and the parts that are of these."""
    source, wanted = volume.source, frozenset(volume.indexes)
    for piece in split(source.header.entries, source.header.data_offset, source.file.alignment_bytes):
        if parts := tuple(part for part in piece.parts if part.entry in wanted):
            yield piece._replace(parts=parts)


def _nowhere(_: int) -> None:
    """A `Destination`."""


def _copy(part: TensorPart, address: int, begin: int, to: torch.Tensor | None) -> int:
    """Copy ``part``, which lies at ``address``, to byte ``begin`` of ``to``; give its checksum."""
    if to is None:
        return crc32c_at(address, part.size_bytes)
    if is_on_host(to):
        return copy_crc32c(to.data_ptr() + begin, address, part.size_bytes)
    with torch.no_grad():
        to[begin : begin + part.size_bytes].copy_(host_bytes(address, part.size_bytes))
    return crc32c_at(address, part.size_bytes)


def _read_through(
    pool: BufferPool,
    source: CheckpointSource,
    pieces: Iterator[FilePiece],
    use: Callable[[FilePiece, int], None],
) -> None:
    """As `_read`, into the pool's buffers."""

    def take(_: FilePiece) -> tuple[int, object]:
        buffer = pool.take()
        return buffer.address, buffer

    _read(source, pieces, take, use, pool.give)


def _read(
    source: CheckpointSource,
    pieces: Iterator[FilePiece],
    take: Callable[[FilePiece], tuple[int, Any]],
    use: Callable[[FilePiece, int], None],
    give: Callable[[Any], None],
    depth: int | None = None,
) -> None:
    """Read every piece past the page cache, and use it while others are read.

    take    returns the address for a piece, and the memory that is there
    use     called with a piece, and the address at which its bytes are
    give    called with its memory afterwards
    """

    def to_read(piece: FilePiece) -> Transfer:
        address, memory = take(piece)
        size_bytes = piece.end - piece.offset
        return Transfer("read", source.file, piece.offset, address, size_bytes, keep=(piece, memory))

    def done(transfer: Transfer) -> None:
        piece, memory = cast("tuple[FilePiece, Any]", transfer.keep)
        if transfer.error_number:
            raise source.failure(transfer.error_number, piece.offset, _names(source, piece))
        use(piece, transfer.address)
        give(memory)

    run_transfers(source.opened, map(to_read, pieces), done, source.way, depth)


def _tensors(volume: Volume, memory: MappedFile | OwnMemory, begin: int) -> list[torch.Tensor]:
    """Tensors out of memory that holds the file from ``begin`` on."""
    header = volume.source.header
    offset = header.data_offset - begin
    return [
        _tensor_of(memory.part(offset + entry.begin, offset + entry.end), DTYPES[entry.dtype], entry.shape)
        for entry in map(header.entries.__getitem__, volume.indexes)
    ]


def _tensor_of(part: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The bytes of ``part`` as a tensor whose storage is exactly these bytes."""
    if not part.nbytes:
        return torch.empty(shape, dtype=dtype)
    data = torch.frombuffer(part, dtype=torch.uint8)
    if data.data_ptr() % dtype.itemsize:  # a file of another writer: some kernels need aligned elements
        data = data.clone()
    return data.view(dtype).view(shape)


def _raise_damaged(source: CheckpointSource, damaged: list[str]) -> None:
    if damaged:
        raise InvalidCheckpoint(
            f"{source.path} is damaged: the checksum of {shown(damaged)} is not the one that was saved. "
            "Load another copy; verify=False loads the bytes as they are."
        )


def _names(source: CheckpointSource, piece: FilePiece) -> str:
    return shown([source.header.entries[part.entry].name for part in piece.parts])


# -- memory: of its own, or the page cache's ------------------------------------------------------


class OwnMemory(AlignedBuffer):
    """Zeroed memory that is given out in parts. Raises OSError."""

    def touch(self, begin: int, end: int) -> None:
        """Have the kernel bring in the pages of [begin, end) now, by one call without the GIL."""
        _populate(self.address, begin, end, MADV_POPULATE_WRITE)  # where it fails, the first use does it

    def part(self, begin: int, end: int) -> memoryview:
        """The bytes [begin, end). When nothing uses them any more, their pages are given back, and
        with the last part the rest."""
        begin, end = begin + self._skipped, end + self._skipped
        part = memoryview(self._mapping)[begin:end]
        low, high = align_up(begin, mmap.PAGESIZE), align_down(end, mmap.PAGESIZE)
        if low < high:
            give_back = weakref.finalize(part, self._mapping.madvise, mmap.MADV_DONTNEED, low, high - low)
            give_back.atexit = False
        return part


class MappedFile:
    """The first ``size_bytes`` of an open file as copy-on-write memory. Raises OSError."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        try:
            self._mapping = mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_PRIVATE, prot=access)
        except ValueError as error:  # the file became shorter
            raise OSError(errno.EIO, os.strerror(errno.EIO)) from error
        self.address = address_of(self._mapping)

    def part(self, begin: int, end: int) -> memoryview:
        """The bytes [begin, end). The mapping lives as long as they do."""
        return memoryview(self._mapping)[begin:end]

    def populate(self, begin: int, end: int) -> None:
        """Bring the bytes in. Raises OSError where touching them would end the process."""
        # EINVAL is of a kernel that does not know the advice.
        if _populate(self.address, begin, end, MADV_POPULATE_READ) not in (0, errno.EINVAL):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def release_pages(self, begin: int, end: int) -> None:
        """Give the pages that lie in [begin, end) back to the page cache: they can be read again."""
        _release_pages(self.address + begin, self.address + end)


class Mappings:
    """Where an open file lies in memory that somebody else has mapped, and nobody writes to."""

    def __init__(self, descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        fields = (line.split(maxsplit=5) for line in lines(Path("/proc/self/maps")))
        self._ranges = [
            [int(address, 16) for address in found[0].split("-")] for found in fields if found[5:] == [name]
        ]

    def release_pages(self, address: int, size_bytes: int) -> None:
        """Give these bytes back to the page cache, if they are the file's: they can be read again."""
        end = address + size_bytes
        if any(first <= address and end <= last for first, last in self._ranges):
            _release_pages(address, end)


def _release_pages(begin: int, end: int) -> None:
    low, high = align_up(begin, mmap.PAGESIZE), align_down(end, mmap.PAGESIZE)
    if low < high:
        advise(low, high - low, mmap.MADV_DONTNEED)


def _populate(address: int, begin: int, end: int, advice: int) -> int:
    """Bring in the pages of [begin, end) from the address on. Returns 0, or an errno."""
    low, high = align_down(begin, mmap.PAGESIZE), align_up(end, mmap.PAGESIZE)
    return advise(address + low, high - low, advice)


def is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def host_bytes(address: int, size_bytes: int) -> torch.Tensor:
    """The bytes at ``address`` as a tensor. The caller keeps the memory alive."""
    return torch.frombuffer(view_at(address, size_bytes, writable=True), dtype=torch.uint8)
