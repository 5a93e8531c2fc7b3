"""Which tensors have changed since the last checkpoint, and which of the others need not be written again.

A tensor is unchanged where its name, type and shape, its CRC-32C and the sum of its 64-bit words are as they
were. All bytes are read for that, and nothing is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from penstock.checkpoint.header import Reference, TensorEntry
from penstock.checkpoint.pieces import PIECE_BYTES, BufferPool
from penstock.checkpoint.reading import host_bytes, is_on_host
from penstock.checkpoint.tensors import Stored
from penstock.storage.aligned import view_at
from penstock.storage.checksum import crc32c_at, crc32c_combine
from penstock.storage.threads import in_order, in_parallel

_CHUNK_BYTES = 1 << 20  # summed up while the processor's cache has it from the checksum; of whole words
_WORD_BYTES = 8
_WORDS = 1 << 64

# What an increment refers to occupies at most so many times the bytes that it uses there.
_MOST_HELD = 2

# To so many files: all of them are open while it is loaded.
_MOST_FILES = 64


def described(stored: Sequence[Stored]) -> list[TensorEntry]:
    """An entry for each tensor, with checksum and sum, and its data as if it were alone."""
    on_host = all(is_on_host(item.tensor) for item in stored)
    chunk_bytes, pool = _CHUNK_BYTES if on_host else PIECE_BYTES, BufferPool(pinned=not on_host)
    chunks = [
        (number, begin, min(chunk_bytes, item.tensor.nbytes - begin))
        for number, item in enumerate(stored)
        for begin in range(0, item.tensor.nbytes, chunk_bytes)
    ]
    found: dict[tuple[int, int], tuple[int, int]] = {}

    def measure(chunk: tuple[int, int, int]) -> None:
        number, begin, size_bytes = chunk
        found[number, begin] = _measured(stored[number].tensor, begin, size_bytes, pool)

    # From a device in order, so that copies come after the work of the caller's streams.
    (in_parallel if on_host else in_order)(measure, chunks)
    crcs, sums = [0] * len(stored), [0] * len(stored)
    for number, begin, size_bytes in chunks:
        crc, total = found[number, begin]
        crcs[number] = crc32c_combine(crcs[number], crc, size_bytes)
        sums[number] = (sums[number] + total) % _WORDS
    return [
        TensorEntry(item.name, item.dtype, item.shape, 0, item.tensor.nbytes, crc, total)
        for item, crc, total in zip(stored, crcs, sums, strict=True)
    ]


def _measured(tensor: torch.Tensor, begin: int, size_bytes: int, pool: BufferPool) -> tuple[int, int]:
    """Checksum and sum of some of a tensor's bytes."""
    if is_on_host(tensor):
        return _of_memory(tensor.data_ptr() + begin, size_bytes)
    buffer = pool.take()
    with torch.no_grad():
        data = tensor.view(-1).view(torch.uint8)[begin : begin + size_bytes]
        host_bytes(buffer.address, size_bytes).copy_(data)
    try:
        return _of_memory(buffer.address, size_bytes)
    finally:
        pool.give(buffer)


def _of_memory(address: int, size_bytes: int) -> tuple[int, int]:
    crc = crc32c_at(address, size_bytes)
    data = view_at(address, size_bytes, writable=False)
    whole = size_bytes // _WORD_BYTES
    words = np.frombuffer(data, "<u8", whole).sum(dtype=np.uint64) if whole else 0
    return crc, int(words) + int.from_bytes(data[whole * _WORD_BYTES :], "little")


def unchanged(
    entries: Sequence[TensorEntry],
    known: Mapping[str, Reference],
    size_bytes: Mapping[str, int],
    refers_to: Mapping[str, frozenset[str]],
) -> dict[str, Reference]:
    """By name, where those of ``entries`` lie that need not be written again.

    known        by name, the tensors of the last checkpoint
    size_bytes   of the files that may be referred to
    refers_to    by file, those that stay as long as it does, itself among them

    A file of which less than half would be used is not referred to, nor any, where all that would have to
    stay for their sake is more than twice as large as what is used of it: then old files go in time. Nor any
    where there would be too many.
    """
    found: dict[str, Reference] = {}
    for entry in entries:
        old = known.get(entry.name)
        if old is not None and old.file in size_bytes and entry.size_bytes and _same(entry, old.entry):
            found[entry.name] = old
    used: Counter[str] = Counter()
    for reference in found.values():
        used[reference.file] += reference.entry.size_bytes
    files = {file for file, of_it in used.items() if size_bytes[file] <= _MOST_HELD * of_it}
    if len(files) > _MOST_FILES:
        return {}
    held = frozenset().union(*(refers_to[file] for file in files))
    if sum(size_bytes[file] for file in held) > _MOST_HELD * sum(used[file] for file in files):
        return {}
    return {name: reference for name, reference in found.items() if reference.file in files}


def _same(entry: TensorEntry, old: TensorEntry) -> bool:
    """Nothing but the place differs."""
    return entry._replace(begin=0, end=entry.size_bytes) == old._replace(begin=0, end=old.size_bytes)
