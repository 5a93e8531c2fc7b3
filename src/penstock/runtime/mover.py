"""Everything that moves a saved storage out of memory and back goes through here.

The mover bounds the bytes in flight, orders what waits (demand, then prefetch, then evict: G10
section 4.6), and makes the step wait where memory would not suffice: back-pressure, not luck, keeps
the budget. It knows nothing of devices: a carrier copies.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import logging
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from penstock.errors import PenstockError

logger = logging.getLogger("penstock")

DEMAND, PREFETCH, EVICT = range(3)
NEVER = sys.maxsize

# Transfers that have begun cannot be overtaken: what is in flight bounds how long a demand waits.
IN_FLIGHT_BYTES = 64 << 20


class Saved:
    """A storage that autograd saved, in one version. In memory, on its way, or away.

    Each hold that autograd has of it refers to this object; with the last one it dies, and its
    copy is forgotten.
    """

    __slots__ = (
        "__weakref__",
        "away",
        "coming",
        "copy",
        "number",
        "size_bytes",
        "started",
        "stays",
        "storage",
        "tensor",
        "weak",
    )

    def __init__(self, number: int, storage: torch.UntypedStorage, tensor: int) -> None:
        self.number = number  # n-th save of its step, -1 once that step is over
        self.tensor = tensor  # index in the recording of its step, -1 where it is not recorded
        self.size_bytes = storage.nbytes()
        self.storage: torch.UntypedStorage | None = storage
        self.weak = weakref.ref(storage)
        self.copy: Any = None  # where its bytes are outside the device, once allocated
        self.away = False  # the copy is complete: the storage may be let go
        self.coming: torch.UntypedStorage | None = None  # what its copy is being brought back to
        self.stays = False  # in memory, also when the copy is complete
        self.started = False  # bringing it back has left the queue

    def is_in(self, storage: torch.UntypedStorage) -> bool:
        """Whether its bytes are in this very storage."""
        own = self.storage if self.storage is not None else self.weak()
        return own is not None and own._cdata == storage._cdata


class Moved(NamedTuple):
    """One transfer that is over."""

    link: str
    started_s: float
    finished_s: float
    number: int
    size_bytes: int


class Wait(NamedTuple):
    """The step waited: for a "prefetch" to arrive, or for "memory" that evictions had not freed yet."""

    cause: str
    started_s: float
    finished_s: float


Done = Callable[[PenstockError | None, Sequence[Moved]], None]


class Carrier(Protocol):
    """Copies between the device and the tiers below it.

    ``done(error, moved)`` is called once for each copy, from any thread.
    """

    def reserve(self, saved: Saved, tier: str) -> Any:
        """Space for a copy of it. Raises SpillSpaceFull."""

    def forget(self, copy: Any) -> None:
        """Give the space of a copy back."""

    def copy_out(self, saved: Saved, done: Done) -> None: ...

    def prepare(self, saved: Saved) -> torch.UntypedStorage:
        """Memory on the device to bring a copy back to; called on the thread of the step."""
        ...

    def copy_in(
        self,
        saved: Saved,
        target: torch.UntypedStorage,
        done: Done,
    ) -> None: ...


class Mover:
    """Moves saved storages by order of the plan, or of need.

    budget_bytes    of the device
    waits           every wait of the step since `begin_step`
    moved           transfers since `begin_step`
    on_prepared     is told of memory taken to bring something back to
    """

    def __init__(self, carrier: Carrier, budget_bytes: int) -> None:
        self._carrier = carrier
        self._budget_bytes = budget_bytes
        self._changed = threading.Condition(threading.RLock())
        self._queue: list[tuple[int, int, Saved, bool]] = []  # priority, order, what, whether it leaves
        self._order = itertools.count()
        self._in_flight: dict[Saved, int] = {}  # to bytes
        self._starting = False
        self._leaving: dict[Saved, int] = {}  # to the event after which their memory counts as free
        self._deferred: deque[Saved] = deque()  # prefetches that wait for room
        self._forgotten: deque[Any] = deque()  # copies of what died, given back at the next eviction
        self._error: PenstockError | None = None
        self.on_prepared: Callable[[Saved, torch.UntypedStorage], None] = lambda saved, target: None
        self.waits: list[Wait] = []
        self.moved: list[Moved] = []

    @property
    def stall_s(self) -> float:
        """Seconds the step waited since `begin_step`."""
        return sum(wait.finished_s - wait.started_s for wait in self.waits)

    def begin_step(self) -> None:
        with self._changed:
            self._error = None
            self._deferred.clear()
            self.waits = []
            self.moved = []

    # -- out -----------------------------------------------------------------------------------

    def evict(self, saved: Saved, tier: str, due: int, *, stays: bool = False) -> None:
        """Start to copy it out; its memory is let go when the copy is complete.

        due     event after which the plan counts the memory as free
        stays   it stays in memory nevertheless, until `let_go`

        Raises SpillSpaceFull, and what went wrong with an earlier copy.
        """
        self._give_back_forgotten()
        with self._changed:
            self._raise_error()
            copy = self._carrier.reserve(saved, tier)
            saved.copy = copy
            saved.stays = stays
            weakref.finalize(saved, self._forgotten.append, copy).atexit = False
            self._leaving[saved] = due
            self._push(EVICT, saved, leaves=True)

    def settle(self, event: int, ahead_bytes: int | None) -> None:
        """Wait until what the step needs before the next event fits; then prefetch what fits beside it.

        ahead_bytes   device bytes needed, had every due eviction finished; None where no plan tells
        """
        with self._changed:
            self._raise_error()
            self._wait_for_room(event, ahead_bytes)
            if ahead_bytes is not None:
                self._admit(event, ahead_bytes)

    def _wait_for_room(self, event: int, ahead_bytes: int | None) -> None:
        if not self._lacks_room(event, ahead_bytes):
            return
        began_s = time.perf_counter()
        while self._lacks_room(event, ahead_bytes):
            self._changed.wait()
            self._raise_error()
        self.waits.append(Wait("memory", began_s, time.perf_counter()))

    def _lacks_room(self, event: int, ahead_bytes: int | None) -> bool:
        if ahead_bytes is None:  # nobody knows how much room there is: nothing may be late
            return bool(self._leaving)
        late_bytes = self._late_bytes(event)
        return late_bytes > 0 and ahead_bytes + late_bytes - self._deferred_bytes() > self._budget_bytes

    def _late_bytes(self, event: int) -> int:
        return sum(saved.size_bytes for saved, due in self._leaving.items() if due <= event)

    def _deferred_bytes(self) -> int:
        return sum(saved.size_bytes for saved in self._deferred)

    def _admit(self, event: int, ahead_bytes: int) -> None:
        """Start the deferred prefetches for which there is room, in order."""
        while self._deferred:
            room_bytes = self._budget_bytes - ahead_bytes - self._late_bytes(event) + self._deferred_bytes()
            if self._deferred[0].size_bytes > room_bytes:
                return
            self._bring_back(self._deferred.popleft(), PREFETCH)

    # -- in ------------------------------------------------------------------------------------

    def prefetch(self, saved: Saved) -> None:
        """Bring it back as soon as there is room: `settle` decides when."""
        with self._changed:
            if saved in self._leaving:  # too late to leave: it stays, and nothing is read
                saved.stays = True
                self._leaving[saved] = NEVER
            elif saved.away and saved.storage is None and saved.coming is None:
                self._deferred.append(saved)

    def demand(self, saved: Saved, event: int, ahead_bytes: int | None) -> torch.UntypedStorage:
        """The storage, waiting for its copy to be brought back where it must be.

        event, ahead_bytes   as for `settle`, of the load that asks
        """
        with self._changed:
            self._raise_error()
            if saved.storage is None:
                if saved in self._deferred:
                    self._deferred.remove(saved)
                if saved.coming is None and saved.weak() is None:
                    self._wait_for_room(event, ahead_bytes)
                began_s = time.perf_counter()
                self._bring_back(saved, DEMAND)
                while saved.storage is None:
                    self._raise_error()
                    self._changed.wait()
                self.waits.append(Wait("prefetch", began_s, time.perf_counter()))
            return saved.storage

    def let_go(self, saved: Saved) -> None:
        """Keep only the copy, as soon as it is complete."""
        with self._changed:
            saved.stays = False
            if saved.away and saved.storage is not None:
                saved.weak = weakref.ref(saved.storage)
                saved.storage = None

    def _bring_back(self, saved: Saved, priority: int) -> None:
        if saved.storage is not None:
            return
        if saved.coming is None:
            kept = saved.weak()
            if kept is not None:  # the program holds it anyway
                saved.storage = kept
                return
            saved.coming = self._carrier.prepare(saved)
            self.on_prepared(saved, saved.coming)
            saved.started = False
        if not saved.started:
            self._push(priority, saved, leaves=False)

    # -- the queue -----------------------------------------------------------------------------

    def _push(self, priority: int, saved: Saved, leaves: bool) -> None:
        heapq.heappush(self._queue, (priority, next(self._order), saved, leaves))
        self._start_transfers()

    def _start_transfers(self) -> None:
        if self._starting:  # a transfer was over at once: the loop that started it goes on
            return
        self._starting = True
        try:
            self._start_those_that_fit()
        finally:
            self._starting = False

    def _start_those_that_fit(self) -> None:
        while self._queue:
            priority, _, saved, leaves = self._queue[0]
            in_flight_bytes = sum(self._in_flight.values())
            full = in_flight_bytes > 0 and in_flight_bytes + saved.size_bytes > IN_FLIGHT_BYTES
            if full and priority != DEMAND:
                return
            heapq.heappop(self._queue)
            try:
                if leaves:
                    self._in_flight[saved] = saved.size_bytes
                    self._carrier.copy_out(saved, functools.partial(self._left, saved))
                elif saved.coming is not None and not saved.started:  # else a demand overtook its prefetch
                    saved.started = True
                    self._in_flight[saved] = saved.size_bytes
                    self._carrier.copy_in(saved, saved.coming, functools.partial(self._came, saved))
            except BaseException:  # an interrupt, or a closed engine: nobody will report this transfer
                self._in_flight.pop(saved, None)
                raise

    def _left(self, saved: Saved, error: PenstockError | None, moved: Sequence[Moved]) -> None:
        with self._changed:
            self._leaving.pop(saved, None)
            if error is None:
                saved.away = True
                if not saved.stays:
                    self.let_go(saved)
            self._finish(saved, error, moved)

    def _came(self, saved: Saved, error: PenstockError | None, moved: Sequence[Moved]) -> None:
        with self._changed:
            if error is None:
                saved.storage = saved.coming
            saved.coming = None
            self._finish(saved, error, moved)

    def _finish(self, saved: Saved, error: PenstockError | None, moved: Sequence[Moved]) -> None:
        self._error = self._error or error
        self.moved.extend(moved)
        self._in_flight.pop(saved, None)
        self._start_transfers()
        self._changed.notify_all()

    # -- the end -------------------------------------------------------------------------------

    def drain(self) -> None:
        """Drop what is queued and wait for what is in flight, after a step has ended or failed."""
        with self._changed:
            for _, _, saved, leaves in self._queue:
                if leaves:
                    self._leaving.pop(saved, None)
                else:
                    saved.coming = None if not saved.started else saved.coming
            self._queue.clear()
            self._deferred.clear()
            while self._in_flight:
                self._changed.wait()
            if self._error is not None:
                logger.warning("a transfer failed, and nothing was lost: %s", self._error)
            self._error = None
        self._give_back_forgotten()

    def _give_back_forgotten(self) -> None:
        while self._forgotten:
            self._carrier.forget(self._forgotten.popleft())

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
