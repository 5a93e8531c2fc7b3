"""What a store is uploaded to, and read from: a namespace."""

from __future__ import annotations

from typing import Protocol

from penstock.samples.remote.layout import (
    SUPERBLOCK_BYTES,
    SUPERBLOCK_OFFSETS,
    Found,
    find_superblock,
)
from penstock.storage.aligned import AlignedBuffer, align_up
from penstock.storage.nvme.contents import HEAD_BYTES, known_contents


class Device(Protocol):
    """Bytes at offsets, such as `penstock.storage.nvme.Namespace`.

    block_bytes   writes are of whole blocks, and durable after `flush`
    """

    @property
    def size_bytes(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...

    def read_into(self, offset: int, view: memoryview) -> None: ...
    def write(self, offset: int, view: memoryview) -> None: ...
    def flush(self) -> None: ...


def read_superblock(device: Device, name: str) -> Found:
    """What the superblocks of a namespace say. Raises InvalidFile where they are damaged."""
    size_bytes = align_up(SUPERBLOCK_BYTES, device.block_bytes)
    copies = []
    for offset in SUPERBLOCK_OFFSETS:
        copy = AlignedBuffer(size_bytes)
        if offset + size_bytes <= device.size_bytes:  # nothing lies on a namespace so small
            device.read_into(offset, copy.view())
        copies.append(bytes(copy.view()[:SUPERBLOCK_BYTES]))
    return find_superblock(copies, device.size_bytes, name)


def contents(device: Device) -> str | None:
    """What lies on a namespace without a store, in words; None for nothing."""
    head = bytearray(min(HEAD_BYTES, device.size_bytes))
    device.read_into(0, memoryview(head))
    return known_contents(head)
