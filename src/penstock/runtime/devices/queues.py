"""Queues of copies, by priority, and the threads that start them and report their ends."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from penstock.errors import PenstockError
from penstock.runtime.devices import Copy
from penstock.runtime.devices.driver import Driver
from penstock.runtime.interrupts import NOT_INTERRUPTED
from penstock.runtime.storages import ManagedStorage

logger = logging.getLogger("penstock")

# Most bytes issued to a stream and not copied yet: an urgent copy waits for them. They keep the link busy
# while nobody polls: 2.5 ms at PCIe 5's rate.
STREAM_BYTES = 128 << 20

# The program polls for the ends of copies while it runs kernels: a thread that woke up at each would take the
# GIL from it. Where it has not polled for so long, a thread waits for them.
POLLED_WITHIN_S = 2e-3

# So often that thread looks by itself whether copies were issued, before it waits to be told.
NAPS = 20

# Clocks of host and device drift apart: after so long the host's counts again.
SAME_CLOCK_S = 1.0

# Begins a copy of that priority, which calls `call_then` at its end, on any thread.
CarryOut = Callable[[Copy, int], None]

Marked = contextlib.AbstractContextManager[None]


class _Queue:
    """Waiting copies of one direction, the most urgent first, and a thread that serves them until `close`.

    driver   its `profiler_range` shows each copy in a profiler
    """

    def __init__(self, name: str, driver: Driver) -> None:
        self._name = name
        self._profiler_range, self._use_device = driver.profiler_range, driver.use_device
        self._lock = threading.RLock()  # entering it takes less than entering the condition
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._waiting: list[tuple[int, int, Copy]] = []  # a heap
        self._count = itertools.count()
        # A copy that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        self._use_device()
        self._serve()

    def _serve(self) -> None:
        raise NotImplementedError

    def _mark(self, copy: Copy) -> Marked:
        which = f"tensor {copy.managed.index}, " if copy.managed.index >= 0 else ""
        return self._profiler_range(f"{self._name}: {which}{copy.size_bytes} bytes")

    def put(self, copy: Copy) -> None:
        with self._lock:
            if self._closed:
                raise PenstockError("the run is closed: no tensor can be moved any more")
            heapq.heappush(self._waiting, (copy.priority, next(self._count), copy))
            self._on_put(copy)

    def _on_put(self, copy: Copy) -> None:
        """It was added. The lock is held."""
        raise NotImplementedError

    def add_wait(self, copy: Copy, make_event: Callable[[], Any]) -> bool:
        """Make the copy wait for the event that ``make_event`` returns. False: it returns None, or the copy
        has begun."""
        with self._lock:
            event = make_event() if copy.waits else None
            if event is not None:
                copy.ready.append(event)
            return event is not None

    def _begin(self, copy: Copy) -> None:
        """From now on its storage may not move. The lock is held."""
        copy.waits = copy.managed.copy_pending = False

    def close(self, timeout_s: float) -> None:
        """Serve what waits, then end the thread. Give up on a copy that hangs after ``timeout_s``."""
        with self._lock:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("a copy hangs (%s), and is left behind", self._name)


class CopyQueue(_Queue):
    """Starts copies of one direction and one tier on a thread of its own, the most urgent first.

    wait_for_room   blocks until one more copy may begin; a more urgent one that arrives meanwhile goes first
    """

    def __init__(
        self,
        name: str,
        carry_out: CarryOut,
        driver: Driver,
        wait_for_room: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name, driver)
        self._carry_out = carry_out
        self._wait_for_room = wait_for_room
        self._thread.start()

    def _on_put(self, copy: Copy) -> None:
        self._changed.notify()

    def issue_now(self, copy: Copy) -> None:
        """There is no event at its end: the host alone sees that."""

    def raise_priority(self, managed: ManagedStorage, priority: int) -> None:
        """Raise the priority of the storage's waiting copy, if there is one."""
        with self._lock:
            for index, (before, count, copy) in enumerate(self._waiting):
                if copy.managed is managed and priority < before:
                    self._waiting[index] = (priority, count, copy)
                    heapq.heapify(self._waiting)
                    return

    def _serve(self) -> None:
        while (entry := self._next()) is not None:
            priority, _, copy = entry
            refused = False
            try:
                with self._mark(copy):
                    self._carry_out(copy, priority)
            except Exception as error:
                copy.error, refused = copy_error(error), True
            if refused:
                call_then(copy)
            del copy, entry

    def _next(self) -> tuple[int, int, Copy] | None:
        with self._lock:
            while not self._waiting and not self._closed:
                self._changed.wait()
            if not self._waiting:
                return None
        self._wait_for_room()
        with self._lock:  # nobody else takes any
            entry = heapq.heappop(self._waiting)
            self._begin(entry[-1])
            return entry


