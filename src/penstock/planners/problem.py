"""What a policy is asked, and what it answers: pure values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.core.hardware import Hardware
from penstock.core.plan import Evict, Recompute
from penstock.core.trace import Trace


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """One iteration to be planned.

    budget_bytes   of the device, at least `penstock.core.memory_profile.minimum_bytes`
    recompute      tensors may be recomputed instead of being moved
    compress       tensors may be moved as bitmask-CSR
    lossy          codec in which what is saved for backward may leave, of penstock.core.columns.LOSSY; the
                   trace is `with_lossy` then
    time_limit_s   for the whole of planning; a policy that reaches it answers with what it has
    """

    trace: Trace
    hardware: Hardware
    budget_bytes: int
    recompute: bool = False
    compress: bool = False
    lossy: str | None = None
    time_limit_s: float = 10.0

    @property
    def packs(self) -> bool:
        """Whether tensors may leave compressed, in any codec."""
        return self.compress or self.lossy is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The parts of a Plan that a policy decides.

    lower_bound_s   proven; 0 where the policy proves nothing
    reason          why so, in one sentence; empty where there is nothing to say
    """

    evictions: tuple[Evict, ...] = ()
    recomputations: tuple[Recompute, ...] = ()
    variants: tuple[int, ...] = ()
    lower_bound_s: float = 0.0
    reason: str = ""


Policy = Callable[[Problem], Decision]
