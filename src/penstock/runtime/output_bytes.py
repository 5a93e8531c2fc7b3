"""Predicts the memory that a kernel will allocate: the bytes of its results, by fake tensors, and workspace.

For devices that cannot fail an allocation while a kernel runs; what it makes on others does not count.
Results are inferred once for each operator and each set of shapes, dtypes and other arguments; workspace is
the most that the operator has used so far.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from penstock.capture.operators import storages_in, tensors_in

# Most results cached: shapes that change at every step must not fill memory.
MOST_CACHED = 1 << 14

# Namespaces of collectives that write to their arguments. Running one on fake tensors would communicate.
_ALLOCATE_NOTHING = ("c10d", "penstock")

_VALUES: tuple[type, ...] = (int, float, bool, str, complex, type(None))
_VALUES += (torch.dtype, torch.device, torch.layout, torch.memory_format)


class KernelNeeds:
    """Predicts the bytes that kernels allocate on a device, and caches the results.

    inferred   cache misses
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mode = FakeTensorMode(allow_non_fake_inputs=False)
        self._cache: dict[Any, int | None] = {}
        self._results: dict[Any, int] = {}  # by operator: bytes of its latest results
        self._workspaces: dict[Any, int] = {}  # by operator: most it was seen to take
        self.inferred = 0

    def bytes(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> int:
        """Bytes that the kernel will allocate. Where its results cannot be inferred, those of the operator's
        last call, or the size of its arguments."""
        kwargs = kwargs or {}
        key = (operator, *map(_key, args), *((name, _key(value)) for name, value in kwargs.items()))
        try:
            result_bytes = self._cache[key]
        except KeyError:
            if len(self._cache) >= MOST_CACHED:
                self._cache.clear()
            result_bytes = self._cache[key] = self._infer(operator, args, kwargs)
        except TypeError:  # an unhashable argument
            result_bytes = self._infer(operator, args, kwargs)
        workspace_bytes = self._workspaces.get(operator, 0)
        if result_bytes is None or (workspace_bytes and not result_bytes):
            given = list(tensors_in((args, kwargs)))
            here = [tensor for tensor in given if tensor.device == self._device]
            if given and not here:
                return 0  # it runs elsewhere
            if result_bytes is None:
                result_bytes = self._results.get(operator)
            if result_bytes is None:
                result_bytes = sum(tensor.numel() * tensor.element_size() for tensor in here)
        return result_bytes + workspace_bytes

    def add(self, operator: Any, result_bytes: int, workspace_bytes: int) -> None:
        """Record what a kernel has allocated."""
        self._results[operator] = result_bytes
        if workspace_bytes:
            self._workspaces[operator] = max(workspace_bytes, self._workspaces.get(operator, 0))

    def _infer(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        if any(isinstance(value, torch.UntypedStorage) for value in args):
            return 0  # set_, whose storages fake tensors refuse
        if operator.namespace in _ALLOCATE_NOTHING:
            return 0
        self.inferred += 1
        mode = self._mode
        try:
            # Dispatch modes of the program must not see this call.
            with _disable_current_modes(), mode, torch.no_grad():
                fake_args, fake_kwargs = tree_map_only(torch.Tensor, _fake, (args, kwargs))
                given = {storage._cdata for storage in storages_in((fake_args, fake_kwargs))}
                result = operator(*fake_args, **fake_kwargs)
                # The storages of fake tensors do not say where they are.
                here = [tensor for tensor in tensors_in(result) if tensor.device == self._device]
                made = {storage._cdata: storage.nbytes() for storage in storages_in(here)}
        except Exception:  # results that depend on values, or an operator that fake tensors do not know
            return None
        try:
            return sum(int(size_bytes) for key, size_bytes in made.items() if key not in given)
        except Exception:  # a size that is a symbol
            return None


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, with its own storage. Called inside the fake mode."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return object()  # equal to no other key
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    if isinstance(value, _VALUES):
        return type(value), value
    return object()
