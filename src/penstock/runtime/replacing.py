"""What a run puts in the places of torch's own functions while it is open."""

from __future__ import annotations

import contextlib
from typing import Any


def replace(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Until ``undo`` is closed ``owner`` has this by that name; then what it had, or inherited, again."""
    if name in vars(owner):
        undo.callback(setattr, owner, name, vars(owner)[name])
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, value)
