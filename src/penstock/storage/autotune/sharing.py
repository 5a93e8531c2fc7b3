"""What was learned about paths, in a file that processes on devices of the same kind share.

On machines with several devices of one kind, what one process learns serves all (Fastensor section
4.3); the next run begins with it. Where the kinds differ, each kind has its own entry in the file.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock.core import files
from penstock.errors import InvalidFile
from penstock.storage.autotune.tables import Tables, merge
from penstock.storage.nvme import Url
from penstock.units import format_seconds

logger = logging.getLogger("penstock")

# What the file says weighs no more than a run: it follows a machine that changes.
MOST_SAMPLES = 15

_LOCK_PAUSE_S = 0.005


@dataclass(frozen=True, slots=True)
class CostTables:
    """The content of the file.

    devices   tables by kind of device, as `device_kind` names it
    """

    devices: Mapping[str, Tables] = field(default_factory=dict)


def read_tables(path: Path, device: str) -> Tables:
    """What the file at ``path`` knows about devices of that kind; nothing where there is no file.

    Raises InvalidFile where it holds something else.
    """
    try:
        return files.load(CostTables, path).devices.get(device, Tables())
    except FileNotFoundError:
        return Tables()


def add_tables(path: Path, device: str, learned: Tables, timeout_s: float = 120.0) -> None:
    """Merge what a process learned into the file. Several may do so at once.

    timeout_s   the longest wait for another process that has the file

    A file that cannot be written is logged: nothing but time is lost. Raises InvalidFile where it
    holds something else.
    """
    try:
        with _locked(path, timeout_s):
            devices: Mapping[str, Tables] = {}
            with contextlib.suppress(FileNotFoundError):
                devices = files.load(CostTables, path).devices
            known = _limited(devices.get(device, Tables()))
            files.save(CostTables({**devices, device: merge(known, learned)}), path)
    except InvalidFile:
        raise
    except OSError as error:
        logger.warning("what was learned about transfers was not saved to %s: %s", path, error.strerror)


def device_kind(directories: Sequence[Path | Url], accelerator: str) -> str:
    """What the directories lie on, and what computes: in words that are the same on machines of one kind."""
    return f"{', '.join(sorted({disk_kind(directory) for directory in directories}))}, {accelerator}"


def _limited(tables: Tables) -> Tables:
    return Tables(tuple(replace(entry, samples=min(entry.samples, MOST_SAMPLES)) for entry in tables.entries))


@contextlib.contextmanager
def _locked(path: Path, timeout_s: float) -> Iterator[None]:
    """One process at a time. The lock is a file beside it, since the file itself is replaced."""
    import fcntl

    lock = path.with_name(f".{path.name}.lock")
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
    return f"{_file_system(number)} on {_model(number)}"


def _file_system(number: str) -> str:
    with contextlib.suppress(OSError, IndexError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            if line.split()[2] == number:
                return line.partition(" - ")[2].split()[0]
    return "unknown file system"


def _model(number: str) -> str:
    """Of a disk, or of the disk that a partition is of."""
    with contextlib.suppress(OSError):
        block = Path("/sys/dev/block", number).resolve(strict=True)
        for medium in (block, block.parent):
            with contextlib.suppress(OSError):
                return (medium / "device" / "model").read_text().strip()
        return re.sub(r"\d+$", "", block.name)  # a kind of disk without models: nvme0n, vda
    return "an unknown device"
