"""What leaves the device, when, where to, and when it comes back: a pure value."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from penstock.core import files
from penstock.core.tables import html_table
from penstock.core.trace import Trace
from penstock.options import LOSSY
from penstock.units import format_bytes, format_bytes_up, format_seconds

CODECS = ("raw", "csr", *LOSSY)  # csr: bitmask-CSR, lossless


@dataclass(frozen=True, slots=True)
class Evict:
    """Send one tensor away for one inactive period, or a part of it, and bring it back.

    tensor        index in the trace
    after         index of the last kernel that must finish before the copy may start, -1 for none
    begin         first kernel at which it is away: the memory is free from here on, as soon
                  as the copy is complete
    end           kernel that needs the tensor again; K + k is kernel k of the next iteration
    prefetch_at   kernel at whose start the copy back is issued, begin <= prefetch_at <= end
    tier          where the copy goes: "host" or "disk"
    codec         how the bytes are stored, of CODECS. What is stored compressed is compressed by the
                  device before kernel `begin`, where its copy starts, and expanded before kernel `end`
    """

    tensor: int
    after: int
    begin: int
    end: int
    prefetch_at: int
    tier: str = "disk"
    codec: str = "raw"


@dataclass(frozen=True, slots=True)
class Recompute:
    """Release one tensor, and recompute it when it is needed.

    tensor   index in the trace; kernel ``trace.tensor_recompute[tensor]`` makes it
    begin    first kernel at which it is away
    end      kernel that needs it again: the kernel that makes it runs again before. Several that are
             due at one kernel are made in the order of the plan. K + k is kernel k of the next iteration
    """

    tensor: int
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Plan(files.Saveable):
    """The decisions for one iteration.

    policy                 name in penstock.planners.POLICIES
    reason                 why this policy, in one sentence
    device_budget_bytes    the budget the plan was made for
    evictions              in the order their copies may start
    recomputations         in the order in which they are made
    variants               [K] which of a kernel's variants runs, -1 for the kernel as traced; empty
                           where all run as traced
    minimum_bytes          smallest device budget at which the step can run at all
    predicted_step_s       iteration time the simulator predicts
    predicted_peak_bytes   device bytes the simulator predicts at the worst moment
    lower_bound_s          no plan for this trace, budget and these choices is faster: proven
    trace                  the iteration the plan is for, so that a plan made anywhere can be run; None
                           where it was made by hand. It is saved with the plan, and not compared
    """

    policy: str
    device_budget_bytes: int
    evictions: tuple[Evict, ...] = ()
    recomputations: tuple[Recompute, ...] = ()
    variants: tuple[int, ...] = ()
    minimum_bytes: int = 0
    predicted_step_s: float = 0.0
    predicted_peak_bytes: int = 0
    lower_bound_s: float = 0.0
    reason: str = ""
    trace: Trace | None = field(default=None, compare=False, repr=False)

    def __repr__(self) -> str:
        again = f", {len(self.recomputations)} recomputations" if self.recomputations else ""
        again += f", lossy ({self.lossy})" if self.lossy else ""
        return (
            f"<penstock.Plan by {self.policy}: {len(self.evictions)} evictions{again}, predicted peak "
            f"{format_bytes(self.predicted_peak_bytes)} of {format_bytes(self.device_budget_bytes)}, "
            f"{format_seconds(self.predicted_step_s)}>"
        )

    def _repr_html_(self) -> str:
        """In a notebook."""
        tiers = Counter(evict.tier for evict in self.evictions)
        evictions = ", ".join(f"{count} to {tier}" for tier, count in tiers.items()) or "none"
        bound = "none proven"
        if self.gap is not None:
            bound = f"{format_seconds(self.lower_bound_s)}: this plan is {self.gap:.1%} above the bound"
        rows = [
            ("predicted step", format_seconds(self.predicted_step_s)),
            ("bound", bound),
            ("predicted peak", format_bytes(self.predicted_peak_bytes)),
            ("device budget", format_bytes(self.device_budget_bytes)),
            ("minimum", format_bytes_up(self.minimum_bytes)),
            ("evictions", evictions),
            ("recomputations", str(len(self.recomputations) or "none")),
        ]
        rows += [("lossy", self.lossy_text)] if self.lossy else []
        return html_table(rows, title=f"penstock plan, policy {self.policy}: {self.reason}")

    @property
    def lossy(self) -> str | None:
        """The lossy codec that tensors leave in, of penstock.options.LOSSY; None where all of them come
        back with the same bits."""
        return next((evict.codec for evict in self.evictions if evict.codec in LOSSY), None)

    @property
    def lossy_text(self) -> str:
        """What `lossy` means, for people; empty where nothing is lost."""
        if self.lossy is None:
            return ""
        count = len({evict.tensor for evict in self.evictions if evict.codec in LOSSY})
        return (
            f"lossy: {count} of the activations saved for backward are rounded to {self.lossy}, so gradients "
            "are others than without; forward, weights and optimizer state keep their bits"
        )

    @property
    def gap(self) -> float | None:
        """How far `predicted_step_s` is above `lower_bound_s`, as a share of it; None where there is none."""
        return self.predicted_step_s / self.lower_bound_s - 1 if self.lower_bound_s > 0 else None
