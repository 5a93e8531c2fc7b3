"""The run that is open, and those that are closed and linger."""

from __future__ import annotations

import gc
import logging
import os
from typing import TYPE_CHECKING

from penstock.errors import InvalidArgument, PenstockError

if TYPE_CHECKING:
    from penstock.runtime.run import Offload

logger = logging.getLogger("penstock")

opened: list[Offload] = []  # one at most: every operator of the thread belongs to it
lingering: list[Offload] = []  # closed, with tensors that are away, or may be


def _leave_to_parent() -> None:
    """In a process made by fork: copies are the parent's. What is away is read here when it is touched, on a
    CPU."""
    for run in (*opened, *lingering):
        run._closed = True
        run._clock.leave_to_parent()
    opened.clear()


def _recompute_for_child() -> None:
    """A child runs no kernels of its parent's again."""
    for run in (*opened, *lingering):
        run._recompute_all()


os.register_at_fork(before=_recompute_for_child, after_in_child=_leave_to_parent)


def require_none() -> None:
    """Raises InvalidArgument where a run is."""
    if opened:
        raise InvalidArgument(
            f"another run is open, {opened[0]!r}: it has all tensors of the program, those of several "
            "models too. Close it before you begin another one: penstock.close()"
        )


def give_back_lingering() -> None:
    """Let runs that were closed end whose tensors are gone, or fit now."""
    if lingering:
        gc.collect()  # a step that failed leaves its tensors in cycles of frames
    for run in tuple(lingering):
        try:
            run._give_back()
        except PenstockError as error:
            logger.warning("%r cannot give back all it has: %s", run, error)


def take_over(run: Offload) -> None:
    """Have the run that is about to open take over what a closed one could not bring back to the accelerator.

    Raises InvalidArgument where that is another device.
    """
    for left in tuple(lingering):
        if not left._sees_operators:
            continue
        if left._device.device != run._device.device:
            raise InvalidArgument(
                f"{left!r} still has tensors for which {left._device.device} has no memory: delete them, or "
                "move them to the CPU, before you begin a run on another device"
            )
        run.take_over(left)


def close() -> None:
    """Close the run that is open, where there is one.

    For the first line of a notebook's cell that opens a run and may be executed again, and for a run whose
    name is lost. Raises what `Offload.close` raises.
    """
    for run in tuple(opened):
        run.close()
