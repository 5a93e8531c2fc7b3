"""Shapes and strides: where the elements of a tensor are. In elements, not bytes, and without torch."""

from __future__ import annotations

from collections.abc import Sequence


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
    step = 1
    for i in _inner_first(shape, stride):
        if stride[i] != step:
            return False
        step *= shape[i]
    return True


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
