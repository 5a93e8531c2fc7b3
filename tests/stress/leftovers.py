"""What a program leaves behind: nothing."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from pathlib import Path

from penstock.runtime import arena, open_runs

PATIENCE_S = 10.0  # threads end, and files are closed, a moment later


def count(place: Path) -> dict[str, object]:
    """Everything that is in use now, by name."""
    stats = arena.stats()
    return {
        "in_use_bytes": stats.in_use_bytes,
        "in_memory_bytes": stats.in_memory_bytes,
        "foreign_bytes": stats.foreign_bytes,
        "out_bytes": stats.out_bytes,
        "swap_used_bytes": stats.swap_used_bytes,
        "runs open": len(open_runs.opened),
        "runs that linger": len(open_runs.lingering),
        "threads": len(_threads()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "files": sorted(os.listdir(place)),
    }


def _threads() -> list[str]:
    """Of this process, but for those of io_uring, which the kernel keeps as it likes."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            names.append((task / "comm").read_text().strip())
    return sorted(name for name in names if not name.startswith("iou-wrk"))


def settled(place: Path) -> dict[str, object]:
    """What is in use when nothing goes on any more."""
    time.sleep(0.2)  # threads are ending
    _settle()
    return count(place)


def _settle() -> None:
    gc.collect()
    for left in tuple(open_runs.lingering):
        left._give_back()


def check(before: dict[str, object], place: Path) -> None:
    """As much is in use as before, soon. Raises AssertionError."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        _settle()
        now = count(place)
        # Some that were there may have ended.
        changed = {name: (before[name], now[name]) for name in now if now[name] != before[name]}
        changed = {
            name: pair
            for name, pair in changed.items()
            if name not in ("threads", "descriptors") or pair[1] > pair[0]  # type: ignore[operator]
        }
        if not changed:
            return
        if time.monotonic() > deadline_s:
            raise AssertionError(f"something is left (before, now): {changed}; threads: {_threads()}")
        time.sleep(0.01)
