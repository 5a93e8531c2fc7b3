"""States to be saved: drawn at random, passed through a file in memory, and compared to the bit."""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from safetensors import deserialize

from penstock.checkpoint.header import TensorEntry, decode, encode, header_bytes
from penstock.checkpoint.tensors import DTYPES, Stored
from penstock.checkpoint.tree import flatten, unflatten

FILE = "runs/last.safetensors"

TYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu),
    *(torch.complex128, torch.complex64, torch.complex32, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool, torch.float4_e2m1fn_x2, torch.uint4),
]


def file_of(stored: list[Stored], tree: str | None) -> bytes:
    """A whole file, in another order than the state's. The safetensors library reads it."""
    entries, data = [], b""
    for item in reversed(stored):
        assert (
            item.tensor.is_contiguous() and len(item.tensor.view(-1).view(torch.uint8)) == item.tensor.nbytes
        )
        content = raw(item.tensor)
        entries.append(TensorEntry(item.name, item.dtype, item.shape, len(data), len(data) + len(content)))
        data += content
    file = encode(entries, tree=tree) + data
    assert {name for name, _ in deserialize(file)} == {item.name for item in stored}
    return file


def loaded(file: bytes) -> tuple[dict[str, torch.Tensor], str | None]:
    """The entries, and the tree."""
    length = header_bytes(file[:8], len(file), FILE)
    header = decode(file[:length], len(file), FILE)
    tensors = {}
    for entry in header.entries:
        content = bytearray(file[length + entry.begin : length + entry.end])
        data = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        tensors[entry.name] = data.view(DTYPES[entry.dtype]).view(entry.shape)
    return tensors, header.tree


def through_a_file(state: Any) -> Any:
    tensors, tree = loaded(file_of(*flatten(state)))
    assert tree is not None
    return unflatten(tree, tensors, FILE)


def raw(tensor: torch.Tensor) -> bytes:
    """The elements of ``tensor`` in the order of its dimensions."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.itemsize == 1:
        plain = plain.view(torch.uint8)  # torch cannot copy some types of one byte
    copy = torch.empty(plain.shape, dtype=plain.dtype).copy_(plain)
    return copy.view(-1).view(torch.uint8).numpy().tobytes()


def tensors_of(state: Any) -> Iterator[torch.Tensor]:
    """All tensors, in order, one that is at two places twice."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from tensors_of(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from tensors_of(value)


def assert_same(saved: Any, found: Any) -> None:
    """Both have the same types, order and bits; strides are `assert_same_memory`'s."""
    assert type(found) is type(saved), (saved, found)
    if isinstance(saved, torch.Tensor):
        assert (found.dtype, found.shape, found.requires_grad) == (
            saved.dtype,
            saved.shape,
            saved.requires_grad,
        )
        assert raw(found) == raw(saved)
    elif isinstance(saved, np.ndarray | np.generic):
        assert (found.dtype, found.shape, found.tobytes()) == (saved.dtype, saved.shape, saved.tobytes())
    elif isinstance(saved, dict):
        for (key, value), (found_key, found_value) in zip(saved.items(), found.items(), strict=True):
            assert_same(key, found_key)
            assert_same(value, found_value)
    elif isinstance(saved, list | tuple):
        for value, found_value in zip(saved, found, strict=True):
            assert_same(value, found_value)
    elif isinstance(saved, float):
        assert struct.pack("<d", found) == struct.pack("<d", saved)
    elif isinstance(saved, complex):
        assert struct.pack("<dd", found.real, found.imag) == struct.pack("<dd", saved.real, saved.imag)
    else:
        assert found == saved


def reach_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the bytes from the first element to the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not one.numel() or not other.numel():
        return False
    (begin, end), (other_begin, other_end) = reach_of(one), reach_of(other)
    return begin < other_end and other_begin < end


def assert_same_memory(saved: list[torch.Tensor], found: list[torch.Tensor]) -> None:
    """What overlapped overlaps in the same manner, what was apart is apart, and strides are kept.

    Only gaps that nothing else looks into are closed.
    """
    for i, one in enumerate(saved):
        beside = [other for other in saved if overlap(one, other)]
        if found[i].stride() != one.stride():
            assert has_gaps(one) and all(other.stride() == one.stride() for other in beside)
            assert not has_gaps(found[i])
            assert inner_first(found[i]) == inner_first(one)
        for j, other in enumerate(saved):
            assert (found[i] is found[j]) == (one is other)
            assert overlap(found[i], found[j]) == overlap(one, other)
            if overlap(one, other):
                assert found[j].data_ptr() - found[i].data_ptr() == other.data_ptr() - one.data_ptr()
                assert found[j].untyped_storage().data_ptr() == found[i].untyped_storage().data_ptr()


def has_gaps(tensor: torch.Tensor) -> bool:
    begin, end = reach_of(tensor)
    once = math.prod(
        size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or size == 0
    )
    return end - begin > once * tensor.itemsize


def inner_first(tensor: torch.Tensor) -> list[int]:
    """Dimensions by stride; those of one element anywhere count for nothing."""
    strides = tensor.stride()
    return sorted((i for i, size in enumerate(tensor.shape) if size > 1), key=lambda i: strides[i])


