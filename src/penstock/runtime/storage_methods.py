"""Methods of torch.UntypedStorage in a run on an accelerator, where what is away has a storage of 0 bytes.

torch.save, pickle and copy.deepcopy copy storages by these methods, and by no operator that the clock would
see. In a run they say how large a storage is when it is there, and find its bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import torch

Storage: TypeAlias = torch.UntypedStorage

# As torch has them, whatever is in their places.
held_bytes = torch._C.StorageBase.nbytes
resize = torch._C.StorageBase.resize_

# Those that access the bytes; True: they write to them.
_ACCESSES = {
    "__getitem__": False,
    "__setitem__": True,
    "_set_from_file": True,
    "_write_file": False,
    "copy_": True,
    "fill_": True,
}
_NO_ADDRESS = 1 << 63  # no device has memory there


class Clock(Protocol):
    def present(
        self, storages: Iterable[Storage], written: Sequence[Storage] = (), stays: bool = False
    ) -> AbstractContextManager[None]:
        """The bytes of these are on the device meanwhile.

        written   of them, what is written to
        stays     they do not leave any more
        """
        ...

    def away_bytes(self, storage: Storage) -> int:
        """That the storage has when it is on the device; 0: there it is."""
        ...


def methods(clock: Clock) -> dict[str, Callable[..., Any]]:
    """By name, what takes the places of torch's."""
    replaced: dict[str, Callable[..., Any]] = {}

    def replaces(*names: str) -> Callable[[Callable[..., Any]], None]:
        def replace(method: Callable[..., Any]) -> None:
            replaced.update(dict.fromkeys(names, method))

        return replace

    @replaces("nbytes", "size", "__len__")
    def size(storage: Storage) -> int:
        return held_bytes(storage) or clock.away_bytes(storage)

    @replaces("data_ptr")
    def data_ptr(storage: Storage) -> int:
        """Storages are told apart by it: torch.save and safetensors do. What is away has no address."""
        if not held_bytes(storage) and clock.away_bytes(storage):
            return _NO_ADDRESS | storage._cdata
        return torch._C.StorageBase.data_ptr(storage)

    @replaces("clone")
    def clone(storage: Storage) -> Storage:
        """By an operator, for which there is room."""
        with clock.present([storage]):
            view = torch.empty(0, dtype=torch.uint8, device=storage.device)
            return view.set_(storage, 0, (held_bytes(storage),), (1,)).clone().untyped_storage()  # type: ignore[call-overload, no-any-return]

    @replaces("to")
    def to(storage: Storage, *, device: Any, non_blocking: bool = False) -> Storage:
        """To memory of an operator, too. torch.load does it."""
        if storage.device == torch.device(device):
            return storage
        made = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device).untyped_storage()
        return made.copy_(storage, non_blocking)

    @replaces("_share_cuda_")
    def share(storage: Storage, *args: Any, **kwargs: Any) -> Any:
        """Other processes have its memory from now on."""
        with clock.present([storage], stays=True):
            return torch._C.StorageBase._share_cuda_(storage, *args, **kwargs)

    for name, writes in _ACCESSES.items():
        replaced[name] = _accessing(clock, getattr(Storage, name), writes)
    return replaced


def _accessing(clock: Clock, method: Callable[..., Any], writes: bool) -> Callable[..., Any]:
    @functools.wraps(method)
    def accessing(storage: Storage, *args: Any, **kwargs: Any) -> Any:
        others = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.UntypedStorage))
        with clock.present([storage, *others], written=[storage] if writes else ()):
            return method(storage, *args, **kwargs)

    return accessing
