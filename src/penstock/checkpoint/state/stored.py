"""From tensors to entries of a file: which bytes a state needs, each once.

Tensors whose memory overlaps share one entry. Where one of them is the whole of it, the entry has its type
and shape, else the entry is the bare range that they cover. A tensor that shares with none is written
alone, whatever else its storage holds, element by element in the order of its dimensions, as the
safetensors library has it; the tree says what its strides were. Parts of one storage that do not overlap
are tensors by themselves: other readers find them by name, and what lies between them is not written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from penstock.checkpoint.state.strides import dense, is_dense, is_spread, reach, row_major
from penstock.checkpoint.state.views import DTYPES, MAX_DIMENSIONS, Node
from penstock.errors import InvalidArgument

_SAFETENSORS_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_RESERVED_NAMES = ("__metadata__",)


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
    node         what the tree says of it, completed when entries are laid out
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
        self._nodes: dict[int, Node] = {}
        self._kept: list[object] = []  # what is known by its id must stay

    def known(self, value: object) -> Node | None:
        """The node of ``value``, if it was added: one object has one node."""
        return self._nodes.get(id(value))

    def add(self, tensor: torch.Tensor, place: str) -> Node:
        """The node for ``tensor``, complete after `lay_out`.

        Raises InvalidArgument for a tensor that cannot be saved.
        """
        if problem := _problem(tensor):
            raise InvalidArgument(f"{shown(place)} cannot be saved: {problem}")
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
            raise InvalidArgument(
                f"{shown(place)} cannot be saved: it needs {end} bytes of its storage, which was "
                f"resized to {held}. Bring its data back first, for instance by gathering sharded parameters."
            )
        self._uses.append(_Use(len(self._uses), place, tensor, node, begin, end))
        self._nodes[id(value)] = node
        self._kept.append(value)

    def lay_out(self) -> list[Stored]:
        """The entries, in the order of the state. Completes all nodes.

        Tensors that have gaps, or their dimensions in another order, are copied.
        """
        with torch.no_grad():
            laid_out = [
                (uses, *(_together(uses) if len({use.geometry for use in uses}) > 1 else _alone(uses)))
                for uses in self._sharing()
            ]
        laid_out.sort(key=lambda one: one[1].number)
        names = _Names()
        stored = []
        for uses, owner, data in laid_out:
            entry = _stored(names.unique(owner.place), data, owner.place)
            _complete(uses, entry)
            stored.append(entry)
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


def shown(place: str) -> str:
    """Where in the state something is, for messages."""
    return repr(place) if place else "the state"


class _Names:
    """Names of entries, none of them twice."""

    def __init__(self) -> None:
        self._taken = set(_RESERVED_NAMES)
        self._next: dict[str, int] = {}

    def unique(self, place: str) -> str:
        # Half a surrogate pair is not allowed in the format.
        wanted = place.encode("utf-8", "backslashreplace").decode() or "tensor"
        name = wanted
        while name in self._taken:
            number = self._next[wanted] = self._next.get(wanted, 1) + 1
            name = f"{wanted}#{number}"
        self._taken.add(name)
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
    for node in (each.node for each in uses):
        if is_expanded:
            expanded = zip(tensor.stride(), row_major(shape), strict=True)
            node["shape"] = list(tensor.shape)
            node["stride"] = [0 if step == 0 else new for step, new in expanded]
            node["offset"] = 0
        elif (kept := dense(shape, stride)) != row_major(shape):
            node["stride"] = list(kept)
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
        use.node["shape"] = list(use.tensor.shape)
        use.node["stride"] = list(use.tensor.stride())
        use.node["offset"] = (use.begin - begin) // use.tensor.itemsize


def _stored(name: str, data: torch.Tensor, place: str) -> Stored:
    dtype, shape = _SAFETENSORS_NAMES.get(data.dtype), tuple(data.shape)
    if dtype is None or (dtype == "F4" and not shape):  # F4 is in pairs along the last dimension
        dtype, shape = "U8", shape if data.itemsize == 1 else (*shape, data.itemsize)
    if len(shape) > MAX_DIMENSIONS:
        raise InvalidArgument(
            f"{shown(place)} cannot be saved: {data.dtype} of {data.dim()} dimensions takes "
            f"{len(shape)} in the file, and {MAX_DIMENSIONS} are possible. Save a reshaped tensor."
        )
    # A dimension of one element may have any stride.
    return Stored(name, dtype, shape, data.as_strided(data.shape, row_major(data.shape)))


def _complete(uses: Sequence[_Use], entry: Stored) -> None:
    """Name the entry in the nodes, and tell tensors apart that look the same and are not one object."""
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


def _problem(tensor: torch.Tensor) -> str | None:
    """Why ``tensor`` cannot be saved, and what can be."""
    kind = type(tensor).__name__
    if kind == "FakeTensor" or tensor.is_meta:
        return "it has no data. Give it some first (Module.to_empty, or build it outside of a fake mode)."
    if tensor.is_nested:
        return "it is a nested tensor. Save list(tensor.unbind()), or to_padded_tensor()."
    if kind == "DTensor":
        return (
            "it is a DTensor, whose parts lie in several processes. Save the state with "
            "torch.distributed.checkpoint and penstock.checkpoint.dcp.Writer, each process its part; or save "
            "full_tensor()."
        )
    if kind.startswith("Uninitialized"):
        return "it is not initialized yet. Run the model once first."
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"it is a tensor of class {kind}. Save the plain tensors that it is made of."
    if tensor.is_quantized:
        return "it is quantized. Save dequantize(), or int_repr() with q_scale() and q_zero_point()."
    if tensor.layout != torch.strided:
        return f"its layout is {tensor.layout}. Save to_dense()."
    if tensor.dim() > MAX_DIMENSIONS:
        return f"it has {tensor.dim()} dimensions, and {MAX_DIMENSIONS} are possible. Save a reshaped tensor."
    try:
        tensor.untyped_storage()
    except (RuntimeError, NotImplementedError) as error:
        return f"it has no storage ({error}). Save it outside of torch.func transforms."
    return None
