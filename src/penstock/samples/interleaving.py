"""Which source each sample of a mixture comes from, and which sample of the source: a pure function.

**Draws.** An epoch of a mixture has stages, one for each set of weights. Of a stage's n samples, source i
gives n * weight, rounded so that all give n together (largest remainder), whatever the number of processes. A
source's draws go through it once, then through it again in another order: *passes*.

**Replicas** (order.py) are dealt a source's draws like cards: draw c of source i goes to replica
``(o + c) % replicas``, where o is the number of draws of the sources before it. So all replicas have equally
many samples, but for one, and within a pass each has as many as the source's own order gives it: number
``(replica - o) % replicas`` of that order, o counting the draws before the pass.

**Turns.** In a stage, a replica that draws q of a source draws number j of them at time ``(j + 1/2) / q``; of
equal times, the first source's comes first. That is as even as can be: of n turns in a row, a source has
n * weight but for one or two. Of its t turns, replica r begins with number ``(draw(0, r) >> 11) % t``, by the
draw of order.py, and comes to those before it last: so replicas do not all draw from one source at once.

**Resumed** with other replicas, what is left of each stage and each pass is dealt anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidArgument
from penstock.samples.order import Segment

MOST_SAMPLES = 1 << 52  # of an epoch: times are floating-point numbers

Counts = npt.NDArray[np.int64]
Times = npt.NDArray[np.float64]
Weights = tuple[Fraction, ...]  # of all sources; their sum is 1


class Change(NamedTuple):
    """From sample ``begin`` of all epochs on, these weights hold."""

    begin: int
    weights: Weights


def draws_of(schedule: Sequence[Change], begin: int, samples: int) -> list[list[int]]:
    """[stages][sources] how many samples each source gives to the ``samples`` from ``begin`` on."""
    ends = [change.begin for change in schedule[1:]] + [begin + samples]
    stages = []
    for change, end in zip(schedule, ends, strict=True):
        length = min(end, begin + samples) - max(change.begin, begin)
        if length > 0:
            stages.append(_rounded(length, change.weights))
    return stages


def samples_until_seen(schedule: Sequence[Change], sizes: Sequence[int]) -> int:
    """Samples from the beginning on until every source that is drawn from has given all of its samples."""
    wanted = list(sizes)
    for change, following in zip(schedule, [*schedule[1:], None], strict=True):
        drawn_later = [
            any(later.weights[i] for later in schedule if later.begin > change.begin)
            for i in range(len(sizes))
        ]
        needed = [
            -(-left // weight)
            for left, weight in zip(wanted, change.weights, strict=True)
            if left > 0 and weight
        ]
        waits = any(
            left > 0 and not weight and later
            for left, weight, later in zip(wanted, change.weights, drawn_later, strict=True)
        )
        length = max(needed, default=0)
        if following is None or (not waits and change.begin + length <= following.begin):
            return change.begin + length
        (drawn,) = draws_of([Change(0, change.weights)], 0, following.begin - change.begin)
        wanted = [left - given for left, given in zip(wanted, drawn, strict=True)]
    raise AssertionError("a schedule has at least one set of weights")


def _rounded(length: int, weights: Weights) -> list[int]:
    """``length`` divided by the weights: the largest remainders, first ones first, are rounded up."""
    exact = [length * weight for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: length - sum(counts)]:
        counts[i] += 1
    return counts


class Pass(NamedTuple):
    """A pass through a source: its number in the epoch, what was taken of it, and how much is left."""

    number: int
    after: tuple[Segment, ...]
    left: int


class PassDraws(NamedTuple):
    """What one division draws of one pass: ``draws`` of what is left, the first by replica ``dealer``."""

    of: Pass
    draws: int
    dealer: int

    def shares(self, ranks: Counts, replicas: int) -> tuple[Counts, Counts]:
        """Of these replicas: their numbers in the source's own order, and how much each draws."""
        numbers = (ranks - self.dealer) % replicas
        return numbers, share(self.draws, numbers, replicas)


def share(draws: int | Counts, numbers: Counts, replicas: int) -> Counts:
    """How many of so many draws, dealt in turn, each of these replicas has."""
    return draws // replicas + (numbers < draws % replicas)


