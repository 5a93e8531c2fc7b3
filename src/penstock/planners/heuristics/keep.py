"""Keep every tensor on the device."""

from __future__ import annotations

from penstock.planners.problem import Decision, Problem


def keep(problem: Problem) -> Decision:
    """No evictions, whatever the budget."""
    return Decision()
