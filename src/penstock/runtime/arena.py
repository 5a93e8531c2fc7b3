"""Memory for torch's CPU tensors inside a byte budget: bytes leave and come back, addresses never change.

penstock owns an arena for torch's CPU tensors, as torch owns one on a GPU: `activate` sends every tensor of
4096 bytes or more there, whoever allocates it, until the last lease is closed. Blocks allocated meanwhile
live on for as long as their tensors do; a lease that lingers keeps those that are out.

Below Python the arena keeps the budget by itself: an allocation that would exceed it first writes blocks to
its swap file, the least recently used first; and an access to what is away waits until it is back, on
whichever thread, with or without the GIL. The runtime plans so that neither happens.

The arena takes the place of ``posix_memalign`` and ``free`` in torch's libc10 alone, for the life of the
process; where torch has an allocator of its own, that of ``c10::alloc_cpu`` and ``c10::free_cpu``.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import TYPE_CHECKING

try:
    from penstock import _native

    _missing = ""
except ImportError as _error:  # not built: see `unavailable`
    _missing = str(_error)

if TYPE_CHECKING:
    from types import TracebackType

    from penstock._native import ArenaStats

logger = logging.getLogger("penstock")

_LIBRARY = "/libc10.so"

# Physical memory beside the budget: what rounding takes, and free pages kept for reuse.
_SPARE_FRACTION = 0.05
_SPARE_BYTES = 4 << 20

Swap = tuple[int, int, int, int]  # see Lease

_lock = threading.Lock()
_budgets: dict[ArenaLease, int] = {}
_lingering: dict[ArenaLease, int] = {}
_asked = False
_reason: str | None = None


class ArenaLease:
    """The arena in use with a budget, until `close`. A context manager.

    Leases add up: the arena is kept inside the sum of the budgets of all that are open. What is in memory
    when the first of them opens is beside their budgets, and stays there.

    swap   (descriptor for direct I/O or -1, descriptor, most bytes, where these begin) of the file for what
           the arena evicts by itself; it belongs to the caller. The arena uses that of the first lease that
           gave one, and when that one is closed the next one's. Of a namespace: (-1, its handle, and so on)
    """

    def __init__(self, budget_bytes: int, swap: Swap | None = None) -> None:
        self._swap = swap
        self._gives_swap = False
        with _lock:
            if swap is not None and not any(lease._gives_swap for lease in (*_budgets, *_lingering)):
                self._gives_swap = _native.arena_swap_file(*swap)
            if not _budgets:
                _native.arena_disown_all()
            _budgets[self] = budget_bytes
            try:
                _apply()
            except BaseException:
                del _budgets[self]
                if not _budgets and not _lingering:
                    _native.arena_own_all()
                if self._gives_swap:
                    _pass_swap_on()
                raise

    def set_budget(self, budget_bytes: int) -> None:
        """Change the budget. No-op once closed."""
        with _lock:
            if self in _budgets:
                _budgets[self] = budget_bytes
                _apply()

    def close(self, brings_back: bool = False) -> bool:
        """End the lease; after the last one, new tensors come from the C library again. False: its swap file
        is still needed, and so it lingers: what is out stays out until it is touched, and what is in memory
        is kept within the budget while no other lease is open, but for what was there before. Idempotent.

        brings_back   what is out first: False, too, where that does not fit the budget, or cannot be read now
        """
        problem: OSError | None = None
        with _lock:
            if self not in _budgets and self not in _lingering:
                return True
            stats = _native.arena_stats()
            own_bytes, most_bytes = stats.in_use_bytes - stats.foreign_bytes, stats.budget_bytes
            fits = most_bytes is None or own_bytes <= most_bytes
            ended = not brings_back or fits or stats.out_bytes == 0
            budget_bytes = _budgets.pop(self) if self in _budgets else _lingering.pop(self)
            if not _budgets:
                _native.arena_deactivate()  # nothing leaves any more but what is on its way
            _native.arena_kernel_over()
            try:
                if brings_back and ended:
                    _native.arena_bring_in_all()  # those, too, that no kernel has used
            except OSError as error:
                problem, ended = error, False
            if ended and self._gives_swap:
                ended = _pass_swap_on()
                self._gives_swap = not ended
            if not ended:
                _lingering[self] = budget_bytes
            _apply()
            if not _budgets and not _lingering:
                _native.arena_own_all()
                _native.arena_leave_faults()
        if problem is not None:
            logger.warning(
                "tensors that are away cannot be brought back now, and come when they are touched: %s",
                problem,
            )
        return ended

    def __enter__(self) -> ArenaLease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def activate(budget_bytes: int, swap: Swap | None = None) -> ArenaLease:
    """Keep torch's CPU tensors in the arena, those in memory within ``budget_bytes``.

    An allocation that cannot fit fails as if the machine had no memory left. `unavailable` must be None.
    """
    return ArenaLease(budget_bytes, swap)


def unavailable() -> str | None:
    """Why the arena cannot work here; None where it can. Installs it, without activating it."""
    global _asked, _reason
    with _lock:
        if not _asked:
            _reason = _install()
            _asked = True
    return _reason


def stats() -> ArenaStats:
    """The arena's counters. Takes about a microsecond."""
    return _native.arena_stats()


def _apply() -> None:
    """Tell the arena the sum of the budgets. Called with the lock held."""
    budget_bytes = sum((_budgets or _lingering).values())
    limit_bytes = budget_bytes + int(budget_bytes * _SPARE_FRACTION) + _SPARE_BYTES
    if _budgets:
        _native.arena_activate(limit_bytes, budget_bytes)
    else:
        _native.arena_deactivate()
        if _lingering:
            _native.arena_set_limit(limit_bytes, budget_bytes)


def _pass_swap_on() -> bool:
    """Have the arena use another lease's swap file, where one gave any. False: the one in use holds blocks.
    Called with the lock held."""
    for lease in (*_budgets, *_lingering):
        if lease._swap is not None:
            lease._gives_swap = _native.arena_swap_file(*lease._swap)
            return lease._gives_swap
    return _native.arena_swap_file(-1, -1, 0)


def _install() -> str | None:
    """None once torch allocates through the arena, else why it cannot."""
    if os.environ.get("PENSTOCK_ARENA", "1") == "0":
        return "PENSTOCK_ARENA=0 is set"
    if not sys.platform.startswith("linux"):
        return "it needs Linux"
    if _missing:
        return (
            f"penstock._native cannot be imported ({_missing}): install penstock again, with a C++ compiler"
        )
    import torch  # noqa: F401  the library to hook must be loaded

    if not _native.arena_install(_LIBRARY):
        return f"this build of torch does not allocate through a shared {_LIBRARY[1:]}"
    return _native.arena_paging_unavailable()
