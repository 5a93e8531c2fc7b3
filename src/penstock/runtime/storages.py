"""Every storage of the program: how large it is, where its bytes are, and who uses it now.

A `ManagedStorage` goes through these states. All transitions are made by `penstock.runtime.copies`.

::

                 evict                 copy complete, released
    RESIDENT ───────────► LEAVING ─────────────────────────────► AWAY
        ▲                    │                                     │ prefetch, demand
        │    copy complete,  │                                     ▼
        ├────────────────────┘                                  COMING
        └──────────────────────────────────────────────────────────┘
                                 copy complete

A resident storage is clean while its copy in ``slot`` has the same bytes: it is released at no cost.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

RESIDENT, LEAVING, AWAY, COMING = range(4)
STATES = ("RESIDENT", "LEAVING", "AWAY", "COMING")

# Smaller storages cost more to move than they free. They stay, and count.
SMALLEST_BYTES = 64 << 10

NEVER = 1 << 62


class _Reference(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a storage that knows its `ManagedStorage`."""

    __slots__ = ("managed",)
    managed: ManagedStorage


class ManagedStorage:
    """One storage of the program.

    key         identifies the storage while it lives
    size_bytes  of the storage
    state       of STATES
    clean       while resident: `slot` holds the same bytes
    guarded     the device notices writes to it by itself
    keeps_copy  when it is back, its copy is worth keeping valid
    released    while leaving: its bytes are released when the copy is complete
    slot        where its copy is, or will be; what it is only the device knows. None: it has none
    movable     it can leave the device
    pins        kernels that use it now
    index       number in the trace of the step `step`
    kind        of penstock.core.trace.KINDS, as an index
    lasts       it was there before the step, or the optimizer keeps it
    last_use    tick of the last kernel that used it
    hold        what keeps the storage alive while a copy is under way
    place       where the device keeps it: an address on a CPU
    """

    __slots__ = (
        "birth",
        "clean",
        "guarded",
        "hold",
        "index",
        "keeps_copy",
        "key",
        "kind",
        "last_use",
        "lasts",
        "movable",
        "pins",
        "place",
        "queued",
        "reference",
        "released",
        "size_bytes",
        "slot",
        "state",
        "step",
        "void",
    )

    def __init__(
        self, storage: torch.UntypedStorage, size_bytes: int, died: Callable[[_Reference], None]
    ) -> None:
        self.reference = _Reference(storage, died)
        self.reference.managed = self
        self.key: int = storage._cdata
        self.size_bytes = size_bytes
        self.state = RESIDENT
        self.clean = False
        self.guarded = False
        self.keeps_copy = True
        self.released = False
        self.void = False  # while leaving: it was written, the copy is of no use
        self.queued = False  # a copy is waiting for its turn
        self.slot: Any = None
        self.movable = False
        self.pins = 0
        self.index = -1
        self.step = -1
        self.birth = -1
        self.kind = -1
        self.lasts = False
        self.last_use = 0
        self.hold: torch.UntypedStorage | None = None
        self.place: Any = None

    def storage(self) -> torch.UntypedStorage | None:
        """The storage, None once it is dead."""
        return self.reference()  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        clean = ", clean" if self.clean else ""
        return f"<ManagedStorage {self.index}: {self.size_bytes} bytes, {STATES[self.state]}{clean}>"


class Storages:
    """The storages that are alive, found by their tensors.

    adopt     decides whether a storage can be moved, and prepares it: called once for each one, with
              whether a kernel has just made it
    buried    is told of each one that has died
    """

    def __init__(
        self,
        adopt: Callable[[ManagedStorage, torch.UntypedStorage, bool], bool],
        buried: Callable[[ManagedStorage], None],
        smallest_bytes: int = SMALLEST_BYTES,
    ) -> None:
        self._adopt = adopt
        self._buried = buried
        self._smallest_bytes = smallest_bytes
        self.by_key: dict[int, ManagedStorage] = {}
        # Filled anywhere, on any thread, by a call that nothing can interrupt.
        self.dead: deque[_Reference] = deque()
        # Movable ones, the least recently used first. Those that are not resident are among them.
        self.by_use: OrderedDict[int, ManagedStorage] = OrderedDict()

    def __iter__(self) -> Iterator[ManagedStorage]:
        return iter(list(self.by_key.values()))

    def __len__(self) -> int:
        return len(self.by_key)

    def find(self, storage: torch.UntypedStorage) -> ManagedStorage | None:
        """The managed storage, None where it was not met before."""
        return self.by_key.get(storage._cdata)

    def meet(self, storage: torch.UntypedStorage, made: bool = False) -> ManagedStorage:
        """The managed storage; from now on it is one.

        made   a kernel has just made it
        """
        key = storage._cdata
        managed = self.by_key.get(key)
        if managed is None:
            size_bytes = storage.nbytes()
            managed = ManagedStorage(storage, size_bytes, self.dead.append)
            self.by_key[key] = managed
            if size_bytes >= self._smallest_bytes and self._adopt(managed, storage, made):
                managed.movable = True
                self.by_use[key] = managed
        return managed

    def bury(self) -> None:
        """Forget those that have died. Call it before storages are looked up."""
        while self.dead:
            managed = self.dead.popleft().managed
            if self.by_key.get(managed.key) is managed:
                del self.by_key[managed.key]
                self.by_use.pop(managed.key, None)
            self._buried(managed)
