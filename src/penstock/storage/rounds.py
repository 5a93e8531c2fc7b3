"""How often each path was the fastest, and what each policy would have reached: Fastensor's tables 13, 14.

Fastensor clears its dictionaries from time to time and counts who wins each new one (section 5.2.3).
Here nothing is cleared. The transfers of a size class are divided into rounds: a round ends when every
path in play has a cost newer than the round before. The costs compared are medians over the round. A path
more than `IN_PLAY` times as slow as the best is out of play, since it is tried too rarely to wait for,
unless it is the second best. One that becomes faster is in play again. While the medium of a path in
play is full, no round ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Literal, get_args

from penstock.storage.costs import Kind
from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.storage.choice import PathCost, SizeClass

IN_PLAY = 1.5  # times the best: paths above it are not waited for, but the second best is
POLICIES = ("First", "Running", "Best")

Mode = Literal["write", "read", "write+read"]
MODES: tuple[Mode, ...] = get_args(Mode)


def pair(write: str, read: str) -> str:
    """The name of writing by one path and reading by another."""
    return write if write == read else f"{write}, {read}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRow:
    """The rounds of one size class. What wins is a path; or, of writes with their reads, a `pair`.

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
class Share:
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
    shares: Mapping[Mode, Mapping[str, Share]]

    def describe(self) -> str:
        """One table for each kind, then its summary."""
        return "\n\n".join(text for kind in MODES for text in self._describe(kind))

    def _describe(self, kind: Mode) -> list[str]:
        rows = [row for row in self.rows if row.kind == kind]
        if not rows:
            return []
        names = list(dict.fromkeys(name for row in rows for name in row.wins))
        counts = [
            (
                format_bytes(row.class_bytes),
                *(str(row.wins.get(name, 0)) for name in names),
                row.first,
                row.running,
                row.best,
            )
            for row in rows
        ]
        shares = [
            (name, f"{share.best:.2%}", "-" if share.speed is None else f"{share.speed:.2%}")
            for name, share in self.shares[kind].items()
        ]
        return [
            f"{kind}: rounds won\n" + aligned([("size from", *names, *POLICIES), *counts]),
            f"{kind}: against the optimum\n" + aligned([("policy", "rounds won", "speed"), *shares]),
        ]


@dataclass(slots=True)
class _Sum:
    """Rounds won by a policy, its time, and the optimum's time over the same rounds."""

    wins: int = 0
    time_s: float = 0.0
    optimum_s: float = 0.0

    def add(self, won: bool, time_s: float, optimum_s: float) -> None:
        self.wins += won
        if time_s < math.inf:
            self.time_s += time_s
            self.optimum_s += optimum_s


class Rounds:
    """The rounds of one size class and kind of table."""

    def __init__(self, kind: Mode, known: SizeClass) -> None:
        self._kind = kind
        self.count = 0
        self.first = self.best = ""
        self._options: dict[str, tuple[PathCost, ...]] = {}
        for medium in known.media:
            if kind == "write+read":
                for write, read in product(known.among("write", [medium]), known.among("read", [medium])):
                    self._options[pair(write.path, read.path)] = (write, read)
            else:
                self._options.update((each.path, (each,)) for each in known.among(kind, [medium]))
        self._records = {record for parts in self._options.values() for record in parts}
        # Pairs of different paths are counted once they win: there are many.
        self._wins = {name: 0 for name, parts in self._options.items() if parts[0].path == parts[-1].path}
        self._policies: dict[str, _Sum] = {}
        self.begin()

    def saw(self, kind: Kind, record: PathCost, size_bytes: int) -> bool:
        """A cost of ``record`` was added. Gives whether that ends the round: then call `end`."""
        if kind not in self._kind:
            return False
        self._bytes += size_bytes
        if record not in self._waiting:
            return False
        self._waiting.discard(record)
        return not self._waiting

    def end(self, known: SizeClass) -> None:
        """Count who won, and begin the next round."""
        medians = {record: record.since(start) for record, start in self._starts.items()}
        costs = {name: sum(medians[part] for part in parts) for name, parts in self._options.items()}
        fresh = [
            name
            for name, parts in self._options.items()
            if all(part.count > self._starts[part] for part in parts)
        ]
        winner = min(fresh, key=costs.__getitem__)
        self.count += 1
        running = self._in_use(known)
        if self.count == 1:
            self.first = running = winner  # until then paths are tried, not chosen
        self._wins[winner] = self._wins.get(winner, 0) + 1
        self.best = max(self._wins, key=self._wins.__getitem__)
        optimum_s = self._bytes * costs[winner]
        used = {**{name: name for name in costs}, "First": self.first, "Running": running}
        for policy, path in used.items():
            # A path out of play was measured earlier: it cannot have beaten this round's fastest.
            time_s = self._bytes * max(costs[path], costs[winner])
            self._policies.setdefault(policy, _Sum()).add(path == winner, time_s, optimum_s)
        self.begin()

    def begin(self) -> None:
        """Begin a round, and forget of the last one what was counted so far."""
        self._bytes = 0
        self._starts = {record: record.count for record in self._records}
        costs = {name: sum(part.cost for part in parts) for name, parts in self._options.items()}
        best, second = (*sorted(costs.values()), math.inf)[:2]
        limit = max(IN_PLAY * best, second)  # one path alone would win every round
        self._waiting: set[PathCost] = set()
        for name, parts in self._options.items():
            if costs[name] <= limit or costs[name] == math.inf:
                self._waiting.update(parts)

    def _in_use(self, known: SizeClass) -> str:
        if self._kind != "write+read":
            return known.best[self._kind, known.home].path
        return pair(known.best["write", known.home].path, known.best["read", known.home].path)

    def row(self, known: SizeClass) -> ReportRow:
        """What was counted. At least one round must be over."""
        return ReportRow(
            kind=self._kind,
            class_bytes=1 << known.number,
            rounds=self.count,
            wins=dict(self._wins),
            first=self.first,
            running=self._in_use(known),
            best=self.best,
        )

    def sums(self) -> Mapping[str, _Sum]:
        """By policy; "Best" is the row's most frequent winner."""
        return {**self._policies, "Best": self._policies[self.best]} if self.count else {}


def shares(counted: Iterable[Rounds]) -> dict[str, Share]:
    """By policy, over the rounds of several size classes. `POLICIES` come first."""
    total: dict[str, _Sum] = {}
    rounds = 0
    for one in counted:
        rounds += one.count
        for policy, part in one.sums().items():
            held = total.setdefault(policy, _Sum())
            held.wins += part.wins
            held.time_s += part.time_s
            held.optimum_s += part.optimum_s
    order = [*POLICIES, *(policy for policy in total if policy not in POLICIES)]
    return {
        policy: Share(
            best=total[policy].wins / rounds,
            speed=total[policy].optimum_s / total[policy].time_s if total[policy].time_s else None,
        )
        for policy in order
        if policy in total
    }


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells as text in columns; the first line is the head."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
