"""The checkpoints of a run, in one directory: saved in the background, counted, and removed in time."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from penstock.checkpoint import increments
from penstock.checkpoint.background import SaveHandle
from penstock.checkpoint.contents import Metadata, contents_of
from penstock.checkpoint.header import Reference
from penstock.checkpoint.listing import Saved, folder_of, look_at, references_to
from penstock.checkpoint.remote import ObjectPath
from penstock.checkpoint.saving import save_in_background, save_now
from penstock.checkpoint.source import CheckpointSource, PathLike
from penstock.checkpoint.tensors import Stored
from penstock.errors import CheckpointError, InvalidArgument
from penstock.options import IoOptions
from penstock.storage import files

logger = logging.getLogger("penstock")


class Manager(files.Closing):
    """The checkpoints of one run, in a directory that belongs to it. A context manager.

    directory    made where it is not there; or a URL, s3://, gs:// or az://. Its checkpoints are files
                 ``step-<ten digits>.safetensors``; of objects, names have eight more digits
    keep_last    how many stay; older ones are removed once a newer one is durable
    keep_every   those whose step is a multiple of it stay for ever
    io           as of `penstock.save`

    A tensor that has not changed since the last checkpoint is not written again: the new file refers to the
    older one that holds it, which stays as long as the new one. `penstock.load` makes one state of them
    where they lie in one directory; `convert` makes a file that stands alone. Old files that stay for the
    sake of newer ones are at most twice as large as what these use of them.

    A process that is killed, at whatever moment, leaves its last checkpoint whole, and `latest` finds it.
    Until a manager is closed, or its process has ended, another one for the same directory is refused. URLs
    have no locks: give one to one manager at a time, since what it removes may be what another one's newest
    checkpoint refers to. A manager refers only to what it has written there itself.

    Raises InvalidArgument for what cannot be kept, CheckpointError where the directory cannot be used.
    """

    def __init__(
        self,
        directory: PathLike,
        *,
        keep_last: int = 3,
        keep_every: int | None = None,
        io: IoOptions | None = None,
    ) -> None:
        for name, number in (("keep_last", keep_last), ("keep_every", keep_every)):
            if (number is not None or name == "keep_last") and (type(number) is not int or number < 1):
                raise InvalidArgument(f"{name} is {number!r}: give a whole number from 1")
        self._keep_last, self._keep_every, self._io = keep_last, keep_every, io
        self._folder = folder_of(directory)
        self._handle: SaveHandle | None = None  # of a save that may be going on
        self._busy = threading.RLock()  # one thread at a time saves, or waits
        self._is_closed = False
        _managers.add(self)
        self._folder.acquire()
        try:
            # By name, in the order of their steps. Never changed in place: the background replaces it.
            self._saved: dict[str, Saved] = {}
            self._identities = self._folder.identities()
            newest: CheckpointSource | None = None
            for name in self._identities:
                found, source = look_at(self._folder.at(name))
                if source is None:
                    logger.warning("%s is not counted, and left alone: %s", found.path, found.problem)
                else:
                    self._saved[name], newest = found, source
            # Tensors of the newest, to which others may refer.
            self._known: dict[str, Reference] = (
                references_to(newest) if newest is not None and self._folder.is_exclusive else {}
            )
        except BaseException:
            self._folder.release()
            raise

    def __repr__(self) -> str:
        return f"<penstock.checkpoint.Manager of {self._folder.path}, steps {list(self.steps())}>"

    def latest(self) -> Path | str | None:
        """The path, or URL, of the newest checkpoint that is whole; None where there is none. Not one that is
        being saved."""
        saved = self._saved
        if not saved:
            return None
        place = self._folder.at(next(reversed(saved)))
        return place if isinstance(place, Path) else str(place)

    def steps(self) -> tuple[int, ...]:
        """Of the checkpoints that are whole, ascending, with those that stay as newer ones refer to them."""
        return tuple(each.step for each in self._saved.values())

    def save(self, state: Any, step: int, *, metadata: Metadata = None, wait: bool = False) -> SaveHandle:
        """Save ``state`` as the checkpoint of ``step``, and then remove what is to be kept no longer.

        state      as of `penstock.save`
        step       above that of every checkpoint here
        metadata   texts that any reader of safetensors files can see
        wait       until it is durable. Else all of it is read and what has changed is copied, so that it can
                   change further, and written in the background. A save waits for the one before, so that
                   at most one copy exists

        Raises as `penstock.save`; also the error of the save before, unless its handle was asked for it: then
        ``state`` was not saved, and the next call tries again.
        """
        with self._busy:
            return self._save(state, step, metadata, wait)

    def _save(self, state: Any, step: int, metadata: Metadata, wait: bool) -> SaveHandle:
        if self._is_closed or not self._folder.is_held:
            raise InvalidArgument(
                f"the manager of {self._folder.path} is closed, its process was forked, or somebody removed "
                "the file of its lock: make another one"
            )
        if type(step) is not int or not 0 <= step < 10**18:
            raise InvalidArgument(f"step is {step!r}: give a whole number from 0")
        self.wait()
        if (steps := self.steps()) and step <= steps[-1]:
            raise InvalidArgument(
                f"step {step} is not after {steps[-1]}, the newest checkpoint in {self._folder.path}: give a "
                "later step. To go on from an older checkpoint, first delete the later ones, newest first"
            )
        path = self._folder.at(self._folder.name_of(step))
        try:
            contents = contents_of(state, metadata, self._unchanged)
            if not wait:
                add = partial(self._add, path)
                self._handle = save_in_background(contents, path, self._io, add)
                return self._handle
            save_now(contents, path, self._io)
            self._add(path)
        except CheckpointError as error:
            raise error from None  # it names the system's own error
        return SaveHandle.of_saved(path)

    def wait(self) -> None:
        """Wait until nothing is being saved. Raises the error of the last save, unless its handle was asked
        for it."""
        with self._busy:
            handle = self._handle
            error = None if handle is None or handle.was_asked else handle.exception()
            self._handle = None  # not where the wait was interrupted
            if error is not None:
                raise error

    def close(self) -> None:
        """Wait as `wait` does. The directory is free for another manager then."""
        self._is_closed = True
        try:
            self.wait()
        finally:
            if self._handle is None:  # else the wait was interrupted, and the save goes on
                self._folder.release()

    def _unchanged(self, stored: Sequence[Stored]) -> tuple[Mapping[str, int], Mapping[str, Reference]]:
        """The sums of all tensors, and where those lie that need not be written."""
        entries = increments.described(stored)
        there = self._folder.identities()  # somebody may have removed or replaced a file
        same = {name for name in self._saved if name in there and there[name] == self._identities.get(name)}
        usable = {name: self._saved[name] for name in same if self._needed([name]) <= same}
        found = increments.unchanged(
            entries,
            self._known,
            {name: saved.size_bytes for name, saved in usable.items()},
            {name: self._needed([name]) for name in usable},
        )
        return {entry.name: entry.sum64 or 0 for entry in entries}, found

    def _needed(self, names: Sequence[str]) -> frozenset[str]:
        """``names``, and the files without which these are not whole."""
        needed: set[str] = set()
        waiting = list(names)
        while waiting:
            if (name := waiting.pop()) not in needed:
                needed.add(name)
                waiting += self._saved[name].elsewhere if name in self._saved else ()
        return frozenset(needed)

    def _add(self, path: Path | ObjectPath) -> None:
        """The new checkpoint is durable: count it, and remove what is to be kept no longer."""
        (found, source), there = look_at(path), self._folder.identities()
        if source is None:  # what it needs is not known: nothing is removed
            raise CheckpointError(found.problem)
        # Of the others they stay as they were: those may be other files by now.
        self._identities = {**self._identities, path.name: there.get(path.name)}
        self._known, self._saved = references_to(source), {**self._saved, path.name: found}
        names = list(self._saved)
        kept = names[-self._keep_last :]
        if self._keep_every is not None:
            kept += [name for name in names if self._saved[name].step % self._keep_every == 0]
        needed = self._needed(kept)
        removed = [name for name in reversed(names) if name not in needed] if self._folder.is_held else []
        for name in removed:  # the newest first: at each moment all that are left are whole
            try:
                self._folder.remove(name)
            except OSError as error:  # an ObjectError too
                logger.warning("the old checkpoint %s cannot be removed: %s", self._saved[name].path, error)
            self._saved = {other: each for other, each in self._saved.items() if other != name}


_managers: weakref.WeakSet[Manager] = weakref.WeakSet()


def _after_fork() -> None:
    """A thread of the parent may have been saving, which is not here to end that."""
    for each in list(_managers):
        each._busy, each._handle = threading.RLock(), None


os.register_at_fork(after_in_child=_after_fork)
