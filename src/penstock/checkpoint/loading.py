"""The user's entry to loading: a new state, or into tensors that are there, without a second copy of it."""

from __future__ import annotations

import contextlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from penstock.checkpoint import reading, torchfile
from penstock.checkpoint.failures import shown
from penstock.checkpoint.header import DEVICES
from penstock.checkpoint.matching import Match, Pair
from penstock.checkpoint.pieces import within_budget
from penstock.checkpoint.reading import Mappings, is_on_host
from penstock.checkpoint.source import CheckpointSource, PathLike
from penstock.errors import (
    CheckpointError,
    DeviceUnavailable,
    InvalidArgument,
    InvalidCheckpoint,
    with_errno,
)
from penstock.options import IoOptions

logger = logging.getLogger("penstock")

MapLocation: TypeAlias = (
    str
    | torch.device
    | Mapping[str, str | torch.device]
    | Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None]
    | None
)

_logged_foreign = False


def load(
    path: PathLike,
    map_location: MapLocation = None,
    mmap: bool | None = None,
    *,
    into: Any = None,
    verify: bool = True,
    io: IoOptions | None = None,
) -> Any:
    """Read what `save` wrote, or torch.save, or another writer of safetensors files.

    path           of a file, or the URL of an object: s3://, gs://, az:// or https://
    map_location   where tensors go, as for torch.load: None to where they were saved from
    mmap           True maps the file: tensors are read when they are used, and pages are copied when
                   they are changed. Do not change a mapped file in place: `save` never does. False
                   reads into memory of its own, past the page cache. None is True for tensors that
                   stay in the memory of the CPU, and elsewhere whichever is faster. Inside a run on a CPU it
                   is False: what is mapped cannot leave its budget
    into           a module, an optimizer, a tensor, or dicts and lists of them, that are filled in place.
                   The file has to have all that they name. Each byte is verified as it is copied: where the
                   file turns out to be damaged, or the disk fails, what came before is overwritten, and the
                   error names it. To rule that out, call penstock.checkpoint.verify first, which reads the
                   file once more. Files of torch.save are always verified first
    verify         compare checksums, which reads everything at once; those of torch.save too
    io             its ``paths`` or ``costs`` say by which I/O path pieces of 4 MiB are read where the file is
                   not mapped; None: the direct one

    Returns the state, or ``into``. Raises CheckpointError where the file cannot be read, InvalidCheckpoint,
    with the tensors' names, where it is damaged or no checkpoint, InvalidArgument where ``into`` does
    not fit, with nothing changed, and DeviceUnavailable.
    """
    if into is not None and map_location is not None:
        raise InvalidArgument("the tensors of into stay on their devices: leave map_location out")
    try:
        return _load(path, map_location, mmap, into, verify, io)
    except CheckpointError as error:
        raise error from None  # it names the system's own error


def _load(
    path: PathLike,
    map_location: MapLocation,
    mmap: bool | None,
    into: Any,
    verify: bool,
    io: IoOptions | None,
) -> Any:
    with CheckpointSource(path, io) as source:
        if source.is_object and mmap:
            raise InvalidArgument(f"{source.path} cannot be mapped: leave mmap out")
        if source.is_torch:
            return _load_torch(source, map_location, mmap, into, verify)
        if not source.header.written_by_penstock:
            _log_foreign(source)
        mapped = source.is_cached if mmap is None else mmap
        if into is None:
            return reading.state_of(source, _tensors(source, map_location, mmap, mapped, verify))
        entries = reading.unread(source) if source.is_object else reading.read_mapped(source, verify=False)
        saved = reading.state_of(source, entries, restride=False)
        match = _matched(source, saved, into)
        with torch.no_grad():
            fill_pairs(source, match.pairs, entries, mapped, verify, shared=_in_arrays(saved))
            return match.take_over(saved, into)


