"""Copies that wait for their turn, and the threads that carry them out."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock.errors import PenstockError
from penstock.runtime.copy_engine import Done, Moved
from penstock.runtime.storages import ManagedStorage
from penstock.storage.extents import Extent

logger = logging.getLogger("penstock")

# What went wrong, and what was moved.
Outcome = tuple[PenstockError | None, Sequence[Moved]]


class Copy:
    """One copy between a storage on the device and a block of a lower tier, or what packs or expands it.

    storage   kept until the copy is over; all of its bytes are copied
    ready     events after which it may begin: of kernels that made the content, or used the memory before
    """

    __slots__ = ("block", "done", "managed", "ready", "size_bytes", "storage")

    def __init__(
        self,
        managed: ManagedStorage,
        storage: torch.UntypedStorage,
        block: Extent,
        ready: list[Any],
        done: Done,
    ) -> None:
        self.managed = managed
        self.storage: torch.UntypedStorage | None = storage
        self.block = block
        self.ready = ready
        self.done = done
        self.size_bytes = storage.nbytes()

    def wait(self) -> None:
        """Wait, on the host, until it may begin."""
        for event in self.ready:
            event.synchronize()

    def moved(self, link: str, started_s: float, finished_s: float, size_bytes: int | None = None) -> Moved:
        managed = self.managed
        moved_bytes = self.size_bytes if size_bytes is None else size_bytes
        return Moved(link, started_s, finished_s, managed.index, moved_bytes, managed.kind)


class CopyQueue:
    """Carries out copies of one direction and one tier on a thread and a stream of its own, the most urgent
    first.

    carry_out   of a Copy, its priority, and the stream. Blocks until the copy is over
    marked      see Driver: what shows each copy in a profiler
    """

    def __init__(
        self,
        name: str,
        stream: Any,
        carry_out: Callable[[Copy, int, Any], Outcome],
        marked: Callable[[str], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._stream = stream
        self._marked = marked
        self._carry_out = carry_out
        self._waiting: list[tuple[int, int, Copy]] = []
        self._count = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        # A copy to a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def put(self, priority: int, copy: Copy) -> None:
        with self._changed:
            if self._closed:
                raise PenstockError("the run is closed: no tensor can be moved any more")
            heapq.heappush(self._waiting, (priority, next(self._count), copy))
            self._changed.notify()

    def hurry(self, managed: ManagedStorage, priority: int) -> None:
        """A copy of the storage that still waits is as urgent as ``priority`` now."""
        with self._changed:
            for index, (before, count, copy) in enumerate(self._waiting):
                if copy.managed is managed and priority < before:
                    self._waiting[index] = (priority, count, copy)
                    heapq.heapify(self._waiting)
                    return

    def close(self, timeout_s: float) -> None:
        """Carry out what waits, then end the thread. A copy that hangs is not waited for for longer."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("a copy hangs (%s), and is left behind", self._thread.name)

    def _serve(self) -> None:
        while (entry := self._next()) is not None:
            priority, _, copy = entry
            done = copy.done
            try:
                which = f"tensor {copy.managed.index}, " if copy.managed.index >= 0 else ""
                with self._marked(f"{self._thread.name}: {which}{copy.size_bytes} bytes"):
                    outcome = self._carry_out(copy, priority, self._stream)
            except PenstockError as error:
                outcome = error, []
            except Exception as error:  # the accelerator's driver
                outcome = PenstockError(f"a copy between the accelerator and the host failed: {error}"), []
            # Whoever is told that the copy is over may free the storage's memory.
            copy.storage = None
            del copy, entry
            try:
                done(*outcome)
            except Exception:
                logger.exception("what follows a copy failed")
            del done, outcome

    def _next(self) -> tuple[int, int, Copy] | None:
        with self._changed:
            while not self._waiting:
                if self._closed:
                    return None
                self._changed.wait()
            return heapq.heappop(self._waiting)
