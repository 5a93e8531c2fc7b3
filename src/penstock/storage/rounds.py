"""How often each path was the fastest, and how fast each policy would have been: Fastensor's tables 13, 14.

Fastensor clears its dictionaries from time to time and counts which path wins each new one (section 5.2.3).
Here nothing is cleared. The transfers of a size class are divided into rounds, each with its own costs: a
round ends when every path in play has one. A path more than `IN_PLAY` times as slow as the best is out of
play, as it is tried too rarely to wait for, unless it is the second best. No round ends while the medium of a
path in play is full.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median_low
from typing import TYPE_CHECKING, Literal, get_args

from penstock.storage.costs import KINDS, Kind
from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.storage.choice import PathCost, SizeClass

IN_PLAY = 1.5  # times the best: paths above it are not waited for, but the second best is
MOST_COSTS = 41  # of one path in one round
POLICIES = ("First", "Running", "Best")

Mode = Literal["write", "read", "write+read"]
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRow:
    """The rounds of one size class. What wins is a path; or, of writes with their reads, such a pair.

    class_bytes   the smallest size of the class, a power of two
    wins          by path or pair: the rounds in which it was the fastest; they add up to ``rounds``
    first         the winner of the first round
    running       what is used now
    best          the most frequent winner, known only afterwards
    """

    kind: Mode
    class_bytes: int
    rounds: int
    wins: Mapping[str, int]
    first: str
    running: str
    best: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyScore:
    """How good one policy was, over all size classes. A policy is a path, or one of `POLICIES`.

    best    fraction of the rounds in which what it uses was the fastest. Rounds are not equally long:
            the more equal the paths, the more often they are compared
    speed   time of the traffic with each round's fastest, over its time with this policy; None
            where that was never measured
    """

    best: float
    speed: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceReport:
    """Fastensor's tables 13 and 14, for writes, reads and both together, and what they add up to.

    shares   by kind of table, then by policy
    """

    rows: tuple[ReportRow, ...] = ()
    shares: Mapping[Mode, Mapping[str, PolicyScore]]

    def describe(self) -> str:
        """One table for each kind, then its summary."""
        texts = []
        for kind in MODES:
            if not (rows := [row for row in self.rows if row.kind == kind]):
                continue
            names = list(dict.fromkeys(name for row in rows for name in row.wins))
            wins = [[str(row.wins.get(name, 0)) for name in names] for row in rows]
            counts = [
                [format_bytes(row.class_bytes), *won, row.first, row.running, row.best]
                for row, won in zip(rows, wins, strict=True)
            ]
            reached = [
                [name, f"{share.best:.2%}", "-" if share.speed is None else f"{share.speed:.2%}"]
                for name, share in self.shares[kind].items()
            ]
            texts.append(f"{kind}: rounds won\n" + text_columns([["size from", *names, *POLICIES], *counts]))
            texts.append(
                f"{kind}: against the optimum\n" + text_columns([["policy", "rounds won", "speed"], *reached])
            )
        return "\n\n".join(texts)


class Rounds:
    """The rounds of one size class and kind of table. `begin` discards the unfinished one."""

    def __init__(self, mode: Mode, known: SizeClass) -> None:
        self.mode, self._known = mode, known
        self._kinds = [kind for kind in KINDS if kind in mode]
        self.count = 0
        self.first = self.best = ""
        self._options = {
            _named(parts): parts
            for medium in known.media
            for parts in product(*(known.among(kind, [medium]) for kind in self._kinds))
        }
        # Pairs of different paths are counted once they win: there are many.
        self._wins = {name: 0 for name, parts in self._options.items() if parts[0].path == parts[-1].path}
        # By policy: rounds won, the time, and the optimum's over the same rounds.
        self.won: Counter[str] = Counter()
        self.time_s: dict[str, float] = defaultdict(float)
        self.optimum_s: dict[str, float] = defaultdict(float)
        self.begin()

    def begin(self) -> None:
        self._bytes = 0
        self._seen: dict[PathCost, deque[float]] = {}
        costs = {name: sum(part.cost for part in parts) for name, parts in self._options.items()}
        best, second = (*sorted(costs.values()), math.inf)[:2]
        limit = max(IN_PLAY * best, second)  # one path alone would win every round
        in_play = (name for name, cost in costs.items() if cost <= limit or cost == math.inf)
        self._waiting = {part for name in in_play for part in self._options[name]}

    def add(self, kind: Kind, record: PathCost, cost: float, size_bytes: int) -> None:
        """Add a cost. The last one that the round waits for ends it."""
        if kind not in self._kinds:
            return
        self._bytes += size_bytes
        self._seen.setdefault(record, deque(maxlen=MOST_COSTS)).append(cost)
        if record in self._waiting:
            self._waiting.discard(record)
            if not self._waiting:
                self._end_round()
                self.begin()

    def _end_round(self) -> None:
        # One that is out of play was measured earlier: it cannot have beaten this round's fastest.
        costs = {
            name: sum(median_low(self._seen.get(part, [part.cost])) for part in parts)
            for name, parts in self._options.items()
        }
        fresh = [name for name, parts in self._options.items() if all(part in self._seen for part in parts)]
        winner = min(fresh, key=costs.__getitem__)
        running = self._in_use()
        self.count += 1
        if self.count == 1:
            self.first = running = winner  # until then paths are tried, not chosen
        self._wins[winner] = self._wins.get(winner, 0) + 1
        self.best = max(self._wins, key=self._wins.__getitem__)
        used = {**{name: name for name in costs}, "First": self.first, "Running": running}
        for policy, path in used.items():
            self.won[policy] += path == winner
            if costs[path] < math.inf:
                self.time_s[policy] += self._bytes * max(costs[path], costs[winner])
                self.optimum_s[policy] += self._bytes * costs[winner]

    def _in_use(self) -> str:
        return _named([self._known.best[kind, self._known.home] for kind in self._kinds])

    def row(self) -> ReportRow:
        """The counts. At least one round must have ended."""
        return ReportRow(
            kind=self.mode,
            class_bytes=1 << self._known.number,
            rounds=self.count,
            wins=dict(self._wins),
            first=self.first,
            running=self._in_use(),
            best=self.best,
        )


def _named(parts: Sequence[PathCost]) -> str:
    return ", ".join(dict.fromkeys(part.path for part in parts))


def shares(counted: Sequence[Rounds]) -> dict[str, PolicyScore]:
    """By policy, over the rounds of several size classes. `POLICIES` come first; "Best" is each class's most
    frequent winner."""
    counted = [rounds for rounds in counted if rounds.count]
    policies = dict.fromkeys((*POLICIES, *(policy for rounds in counted for policy in rounds.won)))
    found = {}
    for policy in policies if counted else ():
        used = [(rounds, rounds.best if policy == "Best" else policy) for rounds in counted]
        won, time_s, optimum_s = (
            sum(numbers)
            for numbers in zip(*((r.won[p], r.time_s[p], r.optimum_s[p]) for r, p in used), strict=True)
        )
        found[policy] = PolicyScore(
            best=won / sum(rounds.count for rounds in counted), speed=optimum_s / time_s if time_s else None
        )
    return found


def text_columns(lines: Sequence[Sequence[str]]) -> str:
    """A table as text; the first line is the head."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
