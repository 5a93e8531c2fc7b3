"""What happened in one iteration, simulated or measured: a pure value, the same type for both."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from penstock.core import files
from penstock.core.tables import html_table
from penstock.units import format_bytes, format_seconds


class Span(NamedTuple):
    """Something that occupied a stream from ``start_s`` to ``end_s``.

    stream   "compute" or a key of penstock.core.hardware.LINKS. A copy is on one link: one to disk on
             the disk's own, though it may cross the bus that host copies use
    label    the kernel or the tensor, for people; on the compute stream also "recompute <kernel>",
             "compress <tensor>", "expand <tensor>" and "start copies"
    index    kernel index on the compute stream, tensor index on a link and where the compute stream
             compresses or expands; -1 when unknown, and where it starts copies
    """

    stream: str
    start_s: float
    end_s: float
    label: str
    index: int  # type: ignore[assignment]  # of a kernel or tensor, not tuple.index
    size_bytes: int = 0


class Stall(NamedTuple):
    """The compute stream waited from ``start_s`` to ``end_s`` before ``kernel``.

    cause   "prefetch" (an input was not back yet) or "memory" (evictions had not finished)
    """

    start_s: float
    end_s: float
    cause: str
    kernel: int


class Sample(NamedTuple):
    """From ``time_s`` on, ``size_bytes`` are in use, until the next sample."""

    time_s: float
    size_bytes: int


def busy_s(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds in which at least one of the spans, from its start to its end, took place."""
    total_s, until_s = 0.0, -math.inf
    for start_s, end_s in sorted(spans):
        total_s += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    return total_s


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One iteration over time, from 0 to `iteration_s`.

    spans    compute and every link
    memory   by tier: bytes in use over time
    stalls   every wait of the compute stream
    source   "simulated" or "measured"
    """

    iteration_s: float
    spans: tuple[Span, ...] = ()
    memory: Mapping[str, tuple[Sample, ...]] = field(default_factory=dict)
    stalls: tuple[Stall, ...] = ()
    source: str = "simulated"

    def __repr__(self) -> str:
        return (
            f"<penstock.Timeline, {self.source}: {format_seconds(self.iteration_s)}, stalls "
            f"{format_seconds(self.stall_s)}, peak {format_bytes(self.peak_bytes)}, "
            f"evicted {format_bytes(self.evicted_bytes)}>"
        )

    def _repr_html_(self) -> str:
        """In a notebook."""
        stalls_s: defaultdict[str, float] = defaultdict(float)
        for stall in self.stalls:
            stalls_s[stall.cause] += stall.end_s - stall.start_s
        moved_bytes: defaultdict[str, int] = defaultdict(int)
        for span in self.spans:
            moved_bytes[span.stream] += span.size_bytes
        rows = [("step", format_seconds(self.iteration_s), "")]
        rows += [(f"stalls for {cause}", format_seconds(took_s), "") for cause, took_s in stalls_s.items()]
        rows += [
            (
                stream.replace("_", " "),
                format_seconds(self.busy_s(stream)),
                format_bytes(size) if size else "",
            )
            for stream, size in moved_bytes.items()
        ]
        rows += [(f"peak, {tier}", "", format_bytes(self.tier_peak_bytes(tier))) for tier in self.memory]
        return html_table(rows, ("", "time", "bytes"), f"penstock timeline, {self.source}")

    @property
    def peak_bytes(self) -> int:
        """The most device bytes in use at any moment."""
        return self.tier_peak_bytes("device")

    def tier_peak_bytes(self, tier: str) -> int:
        return max((sample.size_bytes for sample in self.memory.get(tier, ())), default=0)

    @property
    def stall_s(self) -> float:
        """Seconds the compute stream waited."""
        return sum(stall.end_s - stall.start_s for stall in self.stalls)

    def busy_s(self, stream: str) -> float:
        """Seconds ``stream`` was occupied."""
        return sum(span.end_s - span.start_s for span in self.spans if span.stream == stream)

    def moved_bytes(self, *links: str) -> int:
        """Bytes that crossed the links."""
        return sum(span.size_bytes for span in self.spans if span.stream in links)

    @property
    def evicted_bytes(self) -> int:
        """Bytes that left the device."""
        return self.moved_bytes("device_to_host", "disk_write")

    def save(self, path: str | Path) -> None:
        """Write to ``path`` as versioned JSON, gzipped where the name ends in ``.gz``."""
        files.save(self, path)

    def save_chrome_trace(self, path: str | Path, *others: Timeline) -> None:
        """Write to ``path`` what https://ui.perfetto.dev and chrome://tracing open: kernels, transfers by
        link, stalls, and memory by tier. Gzipped where the name ends in ``.gz``.

        others   timelines to show below, such as the measured one below the predicted one

        Raises OSError where the file cannot be written.
        """
        from penstock.core.chrome_trace import chrome_trace

        files.save_json(chrome_trace([self, *others]), path)

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        """Read what `save` wrote. Raises InvalidFile where it is something else."""
        return files.load(cls, path)