class StreamQueue(_Queue):
    """Issues the copies of one direction to a stream, the most urgent first, and reports their ends, in
    order: on the thread that polls, or on one of its own.

    The stream always holds up to STREAM_BYTES, to go on without the host. Copies that wait here can still be
    overtaken by a more urgent one.

    issue     called with a Copy, whose `begun` and `over` it sets, and the stream
    recycle   called with each of these events once nothing waits for it
    """

    def __init__(
        self,
        name: str,
        link: str,
        stream: Any,
        issue: Callable[[Copy, Any], None],
        recycle: Callable[[Any], None],
        driver: Driver,
    ) -> None:
        super().__init__(name, driver)
        self._stream = stream
        self._last: tuple[Any, float] | None = None  # the event at a copy's end, and when that was
        self._looked_at: list[Any] = []  # events, to be recycled
        self._link = link
        self._issue = issue
        self._recycle = recycle
        self._issued: deque[Copy] = deque()
        self._stream_bytes = 0  # issued, and not copied yet
        self._at_once = 0  # copies of these, waiting and issued
        self._reporting = threading.Lock()
        self._polled_s = -math.inf  # when the program last did
        self._sleeps = False  # the thread, until it is notified
        self._thread.start()

    def _on_put(self, copy: Copy) -> None:
        self._at_once += copy.at_once
        self._issue_some()
        if copy.at_once:
            self._changed.notify()

    def issue_now(self, copy: Copy) -> Any:
        """Issue the copy now, if it waits. Returns the event at its end; None where it failed."""
        with self._lock:
            if copy.waits:
                self._issue_copy(copy)
            return copy.over

    @property
    def has_backlog(self) -> bool:
        """Copies wait until others are over, and that is reported."""
        return len(self._waiting) > 0

    def poll(self) -> bool:
        """Report the copies that are over. False: there were none. Another thread may be at it."""
        self._polled_s = time.perf_counter()
        if not self._issued:
            return False
        with NOT_INTERRUPTED:
            if not self._reporting.acquire(blocking=False):
                return False
            try:
                return self._report()
            finally:
                self._reporting.release()

    def wait_on_thread(self) -> None:
        """Nobody polls for now: let the thread wait for the copies, until the next poll."""
        with self._lock:
            self._polled_s = -math.inf
            self._changed.notify()

    def _issue_some(self) -> None:
        # Some were issued already, by `issue_now`.
        while self._waiting and self._stream_bytes < STREAM_BYTES:
            copy = heapq.heappop(self._waiting)[-1]
            if copy.waits:
                self._issue_copy(copy)

    def _issue_copy(self, copy: Copy) -> None:
        self._begin(copy)
        try:
            # It may run on a thread of the program, whose dispatch modes must not see the copy: the clock
            # could free what has died, and wait for the lock that is held here.
            with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction(), self._mark(copy):
                for event in copy.ready:
                    self._stream.wait_event(event)
                self._issue(copy, self._stream)
        except Exception as error:
            copy.error = copy_error(error)
        self._stream_bytes += copy.size_bytes
        self._issued.append(copy)
        if self._sleeps:
            self._changed.notify()

    def _serve(self) -> None:
        while self._has_turn():
            # Nobody else reports meanwhile, and has the event used again that is waited for.
            with self._reporting:
                self._report(waits=True)

    def _has_turn(self) -> bool:
        """Block until it is this thread that is to wait for a copy. False: the queue is closed."""
        naps = 0
        with self._lock:
            while True:
                left_s = self._polled_s + POLLED_WITHIN_S - time.perf_counter()
                if self._issued and (left_s <= 0 or self._at_once or self._closed):
                    return True
                if self._closed:
                    return False
                naps = 0 if self._issued else naps + 1
                self._sleeps = naps > NAPS or left_s <= 0
                self._changed.wait(None if self._sleeps else max(left_s, POLLED_WITHIN_S / 2))
                self._sleeps = False

    def _report(self, waits: bool = False) -> bool:
        """Report the copies that are over, in order, and before it wait for one where it ``waits``. Whether
        there were any. `_reporting` is held."""
        reported = False
        while self._issued and self._is_over(copy := self._issued[0], waits):
            reported, waits = True, False
            with self._lock:
                self._issued.popleft()
                self._at_once -= copy.at_once
                self._stream_bytes -= copy.size_bytes
                if self._waiting:
                    self._issue_some()
            call_then(copy)
            del copy
            while self._looked_at:  # not before: until then kernels may be told to wait for them
                self._recycle(self._looked_at.pop())
        return reported

    def _is_over(self, copy: Copy, waits: bool) -> bool:
        """Whether the copy has ended, and if so, how."""
        try:
            if copy.error is not None:  # the stream refused it
                return True
            if waits:
                copy.over.synchronize()
            elif not copy.over.query():
                return False
            copy.moved = (copy.moved_over(self._link, *self._times_s(copy.begun, copy.over)),)
        except Exception as error:
            copy.error = copy_error(error)
        return True

    def _times_s(self, begun: Any, over: Any) -> tuple[float, float]:
        """When the stream began and ended the copy, by its own clock: the host may look long after."""
        now_s = ended_s = time.perf_counter()
        if self._last is not None:
            event, ended_s = self._last
            passed_s = event.elapsed_time(over) / 1e3
            ended_s = min(ended_s + passed_s, now_s) if passed_s < SAME_CLOCK_S else now_s
            self._looked_at.append(event)
        self._last = over, ended_s
        self._looked_at.append(begun)
        return ended_s - begun.elapsed_time(over) / 1e3, ended_s


def copy_error(error: Exception) -> PenstockError:
    """The error to report for a copy that raised."""
    if isinstance(error, PenstockError):
        return error
    return PenstockError(f"a copy between the accelerator and the host failed: {error}")


def call_then(copy: Copy) -> None:
    """The copy has ended: call its `then`, and log what that raises: there is no caller to raise it in."""
    try:
        copy.then(copy)
    except Exception:
        logger.exception("what follows a copy failed")
