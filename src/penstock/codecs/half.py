"""float32 in half the bytes: the stash of delayed precision reduction (FlashNeuron section 3.2). Lossy.

The forward pass and the weights are as they were; what the backward pass reads has lost precision. fp16 keeps
11 significant bits of values from 6.1e-5 to 65504; what is larger becomes 65504, not infinity. bf16 keeps 8,
of every magnitude. On a CPU it is C++, csrc/codecs/packing.hpp, and elsewhere operators of torch, with the
same bytes, but for what a NaN holds.
"""

from __future__ import annotations

import torch

from penstock import _native
from penstock.codecs.elements import in_memory_order
from penstock.errors import InvalidArgument, InvalidFile

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_LARGEST = torch.finfo(torch.float16).max


def encode_fp16(tensor: torch.Tensor) -> torch.Tensor:
    return _encode(tensor, torch.float16)


def encode_bf16(tensor: torch.Tensor) -> torch.Tensor:
    return _encode(tensor, torch.bfloat16)


def decode_fp16(packed: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return _decode(packed, like, "fp16")


def decode_bf16(packed: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return _decode(packed, like, "bf16")


def _encode(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    _check(tensor)
    if tensor.device.type == "cpu":
        elements = in_memory_order(tensor)
        packed = torch.empty(2 * elements.numel(), dtype=torch.uint8)
        _native.pack(_packing(dtype, elements.numel()), elements.data_ptr(), packed.data_ptr())
        return packed
    stored = torch.empty_like(tensor, dtype=dtype).copy_(tensor)
    if dtype is torch.float16 and tensor.numel():
        least, most = torch.aminmax(tensor)
        if not -_LARGEST <= float(least) <= float(most) <= _LARGEST:  # NaN is not
            stored.copy_(torch.where(tensor.isinf(), tensor, tensor.clamp(-_LARGEST, _LARGEST)))
    return in_memory_order(stored).view(torch.uint8)


def decode_into(packed: torch.Tensor, elements: torch.Tensor, codec: str) -> bool:
    """Fill the elements. False: ``packed`` is of another number of them.

    elements   [N] float32, contiguous
    """
    if packed.numel() != 2 * elements.numel():
        return False
    dtype = _DTYPES[codec]
    if packed.device.type == "cpu":
        return _native.unpack(_packing(dtype, elements.numel()), packed.data_ptr(), elements.data_ptr())
    elements.copy_(packed.view(dtype))
    return True


def _decode(packed: torch.Tensor, like: torch.Tensor, codec: str) -> torch.Tensor:
    _check(like)
    tensor = torch.empty_like(like, device=packed.device)
    if not decode_into(packed, in_memory_order(tensor), codec):
        raise InvalidFile(
            f"these {packed.numel()} bytes are not {like.numel()} elements of 2 bytes: they are damaged, or "
            "of another tensor"
        )
    return tensor


def _packing(dtype: torch.dtype, elements: int) -> _native.Packing:
    codec = _native.Codec.fp16 if dtype is torch.float16 else _native.Codec.bf16
    return _native.Packing(codec, 2 * elements, elements, 4)


def _check(tensor: torch.Tensor) -> None:
    if tensor.dtype is not torch.float32:
        raise InvalidArgument(f"fp16 and bf16 store float32, this is {tensor.dtype}: use a lossless codec")