# Strategies.

texts = st.text(st.characters(exclude_categories=()), max_size=6) | st.sampled_from(
    ["a", "b", "a.b", "$tensor", "$", "__metadata__", "", "a#2"]
)
floats = st.floats() | st.binary(min_size=8, max_size=8).map(lambda bits: struct.unpack("<d", bits)[0])
integers = st.integers() | st.integers(-(1 << 200), 1 << 200) | st.sampled_from([2**63, -(2**63), 2**63 - 1])
numpy_types = st.sampled_from("?bBhHiIlLefdFD").flatmap(
    lambda code: st.sampled_from("<>").map(lambda order: np.dtype(code).newbyteorder(order))
)
scalars = st.one_of(
    *(st.none(), st.booleans(), integers, floats, texts, st.binary(max_size=9)),
    *(
        st.complex_numbers(),
        st.sampled_from([*TYPES, torch.qint8]),
        st.builds(torch.Size, st.lists(st.integers(0, 9))),
    ),
    st.sampled_from([torch.device("cpu"), torch.device("cuda:3"), torch.device("meta")]),
    st.builds(
        lambda dtype, bits: np.frombuffer(bits, dtype, 1)[0], numpy_types, st.binary(min_size=16, max_size=16)
    ),
)
keys = st.recursive(
    st.none() | st.booleans() | integers | floats | texts,
    lambda key: st.lists(key, max_size=2).map(tuple),
    max_leaves=3,
)
arrays = st.builds(
    lambda dtype, bits, columns: np.frombuffer(bits, dtype, 12).reshape(3, 4)[:, :columns],
    *(numpy_types, st.binary(min_size=192, max_size=192), st.sampled_from([0, 2, 4])),
)


class Pool(list[torch.Tensor]):
    """Tensors that can be shown, whatever their type."""

    def __repr__(self) -> str:
        shown = (f"{t.dtype} {tuple(t.shape)} {t.stride()} at {t.data_ptr():#x}" for t in self)
        return f"Pool({', '.join(shown)})"


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    """Tensors, many of which are views of the same few storages."""
    tensors = Pool()
    for _ in range(draw(st.integers(1, 3))):
        shape = draw(st.lists(st.integers(0, 4), max_size=4))
        dtype = draw(st.sampled_from(TYPES))
        seed = draw(st.integers(0, 99))
        bits = torch.randint(
            0,
            2 if dtype == torch.bool else 256,
            (math.prod(shape) * dtype.itemsize,),
            dtype=torch.uint8,
            generator=torch.Generator().manual_seed(seed),
        )
        tensors.append(bits.view(dtype).view(shape))
    for _ in range(draw(st.integers(0, 6))):
        tensors.append(draw(views(tensors[draw(st.integers(0, len(tensors) - 1))])))
    return tensors


@st.composite
def views(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    """Another view of the storage of ``tensor``."""
    kind = draw(
        st.sampled_from(
            ["same", "permute", "part", "step", "expand", "unsqueeze", "type", "strided", "parameter"]
        )
    )
    dimension = draw(st.integers(0, max(tensor.dim() - 1, 0)))
    size = tensor.shape[dimension] if tensor.dim() else 0
    if kind == "permute":
        return tensor.permute(draw(st.permutations(range(tensor.dim()))))
    if kind == "part" and size:
        begin = draw(st.integers(0, size - 1))
        return tensor.narrow(dimension, begin, draw(st.integers(0, size - begin)))
    if kind == "step" and size:
        return tensor[(slice(None),) * dimension + (slice(None, None, 2),)]
    if kind == "expand":
        return tensor.unsqueeze(dimension).expand(*tensor.shape[:dimension], 3, *tensor.shape[dimension:])
    if kind == "unsqueeze":
        return tensor.unsqueeze(dimension)
    if kind == "type" and tensor.dim() and tensor.stride(-1) == 1 and tensor.is_contiguous():
        return tensor.view(torch.uint8)
    if kind == "strided" and tensor.is_contiguous() and tensor.numel() > 3:
        return tensor.as_strided((2, 2), (1, 2 if draw(st.booleans()) else 1), tensor.storage_offset())
    if kind == "parameter":
        can = tensor.is_floating_point() and tensor.itemsize > 1
        return torch.nn.Parameter(tensor.detach(), requires_grad=can and draw(st.booleans()))
    return tensor.detach()


@st.composite
def states(draw: st.DrawFn) -> Any:
    pool = draw(pools())
    leaves = scalars | st.integers(0, len(pool) - 1).map(lambda index: pool[index]) | arrays
    return draw(
        st.recursive(
            leaves,
            lambda inner: st.one_of(
                st.lists(inner, max_size=4),
                st.lists(inner, max_size=4).map(tuple),
                st.dictionaries(texts, inner, max_size=4),
                st.dictionaries(keys, inner, max_size=3),
                st.dictionaries(texts, inner, max_size=3).map(OrderedDict),
            ),
            max_leaves=12,
        )
    )
