"""The linear program behind the lower bound: how fast an iteration could be, if tensors were water.

The iteration is cut into S slots (`slots.make_slots`). Columns:

- for each inactive period and each action that it allows, how much of the tensor has that action;
- for each version of a tensor and each tier, how much is written, by the period that first needs it;
- for each slot its length, and the bytes written to and read from each tier.

Rows, for each slot: its length is at least its kernels' time and what is recomputed, compressed or expanded
in it; no link carries more than it can in that length; what is live at the slot's end fits into the
budget, less what is away. Away is what has left by the plan, less what is not written yet, less what
has been read back before it is needed. What is written was ready; what is needed has been read. What is
compressed may also stay, and take less room: so it does where it is asked back before it is written.

Which tensor's bytes are written first is left open: a stock of bytes for each tier, not for each tensor.
That keeps the program small enough for a slot per kernel, and loses next to nothing, as bytes are alike.

Everything here errs on the side of the plan, so that the optimum is a lower bound for every plan that
has one action for each inactive period, repeated without end: parts of tensors, transfers in any order
and without latency, kernels at their fastest and with their least workspace, recomputation with no room
for its inputs, and no memory for what a codec works on.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from penstock.core.columns import FloatArray, IntArray
from penstock.core.memory_profile import least_workspace_bytes
from penstock.planners.optimal.program import Amounts, Flows, ProgramBuilder, joined, proven, solve
from penstock.planners.optimal.slots import EvictionCandidates, Slots, make_slots
from penstock.planners.problem import Problem
from penstock.simulator import ACTIONS, DISK, DISK_CSR, HOST, HOST_CSR, KEEP, MOVES, RECOMPUTE

_TIERS = {"host": (HOST, HOST_CSR), "disk": (DISK, DISK_CSR)}
_ALIKE = 4.0  # tensors whose waits differ by less than this factor share a stock of early writes
_AS_DEAR = 1.5  # the same for the cost of recomputation
_SCALE = 100.0  # what the peak and the time of an iteration are in the program's own units


class LPModel:
    """A linear program, and where its parts are.

    unit_bytes, unit_s   what a unit of the program's sizes and times is
    choices              (action, periods [N], columns [N]) for each action that is possible: column n says
                         how much of period n has it, in the program's units
    live_bytes           [K] the least bytes during each kernel with every tensor resident
    """

    def __init__(
        self, problem: Problem, candidates: EvictionCandidates, slots: Slots, live_bytes: IntArray
    ) -> None:
        kernel_time_s = problem.trace.fastest_time_s
        self.candidates, self.slots, self.hardware = candidates, slots, problem.hardware
        self.unit_bytes = max(float(live_bytes.max()), 1.0) / _SCALE
        self.unit_s = (float(kernel_time_s.sum()) or 1.0) / _SCALE
        self.count = len(slots)
        self.build = ProgramBuilder()
        self.flows = Flows(self.build, self.count, candidates.wraps)
        self.size: FloatArray = candidates.size_bytes / self.unit_bytes
        # A period is away at the ends of slots [starts, ends); where there are none, it cannot matter.
        self.starts = slots.before(candidates.begin)
        self.ends = slots.before(candidates.end)
        self.useful = (self.starts < self.ends) & (candidates.size_bytes > 0)

        need: FloatArray = (live_bytes[slots.checkpoint] - problem.budget_bytes) / self.unit_bytes
        self.tight = np.flatnonzero(need > 0)
        self.memory_rows = np.full(self.count, -1, dtype=np.int64)
        self.memory_rows[self.tight] = self.build.add_rows(len(self.tight), need[self.tight], np.inf)
        ran = np.bincount(slots.of_kernel, weights=kernel_time_s, minlength=self.count)
        times: FloatArray = ran / self.unit_s
        self.lengths = self.build.add_columns(self.count, upper=np.inf, lower=times, cost=1.0)
        self.time_rows = self.build.add_rows(self.count, times, np.inf)
        self.build.add(self.time_rows, self.lengths, 1.0)
        self.choices: list[tuple[int, IntArray, IntArray]] = []
        # Work of the compute stream that amounts cost, somewhere within slots [first, last].
        self.charges: list[tuple[IntArray, IntArray, Amounts]] = []
        self.traffic: dict[str, tuple[IntArray, IntArray]] = {}  # by tier: columns of writes, of reads
        for tier, (raw, packed) in _TIERS.items():
            if self.hardware.capacity_bytes(tier) > 0:
                self._tier(tier, raw, packed)
        self._recompute()
        self._charge()
        self._share_tensors()
        self._links()
        self.program = self.build.program()

    def fractions(self, value: FloatArray) -> FloatArray:
        """[P, A] how much of each period has which action, where the program's columns have ``value``."""
        fractions = np.zeros((len(self.candidates), len(ACTIONS)))
        for action, periods, columns in self.choices:
            fractions[periods, action] = np.clip(value[columns] / self.size[periods], 0.0, 1.0)
        fractions /= np.maximum(fractions.sum(axis=1, keepdims=True), 1.0)
        fractions[:, KEEP] = np.maximum(0.0, 1.0 - fractions.sum(axis=1))
        return fractions

    # The actions in a period

    def _choose(self, action: int, periods: IntArray) -> Amounts:
        columns = self.build.add_columns(len(periods), upper=self.size[periods])
        self.choices.append((action, periods, columns))
        return Amounts(columns, np.ones(len(periods)), self.size[periods])

    def _tier(self, tier: str, raw: int, packed: int) -> None:
        """What leaves for a tier, as it is or compressed."""
        candidates = self.candidates
        smaller = candidates.packed_bytes < candidates.size_bytes
        codecs = {"csr", candidates.lossy or "csr"}  # as if all were the faster one
        compress, expand = map(max, zip(*map(self.hardware.codec_rates, codecs), strict=True))
        gone, written = [], []
        for action, periods in (
            (raw, np.flatnonzero(self.useful)),
            (packed, np.flatnonzero(self.useful & smaller)),
        ):
            if len(periods) == 0:
                continue
            amounts = self._choose(action, periods)
            writers, writes = self._writes(periods, amounts)
            ready = self.slots.before(candidates.ready[writers] + 1)
            if action == packed:
                share = candidates.packed_bytes / candidates.size_bytes
                self._leave(self.starts[periods], self.ends[periods], amounts.times(1.0 - share[periods]))
                # It is compressed when it leaves, maybe in an earlier period, and then written.
                ready = self.slots.before(candidates.opened[writers])
                self._codec(ready, writers, writes, compress)
                self._codec(self.starts[periods], periods, amounts, expand)
                amounts = self._part(amounts)
                writers, writes = self._writes(periods, amounts)
                amounts, writes = amounts.times(share[periods]), writes.times(share[writers])
            gone.append((periods, amounts))
            written.append((writers, ready, writes))
        if not gone:
            return
        outgoing, pending = self._pending(
            joined([writers for writers, _, _ in written]),
            joined([ready for _, ready, _ in written]),
            Amounts.joined([writes for _, _, writes in written]),
        )
        periods, amounts = joined([some for some, _ in gone]), Amounts.joined([some for _, some in gone])
        incoming = self._away(tier, periods, amounts, pending)
        self.traffic[tier] = (outgoing, incoming)

    def _part(self, amounts: Amounts) -> Amounts:
        """As much or less. What is asked back before it is written has not moved: it stays, compressed."""
        count = len(amounts.columns)
        columns = self.build.add_columns(count, upper=amounts.upper)
        rows = self.build.add_rows(count, 0.0, np.inf)
        self.build.add(rows, amounts.columns, 1.0)
        self.build.add(rows, columns, -1.0)
        return Amounts(columns, amounts.weight, amounts.upper)

    def _writes(self, periods: IntArray, amounts: Amounts) -> tuple[IntArray, Amounts]:
        """What has to be written, and by which periods: enough for each of them is written by itself and
        by those of its version before it. What nothing ever writes has a copy for good."""
        candidates, build = self.candidates, self.build
        order = np.lexsort((candidates.rank[periods], candidates.version[periods]))
        order = order[~candidates.lasting[periods[order]]]
        periods, taken = periods[order], amounts.columns[order]
        version = candidates.version[periods]
        first = np.searchsorted(version, version)
        several = np.flatnonzero(np.searchsorted(version, version, side="right") - first > 1)
        columns = taken.copy()
        columns[several] = build.add_columns(len(several), upper=self.size[periods[several]])
        rows = build.add_rows(len(several), 0.0, np.inf)
        build.add(rows, taken[several], -1.0)
        lengths = several - first[several] + 1
        place = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        build.add(np.repeat(rows, lengths), columns[np.repeat(first[several], lengths) + place], 1.0)
        return periods, Amounts(columns, np.ones(len(columns)), self.size[periods])

    def _pending(self, periods: IntArray, ready: IntArray, writes: Amounts) -> tuple[IntArray, IntArray]:
        """[S] columns: what is written in each slot; and [tight] columns: what is no longer in use at each
        tight slot's end, but not written by then.

        Part of a tensor may be written while it is still in use, from slot ``ready`` on. Tensors that wait
        about as long for their period share a stock: they become ready in about the order in which they
        leave, so that first come, first served is right for them. One stock for all would let what was
        ready long ago be written in the name of what is not there yet.
        """
        build, starts = self.build, self.starts[periods]
        after = build.add_columns(self.count, upper=writes.most)
        flows, slots, amounts = [after], [starts], [writes]
        wait = starts - ready
        likeness = np.where(wait > 0, np.log(np.maximum(wait, 1)) / np.log(_ALIKE), -1.0).astype(np.int64)
        for number in np.unique(likeness[wait > 0]).tolist():
            some = (wait > 0) & (likeness == number)
            whole = writes.where(some)
            ahead = build.add_columns(len(whole.columns), upper=whole.upper)
            rows = build.add_rows(len(whole.columns), 0.0, np.inf)
            build.add(rows, whole.columns, 1.0)
            build.add(rows, ahead, -1.0)
            early = Amounts(ahead, whole.weight, whole.upper)
            flows.append(self.flows.within(ready[some], starts[some], early))
            slots.append(starts[some])
            amounts.append(early.times(-1.0))
        outgoing = build.add_columns(self.count, upper=writes.most)
        rows = build.add_rows(self.count, 0.0, 0.0)
        build.add(rows, outgoing, 1.0)
        for flow in flows:
            build.add(rows, flow, -1.0)
        pending = self.flows.stock(joined(slots), Amounts.joined(amounts), after)
        return outgoing, pending[self.tight]

    def _away(self, tier: str, periods: IntArray, gone: Amounts, pending: IntArray) -> IntArray:
        """What is away on this tier at the end of every tight slot. Returns [S] columns: what is read."""
        build, tight, ends = self.build, self.tight, self.ends[periods]
        left = self.flows.level(self.starts[periods], ends, gone)[tight]
        incoming = build.add_columns(self.count, upper=gone.most)
        ahead = self.flows.stock(ends, gone, incoming, sign=-1.0)[tight]
        capacity = min(self.hardware.capacity_bytes(tier) / self.unit_bytes, gone.most)
        away = build.add_rows(len(tight), 0.0, capacity)
        for rows in (away, self.memory_rows[tight]):
            build.add(rows, left, 1.0)
            build.add(rows, pending, -1.0)
            build.add(rows, ahead, -1.0)
        return incoming

    def _recompute(self) -> None:
        """What is recomputed, maybe earlier than it is needed: then it takes memory earlier. Tensors that
        cost about as much time for their size share a stock, counted in time."""
        candidates = self.candidates
        periods = np.flatnonzero(self.useful & np.isfinite(candidates.recompute_s))
        if len(periods) == 0:
            return
        amounts = self._choose(RECOMPUTE, periods)
        until = candidates.recompute_until[periods]
        until = self.slots.before(until)
        cost = candidates.recompute_s[periods] / self.unit_s / self.size[periods]
        free = cost <= 0
        self._leave(self.starts[periods[free]], until[free], amounts.where(free))
        dearness = np.log(np.maximum(cost, 1e-300)) // np.log(_AS_DEAR)
        for number in np.unique(dearness[~free]).tolist():
            some = ~free & (dearness == number)
            work = amounts.where(some).times(cost[some])
            self._leave(self.starts[periods[some]], until[some], amounts.where(some))
            flow = self.build.add_columns(self.count, upper=work.most)
            self.build.add(self.time_rows, flow, -1.0)
            ahead = self.flows.stock(until[some], work, flow, sign=-1.0)[self.tight]
            left = self.flows.level(self.starts[periods[some]], until[some], work)[self.tight]
            rows = self.build.add_rows(len(ahead), 0.0, np.inf)
            self.build.add(rows, left, 1.0)
            self.build.add(rows, ahead, -1.0)
            self.build.add(self.memory_rows[self.tight], ahead, -1.0 / float(cost[some].max()))

    def _leave(self, starts: IntArray, ends: IntArray, amounts: Amounts) -> None:
        """Free immediately, at the ends of slots ``[starts, ends)``."""
        left = self.flows.level(starts, ends, amounts)
        self.build.add(self.memory_rows[self.tight], left[self.tight], 1.0)

    def _codec(self, first: IntArray, periods: IntArray, amounts: Amounts, bytes_per_s: float) -> None:
        cost = self.unit_bytes / bytes_per_s / self.unit_s
        self.charges.append((first, self.ends[periods], amounts.times(cost)))

    def _charge(self) -> None:
        for first, last, amounts in self.charges:
            fixed = first == last
            at_once = amounts.where(fixed)
            self.build.add(self.time_rows[last[fixed] % self.count], at_once.columns, -at_once.weight)
            if not fixed.all():
                free = ~fixed
                work = self.flows.within(first[free], last[free], amounts.where(free))
                self.build.add(self.time_rows, work, -1.0)

    def _share_tensors(self) -> None:
        """The actions of a period share its tensor."""
        actions = np.zeros(len(self.candidates), dtype=np.int64)
        for _, periods, _ in self.choices:
            actions[periods] += 1
        several = np.flatnonzero(actions > 1)
        row_of = np.full(len(self.candidates), -1, dtype=np.int64)
        row_of[several] = self.build.add_rows(len(several), -np.inf, self.size[several])
        for _, periods, columns in self.choices:
            rows = row_of[periods]
            self.build.add(rows[rows >= 0], columns[rows >= 0], 1.0)

    # The links

    def _links(self) -> None:
        for bus, disk, direction in (("device_to_host", "disk_write", 0), ("host_to_device", "disk_read", 1)):
            carried = {tier: columns[direction] for tier, columns in self.traffic.items()}
            if "disk" in carried:
                self._link(disk, [carried["disk"]])
                if not self.hardware.disk_shares_bus:
                    del carried["disk"]
            if carried:
                self._link(bus, list(carried.values()))
        if "disk" in self.traffic and not self.hardware.disk_shares_bus and self.hardware.duplex < 1:
            self._duplex()

    def _link(self, link: str, carried: list[IntArray]) -> None:
        rows = self.build.add_rows(self.count, 0.0, np.inf)
        self.build.add(rows, self.lengths, self.rate(link))
        for columns in carried:
            self.build.add(rows, columns, -1.0)

    def _duplex(self) -> None:
        """Both directions at once, each at `duplex` of its rate: the corners of what a second can carry are
        (1, 0), (duplex, duplex) and (0, 1), in parts of the rates."""
        write, read = self.rate("disk_write"), self.rate("disk_read")
        other = min(1.0, (1 - self.hardware.duplex) / self.hardware.duplex)
        outgoing, incoming = self.traffic["disk"]
        for of_write, of_read in ((1.0, other), (other, 1.0)):
            rows = self.build.add_rows(self.count, 0.0, np.inf)
            self.build.add(rows, self.lengths, 1.0)
            self.build.add(rows, outgoing, -of_write / write)
            self.build.add(rows, incoming, -of_read / read)

    def rate(self, link: str) -> float:
        """The best that the link reaches with any transfer there can be, in the program's units."""
        best = self.hardware.rate_bytes_per_s(link)
        if self.hardware.measured_rates.get(link):
            candidates = self.candidates
            sizes = np.concatenate([candidates.size_bytes[self.useful], candidates.packed_bytes[self.useful]])
            different = [size for size in np.unique(sizes).tolist() if size > 0]
            best = max((size / self.hardware.transfer_s(link, size) for size in different), default=best)
        return best / self.unit_bytes * self.unit_s


