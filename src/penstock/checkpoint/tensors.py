"""The tensors of a state: to entries of a file, and back to views of loaded entries.

Tensors whose memory overlaps share one entry. Where one of them is the whole of it, the entry has its type
and shape, else the entry is the bare range that they cover. A tensor that shares with none is written
alone, whatever else its storage holds, element by element in the order of its dimensions, as the
safetensors library has it; the tree says what its strides were. Parts of one storage that do not overlap
are tensors by themselves: other readers find them by name, and what lies between them is not written.

The tree that is read is not trusted: every view is checked to lie inside its entry.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from penstock.checkpoint.failures import damaged
from penstock.errors import InvalidArgument

# What the tree says of one tensor.
Node = dict[str, Any]

# By safetensors' name, torch's type.
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F4": torch.float4_e2m1fn_x2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
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

_SAFETENSORS_NAMES = {dtype: name for name, dtype in DTYPES.items()}


# -- to entries -------------------------------------------------------------------------------


class Stored(NamedTuple):
    """One entry to be written.

    name     the dotted path of the first place at which its tensor is, made unique
    dtype    safetensors' name; U8 with one more dimension for a type that safetensors does not have
    shape    of the entry
    tensor   row by row and without gaps, on any device: its bytes are the entry's
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    tensor: torch.Tensor


class _Use(NamedTuple):
    """A tensor of the state.

    number       in the order of the state
    begin, end   the bytes of its storage from its first element to its last, half-open
    """

    number: int
    place: str
    tensor: torch.Tensor
    node: Node
    begin: int
    end: int

    @property
    def geometry(self) -> tuple[Any, ...]:
        return self.begin, self.tensor.dtype, self.tensor.shape, self.tensor.stride()


class Collected:
    """The tensors of a state, laid out together once all are known."""

    def __init__(self) -> None:
        self._uses: list[_Use] = []
        self._nodes: dict[int, tuple[Node, object]] = {}  # by id of the value, which must stay

    def known(self, value: object) -> Node | None:
        """The node of ``value``, if it was added: one object has one node."""
        return self._nodes.get(id(value), (None, None))[0]

    def add(self, tensor: torch.Tensor, place: str) -> Node:
        """The node for ``tensor``, complete after `lay_out`."""
        is_parameter = type(tensor) is torch.nn.Parameter
        node: Node = {"$parameter" if is_parameter else "$tensor": ""}
        if tensor.requires_grad != is_parameter:
            node["requires_grad"] = tensor.requires_grad
        self.add_as(node, tensor, tensor.detach().resolve_conj().resolve_neg(), place)
        return node

    def add_as(self, node: Node, value: object, tensor: torch.Tensor, place: str) -> None:
        """Store ``tensor``, which holds ``value``, and let `lay_out` complete ``node``.

        Raises InvalidArgument where the memory of ``tensor`` is gone.
        """
        begin = tensor.storage_offset() * tensor.itemsize
        end = begin + reach(tensor.shape, tensor.stride()) * tensor.itemsize
        held = tensor.untyped_storage().nbytes()
        if end > held and end > begin:
            remedy = "Bring its data back first, for instance by gathering sharded parameters."
            raise cannot_save(
                place, f"it needs {end} bytes of its storage, which was resized to {held}. {remedy}"
            )
        self._uses.append(_Use(len(self._uses), place, tensor, node, begin, end))
        self._nodes[id(value)] = node, value

    def lay_out(self) -> list[Stored]:
        """The entries, in the order of the state. Completes all nodes.

        Tensors that have gaps, or their dimensions in another order, are copied.
        """
        with torch.no_grad():
            laid_out = [
                (uses, *(_together(uses) if len({use.geometry for use in uses}) > 1 else _alone(uses)))
                for uses in self._sharing()
            ]
        taken = {"__metadata__": 1}
        stored = []
        for uses, owner, data in sorted(laid_out, key=lambda one: one[1].number):
            stored.append(_stored(_unique(owner.place, taken), data, owner.place))
            _complete(uses, stored[-1])
        return stored

    def _sharing(self) -> Iterator[list[_Use]]:
        """Groups of tensors whose memory overlaps, each in the order of the state."""
        storages: dict[int, list[_Use]] = {}
        for use in self._uses:
            if use.begin == use.end:
                yield [use]
            else:
                storages.setdefault(use.tensor.untyped_storage()._cdata, []).append(use)
        for uses in storages.values():
            group: list[_Use] = []
            end = 0
            for use in sorted(uses, key=lambda use: use.begin):
                if group and use.begin >= end:
                    yield sorted(group)
                    group = []
                group.append(use)
                end = max(end, use.end)
            yield sorted(group)


