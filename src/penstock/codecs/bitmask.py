"""Bitmask-CSR: a bit for each element, and those that are not zero (FlashNeuron section 3.2). Lossless.

Rows of 128 elements. In the machine's byte order: how many elements are kept before each row, and in all, 4
bytes each; a bit for each element; the kept ones. "Zero" is of all bits, so that -0.0 and every NaN are kept.

On a CPU it is C++: csrc/codecs/bitmask.hpp. Elsewhere it is operators of torch, with the same bytes.
Elements are integers, in one dimension.
"""

from __future__ import annotations

import torch

from penstock import _native
from penstock.errors import InvalidArgument

ROW_ELEMENTS = 128
PIECE_ELEMENTS = 1 << 18  # a multiple of the rows'; operators take about 16 bytes for each
SAMPLES, SAMPLE_ELEMENTS = 16, 4096  # little beside what a kernel that wrote a tensor has in the cache


def encode(elements: torch.Tensor) -> torch.Tensor:
    count = elements.numel()
    if count >= 1 << 32:
        raise InvalidArgument(
            f"a tensor of {count} elements is too large for bitmask-CSR, which counts to 4294967295: store "
            "it in parts"
        )
    if elements.device.type != "cpu":
        return encode_by_operators(elements)
    itemsize = elements.element_size()
    kept = _native.bitmask_count_kept(elements.data_ptr(), count, itemsize)
    packed = torch.empty(_native.bitmask_head_bytes(count) + kept * itemsize, dtype=torch.uint8)
    address = packed.data_ptr()
    written = _native.bitmask_encode(elements.data_ptr(), count, itemsize, address, packed.numel())
    if written != packed.numel():
        raise InvalidArgument("the tensor was written to while it was encoded: encode what nobody writes to")
    return packed


def sampled_density(address: int, size_bytes: int, itemsize: int) -> float:
    """Estimate the fraction of elements that are not zero, from samples of memory."""
    itemsize = min(itemsize, 8)
    elements = size_bytes // itemsize
    sample = min(SAMPLE_ELEMENTS, elements // SAMPLES)
    if not sample:
        return _native.bitmask_count_kept(address, elements, itemsize) / max(elements, 1)
    kept = 0
    for index in range(SAMPLES):
        at = address + index * (elements - sample) // (SAMPLES - 1) * itemsize
        kept += _native.bitmask_count_kept(at, sample, itemsize)
    return kept / (SAMPLES * sample)


def packed_bytes(elements: torch.Tensor) -> int:
    """Size of what `encode` returns for these integers."""
    kept = sum(int(torch.count_nonzero(piece)) for piece in elements.split(PIECE_ELEMENTS))
    return int(_native.bitmask_head_bytes(elements.numel()) + kept * elements.element_size())


def decode_into(packed: torch.Tensor, elements: torch.Tensor) -> bool:
    """Fill the elements. False: ``packed`` does not match them."""
    if packed.device.type != "cpu":
        return decode_by_operators(packed, elements)
    count, itemsize = elements.numel(), elements.element_size()
    address = elements.data_ptr()
    return bool(_native.bitmask_decode(packed.data_ptr(), packed.numel(), address, count, itemsize))


def encode_by_operators(elements: torch.Tensor) -> torch.Tensor:
    """The same bytes, by operators of torch, piece by piece: a few MiB at once beside them."""
    device, count = elements.device, elements.numel()
    counts = [
        _padded(piece != 0, ROW_ELEMENTS).view(-1, ROW_ELEMENTS).sum(1, dtype=torch.int32)
        for piece in elements.split(PIECE_ELEMENTS)
    ]
    starts = _starts(counts, device)
    starts_bytes = starts.numel() * 4
    at = starts_bytes + -(-count // 8)
    itemsize = elements.element_size()
    packed = torch.empty(at + int(starts[-1]) * itemsize, dtype=torch.uint8, device=device)
    packed[:starts_bytes] = starts.view(torch.uint8)
    for begin in range(0, count, PIECE_ELEMENTS):
        piece = elements[begin : begin + PIECE_ELEMENTS]
        kept = piece != 0
        mask = (_padded(kept, 8).view(-1, 8) * _bits(device)).sum(1, dtype=torch.uint8)
        packed[starts_bytes + begin // 8 :][: mask.numel()] = mask
        values = piece[kept].view(torch.uint8)
        packed[at : at + values.numel()] = values
        at += values.numel()
    return packed


def decode_by_operators(packed: torch.Tensor, elements: torch.Tensor) -> bool:
    """Fill the elements. False: ``packed`` does not match them."""
    count, device, itemsize = elements.numel(), packed.device, elements.element_size()
    starts_bytes = (-(-count // ROW_ELEMENTS) + 1) * 4
    head_bytes = starts_bytes + -(-count // 8)
    if packed.numel() < head_bytes:
        return False
    at, counts = head_bytes, []
    for begin in range(0, count, PIECE_ELEMENTS):
        piece = elements[begin : begin + PIECE_ELEMENTS]
        mask = packed[starts_bytes + begin // 8 :][: -(-piece.numel() // 8)]
        bits = (mask[:, None] & _bits(device)).reshape(-1) != 0
        kept = bits[: piece.numel()]
        counts.append(_padded(kept, ROW_ELEMENTS).view(-1, ROW_ELEMENTS).sum(1, dtype=torch.int32))
        total_bytes = int(kept.sum()) * itemsize
        if at + total_bytes > packed.numel() or bool(bits[piece.numel() :].any()):
            return False
        # A copy: what lies at an odd address is no view as integers.
        values = packed[at : at + total_bytes].clone().view(elements.dtype)
        piece.zero_()[kept] = values
        at += total_bytes
    starts = _starts(counts, device)
    whole: bool = at == packed.numel() and torch.equal(packed[:starts_bytes], starts.view(torch.uint8))
    return whole


def _starts(counts: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Numbers of kept elements before each row, and in all. Their bytes are those of unsigned integers."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return torch.cat([zero, torch.cat([zero[:0], *counts]).cumsum(0)]).to(torch.int32)


def _bits(device: torch.device) -> torch.Tensor:
    return 2 ** torch.arange(8, device=device, dtype=torch.uint8)


def _padded(kept: torch.Tensor, multiple: int) -> torch.Tensor:
    return torch.nn.functional.pad(kept, (0, -kept.numel() % multiple))
