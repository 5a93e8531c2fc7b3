"""Predicted against measured: what a run says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.units import format_bytes, format_rate, format_seconds


@dataclass(frozen=True, kw_only=True)
class Report:
    """A run so far. Bytes and seconds of one step; measured ones are medians over the last thousand
    planned steps.

    peak_bytes              most device bytes in use in any step, measured
    predicted_peak_bytes    what the simulator said of the plan in force
    peak_resident_bytes     most resident bytes of the process, less those before the model was
                            built (its weights counted in), measured; 0 where not known
    minimum_bytes           smallest device budget in which the steps so far could have run
    evicted_bytes, loaded_bytes   left the device, and came back, in one step
    moved_bytes_by_kind     of the bytes that left in one step, by kind of tensor
    unplanned_accesses      to bytes that were away, or being copied, by what is no PyTorch operator
    clock_s                 spent by the runtime itself in one step, waits excluded, for `operators` kernels
    departures              steps that ran other operators than any that was traced
    profiled_steps          steps that were recorded, to plan them
    moved_bytes_by_way      of the whole run, between memory and disk
    unavailable_transports  why ways to move tensors are missing, by transport
    """

    device: str
    policy: str
    reason: str
    memory_manager: str
    direct_io: bool
    device_budget_bytes: int
    minimum_bytes: int
    peak_bytes: int
    predicted_peak_bytes: int
    peak_resident_bytes: int
    step_s: float
    predicted_step_s: float
    stall_s: float
    predicted_stall_s: float
    ideal_s: float
    evicted_bytes: int
    predicted_evicted_bytes: int
    loaded_bytes: int
    disk_bytes: int
    steps: int
    profiled_steps: int
    departures: int
    unplanned_accesses: int = 0
    clock_s: float = 0.0
    operators: int = 0
    moved_bytes_by_kind: Mapping[str, int] = field(default_factory=dict)
    rates_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    moved_bytes_by_way: Mapping[str, int] = field(default_factory=dict)
    unavailable_transports: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [
            ("", "predicted", "measured"),
            ("peak on the device", format_bytes(self.predicted_peak_bytes), format_bytes(self.peak_bytes)),
            ("step time", format_seconds(self.predicted_step_s), format_seconds(self.step_s)),
            ("of it stalls", format_seconds(self.predicted_stall_s), format_seconds(self.stall_s)),
            (
                "evicted per step",
                format_bytes(self.predicted_evicted_bytes),
                format_bytes(self.evicted_bytes),
            ),
        ]
        table = "\n".join(f"  {name:<20}{left:>14}{right:>14}" for name, left, right in rows)
        rates = ", ".join(f"{link} {format_rate(rate)}" for link, rate in self.rates_bytes_per_s.items())
        lines = [
            f"penstock on {self.device}: budget {format_bytes(self.device_budget_bytes)}, "
            f"minimum {format_bytes(self.minimum_bytes)}, policy {self.policy} ({self.reason})",
            table,
            f"  step time with everything in memory, by the trace: {format_seconds(self.ideal_s)}",
            f"  {self.steps} steps, {self.profiled_steps} of them recorded; "
            f"{self.departures} ran other operators than those traced",
            f"  the runtime itself: {format_seconds(self.clock_s)} a step, "
            f"{format_seconds(self.clock_s / max(self.operators, 1))} a kernel; "
            f"{self.unplanned_accesses} unplanned accesses",
            f"  memory: {self.memory_manager}; disk: {format_bytes(self.disk_bytes)}, "
            f"{'direct' if self.direct_io else 'buffered'} I/O{'; ' + rates if rates else ''}",
        ]
        if kinds := {kind: moved for kind, moved in self.moved_bytes_by_kind.items() if moved}:
            shown = ", ".join(f"{kind} {format_bytes(moved)}" for kind, moved in kinds.items())
            lines.append(f"  evicted per step, by kind: {shown}")
        if total_bytes := sum(self.moved_bytes_by_way.values()):
            by_share = sorted(self.moved_bytes_by_way.items(), key=lambda item: -item[1])
            lines.append(
                "  moved by "
                + ", ".join(f"{way} ({moved_bytes / total_bytes:.0%})" for way, moved_bytes in by_share)
            )
        for transport, why in self.unavailable_transports.items():
            lines.append(f"  {transport} is not used: {why}")
        if self.peak_resident_bytes:
            lines.append(f"  peak resident growth of the process: {format_bytes(self.peak_resident_bytes)}")
        return "\n".join(lines)
