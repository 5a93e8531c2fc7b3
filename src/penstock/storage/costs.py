"""What the ways of one size class cost, as far as is known: robust to noise, quick to follow a change."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from penstock.storage.tables import KINDS, Entry, Kind, Mode, domain_cost

TRIALS = 3  # of each way in the first transfers of a class: a median of three survives one outlier
FAR = 3.0  # times the best: not worth a third trial
NEAR = 1.25  # times the best: three trials do not tell them apart
SURE = 9  # trials of each that is near
WINDOW = 41  # costs a median stands on
FASTER = 1.5  # times, three times in a row: the way changed, and what it cost before is forgotten
MARGIN = 0.02  # by which another way must be faster to take over
COPYING = 1.3  # times: what copies takes a processor from those who train, for little gain


class Record:
    """The costs of one way for one kind of transfer of one size class: seconds per byte.

    count       costs seen
    in_flight   transfers asked for that are not over
    loaded      its first costs are known from before
    cost        median of the last `WINDOW`; infinite where unknown
    hope        what a trial costs if luck has it: the window's lower quartile, or the least of the last
                three if it is lower still, or far above the median. 0 where unknown
    trial       what a trial is charged: the median of the last three, without what is far above `cost`
    tried       number of the class's transfer that tried it last
    spent_s     of its allowance
    pending     trials under way: (reserved, what the best would have cost, what reading back adds), in s
    """

    __slots__ = (
        "_ordered",
        "_window",
        "cost",
        "count",
        "domain",
        "hope",
        "in_flight",
        "loaded",
        "pending",
        "spent_s",
        "trial",
        "tried",
        "way",
    )

    def __init__(self, way: str, domain: str) -> None:
        self.way = way
        self.domain = domain
        self.count = 0
        self.in_flight = 0
        self.loaded = False
        self.cost = math.inf
        self.hope = 0.0
        self.trial = 0.0
        self.tried = 0
        self.spent_s = 0.0
        self.pending: deque[tuple[float, float, float]] = deque()
        self._window: deque[float] = deque()
        self._ordered: list[float] = []

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
        self.cost = self.trial = self.hope = ordered[(len(ordered) - 1) // 2]
        if len(ordered) < TRIALS:
            return
        latest = least, middle, most = sorted((cost, window[-2], window[-3]))
        if most * FASTER < self.cost:
            window.clear()
            window.extend(latest)
            ordered[:] = latest
            self.cost = middle
        if least > FAR * self.cost:  # three in a row are no outlier: it became slower
            self.trial, self.hope = middle, least
        else:
            self.trial = min(middle, FAR * self.cost)
            self.hope = min(least, ordered[(len(ordered) - 1) // 4])

    def since(self, count: int) -> float:
        """The median of the costs after the first ``count``, or of the last `WINDOW` of them.

        `cost` where there are none.
        """
        if self.count <= count:
            return self.cost
        latest = sorted(list(self._window)[count - self.count :])
        return latest[(len(latest) - 1) // 2]


def cost_of(record: Record) -> float:
    return record.cost


class Domain:
    """The ways of one domain in one size class, and the best of them.

    copying   names of the ways that copy with the processor where others of the domain do not
    untried   kinds of transfer whose first trials are not over
    """

    __slots__ = ("best_read", "best_write", "copying", "name", "reads", "untried", "writes")

    def __init__(self, name: str, ways: Sequence[str], copying: Collection[str]) -> None:
        self.name = name
        self.copying = copying
        self.writes = [Record(way, name) for way in ways]
        self.reads = [Record(way, name) for way in ways]
        self.best_write = self.writes[0]
        self.best_read = self.reads[0]
        self.untried = set(KINDS)

    def records(self, kind: Kind) -> list[Record]:
        return self.writes if kind == "write" else self.reads

    def best(self, kind: Kind) -> Record:
        return self.best_write if kind == "write" else self.best_read

    def refresh(self, kind: Kind) -> None:
        """A cost of one of its ways was added: another may be the best now."""
        held, fastest = self.best(kind), min(self.records(kind), key=self._weighed)
        if self._weighed(fastest) >= self._weighed(held) * (1 - MARGIN):
            return
        if kind == "write":
            self.best_write = fastest
        else:
            self.best_read = fastest

    def _weighed(self, record: Record) -> float:
        return record.cost * COPYING if record.way in self.copying else record.cost


class SizeClass:
    """What is known of the sizes ``[2**number, 2**(number + 1))``.

    pins       by kind: the way that the user wants
    entries    costs known from before: they count as first trials
    copying    as of Domain

    places     the domains that may be written to
    home       the one that is, where it has room
    earned_s   what each way was allowed to spend on trials so far
    others     ways that share the allowance
    asks       transfers asked for after the first trials
    """

    def __init__(
        self,
        number: int,
        ways: Mapping[str, str],
        mode: Mode,
        pins: Mapping[Kind, str],
        entries: Iterable[Entry],
        copying: Collection[str],
    ) -> None:
        self.number = number
        self.domains = {
            name: Domain(name, [way for way in ways if ways[way] == name], copying)
            for name in dict.fromkeys(ways.values())
        }
        self.records: dict[Kind, dict[str, Record]] = {
            kind: {record.way: record for place in self.domains.values() for record in place.records(kind)}
            for kind in KINDS
        }
        self.places = [
            place for place in self.domains.values() if all(ways[way] == place.name for way in pins.values())
        ]
        self.home = self.places[0]
        self.earned_s = 0.0
        self.others = max(2 * sum(len(place.writes) for place in self.places) - 2, 1)
        self.asks: dict[Kind, int] = {"write": 0, "read": 0}
        self._mode = mode
        self._pins = pins
        for entry in entries:
            record = self.records[entry.kind][entry.way]
            for _ in range(min(entry.samples, TRIALS)):
                record.add(entry.s_per_byte)
            record.loaded = True
            self.refresh(entry.kind, record)

    def pinned(self, kind: Kind, places: Sequence[Domain]) -> Record | None:
        """The pinned way, unless it cannot read what lies in these places."""
        if (way := self._pins.get(kind)) is None:
            return None
        record = self.records[kind][way]
        return record if any(place.name == record.domain for place in places) else None

    def best(self, kind: Kind, places: Sequence[Domain]) -> Record:
        """The best known way in these places; its ``count`` is 0 where none is known."""
        if kind == "read":
            return places[0].best_read
        home = self.home if self.home.best_write.count and self.home in places else self._fastest(places)
        return home.best_write

    def refresh(self, kind: Kind, record: Record) -> None:
        """A cost of ``record`` was added: another way, or domain, may be the best now."""
        self.domains[record.domain].refresh(kind)
        if len(self.places) > 1:
            fastest, held = self._fastest(self.places), self._cost(self.home)
            if held == math.inf or self._cost(fastest) < held * (1 - MARGIN):
                self.home = fastest

    def _fastest(self, places: Sequence[Domain]) -> Domain:
        """By the mode's account; by writes alone while no domain is measured in full."""
        return min(places, key=lambda place: (self._cost(place), place.best_write.cost))

    def _cost(self, place: Domain) -> float:
        return domain_cost(self._mode, place.best_write.cost, place.best_read.cost)