@dataclass(frozen=True, slots=True, eq=False)
class FractionalPlan:
    """What the linear program answers. P inactive periods in the trace's order.

    bound_s     no plan is faster, repeated without end: proven, however well it was solved
    fractions   [P, 6] how much of each period has which action: the columns are those of
                penstock.simulator.ACTIONS; None where nothing was solved
    status      "optimal"; "time limit", "infeasible" (not even parts of tensors find room on the tiers) or
                "unknown": then only `bound_s` means something
    model       None where everything fits
    """

    bound_s: float
    fractions: FloatArray | None = None
    status: str = "unknown"
    model: LPModel | None = None


def fractional_plan(problem: Problem, slots: int = 200) -> FractionalPlan:
    """Solve the problem with tensors as water, in about ``slots`` slots of time.

    Raises InvalidArgument where the solver is not installed.
    """
    began = time.perf_counter()
    trace = problem.trace
    live_bytes = trace.live_bytes - trace.kernel_workspace_bytes + least_workspace_bytes(trace)
    candidates = EvictionCandidates.of(problem)
    fractions = np.zeros((len(candidates), len(ACTIONS)))
    if int(live_bytes.max(initial=0)) <= problem.budget_bytes:  # everything fits
        fractions[:, KEEP] = 1.0
        return FractionalPlan(trace.fastest_s, fractions, "optimal")
    model = LPModel(problem, candidates, make_slots(trace, candidates, slots), live_bytes)
    solution = solve(model.program, problem.time_limit_s - (time.perf_counter() - began))
    bound_s = max(trace.fastest_s, proven(model.program, solution.dual) * model.unit_s)
    return FractionalPlan(bound_s, model.fractions(solution.value), solution.status, model)


