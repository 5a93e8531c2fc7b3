"""Every storage of the program: how large it is, where its bytes are, and who uses it now.

A `ManagedStorage` goes through these states. All transitions are made by `penstock.runtime.copy_engine`.

::

                 evict                 copy complete, released
    RESIDENT ───────────► LEAVING ─────────────────────────────► AWAY
        ▲                    │                                     │ prefetch, demand
        │    copy complete,  │                                     ▼
        ├────────────────────┘                                  COMING
        └──────────────────────────────────────────────────────────┘
                                 copy complete

A resident storage that a kernel can make again may be DROPPED, and is RESIDENT when that kernel has run
again: penstock.runtime.recompute.

A large weight, its gradient and its optimizer state are divided on a CPU: each part is a `ManagedStorage`,
with a state of its own.

A resident storage is clean while its copy in ``slot`` has the same bytes: it is released at no cost.

Both classes are C++, since the clock of kernels reads them for every operator: csrc/runtime/storages.hpp.
`Storages` are those that are alive, found by their tensors.
"""

from __future__ import annotations

from penstock._native import ManagedStorage, Storages

__all__ = ["ManagedStorage", "Storages"]

RESIDENT, LEAVING, AWAY, COMING, DROPPED = range(5)
STATES = ("RESIDENT", "LEAVING", "AWAY", "COMING", "DROPPED")

NEVER = 1 << 62
