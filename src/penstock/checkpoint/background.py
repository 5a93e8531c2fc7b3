"""Saves in the background: in order for each file, with a bound on the memory of their copies."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from penstock.checkpoint.remote import ObjectPath
from penstock.errors import CheckpointError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("penstock")

# The most bytes that copies of states take together, unless a single one takes more, and the most saves.
MOST_COPIED_BYTES = 1 << 30
MOST_SAVES = 64


class Snapshot(Protocol):
    """Some of a list of tensors, by index: they keep their bytes until these were taken.

    failed   why that could not be kept; empty: it is
    folder   on a disk, for files that are gone when the save is over
    """

    failed: str
    folder: Path

    def __contains__(self, index: int) -> bool: ...

    def wanted(self) -> int | None:
        """The tensor that should be taken next, as somebody waits to write to it; None: no matter which."""

    def copy(self, index: int, begin: int, size_bytes: int, to: int) -> int:
        """Copy bytes of a tensor, each of them once. Returns their CRC-32C. They count only where it has not
        `failed` then."""
        ...

    def close(self) -> None:
        """All tensors can be written."""


TakeSnapshot = Callable[[Sequence["torch.Tensor"]], Snapshot]
_take_snapshot: list[TakeSnapshot] = []  # of the run that is open


def take_snapshots(take: TakeSnapshot) -> Callable[[], None]:
    """Saves in the background take their bytes by ``take`` from now on. Returns a function that undoes it."""
    _take_snapshot.append(take)
    return lambda: _take_snapshot.remove(take)


def snapshot_of(tensors: Sequence[torch.Tensor]) -> Snapshot | None:
    """None: no run is open that takes any."""
    return _take_snapshot[-1](tensors) if _take_snapshot else None


class SaveHandle:
    """A save in the background. `wait` raises its error; an error that nobody asked for is logged.

    path   of the checkpoint; of an object, what gives its URL as text
    """

    def __init__(self, path: Path | ObjectPath) -> None:
        self.path = path
        self._future: concurrent.futures.Future[None] = concurrent.futures.Future()
        # Until somebody asks. It holds the future, and so the error and the frames through which that was
        # raised, which may have this handle.
        self._unasked = weakref.finalize(self, _log_unasked, path, self._future)

    @classmethod
    def of_saved(cls, path: Path | ObjectPath) -> SaveHandle:
        """Of a save that is over."""
        handle = cls(path)
        handle._future.set_result(None)
        return handle

    def __repr__(self) -> str:
        state = "going on"
        if self._future.done():
            state = "failed" if self._future.exception() else "saved"
        return f"<penstock.SaveHandle of {self.path}, {state}>"

    def _leave_to_parent(self) -> None:
        """In a child of fork, where nothing would ever end the wait."""
        self._future = concurrent.futures.Future()
        self._future.set_exception(
            CheckpointError(f"{self.path} was being saved when this process was forked: wait in its parent")
        )
        self._unasked.detach()  # it is no error unless somebody asks here

    @property
    def was_asked(self) -> bool:
        """Somebody has waited for the save, and knows how it ended."""
        return not self._unasked.alive

    def done(self) -> bool:
        """Whether the save has ended, with or without an error."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is durable and in place.

        timeout   in seconds, None for as long as it takes

        Raises TimeoutError, after which the save still goes on, or the error that ended it:
        CheckpointError where it could not be written.
        """
        if (error := self.exception(timeout)) is not None:
            raise error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait; give the error that ended the save, or None. Raises TimeoutError as `wait` does."""
        try:
            error = self._future.exception(timeout)
        except concurrent.futures.TimeoutError:
            raise TimeoutError(f"{self.path} is not saved after {timeout} s: wait longer") from None
        self._unasked.detach()
        return error


_Future = concurrent.futures.Future[None]

# Ctrl-C may come in the condition's own methods, which are of Python, and leave it locked: not in the lock's.
_lock = threading.RLock()
_changed = threading.Condition(_lock)
_copies: dict[object, int] = {}  # the bytes of each copy that is held
# The saves in progress, oldest first. Each handle is kept until its save has ended: only then is it known
# whether somebody asks for the error.
_going: dict[_Future, SaveHandle] = {}


@contextlib.contextmanager
def room_for(copy_bytes: int) -> Iterator[None]:
    """Wait until there is room for a copy of so many bytes, and occupy it."""

    def is_free() -> bool:
        return len(_copies) < MOST_SAVES and sum(_copies.values()) + copy_bytes <= MOST_COPIED_BYTES

    copy = object()
    try:
        with _lock:
            _changed.wait_for(lambda: not _copies or is_free())
            _copies[copy] = copy_bytes
        yield
    finally:
        with _lock:
            _copies.pop(copy, None)
            _changed.notify_all()


def start(path: Path | ObjectPath, work: Callable[[], None], held: contextlib.ExitStack) -> SaveHandle:
    """Call ``work`` on a thread of its own, after all saves to ``path`` that were started before, and then
    close ``held``.

    The interpreter does not end before it is over.
    """
    handle = SaveHandle(path)
    with _lock:
        arguments = (handle._future, work, held, _last(path))
        _going[handle._future] = handle
    thread = threading.Thread(target=_run, args=arguments, name="penstock-save", daemon=False)
    try:
        thread.start()
    except KeyboardInterrupt:
        if thread.ident is None:  # it has not begun, and nobody waits for it
            with _lock:
                _going.pop(handle._future, None)
            held.close()
        raise
    except RuntimeError:  # the interpreter is ending, or there are too many threads: saved here and now
        _run(*arguments)
    return handle


def wait_for(path: Path | ObjectPath) -> None:
    """Wait until no save to ``path`` is in progress. Their errors are raised by their own handles."""
    with _lock:
        last = _last(path)
    if last is not None:
        concurrent.futures.wait([last])


def _last(path: Path | ObjectPath) -> _Future | None:
    return next((future for future, handle in reversed(_going.items()) if handle.path == path), None)


def _run(
    future: _Future, work: Callable[[], None], held: contextlib.ExitStack, before: _Future | None
) -> None:
    # No local is the handle: the error's traceback keeps this frame.
    if before is not None:
        concurrent.futures.wait([before])
    try:
        with held:
            work()
    except BaseException as error:
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)  # they hold the copy of the tensors
            cause = cause.__context__
        future.set_exception(error)
    else:
        future.set_result(None)
    with _lock:
        del _going[future]


def _log_unasked(path: Path | ObjectPath, future: _Future) -> None:
    if future.done() and (error := future.exception()) is not None:
        logger.error("nobody waited for the save of %s, which failed: %s", path, error)


def _after_fork() -> None:
    global _changed, _lock
    _lock = threading.RLock()
    _changed = threading.Condition(_lock)
    for handle in _going.values():
        handle._leave_to_parent()
    _copies.clear()
    _going.clear()
    _take_snapshot.clear()


os.register_at_fork(after_in_child=_after_fork)  # the threads stay with the parent