def cannot_save(place: str, problem: str) -> InvalidArgument:
    """What to raise for something in the state."""
    return InvalidArgument(f"{repr(place) if place else 'the state'} cannot be saved: {problem}")


def _unique(place: str, taken: dict[str, int]) -> str:
    """A name for an entry, none of those that are taken, by how often each was wanted."""
    # Half a surrogate pair is not allowed in the format.
    name = wanted = place.encode("utf-8", "backslashreplace").decode() or "tensor"
    while name in taken:
        taken[wanted] += 1
        name = f"{wanted}#{taken[wanted]}"
    taken[name] = 1
    return name


def _alone(uses: Sequence[_Use]) -> tuple[_Use, torch.Tensor]:
    """One tensor, be it in several places: only its elements are stored."""
    use = uses[0]
    tensor = core = use.tensor
    for dimension, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if step == 0 and size > 1:
            core = core.narrow(dimension, 0, 1)
    shape, stride = core.shape, core.stride()
    is_expanded = shape != tensor.shape
    if core.is_contiguous():
        if is_expanded or stride != row_major(shape):
            _describe_views(uses, use.begin)
        return use, core
    if not is_spread(shape, stride) or (is_expanded and is_dense(shape, stride)):
        data, begin = _range(tensor, tensor.dtype, use.begin, use.end)
        _describe_views(uses, begin)
        return use, data
    view: Node = {}
    if is_expanded:
        expanded = zip(tensor.stride(), row_major(shape), strict=True)
        strides = [0 if step == 0 else new for step, new in expanded]
        view = {"shape": list(tensor.shape), "stride": strides, "offset": 0}
    elif (kept := dense(shape, stride)) != row_major(shape):
        view = {"stride": list(kept)}
    for each in uses:
        each.node.update(view)
    data = core.view(torch.uint8) if core.itemsize == 1 else core  # torch cannot copy some types of one byte
    return use, data.contiguous().view(core.dtype)


def _together(uses: Sequence[_Use]) -> tuple[_Use, torch.Tensor]:
    """Several views of the same memory: the range that they cover is stored."""
    begin, end = min(use.begin for use in uses), max(use.end for use in uses)
    for owner in uses:
        whole = owner.tensor
        if (owner.begin, owner.end) == (begin, end) and whole.is_contiguous():
            natural = begin, whole.dtype, whole.shape, row_major(whole.shape)
            _describe_views([use for use in uses if use.geometry != natural], begin)
            return owner, whole
    dtype = max((use.tensor.dtype for use in uses), key=lambda dtype: dtype.itemsize)
    data, begin = _range(uses[0].tensor, dtype, begin, end)
    _describe_views(uses, begin)
    return uses[0], data


