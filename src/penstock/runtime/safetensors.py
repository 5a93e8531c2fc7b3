"""Files of safetensors, written from memory whose bytes may be on the disk.

safetensors hands the addresses of tensors to write(2), which refuses memory that is away (EFAULT, "Bad
address"). Here each piece of a tensor is read by this process first, which brings it back, inside the budget.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import math
import os
from collections.abc import Mapping
from typing import Any

PIECE_BYTES = 8 << 20
MODULES = ("safetensors", "safetensors.torch", "safetensors.numpy")  # that have `serialize_file`


def read_in_pieces() -> None:
    """From now on `save_file` of safetensors, and so `save_pretrained`, writes tensors that are away. What is
    away may outlive its run, so this lasts as long as the process.

    Where safetensors copies tensors before it writes, as before 0.8, nothing changes.
    """
    try:
        modules = [importlib.import_module(name) for name in MODULES]
    except ImportError:
        return
    before = modules[0].serialize_file
    if getattr(before, "by_penstock", False):
        return

    @functools.wraps(before)
    def serialize_file(
        tensors: Mapping[str, Any], filename: str | os.PathLike[str], metadata: Any = None
    ) -> None:
        if all(hasattr(spec, "data_ptr") for spec in tensors.values()):
            _write(tensors, filename, metadata)
        else:
            before(tensors, filename, metadata=metadata)

    serialize_file.by_penstock = True  # type: ignore[attr-defined]
    for module in modules:
        module.serialize_file = serialize_file  # type: ignore[attr-defined]


def _write(
    tensors: Mapping[str, Any], filename: str | os.PathLike[str], metadata: Mapping[str, str] | None
) -> None:
    """A file in the format of safetensors: the length of the header in 8 bytes, the header, the tensors.

    tensors   by name: the library's TensorSpec, with dtype, shape, data_ptr, and data_len in bytes
    """

    def place(item: tuple[str, Any]) -> tuple[int, str]:
        """Larger elements first, so that every tensor is aligned."""
        name, spec = item
        elements = math.prod(spec.shape)
        return -(spec.data_len // elements if elements else 0), name

    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    ordered, begin = sorted(tensors.items(), key=place), 0
    for name, spec in ordered:
        end = begin + spec.data_len
        header[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(filename, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, spec in ordered:
            for first in range(0, spec.data_len, PIECE_BYTES):
                size = min(PIECE_BYTES, spec.data_len - first)
                file.write(ctypes.string_at(spec.data_ptr + first, size))
