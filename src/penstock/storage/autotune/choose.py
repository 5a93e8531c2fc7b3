"""Which path to move a tensor: chosen by what transfers cost on this machine, in this run. Pure.

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
  explorations cost. So bad paths are explored rarely, equal ones often, and none never. What an exploration
  may cost is judged hopefully: after an expensive one that went well, the next are cheap, and a path that
  became faster is found by few.

Charges and comparisons are by medians. They do not see rare stalls: where these are most of a path's
time, the choice can be wrong and explorations can cost more than the share. So can, once, a path that became
far slower: it is charged in full from its third slow exploration on.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from penstock.errors import InvalidArgument, SpillSpaceFull
from penstock.storage.autotune.costs import (
    EXPLORATIONS,
    FAR,
    NEAR,
    SURE,
    Medium,
    PathCost,
    SizeClass,
    cost_of,
)
from penstock.storage.autotune.rounds import MODES, ChoiceReport, Mode, Rounds, shares
from penstock.storage.autotune.tables import KINDS, Entry, Kind, Tables, size_class
from penstock.units import format_bytes

PACE = 7  # what models repeat is a multiple of 2 or 3, seldom of 7: no tensor is always the one
SHORTEST_S = 1e-9  # clocks give no less, and no time at all has no rate


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
        known = self._classes.get(size_bytes.bit_length() - 1) or self._new_class(size_class(size_bytes))
        among = [medium for name, medium in known.media.items() if media is None or name in media]
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
        known = self._classes.get(size_bytes.bit_length() - 1) or self._new_class(size_class(size_bytes))
        if medium not in known.media:
            raise InvalidArgument(f"{medium!r} is no medium: media are {_list(known.media)}")
        return self._choose("read", known, [known.media[medium]], size_bytes, explore)

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
        if record.pending:
            reserved_s, best_s, reading_s = record.pending.popleft()
            record.spent_s += record.charge * size_bytes - best_s + reading_s - reserved_s
        for rounds in self._rounds[known.number].values():
            if rounds.saw(kind, record, size_bytes):
                rounds.end(known.home)  # as it was before this cost
        known.refresh(kind, record)

    def withdraw(self, kind: Kind, size_bytes: int, path: str) -> None:
        """A transfer that was asked for failed, or never began: it has no cost.

        Raises InvalidArgument for an unknown kind or path.
        """
        _, record = self._find(kind, size_bytes, path)
        record.in_flight = max(record.in_flight - 1, 0)
        if record.pending:
            record.spent_s -= record.pending.popleft()[0]

    def learn(self, tables: Tables) -> None:
        """Take costs that others found: they count as first explorations. Paths that are not among ``paths``,
        or have another medium there, are ignored."""
        known: dict[int, list[Entry]] = {}
        for entry in tables.entries:
            if self.paths.get(entry.path) == entry.medium:
                known.setdefault(size_class(entry.class_bytes), []).append(entry)
        for number, entries in known.items():
            if number in self._classes:
                self._classes[number].learn(entries)
                for rounds in self._rounds[number].values():
                    rounds.begin()
            else:
                self._new_class(number, entries)

    def explore(self, number: int) -> None:
        """Wait no more for what others find out about a size class."""
        self._classes[number].waits = False

    def classes(self) -> dict[int, bool]:
        """Size classes seen so far, and whether each path of theirs was tried often enough."""
        return {number: not known.waits and _is_explored(known) for number, known in self._classes.items()}

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
                self._rounds[number][kind].row(1 << number, self._classes[number].home)
                for kind in MODES
                for number in classes
                if self._rounds[number][kind].count
            ),
            shares={kind: shares(self._rounds[number][kind] for number in classes) for kind in MODES},
        )

    def _choose(
        self, kind: Kind, known: SizeClass, among: Sequence[Medium], size_bytes: int, explore: bool = True
    ) -> str:
        best = known.best(kind, among)
        chosen = None
        explore = explore and not known.waits
        if explore:
            for medium in among:
                if kind in medium.untried:
                    chosen = _first_exploration(kind, among)
                    break
        if chosen is None and best.count:
            chosen = best
            if explore:
                asks = known.asks[kind] = known.asks[kind] + 1
                # Reads elsewhere are rare: each may be an exploration.
                if not asks % PACE or (kind == "read" and known.home not in among):
                    chosen = self._another(kind, known, among, best, size_bytes) or best
        elif chosen is None:
            chosen = self._neighbour(kind, known, among) or min(
                (record for medium in among for record in medium.records[kind]), key=_tries
            )
        self.explores = not known.waits and (chosen is not best or best.count < SURE)
        if self.explores:
            chosen.in_flight += 1
        return chosen.path

    def _another(
        self, kind: Kind, known: SizeClass, among: Sequence[Medium], best: PathCost, size_bytes: int
    ) -> PathCost | None:
        """A path other than the best that may be tried now: of several, the one longest not tried."""
        if not self.reexplore:
            return None
        # The best is in use: it saves nothing for the time when it is not.
        best.spent_s = max(best.spent_s, known.earned_s)
        home = known.media[best.medium]
        chosen: PathCost | None = None
        pending = (0.0, 0.0, 0.0)
        for medium in among:
            hope, median = _reading_back(medium, home) if kind == "write" else (0.0, 0.0)
            for record in medium.records[kind]:
                reserved_s = max(record.hope - best.cost + hope, 0.0) * size_bytes
                if record is best or record.in_flight >= EXPLORATIONS:
                    continue
                if known.earned_s - record.spent_s < reserved_s:
                    continue
                if chosen is None or record.tried < chosen.tried:
                    chosen = record
                    pending = (reserved_s, best.cost * size_bytes, median * size_bytes)
        if chosen is not None:
            chosen.tried = known.asks[kind]
            chosen.spent_s += pending[0]
            chosen.pending.append(pending)
        return chosen

    def _neighbour(self, kind: Kind, known: SizeClass, among: Sequence[Medium]) -> PathCost | None:
        """The best path of the nearest size class that knows one."""
        for other in sorted(
            self._classes.values(), key=lambda other: (abs(other.number - known.number), other.number)
        ):
            best = other.best(kind, [other.media[medium.name] for medium in among])
            if best.count:
                return known.records[kind][best.path]
        return None

    def _new_class(self, number: int, entries: Sequence[Entry] = ()) -> SizeClass:
        known = self._classes[number] = SizeClass(number, self.paths, entries, self._copying)
        known.waits = self.shares and not entries
        self._rounds[number] = {kind: Rounds(kind, list(known.media.values())) for kind in MODES}
        return known

    def _find(self, kind: Kind, size_bytes: int, path: str) -> tuple[SizeClass, PathCost]:
        known = self._classes.get(size_bytes.bit_length() - 1) or self._new_class(size_class(size_bytes))
        if kind not in known.records:
            raise InvalidArgument(f"{kind!r} is no kind of transfer: kinds are {_list(KINDS)}")
        if (record := known.records[kind].get(path)) is None:
            raise InvalidArgument(f"{path!r} is no path to move a tensor here: paths are {_list(self.paths)}")
        return known, record


def _first_exploration(kind: Kind, among: Sequence[Medium]) -> PathCost | None:
    """The path to try next, of those whose first explorations are not over."""
    records = [record for medium in among for record in medium.records[kind]]
    chosen = _exploration(records)
    if chosen is None and not any(record.in_flight for record in records):
        for medium in among:
            medium.untried.discard(kind)
    return chosen


def _exploration(records: Sequence[PathCost]) -> PathCost | None:
    """Of the paths that were not tried often enough, the one tried least."""
    best = min(map(cost_of, records))
    chosen, fewest = None, SURE
    for record in records:
        tries = _tries(record)
        if tries >= fewest or (record.count >= 2 and (record.loaded or record.cost > FAR * best)):
            continue
        near = record.count >= EXPLORATIONS and record.cost <= NEAR * best and not record.loaded
        if tries < EXPLORATIONS or near:
            chosen, fewest = record, tries
    return chosen


def _is_explored(known: SizeClass) -> bool:
    return all(
        _exploration(records) is None and not any(record.in_flight for record in records)
        for medium in known.media.values()
        for records in medium.records.values()
    )


def _tries(record: PathCost) -> int:
    return record.count + record.in_flight


def _reading_back(medium: Medium, home: Medium) -> tuple[float, float]:
    """What reading from ``medium`` costs beyond reading from ``home``: with luck, and by medians."""
    if medium is home or not home.best["read"].count:
        return 0.0, 0.0
    hope = min(record.hope for record in medium.records["read"]) - home.best["read"].cost
    return hope, medium.best["read"].cost - home.best["read"].cost if medium.best["read"].count else 0.0


def _list(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
