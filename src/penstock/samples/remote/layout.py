"""How a store lies on a namespace, without a file system: see docs/formats.md. Pure: bytes in, values out.

A superblock, in two copies, says where the table of files is; the files are those of a store's folder.
What is read here may come from anybody: nothing is believed before it was compared with everything else.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from penstock.errors import InvalidFile
from penstock.samples import layout
from penstock.storage.aligned import align_up
from penstock.storage.checksum import crc32c
from penstock.storage.nvme.contents import HEAD_BYTES, STORE_MAGIC
from penstock.units import format_bytes

MAGIC = STORE_MAGIC
VERSION = 1
SUPERBLOCK_BYTES = 512
SUPERBLOCK_OFFSETS = (0, 512 << 10)
ALIGNMENT_BYTES = 1 << 20  # of the table and of files
END_ALIGNMENT_BYTES = 64 << 10  # the largest block that a namespace has
EXTENT_BYTES = 16 << 20  # what is written, and noted as written, at once
LARGEST_EXTENT_BYTES = 1 << 30
MOST_FILES = 1 << 20
AGAIN = "Upload the store again, with overwrite=True (--overwrite)"

_UPLOADING, _COMPLETE = 1, 2
_SUPERBLOCK = struct.Struct("<16sIIQ16s16sQQQQIIQQI")
_CRC_AT = SUPERBLOCK_BYTES - 4
_RECORD = np.dtype(
    [("offset", "<u8"), ("size_bytes", "<u8"), ("crc32c", "<u4"), ("reserved", "<u4"), ("name", "S40")]
)
_DONE = struct.Struct("<QII")  # of an extent: its number plus one, its CRC-32C, and one over these
PROGRESS_RECORD_BYTES = _DONE.size


@dataclass(frozen=True, kw_only=True)
class Superblock:
    """What a namespace says of itself.

    generation       the copy of the higher one holds
    complete         all files are there; otherwise they are being uploaded
    upload_id        16 random bytes, of this upload
    store_id         16 bytes: which store it is
    namespace_bytes  of the namespace that it was uploaded to
    used_bytes       behind them nothing is the store's
    table_crc32c     of the table; 0 until the upload is complete
    files            entries of the table
    progress_offset  where the uploader notes which extents are durable
    extent_bytes     that files are cut into, for this; the last of a file may be shorter
    """

    generation: int = 1
    complete: bool = False
    upload_id: bytes = bytes(16)
    store_id: bytes = bytes(16)
    namespace_bytes: int = 0
    used_bytes: int
    table_offset: int
    table_bytes: int
    table_crc32c: int = 0
    files: int
    progress_offset: int
    progress_bytes: int
    extent_bytes: int = EXTENT_BYTES

    def encoded(self) -> bytes:
        """[512 bytes]"""
        state = _COMPLETE if self.complete else _UPLOADING
        values = [getattr(self, name) for name in _FIELDS]
        packed = _SUPERBLOCK.pack(MAGIC, VERSION, state, *values).ljust(_CRC_AT, b"\0")
        return packed + struct.pack("<I", crc32c(packed))


# In the order of _SUPERBLOCK.
_FIELDS = tuple(field.name for field in fields(Superblock) if field.name != "complete")


class StoredFile(NamedTuple):
    """A file of a store on a namespace.

    name    as in the store's folder, behind its partition's name where it has several
    offset  of its first byte
    crc32c  of its bytes
    """

    name: str
    offset: int
    size_bytes: int
    crc32c: int = 0


class FileExtent(NamedTuple):
    """A piece of a file: ``size_bytes`` from its byte ``begin`` on, which lie at ``offset``."""

    number: int
    file: int
    begin: int
    size_bytes: int
    offset: int


class UploadPlan(NamedTuple):
    """Where an upload puts everything.

    superblock  as the upload begins
    files       in the order of the table
    """

    superblock: Superblock
    files: tuple[StoredFile, ...]

    def each_extent(self) -> Iterator[FileExtent]:
        """All extents, by number. Files of no bytes have none."""
        number, step = 0, self.superblock.extent_bytes
        for index, file in enumerate(self.files):
            for begin in range(0, file.size_bytes, step):
                size_bytes = min(step, file.size_bytes - begin)
                yield FileExtent(number, index, begin, size_bytes, file.offset + begin)
                number += 1


def plan_upload(sizes: Mapping[str, int], *, extent_bytes: int = EXTENT_BYTES) -> UploadPlan:
    """Where the files go. ``sizes``: of each file, by name, in the order in which they are to lie.

    The superblock's ids, and its namespace's size, are left at zero. Raises InvalidFile where there are more
    files than can be listed.
    """
    if len(sizes) > MOST_FILES:
        raise InvalidFile(f"the store has {len(sizes)} files; a namespace holds at most {MOST_FILES}")
    table_bytes = _RECORD.itemsize * len(sizes)
    progress_offset = align_up(HEAD_BYTES + table_bytes, ALIGNMENT_BYTES)
    progress_bytes = PROGRESS_RECORD_BYTES * sum(-(-size // extent_bytes) for size in sizes.values())
    end = progress_offset + progress_bytes
    files = []
    for name, size_bytes in sizes.items():
        offset = align_up(end, ALIGNMENT_BYTES)
        files.append(StoredFile(name, offset, size_bytes))
        end = offset + size_bytes
    superblock = Superblock(
        used_bytes=align_up(end, END_ALIGNMENT_BYTES),
        table_offset=HEAD_BYTES,
        table_bytes=table_bytes,
        files=len(files),
        progress_offset=progress_offset,
        progress_bytes=progress_bytes,
        extent_bytes=extent_bytes,
    )
    return UploadPlan(superblock, tuple(files))


def find_superblock(
    copies: Sequence[bytes], namespace_bytes: int, name: str
) -> tuple[Superblock | None, tuple[str, ...]]:
    """The superblock of a namespace that holds, None where there is no store; and problems of the other one.

    copies           the bytes at SUPERBLOCK_OFFSETS
    namespace_bytes  of the namespace
    name             what errors call it

    Raises InvalidFile where there was a store, and none of its superblocks can be used.
    """
    found: list[Superblock] = []
    problems = []
    for copy, which in zip(copies, ("first", "second"), strict=True):
        if not copy.startswith(MAGIC):
            problems.append(f"the {which} superblock of {name} is missing")
        elif struct.unpack_from("<I", copy, _CRC_AT)[0] != crc32c(copy[:_CRC_AT]):
            problems.append(f"the {which} superblock of {name} is damaged: its checksum is wrong")
        else:
            found.append(_decoded(copy, name))
    if not found:
        if any(copy.startswith(MAGIC) for copy in copies):
            raise InvalidFile(f"{'; '.join(problems)}. {AGAIN}")
        return None, ()
    best = max(found, key=lambda superblock: superblock.generation)
    _check_superblock(best, namespace_bytes, name)
    if len(found) == 2 and found[0] != found[1]:
        problems.append(f"the superblocks of {name} differ: its last change was interrupted")
    return best, tuple(problems)


def _decoded(copy: bytes, name: str) -> Superblock:
    """Of bytes whose checksum is right."""
    _, version, state, *values = _SUPERBLOCK.unpack_from(copy)
    if version != VERSION:
        raise InvalidFile(
            f"{name} holds a store in version {version} of the layout, not {VERSION}: use the penstock that "
            "wrote it"
        )
    if state not in (_UPLOADING, _COMPLETE):
        raise InvalidFile(f"the superblock of {name} has the state {state}, which none is in. {AGAIN}")
    return Superblock(complete=state == _COMPLETE, **dict(zip(_FIELDS, values, strict=True)))


def _check_superblock(superblock: Superblock, namespace_bytes: int, name: str) -> None:
    """Raises InvalidFile where its numbers cannot all be true."""
    table_end = superblock.table_offset + superblock.table_bytes
    progress_end = superblock.progress_offset + superblock.progress_bytes
    sound = (
        0 < superblock.files <= MOST_FILES
        and superblock.table_bytes == _RECORD.itemsize * superblock.files
        and superblock.table_offset == HEAD_BYTES
        and superblock.progress_offset % ALIGNMENT_BYTES == 0
        and table_end <= superblock.progress_offset
        and superblock.progress_bytes % _DONE.size == 0
        and progress_end <= superblock.used_bytes <= superblock.namespace_bytes
        and 0 < superblock.extent_bytes <= LARGEST_EXTENT_BYTES
        and superblock.extent_bytes % ALIGNMENT_BYTES == 0
    )
    if not sound:
        raise InvalidFile(f"the superblock of {name} contradicts itself: no uploader wrote it. {AGAIN}")
    if superblock.used_bytes > namespace_bytes:
        raise InvalidFile(
            f"{name} has {format_bytes(namespace_bytes)}, and the store on it takes "
            f"{format_bytes(superblock.used_bytes)}: the namespace was made smaller. Make it as large as it "
            "was, or upload the store to another one"
        )


def encoded_table(files: Sequence[StoredFile]) -> bytes:
    """The table of files."""
    records = [(each.offset, each.size_bytes, each.crc32c, 0, each.name.encode("ascii")) for each in files]
    return np.array(records, _RECORD).tobytes()


def decoded_table(data: bytes, superblock: Superblock, name: str) -> dict[str, dict[str, StoredFile]]:
    """The files of each partition, by name; one store that is no partition of several is "".

    data         the table's bytes
    name         what errors call the namespace

    Raises InvalidFile where it is damaged, or cannot be that of a store.
    """
    if len(data) != superblock.table_bytes or crc32c(data) != superblock.table_crc32c:
        raise InvalidFile(f"the table of files of {name} is damaged: its checksum is wrong. {AGAIN}")

    def refuse(problem: str) -> InvalidFile:
        return InvalidFile(f"the table of files of {name} {problem}: no uploader wrote it. {AGAIN}")

    partitions: dict[str, dict[str, StoredFile]] = {}
    end = superblock.progress_offset + superblock.progress_bytes
    for offset, size_bytes, crc, reserved, raw in np.frombuffer(data, _RECORD).tolist():
        match = layout.UPLOADED.fullmatch(raw.decode("ascii", "replace"))
        if match is None or reserved:
            raise refuse(f"names {raw!r}, which is not a file of a store")
        partition, file_name = match[1] or "", match[4]
        if offset % ALIGNMENT_BYTES or offset < end or offset + size_bytes > superblock.used_bytes:
            raise refuse(f"gives {match[0]} a place that cannot be")
        files = partitions.setdefault(partition, {})
        if file_name in files:
            raise refuse(f"names {match[0]} twice")
        files[file_name] = StoredFile(match[0], offset, size_bytes, crc)
        end = offset + size_bytes
    for partition, files in partitions.items():
        if layout.MANIFEST not in files:
            raise refuse(f"lacks the {layout.MANIFEST} of {partition or 'its store'}")
    if "" in partitions and len(partitions) > 1:
        raise refuse("mixes a store with partitions of another")
    return partitions


def encoded_progress(superblock: Superblock, number: int, crc: int) -> bytes:
    """The note that an extent is durable. [16 bytes], at ``16 * number`` of the progress record."""
    return _DONE.pack(number + 1, crc, _mark(superblock, number, crc))


def decoded_progress(data: bytes | memoryview, superblock: Superblock) -> dict[int, int]:
    """CRC-32C of each extent that is noted as durable, by number."""
    return {
        number: crc
        for number, (stored, crc, mark) in enumerate(_DONE.iter_unpack(data))
        if stored == number + 1 and mark == _mark(superblock, number, crc)
    }


def _mark(superblock: Superblock, number: int, crc: int) -> int:
    return crc32c(superblock.upload_id + struct.pack("<QI", number + 1, crc))


def completed(superblock: Superblock, table: bytes) -> Superblock:
    """The superblock that makes the store whole, to be written when all else is durable."""
    return replace(
        superblock, generation=superblock.generation + 1, complete=True, table_crc32c=crc32c(table)
    )
