"""A tensor's elements in the order in which they lie in memory."""

from __future__ import annotations

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in one dimension: a view where they fill a piece of memory, as those of a channels-last
    tensor do, else of a copy."""
    if not _by_stride(tensor).is_contiguous():
        tensor = torch.empty_like(tensor).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))  # a dimension of one element may have any stride


def bit_patterns(tensor: torch.Tensor) -> torch.Tensor:
    """Those elements as integers. One of complex128 is two of them."""
    elements = in_memory_order(tensor)
    return elements.view(_INTEGERS[min(elements.element_size(), 8)])


def _by_stride(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
