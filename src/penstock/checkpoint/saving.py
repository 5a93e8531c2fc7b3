"""The user's entry to saving: lays tensors out, gathers them into pieces, writes these, replaces the file."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, overload

import torch
import torch.distributed as dist

from penstock.checkpoint import background
from penstock.checkpoint.background import SaveHandle, Snapshot
from penstock.checkpoint.contents import PAGE_BYTES, Contents, Metadata, contents_of, copy_bytes, gather
from penstock.checkpoint.failures import cannot_write, os_error
from penstock.checkpoint.pieces import (
    PIECE_BYTES,
    BufferPool,
    Checksums,
    FilePiece,
    PinnedBuffer,
    io_path,
    run_transfers,
    split,
)
from penstock.checkpoint.reading import host_bytes
from penstock.checkpoint.remote import ObjectPath, no_io_paths
from penstock.checkpoint.replace import Replacement, replacing
from penstock.checkpoint.source import PathLike, place_to_save
from penstock.errors import CheckpointError, InvalidArgument, PenstockError
from penstock.options import IoOptions
from penstock.storage.aligned import AlignedBuffer, align_up, view_at
from penstock.storage.paths import IoPath, shared_path
from penstock.storage.threads import in_order, in_parallel
from penstock.storage.transfer import Transfer

_MOST_BYTES = 4096  # of what a rank tells

# Its bytes are there, in the buffer.
_Gathered: TypeAlias = tuple[FilePiece, int, AlignedBuffer | PinnedBuffer]


@overload
def save(
    state: Any,
    path: PathLike,
    *,
    wait: Literal[True] = True,
    metadata: Metadata = None,
    group: Any = None,
    io: IoOptions | None = None,
) -> None: ...
@overload
def save(
    state: Any,
    path: PathLike,
    *,
    wait: Literal[False],
    metadata: Metadata = None,
    group: None = None,
    io: IoOptions | None = None,
) -> SaveHandle: ...
@overload
def save(
    state: Any,
    path: PathLike,
    *,
    wait: bool,
    metadata: Metadata = None,
    group: Any = None,
    io: IoOptions | None = None,
) -> SaveHandle | None: ...


def save(
    state: Any,
    path: PathLike,
    *,
    wait: bool = True,
    metadata: Metadata = None,
    group: Any = None,
    io: IoOptions | None = None,
) -> SaveHandle | None:
    """Write ``state`` to ``path``: durable, with checksums, and whole or not at all.

    state      tensors, numbers, texts, and dicts, lists and tuples of them, such as a state dict of a
               module or of an optimizer
    path       of a file, or the URL of an object: s3://, gs:// or az://. What is there is replaced when the
               new one is complete; if the save fails or the process is killed, it stays as it was. Suffixes
               of torch.save, such as .pt, are refused: name it .safetensors
    wait       False copies the tensors, so that they can change, and writes in the background. Copies
               take at most 1 GiB at once, or the size of one state where that is more: further saves
               wait here until earlier ones have been written and their copies released. In a run on a CPU
               tensors of 64 KiB and more are not copied: what writes to one waits until its bytes were
               taken, for a URL to a file in the run's spill_dir
    metadata   texts that any reader of safetensors files can see
    group      of torch.distributed: all its processes call this, its first one writes, and the others wait
               for that, no longer than the group's time-out. None: every process that calls this writes,
               and waits for nobody
    io         its ``paths`` or ``costs`` say by which I/O path pieces of 4 MiB are written; None: the direct
               one, which measures as well as any. The file is durable by any

    Returns a SaveHandle where ``wait`` is False. Raises InvalidArgument, with the place in ``state``, for
    what cannot be saved, and CheckpointError where the file cannot be written.
    """
    if group is not None and not wait:
        raise InvalidArgument("with group=, save waits for the process that writes: leave wait=False out")
    place = place_to_save(path)
    try:
        if group is None:
            return _save(state, place, wait, metadata, io)
        _by_the_first(group, partial(_save, state, place, True, metadata, io), place)
    except CheckpointError as error:
        raise error from None  # it names the system's own error
    return None


def _by_the_first(group: Any, write: Callable[[], object], path: Path | ObjectPath) -> None:
    """The first process of the group writes. All learn how that ended."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_rank(group) < 0:
        raise InvalidArgument(
            "group= needs a process group of torch.distributed that this process is in: call "
            "torch.distributed.init_process_group first"
        )
    error = None
    first = dist.get_global_rank(group, 0)
    if dist.get_rank() == first:
        try:
            write()
        except Exception as problem:  # the others wait for the outcome
            error = problem
    failure = _told(f"{type(error).__name__}: {error}" if error is not None else "", first, group)
    if error is not None:
        raise error
    if failure:
        raise CheckpointError(f"rank {first}, which writes {path} for all, failed: {failure}")


def _told(text: str, first: int, group: Any) -> str:
    """The text of rank ``first``. It is no pickle, which could run code of another rank's here."""
    told = text.encode(errors="backslashreplace")[:_MOST_BYTES].ljust(_MOST_BYTES, b"\0")
    device = dist.distributed_c10d._get_object_coll_device(group)
    sent = torch.frombuffer(bytearray(told), dtype=torch.uint8).to(device)
    dist.broadcast(sent, first, group)
    return bytes(sent.tolist()).rstrip(b"\0").decode(errors="replace")


