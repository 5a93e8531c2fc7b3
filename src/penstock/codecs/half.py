"""float32 in half the bytes: the stash of delayed precision reduction (FlashNeuron section 3.2). Lossy.

The forward pass and the weights are as they were; what the backward pass reads has lost precision. fp16 keeps
11 significant bits of values from 6.1e-5 to 65504; what is larger becomes 65504, not infinity. bf16 keeps 8,
of every magnitude. On a CPU it is C++, csrc/codecs/packing.hpp, and elsewhere operators of torch, with the
same bytes, but for what a NaN holds.

Elements are [N] float32, contiguous.
"""

from __future__ import annotations

import torch

from penstock import _native

_LARGEST = torch.finfo(torch.float16).max


def encode(elements: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if elements.device.type == "cpu":
        packed = torch.empty(2 * elements.numel(), dtype=torch.uint8)
        _native.pack(_packing(dtype, elements.numel()), elements.data_ptr(), packed.data_ptr())
        return packed
    stored = elements.to(dtype)
    if dtype is torch.float16 and elements.numel():
        least, most = torch.aminmax(elements)
        if not -_LARGEST <= float(least) <= float(most) <= _LARGEST:  # NaN is not
            stored.copy_(torch.where(elements.isinf(), elements, elements.clamp(-_LARGEST, _LARGEST)))
    return stored.view(torch.uint8)


def decode_into(packed: torch.Tensor, elements: torch.Tensor, dtype: torch.dtype) -> bool:
    if packed.numel() != 2 * elements.numel():
        return False
    if packed.device.type == "cpu":
        return _native.unpack(_packing(dtype, elements.numel()), packed.data_ptr(), elements.data_ptr())
    elements.copy_(packed.view(dtype))
    return True


def _packing(dtype: torch.dtype, elements: int) -> _native.Packing:
    codec = _native.Codec.fp16 if dtype is torch.float16 else _native.Codec.bf16
    return _native.Packing(codec, 2 * elements, elements, 4)
