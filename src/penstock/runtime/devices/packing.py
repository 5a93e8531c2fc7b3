"""Packing of bytes on a device by operators of torch: the same bytes as the native codecs make."""

from __future__ import annotations

from collections.abc import Callable

import torch

from penstock.codecs import bitmask, encode, half

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def pack(
    content: torch.Tensor, codec: str, itemsize: int, admits: Callable[[int], bool]
) -> torch.Tensor | None:
    """The bytes ``content`` packed, on the same device; None where that makes them no smaller, or there is
    no room.

    content   [N] uint8, the whole of a storage
    codec     a key of penstock.codecs.CODECS
    itemsize  bytes of an element
    admits    whether there is room for so many bytes, which are counted then

    Takes a few MiB beside what it gives.
    """
    if content.numel() % itemsize:
        return None
    elements = _elements(content, codec, itemsize)
    size_bytes = bitmask.packed_bytes(elements) if codec == "csr" else content.numel() // 2
    if size_bytes >= content.numel() or not admits(size_bytes):
        return None
    return encode(codec, elements)


def unpack(packed: torch.Tensor, content: torch.Tensor, codec: str, itemsize: int) -> bool:
    """Fill ``content`` [N] uint8 with what was packed. False: ``packed`` is of no such elements."""
    elements = _elements(content, codec, itemsize)
    if codec == "csr":
        return bitmask.decode_into(packed, elements)
    return half.decode_into(packed, elements, codec)


def _elements(content: torch.Tensor, codec: str, itemsize: int) -> torch.Tensor:
    return content.view(_INTEGERS[itemsize] if codec == "csr" else torch.float32)