def _save(
    state: Any, path: Path | ObjectPath, wait: bool, metadata: Metadata, io: IoOptions | None
) -> SaveHandle | None:
    contents = contents_of(state, metadata)
    if not wait:
        return save_in_background(contents, path, io)
    save_now(contents, path, io)
    return None


def save_now(contents: Contents, path: Path | ObjectPath, io: IoOptions | None) -> None:
    """Write it straight from the tensors."""
    if isinstance(path, ObjectPath):
        no_io_paths(path, io)
        background.wait_for(path)
        try:
            _upload_through(contents, path)
        except PenstockError:
            raise
        except OSError as error:
            raise path.failure(error) from error
        return
    way = io_path("write", path, contents.size_bytes, io)
    with replacing(path, contents.size_bytes, contents.size_bytes) as replacement:
        background.wait_for(replacement.path)
        _write_through(contents, replacement, way)
        replacement.commit(contents.size_bytes)


def save_in_background(
    contents: Contents,
    path: Path | ObjectPath,
    io: IoOptions | None,
    then: Callable[[], None] = lambda: None,
) -> SaveHandle:
    """Take what is to be written as it is now, and write it. ``then`` is called once it is durable and in
    place."""
    with contextlib.ExitStack() as held:
        if isinstance(path, ObjectPath):
            no_io_paths(path, io)
            write = _uploading(contents, path, held)
        else:
            way = io_path("write", path, contents.size_bytes, io)
            write, path = _writing(contents, path, way, held)

        def work() -> None:
            write()
            try:
                then()
            except OSError as error:  # of other files: this one is whole
                raise CheckpointError(f"{path} is saved, but older ones are not removed: {error}") from error

        return background.start(path, work, held.pop_all())


def _writing(
    contents: Contents, path: Path, way: IoPath, held: contextlib.ExitStack
) -> tuple[Callable[[], None], Path]:
    """What writes the contents of this moment to a file, and where that is."""
    snapshot = _snapshot(contents, held)
    if snapshot is not None:
        contents = held.enter_context(_copied_beside(snapshot, contents, path))
    else:
        held.enter_context(background.room_for(contents.data_bytes))
    replacement = held.enter_context(replacing(path, contents.size_bytes, contents.size_bytes))
    if snapshot is not None:
        write = partial(_write_through, contents, replacement, way, snapshot)
    else:
        write = partial(_write, held.enter_context(_copied(contents, path)), replacement, way)

    def write_and_commit() -> None:
        write()
        replacement.commit(contents.size_bytes)

    return write_and_commit, replacement.path


def _uploading(contents: Contents, path: ObjectPath, held: contextlib.ExitStack) -> Callable[[], None]:
    """What writes the contents of this moment to an object."""
    snapshot = _snapshot(contents, held)
    if snapshot is None:
        held.enter_context(background.room_for(contents.data_bytes))
        return partial(_upload, held.enter_context(_copied(contents, path)), path)
    contents = held.enter_context(_copied_beside(snapshot, contents, path))
    # Who writes to a tensor waits for a disk, and not for a network.
    size_bytes, staging = contents.size_bytes, snapshot.folder / path.name
    staged = held.enter_context(replacing(staging, size_bytes, size_bytes))

    def upload() -> None:
        _write_through(contents, staged, shared_path(), snapshot)
        descriptor = staged.file.buffered
        offsets = range(0, size_bytes, PIECE_BYTES)
        parts = (os.pread(descriptor, min(PIECE_BYTES, size_bytes - offset), offset) for offset in offsets)
        path.write(parts, size_bytes)

    return upload


def _snapshot(contents: Contents, held: contextlib.ExitStack) -> Snapshot | None:
    """None where it would hold none of the tensors."""
    snapshot = background.snapshot_of(contents.tensors)
    if snapshot is None or not any(index in snapshot for index in range(len(contents.tensors))):
        return None
    held.callback(snapshot.close)
    return snapshot


def _write_through(
    contents: Contents, replacement: Replacement, way: IoPath, snapshot: Snapshot | None = None
) -> None:
    """Write straight from the tensors, through a few buffers."""
    checksums = Checksums(contents.entries)
    pool = BufferPool(align_up(contents.data_bytes, PAGE_BYTES), pinned=not contents.on_host)

    def gathered() -> Iterator[_Gathered]:
        pieces = split(contents.entries, contents.header_bytes)
        for piece in pieces if snapshot is None else _wanted_first(snapshot, pieces):
            buffer = pool.take()
            gather(contents, piece, buffer.address, checksums, snapshot)
            if snapshot is not None and snapshot.failed:
                raise CheckpointError(
                    f"checkpoint {replacement.path} cannot be written: {snapshot.failed}. What was there "
                    "before is there. Save again, or with wait=True"
                )
            yield piece, buffer.address, buffer

    _write(_Gathering(contents, checksums, gathered()), replacement, way, pool.give)


