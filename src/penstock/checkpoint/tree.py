"""How tensors make up a state, as JSON text, and back.

What JSON has stands for itself. All else is an object whose first key begins with ``$``, such as
``{"$tensor": entry, ...}``: docs/formats.md has the table, and `_READERS` the functions.

Nothing is ever executed, and nothing is taken for granted when it is read.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import re
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from penstock.checkpoint.failures import damaged
from penstock.checkpoint.tensors import (
    MAX_DIMENSIONS,
    TORCH_DTYPES,
    Collected,
    Node,
    Rebuilt,
    Stored,
    cannot_save,
    row_major,
)
from penstock.errors import InvalidArgument, InvalidCheckpoint

# Containers in containers: far more than a state has, and far less than Python's stack.
MAX_DEPTH = 64

_INT_LIMIT = 1 << 63
_NUMPY_TYPE = re.compile(r"\|b1|\|[iu]1|[<>][iu][248]|[<>]f[248]|[<>]c(8|16)")


def flatten(state: Any) -> tuple[list[Stored], str]:
    """The entries that ``state`` needs, in its order, and the text that says how they make it up.

    Tensors without gaps are not copied. Raises InvalidArgument for what cannot be saved.
    """
    return _Flattening().run(state)


def unflatten(
    tree: str, tensors: Mapping[str, torch.Tensor], path: str | Path, *, restride: bool = True
) -> Any:
    """The state that `flatten` was given, out of its loaded entries, on whatever devices they are.

    path       of the file, for messages
    restride   False: tensors that had their dimensions in another order are given in order, as views
               of their entries, and nothing is copied; made for entries on the meta device

    Raises InvalidCheckpoint where the text does not describe a state.
    """
    return _Unflattening(tensors, path, restride).run(tree)


class _Flattening:
    def __init__(self) -> None:
        self._tensors = Collected()
        self._dicts: list[tuple[Node, str]] = []  # with the prefix of what is in them
        self._above: set[int] = set()

    def run(self, state: Any) -> tuple[list[Stored], str]:
        try:
            root = self._value(state, "")
        except RecursionError:
            raise InvalidArgument(
                "the state cannot be saved: Python's stack has no room for its containers in containers. "
                "Save a flatter state, or call from less deep a place."
            ) from None
        stored = self._tensors.lay_out()
        for node, prefix in self._dicts:
            _abbreviate(node, prefix)
        return stored, json.dumps(root, separators=(",", ":"), allow_nan=False)

    def _value(self, value: Any, place: str) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if encode := _PLAIN.get(kind):
            return encode(value)
        if isinstance(value, torch.Tensor):
            known = self._tensors.known(value)
            if known is None and (problem := _problem(value)):
                raise cannot_save(place, problem)
            return known or self._tensors.add(value, place)
        if kind is np.ndarray:
            return self._tensors.known(value) or self._array(value, place)
        if isinstance(value, np.generic) and _NUMPY_TYPE.fullmatch(value.dtype.str):
            return {"$numpy": value.dtype.str, "bits": value.tobytes().hex()}
        if kind not in (dict, OrderedDict, list, tuple, torch.Size):
            raise cannot_save(place, f"it is {_typed(kind)}. {_advice(value)}")
        if id(value) in self._above:
            raise cannot_save(place, "it contains itself. Take it out.")
        if len(self._above) == MAX_DEPTH:
            problem = f"it is inside {MAX_DEPTH} others, and there can be no more. Save a flatter state."
            raise cannot_save(place, problem)
        self._above.add(id(value))
        if kind is dict:
            node: Any = self._dict(value, place)
        elif kind is OrderedDict:
            node = self._ordered(value, place)
        else:
            node = [self._value(item, below(place, index)) for index, item in enumerate(value)]
            if kind is not list:
                node = {"$size" if kind is torch.Size else "$tuple": node}
        self._above.remove(id(value))
        return node

    def _dict(self, value: dict[Any, Any], place: str) -> Node:
        if all(type(key) is str and not key.startswith("$") for key in value):
            node = {key: self._value(item, below(place, key)) for key, item in value.items()}
            self._dicts.append((node, below(place, "")))
            return node
        return {
            "$dict": [
                [self._key(key, place), self._value(item, below(place, key))] for key, item in value.items()
            ]
        }

    def _ordered(self, value: OrderedDict[Any, Any], place: str) -> Node:
        node = {"$OrderedDict": self._dict(value, place)}
        attributes = dict(vars(value))
        if "_metadata" in attributes:
            node["_metadata"] = self._value(attributes.pop("_metadata"), below(place, "_metadata"))
        if attributes:
            remedy = "Save OrderedDict(it), and the attributes beside it."
            raise cannot_save(
                place, f"it is an OrderedDict with the attributes {', '.join(attributes)}. {remedy}"
            )
        return node

    def _key(self, key: Any, place: str, depth: int = 0) -> Any:
        kind = type(key)
        if key is None or kind is bool or kind is str:
            return key
        if kind is int or kind is float:
            return _PLAIN[kind](key)
        if kind is tuple and depth < MAX_DEPTH:
            return {"$tuple": [self._key(item, place, depth + 1) for item in key]}
        remedy = "Use str, int, float, bool, None, or tuples of them, not too deep."
        raise cannot_save(place, f"one of its keys is {_typed(kind)}. {remedy}")

    def _array(self, array: np.ndarray[Any, Any], place: str) -> Node:
        if not _NUMPY_TYPE.fullmatch(array.dtype.str):
            raise cannot_save(place, f"it is an array of {array.dtype}. Save numbers, or a list.")
        node: Node = {"$array": "", "dtype": array.dtype.str}
        data = np.asarray(array, order="C")
        if not data.flags.writeable:
            data = data.copy()
        if not data.dtype.isnative:
            data = data[..., np.newaxis].view(np.uint8)
        tensor = torch.from_numpy(data)
        self._tensors.add_as(node, array, tensor.as_strided(tensor.shape, row_major(tensor.shape)), place)
        return node


class _Unflattening:
    def __init__(self, tensors: Mapping[str, torch.Tensor], path: str | Path, restride: bool) -> None:
        self._path = path
        self._tensors = Rebuilt(tensors, path, restride)
        self._depth = 0

    def run(self, tree: str) -> Any:
        try:
            return self._value(
                json.loads(tree, object_pairs_hook=self._unique, parse_constant=self._constant)
            )
        except RecursionError:
            self._fail("it is nested too deeply")
        except InvalidCheckpoint:
            raise
        except ValueError as error:  # not JSON, or more digits than Python reads
            self._fail(f"it is not JSON ({error})")

    def _value(self, node: Any) -> Any:
        if not isinstance(node, list | dict):
            return node
        self._depth += 1
        if self._depth > 2 * MAX_DEPTH + 2:  # an OrderedDict is two
            self._fail("it is nested too deeply")
        if isinstance(node, list):
            value: Any = [self._value(item) for item in node]
        elif (tag := next(iter(node), "")).startswith("$"):
            if tag not in _READERS:
                self._fail(f"{tag!r:.100} is not known to this version of penstock")
            value = _READERS[tag](self, node)
        else:
            value = {key: self._value(item) for key, item in node.items()}
        self._depth -= 1
        return value

    def _tensors_by_name(self, node: Node) -> dict[str, torch.Tensor]:
        names, prefix = self._fields(node, "$tensors", prefix="")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in [prefix, *names]):
            self._fail(f"{node!r:.100} is not a list of tensors")
        if len(set(names)) != len(names):
            self._fail(f"{node!r:.100} has a key twice")
        return {key: self._tensors.entry(prefix + key) for key in names}

    def _array(self, node: Node) -> np.ndarray[Any, Any]:
        name, dtype = self._fields(node, "$array", "dtype")
        return self._tensors.array(name, self._numpy_type(dtype))

    def _dict(self, node: Node) -> dict[Any, Any]:
        value: dict[Any, Any] = {}
        for item in self._items(node):
            if not isinstance(item, list) or len(item) != 2:
                self._fail(f"{item!r:.100} is not a key with a value")
            key = self._key(item[0])
            if key in value:
                self._fail(f"the key {key!r:.100} is there twice")
            value[key] = self._value(item[1])
        return value

    def _key(self, node: Any, depth: int = 0) -> Any:
        if isinstance(node, dict) and "$tuple" in node:
            if depth == MAX_DEPTH:
                self._fail("one of its keys is nested too deeply")
            return tuple(self._key(item, depth + 1) for item in self._items(node))
        key = self._value(node)
        if key is not None and type(key) not in (bool, str, int, float):
            self._fail(f"{node!r:.100} is not a key")
        return key

    def _ordered(self, node: Node) -> OrderedDict[Any, Any]:
        items, attribute = self._fields(node, "$OrderedDict", _metadata=_ABSENT)
        items = self._value(items)
        if type(items) is not dict:
            self._fail(f"{node!r:.100} is not an OrderedDict")
        value = OrderedDict(items)
        if attribute is not _ABSENT:
            value._metadata = self._value(attribute)  # type: ignore[attr-defined]
        return value

    def _tuple(self, node: Node) -> tuple[Any, ...]:
        return tuple(self._value(item) for item in self._items(node))

    def _size(self, node: Node) -> torch.Size:
        items = self._items(node)
        if not all(type(item) is int and abs(item) < _INT_LIMIT for item in items):
            self._fail(f"{node!r:.100} is not a size")
        return torch.Size(items)

    def _complex(self, node: Node) -> complex:
        parts = [self._value(part) for part in self._items(node)]
        if len(parts) != 2 or not all(type(part) is float for part in parts):
            self._fail(f"{node!r:.100} is not a complex number")
        return complex(*parts)

    def _scalar(self, node: Node) -> Any:
        name, bits = self._fields(node, "$numpy", "bits")
        dtype = self._numpy_type(name)
        if not isinstance(bits, str) or not re.fullmatch(f"[0-9a-f]{{{2 * dtype.itemsize}}}", bits):
            self._fail(f"{node!r:.100} is not a number of numpy")
        return np.frombuffer(bytes.fromhex(bits), dtype)[0]

    def _text(self, node: Node) -> Any:
        """What a text says that is all there is."""
        pattern, what, read = _TEXTS[tag := next(iter(node))]
        (text,) = self._fields(node, tag)
        if isinstance(text, str) and re.fullmatch(pattern, text):
            with contextlib.suppress(RuntimeError, ValueError):
                return read(text)
        self._fail(f"{node!r:.100} is not {what}")

    def _numpy_type(self, name: object) -> np.dtype[Any]:
        if not isinstance(name, str) or not _NUMPY_TYPE.fullmatch(name):
            self._fail(f"{name!r:.100} is not a type of numpy")
        return np.dtype(name)

    def _items(self, node: Node) -> list[Any]:
        """The list that is all there is."""
        (items,) = self._fields(node, next(iter(node)))
        if not isinstance(items, list):
            self._fail(f"{items!r:.100} is not a list")
        return items

    def _fields(self, node: Node, *required: str, **optional: Any) -> list[Any]:
        """The values of fields, if they are all that there is."""
        if not set(required) <= set(node) <= {*required, *optional}:
            self._fail(f"{node!r:.100} does not have the fields {', '.join([*required, *optional])}")
        return [node[name] for name in required] + [node.get(name, value) for name, value in optional.items()]

    def _unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        node = dict(pairs)
        if len(node) != len(pairs):
            self._fail("a key is there twice")
        return node

    def _constant(self, text: str) -> NoReturn:
        self._fail(f"{text} is not JSON")

    def _fail(self, problem: str) -> NoReturn:
        raise damaged(self._path, f"the tree of its state cannot be read, {problem}")


_ABSENT: Any = object()

# By tag, what a text has to match, what it is, and how it is read.
_TEXTS: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    "$float": ("[0-9a-f]{16}", "a float", lambda text: struct.unpack(">d", bytes.fromhex(text))[0]),
    "$int": ("-?[0-9a-f]+", "an int", lambda text: int(text, 16)),
    "$bytes": (".*", "bytes", lambda text: base64.b64decode(text, validate=True)),
    "$dtype": ("|".join(TORCH_DTYPES), "a type of this torch", TORCH_DTYPES.__getitem__),
    "$device": (".*", "a device of this torch", torch.device),
}

_READERS: dict[str, Callable[[_Unflattening, Node], Any]] = {
    "$tensor": lambda reading, node: reading._tensors.tensor(node),
    "$parameter": lambda reading, node: reading._tensors.tensor(node),
    "$tensors": _Unflattening._tensors_by_name,
    "$array": _Unflattening._array,
    "$dict": _Unflattening._dict,
    "$OrderedDict": _Unflattening._ordered,
    "$tuple": _Unflattening._tuple,
    "$size": _Unflattening._size,
    "$complex": _Unflattening._complex,
    "$numpy": _Unflattening._scalar,
    **dict.fromkeys(_TEXTS, _Unflattening._text),
}


def _plain_float(value: float) -> Any:
    return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}


_PLAIN: dict[type, Callable[[Any], Any]] = {
    int: lambda value: value if -_INT_LIMIT <= value < _INT_LIMIT else {"$int": f"{value:x}"},
    float: _plain_float,
    complex: lambda value: {"$complex": [_plain_float(value.real), _plain_float(value.imag)]},
    bytes: lambda value: {"$bytes": base64.b64encode(value).decode()},
    torch.dtype: lambda value: {"$dtype": str(value).removeprefix("torch.")},
    torch.device: lambda value: {"$device": str(value)},
}


def _abbreviate(node: Node, prefix: str) -> None:
    """Say only the names of a dict's tensors, where nothing else is to be said."""
    if node and all(value == {"$tensor": prefix + key} for key, value in node.items()):
        keys = list(node)
        node.clear()
        node["$tensors"] = keys
        if prefix:
            node["prefix"] = prefix


def below(place: str, key: object) -> str:
    return f"{place}.{key}" if place else str(key)


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


def _typed(kind: type) -> str:
    return f"of type {kind.__module__}.{kind.__qualname__}"


def _advice(value: Any) -> str:
    if hasattr(value, "state_dict"):
        return "Save its state_dict()."
    for plain in (dict, list, tuple, str, int, float, bytes):
        if isinstance(value, plain):
            return f"Save {plain.__name__}(it)."
    return "Save tensors, numpy arrays, numbers, texts, and dicts, lists and tuples of them."
