"""Copies that wait for their turn, or were given to a stream, and the threads that see to them."""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence, Sized
from typing import Any

import torch

from penstock.errors import PenstockError
from penstock.runtime.devices import Done, Moved
from penstock.runtime.storages import ManagedStorage
from penstock.storage.extents import Extent

logger = logging.getLogger("penstock")

# That a stream has been given, and not done: what is needed now waits for these bytes. The link is not to be
# idle while another thread keeps Python from looking at it, which is for 5 ms (sys.getswitchinterval).
STREAM_BYTES = 128 << 20

# What went wrong, and what was moved.
Outcome = tuple[PenstockError | None, Sequence[Moved]]

# Begins a copy of that priority; tells when it is over, on any thread.
CarryOut = Callable[["Copy", int, Done], None]

Marked = contextlib.AbstractContextManager[None]


class Copy:
    """One copy between a storage on the device and a block of a lower tier, or what packs or expands it.

    storage             kept until the copy is over
    ready               events after which it may begin: of kernels that made the content, or used the memory
                        before. They are free again when ``done`` is called
    begin, size_bytes   the part of the storage that is copied, all of it unless told
    waits, over         it was not given to a stream yet; the event after which it is over there
    """

    __slots__ = ("begin", "block", "done", "managed", "over", "ready", "size_bytes", "storage", "waits")

    def __init__(
        self,
        managed: ManagedStorage,
        storage: torch.UntypedStorage,
        block: Extent,
        ready: list[Any],
        done: Done,
        begin: int = 0,
        size_bytes: int | None = None,
    ) -> None:
        self.managed = managed
        self.storage: torch.UntypedStorage | None = storage
        self.block = block
        self.ready = ready
        self.done = done
        self.begin = begin
        self.waits = True
        self.over: Any = None
        self.size_bytes = storage.nbytes() if size_bytes is None else size_bytes

    def wait(self) -> None:
        """Wait, on the host, until it may begin."""
        for event in self.ready:
            event.synchronize()

    @property
    def text(self) -> str:
        """For profilers."""
        which = f"tensor {self.managed.index}, " if self.managed.index >= 0 else ""
        return f"{which}{self.size_bytes} bytes"

    def moved(self, link: str, started_s: float, finished_s: float, size_bytes: int | None = None) -> Moved:
        managed = self.managed
        moved_bytes = self.size_bytes if size_bytes is None else size_bytes
        return Moved(link, started_s, finished_s, managed.index, moved_bytes, managed.kind)


