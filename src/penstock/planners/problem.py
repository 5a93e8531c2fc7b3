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
    time_limit_s   for the whole of planning; a policy that reaches it answers with what it has
    """

    trace: Trace
    hardware: Hardware
    budget_bytes: int
    recompute: bool = False
    compress: bool = False
    time_limit_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The parts of a Plan that a policy decides.

    lower_bound_s   proven; 0 where the policy proves nothing
    reason          why so, in one sentence; empty where there is nothing to say
    """

    evictions: tuple[Evict, ...] = ()
    recomputations: tuple[Recompute, ...] = ()
    variants: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    lower_bound_s: float = 0.0
    reason: str = ""


Policy = Callable[[Problem], Decision]
