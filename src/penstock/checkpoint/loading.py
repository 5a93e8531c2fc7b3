"""The user's entry to loading."""

from __future__ import annotations

import logging
from typing import Any

import torch

from penstock.checkpoint import filling, reading, torchfile
from penstock.checkpoint.placing import MapLocation, devices_of, place_by_function
from penstock.checkpoint.source import PathLike, Source
from penstock.errors import InvalidArgument

logger = logging.getLogger("penstock")

_logged_foreign = False


def load(
    path: PathLike,
    map_location: MapLocation = None,
    mmap: bool | None = None,
    *,
    into: Any = None,
    verify: bool = True,
) -> Any:
    """Read what `save` wrote, or torch.save, or another writer of safetensors files.

    map_location   where tensors go, as for torch.load: None to where they were saved from
    mmap           True maps the file: tensors are read when they are used, and pages are copied when
                   they are changed. Do not change a mapped file in place: `save` never does. False
                   reads into memory of its own, past the page cache. None is True for tensors that
                   stay in the memory of the CPU, and elsewhere whichever is faster
    into           a module, an optimizer, a tensor, or dicts and lists of them, that are filled in place.
                   Each byte is verified as it is copied: where the file turns out to be damaged, or the
                   disk fails, what came before is overwritten, and the error names it. To rule that
                   out, call penstock.checkpoint.verify first, which reads the file once more. Files of
                   torch.save are always verified first
    verify         compare checksums, which reads everything at once; those of torch.save too

    Gives the state, or ``into``. Raises CheckpointError where the file cannot be read, InvalidFile,
    with the tensors' names, where it is damaged or no checkpoint, InvalidArgument where ``into`` does
    not fit, with nothing changed, and DeviceUnavailable.
    """
    if into is not None and map_location is not None:
        raise InvalidArgument("the tensors of into stay on their devices: leave map_location out")
    with Source(path) as source:
        if source.is_torch:
            return _load_torch(source, map_location, mmap, into, verify)
        if not source.header.written_by_penstock:
            _log_foreign(source)
        if into is not None:
            return filling.fill(source, into, source.is_cached if mmap is None else mmap, verify)
        return reading.state_of(source, _tensors(source, map_location, mmap, verify))


def _tensors(
    source: Source, map_location: MapLocation, mmap: bool | None, verify: bool
) -> list[torch.Tensor]:
    devices = devices_of(source, map_location)
    if callable(map_location) or all(device.type == "cpu" for device in devices):
        tensors = (reading.read_own if mmap is False else reading.read_mapped)(source, verify)
        if not callable(map_location):
            return tensors
        return [
            place_by_function(tensor, device, map_location)
            for tensor, device in zip(tensors, devices, strict=True)
        ]
    return reading.read_to(source, devices, source.is_cached if mmap is None else mmap, verify)


def _load_torch(source: Source, map_location: MapLocation, mmap: bool | None, into: Any, verify: bool) -> Any:
    if verify:
        torchfile.verify(source)
    if into is None:
        return torchfile.load(source, map_location, mmap)
    return filling.fill_from(source, torchfile.load(source, "cpu", mmap=True), into)


def _log_foreign(source: Source) -> None:
    """Say once that files of other writers have no checksums."""
    global _logged_foreign
    if not _logged_foreign:
        _logged_foreign = True
        logger.warning(
            "%s was not written by penstock: it has no checksums, and damage to its tensors is not found. "
            "penstock.checkpoint.convert writes a copy that has them.",
            source.path,
        )
