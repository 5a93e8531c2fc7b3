"""What the paths of one size class cost, as far as is known: robust to noise, quick to follow a change."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.storage.autotune.tables import KINDS, Entry, Kind

EXPLORATIONS = 3  # of each path in the first transfers of a class: a median of three survives one outlier
FAR = 3.0  # times the best: not worth a third exploration
NEAR = 1.25  # times the best: three explorations do not tell them apart
SURE = 9  # explorations of each that is near
WINDOW = 41  # costs a median stands on
FASTER = 1.5  # times, three times in a row: the path changed, and what it cost before is forgotten
MARGIN = 0.02  # by which another path must be faster to take over
COPYING = 1.3  # times: what copies takes a processor from those who train, for little gain


@dataclass(slots=True, eq=False)
class PathCost:
    """The costs of one path for one kind of transfer of one size class: seconds per byte.

    count       costs seen
    in_flight   explorations asked for that are not over
    loaded      its first costs are known from before
    cost        median of the last `WINDOW`; infinite where unknown
    hope        what an exploration costs if luck has it: the window's lower quartile, or the least of the
                last three if it is lower still, or far above the median. 0 where unknown
    charge      what an exploration costs its budget: the median of the last three, without what is far above
                `cost`
    tried       number of the class's transfer that tried it last
    spent_s     of its exploration budget
    pending     explorations under way: (reserved, cost of the best, what reading back adds), in s
    """

    path: str
    medium: str
    count: int = 0
    in_flight: int = 0
    loaded: bool = False
    cost: float = math.inf
    hope: float = 0.0
    charge: float = 0.0
    tried: int = 0
    spent_s: float = 0.0
    pending: deque[tuple[float, float, float]] = field(default_factory=deque)
    _window: deque[float] = field(default_factory=deque)
    _ordered: list[float] = field(default_factory=list)

    @property
    def samples(self) -> int:
        """How many costs the median stands on."""
        return len(self._ordered)

    def add(self, cost: float) -> None:
        window, ordered = self._window, self._ordered
        if len(window) == WINDOW:
            del ordered[bisect_left(ordered, window.popleft())]
        window.append(cost)
        insort(ordered, cost)
        self.count += 1
        self.cost = self.charge = self.hope = ordered[(len(ordered) - 1) // 2]
        if len(ordered) < EXPLORATIONS:
            return
        latest = least, middle, most = sorted((cost, window[-2], window[-3]))
        if most * FASTER < self.cost:
            window.clear()
            window.extend(latest)
            ordered[:] = latest
            self.cost = middle
        if least > FAR * self.cost:  # three in a row are no outlier: it became slower
            self.charge, self.hope = middle, least
        else:
            self.charge = min(middle, FAR * self.cost)
            self.hope = min(least, ordered[(len(ordered) - 1) // 4])

    def since(self, count: int) -> float:
        """The median of the costs after the first ``count``, or of the last `WINDOW` of them.

        `cost` where there are none.
        """
        if self.count <= count:
            return self.cost
        latest = sorted(list(self._window)[count - self.count :])
        return latest[(len(latest) - 1) // 2]


def cost_of(record: PathCost) -> float:
    return record.cost


class Medium:
    """The paths of one medium in one size class, and the best of them.

    copying   names of the paths that copy with the processor where others of the medium do not
    records, best   by kind of transfer
    untried   kinds of transfer whose first explorations are not over
    """

    __slots__ = ("best", "copying", "name", "records", "untried")

    def __init__(self, name: str, paths: Sequence[str], copying: Collection[str]) -> None:
        self.name = name
        self.copying = copying
        self.records: dict[Kind, list[PathCost]] = {
            kind: [PathCost(path, name) for path in paths] for kind in KINDS
        }
        self.best = {kind: records[0] for kind, records in self.records.items()}
        self.untried = set(KINDS)

    def refresh(self, kind: Kind) -> None:
        """A cost of one of its paths was added: another may be the best now."""
        fastest = min(self.records[kind], key=self._weighed)
        if self._weighed(fastest) < self._weighed(self.best[kind]) * (1 - MARGIN):
            self.best[kind] = fastest

    def _weighed(self, record: PathCost) -> float:
        return record.cost * COPYING if record.path in self.copying else record.cost


class SizeClass:
    """What is known of the sizes ``[2**number, 2**(number + 1))``.

    entries    costs known from before: they count as first explorations
    copying    as of Medium

    waits      others explore it: the best that is known is used until `learn`
    home       the medium that is written to, where it has room
    earned_s   what each path was allowed to spend on explorations so far
    others     paths that share the exploration budget
    asks       transfers asked for after the first explorations
    """

    def __init__(
        self,
        number: int,
        paths: Mapping[str, str],
        entries: Iterable[Entry],
        copying: Collection[str],
    ) -> None:
        self.number = number
        self.waits = False
        self.media = {
            name: Medium(name, [path for path in paths if paths[path] == name], copying)
            for name in dict.fromkeys(paths.values())
        }
        self.records: dict[Kind, dict[str, PathCost]] = {
            kind: {record.path: record for medium in self.media.values() for record in medium.records[kind]}
            for kind in KINDS
        }
        self.home = next(iter(self.media.values()))
        self.earned_s = 0.0
        self.others = max(2 * len(paths) - 2, 1)
        self.asks: dict[Kind, int] = {"write": 0, "read": 0}
        self.learn(entries)

    def learn(self, entries: Iterable[Entry]) -> None:
        """Take costs that are known from elsewhere, where there are not enough from here."""
        self.waits = False
        for entry in entries:
            record = self.records[entry.kind][entry.path]
            for _ in range(min(entry.samples, EXPLORATIONS) - record.count):
                record.add(entry.s_per_byte)
                record.loaded = True
            self.refresh(entry.kind, record)

    def best(self, kind: Kind, among: Sequence[Medium]) -> PathCost:
        """The best known path of ``among``; its ``count`` is 0 where none is known."""
        if kind == "read":
            return among[0].best["read"]
        home = self.home if self.home.best["write"].count and self.home in among else self._fastest(among)
        return home.best["write"]

    def refresh(self, kind: Kind, record: PathCost) -> None:
        """A cost of ``record`` was added: another path, or medium, may be the best now."""
        self.media[record.medium].refresh(kind)
        if len(self.media) > 1:
            fastest, held = self._fastest(self.media.values()), self._cost(self.home)
            if held == math.inf or self._cost(fastest) < held * (1 - MARGIN):
                self.home = fastest

    def _fastest(self, among: Iterable[Medium]) -> Medium:
        """By its writes and reads together; by writes alone while no medium is measured in full."""
        return min(among, key=lambda medium: (self._cost(medium), medium.best["write"].cost))

    def _cost(self, medium: Medium) -> float:
        return medium.best["write"].cost + medium.best["read"].cost
