"""What a plan costs and brings, in a few numbers: a pure value, made from a plan and its timeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.core.plan import Plan
from penstock.core.timeline import Span, Timeline
from penstock.core.trace import Trace
from penstock.core.wear import DiskWear
from penstock.units import format_bytes, format_bytes_up, format_seconds

SPILL_TIERS = ("host", "disk")
WRITE_LINK = {"host": "device_to_host", "disk": "disk_write"}
READ_LINK = {"host": "host_to_device", "disk": "disk_read"}
CAUSES = ("prefetch", "memory")
# By which an estimate has been wrong: 526 ms predicted and 1.08 s measured, 6.3 s and 11.3 s.
ESTIMATED = "runs took up to 2.1 x that"

EXTRA_WORK = ("recompute", "compress", "expand")  # what the compute stream does beside the trace's kernels


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One plan on one machine, in bytes and seconds of one iteration.

    predicted_step_s  by the simulator
    ideal_s           with every tensor resident
    lower_bound_s     proven; 0 where nothing was
    peak_bytes        of the device, predicted
    written_bytes, read_bytes, tier_peak_bytes   by spill tier
    stall_s           by cause
    endurance_bytes   that may be written to the disk in its life; None where not given
    measured          kernels were timed; otherwise their times are estimates
    compute_s         by entry of EXTRA_WORK: time the compute stream spends beside the trace's kernels
    """

    policy: str
    predicted_step_s: float
    ideal_s: float
    lower_bound_s: float
    peak_bytes: int
    budget_bytes: int
    in_memory_bytes: int
    minimum_bytes: int
    evictions: int
    recomputations: int
    written_bytes: dict[str, int]
    read_bytes: dict[str, int]
    tier_peak_bytes: dict[str, int]
    stall_s: dict[str, float]
    compute_s: dict[str, float]
    endurance_bytes: int | None = None
    measured: bool = True

    @property
    def over_ideal(self) -> float | None:
        """Predicted time over the ideal one; None where the ideal is zero."""
        return self.predicted_step_s / self.ideal_s if self.ideal_s > 0 else None

    @property
    def gap(self) -> float | None:
        """How far the predicted time is above the bound, as a fraction of it; None without a bound."""
        return self.predicted_step_s / self.lower_bound_s - 1 if self.lower_bound_s > 0 else None

    @property
    def disk_wear(self) -> DiskWear:
        return DiskWear(
            written_bytes=self.written_bytes["disk"],
            step_s=self.predicted_step_s,
            endurance_bytes=self.endurance_bytes,
        )

    def rows(self) -> list[tuple[str, str]]:
        """For people: what it is, and how much."""
        step = format_seconds(self.predicted_step_s)
        step += "" if self.over_ideal is None else f", {self.over_ideal:.2f} x the ideal"
        step += "" if self.measured else f"; estimated ({ESTIMATED}): bytes are exact, times are not"
        bound = "none proven"
        if self.gap is not None:
            bound = f"{format_seconds(self.lower_bound_s)}: this plan is {percent(self.gap)} above the bound"
            bound += "; it is the ideal" if self.bound_is_ideal else ""
        peak = (
            f"{format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)} budget; "
            f"{format_bytes(self.in_memory_bytes)} with everything in memory, "
            f"minimum {format_bytes_up(self.minimum_bytes)}"
        )
        moved = "; ".join(
            f"{tier} {format_bytes(self.written_bytes[tier])} out, {format_bytes(self.read_bytes[tier])} in, "
            f"{format_bytes(self.tier_peak_bytes[tier])} held"
            for tier in SPILL_TIERS
            if self.written_bytes[tier] or self.read_bytes[tier]
        )
        again = []
        if self.recomputations:
            took = format_seconds(self.compute_s["recompute"])
            again.append(f"{self.recomputations} tensors recomputed in {took}")
        if packing := self.compute_s["compress"] + self.compute_s["expand"]:
            again.append(f"{format_seconds(packing)} to compress and expand")
        return [
            ("predicted step", step),
            ("bound", bound),
            ("predicted peak", peak),
            ("moved", moved or "nothing"),
            ("recomputed", ", ".join(again) or "nothing"),
            ("stalls", self.stall_text()),
            ("disk wear", str(self.disk_wear)),
        ]

    def timing(self) -> tuple[str, ...]:
        """For people: time, over the ideal, above the bound, stalls, bytes evicted."""
        return (
            format_seconds(self.predicted_step_s),
            f"{self.over_ideal:.2f} x" if self.over_ideal is not None else "",
            percent(self.gap) if self.gap is not None else "",
            format_seconds(stalls) if (stalls := sum(self.stall_s.values())) else "none",
            format_bytes(evicted) if (evicted := sum(self.written_bytes.values())) else "none",
        )

    @property
    def bound_is_ideal(self) -> bool:
        return self.lower_bound_s <= self.ideal_s * (1 + 1e-9)

    def stall_text(self) -> str:
        parts = [
            f"{format_seconds(seconds)} for {CAUSE_TEXT.get(cause, cause)}"
            for cause, seconds in self.stall_s.items()
            if seconds > 0
        ]
        return ", ".join(parts) or "none"


