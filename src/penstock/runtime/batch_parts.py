"""A batch, and parts of it: tensors by their first dimension, in whatever a program has them in."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch

from penstock.errors import InvalidArgument


def samples(batch: Any) -> int:
    """How many samples a batch has: the first dimension of its tensors. Raises InvalidArgument."""
    sizes = dict.fromkeys(len(leaf) for leaf in _leaves(batch) if _is_array(leaf))
    if not any(isinstance(leaf, torch.Tensor) and leaf.ndim for leaf in _leaves(batch)):
        raise InvalidArgument(
            f"a batch of type {type(batch).__name__} has no tensor to divide: give a tensor, or a tuple, "
            "list, mapping or dataclass of tensors whose first dimension counts samples"
        )
    if len(sizes) > 1:
        raise InvalidArgument(
            f"the tensors of the batch have first dimensions of {' and '.join(map(str, sizes))}: it has to "
            "be the number of samples in all of them. Give what all samples share to the loss in another way"
        )
    (count,) = sizes
    if not count:
        raise InvalidArgument("the batch has no samples: leave empty batches out")
    return count


def parts(batch: Any, size: int) -> Iterator[Any]:
    """Parts of ``size`` samples, of the batch's own type; the last one may be smaller.

    Tensors and arrays are divided by their first dimension, and so are lists of as many other things, such as
    names. What else is in the batch comes with every part. ``part.weight`` is the part's share of samples.
    """
    count = samples(batch)
    for begin in range(0, count, size):
        end = min(begin + size, count)
        yield _part(batch, slice(begin, end), count, weight=(end - begin) / count)


def repeated(batch: Any, size: int) -> Any:
    """A batch of ``size`` samples, of the batch's own type: its own, again and again where they are fewer."""
    count = samples(batch)
    return _part(batch, [sample % count for sample in range(size)], count)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name))
    else:
        yield value


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim > 0


def _part(value: Any, which: slice | list[int], count: int, weight: float | None = None) -> Any:
    """Some of ``count`` samples; with a weight, where one is given."""

    def inner(item: Any) -> Any:
        return _part(item, which, count)

    made: Any
    kind: Any = type(value) if weight is None else _weighted(type(value))  # type: ignore[arg-type]
    if _is_array(value):
        made = value[which]
    elif isinstance(value, tuple):
        made = tuple.__new__(kind, map(inner, value))
    elif isinstance(value, list):
        whole = len(value) == count and not any(map(_is_array, _leaves(value)))
        items = value[which] if isinstance(which, slice) else map(value.__getitem__, which)
        made = kind(items if whole else map(inner, value))
    elif isinstance(value, dict) and not type(value).__dictoffset__:
        made = (dict if weight is None else _weighted(dict))((k, inner(item)) for k, item in value.items())
    elif isinstance(value, Mapping):
        made = copy.copy(value)
        for key, item in value.items():
            made[key] = inner(item)  # type: ignore[index]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = object.__new__(kind)
        for name, item in getattr(value, "__dict__", {}).items():
            object.__setattr__(made, name, item)
        for field in dataclasses.fields(value):
            object.__setattr__(made, field.name, inner(getattr(value, field.name)))
    else:
        made = value
    if weight is not None:
        set_attribute = object.__setattr__ if dataclasses.is_dataclass(made) else setattr
        set_attribute(made, "weight", weight)
    return made


@cache
def _weighted(kind: Any) -> Any:
    """A type like ``kind`` whose instances have room for a weight."""
    fields = getattr(kind, "_fields", ()) or getattr(kind, "__dataclass_fields__", ())
    if "weight" in fields:
        raise InvalidArgument(
            f"batches of type {kind.__name__} have a field `weight`, and `part.weight` is the part's share "
            "of the samples: give the field another name, or batches as a dict"
        )
    if not kind.__dictoffset__:
        return type(kind.__name__, (kind,), {"__module__": kind.__module__})
    return kind
