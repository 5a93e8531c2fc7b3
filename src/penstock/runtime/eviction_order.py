"""What leaves the device first where no plan says so, or where memory is short in spite of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.runtime.schedule import Schedule
from penstock.runtime.storages import NEVER, ManagedStorage


def eviction_order(
    by_use: Sequence[ManagedStorage],
    schedule: Schedule | None,
    kernel: int,
    is_numbered: Callable[[ManagedStorage], bool],
) -> Sequence[ManagedStorage]:
    """First what is used furthest in the future, where that is known, else what was used least recently.

    by_use        all that may leave, the least recently used first
    schedule      that the step follows, None for none
    kernel        of the schedule that comes next
    is_numbered   whether a storage is the schedule's tensor of its number
    """
    if schedule is None:
        return by_use

    def next_use(managed: ManagedStorage) -> int:
        return schedule.next_use(managed.index, kernel) if is_numbered(managed) else NEVER

    return sorted(by_use, key=next_use, reverse=True)
