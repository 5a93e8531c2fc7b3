"""Checks of argument types: such as a path, given where its content is wanted."""

from __future__ import annotations

from penstock.core.hardware import Hardware
from penstock.core.plan import Plan
from penstock.core.trace import Trace
from penstock.errors import InvalidArgument

_WANTED: dict[str, tuple[type, str]] = {
    "trace": (Trace, "what penstock.trace returns, or penstock.Trace.load(path)"),
    "hardware": (Hardware, "what penstock.probe returns, or penstock.Hardware.load(path)"),
    "plan": (Plan, "what penstock.plan returns, or penstock.Plan.load(path)"),
}


def require_types(**given: object) -> None:
    """Raises InvalidArgument unless ``trace``, ``hardware`` and ``plan``, where given, have their types."""
    for name, value in given.items():
        kind, remedy = _WANTED[name]
        if not isinstance(value, kind):
            raise InvalidArgument(f"{name} is {type_phrase(value)}: give {remedy}")


def type_phrase(value: object) -> str:
    """``"of type str"``, ``"the class AdamW"``."""
    return f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"
