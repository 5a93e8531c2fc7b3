"""Which way to move a tensor: chosen by what transfers cost on this machine, in this run. Pure.

Fastensor (section 4) tries each way once for each tensor size, keeps the costs in dictionaries, and
from then on uses the fastest: by its writes (WDic), its reads (RDic), or both (WRDic). Its users say
how often the dictionaries are made anew, trading speed for overhead. The rule here goes beyond it:

- A size class holds the sizes ``[2**k, 2**(k + 1))``; within it, costs are compared per byte.
- The first transfers of a class try every way `TRIALS` times, in turn, and then those near the best
  until each was tried `SURE` times: single costs are noisy. Transfers under way count, so that no way
  gets all of those asked for before the first is over; the rest go the best known way, or that of the
  nearest class. A way more than `FAR` times as slow as the best both times is spared the third.
- A way costs the median of its last `WINDOW` transfers, and another takes its place when it is faster
  by more than `MARGIN` (and `COPYING`, if it copies with the processor): equal ways do not alternate. A
  way three times in a row far faster than its median has changed: what it cost before is forgotten.
- Nothing is made anew. One transfer in `PACE` may try another way, if that way's allowance covers what
  it may cost beyond the best, reading back in its domain included. All ways together are allowed the
  share ``reexplore`` of the time of all transfers, in equal parts, and each is charged what its trials
  cost. So bad ways are tried rarely, equal ones often, and none never. What a trial may cost is judged
  hopefully: after an expensive one that went well, the next are cheap, and a way that became faster is
  found by few.

Charges and comparisons are by medians. They do not see rare stalls: where these are most of a way's
time, the choice can be wrong and trials can cost more than the share. So can, once, a way that became
far slower: it is charged in full from its third slow trial on.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from penstock.errors import InvalidArgument, InvalidSize, SpillSpaceFull
from penstock.storage.costs import FAR, NEAR, SURE, TRIALS, Domain, Record, SizeClass, cost_of
from penstock.storage.rounds import ChoiceReport, Rounds, shares
from penstock.storage.tables import KINDS, MODES, Entry, Kind, Mode, Tables, size_class
from penstock.units import format_bytes, parse_bytes

PACE = 7  # what models repeat is a multiple of 2 or 3, seldom of 7: no tensor is always the one
SHORTEST_S = 1e-9  # clocks give no less, and no time at all has no rate

_Pins = Mapping[tuple[Kind | None, int | None], str]  # by kind and size class; None for every one


class Choice:
    """Says which way to move each tensor, and learns from what it cost. The caller holds a lock.

    ways        by name: the domain that a way writes to. What was written in a domain can be read by
                the ways of that domain only
    mode        what makes a domain the best: its writes, its reads, or both
    reexplore   share of the transfer time that may be spent on trying other ways; 0 for none after
                the first trials
    tables      costs known from before. They count as first trials; ways that are not among ``ways``,
                or changed their domain, are ignored
    pinned      a way to use for everything; or ways by kind, size class or both, as in
                ``{"read": ..., "4MiB": ..., "write 64KiB": ...}``. A size means its whole class. A key
                of both counts before one of a size, and that before one of a kind. What is not pinned
                is chosen, writes only where the pinned reads can read
    copying     ways that copy with the processor where others of their domain do not: they are used
                where they are clearly faster

    Raises InvalidArgument where a way, a kind or a mode is unknown, or where pinned writes are in
    another domain than pinned reads of the same size.
    """

    def __init__(
        self,
        ways: Mapping[str, str],
        *,
        mode: Mode = "write+read",
        reexplore: float = 0.005,
        tables: Tables | None = None,
        pinned: str | Mapping[str, str] | None = None,
        copying: Collection[str] = (),
    ) -> None:
        if not ways:
            raise InvalidArgument("there is no way to move a tensor: name one at least")
        if mode not in MODES:
            raise InvalidArgument(f"mode is {mode!r}: modes are {', '.join(map(repr, MODES))}")
        if not 0 <= reexplore < 1:
            raise InvalidArgument(f"reexplore is {reexplore}: it is a share of time, from 0 to below 1")
        self.ways = dict(ways)
        self.mode: Mode = mode
        self.reexplore = reexplore
        self._copying = frozenset(copying)
        self._pins = _read_pins(pinned, self.ways)
        self._classes: dict[int, SizeClass] = {}
        self._rounds: dict[int, dict[Mode, Rounds]] = {}
        loaded: dict[int, list[Entry]] = {}
        for entry in tables.entries if tables else ():
            if self.ways.get(entry.way) == entry.domain:
                loaded.setdefault(size_class(entry.class_bytes), []).append(entry)
        for number, entries in loaded.items():
            self._new_class(number, entries)

    def way_to_write(self, size_bytes: int, domains: Collection[str] | None = None) -> str:
        """The way to write a tensor of ``size_bytes``. Report its cost to `observe`, or `withdraw` it.

        domains   those that have room now; None for all

        Raises SpillSpaceFull where none of them can be written to by a way that is allowed.
        """
        known = self._class(size_bytes)
        places = known.places
        if domains is not None:
            places = [place for place in places if place.name in domains]
            if not places:
                raise SpillSpaceFull(self._no_room(known, domains))
        return self._choose("write", known, places, size_bytes)

    def way_to_read(self, size_bytes: int, domain: str, explore: bool = True) -> str:
        """The way to read back ``size_bytes`` that were written in ``domain``.

        explore   False: the best of what is known, since what it costs cannot be measured now

        Report its cost to `observe`, or `withdraw` it. Raises InvalidArgument for an unknown domain.
        """
        known = self._class(size_bytes)
        if (place := known.domains.get(domain)) is None:
            raise InvalidArgument(f"{domain!r} is no domain: domains are {_list(known.domains)}")
        return self._choose("read", known, [place], size_bytes, explore)

    def observe(self, kind: Kind, size_bytes: int, way: str, cost_s: float) -> None:
        """A transfer of ``size_bytes`` took ``cost_s`` seconds. In any order, however late.

        Raises InvalidArgument for an unknown kind or way, or a cost that is negative or not finite.
        """
        if not 0 <= cost_s < math.inf:
            raise InvalidArgument(f"a transfer cannot cost {cost_s} s: give seconds, zero or more")
        known, record = self._find(kind, size_bytes, way)
        cost_s = max(cost_s, SHORTEST_S)
        record.in_flight = max(record.in_flight - 1, 0)
        known.earned_s += cost_s * self.reexplore / known.others
        record.add(cost_s / size_bytes)
        if record.pending:
            reserved_s, best_s, reading_s = record.pending.popleft()
            record.spent_s += self._excess(kind, record.trial * size_bytes - best_s, reading_s) - reserved_s
        for rounds in self._rounds[known.number].values():
            if rounds.saw(kind, record, size_bytes):
                rounds.end(known.home)  # as it was before this cost
        known.refresh(kind, record)

    def withdraw(self, kind: Kind, size_bytes: int, way: str) -> None:
        """A transfer that was asked for failed, or never began: it has no cost.

        Raises InvalidArgument for an unknown kind or way.
        """
        _, record = self._find(kind, size_bytes, way)
        record.in_flight = max(record.in_flight - 1, 0)
        if record.pending:
            record.spent_s -= record.pending.popleft()[0]

    def is_trial(self, kind: Kind, size_bytes: int, way: str) -> bool:
        """Whether ``way``, which was given for such a transfer, is not known to be the best.

        Raises InvalidArgument for an unknown kind or way.
        """
        known, record = self._find(kind, size_bytes, way)
        place = known.domains[record.domain]
        best = known.best(kind, known.places if kind == "write" else [place])
        return record.count < SURE or record is not best

    def tables(self) -> Tables:
        """What is known now, to be saved, merged with that of other processes, and loaded again."""
        return Tables(
            tuple(
                Entry(
                    class_bytes=1 << number,
                    kind=kind,
                    way=record.way,
                    domain=record.domain,
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
        """Who won the rounds so far. A size class has none before each of its ways was tried."""
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
        self, kind: Kind, known: SizeClass, places: Sequence[Domain], size_bytes: int, explore: bool = True
    ) -> str:
        chosen = known.pinned(kind, places)
        if chosen is None and not explore:
            best = known.best(kind, places)
            chosen = best if best.count else self._neighbour(kind, known, places)
            chosen = chosen or places[0].records(kind)[0]
        if chosen is None:
            best = known.best(kind, places)
            chosen = _first_trial(kind, places)
            if chosen is None and best.count:
                chosen = self._another(kind, known, places, best, size_bytes) or best
            elif chosen is None:
                chosen = self._neighbour(kind, known, places) or min(
                    (record for place in places for record in place.records(kind)), key=_tries
                )
        chosen.in_flight += 1
        return chosen.way

    def _another(
        self, kind: Kind, known: SizeClass, places: Sequence[Domain], best: Record, size_bytes: int
    ) -> Record | None:
        """A way other than the best that may be tried now: of several, the one longest not tried."""
        known.asks[kind] += 1
        if not self.reexplore:
            return None
        if known.asks[kind] % PACE and (kind == "write" or known.home in places):
            return None  # reads elsewhere are rare: each may be a trial
        # The best is in use: it saves nothing for the time when it is not.
        best.spent_s = max(best.spent_s, known.earned_s)
        home = known.domains[best.domain]
        chosen: Record | None = None
        pending = (0.0, 0.0, 0.0)
        for place in places:
            hope, median = _reading_back(place, home) if kind == "write" else (0.0, 0.0)
            for record in place.records(kind):
                excess_s = self._excess(kind, record.hope - best.cost, hope) * size_bytes
                reserved_s = max(excess_s, 0.0)
                if record is best or record.in_flight >= TRIALS:
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

    def _excess(self, kind: Kind, moving: float, reading_back: float) -> float:
        """What a trial costs beyond the best. What the mode leaves out of account pays for nothing."""
        if kind == "read" or self.mode == "write+read":
            return moving + reading_back
        if self.mode == "write":
            return moving + max(reading_back, 0.0)
        return max(moving, 0.0) + reading_back

    def _neighbour(self, kind: Kind, known: SizeClass, places: Sequence[Domain]) -> Record | None:
        """The best way of the nearest size class that knows one."""
        for other in sorted(
            self._classes.values(), key=lambda other: (abs(other.number - known.number), other.number)
        ):
            best = other.best(kind, [other.domains[place.name] for place in places])
            if best.count:
                return known.records[kind][best.way]
        return None

    def _class(self, size_bytes: int) -> SizeClass:
        number = size_class(size_bytes)
        known = self._classes.get(number)
        if known is None:
            known = self._new_class(number, ())
        return known

    def _new_class(self, number: int, entries: Iterable[Entry]) -> SizeClass:
        pins = {kind: way for kind in KINDS if (way := _pinned(self._pins, kind, number))}
        known = self._classes[number] = SizeClass(number, self.ways, self.mode, pins, entries, self._copying)
        self._rounds[number] = {kind: Rounds(kind, known.places) for kind in MODES}
        return known

    def _find(self, kind: Kind, size_bytes: int, way: str) -> tuple[SizeClass, Record]:
        known = self._class(size_bytes)
        if kind not in KINDS:
            raise InvalidArgument(f"{kind!r} is no kind of transfer: kinds are {_list(KINDS)}")
        if (record := known.records[kind].get(way)) is None:
            raise _unknown_way(way, self.ways)
        return known, record

    def _no_room(self, known: SizeClass, domains: Collection[str]) -> str:
        size, allowed = format_bytes(1 << known.number), _list(place.name for place in known.places)
        pinned = ", as pinned" if len(known.places) < len(known.domains) else ""
        return (
            f"transfers of {size} and more can be written to {allowed} only{pinned}, but there is room in "
            f"{_list(domains) or 'none'}: make room there{', or pin no way' if pinned else ''}"
        )


def _first_trial(kind: Kind, places: Sequence[Domain]) -> Record | None:
    """The way to try next, of those whose first trials are not over."""
    if not any(kind in place.untried for place in places):
        return None
    records = [record for place in places for record in place.records(kind)]
    chosen = _trial(records)
    if chosen is None and not any(record.in_flight for record in records):
        for place in places:
            place.untried.discard(kind)
    return chosen


def _trial(records: Sequence[Record]) -> Record | None:
    """Of the ways that were not tried often enough, the one tried least."""
    best = min(map(cost_of, records))
    chosen, fewest = None, SURE
    for record in records:
        tries = _tries(record)
        if tries >= fewest or (record.count >= 2 and record.cost > FAR * best):
            continue
        near = record.count >= TRIALS and record.cost <= NEAR * best and not record.loaded
        if tries < TRIALS or near:
            chosen, fewest = record, tries
    return chosen


def _tries(record: Record) -> int:
    return record.count + record.in_flight


def _reading_back(place: Domain, home: Domain) -> tuple[float, float]:
    """What reading from ``place`` costs beyond reading from ``home``: with luck, and by medians."""
    if place is home or not home.best_read.count:
        return 0.0, 0.0
    hope = min(record.hope for record in place.reads) - home.best_read.cost
    return hope, place.best_read.cost - home.best_read.cost if place.best_read.count else 0.0


def _read_pins(pinned: str | Mapping[str, str] | None, ways: Mapping[str, str]) -> _Pins:
    if pinned is None:
        return {}
    given = {"": pinned} if isinstance(pinned, str) else pinned
    pins = {_read_key(key): way for key, way in given.items()}
    for way in pins.values():
        if way not in ways:
            raise _unknown_way(way, ways)
    for number in {number for _, number in pins}:
        write, read = (_pinned(pins, kind, number) for kind in KINDS)
        if write and read and ways[write] != ways[read]:
            size = "" if number is None else f" of {format_bytes(1 << number)} and more"
            raise InvalidArgument(
                f"writes{size} are pinned to {write!r}, which writes to {ways[write]}, but reads to "
                f"{read!r}, which reads from {ways[read]} only: pin both to one domain"
            )
    return pins


def _read_key(key: str) -> tuple[Kind | None, int | None]:
    first, _, rest = key.partition(" ")
    kind: Kind | None = next((kind for kind in KINDS if kind == first), None)
    size = rest if kind else key
    try:
        return kind, size_class(parse_bytes(size)) if size.strip() else None
    except (InvalidSize, InvalidArgument) as error:
        raise InvalidArgument(
            f"{key!r} cannot be pinned: write 'write', 'read', a size such as '4MiB', or 'write 4MiB'"
        ) from error


def _pinned(pins: _Pins, kind: Kind, number: int | None) -> str | None:
    """The way of the most exact pin."""
    for key in ((kind, number), (None, number), (kind, None), (None, None)):
        if key in pins:
            return pins[key]
    return None


def _unknown_way(way: str, ways: Iterable[str]) -> InvalidArgument:
    return InvalidArgument(f"{way!r} is no way to move a tensor here: ways are {_list(ways)}")


def _list(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
