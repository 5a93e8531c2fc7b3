"""From loaded entries to the tensors of a state: views of them, as the tree describes.

The tree is not trusted: every view is checked to lie inside its entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from penstock.checkpoint.state.strides import is_dense, reach
from penstock.errors import InvalidCheckpoint

# What the tree says of one tensor.
Node = dict[str, Any]

# By safetensors' name, torch's type. Those that this torch does not have are left out.
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, of_torch)
    for name, of_torch in {
        "BOOL": "bool",
        "U8": "uint8",
        "I8": "int8",
        "F8_E5M2": "float8_e5m2",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E8M0": "float8_e8m0fnu",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F4": "float4_e2m1fn_x2",
        "I16": "int16",
        "U16": "uint16",
        "F16": "float16",
        "BF16": "bfloat16",
        "I32": "int32",
        "U32": "uint32",
        "F32": "float32",
        "I64": "int64",
        "U64": "uint64",
        "F64": "float64",
        "C64": "complex64",
    }.items()
    if hasattr(torch, of_torch)
}

# All of torch's types by its own names.
TORCH_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
_QUANTIZED = {dtype for name, dtype in TORCH_DTYPES.items() if name.startswith(("qint", "quint"))}

# More than torch computes with.
MAX_DIMENSIONS = 64


class Rebuilt:
    """The tensors of a state, out of its entries.

    tensors    the entries by name, as they were loaded, without gaps
    restride   False: a tensor that had its dimensions in another order is given as a view of its entry,
               in which they are in order; else it is copied
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], path: str | Path, restride: bool) -> None:
        self._tensors = tensors
        self._path = path
        self._restride = restride
        self._objects: dict[str, torch.Tensor] = {}
        self._arrays: dict[str, np.ndarray[Any, Any]] = {}
        self._restrided: dict[tuple[Any, ...], torch.Tensor] = {}

    def entry(self, name: object) -> torch.Tensor:
        """The entry of this name. Raises InvalidCheckpoint where there is none."""
        if not isinstance(name, str) or name not in self._tensors:
            self._fail(name, "is not there")
        return self._tensors[name]

    def tensor(self, node: Node) -> torch.Tensor:
        """What ``node`` describes. Equal nodes give one object. Raises InvalidCheckpoint."""
        if len(node) == 1 and "$tensor" in node:
            return self.entry(node["$tensor"])
        same = repr(node)
        if same not in self._objects:
            self._objects[same] = self._object(dict(node))
        return self._objects[same]

    def array(self, name: object, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """An entry as a numpy array of ``dtype``, sharing its memory on a CPU; the same for the same name.

        Raises InvalidCheckpoint.
        """
        entry = self.entry(name)
        same = f"{name} {dtype.str}"
        if same in self._arrays:
            return self._arrays[same]
        shape = tuple(entry.shape)
        if entry.itemsize != dtype.itemsize:
            if entry.dtype != torch.uint8 or shape[-1:] != (dtype.itemsize,):
                self._fail(
                    name, f"has elements of {entry.itemsize} bytes, and the array's have {dtype.itemsize}"
                )
            shape = shape[:-1]
        data: np.ndarray[Any, Any] = entry.detach().reshape(-1).view(torch.uint8).cpu().numpy()
        self._arrays[same] = data.view(dtype).reshape(shape)
        return self._arrays[same]

    def _object(self, node: Node) -> torch.Tensor:
        is_parameter = "$parameter" in node
        name = node.pop("$parameter" if is_parameter else "$tensor", None)
        requires_grad = node.pop("requires_grad", is_parameter)
        node.pop("alias", None)
        if type(requires_grad) is not bool:
            self._fail(name, f"has requires_grad {requires_grad!r:.100}")
        tensor = self._view(name, node)
        try:
            if is_parameter:
                return torch.nn.Parameter(tensor, requires_grad=requires_grad)
            return tensor.detach().requires_grad_(requires_grad)
        except RuntimeError as error:
            self._fail(name, f"cannot have gradients ({error})")

    def _view(self, name: object, node: Node) -> torch.Tensor:
        entry = self.entry(name)
        dtype = self._dtype(name, node.pop("dtype", None), entry.dtype)
        shape, stride, offset = (node.pop(key, None) for key in ("shape", "stride", "offset"))
        if node:
            self._fail(name, f"is described by {node!r:.100}")
        if shape is None and offset is None:
            whole = self._whole(name, entry, dtype)
            return whole if stride is None else self._with_strides(name, whole, stride)
        if not (
            _are_sizes(shape) and _are_sizes(stride) and _are_sizes([offset]) and len(stride) == len(shape)
        ):
            self._fail(
                name, f"is a view of shape {shape!r:.100}, strides {stride!r:.100}, offset {offset!r:.100}"
            )
        elements = entry.numel() * entry.itemsize // dtype.itemsize
        if offset + reach(shape, stride) > elements:
            self._fail(name, f"is a view that ends beyond the {elements} elements that are there")
        try:
            flat = entry.reshape(-1).view(dtype)
            return flat.as_strided(shape, stride, flat.storage_offset() + offset)
        except RuntimeError as error:
            self._fail(name, f"cannot be viewed as described ({error})")

    def _dtype(self, name: object, described: object, of_entry: torch.dtype) -> torch.dtype:
        if described is None:
            return of_entry
        dtype = TORCH_DTYPES.get(described) if isinstance(described, str) else None
        if dtype is None or dtype in _QUANTIZED:
            self._fail(name, f"has dtype {described!r:.100}, which this torch does not have")
        return dtype

    def _whole(self, name: object, entry: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The entry; of a type that safetensors does not have, the last dimension is an element's bytes."""
        if entry.dtype == dtype:
            return entry
        is_split = dtype.itemsize > 1
        if entry.dtype != torch.uint8 or (is_split and entry.shape[-1:] != (dtype.itemsize,)):
            self._fail(name, f"is {entry.dtype} of shape {tuple(entry.shape)}, and described as {dtype}")
        try:
            return entry.view(dtype).squeeze(-1) if is_split else entry.view(dtype)
        except RuntimeError as error:
            self._fail(name, f"cannot be viewed as described ({error})")

    def _with_strides(self, name: object, whole: torch.Tensor, stride: Any) -> torch.Tensor:
        """A copy of ``whole``, no larger, with other strides: once for all that share it."""
        if not _are_sizes(stride) or len(stride) != whole.dim() or not is_dense(whole.shape, stride):
            self._fail(name, f"has shape {tuple(whole.shape)} and strides {stride!r:.100}")
        if not self._restride:
            return whole
        key = (name, whole.dtype, *stride)
        if key not in self._restrided:
            source = whole.view(torch.uint8) if whole.itemsize == 1 else whole  # torch cannot copy some types
            copy = torch.empty_strided(whole.shape, stride, dtype=source.dtype, device=source.device)
            self._restrided[key] = copy.copy_(source).view(whole.dtype)
        return self._restrided[key]

    def _fail(self, name: object, problem: str) -> NoReturn:
        raise InvalidCheckpoint(
            f"{self._path} is damaged: tensor {name!r:.100} {problem}. Load another copy, or write the file "
            "again."
        )


def _are_sizes(values: Any) -> bool:
    """Sizes or strides of one tensor, or its offset."""
    if not isinstance(values, list) or len(values) > MAX_DIMENSIONS:
        return False
    return all(type(value) is int and 0 <= value < 1 << 63 for value in values)