def _tensors(
    source: CheckpointSource, map_location: MapLocation, mmap: bool | None, mapped: bool, verify: bool
) -> list[torch.Tensor]:
    devices = _devices_of(source, map_location)
    first = [torch.device("cpu")] * len(devices) if callable(map_location) else devices
    if any(device.type != "cpu" for device in first) or (within_budget() and not mmap):
        tensors = reading.read_to(source, first, mapped, verify)
    else:
        read = reading.read_own if mmap is False or source.is_object else reading.read_mapped
        tensors = read(source, verify)
    if not callable(map_location):
        return tensors
    return [_placed(*each, map_location) for each in zip(tensors, devices, strict=True)]


def _load_torch(
    source: CheckpointSource, map_location: MapLocation, mmap: bool | None, into: Any, verify: bool
) -> Any:
    if verify:
        torchfile.verify(source)
    if into is None:
        return torchfile.load(source, map_location, mmap)
    with _disable_current_modes():  # an open run would count what is mapped, which cannot leave
        saved = torchfile.load(source, "cpu", mmap=True)
    match = _matched(source, saved, into)
    mapped = Mappings(source.file.buffered)
    addresses = [pair.saved.untyped_storage().data_ptr() for pair in match.pairs]
    last = {address: index for index, address in enumerate(addresses)}
    with torch.no_grad():
        for index, pair in enumerate(match.pairs):
            _copy(pair)
            if last[addresses[index]] == index:
                mapped.release_pages(addresses[index], pair.saved.untyped_storage().nbytes())
        return match.take_over(saved, into)


def _matched(source: CheckpointSource, saved: Any, into: Any) -> Match:
    match = Match(saved, into)
    if match.problems:
        raise InvalidArgument(
            f"{source.path} does not fit what it is to be loaded into: {'; '.join(match.problems)}. "
            "Nothing was changed."
        )
    return match


def fill_pairs(
    source: CheckpointSource,
    pairs: Sequence[Pair],
    entries: Sequence[torch.Tensor],
    mapped: bool,
    verify: bool = True,
    wanted: Collection[int] | None = None,
    shared: Collection[int] = (),
) -> None:
    """Fill the targets. One that lies in memory as it does in the file is filled as the file is read; the
    others are copied out of the mapped file afterwards.

    entries   of the file, which what is saved is views of: mapped, or of an object unread. Those of an object
              are filled unless a single target takes their bytes
    mapped    read through the page cache, else past it
    wanted    as of `reading.fill`
    shared    addresses of entries that others than the targets use, too

    Raises CheckpointError and InvalidCheckpoint, which say what was overwritten.
    """
    by_address = {entry.untyped_storage().data_ptr(): i for i, entry in enumerate(entries)}
    uses = Counter(pair.saved.untyped_storage().data_ptr() for pair in pairs)
    uses.update(shared)
    straight: dict[int, tuple[Pair, torch.Tensor]] = {}
    rest: list[Pair] = []
    overwritten: dict[str, None] = {}
    for pair in pairs:
        address = pair.saved.untyped_storage().data_ptr()
        index, data = by_address.get(address, -1), _bytes_as_saved(pair)
        is_used = uses[address] > 1 if source.is_object else index in straight
        if data is None or index < 0 or is_used or data.nbytes != entries[index].nbytes:
            rest.append(pair)
        else:
            straight[index] = pair, data

    def destination(entry: int) -> torch.Tensor | None:
        if entry not in straight:
            return entries[entry].view(-1).view(torch.uint8) if source.is_object else None
        pair, data = straight[entry]
        if pair.path not in overwritten:
            overwritten[pair.path] = None
            if not pair.target.is_inference():  # autograd knows then that it was changed in place
                torch.autograd.graph.increment_version(pair.target)
        return data

    on_host = all(is_on_host(pair.target) for pair, _ in straight.values())
    try:
        reading.fill(source, destination, mapped, verify, on_host=on_host, wanted=wanted)
    except CheckpointError as error:
        names = shown(list(overwritten))
        what = f"Overwritten until then: {names}." if names else "Nothing was overwritten."
        raise with_errno(type(error)(f"{error} {what}"), error.errno) from error
    for pair in rest:
        _copy(pair)


