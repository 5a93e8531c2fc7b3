"""Codecs: compress tensors while they are evicted.

`CODECS` is the table. A lossless codec restores the same bits, of every dtype and every bit pattern. A
lossy one is used only where the user names it.

New codecs: a file here with an encoder and a decoder, and a row in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch

from penstock.codecs import bitmask, half
from penstock.errors import InvalidArgument, InvalidFile

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Codec:
    """One way to store a tensor.

    lossless      decoding restores the same bits
    elements      called with a tensor: its elements, in one dimension, as the codec takes them
    encode        called with elements: packed bytes, a uint8 tensor of one dimension on the same device
    decode_into   called with (packed, elements): fill the elements. False: ``packed`` does not match them
    """

    lossless: bool
    elements: Callable[[torch.Tensor], torch.Tensor]
    encode: Callable[[torch.Tensor], torch.Tensor]
    decode_into: Callable[[torch.Tensor, torch.Tensor], bool]


def bit_patterns(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers, in memory order. One of complex128 is two of them."""
    elements = _in_memory_order(tensor)
    return elements.view(_INTEGERS[min(elements.element_size(), 8)])


def _floats(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype is not torch.float32:
        raise InvalidArgument(f"fp16 and bf16 store float32, this is {tensor.dtype}: use a lossless codec")
    return _in_memory_order(tensor)


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in one dimension: a view where the tensor is dense, also in channels-last; else a copy."""
    by_stride = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    if not by_stride.is_contiguous():
        tensor = torch.empty_like(tensor).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))  # a dimension of one element may have any stride


def _half(dtype: torch.dtype) -> Codec:
    return Codec(False, _floats, partial(half.encode, dtype=dtype), partial(half.decode_into, dtype=dtype))


CODECS: Mapping[str, Codec] = MappingProxyType(
    {
        "csr": Codec(True, bit_patterns, bitmask.encode, bitmask.decode_into),
        "fp16": _half(torch.float16),
        "bf16": _half(torch.bfloat16),
    }
)


def encode(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Compress a tensor: a uint8 tensor of one dimension, on the tensor's device.

    name     a key of `CODECS`
    tensor   dense; for a lossy codec float32

    Raises InvalidArgument.
    """
    codec = _codec(name, tensor)
    return codec.encode(codec.elements(tensor.detach().resolve_conj().resolve_neg()))


def decode(name: str, packed: torch.Tensor, *, like: torch.Tensor) -> torch.Tensor:
    """The reverse of `encode`: a new tensor with the shape, strides and dtype of ``like``.

    packed   what `encode` returned: uint8, one dimension
    like     its values are not read; it may be on the device "meta"

    Raises InvalidArgument, and InvalidFile where ``packed`` is damaged or of another tensor.
    """
    codec = _codec(name, like)
    if packed.dtype is not torch.uint8 or packed.dim() != 1 or not packed.is_contiguous():
        raise InvalidArgument(
            f"packed is {packed.dtype} of shape {list(packed.shape)}: give what `encode` gave, bytes in one "
            "dimension"
        )
    tensor = torch.empty_like(like, device=packed.device)
    if not codec.decode_into(packed, codec.elements(tensor)):
        raise InvalidFile(
            f"these {packed.numel()} bytes of {name} are not {tensor.numel()} elements of {tensor.dtype}: "
            "they are damaged, or of another tensor"
        )
    return tensor


def _codec(name: str, tensor: torch.Tensor) -> Codec:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        what = "quantized" if tensor.is_quantized else str(tensor.layout)
        raise InvalidArgument(f"codecs store dense tensors, and this is {what}: give its parts one by one")
    if name not in CODECS:
        raise InvalidArgument(f"there is no codec {name!r}: choose one of {', '.join(CODECS)}")
    return CODECS[name]
