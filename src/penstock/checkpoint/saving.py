"""The user's entry to saving."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

import torch.distributed as dist

from penstock.checkpoint import background
from penstock.checkpoint.background import SaveHandle
from penstock.checkpoint.failures import cannot_write
from penstock.checkpoint.file import writing
from penstock.checkpoint.file.replace import Replacement
from penstock.checkpoint.file.source import PathLike, path_of
from penstock.errors import CheckpointError, InvalidArgument


@overload
def save(
    state: Any,
    path: PathLike,
    *,
    wait: Literal[True] = True,
    metadata: Mapping[str, str] | None = None,
    group: Any = None,
) -> None: ...
@overload
def save(
    state: Any,
    path: PathLike,
    *,
    wait: Literal[False],
    metadata: Mapping[str, str] | None = None,
    group: None = None,
) -> SaveHandle: ...
@overload
def save(
    state: Any,
    path: PathLike,
    *,
    wait: bool,
    metadata: Mapping[str, str] | None = None,
    group: Any = None,
) -> SaveHandle | None: ...


def save(
    state: Any,
    path: PathLike,
    *,
    wait: bool = True,
    metadata: Mapping[str, str] | None = None,
    group: Any = None,
) -> SaveHandle | None:
    """Write ``state`` to ``path``: durable, with checksums, and whole or not at all.

    state      tensors, numbers, texts, and dicts, lists and tuples of them, such as a state dict of a
               module or of an optimizer
    path       what is there is replaced when the new file is complete; if the save fails or the process
               is killed, it stays as it was
    wait       False copies the tensors, so that they can change, and writes in the background. Copies
               take at most 1 GiB at once, or the size of one state where that is more: further saves
               wait here until earlier ones have been written and their copies released
    metadata   texts that any reader of safetensors files can see
    group      of torch.distributed: all its processes call this, its first one writes, and the others wait
               for that, no longer than the group's time-out. None: every process that calls this writes,
               and waits for nobody

    Gives a SaveHandle where ``wait`` is False. Raises InvalidArgument, with the place in ``state``, for
    what cannot be saved, and CheckpointError where the file cannot be written.
    """
    if group is not None and not wait:
        raise InvalidArgument("with group=, save waits for the process that writes: leave wait=False out")
    try:
        if group is None:
            return _save(state, path, wait, metadata)
        _by_the_first(group, partial(_save, state, path, True, metadata), path_of(path))
    except CheckpointError as error:
        raise error from None  # it names the system's own error
    return None


def _by_the_first(group: Any, write: Callable[[], object], path: Path) -> None:
    """The first process of the group writes. All learn how that ended."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_rank(group) < 0:
        raise InvalidArgument(
            "group= needs a process group of torch.distributed that this process is in: call "
            "torch.distributed.init_process_group first"
        )
    error = None
    first = dist.get_global_rank(group, 0)
    if dist.get_rank() == first:
        try:
            write()
        except Exception as problem:  # the others wait to hear of it
            error = problem
    said = [f"{type(error).__name__}: {error}" if error is not None else ""]
    dist.broadcast_object_list(said, first, group)
    if error is not None:
        raise error
    if said[0]:
        raise CheckpointError(f"rank {first}, which writes {path} for all, failed: {said[0]}")


def _save(state: Any, path: PathLike, wait: bool, metadata: Mapping[str, str] | None) -> SaveHandle | None:
    path = path_of(path)
    contents = writing.contents_of(state, metadata)
    if wait:
        with _replacement(path, contents.size_bytes) as replacement:
            background.wait_for(replacement.path)
            writing.write(contents, replacement)
        return None
    with contextlib.ExitStack() as held:
        held.enter_context(background.room_for(contents.data_bytes))
        replacement = held.enter_context(_replacement(path, contents.size_bytes))
        try:
            snapshot = held.enter_context(writing.Snapshot(contents))
        except OSError as error:
            raise cannot_write(path, error, contents.size_bytes) from error
        return background.start(replacement.path, partial(snapshot.write, replacement), held.pop_all())


def _replacement(path: Path, size_bytes: int) -> Replacement:
    try:
        return Replacement(path, size_bytes)
    except OSError as error:
        raise cannot_write(path, error, size_bytes) from error