def _range(tensor: torch.Tensor, dtype: torch.dtype, begin: int, end: int) -> tuple[torch.Tensor, int]:
    """The bytes [begin, end) of a tensor's storage, and where they begin: whole elements of ``dtype``."""
    storage, size = tensor.untyped_storage(), dtype.itemsize
    begin, end = begin // size * size, -(-end // size) * size
    empty = torch.empty(0, dtype=dtype, device=tensor.device)
    if end <= storage.nbytes():
        return empty.set_(storage, begin // size, ((end - begin) // size,), (1,)), begin
    there = storage.nbytes() - begin
    padded = torch.zeros(end - begin, dtype=torch.uint8, device=tensor.device)
    padded[:there] = empty.view(torch.uint8).set_(storage, begin, (there,), (1,))
    return padded.view(dtype), begin


def _describe_views(uses: Sequence[_Use], begin: int) -> None:
    """Say in the nodes which elements they are, of data that begins at byte ``begin`` of the storage."""
    for use in uses:
        offset = (use.begin - begin) // use.tensor.itemsize
        use.node.update(shape=list(use.tensor.shape), stride=list(use.tensor.stride()), offset=offset)


def _stored(name: str, data: torch.Tensor, place: str) -> Stored:
    dtype, shape = _SAFETENSORS_NAMES.get(data.dtype), tuple(data.shape)
    if dtype is None or (dtype == "F4" and not shape):  # F4 is in pairs along the last dimension
        dtype, shape = "U8", shape if data.itemsize == 1 else (*shape, data.itemsize)
    if len(shape) > MAX_DIMENSIONS:
        taken = f"{data.dtype} of {data.dim()} dimensions takes {len(shape)} in the file"
        raise cannot_save(place, f"{taken}, and {MAX_DIMENSIONS} are possible. Save a reshaped tensor.")
    # A dimension of one element may have any stride.
    return Stored(name, dtype, shape, data.as_strided(data.shape, row_major(data.shape)))


def _complete(uses: Sequence[_Use], entry: Stored) -> None:
    """Name the entry in the nodes, and number equal views that are different tensor objects."""
    seen: dict[str, int] = {}
    for use in uses:
        use.node[next(iter(use.node))] = entry.name
        if "$array" in use.node:
            continue
        if use.tensor.dtype != DTYPES[entry.dtype]:
            use.node["dtype"] = str(use.tensor.dtype).removeprefix("torch.")
        if len(uses) > 1:
            described = repr(use.node)
            seen[described] = seen.get(described, 0) + 1
            if seen[described] > 1:
                use.node["alias"] = seen[described]


# -- from entries -----------------------------------------------------------------------------


class Rebuilt:
    """The tensors of a state, out of its entries by name, which have no gaps.

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
        """The entry of this name. Raises InvalidCheckpoint."""
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
        if (same := f"{name} {dtype.str}") in self._arrays:
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
        if not all(map(_are_sizes, (shape, stride, [offset]))) or len(stride) != len(shape):
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
        raise damaged(self._path, f"tensor {name!r:.100} {problem}")


def _are_sizes(values: Any) -> bool:
    """Sizes or strides of one tensor, or its offset."""
    if not isinstance(values, list) or len(values) > MAX_DIMENSIONS:
        return False
    return all(type(value) is int and 0 <= value < 1 << 63 for value in values)


# -- shapes and strides, in elements ----------------------------------------------------------


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides that torch gives to a new tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def reach(shape: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements of memory the tensor spans, from its first to its last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def is_spread(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """No two elements are at one place, as each step goes beyond all that smaller steps reach."""
    reached = 0
    for i in _inner_first(shape, stride):
        if stride[i] <= reached:
            return False
        reached += (shape[i] - 1) * stride[i]
    return True


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """There are no gaps, in whatever order the dimensions are."""
    spanned = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True) if size > 1)
    return is_spread(shape, stride) and spanned == math.prod(size for size in shape if size > 1)


def dense(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps that keep the order of the dimensions."""
    if is_dense(shape, stride):
        return tuple(stride)
    strides, step = list(row_major(shape)), 1
    for i in _inner_first(shape, stride):
        strides[i] = step
        step *= shape[i]
    return tuple(strides)


def _inner_first(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Dimensions with more than one element, the closest elements first."""
    return sorted((i for i, size in enumerate(shape) if size > 1), key=lambda i: stride[i])