class Left(NamedTuple):
    """What is left of an epoch.

    stages  [stages][sources] draws
    begun   [sources] the passes that have been begun, and not finished
    fresh   [sources] the number of the first pass that has not been begun
    sizes   [sources] samples of a pass
    """

    stages: list[list[int]]
    begun: list[list[Pass]]
    fresh: list[int]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, stages: list[list[int]], sizes: Sequence[int]) -> Left:
        return cls(stages, [[] for _ in sizes], [0 for _ in sizes], tuple(sizes))

    def after(self, segment: Segment) -> Left:
        """The same after the replicas of a segment have taken what it says.

        Raises InvalidArgument where they cannot have.
        """
        division = Division(self, segment.replicas)
        ranks = np.arange(segment.replicas)
        counts = division.counts(ranks, np.array(segment.taken, np.int64))
        slots = segment.slots
        if not isinstance(slots, tuple) or len(slots) != len(self.sizes):
            raise InvalidArgument(
                f"the state is of a store, and this is a mixture of {len(self.sizes)} sources: give the "
                "state of a Loader of the same mixture"
            )
        stages = [
            [left - int(taken) for left, taken in zip(stage, here.sum(0), strict=True)]
            for stage, here in zip(self.stages, counts, strict=True)
        ]
        begun, fresh = [], []
        for source, taken in enumerate(np.sum(counts, axis=0).T):
            passes, number = self._passes_after(division, source, taken, slots[source])
            begun.append(passes)
            fresh.append(number)
        return Left(stages, begun, fresh, self.sizes)

    def _passes_after(
        self, division: Division, source: int, taken: Counts, slots: int
    ) -> tuple[list[Pass], int]:
        """The passes that are begun, and the number of the first that is not, once ``taken`` is."""
        replicas, ranks = division.replicas, np.arange(division.replicas)
        waiting = {each.number: each for each in self.begun[source]}
        passes: list[Pass] = []
        rounds = division.rounds(source, int(taken.min()))
        fresh, dealt = self.fresh[source] + rounds * replicas, np.full(replicas, rounds * self.sizes[source])
        for piece in division.pieces(source, rounds):
            number, after, left = piece.of
            if number >= self.fresh[source] and (taken <= dealt).all():
                break
            fresh = max(fresh, number + 1)
            waiting.pop(number, None)
            numbers, shares = piece.shares(ranks, replicas)
            here = np.clip(taken - dealt, 0, shares)
            dealt += shares
            if here.any():
                by_number = np.empty(replicas, np.int64)
                by_number[numbers] = here
                after, left = (*after, Segment(replicas, slots, tuple(by_number.tolist()))), left - here.sum()
            if left:
                passes.append(Pass(number, after, int(left)))
        return [*passes, *waiting.values()], fresh


