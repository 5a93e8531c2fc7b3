"""Into tensors that are there already, without a copy of the whole in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from penstock.checkpoint import reading
from penstock.checkpoint.failures import shown
from penstock.checkpoint.matching import Match, Pair
from penstock.checkpoint.memory import is_on_host
from penstock.checkpoint.source import Source
from penstock.errors import CheckpointError, InvalidArgument, InvalidFile


def fill(source: Source, into: Any, mapped: bool, verify: bool) -> Any:
    """Fill the tensors of ``into``, and take over what the file holds beside them. Gives ``into``.

    mapped   whether what the page cache holds is used, or is read past it

    Raises InvalidArgument, with nothing changed, where the two do not fit. CheckpointError and
    InvalidFile say what was overwritten.
    """
    entries = reading.read_mapped(source, verify=False)
    saved = reading.state_of(source, entries, restride=False)
    match = _matched(source, saved, into)
    filling = _Filling(match.pairs, entries)
    with torch.no_grad():
        try:
            on_host = all(is_on_host(pair.target) for pair in match.pairs)
            reading.fill(source, filling.destination, mapped, verify, on_host=on_host)
        except (CheckpointError, InvalidFile) as error:
            raise filling.with_overwritten(error) from error
        filling.copy_rest()
        return match.take_over(saved, into)


def fill_from(source: Source, saved: Any, into: Any) -> Any:
    """The same, out of a state that is mapped already."""
    match = _matched(source, saved, into)
    with torch.no_grad():
        for pair in match.pairs:
            pair.target.copy_(pair.saved)
        return match.take_over(saved, into)


def _matched(source: Source, saved: Any, into: Any) -> Match:
    match = Match(saved, into)
    if match.problems:
        raise InvalidArgument(
            f"{source.path} does not fit what it is to be loaded into: {'; '.join(match.problems)}. "
            "Nothing was changed."
        )
    return match


class _Filling:
    """Bytes go straight to tensors that lie in memory as they do in the file.

    The others are copied out of the mapped file in the end.
    """

    def __init__(self, pairs: Sequence[Pair], entries: Sequence[torch.Tensor]) -> None:
        by_address = {entry.untyped_storage().data_ptr(): i for i, entry in enumerate(entries)}
        self._straight: dict[int, tuple[Pair, torch.Tensor]] = {}
        self._rest: list[Pair] = []
        self._overwritten: dict[str, None] = {}
        for pair in pairs:
            index = by_address.get(pair.saved.untyped_storage().data_ptr(), -1)
            data = _bytes_of(pair)
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
            _count_change(pair.target)
        return data

    def copy_rest(self) -> None:
        for pair in self._rest:
            pair.target.copy_(pair.saved)

    def with_overwritten(self, error: CheckpointError | InvalidFile) -> CheckpointError | InvalidFile:
        """``error`` with what was overwritten before it happened."""
        names = list(self._overwritten)
        what = f"Overwritten until then: {shown(names)}." if names else "Nothing was overwritten."
        said = type(error)(f"{error} {what}")
        if isinstance(error, CheckpointError) and isinstance(said, CheckpointError):
            said.errno = error.errno
        return said


def _bytes_of(pair: Pair) -> torch.Tensor | None:
    """The target's bytes, if they lie in memory in the order of those that are saved, without gaps."""
    target, saved = pair.target.detach(), pair.saved
    if target.is_conj() or target.is_neg() or not target.numel():
        return None
    order = sorted(range(target.dim()), key=lambda dimension: -saved.stride(dimension))
    in_order = target.permute(order)
    if not in_order.is_contiguous() or not saved.permute(order).is_contiguous():
        return None
    return in_order.view(-1).view(torch.uint8)


def _count_change(tensor: torch.Tensor) -> None:
    """Let autograd know that the tensor was changed in place."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)
