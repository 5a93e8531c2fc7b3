"""moDNN's Algorithm 1 (section 5.2): one pass over the kernels in a managed space of the budget's size.

An allocation that fails makes the contiguous blocks leave whose copies delay the kernel least; where
there are none, memory is defragmented. Copies come back when waiting for another kernel
would make them late (inequality 9). A kernel runs with the algorithm of the largest gain (equation 10).

Where penstock differs from the paper:

- Copies go to the host while it has room, then to the disk, on the links that there are, both directions
  at once. moDNN has the host alone and one stream for both.
- Weights stay, as in the paper, unless a kernel does not fit otherwise.
- A defragmentation sends away only as much as is missing, what is needed last first; the paper's sends
  everything. What stays moves together. The plan has no addresses: a run's allocator decides them.
- A prefetch that a defragmentation would undo is put off instead, and none sends away what is needed
  sooner than what it brings.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from penstock.core.memory_profile import kernels_as_run, required_bytes, spread
from penstock.core.plan import Evict
from penstock.core.trace import InactivePeriod
from penstock.planners.modnn_space import ManagedSpace, Tiers
from penstock.planners.problem import Algorithm, Decision, Problem, algorithms, baseline
from penstock.planners.rules import in_order


def modnn(problem: Problem) -> Decision:
    """Algorithm 1; nothing leaves where everything fits with the fastest algorithms.

    Raises SpillSpaceFull where what has to leave has nowhere to go.
    """
    trace = problem.trace
    fastest = tuple(algorithms(trace, kernel)[0].variant for kernel in range(trace.kernels))
    variants = fastest if any(variant >= 0 for variant in fastest) else ()
    _, workspaces = kernels_as_run(trace, variants)
    used_bytes = trace.live_bytes - trace.kernel_workspace_bytes + workspaces
    if int(used_bytes.max(initial=0)) <= problem.budget_bytes:
        return Decision(variants=variants)
    return AlgorithmOne(problem).run()


_LATER = np.iinfo(np.int64).max


@dataclass(slots=True)
class _Away:
    """A tensor that has left: during which period, from which kernel on, and when its copy is back.

    prefetch_at   kernel at which the copy back is issued, -1 while that is not decided
    arrival_s     when it is complete
    """

    period: InactivePeriod
    after: int
    begin: int
    tier: str
    prefetch_at: int = -1
    arrival_s: float = 0.0


class AlgorithmOne:
    """The state of Algorithm 1 just before kernel `kernel`.

    now_s       the paper's T, the current time
    cost_s      [T + 1] seconds to copy each tensor out if it leaves now, NaN where it must stay; the last
                entry is the workspace's
    until       [T + 1] the kernel that needs an idle tensor again
    idle        tensors that could leave by the trace, with their periods
    away        those that are away, or coming back
    """

    def __init__(self, problem: Problem) -> None:
        trace = self.trace = problem.trace
        self.budget_bytes = problem.budget_bytes
        self.kernel = 0
        self.space = ManagedSpace(problem.budget_bytes)
        self.sizes: list[int] = trace.tensor_bytes.tolist()
        self.size_bytes = np.append(trace.tensor_bytes, 0)
        self.persistent: list[bool] = trace.tensor_persistent.tolist()
        self.cost_s = np.full(trace.tensors + 1, np.nan)
        self.until = np.full(trace.tensors + 1, _LATER, dtype=np.int64)
        self.protected = np.zeros(trace.tensors + 1, dtype=np.bool_)  # idle, and not used since it came
        self.idle: dict[int, InactivePeriod] = {}
        self.away: dict[int, _Away] = {}
        self.choices = [algorithms(trace, kernel) for kernel in range(trace.kernels)]
        fastest = np.array([entry[0].time_s for entry in self.choices])
        self.expected_s = np.concatenate([[0.0], np.cumsum(np.concatenate([fastest, fastest]))])  # EST
        self.finish_s = [0.0] * trace.kernels
        self.now_s = 0.0
        self.delay_s = 0.0
        self.tiers = Tiers(trace, problem.hardware)
        self.evictions: list[Evict] = []
        self.variants: list[int] = []
        self.first_away: list[int] = []  # away when the iteration begins
        self.first_back: dict[int, int] = {}  # and where their copies back are issued
        self._index()

    def run(self) -> Decision:
        self._begin()
        for kernel in range(self.trace.kernels):
            self.kernel = kernel
            self._step()
        self._end()
        chosen = any(variant >= 0 for variant in self.variants)
        return Decision(
            evictions=in_order(self.evictions),
            variants=tuple(self.variants) if chosen else (),
        )

    def _index(self) -> None:
        """What begins and ends at each kernel."""
        trace, count = self.trace, self.trace.kernels
        self.begins: dict[int, list[InactivePeriod]] = defaultdict(list)
        self.wrapping: dict[int, InactivePeriod] = {}
        periods = [period for period in trace.inactive_periods if self.sizes[period.tensor] > 0]
        for period in periods:
            if period.begin < count:
                self.begins[period.begin].append(period)
            if period.end >= count:
                self.wrapping[period.tensor] = period
        self.births: dict[int, list[int]] = defaultdict(list)
        self.deaths: dict[int, list[int]] = defaultdict(list)
        for tensor, (born, dead) in enumerate(
            zip(trace.tensor_birth.tolist(), trace.tensor_death.tolist(), strict=True)
        ):
            if not self.persistent[tensor] and self.sizes[tensor] and born < min(dead, count):
                self.births[born].append(tensor)
                self.deaths[min(dead, count) - 1].append(tensor)
        weights = [period for period in periods if self.persistent[period.tensor]]
        rows = np.array(weights, dtype=np.int64).reshape(-1, 4)
        self.needed_bytes = required_bytes(trace)
        self.held_bytes = self.needed_bytes + spread(
            count, rows[:, 1], rows[:, 2], trace.tensor_bytes[rows[:, 0]]
        )

    def _begin(self) -> None:
        """Persistent tensors are there, but for those that have to be away for lack of room."""
        count = self.trace.kernels
        first = {tensor: period.end - count for tensor, period in self.wrapping.items()}
        room = self.budget_bytes - self.needed_bytes
        for tensor, use in first.items():
            room[:use] -= self.sizes[tensor]
        for tensor in sorted(first, key=lambda tensor: (-first[tensor], tensor)):
            if not (room[: first[tensor]] < 0).any():
                continue
            period = self.wrapping[tensor]
            after = self._after(period)
            tier = self.tiers.choose(tensor, after, period.end)
            if tier is None:
                raise self.tiers.full(self.budget_bytes, tensor)
            self.tiers.take(tier, tensor, after, period.end)
            room[: first[tensor]] += self.sizes[tensor]
            self.away[tensor] = _Away(period._replace(end=first[tensor]), after, -1, tier)
            self.first_away.append(tensor)
        for tensor, stays in enumerate(self.persistent):
            if stays and self.sizes[tensor] and tensor not in self.away:
                self.space.allocate(tensor, self.sizes[tensor])

    def _step(self) -> None:
        """Lines 3 to 31 for one kernel."""
        kernel = self.kernel
        ready_s = self.now_s
        used = sorted({*self.trace.inputs[kernel].tolist(), *self.trace.outputs[kernel].tolist()})
        for tensor in used:
            if self.idle.pop(tensor, None) is not None:  # its period ends
                self.cost_s[tensor], self.until[tensor], self.protected[tensor] = np.nan, _LATER, False
        for tensor in used:
            if tensor in self.away:
                ready_s = max(ready_s, self._return(tensor))
        for tensor in self.births[kernel]:
            ready_s = max(ready_s, self._allocate(tensor, self.sizes[tensor]))
        self.now_s = ready_s
        algorithm = self._algorithm()
        self.variants.append(algorithm.variant)
        workspace = self.trace.tensors
        if algorithm.workspace_bytes:
            self.now_s = max(self.now_s, self._allocate(workspace, algorithm.workspace_bytes))
        self.delay_s = self.now_s - float(self.expected_s[kernel])
        self._prefetch(algorithm)
        self.now_s = self.finish_s[kernel] = self.now_s + algorithm.time_s
        if algorithm.workspace_bytes:
            self.space.free(workspace)
        for tensor in self.deaths[kernel]:
            if tensor in self.space:
                self.space.free(tensor)
            self.idle.pop(tensor, None)
        for tensor in self.trace.outputs[kernel].tolist():
            self.tiers.written(tensor)
        for period in self.begins[kernel + 1]:
            self._begin_period(period)

    def _begin_period(self, period: InactivePeriod) -> None:
        """A period begins: the tensor may leave, if it has been used since it came (criterion 1)."""
        tensor = period.tensor
        self.idle[tensor] = period
        self.until[tensor] = period.end
        uses = self.trace.uses[tensor]
        since_birth = uses[(uses > self.trace.tensor_birth[tensor]) & (uses < period.begin)]
        self.protected[tensor] = not self.persistent[tensor] and not len(since_birth)
        if not self.persistent[tensor] and len(since_birth):
            tier = self.tiers.choose(tensor, self._after(period), period.end)
            self.cost_s[tensor] = math.nan if tier is None else self.tiers.write_s(tier, tensor)

    def _after(self, period: InactivePeriod) -> int:
        """The last kernel that must finish before a copy: of those that write the tensor, edits included.

        Of a persistent tensor, the last that uses it: the copy before may be needed until then.
        """
        return period.begin - 1 if self.persistent[period.tensor] else period.ready

    def _return(self, tensor: int) -> float:
        """The tensor is back for this kernel, prefetched or on demand: when."""
        if tensor not in self.space:
            self._load(tensor, self._allocate(tensor, self.sizes[tensor]))
        interval = self.away.pop(tensor)
        if interval.begin < 0:
            self.first_back[tensor] = interval.prefetch_at
        else:
            self._decide(tensor, interval)
        return interval.arrival_s

    def _load(self, tensor: int, ready_s: float) -> None:
        interval = self.away[tensor]
        interval.prefetch_at = self.kernel
        interval.arrival_s = self.tiers.read(interval.tier, tensor, max(self.now_s, ready_s))

    def _decide(self, tensor: int, interval: _Away) -> None:
        end = interval.period.end
        self.evictions.append(
            Evict(tensor, interval.after, interval.begin, end, interval.prefetch_at, interval.tier)
        )

    # Room: offloading schemes and defragmentation (section 5.2.1).

    def _allocate(self, owner: int, size_bytes: int) -> float:
        """Make room for ``owner``, whatever has to leave. When the room is there, in seconds."""
        ready_s = self._try_allocate(owner, size_bytes)
        if ready_s is not None:
            return ready_s
        ready_s = self._defragment(size_bytes)
        if not self.space.allocate(owner, size_bytes):
            raise self.tiers.full(self.budget_bytes, owner)
        return ready_s

    def _try_allocate(self, owner: int, size_bytes: int, needed_before: int = -1) -> float | None:
        """Make room by an offloading scheme. None where there is none: what has left by then stays away.

        needed_before   what is needed at this kernel or sooner stays
        """
        ready_s = 0.0
        while not self.space.allocate(owner, size_bytes):
            cost_s = np.where(self.until > needed_before, self.cost_s, np.nan)
            scheme = self.space.window(size_bytes, cost_s, self.until, self.tiers.hidden_s(self.now_s))
            if scheme is None:
                return None
            for tensor in scheme[0]:
                gone_s = self._leave(tensor)
                if gone_s is None:
                    self.cost_s[tensor] = np.nan
                    break
                ready_s = max(ready_s, gone_s)
        return ready_s

    def _leave(self, tensor: int) -> float | None:
        """Send an idle tensor away: when its memory is free. None where no tier has room."""
        period = self.idle[tensor]
        if tensor in self.away:  # its prefetch is put off
            self.away[tensor].prefetch_at = -1
            gone_s = self.now_s
        else:
            after = self._after(period)
            tier = self.tiers.choose(tensor, after, period.end)
            if tier is None:
                return None
            ready_s = self.finish_s[after] if after >= 0 else 0.0
            gone_s = self.tiers.write(tier, tensor, ready_s, self.now_s)
            self.tiers.take(tier, tensor, after, period.end)
            self.away[tensor] = _Away(period, after, self.kernel, tier)
        self.space.free(tensor)
        self.cost_s[tensor] = np.nan
        self.protected[tensor] = False
        return gone_s

    def _defragment(self, size_bytes: int) -> float:
        """What stays moves together, after as much has left as is missing."""
        ready_s = self.now_s
        for tensor in self._last_needed_first():
            if self.space.free_bytes >= size_bytes:
                break
            if tensor in self.idle:
                ready_s = max(ready_s, self._leave(tensor) or 0.0)
            elif self._needed(tensor) > self.kernel:
                self.away[tensor].prefetch_at = -1  # its prefetch is put off
                self.space.free(tensor)
        self.space.compact()
        return ready_s

    def _last_needed_first(self) -> list[int]:
        """What may leave before a defragmentation: what is needed last first, used or not, and weights after
        all others."""
        idle = [tensor for tensor in self.idle if tensor in self.space]
        early = [tensor for tensor in self.first_away if tensor in self.space and tensor in self.away]
        return sorted(idle + early, key=lambda tensor: (self.persistent[tensor], -self._needed(tensor)))

    def _needed(self, tensor: int) -> int:
        """The kernel that needs an idle tensor, or one that is away, again."""
        return self.idle[tensor].end if tensor in self.idle else self.away[tensor].period.end

    # Algorithms and prefetches (sections 5.2.2 and 5.2.3).

    def _algorithm(self) -> Algorithm:
        """The one with the largest gain; where the room for it cannot be made, the baseline."""
        choices = self.choices[self.kernel]
        base = baseline(choices)
        if len(choices) == 1:
            return base
        best, most_s = base, -math.inf
        for algorithm in choices:
            evicting_s = self._evicting_s(algorithm.workspace_bytes)
            if math.isinf(evicting_s) and algorithm is not base:
                continue
            late_s = self._late_s(algorithm, 0.0 if math.isinf(evicting_s) else evicting_s)
            gain_s = base.time_s - algorithm.time_s - evicting_s - late_s  # equation 10
            if gain_s > most_s:
                best, most_s = algorithm, gain_s
        return best

    def _evicting_s(self, size_bytes: int) -> float:
        if size_bytes == 0 or self.space.largest_gap >= size_bytes:
            return 0.0
        hidden_s = self.tiers.hidden_s(self.now_s)
        scheme = self.space.window(size_bytes, self.cost_s, self.until, hidden_s)
        return self._defragmenting_s(size_bytes) if scheme is None else scheme[1]

    def _defragmenting_s(self, size_bytes: int) -> float:
        """Seconds in which as much leaves as a defragmentation misses; infinite if there is not so much."""
        missing_bytes, seconds = size_bytes - self.space.free_bytes, 0.0
        for tensor in self._last_needed_first():
            if missing_bytes <= 0:
                break
            if tensor in self.away:  # its prefetch is put off
                if self._needed(tensor) > self.kernel:
                    missing_bytes -= self.sizes[tensor]
                continue
            tier = self.tiers.choose(tensor, self._after(self.idle[tensor]), self.idle[tensor].end)
            if tier is not None:
                missing_bytes -= self.sizes[tensor]
                seconds += self.tiers.write_s(tier, tensor)
        return seconds if missing_bytes <= 0 else math.inf

    def _late_s(self, algorithm: Algorithm, evicting_s: float) -> float:
        """How late the next kernel with absent tensors will be: those that the workspace keeps out."""
        needed, group = self._next_absent()
        room = self.space.free_bytes - algorithm.workspace_bytes
        kept_out_s = 0.0
        for tensor in group:
            room -= self.sizes[tensor]
            if room < 0:
                kept_out_s += self.tiers.read_s(self.away[tensor].tier, tensor)
        if kept_out_s == 0.0:
            return 0.0
        finish_s = self.now_s + evicting_s + algorithm.time_s
        return max(finish_s + kept_out_s - float(self.expected_s[needed]) - self.delay_s, 0.0)

    def _next_absent(self) -> tuple[int, list[int]]:
        """The next kernel with tensors that are not on the device, and those; -1 where none is away."""
        absent = [(away.period.end, tensor) for tensor, away in self.away.items() if tensor not in self.space]
        needed = min(absent, default=(-1, -1))[0]
        return needed, sorted(tensor for end, tensor in absent if end == needed)

    def _prefetch(self, algorithm: Algorithm) -> None:
        """Lines 15 to 27: fetch for later kernels, in order, as long as waiting would make them late."""
        while True:
            needed, group = self._next_absent()
            if not group or self._will_defragment(needed):
                return
            finish_s = max(self.now_s + algorithm.time_s, self.tiers.reading_until_s())
            reads_s = sum(self.tiers.read_s(self.away[tensor].tier, tensor) for tensor in group)
            if finish_s + reads_s <= float(self.expected_s[needed]) + self.delay_s:
                return
            for tensor in group:
                if self.away[tensor].begin == self.kernel:
                    return
                ready_s = self._try_allocate(tensor, self.sizes[tensor], needed)
                if ready_s is None:
                    return
                self._load(tensor, ready_s)

    def _will_defragment(self, needed: int) -> bool:
        """Whether kernel ``needed`` will not fit beside what schemes may not touch until then."""
        stays = self.size_bytes[self.protected & (self.until > needed)].sum()
        return bool(self.held_bytes[needed % self.trace.kernels] + stays > self.budget_bytes)

    def _end(self) -> None:
        """Close what reaches into the next iteration, which begins as this one did."""
        count = self.trace.kernels
        for tensor, interval in self.away.items():
            if tensor not in self.first_back:
                interval.prefetch_at = interval.prefetch_at if tensor in self.space else count
                self._decide(tensor, interval)
        for tensor, back in self.first_back.items():
            period = self.wrapping[tensor]
            interval = self.away.get(tensor) or _Away(
                period, self._after(period), count, self.tiers.home(tensor)
            )
            interval.prefetch_at = count + back
            self._decide(tensor, interval)
