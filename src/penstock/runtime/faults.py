"""A thread that recomputes dropped tensors at unplanned accesses.

On a CPU the arena catches such an access, as by NumPy, and blocks the thread that made it. Where that thread
holds the GIL, the arena releases it meanwhile.
"""

from __future__ import annotations

import atexit
import threading
from typing import TYPE_CHECKING

from penstock import _native

if TYPE_CHECKING:
    from penstock.runtime.recompute import Recomputation

_served: list[Recomputation] = []
_thread: threading.Thread | None = None
_guard = threading.Lock()

POLL_S = 1.0  # the thread checks this often whether it is still needed


def start_serving(recomputation: Recomputation) -> None:
    """From now on, a fault in a tensor that ``recomputation`` dropped makes it recompute the tensor."""
    global _thread
    if recomputation in _served:
        return
    with _guard:
        _served.append(recomputation)
        if _thread is None:
            _native.arena_compute_dropped(True)
            _thread = threading.Thread(target=_serve, name="penstock-recompute", daemon=True)
            _thread.start()


def stop_serving(recomputation: Recomputation) -> None:
    """It has dropped nothing any more. The thread ends with the last one."""
    global _thread
    with _guard:
        if recomputation in _served:
            _served.remove(recomputation)
        ended = _thread if not _served else None
        if ended is not None:
            _thread = None
            _native.arena_compute_dropped(False)
    if ended is not None:
        ended.join(2 * POLL_S)


@atexit.register  # a thread that waits in native code cannot be ended by the interpreter
def _stop_serving_all() -> None:
    for recomputation in list(_served):
        stop_serving(recomputation)


def _serve() -> None:
    while _thread is threading.current_thread():
        fault = _native.arena_wait_for_fault(POLL_S)
        if fault is None:
            continue
        number, address, is_write, faulting_thread = fault
        owner = next((known for known in list(_served) if known.find(address) is not None), None)
        if owner is not None and owner.lock_is_held_by(faulting_thread):
            _native.arena_end_fault(number, owner.serve_fault_of_lock_holder(address, is_write))
        else:  # on a thread of its own: the thread that holds the lock it waits for may fault, too
            threading.Thread(target=_serve_one, args=(owner, *fault[:3]), daemon=True).start()


def _serve_one(owner: Recomputation | None, number: int, address: int, is_write: bool) -> None:
    done = False
    try:
        done = owner is not None and owner.serve_fault(address, is_write)
    finally:
        _native.arena_end_fault(number, done)
