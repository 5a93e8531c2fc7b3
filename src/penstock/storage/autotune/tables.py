"""What was learned about the paths to move a tensor, as a value that can be saved and shared.

These are Fastensor's dictionaries (section 4): by size class, the cost of each path. Its WDic and RDic
are the entries of one kind; its WRDic, their sum by medium, follows from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from penstock.errors import InvalidArgument

Kind = Literal["write", "read"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def size_class(size_bytes: int) -> int:
    """The k of the class ``[2**k, 2**(k + 1))`` that holds ``size_bytes``.

    Raises InvalidArgument where the size is not above zero.
    """
    if size_bytes < 1:
        raise InvalidArgument(f"a transfer of {size_bytes} bytes cannot be: give a size above zero")
    return size_bytes.bit_length() - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The cost of one path for one kind of transfer of one size class.

    class_bytes   the smallest size of the class, a power of two; the class ends below its double
    samples       how many recent costs the median stands on
    s_per_byte    their median
    """

    class_bytes: int
    kind: Kind
    path: str
    medium: str
    samples: int
    s_per_byte: float

    def __post_init__(self) -> None:
        if self.class_bytes < 1 or self.class_bytes & (self.class_bytes - 1):
            raise InvalidArgument(f"class_bytes is {self.class_bytes}: it is a power of two")
        if self.samples < 1 or not 0 < self.s_per_byte < math.inf:
            raise InvalidArgument(
                f"{self.path}, {self.kind}: {self.samples} samples with a median of {self.s_per_byte} s per "
                "byte cannot be: both are above zero, and finite"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One path in one size class, for people. Rates are None where nothing was measured.

    writes, reads   it is the fastest one: what a choice with these tables uses
    """

    class_bytes: int
    path: str
    medium: str
    write_bytes_per_s: float | None
    read_bytes_per_s: float | None
    write_samples: int
    read_samples: int
    writes: bool
    reads: bool


@dataclass(frozen=True, slots=True)
class Tables:
    """Every cost known. Holds plain values only: `penstock.core.files` saves and loads it."""

    entries: tuple[Entry, ...] = ()

    def rows(self) -> tuple[Row, ...]:
        """By size class and medium, with the fastest paths marked."""
        classes: dict[int, list[Entry]] = {}
        for entry in self.entries:
            classes.setdefault(entry.class_bytes, []).append(entry)
        return tuple(row for size in sorted(classes) for row in _rows_of_class(classes[size]))


def merge(a: Tables, b: Tables) -> Tables:
    """What two processes learned about devices of one kind: ``merge(a, b) == merge(b, a)``.

    Samples add up; a median is weighted by the samples that it stands on.
    """
    merged: dict[tuple[int, Kind, str, str], Entry] = {}
    for entry in (*a.entries, *b.entries):
        key = (entry.class_bytes, entry.kind, entry.path, entry.medium)
        other = merged.get(key)
        merged[key] = entry if other is None else _combine(entry, other)
    return Tables(tuple(merged[key] for key in sorted(merged)))


def _combine(a: Entry, b: Entry) -> Entry:
    samples = a.samples + b.samples
    median = (a.samples * a.s_per_byte + b.samples * b.s_per_byte) / samples
    return replace(a, samples=samples, s_per_byte=median)


def _rows_of_class(entries: Sequence[Entry]) -> list[Row]:
    known = {(entry.kind, entry.medium, entry.path): entry for entry in entries}
    best: dict[str, dict[Kind, Entry]] = {}  # by medium
    for entry in entries:
        held = best.setdefault(entry.medium, {}).get(entry.kind)
        if held is None or entry.s_per_byte < held.s_per_byte:
            best[entry.medium][entry.kind] = entry
    home = _fastest_medium(best)
    rows = []
    for medium, path in sorted({(entry.medium, entry.path) for entry in entries}):
        write, read = (known.get((kind, medium, path)) for kind in KINDS)
        rows.append(
            Row(
                class_bytes=entries[0].class_bytes,
                path=path,
                medium=medium,
                write_bytes_per_s=1 / write.s_per_byte if write else None,
                read_bytes_per_s=1 / read.s_per_byte if read else None,
                write_samples=write.samples if write else 0,
                read_samples=read.samples if read else 0,
                writes=medium == home and write is not None and best[medium].get("write") is write,
                reads=medium == home and read is not None and best[medium].get("read") is read,
            )
        )
    return rows


def _fastest_medium(best: Mapping[str, Mapping[Kind, Entry]]) -> str:
    """The medium of the least cost; by its writes alone where no medium is measured in full."""

    def costs(medium: str) -> tuple[float, float]:
        write, read = (best[medium][kind].s_per_byte if kind in best[medium] else math.inf for kind in KINDS)
        return write + read, write

    return min(best, key=costs)
