"""What leaves the device, when, where to, and when it comes back: a pure value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.core import files


@dataclass(frozen=True, slots=True)
class Evict:
    """Send one tensor away for one inactive period, and bring it back.

    tensor        index in the trace
    after         index of the last kernel that must finish before the copy may start, -1 for none
    begin         first kernel of the inactive period: the memory is free from here on, as soon
                  as the copy is complete
    end           kernel that needs the tensor again
    prefetch_at   kernel at whose start the copy back is issued, begin <= prefetch_at <= end
    tier          where the copy goes: "host" or "disk"
    codec         how the bytes are stored: "raw"
    """

    tensor: int
    after: int
    begin: int
    end: int
    prefetch_at: int
    tier: str = "disk"
    codec: str = "raw"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The decisions for one iteration.

    policy                 name in penstock.planners.POLICIES
    reason                 why this policy, in one sentence
    device_budget_bytes    the budget the plan was made for
    evictions              in the order their copies may start
    minimum_bytes          smallest device budget at which the step can run at all
    predicted_s            iteration time the simulator predicts
    predicted_peak_bytes   device bytes the simulator predicts at the worst moment
    """

    policy: str
    device_budget_bytes: int
    evictions: tuple[Evict, ...] = ()
    minimum_bytes: int = 0
    predicted_s: float = 0.0
    predicted_peak_bytes: int = 0
    reason: str = ""

    def save(self, path: str | Path) -> None:
        """Write to ``path`` as versioned JSON."""
        files.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read what `save` wrote. Raises InvalidFile where it is something else."""
        return files.load(cls, path)
