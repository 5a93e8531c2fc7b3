"""Whether steps still take what their plan was made for: the rates of links and codecs, and kernel times."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from penstock.core.hardware import CODERS, LINKS, Hardware, busy_s
from penstock.core.plan import Plan
from penstock.core.trace import Trace
from penstock.runtime.devices import Moved
from penstock.simulator import simulate

DRIFT = 0.1  # so much more or less has to be seen in each of WINDOW steps, one after the other
WINDOW = 5

# The first steps under a plan begin where the last plan left tensors.
SKIPPED_STEPS = 2

# The clock's own work for a kernel for which nothing moves: the rest of it is what copies cost.
KERNEL_CLOCK_S = 2e-6

# The first steps under a plan are taken to be as predicted where they differ by no more.
AS_PREDICTED = 0.03

# Copies may cost kernels so many times what the machine says; beyond, kernels themselves are slower.
MOST_OVERHEAD = 4.0

# What is busy for less of a step decides nothing, and is measured badly.
LEAST_BUSY = 0.02

# A disk takes less than this into a cache of its own, and says nothing of what it sustains.
LEAST_BYTES = 64 << 20

Spans = list[tuple[float, float, int]]  # start and end in seconds, and bytes

OPPOSITE = {"disk_write": "disk_read", "disk_read": "disk_write"}


class Drift:
    """What the steps take that follow one plan, against what it was made for.

    Rates are compared with those of the machine that the plan was made for, as the simulator uses them: where
    two directions disturb each other in its prediction, they may do so in the run. Kernel times are compared
    with those of the first steps under the plan.

    copies_cost_more   to kernels than the plan was made for: more than DRIFT of a step
    """

    def __init__(self, trace: Trace, plan: Plan, hardware: Hardware) -> None:
        self._hardware = hardware
        timeline = simulate(trace, plan, hardware)
        predicted = _by_link(
            (span.stream, span.start_s, span.end_s, span.size_bytes)
            for span in timeline.spans
            if span.stream in LINKS
        )
        self._predicted_s, self._predicted_kernels_s = timeline.step_s, timeline.busy_s("compute")
        self._moved_bytes = sum(span.size_bytes for span in timeline.spans if span.stream in LINKS)
        self._predicted = dict.fromkeys(CODERS, 1.0)
        self._predicted |= {link: hardware.slowness(link, spans) for link, spans in predicted.items()}
        self._steps = 0
        self._factors: deque[dict[str, float]] = deque(maxlen=WINDOW)
        self._kernels_s: deque[float] = deque(maxlen=WINDOW)
        self._steps_s: deque[float] = deque(maxlen=WINDOW)
        self._overheads_s: deque[float] = deque(maxlen=WINDOW)
        self._usual_s = 0.0
        self._is_calibrated, self._slower = False, 1.0
        self.copies_cost_more = False

    def add_step(
        self,
        moved: Sequence[Moved],
        step_s: float,
        kernels_s: float,
        clock_s: float = 0.0,
        operators: int = 0,
    ) -> None:
        """A step is over.

        moved       what it moved, compressed and expanded
        kernels_s   the part of it in which no kernel waited
        clock_s     the part of it that the clock took, for so many ``operators``
        """
        self._steps += 1
        if self._steps <= SKIPPED_STEPS:
            return
        by_link = _by_link((move.link, move.started_s, move.finished_s, move.size_bytes) for move in moved)
        known = {link: spans for link, spans in by_link.items() if self._predicted.get(link)}
        slowness = _slowness(self._hardware, known, step_s)
        self._factors.append({link: self._predicted[link] / slow for link, slow in slowness.items()})
        if copies := sum(len(spans) for link, spans in by_link.items() if link in LINKS):
            self._overheads_s.append(max(clock_s - KERNEL_CLOCK_S * operators, 0.0) / copies)
        self._kernels_s.append(kernels_s)
        self._steps_s.append(step_s)
        if len(self._kernels_s) == WINDOW and not self._usual_s:
            self._usual_s = statistics.median(self._kernels_s)

    def calibrate(self, trace: Trace) -> tuple[Trace, Hardware] | None:
        """The trace and the machine, once, with kernel times and what copies cost kernels as the first WINDOW
        steps had them; None otherwise, and where they took what was predicted.

        Kernels were timed one by one, and in few steps. What they take longer in whole steps is put down to
        the copies beside them as far as that is likely, and then to all kernels alike.
        """
        if not self._usual_s or self._is_calibrated:
            return None
        self._is_calibrated = True
        late_s = self._usual_s - self._predicted_kernels_s
        off_s = statistics.median(self._steps_s) - self._predicted_s
        if min(abs(late_s), abs(off_s)) <= AS_PREDICTED * self._predicted_s:
            return None
        if late_s > 0 and self._moved_bytes:
            before_s = self._hardware.byte_overhead_s
            more_s = min(late_s / self._moved_bytes, (MOST_OVERHEAD - 1) * before_s)
            self._hardware = replace(self._hardware, byte_overhead_s=before_s + more_s)
            late_s -= more_s * self._moved_bytes
            self.copies_cost_more = more_s * self._moved_bytes > DRIFT * self._predicted_s
        self._slower = 1 + late_s / self._usual_s
        return _longer(trace, late_s), self._hardware

    def measured_hardware(self) -> Hardware | None:
        """The machine with rates as they are now; None where they are still what they were taken to be.

        What a copy costs the thread of the kernels comes along, where that counts at all.
        """
        factors: dict[str, float] = {}
        if len(self._factors) == WINDOW:
            for link in set.intersection(*map(set, self._factors)):
                factors[link] = statistics.median(step[link] for step in self._factors)
        if not any(_has_drifted([step[link] for step in self._factors]) for link in factors):
            return None
        found = self._hardware.scaled(factors)
        if found.copy_overhead_s > 0 and self._overheads_s:
            found = replace(found, copy_overhead_s=statistics.median(self._overheads_s))
        return found

    @property
    def kernels_have_drifted(self) -> bool:
        """Whether kernels take longer, or less long, than in the trace, or than at first under this plan."""
        if len(self._kernels_s) < WINDOW or not self._usual_s:
            return False
        return _has_drifted([self._slower]) or _has_drifted(
            [kernels_s / self._usual_s for kernels_s in self._kernels_s]
        )


def without_copies(trace: Trace, kernels: Spans, moved: Sequence[Moved], hardware: Hardware) -> Trace:
    """The trace of a recorded step without what its kernels have lost to copies beside them: the simulator
    adds what they lose to those of a plan.

    kernels   start and end of each
    """
    if not hardware.byte_overhead_s:
        return trace
    copies = [move for move in moved if move.link in LINKS]
    spans = [(move.started_s, move.finished_s, move.size_bytes) for move in copies]
    kernels_s, copies_s = _busy_s(kernels), _busy_s(spans)
    beside = (kernels_s + copies_s - _busy_s([*kernels, *spans])) / max(copies_s, 1e-9)
    return _longer(trace, -beside * hardware.byte_overhead_s * sum(move.size_bytes for move in copies))


def _longer(trace: Trace, seconds: float) -> Trace:
    """With kernels that take so much longer in all, each in proportion; never less than half as long."""
    kernels_s = max(float(trace.kernel_time_s.sum()), 1e-9)
    return trace.with_times(trace.kernel_time_s * max(1 + seconds / kernels_s, 0.5))


def with_rates_of(hardware: Hardware, moved: Sequence[Moved], step_s: float) -> Hardware:
    """The machine with the rates that a step measured, of links that it used enough.

    moved   what it moved, compressed and expanded
    """
    by_link = _by_link(
        (move.link, move.started_s, move.finished_s, move.size_bytes) for move in moved if move.link in LINKS
    )
    factors = {}
    for link, slow in _slowness(hardware, by_link, step_s).items():
        spans, other = by_link[link], by_link.get(OPPOSITE.get(link, ""), [])
        if sum(size_bytes for _, _, size_bytes in spans) < LEAST_BYTES:
            continue
        # While the other direction is busy, the machine has `duplex` of the rate, and is to have it again.
        link_s = _busy_s(spans)
        both_s = link_s + _busy_s(other) - _busy_s([*spans, *other])
        factors[link] = 1 / (slow * (1 - both_s / link_s * (1 - hardware.duplex)))
    return hardware.scaled(factors)


def _slowness(hardware: Hardware, by_link: dict[str, Spans], step_s: float) -> dict[str, float]:
    """How much slower than in ``hardware`` each link was, of those that the step used enough."""
    found = {link: hardware.slowness(link, spans) for link, spans in by_link.items()}
    return {
        link: slow
        for link, slow in found.items()
        if slow > 0 and _busy_s(by_link[link]) > LEAST_BUSY * step_s
    }


def _busy_s(spans: Iterable[tuple[float, float, int]]) -> float:
    return busy_s((start_s, end_s) for start_s, end_s, _ in spans)


def _by_link(moves: Iterable[tuple[str, float, float, int]]) -> dict[str, Spans]:
    found: dict[str, Spans] = {}
    for link, start_s, end_s, size_bytes in moves:
        found.setdefault(link, []).append((start_s, end_s, size_bytes))
    return found


def _has_drifted(ratios: Sequence[float]) -> bool:
    return min(ratios) > 1 + DRIFT or max(ratios) < 1 / (1 + DRIFT)
