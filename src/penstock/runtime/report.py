"""Predicted against measured: what a run says of itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from penstock.core.tables import html_table, html_text
from penstock.core.wear import DiskWear
from penstock.units import counted, format_bytes, format_rate, format_seconds

_NO_NAME = re.compile(r"[^A-Za-z0-9_.-]")  # what no logger's names may hold

NO_POLICY = "least recent use"  # the policy of a run for which no plan could be made


@dataclass(frozen=True, kw_only=True)
class Report:
    """A run so far. Bytes and seconds of one step; measured times are medians over the last thousand
    planned steps, and of the last step before there are any.

    peak_bytes              most device bytes in use in any step, measured
    predicted_peak_bytes    what the simulator said of the plan in force
    peak_resident_bytes     most resident bytes of the process, less those before the model was
                            built (its weights counted in), measured; 0 where not known
    predicted_step_s        what the simulator says of the plan in force; once seven steps have followed it,
                            with kernel times as they are in whole steps
    planned_step_s          what it said when the plan was made
    minimum_bytes           smallest device budget in which the recorded steps could have run, and on a CPU
                            the kernels between steps. On an accelerator the segments that its allocator
                            takes are counted in
    evicted_bytes, loaded_bytes   left the device, and came back, in the last step, planned or not
    disk_written_bytes      written to the disk in the last step
    recomputed_bytes        made by running kernels again, in the last step
    recompute_s             spent on that
    unrecomputed            tensors that the plan would drop, and that moved instead, since what their kernel
                            needs was not there any more, in the last step
    endurance_bytes         that may be written to the disk in its life, as given to `offload`
    moved_bytes_by_kind     of the bytes that left in one step, by kind of tensor
    unplanned_accesses      to bytes that were away, or being copied, by code that is no operator of torch
    failed_prefetches       of the run: tried again when they were needed
    clock_s                 spent by the runtime itself in one step, waits excluded, for `operators` kernels
    trace_mismatches        steps that ran other operators than any that was traced
    profiled_steps          steps that were recorded, to plan them
    micro_batch             samples in each part of a batch, 0 where batches are not divided
    micro_batches           parts of the latest batch
    micro_batch_order       in which they run: "part" by part, or "layer" by layer
    variants                kernels of the last step that ran as another algorithm, by its name
    rates_bytes_per_s       of links, and of compression, in the last step
    planned_rates_bytes_per_s   of links, at their best: the plan in force was made for them
    planned_rates_from      where each of these is from: "probed", "given", or "steps" of this run
    replans                 times that a step was planned again since rates or kernel times had drifted, or a
                            longer search found a better plan
    moved_bytes_by_io_path  of the whole run, between the device's memory and what is below it
    lossy                   what the plan in force rounds, in words; empty: no bit is lost
    unavailable_transports  why I/O paths are missing, by transport
    processes               of this job on this machine, which share its links, host and disk budgets
    host_bytes              of host memory that the run has taken as a tier, on a CPU
    fixed_bytes             of the budget, that tensors have now which cannot leave: on a CPU they are mapped,
                            shared, or lent to NumPy, on an accelerator not the run's
    """

    device: str
    policy: str
    reason: str
    memory_manager: str
    direct_io: bool
    device_budget_bytes: int
    minimum_bytes: int
    peak_bytes: int
    predicted_peak_bytes: int = 0
    peak_resident_bytes: int
    step_s: float
    predicted_step_s: float = 0.0
    planned_step_s: float = 0.0
    stall_s: float
    predicted_stall_s: float = 0.0
    ideal_s: float
    evicted_bytes: int
    predicted_evicted_bytes: int = 0
    loaded_bytes: int
    disk_bytes: int
    steps: int
    profiled_steps: int
    trace_mismatches: int
    micro_batch: int = 0
    micro_batches: int = 0
    micro_batch_order: str = "part"
    unplanned_accesses: int = 0
    failed_prefetches: int = 0
    clock_s: float = 0.0
    operators: int = 0
    disk_written_bytes: int = 0
    recomputed_bytes: int = 0
    recompute_s: float = 0.0
    unrecomputed: int = 0
    endurance_bytes: int | None = None
    variants: Mapping[str, int] = field(default_factory=dict)
    moved_bytes_by_kind: Mapping[str, int] = field(default_factory=dict)
    rates_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    planned_rates_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    planned_rates_from: Mapping[str, str] = field(default_factory=dict)
    replans: int = 0
    moved_bytes_by_io_path: Mapping[str, int] = field(default_factory=dict)
    unavailable_transports: Mapping[str, str] = field(default_factory=dict)
    lossy: str = ""
    processes: int = 1
    host_bytes: int = 0
    fixed_bytes: int = 0

    @property
    def disk_wear(self) -> DiskWear:
        """What the last step wrote to the disk, at the measured step time."""
        return DiskWear(
            written_bytes=self.disk_written_bytes, step_s=self.step_s, endurance_bytes=self.endurance_bytes
        )

    def as_dict(self) -> dict[str, float]:
        """The report's numbers by name, for the loggers of TensorBoard, W&B and MLflow.

        What is counted by kind, link or I/O path has a name for each, such as
        "moved_bytes_by_kind/activation" or "rates_bytes_per_s/disk_write". Names hold letters, digits and
        "_./-" only. Text is left out, and so is what is not known.
        """
        numbers: dict[str, float] = {}
        for field_ in fields(self):
            value = getattr(self, field_.name)
            if isinstance(value, Mapping):
                entries = {f"{field_.name}/{_NO_NAME.sub('_', key)}": each for key, each in value.items()}
            else:
                entries = {field_.name: value}
            numbers.update(
                (name, int(each) if isinstance(each, bool) else each)
                for name, each in entries.items()
                if isinstance(each, int | float)
            )
        return numbers

    def _rows(self) -> list[tuple[str, str, str]]:
        """Name, predicted, measured."""
        rows = [
            ("peak on the device", format_bytes(self.predicted_peak_bytes), format_bytes(self.peak_bytes)),
            ("step time", format_seconds(self.predicted_step_s), format_seconds(self.step_s)),
            ("of which stalled", format_seconds(self.predicted_stall_s), format_seconds(self.stall_s)),
            (
                "evicted per step",
                format_bytes(self.predicted_evicted_bytes),
                format_bytes(self.evicted_bytes),
            ),
        ]
        if not self.predicted_peak_bytes:
            return [(name, "no plan", measured) for name, _, measured in rows]
        return rows

    def __repr__(self) -> str:
        return (
            f"<penstock.Report on {self.device}: {counted(self.steps, 'step')} of "
            f"{format_seconds(self.step_s)}, peak {format_bytes(self.peak_bytes)} of "
            f"{format_bytes(self.device_budget_bytes)}>"
        )

    def _repr_html_(self) -> str:
        """In a notebook: the table, and below it the rest of the text."""
        first, *rest = self._lines()
        return (
            f"{html_table(self._rows(), ('', 'predicted', 'measured'), first)}"
            f"<ul>{''.join(f'<li>{html_text(line.strip())}</li>' for line in rest)}</ul>"
        )

    def __str__(self) -> str:
        rows = [("", "predicted", "measured"), *self._rows()]
        table = [f"  {name:<20}{left:>14}{right:>14}" for name, left, right in rows]
        first, *rest = self._lines()
        return "\n".join([first, *table, *rest])

    def _lines(self) -> list[str]:
        """All but the table: a heading, and a line for each other thing."""
        rates, planned_rates = (
            _rates_text(self.rates_bytes_per_s),
            _rates_text(self.planned_rates_bytes_per_s, self.planned_rates_from),
        )
        lines = [
            f"penstock on {self.device}: budget {format_bytes(self.device_budget_bytes)}, "
            f"minimum {format_bytes(self.minimum_bytes)}, policy {self.policy} ({self.reason})",
            f"  step time with everything in memory, by the trace: {format_seconds(self.ideal_s)}",
            f"  {counted(self.steps, 'step')}, {self.profiled_steps} of them recorded; "
            f"{self.trace_mismatches} ran other operators than those traced",
            f"  the runtime itself: {format_seconds(self.clock_s)} a step, "
            f"{format_seconds(self.clock_s / max(self.operators, 1))} a kernel; "
            f"{self.unplanned_accesses} unplanned accesses",
            f"  memory: {self.memory_manager}; disk: {format_bytes(self.disk_bytes)} in use"
            f"{f'; host: {format_bytes(self.host_bytes)} in use' if self.host_bytes else ''}"
            f"{'; ' + rates if rates else ''}",
            f"  planned for {planned_rates}; planned again {self.replans} times; step time predicted then: "
            f"{format_seconds(self.planned_step_s)}",
            f"  disk wear: {self.disk_wear}",
        ]
        if self.fixed_bytes:
            lines.append(f"  tensors that cannot leave have {format_bytes(self.fixed_bytes)} of the budget")
        if self.failed_prefetches:
            lines.append(f"  prefetches that failed, and were tried again: {self.failed_prefetches}")
        if self.processes > 1:
            lines.append(
                f"  one of {self.processes} processes on this machine, which share its links: the host and "
                "disk budgets are divided among them"
            )
        if self.lossy:
            lines.append(f"  {self.lossy}")
        if kinds := {kind: moved for kind, moved in self.moved_bytes_by_kind.items() if moved}:
            shown = ", ".join(f"{kind} {format_bytes(moved)}" for kind, moved in kinds.items())
            lines.append(f"  evicted per step, by kind: {shown}")
        if self.recomputed_bytes or self.unrecomputed:
            moved = f"; {self.unrecomputed} tensors moved instead" if self.unrecomputed else ""
            lines.append(
                f"  recomputed per step: {format_bytes(self.recomputed_bytes)} in "
                f"{format_seconds(self.recompute_s)}{moved}"
            )
        if total_bytes := sum(self.moved_bytes_by_io_path.values()):
            by_share = sorted(self.moved_bytes_by_io_path.items(), key=lambda item: -item[1])
            shares = ", ".join(f"{path} ({size_bytes / total_bytes:.0%})" for path, size_bytes in by_share)
            lines.append(f"  I/O paths: {shares}")
        if self.variants:
            shown = ", ".join(f"{count} {name}" for name, count in self.variants.items())
            lines.append(f"  kernels that ran as another algorithm: {shown}")
        if self.micro_batch:
            lines.append(
                f"  micro-batches: {self.micro_batch} samples in each, {self.micro_batches} in the last "
                f"batch, {self.micro_batch_order} by {self.micro_batch_order}"
            )
        if not self.direct_io:
            lines.append("  the disk's file system refuses direct I/O: files pass through the page cache too")
        for transport, why in self.unavailable_transports.items():
            lines.append(f"  {transport} is not used: {why}")
        if self.peak_resident_bytes:
            lines.append(f"  peak resident growth of the process: {format_bytes(self.peak_resident_bytes)}")
        return lines


def _rates_text(rates_bytes_per_s: Mapping[str, float], from_: Mapping[str, str] | None = None) -> str:
    return ", ".join(
        f"{link} {format_rate(rate)}" + (f" ({from_[link]})" if from_ else "")
        for link, rate in rates_bytes_per_s.items()
    )
