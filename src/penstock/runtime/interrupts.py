"""Defers Ctrl-C while the runtime changes state.

Python raises KeyboardInterrupt in the main thread between any two instructions, where a storage may be half
way from one state to the next. While the runtime changes state, an interrupt is recorded; it is raised when
the change is complete.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class _NotInterrupted:
    """A reentrant context manager of the main thread, inside which no `Interrupts` delivers an interrupt, nor
    a second one. For what does not wait, and is lost where it ends half done."""

    depth = 0

    def __enter__(self) -> None:
        if threading.get_ident() == threading.main_thread().ident:
            self.depth += 1

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() == threading.main_thread().ident:
            self.depth -= 1


NOT_INTERRUPTED = _NotInterrupted()


class Interrupts:
    """A handler of SIGINT, and a reentrant context manager inside which it defers interrupts.

    It does nothing in threads other than the main one, and where SIGINT is ignored or has its default action.
    A second interrupt inside is not deferred: the program may hang in a wait.
    """

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self._before: Callable[[int, FrameType | None], Any] | None = None
        self._depth = 0
        self._pending = False

    def install(self) -> None:
        """Replace the present handler, to which interrupts are passed on."""
        before = signal.getsignal(signal.SIGINT)
        if threading.get_ident() == self._main and callable(before):
            self._before = before
            signal.signal(signal.SIGINT, self._handle)

    def remove(self) -> None:
        """Restore the handler, unless the program has installed another one."""
        if threading.get_ident() == self._main and signal.getsignal(signal.SIGINT) == self._handle:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if NOT_INTERRUPTED.depth or (self._depth and not self._pending):
            self._pending = True
        else:
            self._deliver(frame)

    def _deliver(self, frame: FrameType | None = None) -> None:
        self._pending = False
        assert self._before is not None
        self._before(signal.SIGINT, frame)

    def check(self) -> None:
        """Raise a deferred interrupt. For waits, and between changes of state."""
        if self._pending and threading.get_ident() == self._main:
            self._deliver()

    def __enter__(self) -> None:
        if threading.get_ident() == self._main:
            self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if threading.get_ident() == self._main:
            self._depth -= 1
            if self._pending and not self._depth:
                self._deliver()