def _copy(pair: Pair) -> None:
    """Out of a mapped file. Where memory stays in place (on the CPU) no operator sees it: an open run would
    count what is mapped, which cannot leave."""
    with _disable_current_modes() if is_on_host(pair.target) else contextlib.nullcontext():
        pair.target.copy_(pair.saved)


def _in_arrays(value: Any) -> list[int]:
    """The addresses of the numpy arrays in a state, which share their entries' memory."""
    if isinstance(value, np.ndarray):
        return [value.ctypes.data]
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [address for each in inner for address in _in_arrays(each)]


def _bytes_as_saved(pair: Pair) -> torch.Tensor | None:
    """The target's bytes, if they lie in memory in the order of those that are saved, without gaps."""
    target, saved = pair.target.detach(), pair.saved
    if target.is_conj() or target.is_neg() or not target.numel() or target.dtype != saved.dtype:
        return None
    order = sorted(range(target.dim()), key=lambda dimension: -saved.stride(dimension))
    in_order = target.permute(order)
    if not in_order.is_contiguous() or not saved.permute(order).is_contiguous():
        return None
    return in_order.view(-1).view(torch.uint8)


def _log_foreign(source: CheckpointSource) -> None:
    global _logged_foreign
    if not _logged_foreign:
        _logged_foreign = True
        logger.warning(
            "%s was not written by penstock: it has no checksums, and damage to its tensors is not found. "
            "penstock.checkpoint.convert writes a copy that has them.",
            source.path,
        )


# -- on which device each tensor comes back: what map_location means, as in torch.load --------------


def _devices_of(source: CheckpointSource, map_location: MapLocation) -> list[torch.device]:
    """The device of each tensor, in the order of the entries; where ``map_location`` is a function, that
    on which it was saved."""
    saved = _saved_devices(source)
    locations = [saved.get(entry.name, "cpu") for entry in source.entries]
    if callable(map_location):
        return [torch.device(location) for location in locations]
    chosen = {location: _chosen(source, location, map_location) for location in set(locations)}
    return [chosen[location] for location in locations]


def _saved_devices(source: CheckpointSource) -> dict[str, str]:
    """By name, the devices of tensors that were not in the memory of the CPU."""
    try:
        devices = json.loads(source.header.metadata.get(DEVICES, "{}"))
        for device in set(devices.values()):
            torch.device(device)
    except (ValueError, RuntimeError, AttributeError, TypeError, RecursionError) as error:
        raise InvalidCheckpoint(
            f"{source.path} is damaged: the metadata {DEVICES!r} does not name devices ({error}). "
            "Load another copy."
        ) from error
    return dict(devices)


def _placed(
    tensor: torch.Tensor, saved: torch.device, function: Callable[..., torch.UntypedStorage | None]
) -> torch.Tensor:
    """What torch.load makes of a function: it gets the storage in CPU memory, and returns one, or None."""
    storage = function(tensor.untyped_storage(), str(saved))
    if storage is None:
        return tensor.to(saved)
    moved = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    return moved.set_(storage, 0, tensor.shape, tensor.stride())


def _chosen(source: CheckpointSource, saved: str, map_location: Any) -> torch.device:
    if isinstance(map_location, Mapping):
        map_location = map_location.get(saved)
    try:
        device = torch.device(saved if map_location is None else map_location)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgument(
            f"map_location {map_location!r} is not a device ({error}): give 'cpu', 'cuda:0', a torch.device, "
            "a dict from saved to wanted devices, or a function as for torch.load"
        ) from error
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise DeviceUnavailable(
            f"{source.path} has tensors of {saved}, to be loaded to {device}, which this machine does not "
            f"have ({str(error).splitlines()[0]}). Load with map_location='cpu'."
        ) from error
    return device
