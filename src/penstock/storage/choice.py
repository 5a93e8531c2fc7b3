"""Which I/O path moves each tensor: chosen by what transfers cost on this machine, in this run. Pure.

Fastensor (section 4) tries each path once for each tensor size, keeps the costs in dictionaries, and
from then on uses the fastest, of writes and reads together (its WRDic). Its users say how often the
dictionaries are rebuilt, trading speed for overhead. The rule here goes beyond it:

- A size class holds the sizes ``[2**k, 2**(k + 1))``; within it, costs are compared per byte.
- The first transfers of a class try every path `EXPLORATIONS` times, in turn, and then those near the best
  until each was tried `SURE` times: single costs are noisy. Transfers under way count, so that no path
  gets all of those asked for before the first is over; the rest go the best known path, or that of the
  nearest class. A path more than `FAR` times as slow as the best both times is spared the third.
- A path costs the median of its last `WINDOW` transfers, and another takes its place when it is faster
  by more than `MARGIN` (and `COPYING`, if it copies with the processor): equal paths do not alternate. A
  path three times in a row far faster than its median has changed: what it cost before is forgotten.
- Nothing is made anew. One transfer in `PACE` may explore another path, if that path's exploration budget
  covers what it may cost beyond the best, reading back in its medium included. All paths together may spend
  the share ``reexplore`` of the time of all transfers, in equal parts, and each is charged what its
  explorations cost, by the median of the last three. So bad paths are explored rarely, equal ones often, and
  none never. What one may cost is judged by the least of the last three: after an expensive one that went
  well, the next are cheap, and a path that became faster is found by few.

Medians do not see rare stalls: where these are most of the time of a path, the choice can be wrong and
explorations can cost more than the share.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.errors import InvalidArgument, SpillSpaceFull
from penstock.storage.costs import KINDS, Entry, Kind, Tables, size_class
from penstock.storage.rounds import MODES, ChoiceReport, Mode, Rounds, shares
from penstock.units import format_bytes

EXPLORATIONS = 3  # of each path in the first transfers of a class: a median of three survives one outlier
FAR = 3.0  # times the best: not worth a third exploration
NEAR = 1.25  # times the best: three explorations do not tell them apart
SURE = 9  # explorations of each that is near
WINDOW = 41  # costs a median stands on
FASTER = 1.5  # times, three times in a row: the path changed, and what it cost before is forgotten
MARGIN = 0.02  # by which another path must be faster to take over
COPYING = 1.3  # times: what copies takes a processor from those who train, for little gain
PACE = 7  # what models repeat is a multiple of 2 or 3, seldom of 7: no tensor is always the one
SHORTEST_S = 1e-9  # clocks give no less, and no time at all has no rate


@dataclass(slots=True, eq=False)
class PathCost:
    """The costs of one path for one kind of transfer of one size class: seconds per byte.

    count       costs seen
    in_flight   explorations asked for that are not over
    exploring   of these, those that are paid from its exploration budget
    loaded      its first costs are known from before
    weight      of its costs where they are compared: `COPYING` for one that copies, else 1
    cost        median of the last `WINDOW`; infinite where unknown
    least, recent   of the last three: the least, and the median; 0 where there are not so many
    tried       number of the class's transfer that tried it last
    spent_s     of its exploration budget
    """

    path: str
    medium: str
    weight: float = 1.0
    count: int = 0
    in_flight: int = 0
    exploring: int = 0
    loaded: bool = False
    cost: float = math.inf
    least: float = 0.0
    recent: float = 0.0
    tried: int = 0
    spent_s: float = 0.0
    _window: deque[float] = field(default_factory=deque)
    _ordered: list[float] = field(default_factory=list)

    @property
    def samples(self) -> int:
        """How many costs the median stands on."""
        return len(self._ordered)

    @property
    def weighed(self) -> float:
        return self.cost * self.weight

    @property
    def tries(self) -> int:
        return self.count + self.in_flight

    def add(self, cost: float) -> None:
        window, ordered = self._window, self._ordered
        if len(window) == WINDOW:
            del ordered[bisect_left(ordered, window.popleft())]
        window.append(cost)
        insort(ordered, cost)
        self.count += 1
        self.cost = self.least = self.recent = ordered[(len(ordered) - 1) // 2]
        if len(ordered) < EXPLORATIONS:
            return
        latest = self.least, self.recent, most = sorted((cost, window[-2], window[-3]))
        if most * FASTER < self.cost:
            window.clear()
            window.extend(latest)
            ordered[:] = latest
            self.cost = self.recent

    def since(self, count: int) -> float:
        """The median of the costs after the first ``count``, or of the last `WINDOW` of them.

        `cost` where there are none.
        """
        if self.count <= count:
            return self.cost
        latest = sorted(list(self._window)[count - self.count :])
        return latest[(len(latest) - 1) // 2]


class SizeClass:
    """What is known of the sizes ``[2**number, 2**(number + 1))``.

    paths     by name, and the medium of each
    copying   those that copy with the processor where others of their medium do not

    waits      others explore it: the best that is known is used until `learn`
    records    by kind of transfer and path
    best       by kind of transfer and medium
    home       the medium that is written to, where it has room
    untried    kinds of transfer and media of which the first explorations are not over
    earned_s   what each path was allowed to spend on explorations so far
    others     paths that share the exploration budget
    asks       transfers asked for after the first explorations
    """

    def __init__(self, number: int, paths: Mapping[str, str], copying: Collection[str]) -> None:
        self.number = number
        self.waits = False
        self.media = tuple(dict.fromkeys(paths.values()))
        weights = {path: COPYING if path in copying else 1.0 for path in paths}
        self.records = {
            kind: {path: PathCost(path, paths[path], weights[path]) for path in paths} for kind in KINDS
        }
        self.best = {(kind, medium): self.among(kind, [medium])[0] for kind in KINDS for medium in self.media}
        self.home = self.media[0]
        self.untried = set(self.best)
        self.earned_s = 0.0
        self.others = max(2 * len(paths) - 2, 1)
        self.asks: dict[Kind, int] = {"write": 0, "read": 0}

    def among(self, kind: Kind, media: Collection[str]) -> list[PathCost]:
        """The paths to these media."""
        return [record for record in self.records[kind].values() if record.medium in media]

    def learn(self, entries: Iterable[Entry]) -> None:
        """Take costs that are known from elsewhere, where there are not enough from here."""
        self.waits = False
        for entry in entries:
            record = self.records[entry.kind][entry.path]
            for _ in range(min(entry.samples, EXPLORATIONS) - record.count):
                record.add(entry.s_per_byte)
                record.loaded = True
            self.refresh(entry.kind, record)

    def best_to(self, kind: Kind, media: Sequence[str]) -> PathCost:
        """The best known path to these media; its ``count`` is 0 where none is known."""
        if kind == "read":
            return self.best[kind, media[0]]
        home = self.best[kind, self.home]
        return home if home.count and self.home in media else self.best[kind, self._fastest(media)]

    def refresh(self, kind: Kind, record: PathCost) -> None:
        """A cost of ``record`` was added: another path, or medium, may be the best now."""
        key = kind, record.medium
        fastest = min(self.among(kind, [record.medium]), key=lambda record: record.weighed)
        if fastest.weighed < self.best[key].weighed * (1 - MARGIN):
            self.best[key] = fastest
        if len(self.media) > 1:
            medium, held = self._fastest(self.media), self._cost(self.home)
            if held == math.inf or self._cost(medium) < held * (1 - MARGIN):
                self.home = medium

    def beyond(self, kind: Kind, record: PathCost, cost: float, best: PathCost) -> float:
        """What a path that costs so much takes beyond the best, for each byte. Of a write, reading back from
        its medium counts."""
        there, home = self.best["read", record.medium], self.best["read", self.home]
        back = there.cost - home.cost if kind == "write" and there.count and home.count else 0.0
        return max(cost * record.weight - best.weighed + back, 0.0)

    def exploration(self, records: Iterable[PathCost]) -> PathCost | None:
        """Of the paths that were not tried often enough, the one tried least."""
        records = list(records)
        best = min(record.weighed for record in records)
        chosen, fewest = None, SURE
        for record in records:
            is_clear = record.count >= 2 and (record.loaded or record.weighed > FAR * best)
            if record.tries >= fewest or is_clear:
                continue
            near = record.count >= EXPLORATIONS and record.weighed <= NEAR * best and not record.loaded
            if record.tries < EXPLORATIONS or near:
                chosen, fewest = record, record.tries
        return chosen

    def is_explored(self) -> bool:
        return not any(
            self.exploration(records) or any(record.in_flight for record in records)
            for records in (self.among(kind, [medium]) for kind, medium in self.best)
        )

    def _fastest(self, media: Iterable[str]) -> str:
        """By its writes and reads together; by writes alone while no medium is measured in full."""
        return min(media, key=lambda medium: (self._cost(medium), self.best["write", medium].cost))

    def _cost(self, medium: str) -> float:
        return self.best["write", medium].cost + self.best["read", medium].cost


class Choice:
    """Says by which path to move each tensor, and learns from what it cost. The caller holds a lock.

    paths        by name: the medium that a path writes to. What was written in a medium can be read by
                the paths of that medium only
    reexplore   share of the transfer time that may be spent on trying other paths; 0 for none after
                the first explorations
    tables      costs known from before. They count as first explorations; paths that are not among ``paths``,
                or changed their medium, are ignored
    copying     paths that copy with the processor where others of their medium do not: they are used
                where they are clearly faster

    explores    the path given last is not known to be the best: its cost is worth measuring
    shares      others may explore in place of this choice: a new size class waits for `learn` or `explore`

    Raises InvalidArgument where a path or a kind is unknown.
    """

    def __init__(
        self,
        paths: Mapping[str, str],
        *,
        reexplore: float = 0.005,
        tables: Tables | None = None,
        copying: Collection[str] = (),
    ) -> None:
        if not paths:
            raise InvalidArgument("there is no path to move a tensor: name one at least")
        if not 0 <= reexplore < 1:
            raise InvalidArgument(f"reexplore is {reexplore}: it is a share of time, from 0 to below 1")
        self.paths = dict(paths)
        self.reexplore = reexplore
        self.explores = False
        self.shares = False
        self._copying = frozenset(copying)
        self._classes: dict[int, SizeClass] = {}
        self._rounds: dict[int, dict[Mode, Rounds]] = {}
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
            raise SpillSpaceFull(
                f"transfers of {format_bytes(1 << known.number)} and more can be written to "
                f"{_list(known.media)} only, but there is room in {_list(media or ()) or 'none'}: make room "
                "there"
            )
        return self._choose("write", known, among, size_bytes)

    def path_to_read(self, size_bytes: int, medium: str, explore: bool = True) -> str:
        """The path to read back ``size_bytes`` that were written in ``medium``.

        explore   False: the best of what is known, since what it costs cannot be measured now

        Report its cost to `observe`, or `withdraw` it. Raises InvalidArgument for an unknown medium.
        """
        known = self._class_of(size_bytes)
        if medium not in known.media:
            raise InvalidArgument(f"{medium!r} is no medium: media are {_list(known.media)}")
        return self._choose("read", known, [medium], size_bytes, explore)

    def observe(self, kind: Kind, size_bytes: int, path: str, cost_s: float) -> None:
        """A transfer of ``size_bytes`` took ``cost_s`` seconds. In any order, however late.

        Raises InvalidArgument for an unknown kind or path, or a cost that is negative or not finite.
        """
        if not 0 <= cost_s < math.inf:
            raise InvalidArgument(f"a transfer cannot cost {cost_s} s: give seconds, zero or more")
        known, record = self._find(kind, size_bytes, path)
        cost_s = max(cost_s, SHORTEST_S)
        record.in_flight = max(record.in_flight - 1, 0)
        known.earned_s += cost_s * self.reexplore / known.others
        record.add(cost_s / size_bytes)
        if record.exploring:
            record.exploring -= 1
            best = known.best_to(kind, known.media if kind == "write" else [record.medium])
            record.spent_s += known.beyond(kind, record, record.recent, best) * size_bytes
        for rounds in self._rounds[known.number].values():
            if rounds.saw(kind, record, size_bytes):
                rounds.end(known)  # as it was before this cost
        known.refresh(kind, record)

    def withdraw(self, kind: Kind, size_bytes: int, path: str) -> None:
        """A transfer that was asked for failed, or never began: it has no cost.

        Raises InvalidArgument for an unknown kind or path.
        """
        _, record = self._find(kind, size_bytes, path)
        record.in_flight = max(record.in_flight - 1, 0)
        record.exploring = max(record.exploring - 1, 0)

    def learn(self, tables: Tables) -> None:
        """Take costs that others found: they count as first explorations. Paths that are not among ``paths``,
        or have another medium there, are ignored."""
        known: dict[int, list[Entry]] = {}
        for entry in tables.entries:
            if self.paths.get(entry.path) == entry.medium:
                known.setdefault(size_class(entry.class_bytes), []).append(entry)
        for number, entries in known.items():
            (self._classes.get(number) or self._new_class(number)).learn(entries)
            for rounds in self._rounds[number].values():
                rounds.begin()

    def explore(self, number: int) -> None:
        """Wait no more for what others find out about a size class."""
        self._classes[number].waits = False

    def classes(self) -> dict[int, bool]:
        """Size classes seen so far, and whether each path of theirs was tried often enough."""
        return {number: not known.waits and known.is_explored() for number, known in self._classes.items()}

    def tables(self) -> Tables:
        """What is known now, to be saved, merged with that of other processes, and loaded again."""
        return Tables(
            tuple(
                Entry(
                    class_bytes=1 << number,
                    kind=kind,
                    path=record.path,
                    medium=record.medium,
                    samples=record.samples,
                    s_per_byte=record.cost,
                )
                for number in sorted(self._classes)
                for kind in KINDS
                for record in self._classes[number].records[kind].values()
                if record.count
            )
        )

    def report(self) -> ChoiceReport:
        """Who won the rounds so far. A size class has none before each of its paths was tried."""
        classes = sorted(self._rounds)
        return ChoiceReport(
            rows=tuple(
                self._rounds[number][mode].row(self._classes[number])
                for mode in MODES
                for number in classes
                if self._rounds[number][mode].count
            ),
            shares={mode: shares(self._rounds[number][mode] for number in classes) for mode in MODES},
        )

    def _choose(
        self, kind: Kind, known: SizeClass, media: Sequence[str], size_bytes: int, explore: bool = True
    ) -> str:
        best = known.best_to(kind, media)
        chosen = None
        if explore := explore and not known.waits:
            chosen = _first_exploration(kind, known, media)
        if chosen is None and best.count:
            chosen = best
            if explore:
                asks = known.asks[kind] = known.asks[kind] + 1
                # Reads elsewhere are rare: each may be an exploration.
                if not asks % PACE or (kind == "read" and known.home not in media):
                    chosen = self._another(kind, known, media, best, size_bytes) or best
        elif chosen is None:
            tried_least = min(known.among(kind, media), key=lambda record: record.tries)
            chosen = self._neighbour(kind, known, media) or tried_least
        self.explores = not known.waits and (chosen is not best or best.count < SURE)
        if self.explores:
            chosen.in_flight += 1
        return chosen.path

    def _another(
        self, kind: Kind, known: SizeClass, media: Sequence[str], best: PathCost, size_bytes: int
    ) -> PathCost | None:
        """A path other than the best that may be tried now: of several, the one longest not tried."""
        if not self.reexplore:
            return None
        # The best is in use: it saves nothing for the time when it is not.
        best.spent_s = max(best.spent_s, known.earned_s)
        affordable = []
        for record in known.among(kind, media):
            beyond_s = known.beyond(kind, record, record.least, best) * size_bytes
            pays = known.earned_s - record.spent_s >= beyond_s
            if pays and record is not best and record.in_flight < EXPLORATIONS:
                affordable.append(record)
        if not affordable:
            return None
        chosen = min(affordable, key=lambda record: record.tried)
        chosen.tried = known.asks[kind]
        chosen.exploring += 1
        return chosen

    def _neighbour(self, kind: Kind, known: SizeClass, media: Sequence[str]) -> PathCost | None:
        """The best path of the nearest size class that knows one."""
        for other in sorted(
            self._classes.values(), key=lambda other: (abs(other.number - known.number), other.number)
        ):
            best = other.best_to(kind, media)
            if best.count:
                return known.records[kind][best.path]
        return None

    def _class_of(self, size_bytes: int) -> SizeClass:
        return self._classes.get(size_bytes.bit_length() - 1) or self._new_class(size_class(size_bytes))

    def _new_class(self, number: int) -> SizeClass:
        known = self._classes[number] = SizeClass(number, self.paths, self._copying)
        known.waits = self.shares
        self._rounds[number] = {mode: Rounds(mode, known) for mode in MODES}
        return known

    def _find(self, kind: Kind, size_bytes: int, path: str) -> tuple[SizeClass, PathCost]:
        known = self._class_of(size_bytes)
        if kind not in known.records:
            raise InvalidArgument(f"{kind!r} is no kind of transfer: kinds are {_list(KINDS)}")
        if (record := known.records[kind].get(path)) is None:
            raise InvalidArgument(f"{path!r} is no path to move a tensor here: paths are {_list(self.paths)}")
        return known, record


def _first_exploration(kind: Kind, known: SizeClass, media: Sequence[str]) -> PathCost | None:
    """The path to try next, of those whose first explorations are not over."""
    untried = {(kind, medium) for medium in media} & known.untried if known.untried else None
    if not untried:
        return None
    records = known.among(kind, media)
    chosen = known.exploration(records)
    if chosen is None and not any(record.in_flight for record in records):
        known.untried -= untried
    return chosen


def _list(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
