"""The thread that answers accesses to what was dropped, which nobody announced.

On a CPU such an access, as NumPy's, waits in the device until what is missing was made: the thread that waits
may hold the interpreter, and gives it up meanwhile.
"""

from __future__ import annotations

import atexit
import threading
from typing import TYPE_CHECKING

from penstock import _native

if TYPE_CHECKING:
    from penstock.runtime.recompute import Recomputation

_answering: list[Recomputation] = []
_thread: threading.Thread | None = None
_guard = threading.Lock()

ANSWER_S = 1.0  # the thread looks so often whether it is still needed


def start_answering(recomputation: Recomputation) -> None:
    """From now on accesses that nobody announced are answered, on a CPU."""
    global _thread
    if recomputation in _answering:
        return
    with _guard:
        _answering.append(recomputation)
        if _thread is None:
            _native.arena_compute_dropped(True)
            _thread = threading.Thread(target=_answer, name="penstock-recompute", daemon=True)
            _thread.start()


def stop_answering(recomputation: Recomputation) -> None:
    """Nothing of it is dropped any more."""
    global _thread
    with _guard:
        if recomputation in _answering:
            _answering.remove(recomputation)
        ended = _thread if not _answering else None
        if ended is not None:
            _thread = None
            _native.arena_compute_dropped(False)
    if ended is not None:
        ended.join(2 * ANSWER_S)


@atexit.register  # a thread that waits in native code cannot be ended by the interpreter
def _stop_answering_all() -> None:
    for recomputation in list(_answering):
        stop_answering(recomputation)


def _answer() -> None:
    while _thread is threading.current_thread():
        question = _native.arena_wait_for_question(ANSWER_S)
        if question is None:
            continue
        number, address, is_write, asker = question
        owner = next((known for known in list(_answering) if known.at(address) is not None), None)
        if owner is not None and owner.is_held_by(asker):
            _native.arena_answer(number, owner.answer_holder(address, is_write))
        else:  # on a thread of its own: who has the lock that it waits for may ask too
            thread = threading.Thread(target=_answer_one, args=(owner, *question[:3]), daemon=True)
            thread.start()


def _answer_one(owner: Recomputation | None, number: int, address: int, is_write: bool) -> None:
    done = False
    try:
        done = owner is not None and owner.answer(address, is_write)
    finally:
        _native.arena_answer(number, done)
