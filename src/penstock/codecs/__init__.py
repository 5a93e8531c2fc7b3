"""Codecs: tensors in fewer bytes while they are away.

`CODECS` is the table. A lossless codec gives the same bits back, of every dtype and every bit pattern. A
lossy one is used only where the user names it.

New codecs: a file here with an encoder and a decoder, and a row in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from penstock.codecs import bitmask, half
from penstock.errors import InvalidArgument


@dataclass(frozen=True)
class Codec:
    """One way to store a tensor.

    lossless   what comes back has the same bits
    encode     tensor to packed bytes, a uint8 tensor of one dimension on the same device
    decode     of (packed, like): a tensor with the shape, strides and dtype of ``like``, whose values are not
               read, on the device of ``packed``
    """

    lossless: bool
    encode: Callable[[torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


CODECS: Mapping[str, Codec] = MappingProxyType(
    {
        "csr": Codec(True, bitmask.encode, bitmask.decode),
        "fp16": Codec(False, half.encode_fp16, half.decode_fp16),
        "bf16": Codec(False, half.encode_bf16, half.decode_bf16),
    }
)


def encode(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes by a codec: a uint8 tensor of one dimension, on the tensor's device.

    name     a key of `CODECS`
    tensor   dense; for a lossy codec float32

    Raises InvalidArgument.
    """
    _check_tensor(tensor)
    return _codec(name).encode(tensor.detach().resolve_conj().resolve_neg())


def decode(name: str, packed: torch.Tensor, *, like: torch.Tensor) -> torch.Tensor:
    """What `encode` was given, as a new tensor with the shape, strides and dtype of ``like``.

    packed   what `encode` gave: uint8, one dimension
    like     its values are not read; it may be on the device "meta"

    Raises InvalidArgument, and InvalidFile where ``packed`` is damaged or of another tensor.
    """
    _check_tensor(like)
    if packed.dtype is not torch.uint8 or packed.dim() != 1 or not packed.is_contiguous():
        raise InvalidArgument(
            f"packed is {packed.dtype} of shape {list(packed.shape)}: give what `encode` gave, bytes in one "
            "dimension"
        )
    return _codec(name).decode(packed, like)


def _codec(name: str) -> Codec:
    if name not in CODECS:
        raise InvalidArgument(f"there is no codec {name!r}: choose one of {', '.join(CODECS)}")
    return CODECS[name]


def _check_tensor(tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        what = "quantized" if tensor.is_quantized else str(tensor.layout)
        raise InvalidArgument(f"codecs store dense tensors, and this is {what}: give its parts one by one")
