"""Chooses the I/O path of each transfer, by measured costs of transfers on this machine in this run. Pure.

Fastensor (section 4) tries each path once for each tensor size, keeps the costs in dictionaries, and from
then on uses the fastest, of writes and reads together (its WRDic). Here too, and beyond it:

- What is to be fastest is said by the user (``by``), or which path each size takes (``by_size``): its modes.
- A size class holds the sizes ``[2**k, 2**(k + 1))``; within it, costs are compared per byte.
- The first transfers of a class try every path `EXPLORATIONS` times, in turn, and then those near the best
  until each was tried `SURE` times: single costs are noisy. A path more than `FAR` times as slow as the best
  both times is spared the third. What else is asked for meanwhile goes the best known path, or that of the
  nearest class.
- A path costs the median of its last `WINDOW` transfers, and another takes its place when it is faster
  by more than `MARGIN` (and `COPYING`, if it copies with the processor): equal paths do not alternate. Where
  three in a row were far faster than its median, the path has changed, and only they count.
- Later one transfer in `PACE` may explore another path, since machines change. All paths together may take
  the share ``reexplore`` of the time of all transfers, in equal parts: after an exploration that took longer
  than the best path does, the next waits until so much has been earned. So slow paths are explored rarely,
  equal ones often, and none never.

Medians do not see rare stalls: where these are most of the time of a path, the choice can be wrong and
explorations can cost more than the share.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low

from penstock.errors import InvalidArgument, SpillSpaceFull
from penstock.options import ChooseBy
from penstock.storage.costs import KINDS, CostEntry, Kind, Tables
from penstock.storage.rounds import MODES, ChoiceReport, Rounds, shares
from penstock.units import format_bytes

EXPLORATIONS = 3  # of each path in the first transfers of a class: a median of three survives one outlier
FAR = 3.0  # times the best: not worth a third exploration
NEAR = 1.25  # times the best: three explorations do not distinguish them
SURE = 9  # explorations of each that is near
WINDOW = 41  # costs in a median
FASTER = 1.5  # times, three times in a row: the path changed
MARGIN = 0.02  # by which another path must be faster to take over
COPYING = 1.3  # times: a path that copies takes processor time from training, for little gain
PACE = 7  # models repeat by multiples of 2 or 3, seldom of 7: it is not always the same tensor
SHORTEST_S = 1e-9  # in place of 0, which has no rate

# Whose costs decide between media: Fastensor's WRDic, WDic and RDic.
_COMPARED: dict[ChooseBy, tuple[Kind, ...]] = {"both": KINDS, "writes": ("write",), "reads": ("read",)}


@dataclass(slots=True, eq=False)
class PathCost:
    """The costs of one path for one kind of transfer of one size class: seconds per byte.

    weight      of its costs where they are compared: `COPYING` for one that copies
    cost        the median of the latest; infinite where there are none
    least       of the last three
    count       costs seen
    in_flight   explorations that have not ended
    loaded      its first costs are known from before
    due_s       it may be explored again once its class has earned so much
    """

    path: str
    medium: str
    weight: float = 1.0
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    cost: float = math.inf
    least: float = 0.0
    count: int = 0
    in_flight: int = 0
    loaded: bool = False
    due_s: float = 0.0

    @property
    def weighed(self) -> float:
        return self.cost * self.weight

    @property
    def tries(self) -> int:
        return self.count + self.in_flight

    def end_exploration(self) -> None:
        self.in_flight = max(self.in_flight - 1, 0)

    def add(self, cost: float) -> None:
        self.latest.append(cost)
        last = list(self.latest)[-EXPLORATIONS:]
        if len(last) == EXPLORATIONS and max(last) * FASTER < self.cost:
            self.latest = deque(last, WINDOW)
        self.count += 1
        self.cost, self.least = median_low(self.latest), min(last)

    def wanted_tries(self, best: float) -> int:
        """How often the first transfers try it, where the cost of the best path is ``best``."""
        if self.count >= 2 and (self.loaded or self.weighed > FAR * best):
            return 2
        near = self.count >= EXPLORATIONS and self.weighed <= NEAR * best and not self.loaded
        return SURE if near else EXPLORATIONS


class SizeClass:
    """What is known of the sizes ``[2**number, 2**(number + 1))``.

    compared   the kinds of transfers by whose cost a medium is chosen
    waits      another rank explores it: the best known path is used until `learn`
    home       the medium to write to, where it has room
    untried    kinds of transfer and media whose first explorations have not ended
    earned_s   time that each path was allowed to spend on explorations so far
    asks       transfers requested after the first explorations
    """

    def __init__(
        self,
        number: int,
        paths: Mapping[str, str],
        copying: Collection[str],
        compared: Sequence[Kind],
        waits: bool,
    ) -> None:
        self.number, self.compared, self.waits = number, compared, waits
        self.media = tuple(dict.fromkeys(paths.values()))
        self.records = {
            kind: {
                path: PathCost(path, medium, COPYING if path in copying else 1.0)
                for path, medium in paths.items()
            }
            for kind in KINDS
        }
        self.best = {(kind, medium): self.among(kind, [medium])[0] for kind in KINDS for medium in self.media}
        self.home = self.media[0]
        self.untried = set(self.best)
        self.earned_s = 0.0
        self.asks: dict[Kind, int] = {"write": 0, "read": 0}
        self.rounds = {mode: Rounds(mode, self) for mode in MODES}

    def among(self, kind: Kind, media: Collection[str]) -> list[PathCost]:
        return [record for record in self.records[kind].values() if record.medium in media]

    def best_to(self, kind: Kind, media: Sequence[str]) -> PathCost:
        """The best known path to these media; its ``count`` is 0 where none is known."""
        if kind == "read":
            return self.best[kind, media[0]]
        home = self.best[kind, self.home]
        return home if home.count and self.home in media else self.best[kind, self._fastest(media)]

    def add(self, kind: Kind, record: PathCost, cost: float) -> None:
        """Add a cost, and update the best path and the medium to write to."""
        record.add(cost)
        key = kind, record.medium
        fastest = min(self.among(kind, [record.medium]), key=lambda record: record.weighed)
        if fastest.weighed < self.best[key].weighed * (1 - MARGIN):
            self.best[key] = fastest
        medium, held = self._fastest(self.media), self._cost(self.home)
        if held == math.inf or self._cost(medium) < held * (1 - MARGIN):
            self.home = medium

    def learn(self, entries: Iterable[CostEntry]) -> None:
        """Add costs that another rank measured, for paths with too few of this one's."""
        self.waits = False
        for entry in entries:
            record = self.records[entry.kind][entry.path]
            for _ in range(min(entry.samples, EXPLORATIONS) - record.count):
                self.add(entry.kind, record, entry.s_per_byte)
                record.loaded = True
        for rounds in self.rounds.values():
            rounds.begin()

    def first_exploration(self, kind: Kind, media: Sequence[str]) -> PathCost | None:
        """The next path to try in the first explorations; None: they have ended."""
        if not (untried := {(kind, medium) for medium in media} & self.untried):
            return None
        records = self.among(kind, media)
        chosen = _least_tried(records)
        if chosen is None and not any(record.in_flight for record in records):
            self.untried -= untried
        return chosen

    def exploration(self, kind: Kind, media: Sequence[str], best: PathCost) -> PathCost | None:
        """A path other than the best that may be explored now: the one longest due."""
        others = [each for each in self.among(kind, media) if each is not best and not each.in_flight]
        due = [each for each in others if each.due_s <= self.earned_s]
        return min(due, key=lambda record: record.due_s, default=None)

    def excess(self, kind: Kind, record: PathCost, best: PathCost) -> float:
        """Cost of a path above the best, by the least of its latest costs: so a path that became faster is
        found soon. A write includes reading back from its medium."""
        there, home = self.best["read", record.medium], self.best["read", self.home]
        back = there.cost - home.cost if kind == "write" and there.count and home.count else 0.0
        return max(record.least * record.weight - best.weighed + back, 0.0)

    def is_explored(self) -> bool:
        return not self.waits and not any(
            _least_tried(records) or any(record.in_flight for record in records)
            for records in (self.among(kind, [medium]) for kind, medium in self.best)
        )

    def _fastest(self, media: Iterable[str]) -> str:
        """The medium with the least cost; by writes alone while no read is measured."""
        return min(media, key=lambda medium: (self._cost(medium), self.best["write", medium].cost))

    def _cost(self, medium: str) -> float:
        return sum(self.best[kind, medium].cost for kind in self.compared)


