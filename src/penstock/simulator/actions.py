"""What a plan does with a tensor in an inactive period: one table, which the native module defines."""

from __future__ import annotations

from typing import NamedTuple

from penstock import _native


class Action(NamedTuple):
    """tier and codec are those of an `Evict`; empty where nothing moves."""

    name: str
    tier: str
    codec: str


ACTIONS = tuple(Action(*row) for row in _native.plan_actions())
KEEP, HOST, DISK, HOST_CSR, DISK_CSR, RECOMPUTE = range(len(ACTIONS))
MOVES = {number: (action.tier, action.codec) for number, action in enumerate(ACTIONS) if action.tier}
