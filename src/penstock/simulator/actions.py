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
PACKED = (HOST_CSR, DISK_CSR)  # in the codec of the tensor: see Trace.codec
MOVES = {number: (action.tier, action.codec) for number, action in enumerate(ACTIONS) if action.tier}


def action_of(tier: str, codec: str) -> int | None:
    """The number of the action that sends a tensor there in this form; None where there is none."""
    form = "raw" if codec == "raw" else "csr"
    return next((number for number, move in MOVES.items() if move == (tier, form)), None)