class Division:
    """What is left of an epoch, dealt to so many replicas."""

    def __init__(self, left: Left, replicas: int) -> None:
        self.left, self.replicas = left, replicas
        self._ends = np.zeros((len(left.stages) + 1, len(left.sizes)), np.int64)
        np.cumsum(np.array(left.stages, np.int64).reshape(-1, len(left.sizes)), 0, out=self._ends[1:])
        totals = self._ends[-1]
        self._dealers = (np.cumsum(totals) - totals) % replicas

    def quotas(self, ranks: Counts) -> list[Counts]:
        """[stages] [ranks, sources]: how much each of the replicas draws of each source."""
        numbers = (ranks[:, None] - self._dealers) % self.replicas
        ends = [share(draws, numbers, self.replicas) for draws in self._ends]
        return [end - begin for begin, end in pairwise(ends)]

    def begins(self, ranks: Counts, quotas: Counts) -> Counts:
        """[ranks, sources] what of each source is in the turns that the replicas come to last."""
        drawn = _mix((ranks + 1).astype(np.uint64) * _GOLDEN) >> np.uint64(11)
        return _counts_at(quotas, drawn.astype(np.int64) % np.maximum(quotas.sum(1), 1))

    def counts(self, ranks: Counts, taken: Counts) -> list[Counts]:
        """[stages] [ranks, sources]: what of each source is in the first ``taken`` samples of each replica.

        Raises InvalidArgument where one has fewer.
        """
        counts = []
        for quotas in self.quotas(ranks):
            turns, begins = quotas.sum(1), self.begins(ranks, quotas)
            here = np.minimum(taken, turns)
            taken = taken - here
            ends = begins.sum(1) + here
            wrapped = ends > turns
            at = _counts_at(quotas, np.where(wrapped, ends - turns, ends))
            counts.append(at - begins + quotas * wrapped[:, None])
        if taken.any():
            raise InvalidArgument(
                "a replica cannot have given more samples than its share: this is not a state of a Loader"
            )
        return counts

    def rounds(self, source: int, taken: int) -> int:
        """Rounds of passes that are over where every replica, or this one, has taken so many draws.

        A round is as many whole passes as there are replicas: each replica draws as much as a pass has.
        """
        size, begun = self.left.sizes[source], sum(each.left for each in self.left.begun[source])
        if not size:
            return 0
        whole = (int(self._ends[-1, source]) - begun) // (size * self.replicas)
        return max(0, min(whole, (taken - -(-begun // self.replicas)) // size))

    def pieces(self, source: int, rounds: int = 0) -> Iterator[PassDraws]:
        """Of a source, pass by pass, without so many rounds of those that have not been begun."""
        dealer = int(self._dealers[source])
        passes = rounds * self.replicas
        left = int(self._ends[-1, source]) - passes * self.left.sizes[source]
        number = self.left.fresh[source] + passes
        begun = iter(self.left.begun[source])
        while left > 0:
            of = next(begun, None)
            if of is None:
                of, number = Pass(number, (), self.left.sizes[source]), number + 1
            draws = min(left, of.left)
            yield PassDraws(of, draws, dealer)
            left, dealer = left - draws, (dealer + draws) % self.replicas


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """As in order.py."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ x >> np.uint64(shift)) * np.uint64(factor)
    mixed: npt.NDArray[np.uint64] = x ^ x >> np.uint64(31)
    return mixed


def _counts_at(quotas: Counts, turns: Counts) -> Counts:
    """[rows, sources] what of each source is in the first ``turns`` [rows] of a stage."""
    about = (turns / np.maximum(quotas.sum(1), 1))[:, None] * quotas - 0.5
    counts: Counts = np.clip(np.ceil(about), 0, quotas).astype(np.int64)
    rows = np.arange(len(quotas))
    last_source = quotas.shape[1] - 1
    while len(rows):
        # Those that are not exact yet, one turn a time: too few, too many, or a later one before an earlier.
        mine, of = counts[rows], quotas[rows]
        following = np.where(mine < of, _times(mine, of), np.inf)
        latest = np.where(mine > 0, _times(mine - 1, of), -np.inf)
        first = following.argmin(1)
        last = last_source - latest[:, ::-1].argmax(1)
        lane = np.arange(len(rows))
        surplus = mine.sum(1) - turns[rows]
        next_time, last_time = following[lane, first], latest[lane, last]
        swapped = (surplus == 0) & ((last_time > next_time) | ((last_time == next_time) & (last > first)))
        drop, add = (surplus > 0) | swapped, (surplus < 0) | swapped
        counts[rows[drop], last[drop]] -= 1
        counts[rows[add], first[add]] += 1
        rows = rows[drop | add]
    return counts


def _times(draws: Counts, quotas: Counts) -> Times:
    """When those draws are due; the quotas of none are due at some time, too."""
    times: Times = (draws + 0.5) / np.maximum(quotas, 1)
    return times


class Turns:
    """The sources of one replica's samples, in turn."""

    def __init__(self, division: Division, rank: int, skip: int) -> None:
        """skip: samples at the beginning that are left out. Raises InvalidArgument where there are fewer."""
        ranks = np.array([rank])
        self._parts: list[tuple[Counts, Counts, int]] = []  # quotas, counts where it goes on, turns
        self.skipped = np.zeros(len(division.left.sizes), np.int64)  # [sources]
        counts = division.counts(ranks, np.array([skip]))
        for (quotas,), (done,) in zip(division.quotas(ranks), counts, strict=True):
            (begin,) = division.begins(ranks, quotas[None])
            turns, at, end = int(quotas.sum()), int(begin.sum()), int((begin + done).sum())
            self.skipped += done
            if end < turns:
                self._parts.append((quotas, begin + done, turns - end))
            again = begin + done - quotas if end >= turns else np.zeros_like(quotas)
            self._parts.append((quotas, again, at - max(0, end - turns)))

    def take(self, samples: int) -> Counts:
        """[n] the source of each of the next samples; fewer than ``samples`` only at the end."""
        taken: list[Counts] = [np.empty(0, np.int64)]
        while samples and self._parts:
            quotas, counts, turns = self._parts.pop(0)
            taken.append(_merged(quotas, counts, min(turns, samples)))
            samples -= len(taken[-1])
            if turns > len(taken[-1]):
                counts = counts + np.bincount(taken[-1], minlength=len(quotas))
                self._parts.insert(0, (quotas, counts, turns - len(taken[-1])))
        return np.concatenate(taken)


def _merged(quotas: Counts, counts: Counts, turns: int) -> Counts:
    """The sources of so many turns after ``counts``."""
    ahead = np.minimum(quotas - counts, turns)
    sources = np.repeat(np.arange(len(quotas)), ahead)
    places = np.arange(len(sources)) - np.repeat(np.cumsum(ahead) - ahead, ahead)
    due = _times(counts[sources] + places, quotas[sources])
    merged: Counts = sources[np.argsort(due, kind="stable")[:turns]]
    return merged