def path_of_size(by_size: Mapping[int, str], size_bytes: int) -> str:
    """The path of a fixed table: each from so many bytes on, the first also below."""
    return by_size[max((least for least in by_size if least <= size_bytes), default=min(by_size))]


def _least_tried(records: Sequence[PathCost]) -> PathCost | None:
    """The path tried least, of those not tried often enough."""
    best = min(record.weighed for record in records)
    untried = [record for record in records if record.tries < record.wanted_tries(best)]
    return min(untried, key=lambda record: record.tries, default=None)


class Choice:
    """Chooses the path of each transfer, and learns from its cost. The caller holds a lock.

    paths       by name: the medium that a path writes to. What was written in a medium can be read by
                the paths of that medium only
    reexplore   share of the transfer time that may be spent on trying other paths; 0 for none after
                the first explorations
    tables      costs of an earlier run. They count as first explorations; paths that are not among ``paths``,
                or changed their medium, are ignored
    copying     paths that copy with the processor where others of their medium do not: used only where they
                are clearly faster
    by          what is compared between media: the costs of writes, of reads, or of both
    by_size     the only path of each size: from so many bytes on, the first also below; none where empty

    explores    the path returned last is not known to be the best: its cost is worth measuring
    shares      other ranks may explore for this one: a new size class waits for `learn` or `explore`
    """

    def __init__(
        self,
        paths: Mapping[str, str],
        *,
        reexplore: float = 0.005,
        tables: Tables | None = None,
        copying: Collection[str] = (),
        by: ChooseBy = "both",
        by_size: Mapping[int, str] = {},
    ) -> None:
        if not 0 <= reexplore < 1:
            raise InvalidArgument(f"reexplore is {reexplore}: it is a share of time, from 0 to below 1")
        self.paths, self.by_size = dict(paths), dict(sorted(by_size.items()))
        self._compared = _COMPARED[by]
        self.explores = self.shares = False
        # Of the time of a transfer, what each path may spend: of both kinds, but for the best.
        self._earns = reexplore / max(2 * len(paths) - 2, 1)
        self._copying = frozenset(copying)
        self._classes: dict[int, SizeClass] = {}
        if tables is not None:
            self.learn(tables)

    def path_to_write(self, size_bytes: int, media: Collection[str] | None = None) -> str:
        """The path to write a tensor of ``size_bytes``. Report its cost to `observe`, or `withdraw` it.

        media   those that have room now; None for all

        Raises SpillSpaceFull where no path writes to any of them.
        """
        known = self._class_of(size_bytes)
        among = known.media if media is None else [medium for medium in known.media if medium in media]
        if not among:
            room = " and ".join(media or ()) or "none"
            raise SpillSpaceFull(
                f"transfers of {format_bytes(1 << known.number)} and more can be written to "
                f"{' or '.join(known.media)} only, but there is room in {room}: make room there"
            )
        return self._choose("write", known, among)

    def path_to_read(self, size_bytes: int, medium: str, explore: bool = True) -> str:
        """The path to read back ``size_bytes`` that were written in ``medium``: as `path_to_write`.

        explore   False: the best of what is known, since what it costs cannot be measured now
        """
        return self._choose("read", self._class_of(size_bytes), [medium], explore)

    def observe(self, kind: Kind, size_bytes: int, path: str, cost_s: float) -> None:
        """A transfer of ``size_bytes`` took ``cost_s`` seconds. In any order, however late."""
        known = self._class_of(size_bytes)
        record = known.records[kind][path]
        cost = max(cost_s, SHORTEST_S) / size_bytes
        record.end_exploration()
        known.earned_s += cost * size_bytes * self._earns
        for rounds in known.rounds.values():
            rounds.add(kind, record, cost, size_bytes)  # by what was in use before this cost
        known.add(kind, record, cost)
        best = known.best_to(kind, known.media if kind == "write" else [record.medium])
        record.due_s = known.earned_s + known.excess(kind, record, best) * size_bytes

    def withdraw(self, kind: Kind, size_bytes: int, path: str) -> None:
        """A transfer failed, or never began: it has no cost."""
        self._class_of(size_bytes).records[kind][path].end_exploration()

    def learn(self, tables: Tables) -> None:
        """Add costs that other ranks measured."""
        known: dict[int, list[CostEntry]] = {}
        for entry in tables.entries:
            if self._paths_of(entry.class_bytes).get(entry.path) == entry.medium:
                known.setdefault(entry.class_bytes, []).append(entry)
        for class_bytes, entries in known.items():
            self._class_of(class_bytes).learn(entries)

    def explore(self, number: int) -> None:
        """Explore a size class here; do not wait for another rank."""
        self._classes[number].waits = False

    def classes(self) -> dict[int, bool]:
        """Size classes seen so far, and whether each path of theirs was tried often enough."""
        return {number: known.is_explored() for number, known in self._classes.items()}

    def tables(self) -> Tables:
        return Tables(
            tuple(
                CostEntry(
                    class_bytes=1 << number,
                    kind=kind,
                    path=record.path,
                    medium=record.medium,
                    samples=len(record.latest),
                    s_per_byte=record.cost,
                )
                for number, known in sorted(self._classes.items())
                for kind in KINDS
                for record in known.records[kind].values()
                if record.count
            )
        )

    def report(self) -> ChoiceReport:
        """The rounds so far. A size class has none before each of its paths was tried."""
        classes = [known for _, known in sorted(self._classes.items())]
        return ChoiceReport(
            rows=tuple(
                known.rounds[mode].row() for mode in MODES for known in classes if known.rounds[mode].count
            ),
            shares={mode: shares([known.rounds[mode] for known in classes]) for mode in MODES},
        )

    def _choose(self, kind: Kind, known: SizeClass, media: Sequence[str], explore: bool = True) -> str:
        best, explore = known.best_to(kind, media), explore and not known.waits
        chosen = known.first_exploration(kind, media) if explore else None
        if chosen is None and not best.count:
            chosen = self._neighbour(kind, known, media)
        elif chosen is None and explore and self._earns:
            asks = known.asks[kind] = known.asks[kind] + 1
            # Reads elsewhere are rare: each may be an exploration.
            if not asks % PACE or (kind == "read" and known.home not in media):
                chosen = known.exploration(kind, media, best)
        chosen = chosen or best
        self.explores = not known.waits and (chosen is not best or best.count < SURE)
        if self.explores:
            chosen.in_flight += 1
        return chosen.path

    def _neighbour(self, kind: Kind, known: SizeClass, media: Sequence[str]) -> PathCost:
        """The best path of the nearest size class that knows one; else the path that was tried least."""
        others = [
            other
            for other in self._classes.values()
            if {*media} <= {*other.media}
            and (best := other.best_to(kind, media)).count
            and best.path in known.records[kind]
        ]
        if not others:
            return min(known.among(kind, media), key=lambda record: record.tries)
        nearest = min(others, key=lambda other: (abs(other.number - known.number), other.number))
        return known.records[kind][nearest.best_to(kind, media).path]

    def _class_of(self, size_bytes: int) -> SizeClass:
        number = size_bytes.bit_length() - 1
        if (known := self._classes.get(number)) is None:
            if size_bytes < 1:
                raise InvalidArgument(f"a transfer of {size_bytes} bytes cannot be: give a size above zero")
            paths = self._paths_of(1 << number)
            known = SizeClass(number, paths, self._copying, self._compared, self.shares)
            self._classes[number] = known
        return known

    def _paths_of(self, class_bytes: int) -> Mapping[str, str]:
        """Those of a size class, by name, with their media."""
        if not self.by_size:
            return self.paths
        path = path_of_size(self.by_size, class_bytes)
        return {path: self.paths[path]}
