"""Replays of one iteration: from a trace, a plan and a machine to a timeline."""

from penstock.simulator.events import simulate

__all__ = ["simulate"]
