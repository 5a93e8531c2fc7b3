"""The contents of a checkpoint: how tensors are laid out in the file, and their bytes gathered from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from penstock.checkpoint.background import Snapshot
from penstock.checkpoint.header import DEVICES, FOR_TORCH, Reference, TensorEntry, encode
from penstock.checkpoint.pieces import Checksums, FilePiece
from penstock.checkpoint.reading import host_bytes, is_on_host
from penstock.checkpoint.tensors import Stored
from penstock.checkpoint.tree import flatten
from penstock.errors import InvalidArgument
from penstock.storage import files
from penstock.storage.checksum import copy_crc32c, crc32c_at

# Data begins at a page, and so do tensors that are whole pages: they can be mapped and moved in place.
PAGE_BYTES = files.SMALLEST_ALIGNMENT_BYTES

Metadata: TypeAlias = Mapping[str, str] | None


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint to be written.

    tensors     whose bytes are written, in the order of the file
    entries     where each of them lies, without checksums
    tree        how they make up the state
    metadata    the user's own, and where tensors were
    elsewhere   tensors that are not written: they lie in other files
    """

    tensors: tuple[torch.Tensor, ...]
    entries: tuple[TensorEntry, ...]
    tree: str
    metadata: dict[str, str]
    elsewhere: tuple[Reference, ...]
    header_bytes: int

    @property
    def data_bytes(self) -> int:
        return self.entries[-1].end if self.entries else 0

    @property
    def size_bytes(self) -> int:
        return self.header_bytes + self.data_bytes

    def header(self, checksums: Checksums) -> bytes:
        entries = [entry._replace(crc32c=checksums.of(i)) for i, entry in enumerate(self.entries)]
        return _encoded(entries, self.tree, self.metadata, self.elsewhere)

    @property
    def on_host(self) -> bool:
        return all(map(is_on_host, self.tensors))


def _encoded(
    entries: Sequence[TensorEntry], tree: str, metadata: Mapping[str, str], elsewhere: Sequence[Reference]
) -> bytes:
    return encode(entries, tree=tree, metadata=metadata, alignment_bytes=PAGE_BYTES, elsewhere=elsewhere)


def contents_of(
    state: Any,
    metadata: Metadata,
    refer: Callable[[Sequence[Stored]], tuple[Mapping[str, int], Mapping[str, Reference]]] | None = None,
) -> Contents:
    """Lay out ``state``; only tensors with gaps are copied. Raises InvalidArgument.

    refer   told the tensors, says what their 64-bit words sum up to, and which lie elsewhere, by name
    """
    stored, tree = flatten(state)
    own = {**FOR_TORCH, **(metadata or {})}
    if DEVICES in own:
        raise InvalidArgument(f"metadata {DEVICES!r} cannot be saved: penstock keeps devices there")
    elsewhere = {item.name: str(item.tensor.device) for item in stored if not is_on_host(item.tensor)}
    if elsewhere:
        own[DEVICES] = json.dumps(elsewhere)
    sums, references = ({}, {}) if refer is None else refer(stored)
    ordered = sorted((item for item in stored if item.name not in references), key=_place)
    entries, end = [], 0
    for item in ordered:
        begin, end = end, end + item.tensor.nbytes
        entries.append(TensorEntry(item.name, item.dtype, item.shape, begin, end, None, sums.get(item.name)))
    # In the order of the files, which the header groups them by.
    others = tuple(sorted(references.values(), key=lambda reference: reference.file))
    header_bytes = len(_encoded(entries, tree, own, others))
    tensors = tuple(item.tensor for item in ordered)
    return Contents(tensors, tuple(entries), tree, own, others, header_bytes)


def _place(stored: Stored) -> tuple[bool, int]:
    """Whole pages first, then by size of element: every tensor begins at a multiple of its element."""
    return stored.tensor.nbytes % PAGE_BYTES != 0, -stored.tensor.element_size()


def gather(
    contents: Contents, piece: FilePiece, address: int, checksums: Checksums, snapshot: Snapshot | None = None
) -> None:
    """Copy the tensors' bytes of ``piece`` to ``address``."""
    for part in piece.parts:
        to = address + part.offset - piece.offset
        begin = part.offset - contents.header_bytes - contents.entries[part.entry].begin
        if snapshot is not None and part.entry in snapshot:
            crc = snapshot.copy(part.entry, begin, part.size_bytes, to)
        else:
            crc = copy_bytes(contents.tensors[part.entry], begin, part.size_bytes, to)
        checksums.add(part, crc)


def copy_bytes(tensor: torch.Tensor, begin: int, size_bytes: int, to: int) -> int:
    """Copy bytes of a tensor to an address; returns their CRC-32C."""
    if is_on_host(tensor):
        return copy_crc32c(to, tensor.data_ptr() + begin, size_bytes)
    with torch.no_grad():
        host_bytes(to, size_bytes).copy_(tensor.view(-1).view(torch.uint8)[begin : begin + size_bytes])
    return crc32c_at(to, size_bytes)
