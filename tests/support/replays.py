"""What the native replay, on which the search relies, counts without copies taking time."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.columns import IntArray
from penstock.simulator import Intervals, Replay


def static_bytes(replay: Replay, intervals: Intervals, variants: Sequence[int] = ()) -> IntArray:
    """[K] device bytes at each kernel: what the plan checker goes by."""
    found: IntArray = replay.native.static_bytes(replay.columns(intervals, variants))
    return found


def copied_bytes(replay: Replay, intervals: Intervals) -> dict[str, IntArray]:
    """[K] bytes that copies occupy during each kernel, on "host" and on "disk"."""
    host, disk = replay.native.tier_bytes(replay.columns(intervals))
    return {"host": host, "disk": disk}
