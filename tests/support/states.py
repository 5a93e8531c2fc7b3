"""States to be saved, and whether two of them are the same to the bit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from tests.support.families import FAMILIES, iterate


def trained_gpt(make_optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> dict[str, Any]:
    """Weights and optimizer state after two steps, and what else a training script keeps."""
    torch.manual_seed(3)
    model = FAMILIES["gpt"].make()
    optimizer = make_optimizer(model.parameters(), lr=0.01, **options)
    for step in range(2):
        iterate(model, optimizer, step)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2, "loss": 0.1}


def numbers(count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Random bits, also such as are no numbers."""
    data = torch.randint(0, 256, (count * dtype.itemsize,), generator=torch.Generator().manual_seed(seed))
    return data.to(torch.uint8).view(dtype)


def _views() -> dict[str, Any]:
    base = numbers(24, torch.int32).view(4, 6)
    return {
        "base": base,
        "transposed": base.t(),
        "row": base[1],
        "again": {"base": base},
        "part": base[1:, 2:4],
    }


def _many_types() -> dict[str, torch.Tensor]:
    types = (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.complex64,
    )
    types += (torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    return {str(dtype): numbers(33, dtype) for dtype in types} | {"bool": torch.tensor([True, False, True])}


STATES: dict[str, Callable[[], Any]] = {
    "nothing": dict,
    "one number": lambda: 3,
    "one tensor": lambda: numbers(1000),
    "weights": lambda: trained_gpt(torch.optim.SGD)["model"],
    "tied weights": lambda: FAMILIES["tied_embeddings"].make().state_dict(),
    "adam": lambda: trained_gpt(torch.optim.Adam),
    "adamw": lambda: trained_gpt(torch.optim.AdamW, amsgrad=True),
    "sgd": lambda: trained_gpt(torch.optim.SGD, momentum=0.9),
    "batch norm": lambda: FAMILIES["cnn"].make().state_dict(),
    "lists": lambda: [1, (2.5, None, "text"), {"a": [True, torch.ones(2)]}, b"bytes", float("inf")],
    "ordered": lambda: OrderedDict([("z", torch.ones(3)), ("a", torch.zeros(2)), ("m", OrderedDict(b=1))]),
    "empty tensors": lambda: {
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(2.0),
        "one": torch.ones(1, 1),
        "byte": torch.tensor(True),
    },
    "views": _views,
    "strides": lambda: {"last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)},
    "many types": _many_types,
    "several pieces": lambda: {
        "large": numbers(2_500_001),
        "odd": numbers(7, torch.uint8),
        "m": numbers(2**20),
    },
    "many small": lambda: {f"layer.{index}": numbers(index % 50, seed=index) for index in range(500)},
}


def same(left: Any, right: Any) -> bool:
    """Types, structure, order of keys, and every bit of every tensor."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return (
            (left.dtype, left.shape, left.stride()) == (right.dtype, right.shape, right.stride())
            and left.requires_grad == right.requires_grad
            and bits(left) == bits(right)
        )
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def sharing(state: Any) -> list[tuple[str, int]]:
    """For each tensor of a state, which of its tensors is the first to have the same storage."""
    found: list[tuple[str, int]] = []

    def walk(path: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.append((path, value.untyped_storage().data_ptr() if value.numel() else 0))
        elif isinstance(value, dict | list | tuple):
            for key, below in value.items() if isinstance(value, dict) else enumerate(value):
                walk(f"{path}.{key}", below)

    walk("", state)
    first = {}
    for index, (_, storage) in enumerate(found):
        first.setdefault(storage, index)
    return [(path, first[storage]) for path, storage in found]
