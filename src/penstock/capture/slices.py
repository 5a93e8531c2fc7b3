"""Operators on lists of tensors, in parts: each needs only its own tensors in memory at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from penstock.capture.operators import LIST_PREFIXES

# A slice takes as much as the largest element alone has to, so that no budget needs more for the others;
# within these bounds, of all tensors of a slice together, those that it makes too.
LEAST_BYTES = 1 << 20  # a kernel of fewer is too short
SLICE_BYTES = 32 << 20

Call = tuple[tuple[Any, ...], dict[str, Any]]


class _Argument(NamedTuple):
    position: int
    name: str
    is_tensors: bool  # a list of tensors; otherwise one scalar for each element, as a list or a tensor


@cache
def _divided(operator: Any) -> tuple[_Argument, ...]:
    """The arguments with one entry for each element, where the operator works element by element: all of
    these names do whose results are lists too. Some also return a tensor that stands for the whole list."""
    schema = getattr(operator, "_schema", None)
    name = str(schema.name).removeprefix("aten::") if schema is not None else ""
    if schema is None or not name.startswith(LIST_PREFIXES):
        return ()
    if any(str(entry.type) != "List[Tensor]" for entry in schema.returns):
        return ()
    found = []
    for position, argument in enumerate(schema.arguments):
        kind = str(argument.type)
        if kind == "List[Tensor]":
            found.append(_Argument(position, argument.name, True))
        elif kind == "List[number]" or argument.name == "scalars":
            found.append(_Argument(position, argument.name, False))
    return tuple(found) if any(argument.is_tensors for argument in found) else ()


def slices(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call] | None:
    """The calls that do the same in parts, in order; None where the operator is called as it is.

    That is so where it is no operator on lists, or all its tensors fit in one slice. A slice is a run of
    elements of all lists that takes no more than the largest element, or `LEAST_BYTES`, and `SLICE_BYTES` at
    most; or it is one element. No budget enters: a trace can be planned for any. Single tensors and scalars
    are the same for each slice. The bits are the same.
    """
    values = {
        argument: value
        for argument in _divided(operator)
        if (value := _value(argument, args, kwargs)) is not None and len(value)
    }
    lists = [value for argument, value in values.items() if argument.is_tensors]
    if not lists or any(len(value) != len(lists[0]) for value in values.values()):
        return None
    # What it returns is new, and as large as the first list, or smaller.
    bounds = list(_bounds(lists + [lists[0]] * len(operator._schema.returns)))
    if len(bounds) == 1 or not _alike(lists):
        return None
    calls: list[Call] = []
    for begin, end in bounds:
        positional, named = list(args), dict(kwargs)
        for argument, value in values.items():
            if argument.position < len(args):
                positional[argument.position] = value[begin:end]
            else:
                named[argument.name] = value[begin:end]
        calls.append((tuple(positional), named))
    return calls


def join(operator: Any, results: Sequence[Any]) -> Any:
    """What ``operator`` returns, from what its slices returned."""
    returns = len(operator._schema.returns)
    if returns == 0:
        return None
    if returns == 1:
        return [tensor for result in results for tensor in result]
    return tuple([tensor for result in results for tensor in result[entry]] for entry in range(returns))


def _value(argument: _Argument, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[argument.position] if argument.position < len(args) else kwargs.get(argument.name)


def _bounds(lists: Sequence[Sequence[torch.Tensor]]) -> Iterator[tuple[int, int]]:
    """Runs of elements, as large as a slice may be."""
    sizes = [
        sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        for tensors in zip(*lists, strict=True)
    ]
    most = min(max(*sizes, LEAST_BYTES), SLICE_BYTES)
    begin, total = 0, 0
    for index, size in enumerate(sizes):
        if index > begin and total + size > most:
            yield begin, index
            begin, total = index, 0
        total += size
    yield begin, len(sizes)


def _alike(lists: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Whether an accelerator takes the same kernels for each slice as for the whole: it takes others where
    types or devices differ within a list."""
    return all(
        tensors[0].device.type in ("cpu", "meta")
        or all(one.dtype == tensors[0].dtype and one.device == tensors[0].device for one in tensors)
        for tensors in lists
    )
