"""Operators that run in several calls, so that less has to be in memory at once.

Operators on lists run in slices of the lists. Elementwise operators run in segments of divided tensors: of
those, each part leaves memory and returns by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from penstock.capture.operators import LIST_PREFIXES, base_name, describe, out_overloads

# A slice takes as much as the largest element alone has to, so that no budget needs more for the others;
# within these bounds, of all tensors of a slice together, those that it makes too.
LEAST_BYTES = {"cpu": 1 << 20, "meta": 1 << 20}  # by kind of device: a kernel of fewer is too short
SLICE_BYTES = 32 << 20
# An accelerator is done with the first as soon as the host has launched the next kernel, or sooner.
ACCELERATOR_LEAST_BYTES, ACCELERATOR_SLICE_BYTES = 64 << 20, 256 << 20
_HOST = ("cpu", "meta")
_nbytes, _dtype_and_device = attrgetter("nbytes"), attrgetter("dtype", "device")

# Weights of so many bytes are divided, and what is as large as one of them: gradients, the optimizer's state.
DIVISIBLE_BYTES = 64 << 20
PART_BYTES = 32 << 20  # each, the last up to twice as many

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
    elements of all lists that takes no more than the largest element, or the least bytes of the kind of
    device, and `SLICE_BYTES` (`ACCELERATOR_SLICE_BYTES`) at most; or it is one element. No budget enters: a
    trace can be planned for any. Single tensors and scalars are the same for each slice. The bits are the
    same.
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
    made = [lists[0]] * len(operator._schema.returns)
    sizes = [sum(map(_nbytes, tensors)) for tensors in zip(*lists, *made, strict=True)]
    bounds = list(slice_bounds(sizes, lists[0][0].device.type))
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


def slice_bounds(sizes: Sequence[int], device_type: str) -> Iterator[tuple[int, int]]:
    """Runs of elements of so many bytes in all lists, as large as a slice may be."""
    least_bytes = LEAST_BYTES.get(device_type, ACCELERATOR_LEAST_BYTES)
    most = min(max(*sizes, least_bytes), SLICE_BYTES if device_type in _HOST else ACCELERATOR_SLICE_BYTES)
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
        tensors[0].device.type in _HOST or len(set(map(_dtype_and_device, tensors))) == 1 for tensors in lists
    )


# -- tensors in segments -----------------------------------------------------------------------


def part_sizes(size_bytes: int) -> list[int]:
    """Bytes of each part of a divided tensor."""
    count = size_bytes // PART_BYTES
    return [PART_BYTES] * (count - 1) + [size_bytes - PART_BYTES * (count - 1)]


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Where the elements of a tensor are in its storage: from the first byte to behind the last one."""
    if tensor.numel() == 0:
        return 0, 0
    itemsize = tensor.element_size()
    begin = int(tensor.storage_offset())
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * itemsize, (begin + last + 1) * itemsize


def run_in_parts(
    operator: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
    is_divided: Callable[[torch.Tensor], bool] | None,
) -> Any:
    """What the operator returns, by as many calls of ``run`` as it takes. The bits are the same.

    run         runs one kernel: (operator, arguments, named arguments)
    is_divided  whether the tensor's storage is; None: none is
    """
    calls = slices(operator, args, kwargs)
    if is_divided is None:
        results = [run(operator, *call) for call in calls or [(args, kwargs)]]
    else:
        results = [_run_segments(operator, *call, run, is_divided) for call in calls or [(args, kwargs)]]
    return results[0] if calls is None else join(operator, results)


_COPIES = ("clone", "_to_copy")
_ROUNDS_TWICE = ("add", "sub")  # in one of the forms, where elements have 16 bits and `alpha` is given
_WIDE = (torch.float32, torch.float64)


def _run_segments(
    operator: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
    is_divided: Callable[[torch.Tensor], bool],
) -> Any:
    """One call for each segment of its tensors, where any of them is divided."""
    whole = _whole_tensors(operator, args, kwargs)
    if not any(map(is_divided, whole)) or "out" in kwargs:
        return run(operator, args, kwargs)
    result = args[0] if operator._schema.returns else None
    if not describe(operator).written:  # it makes its result: another one writes to memory that is made here
        if (made := _writing_form(operator, args, kwargs, whole[0])) is None:
            return run(operator, args, kwargs)
        operator, dtype = made
        of = {"dtype": dtype, "device": whole[0].device}
        written = run(torch.ops.aten.empty.memory_format, (list(whole[0].shape),), of)
        result = [written] if isinstance(args[0], list) else written
        if operator is torch.ops.aten.copy_.default:
            args, kwargs = (written, args[0]), {}
        else:
            kwargs = kwargs | {"out": result}
        whole.append(written)
    itemsize = max(tensor.element_size() for tensor in whole)
    begin = 0
    for size_bytes in part_sizes(whole[0].numel() * itemsize):
        end = begin + size_bytes // itemsize
        given = {name: _segment(value, begin, end) for name, value in kwargs.items()}
        run(operator, tuple(_segment(list(args), begin, end)), given)
        begin = end
    return result


def _whole_tensors(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that have an element for each one of the result; the others are scalars. Empty where the
    operator cannot run in segments."""
    if not describe(operator).is_elementwise or kwargs.get("rounding_mode") is not None:
        return []
    tensors: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, list) and any(isinstance(entry, torch.Tensor) for entry in value):
            if len(value) != 1:
                return []
            tensors += value
    whole = [tensor for tensor in tensors if not _is_scalar(tensor)]
    if not whole or any(
        tensor.layout is not torch.strided or tensor.shape != whole[0].shape or not tensor.is_contiguous()
        for tensor in whole
    ):
        return []
    name = base_name(describe(operator).name)
    if name == "lerp" and len(whole) > 2:  # its weight chooses between two formulas
        return []
    if any(tensor.dtype not in _WIDE for tensor in whole) and (
        name == "_fused_sgd" or (name in _ROUNDS_TWICE and (kwargs.get("alpha", 1) != 1 or len(args) > 2))
    ):
        return []
    return whole


def _segment(value: Any, begin: int, end: int) -> Any:
    """An argument, of its tensors these elements."""
    if isinstance(value, torch.Tensor):
        return value if _is_scalar(value) else value.view(-1)[begin:end]
    return [_segment(entry, begin, end) for entry in value] if isinstance(value, list) else value


def _is_scalar(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 1 and tensor.dim() < 2


def _writing_form(
    operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], first: torch.Tensor
) -> tuple[Any, torch.dtype] | None:
    """The operator that writes the same result to given memory, and the type of the result. None: there is
    none."""
    if describe(operator).name in _COPIES:
        given = {name: value for name, value in kwargs.items() if value is not None}
        dense = (torch.preserve_format, torch.contiguous_format)
        kept = given.pop("memory_format", torch.preserve_format) in dense
        dtype = given.pop("dtype", first.dtype)
        given.pop("non_blocking", None)
        if not kept or given.pop("device", first.device) != first.device or given:
            return None
        return torch.ops.aten.copy_.default, dtype
    overload = next((each for each, name in out_overloads(operator) if name == "out"), None)
    if overload is None:
        return None
    sample = operator(*_segment(list(args), 0, 0), **kwargs)  # of no elements: which type they have
    return overload, (sample[0] if isinstance(sample, list) else sample).dtype
