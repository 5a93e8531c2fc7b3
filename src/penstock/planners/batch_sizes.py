"""The largest batch that runs in a device budget, the largest that is not slowed down, and the fastest.

FlashNeuron's use of memory (section 2): what leaves the device makes room for larger batches. A batch size
is judged by the trace of its step and the plan for it. Nothing is run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from penstock.core.memory_profile import minimum_bytes
from penstock.core.plan import Plan
from penstock.core.trace import Trace
from penstock.errors import BudgetTooSmall, InvalidArgument, SpillSpaceFull
from penstock.planners import refuse_below_minimum

NEAR = 1.05  # sizes that are this close are not told apart by their speed


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize:
    """One size of the batch.

    samples        in the batch
    minimum_bytes  the smallest device budget at which its step can run
    peak_bytes     that its step takes with everything in memory
    in_memory_s    that its step takes with everything in memory
    plan           for its step; None where none was made
    reason         why there is no plan; empty where there is one, or none was made
    """

    samples: int
    minimum_bytes: int
    peak_bytes: int
    in_memory_s: float
    plan: Plan | None = None
    reason: str = ""

    @property
    def step_s(self) -> float:
        """Seconds a step, predicted. 0 without a plan."""
        return 0.0 if self.plan is None else self.plan.predicted_step_s

    @property
    def sample_s(self) -> float:
        """Seconds a sample, predicted. 0 without a plan."""
        return self.step_s / self.samples

    @property
    def slowdown(self) -> float:
        """The predicted step over the step in memory. 0 without a plan."""
        return self.step_s / self.in_memory_s if self.in_memory_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """What a device budget allows.

    largest     that runs at all
    unslowed    the largest whose step takes hardly longer than in memory, to within 5 % of the samples; None
                where every one takes longer
    in_memory   the largest of which nothing has to leave the device; None where there is none
    fastest     with the least time a sample, of those that were tried
    tried       every size with a plan, ascending, and those that have none as something refuses them
    """

    largest: BatchSize
    unslowed: BatchSize | None
    in_memory: BatchSize | None
    fastest: BatchSize
    tried: tuple[BatchSize, ...]


def choose_batch_size(
    trace_of: Callable[[int], Trace],
    plan_of: Callable[[Trace], Plan],
    budget_bytes: int,
    *,
    least: int,
    most: int,
    slowdown: float,
) -> BatchSizes:
    """Find the batch sizes that a device budget allows.

    trace_of      the step of a batch of so many samples; asked for few sizes
    plan_of       a plan for a step in the budget; asked for about ten. BudgetTooSmall and SpillSpaceFull say
                  that there is none
    budget_bytes  of the device
    least, most   samples that a batch may have
    slowdown      fraction of the step in memory that does not count as slower

    Raises BudgetTooSmall where not even ``least`` samples fit, SpillSpaceFull where they have no room on the
    lower tiers, and InvalidArgument where the step does not grow with its batch.
    """
    if not 1 <= least <= most:
        raise InvalidArgument(
            f"a batch of {least} to {most} samples: give 1 or more, the smaller number first"
        )
    if slowdown < 0:
        raise InvalidArgument(f"a slowdown of {slowdown} is a gain: give a fraction, 0 or more")
    search = _Search(trace_of, plan_of)
    refuse_below_minimum(search.trace(least), budget_bytes)
    if most > least:
        search.require_growth(least, min(2 * least, most))
    runs = _last(least, most, lambda size: search.size(size).minimum_bytes, budget_bytes)
    largest = search.planned(runs)
    if largest.plan is None:  # the lower tiers are full
        if search.planned(least).plan is None:
            plan_of(search.trace(least))  # raises why
        largest = search.planned(_last_true(least, runs, lambda size: search.planned(size).plan is not None))
    in_memory = None
    if search.size(least).peak_bytes <= budget_bytes:
        fits = _last(least, largest.samples, lambda size: search.size(size).peak_bytes, budget_bytes)
        in_memory = search.planned(fits)

    def is_fast(size: int) -> bool:
        found = search.planned(size)
        return found.plan is not None and found.slowdown <= 1 + slowdown

    first = least if in_memory is None else in_memory.samples
    unslowed = None
    if is_fast(first):
        last = largest.samples
        unslowed = search.planned(last if is_fast(last) else _last_true(first, last, is_fast, near=NEAR))
    tried = search.tried()
    return BatchSizes(
        largest=largest,
        unslowed=unslowed,
        in_memory=in_memory,
        fastest=min((size for size in tried if size.plan is not None), key=lambda size: size.sample_s),
        tried=tried,
    )


class _Search:
    """What is known of each size so far."""

    def __init__(self, trace_of: Callable[[int], Trace], plan_of: Callable[[Trace], Plan]) -> None:
        self.trace, self._plan_of = cache(trace_of), plan_of
        self._planned: dict[int, BatchSize] = {}

    def size(self, samples: int) -> BatchSize:
        trace = self.trace(samples)
        return BatchSize(
            samples=samples,
            minimum_bytes=minimum_bytes(trace),
            peak_bytes=trace.peak_bytes,
            in_memory_s=trace.ideal_s,
        )

    def planned(self, samples: int) -> BatchSize:
        if samples not in self._planned:
            size = self.size(samples)
            try:
                size = replace(size, plan=self._plan_of(self.trace(samples)))
            except (BudgetTooSmall, SpillSpaceFull) as error:
                size = replace(size, reason=str(error))
            self._planned[samples] = size
        return self._planned[samples]

    def tried(self) -> tuple[BatchSize, ...]:
        return tuple(self._planned[samples] for samples in sorted(self._planned))

    def require_growth(self, small: int, large: int) -> None:
        one, other = self.trace(small), self.trace(large)
        if (one.peak_bytes, one.kernels, one.ideal_s) == (other.peak_bytes, other.kernels, other.ideal_s):
            raise InvalidArgument(
                f"the step of {small} samples and that of {large} take the same memory and time: make the "
                "step use as many samples as it is asked for"
            )


def _last(least: int, most: int, measure: Callable[[int], int], limit: int) -> int:
    """The last size up to ``most`` that measures ``limit`` at most, as ``least`` does. Measures ascend,
    mostly in a line."""
    if least == most:
        return least
    one, other = least, min(2 * least, most)
    low, high = (other, most + 1) if measure(other) <= limit else (least, other)
    for turn in itertools.cycle(("line", "beside", "middle")):
        if high - low <= 1:
            break
        rise = (measure(other) - measure(one)) / (other - one)
        if turn == "beside" and rise > 0:  # the last size, if they ascend in a line
            size = low + 1 if other == low else high - 1
        elif turn == "line" and rise > 0:
            size = one + int((limit - measure(one)) / rise)
        else:
            size = min(4 * low, (low + high) // 2)
        one, other = other, min(max(size, low + 1), high - 1)
        low, high = (other, high) if measure(other) <= limit else (low, other)
    return low


def _last_true(low: int, high: int, holds: Callable[[int], bool], near: float = 1.0) -> int:
    """The last size for which it holds, between one for which it does and one for which it does not; or one
    that is as ``near`` to that."""
    while high - low > 1 and high > near * low:
        middle = round((low * high) ** 0.5)
        middle = min(max(middle, low + 1), high - 1)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
