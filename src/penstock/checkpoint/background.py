"""Saves that go on in the background, in order for each file."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import threading
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger("penstock")


class SaveHandle:
    """A save that goes on in the background. What went wrong is raised by `wait`, else it is logged.

    path   of the checkpoint
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._future: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._asked: list[bool] = []  # by somebody who has heard how it ended
        weakref.finalize(self, _log_unheard, path, self._future, self._asked)

    def __repr__(self) -> str:
        state = "going on"
        if self._future.done():
            state = "failed" if self._future.exception() else "saved"
        return f"<penstock.SaveHandle of {self.path}, {state}>"

    def done(self) -> bool:
        """The save is over, well or badly."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is durable and in place.

        timeout   in seconds, None for as long as it takes

        Raises TimeoutError, after which the save still goes on, or the error that ended it:
        CheckpointError where it could not be written.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait; give the error that ended the save, or None. Raises TimeoutError as `wait` does."""
        try:
            error = self._future.exception(timeout)
        except concurrent.futures.TimeoutError:
            raise TimeoutError(f"{self.path} is not saved after {timeout} s: wait longer") from None
        self._asked.append(True)
        return error


_Future = concurrent.futures.Future[None]

_lock = threading.Lock()
# The saves that go on, in the order in which they began. Held until they are over: only then is it
# known whether somebody waits for them.
_going: dict[_Future, SaveHandle] = {}


def start(path: Path, work: Callable[[], None]) -> SaveHandle:
    """Call ``work`` on a thread of its own, after all saves to ``path`` that were started before.

    The interpreter does not end before it is over.
    """
    handle = SaveHandle(path)
    with _lock:
        arguments = (handle._future, work, _last(path))
        _going[handle._future] = handle
    try:
        threading.Thread(target=_run, args=arguments, name="penstock-save", daemon=False).start()
    except RuntimeError:  # the interpreter is ending, or there are too many threads: saved here and now
        _run(*arguments)
    return handle


def wait_for(path: Path) -> None:
    """Wait until no save to ``path`` goes on. Their errors are for those who hold their handles."""
    with _lock:
        last = _last(path)
    if last is not None:
        concurrent.futures.wait([last])


def _last(path: Path) -> _Future | None:
    return next((future for future, handle in reversed(_going.items()) if handle.path == path), None)


def _run(future: _Future, work: Callable[[], None], before: _Future | None) -> None:
    # No local is the handle: the error's traceback keeps this frame.
    if before is not None:
        concurrent.futures.wait([before])
    try:
        work()
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # they hold the copy of the tensors
        future.set_exception(error)
    else:
        future.set_result(None)
    del work  # and the copy of the tensors with it: the frame may stay as long as its error
    with _lock:
        del _going[future]


def _log_unheard(path: Path, future: _Future, asked: list[bool]) -> None:
    if not asked and future.done() and (error := future.exception()) is not None:
        logger.error("nobody waited for the save of %s, which failed: %s", path, error)


def _forget() -> None:
    global _lock
    _lock = threading.Lock()
    _going.clear()


if hasattr(os, "register_at_fork"):  # the threads stay with the parent
    os.register_at_fork(after_in_child=_forget)