_ROUNDS = 8
_CLEAR = 0.95  # a fraction from this on is a choice
_SHARE = 0.3  # of the others, the largest are fixed, too
_LINK = {"host": "device_to_host", "disk": "disk_write"}
_TIE = 1e-5  # what a second on a link counts for: of plans that are as fast, one that moves less


def dive(model: LPModel, time_limit_s: float) -> FloatArray:
    """[P, A] fractions of each period, nearly all of them 0 or 1: what is fixed later makes up for what was
    rounded before. Where nothing fits any longer, or the time is over, the rest keeps its fractions.
    """
    began = time.perf_counter()
    program, size = model.program, model.size
    count = len(size)
    cost, lower, upper = program.cost.copy(), program.lower.copy(), program.upper.copy()
    column = np.full((count, len(ACTIONS)), -1)
    for action, periods, columns in model.choices:
        column[periods, action] = columns
        if action != RECOMPUTE:
            cost[columns] += _TIE * 2 / model.rate(_LINK[MOVES[action][0]])
    free = np.ones(count, dtype=np.bool_)
    found = np.zeros((count, len(ACTIONS)))
    found[:, KEEP] = 1.0
    for _ in range(_ROUNDS):
        left_s = time_limit_s - (time.perf_counter() - began)
        if left_s <= 0:
            break
        solution = solve(replace(program, cost=cost, lower=lower, upper=upper), left_s)
        if solution.status != "optimal":
            break
        fractions = model.fractions(solution.value)
        found[free] = fractions[free]
        most, chosen = fractions.max(axis=1), fractions.argmax(axis=1)
        unclear = np.flatnonzero(free & (most < _CLEAR))
        if len(unclear) == 0:
            break
        unclear = unclear[np.argsort(-most[unclear], kind="stable")]
        fixed = free & (most >= _CLEAR)
        fixed[unclear[: int(np.ceil(_SHARE * len(unclear)))]] = True
        free &= ~fixed
        for period in np.flatnonzero(fixed).tolist():
            found[period] = 0.0
            found[period, chosen[period]] = 1.0
            for action in np.flatnonzero(column[period] >= 0).tolist():
                amount = size[period] if action == chosen[period] else 0.0
                lower[column[period, action]] = upper[column[period, action]] = amount
    return found
