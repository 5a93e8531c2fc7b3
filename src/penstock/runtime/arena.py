"""Memory for torch's CPU tensors that goes back to the system as soon as it is free.

On a CPU the system's allocator decides how much memory the process holds: glibc keeps and fragments
what a training step frees. penstock therefore owns an arena for torch's CPU tensors, as torch owns
one on a GPU: `activate` sends every tensor of 4096 bytes or more there, whoever allocates it, until
the last lease is closed. Blocks allocated meanwhile live on for as long as their tensors do.

With a budget the arena keeps the bytes of all blocks in memory within it: blocks leave memory and come
back at the address they had, so that views, NumPy arrays and other threads never see them move. What
leaves and when is the caller's choice (``penstock._native``: ``arena_guard``, ``arena_leave``,
``arena_stage``, ``arena_arrive``); the arena itself writes blocks to a swap file (``arena_swap_file``)
where an allocation would exceed the budget otherwise, and reads back what somebody touches unplanned.

The arena takes the place of ``posix_memalign`` and ``free`` in torch's libc10 alone, for the life of
the process. Where that cannot be done (another system, another build of torch, ``PENSTOCK_ARENA=0``)
the C library is asked to give large blocks back to the system instead: slower, and less exact.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
from typing import TYPE_CHECKING

from penstock.errors import InvalidArgument

try:
    from penstock import _native

    _missing = ""
except ImportError as _error:  # not built: see `available`
    _missing = str(_error)

if TYPE_CHECKING:
    from types import TracebackType

    from penstock._native import ArenaStats

logger = logging.getLogger("penstock")

ARENA = "arena"
MMAP_THRESHOLD = "mmap threshold"
SYSTEM = "system"

_LIBRARY = "/libc10.so"
_M_MMAP_THRESHOLD = -3  # malloc.h
_THRESHOLD_BYTES = 1 << 20

_lock = threading.Lock()
_limits: dict[Lease, tuple[int, int | None]] = {}
_manager: str | None = None
_reason: str | None = None


class Lease:
    """The arena in use with a limit, until `close`. A context manager.

    Leases add up: the arena is kept below the sum of the limits of all that are open, and within the sum
    of the budgets of those that have one.
    """

    def __init__(self, limit_bytes: int, budget_bytes: int | None = None) -> None:
        _check(limit_bytes, budget_bytes)
        with _lock:
            _limits[self] = limit_bytes, budget_bytes
            _apply()

    @property
    def limit_bytes(self) -> int:
        """Bytes this lease adds to the arena's limit, 0 once it is closed."""
        return _limits.get(self, (0, None))[0]

    @property
    def budget_bytes(self) -> int | None:
        """Bytes this lease adds to the arena's budget, None if it has none or is closed."""
        return _limits.get(self, (0, None))[1]

    def set_limit(self, limit_bytes: int) -> None:
        """Change the limit: what is free above it goes back to the system at once. No-op once closed."""
        _check(limit_bytes, None)
        with _lock:
            if self in _limits:
                _limits[self] = limit_bytes, _limits[self][1]
                _apply()

    def set_budget(self, budget_bytes: int | None) -> None:
        """Change the budget. Nothing leaves before the next allocation needs room. No-op once closed."""
        _check(0, budget_bytes)
        with _lock:
            if self in _limits:
                _limits[self] = _limits[self][0], budget_bytes
                _apply()

    def close(self) -> None:
        """End the lease. After the last one, new tensors come from the C library again. Idempotent."""
        with _lock:
            if _limits.pop(self, None) is not None:
                _apply()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def activate(limit_bytes: int, budget_bytes: int | None = None) -> Lease:
    """Keep the memory of torch's CPU tensors in the arena, resident below ``limit_bytes``.

    The limit is soft: an allocation never fails because of it, it only decides how much free memory
    is kept for reuse. Where the arena cannot be used this logs the reason once and returns a lease that
    limits nothing: see `memory_manager`.

    ``budget_bytes`` bounds the bytes of tensors that are in memory, as they were requested, exactly: an
    allocation that does not fit fails, after blocks have left for the swap file. It needs
    `paging_unavailable` to be None.
    """
    _install()
    if budget_bytes is not None and (reason := paging_unavailable()) is not None:
        raise InvalidArgument(f"tensors cannot be kept within {budget_bytes} bytes: {reason}")
    return Lease(limit_bytes, budget_bytes)


def available() -> str | None:
    """None where the arena works, else why it does not. Installs it, without activating it."""
    _install()
    return _reason


def paging_unavailable() -> str | None:
    """None where tensors' bytes can leave memory and come back at their address, else why they cannot."""
    _install()
    return _reason if _reason is not None else _native.arena_paging_unavailable()


def memory_manager() -> str:
    """Who gives free tensor memory back to the system: "arena", "mmap threshold" or "system".

    "system" before the first `activate`, and where neither of the others can be had.
    """
    return _manager or SYSTEM


def stats() -> ArenaStats | None:
    """The arena's counters, or None where there is no arena. Takes less than a microsecond."""
    if _manager != ARENA:
        return None
    return _native.arena_stats()


def reset_peak() -> None:
    """Start the peaks anew, from what is in use and resident now."""
    if _manager == ARENA:
        _native.arena_reset_peak()


def trim() -> None:
    """Give every free chunk of the arena back to the system."""
    if _manager == ARENA:
        _native.arena_trim()


def block(address: int) -> tuple[int, int, int] | None:
    """(start, capacity in bytes, serial number) of the arena's block that holds ``address``, if any."""
    if _manager != ARENA:
        return None
    return _native.arena_block(address)


def _check(limit_bytes: int, budget_bytes: int | None) -> None:
    if limit_bytes < 0:
        raise InvalidArgument(f"a limit of {limit_bytes} bytes is negative: give zero or more")
    if budget_bytes is not None and budget_bytes < 0:
        raise InvalidArgument(f"a budget of {budget_bytes} bytes is negative: give zero or more")


def _apply() -> None:
    """Tell the arena the sums of the limits and budgets. Called with the lock held."""
    if _manager != ARENA:
        return
    if _limits:
        budgets = [budget for _, budget in _limits.values() if budget is not None]
        _native.arena_activate(sum(limit for limit, _ in _limits.values()), sum(budgets) if budgets else None)
    else:
        _native.arena_deactivate()


def _install() -> None:
    global _manager, _reason
    with _lock:
        if _manager is not None:
            return
        _reason = _install_arena()
        if _reason is None:
            _manager = ARENA
            return
        _manager = MMAP_THRESHOLD if _set_mmap_threshold() else SYSTEM
    logger.warning(
        "penstock's arena is not in use: %s. Tensor memory is managed by %s instead: expect slower "
        "steps and more resident memory.",
        _reason,
        f"the C library with a {MMAP_THRESHOLD} of 1 MiB" if _manager == MMAP_THRESHOLD else "the C library",
    )


def _install_arena() -> str | None:
    """None once torch allocates through the arena, else why it cannot."""
    if os.environ.get("PENSTOCK_ARENA", "1") == "0":
        return "PENSTOCK_ARENA=0 is set"
    if not sys.platform.startswith("linux"):
        return "it is Linux's"
    if _missing:
        return (
            f"penstock._native cannot be imported ({_missing}): install penstock again, with a C++ compiler"
        )
    import torch  # noqa: F401  the library to hook must be loaded

    if not _native.arena_install(_LIBRARY):
        return f"this build of torch does not allocate through a shared {_LIBRARY[1:]}"
    return None


def _set_mmap_threshold() -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        return bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES))
    except AttributeError:  # musl has no mallopt
        return False