class _Queue:
    """Copies of one direction that wait, the most urgent first, and a thread that sees to them until it is
    closed.

    marked    see Driver: what shows each copy in a profiler
    """

    def __init__(self, name: str, marked: Callable[[str], Marked]) -> None:
        self._marked = marked
        self._changed = threading.Condition()
        self._closed = False
        self._waiting: list[tuple[int, int, Copy]] = []  # a heap
        self._count = itertools.count()
        # A copy that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def _serve(self) -> None:
        raise NotImplementedError

    def _mark(self, copy: Copy) -> Marked:
        return self._marked(f"{self._thread.name}: {copy.text}")

    def put(self, copy: Copy, priority: int) -> None:
        with self._changed:
            if self._closed:
                raise PenstockError("the run is closed: no tensor can be moved any more")
            heapq.heappush(self._waiting, (priority, next(self._count), copy))
            self._was_put()

    def _was_put(self) -> None:
        """With the lock."""
        raise NotImplementedError

    def _wait_for(self, waiting: Sized) -> bool:
        """With the lock: until something waits. False: nothing comes any more."""
        while not waiting and not self._closed:
            self._changed.wait()
        return len(waiting) > 0

    def close(self, timeout_s: float) -> None:
        """See to what waits, then end the thread. A copy that hangs is not waited for for longer."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("a copy hangs (%s), and is left behind", self._thread.name)


class CopyQueue(_Queue):
    """Begins copies of one direction and one tier on a thread of its own, the most urgent first.

    make_way   blocks until one more may begin: what comes meanwhile and is more urgent goes first
    """

    def __init__(
        self,
        name: str,
        carry_out: CarryOut,
        marked: Callable[[str], Marked],
        make_way: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name, marked)
        self._carry_out = carry_out
        self._make_way = make_way
        self._thread.start()

    def _was_put(self) -> None:
        self._changed.notify()

    def hurry(self, managed: ManagedStorage, priority: int) -> None:
        """A copy of the storage that still waits is as urgent as ``priority`` now."""
        with self._changed:
            for index, (before, count, copy) in enumerate(self._waiting):
                if copy.managed is managed and priority < before:
                    self._waiting[index] = (priority, count, copy)
                    heapq.heapify(self._waiting)
                    return

    def _serve(self) -> None:
        while (entry := self._next()) is not None:
            priority, _, copy = entry
            over = functools.partial(_over, copy)
            refused = None
            try:
                with self._mark(copy):
                    self._carry_out(copy, priority, over)
            except Exception as error:
                refused = failure(error)
            if refused is not None:
                over(refused, [])
            del copy, entry, over, refused

    def _next(self) -> tuple[int, int, Copy] | None:
        with self._changed:
            if not self._wait_for(self._waiting):
                return None
        self._make_way()
        with self._changed:  # nobody else takes any
            return heapq.heappop(self._waiting)


class StreamQueue(_Queue):
    """Gives the copies of one direction to a stream, the most urgent first, and sees on a thread when each is
    over. The stream has enough of them to go from one to the next without the host; what waits here is
    overtaken by what is needed now.

    issue     of a Copy and the stream: returns the event after which it is over
    recycle   takes that event when nobody waits for it any more
    """

    def __init__(
        self,
        name: str,
        link: str,
        stream: Any,
        issue: Callable[[Copy, Any], Any],
        recycle: Callable[[Any], None],
        marked: Callable[[str], Marked],
    ) -> None:
        super().__init__(name, marked)
        self._stream = stream
        self._link = link
        self._issue = issue
        self._recycle = recycle
        self._begun: deque[tuple[Copy, Exception | None]] = deque()  # and why it did not
        self._stream_bytes = 0  # of what was given to the stream, and is not over
        self._thread.start()

    def _was_put(self) -> None:
        self._begin_some()

    def begin(self, copy: Copy) -> Any:
        """Have it begin now, unless it has; the event after which it is over. None: it failed."""
        with self._changed:
            if copy.waits:
                self._begin(copy)
            return copy.over

    def change(self, copy: Copy, change: Callable[[], Any]) -> bool:
        """Have the copy wait for the event that ``change`` gives. False: it gives none, or the copy has
        begun."""
        with self._changed:
            event = change() if copy.waits else None
            if event is not None:
                copy.ready.append(event)
            return event is not None

    def _begin_some(self) -> None:
        # Some of those that wait may have begun meanwhile.
        while self._waiting and self._stream_bytes < STREAM_BYTES:
            copy = heapq.heappop(self._waiting)[-1]
            if copy.waits:
                self._begin(copy)

    def _begin(self, copy: Copy) -> None:
        copy.waits = False
        refused = None
        try:
            # It may be a thread of the program's: no mode of its own sees the copy.
            with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction(), self._mark(copy):
                for event in copy.ready:
                    self._stream.wait_event(event)
                copy.over = self._issue(copy, self._stream)
        except Exception as error:
            refused = error
        self._stream_bytes += copy.size_bytes
        self._begun.append((copy, refused))
        self._changed.notify()

    def _serve(self) -> None:
        while (entry := self._next()) is not None:
            copy, refused = entry
            done, over = copy.done, copy.over
            outcome: Outcome
            try:
                if refused is not None:
                    raise refused
                copy.wait()
                begun_s = time.perf_counter()  # the copy before it is over, too
                over.synchronize()
                outcome = None, [copy.moved(self._link, begun_s, time.perf_counter())]
            except Exception as error:
                outcome = failure(error), []
            with self._changed:
                self._stream_bytes -= copy.size_bytes
                self._begin_some()
            copy.storage = None  # whoever is told that the copy is over may free its memory
            del copy, entry, refused
            tell(done, *outcome)
            if over is not None:
                self._recycle(over)
            del done, outcome, over

    def _next(self) -> tuple[Copy, Exception | None] | None:
        with self._changed:
            return self._begun.popleft() if self._wait_for(self._begun) else None


def failure(error: Exception) -> PenstockError:
    """What to tell where a copy raised."""
    if isinstance(error, PenstockError):
        return error
    return PenstockError(f"a copy between the accelerator and the host failed: {error}")


def tell(done: Done, error: PenstockError | None, moved: Sequence[Moved]) -> None:
    """Call ``done``, where nobody hears what it raises."""
    try:
        done(error, moved)
    except Exception:
        logger.exception("what follows a copy failed")


def _over(copy: Copy, error: PenstockError | None, moved: Sequence[Moved]) -> None:
    copy.storage = None  # whoever is told that the copy is over may free its memory
    tell(copy.done, error, moved)
