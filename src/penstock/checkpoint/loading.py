"""The user's entry to loading: a new state, or into tensors that are there, without a second copy of it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from penstock.checkpoint.failures import shown
from penstock.checkpoint.file import reading, torchfile
from penstock.checkpoint.file.devices import MapLocation, devices_of, place_by_function
from penstock.checkpoint.file.memory import Mappings, is_on_host
from penstock.checkpoint.file.source import PathLike, Source
from penstock.checkpoint.state.matching import Match, Pair
from penstock.errors import CheckpointError, InvalidArgument

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

    Gives the state, or ``into``. Raises CheckpointError where the file cannot be read, InvalidCheckpoint,
    with the tensors' names, where it is damaged or no checkpoint, InvalidArgument where ``into`` does
    not fit, with nothing changed, and DeviceUnavailable.
    """
    if into is not None and map_location is not None:
        raise InvalidArgument("the tensors of into stay on their devices: leave map_location out")
    try:
        return _load(path, map_location, mmap, into, verify)
    except CheckpointError as error:
        raise error from None  # it names the system's own error


def _load(path: PathLike, map_location: MapLocation, mmap: bool | None, into: Any, verify: bool) -> Any:
    with Source(path) as source:
        if source.is_torch:
            return _load_torch(source, map_location, mmap, into, verify)
        if not source.header.written_by_penstock:
            _log_foreign(source)
        if into is not None:
            return _fill(source, into, source.is_cached if mmap is None else mmap, verify)
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
    with _disable_current_modes():  # an open run would count what is mapped, which cannot leave
        saved = torchfile.load(source, "cpu", mmap=True)
    return _fill_from(source, saved, into)


def _fill(source: Source, into: Any, mapped: bool, verify: bool) -> Any:
    """Fill the tensors of ``into``, and take over the file's other values. Returns ``into``.

    mapped   read through the page cache, else past it

    Raises InvalidArgument, with nothing changed, where the two do not fit. CheckpointError and
    InvalidCheckpoint say what was overwritten.
    """
    entries = reading.read_mapped(source, verify=False)
    saved = reading.state_of(source, entries, restride=False)
    match = _matched(source, saved, into)
    filling = _Filling(match.pairs, entries)
    with torch.no_grad():
        try:
            on_host = all(is_on_host(pair.target) for pair in match.pairs)
            reading.fill(source, filling.destination, mapped, verify, on_host=on_host)
        except CheckpointError as error:
            raise filling.with_overwritten(error) from error
        filling.copy_rest()
        return match.take_over(saved, into)


def _fill_from(source: Source, saved: Any, into: Any) -> Any:
    """The same, from a state whose tensors are mapped already."""
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


def _copy(pair: Pair) -> None:
    """Out of a mapped file. Where memory stays in place (on the CPU) no operator sees it: an open run would
    count what is mapped, which cannot leave."""
    with _disable_current_modes() if is_on_host(pair.target) else contextlib.nullcontext():
        pair.target.copy_(pair.saved)


def _matched(source: Source, saved: Any, into: Any) -> Match:
    match = Match(saved, into)
    if match.problems:
        raise InvalidArgument(
            f"{source.path} does not fit what it is to be loaded into: {'; '.join(match.problems)}. "
            "Nothing was changed."
        )
    return match


class _Filling:
    """Where the bytes of each entry go.

    A tensor that lies in memory as it does in the file is filled as the file is read. The others are
    copied out of the mapped file afterwards.
    """

    def __init__(self, pairs: Sequence[Pair], entries: Sequence[torch.Tensor]) -> None:
        by_address = {entry.untyped_storage().data_ptr(): i for i, entry in enumerate(entries)}
        self._straight: dict[int, tuple[Pair, torch.Tensor]] = {}
        self._rest: list[Pair] = []
        self._overwritten: dict[str, None] = {}
        for pair in pairs:
            index = by_address.get(pair.saved.untyped_storage().data_ptr(), -1)
            data = bytes_as_saved(pair.target.detach(), pair.saved)
            if data is None or index < 0 or index in self._straight or data.nbytes != entries[index].nbytes:
                self._rest.append(pair)
            else:
                self._straight[index] = (pair, data)

    def destination(self, entry: int) -> torch.Tensor | None:
        if entry not in self._straight:
            return None
        pair, data = self._straight[entry]
        if pair.path not in self._overwritten:
            self._overwritten[pair.path] = None
            count_change(pair.target)
        return data

    def copy_rest(self) -> None:
        for pair in self._rest:
            _copy(pair)

    def with_overwritten(self, error: CheckpointError) -> CheckpointError:
        """``error``, with the names of the tensors that were overwritten before it."""
        names = list(self._overwritten)
        what = f"Overwritten until then: {shown(names)}." if names else "Nothing was overwritten."
        said = type(error)(f"{error} {what}")
        said.errno = error.errno
        return said


def bytes_as_saved(target: torch.Tensor, saved: torch.Tensor) -> torch.Tensor | None:
    """The target's bytes, if they lie in memory in the order of those that are saved, without gaps."""
    if target.is_conj() or target.is_neg() or not target.numel():
        return None
    order = sorted(range(target.dim()), key=lambda dimension: -saved.stride(dimension))
    in_order = target.permute(order)
    if not in_order.is_contiguous() or not saved.permute(order).is_contiguous():
        return None
    return in_order.view(-1).view(torch.uint8)


def count_change(tensor: torch.Tensor) -> None:
    """Let autograd know that the tensor was changed in place."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


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
