"""On which device each tensor comes back: what ``map_location`` means, as in torch.load."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from penstock.checkpoint.file.header import DEVICES
from penstock.checkpoint.file.source import Source
from penstock.errors import DeviceUnavailable, InvalidArgument, InvalidCheckpoint

MapLocation: TypeAlias = (
    str
    | torch.device
    | Mapping[str, str | torch.device]
    | Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None]
    | None
)

_CPU = torch.device("cpu")


def devices_of(source: Source, map_location: MapLocation) -> list[torch.device]:
    """The device of each tensor, in the order of the entries; where ``map_location`` is a function, that
    on which it was saved.

    Raises DeviceUnavailable, InvalidArgument, or InvalidCheckpoint.
    """
    saved = saved_devices(source)
    locations = [saved.get(entry.name, "cpu") for entry in source.header.entries]
    if callable(map_location):
        return [torch.device(location) for location in locations]
    chosen = {location: _chosen(location, map_location) for location in set(locations)}
    for location, device in chosen.items():
        _require(source, device, location)
    return [chosen[location] for location in locations]


def saved_devices(source: Source) -> dict[str, str]:
    """By name, the devices of tensors that were not in the memory of the CPU. Raises InvalidCheckpoint."""
    text = source.header.metadata.get(DEVICES)
    if text is None:
        return {}
    try:
        devices = json.loads(text)
        for device in set(devices.values()):
            torch.device(device)
    except (ValueError, RuntimeError, AttributeError, TypeError, RecursionError) as error:
        raise InvalidCheckpoint(
            f"{source.path} is damaged: the metadata {DEVICES!r} does not name devices ({error}). "
            "Load another copy."
        ) from error
    return dict(devices)


def place_by_function(
    tensor: torch.Tensor, saved: torch.device, function: Callable[..., torch.UntypedStorage | None]
) -> torch.Tensor:
    """What torch.load makes of a function: it gets the storage in CPU memory, and gives one, or None."""
    storage = function(tensor.untyped_storage(), str(saved))
    if storage is None:
        return tensor.to(saved)
    moved = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    return moved.set_(storage, 0, tensor.shape, tensor.stride())


def _chosen(location: str, map_location: Any) -> torch.device:
    if isinstance(map_location, Mapping):
        map_location = map_location.get(location)
    try:
        return torch.device(location if map_location is None else map_location)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgument(
            f"map_location {map_location!r} is not a device ({error}): give 'cpu', 'cuda:0', a torch.device, "
            "a dict from saved to wanted devices, or a function as for torch.load"
        ) from error


def _require(source: Source, device: torch.device, saved: str) -> None:
    if device == _CPU:
        return
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise DeviceUnavailable(
            f"{source.path} has tensors of {saved}, to be loaded to {device}, which this machine does not "
            f"have ({str(error).splitlines()[0]}). Load with map_location='cpu'."
        ) from error