CAUSE_TEXT = {"prefetch": "prefetches", "memory": "memory"}


def summarise(trace: Trace, plan: Plan, timeline: Timeline, endurance_bytes: int | None = None) -> Summary:
    """What ``plan`` costs and brings; ``timeline`` is what the simulator says of it."""
    stall_s = dict.fromkeys(CAUSES, 0.0)
    for stall in timeline.stalls:
        stall_s[stall.cause] = stall_s.get(stall.cause, 0.0) + stall.end_s - stall.start_s
    compute_s = dict.fromkeys(EXTRA_WORK, 0.0)
    for span in timeline.spans:
        if (work := extra_work(trace, span)) is not None:
            compute_s[work] += span.end_s - span.start_s
    return Summary(
        policy=plan.policy,
        predicted_step_s=timeline.step_s,
        ideal_s=trace.ideal_s,
        lower_bound_s=plan.lower_bound_s,
        peak_bytes=timeline.peak_bytes,
        budget_bytes=plan.device_budget_bytes,
        in_memory_bytes=trace.peak_bytes,
        minimum_bytes=plan.minimum_bytes,
        evictions=len(plan.evictions),
        recomputations=len(plan.recomputations),
        written_bytes=_moved_bytes(timeline, WRITE_LINK),
        read_bytes=_moved_bytes(timeline, READ_LINK),
        tier_peak_bytes={tier: timeline.tier_peak_bytes(tier) for tier in SPILL_TIERS},
        stall_s=stall_s,
        compute_s=compute_s,
        endurance_bytes=endurance_bytes,
        measured=trace.measured,
    )


def copies(timeline: Timeline, link: str) -> list[Span]:
    """The transfers of ``link``'s own tier, in order of start.

    A disk transfer that is shown on the bus too counts for the disk only.
    """
    disk = {"device_to_host": "disk_write", "host_to_device": "disk_read"}.get(link)
    of_disk = {(span.index, span.end_s) for span in timeline.spans if span.stream == disk}
    found = [
        span
        for span in timeline.spans
        if span.stream == link and (disk is None or (span.index, span.end_s) not in of_disk)
    ]
    return sorted(found, key=lambda span: (span.start_s, span.index))


def extra_work(trace: Trace, span: Span) -> str | None:
    """Which of EXTRA_WORK a span of the compute stream is; None for a kernel of the trace, or a link."""
    if span.stream != "compute":
        return None
    first = span.label.partition(" ")[0]
    if first not in EXTRA_WORK:
        return None
    is_kernel = 0 <= span.index < trace.kernels and trace.kernel_name[span.index] == span.label
    return None if is_kernel else first


def kernel_spans(trace: Trace, timeline: Timeline) -> Iterator[Span]:
    """The spans of the trace's kernels, in order."""
    for span in timeline.spans:
        if span.stream == "compute" and 0 <= span.index < trace.kernels and extra_work(trace, span) is None:
            yield span


def percent(fraction: float) -> str:
    """``"4.1 %"``."""
    return f"{fraction * 100:.1f} %"


def _moved_bytes(timeline: Timeline, links: dict[str, str]) -> dict[str, int]:
    return {tier: sum(span.size_bytes for span in copies(timeline, links[tier])) for tier in SPILL_TIERS}
