"""What was learned about the paths to move a tensor, as a value, and in a file that processes share.

These are Fastensor's dictionaries (section 4): by size class, the cost of each path. Its WDic and RDic
are the entries of one kind; its WRDic, their sum by medium, follows from them. What one process learns serves
all on devices of the same kind (section 4.3), and the next run begins with it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import logging
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from penstock.core import files
from penstock.errors import InvalidArgument
from penstock.storage.nvme.url import Url
from penstock.units import format_seconds

logger = logging.getLogger("penstock")

Kind = Literal["write", "read"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostEntry:
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
class CostRow:
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

    entries: tuple[CostEntry, ...] = ()

    def rows(self) -> tuple[CostRow, ...]:
        """By size class and medium, with the fastest paths marked."""
        classes: dict[int, dict[tuple[str, str, Kind], CostEntry]] = {}
        for entry in self.entries:
            classes.setdefault(entry.class_bytes, {})[entry.medium, entry.path, entry.kind] = entry
        return tuple(row for _, known in sorted(classes.items()) for row in _rows_of_class(known))


def _rows_of_class(known: Mapping[tuple[str, str, Kind], CostEntry]) -> list[CostRow]:
    fastest: dict[tuple[str, Kind], CostEntry] = {}
    for (medium, _, kind), entry in sorted(known.items(), key=lambda item: item[1].s_per_byte):
        fastest.setdefault((medium, kind), entry)

    def costs(medium: str) -> tuple[float, float]:
        """By its writes alone where no medium is measured in full."""
        found = [fastest.get((medium, kind)) for kind in KINDS]
        write, read = (math.inf if entry is None else entry.s_per_byte for entry in found)
        return write + read, write

    home = min((medium for medium, _ in fastest), key=costs)
    used = [fastest.get((home, kind)) for kind in KINDS]
    rows = []
    for medium, path in sorted({(medium, path) for medium, path, _ in known}):
        write, read = (known.get((medium, path, kind)) for kind in KINDS)
        rows.append(
            CostRow(
                class_bytes=next(iter(known.values())).class_bytes,
                path=path,
                medium=medium,
                write_bytes_per_s=1 / write.s_per_byte if write else None,
                read_bytes_per_s=1 / read.s_per_byte if read else None,
                write_samples=write.samples if write else 0,
                read_samples=read.samples if read else 0,
                writes=write is not None and write is used[0],
                reads=read is not None and read is used[1],
            )
        )
    return rows


def merge(a: Tables, b: Tables) -> Tables:
    """What two processes learned about devices of one kind: ``merge(a, b) == merge(b, a)``.

    Samples add up; a median is weighted by the samples that it stands on.
    """
    merged: dict[tuple[int, Kind, str, str], CostEntry] = {}
    for entry in (*a.entries, *b.entries):
        key = (entry.class_bytes, entry.kind, entry.path, entry.medium)
        if (other := merged.get(key)) is not None:
            samples = entry.samples + other.samples
            total_s = entry.samples * entry.s_per_byte + other.samples * other.s_per_byte
            entry = replace(entry, samples=samples, s_per_byte=total_s / samples)
        merged[key] = entry
    return Tables(tuple(merged[key] for key in sorted(merged)))


# What the file says weighs no more than a run: it follows a machine that changes.
MOST_SAMPLES = 15

_LOCK_PAUSE_S = 0.005


@dataclass(frozen=True, slots=True)
class CostTables:
    """The content of the file.

    devices   tables by kind of device, as `device_kind` names it
    """

    devices: Mapping[str, Tables] = field(default_factory=dict)


def _read(path: Path) -> Mapping[str, Tables]:
    try:
        return files.load(CostTables, path).devices
    except FileNotFoundError:
        return {}


def read_tables(path: Path, device: str) -> Tables:
    """What the file at ``path`` knows about devices of that kind; nothing where there is no file.

    Raises InvalidFile where it holds something else.
    """
    return _read(path).get(device, Tables())


def fastest_path(
    costs: Path, directory: Path, kind: Kind, size_bytes: int, among: Sequence[str] | None = None
) -> str | None:
    """The I/O path to the disk that was the fastest for transfers of about this size; None: none is known.

    costs       file of what runs have learned
    directory   on the disk to be used: what was learned with any device counts
    among       names of I/O paths; None: any

    Raises InvalidFile where the file holds something else.
    """
    on_disk = disk_kind(directory)
    known = [tables.entries for device, tables in _read(costs).items() if device.startswith(f"{on_disk}, ")]
    entries = [
        entry
        for entry in functools.reduce(merge, map(Tables, known), Tables()).entries
        if entry.kind == kind and entry.medium == "disk" and (among is None or entry.path in among)
    ]
    far = [abs(entry.class_bytes.bit_length() - size_bytes.bit_length()) for entry in entries]
    nearest = [entry for entry, steps in zip(entries, far, strict=True) if steps == min(far)]
    return min(nearest, key=lambda entry: entry.s_per_byte).path if nearest else None


def add_tables(path: Path, device: str, learned: Tables, timeout_s: float = 120.0) -> None:
    """Merge what a process learned into the file. Several may do so at once.

    timeout_s   the longest wait for another process that has the file

    A file that cannot be written is logged: nothing but time is lost. Raises InvalidFile where it
    holds something else.
    """
    try:
        with _locked(path, timeout_s):
            devices = _read(path)
            known = devices.get(device, Tables()).entries
            limited = Tables(tuple(replace(e, samples=min(e.samples, MOST_SAMPLES)) for e in known))
            files.save(CostTables({**devices, device: merge(limited, learned)}), path)
    except OSError as error:
        logger.warning("what was learned about transfers was not saved to %s: %s", path, error.strerror)


def device_kind(directories: Sequence[Path | Url], accelerator: str) -> str:
    """What the directories lie on, and what computes: in words that are the same on machines of one kind."""
    return f"{', '.join(sorted({disk_kind(directory) for directory in directories}))}, {accelerator}"


@contextlib.contextmanager
def _locked(path: Path, timeout_s: float) -> Iterator[None]:
    """One process at a time. The lock is a file beside it, since the file itself is replaced."""
    lock = path.with_name(f".{path.name}.lock")
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    deadline_s = time.monotonic() + timeout_s
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline_s:
                    reason = f"another process has held the lock {lock} for {format_seconds(timeout_s)}"
                    raise TimeoutError(errno.ETIMEDOUT, reason) from error
                time.sleep(_LOCK_PAUSE_S)
        yield
    finally:
        os.close(descriptor)


def disk_kind(directory: Path | Url) -> str:
    """The file system and the disk that a directory lies on, in words."""
    if isinstance(directory, Url):
        return f"a namespace of {directory.portal}"
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    file_system = "unknown file system"
    with contextlib.suppress(OSError, IndexError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            if line.split()[2] == number:
                file_system = line.partition(" - ")[2].split()[0]
    return f"{file_system} on {_model(number)}"


def _model(number: str) -> str:
    """Of a disk, or of the disk that a partition is of."""
    with contextlib.suppress(OSError):
        block = Path("/sys/dev/block", number).resolve(strict=True)
        for medium in (block, block.parent):
            with contextlib.suppress(OSError):
                return (medium / "device" / "model").read_text().strip()
        return re.sub(r"\d+$", "", block.name)  # a kind of disk without models: nvme0n, vda
    return "an unknown device"