def _wanted_first(snapshot: Snapshot, pieces: Iterable[FilePiece]) -> Iterator[FilePiece]:
    """All pieces: in order, but first those of tensors that somebody waits to write to."""
    waiting = dict(enumerate(pieces))
    of: dict[int, set[int]] = {}  # by tensor
    for number, piece in waiting.items():
        for part in piece.parts:
            of.setdefault(part.entry, set()).add(number)
    while waiting:
        wanted = snapshot.wanted()
        number = next(iter(waiting)) if wanted is None else min(of[wanted])
        piece = waiting.pop(number)
        for part in piece.parts:
            of[part.entry].discard(number)
        yield piece


class _Gathering(NamedTuple):
    """What is written, piece by piece, and the checksums of what was gathered so far."""

    contents: Contents
    checksums: Checksums
    pieces: Iterable[_Gathered]


@contextlib.contextmanager
def _copied_beside(snapshot: Snapshot, contents: Contents, path: Path | ObjectPath) -> Iterator[Contents]:
    """With copies in the place of tensors that ``snapshot`` does not contain."""
    copied = [index for index in range(len(contents.tensors)) if index not in snapshot]
    sizes = [align_up(contents.tensors[index].nbytes, 64) for index in copied]
    with background.room_for(sum(sizes)):
        buffer = _buffer(sum(sizes), contents, path)
        tensors = list(contents.tensors)
        address = buffer.address
        for index, size_bytes in zip(copied, sizes, strict=True):
            if data_bytes := tensors[index].nbytes:
                copy = host_bytes(address, data_bytes)
                copy_bytes(tensors[index], 0, data_bytes, address)
                tensors[index] = copy
            address += size_bytes
        try:
            yield replace(contents, tensors=tuple(tensors))
        finally:
            del buffer
            tensors.clear()


def _buffer(size_bytes: int, contents: Contents, path: Path | ObjectPath) -> AlignedBuffer:
    """Raises CheckpointError where there is not enough memory."""
    try:
        return AlignedBuffer(align_up(max(size_bytes, 1), PAGE_BYTES))
    except OSError as error:
        if isinstance(path, ObjectPath):
            raise path.failure(error) from error
        raise cannot_write(path, error, contents.size_bytes) from error


@contextlib.contextmanager
def _copied(contents: Contents, path: Path | ObjectPath) -> Iterator[_Gathering]:
    """Copies the tensors as they are now, as they will lie in the file. The copy is freed at the end: others
    may hold the value as long as its error.

    Raises CheckpointError where there is not enough memory.
    """
    buffer = _buffer(contents.data_bytes, contents, path)
    begin, checksums = contents.header_bytes, Checksums(contents.entries)
    gathered: list[_Gathered] = [
        (piece, buffer.address + piece.offset - begin, buffer) for piece in split(contents.entries, begin)
    ]
    # From a device in order, so that copies come after the work of the caller's streams.
    run = in_parallel if contents.on_host else in_order
    run(lambda each: gather(contents, each[0], each[1], checksums), gathered)
    del buffer
    contents = replace(contents, tensors=())  # theirs may go on to change, and to be freed
    try:
        yield _Gathering(contents, checksums, gathered)
    finally:
        gathered.clear()


def _upload(copy: _Gathering, path: ObjectPath) -> None:
    contents, checksums, pieces = copy
    header = contents.header(checksums)
    parts = (view_at(address, piece.end - piece.offset, writable=False) for piece, address, _ in pieces)
    path.write(itertools.chain([header], parts), contents.size_bytes)


def _upload_through(contents: Contents, path: ObjectPath) -> None:
    """Straight from the tensors, which are read twice: the header, which has their checksums, comes first."""
    data_offset = contents.header_bytes
    checksums, pool = Checksums(contents.entries), BufferPool(pinned=not contents.on_host)
    for piece in split(contents.entries, data_offset):
        buffer = pool.take()
        gather(contents, piece, buffer.address, checksums)
        pool.give(buffer)
    header, again = contents.header(checksums), Checksums(contents.entries)

    def parts() -> Iterator[bytes | memoryview]:
        yield header
        for piece in split(contents.entries, data_offset):
            buffer = AlignedBuffer(piece.end - piece.offset)  # which the upload keeps as long as it needs it
            gather(contents, piece, buffer.address, again)
            yield buffer.view()
        if contents.header(again) != header:
            raise CheckpointError(
                f"checkpoint {path} cannot be written: its tensors changed meanwhile. Nothing of it was left "
                "there. Change them after save has returned, or save with wait=False"
            )

    path.write(parts(), contents.size_bytes)


def _write(
    gathering: _Gathering,
    replacement: Replacement,
    way: IoPath,
    release: Callable[[Any], None] = lambda buffer: None,
) -> None:
    """Write the pieces, then the header with the checksums.

    release   called with the buffer of each piece that is written
    """
    contents, checksums, pieces = gathering
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
            error = os_error(transfer.error_number)
            raise cannot_write(replacement.path, error, size_bytes, transfer.offset)
        if transfer.offset:  # not the header
            release(transfer.keep)

    run_transfers(replacement.opened, transfers(), done, way)
