"""Ways to write tensors to disk and to read them back, all with one face.

Each writes the tensors of a `Place` one after another and waits for each, as a training step does
whose next kernel needs it; some can also have several in flight.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from io_bench.formats import FORMATS, Format
from io_bench.measure import Sample, Tensors, remove
from penstock.options import IoOptions
from penstock.storage.aligned import view_at
from penstock.storage.spill import SpillSpace, Transfer
from penstock.storage.transfer import PREFETCH

KINDS = ("write", "write+fsync", "cold read", "warm read")
IN_FLIGHT = ("write in flight", "read in flight")
# A choice of I/O paths has tried each of them several times after so many transfers, and settled.
SETTLING_TRANSFERS_PER_WAY = 5


@dataclass(frozen=True)
class Place:
    """Where to write, and what.

    directory   for files of the row's own
    file        of at least ``tensors.total_bytes``, preallocated and written: overwritten by every row
                that goes past the page cache
    """

    directory: Path
    file: Path
    tensors: Tensors
    quick: bool = False


class Row(ABC):
    """One way. Reads end with every byte in memory.

    kinds     what it can do
    does      what it does that others do not, or the reverse
    bypasses  its reads never come from the page cache: a warm one is as a cold one
    maps      it gives memory that is read from the disk when it is touched
    """

    name: str
    does: str
    kinds: Sequence[str] = KINDS
    bypasses: bool = False
    maps: bool = False

    def __init__(self, place: Place) -> None:
        self.place = place
        self.tensors = place.tensors

    @abstractmethod
    def write(self, durable: bool) -> Sample | None:
        """Write every tensor, one after another; ``durable``: each is on the disk to stay."""

    @abstractmethod
    def read(self) -> Sample | list[Tensor]:
        """Read every tensor, one after another."""

    def write_in_flight(self) -> None:
        """Write every tensor, without waiting for one before the next begins."""
        raise NotImplementedError

    def read_in_flight(self) -> list[Tensor]:
        raise NotImplementedError

    def begin(self) -> None:  # noqa: B027  most rows have nothing to do
        """Before each write, outside the time: remove what the one before has left."""

    def scrub(self) -> None:
        """Before each read, outside the time: forget what was read before."""
        self.tensors.scrub()

    def paths(self) -> list[Path]:
        """What there is to sync, to drop from the page cache, or to bring into it."""
        return []

    def settings(self) -> dict[str, Any]:
        """What it was set to, or chose."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Give back what the row holds."""


class FileForEach(Row):
    """A new file for each tensor, as libraries have it that save to a path."""

    def __init__(self, place: Place, form: Format) -> None:
        super().__init__(place)
        self._form = form
        self.name, self.does, self.maps = form.name, form.does, form.maps
        if form.loads_only:
            self.kinds = KINDS[2:]
        elif form.always_durable:
            self.kinds = KINDS[1:]
        stem = type(form).__name__
        self._paths = [
            place.directory / f"{stem}{index}{form.suffix}" for index in range(len(place.tensors.tensors))
        ]

    def write(self, durable: bool) -> None:
        for tensor, path in zip(self.tensors.tensors, self._paths, strict=True):
            self._form.save({"tensor": tensor}, path, durable)

    def read(self) -> list[Tensor]:
        return [
            self._form.load(path, {"tensor": destination})["tensor"]
            for path, destination in zip(self._paths, self.tensors.destinations, strict=True)
        ]

    def begin(self) -> None:
        for path in self._paths:
            remove(path)

    def paths(self) -> list[Path]:
        return self._paths

    def close(self) -> None:
        self.begin()


# -- penstock --------------------------------------------------------------------------------------


class Waiting:
    """Counts transfers in flight; raises the first error."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._error: Exception | None = None

    def done(self, transfer: Transfer) -> None:
        with self._lock:
            self._left -= 1
            self._error = self._error or transfer.error
            if self._left:
                return
        self._over.set()

    def wait(self) -> None:
        self._over.wait()
        if self._error is not None:
            raise self._error


class Spilled:
    """Tensors in spill space, each in an extent of its own, moved as the runtime moves them."""

    def __init__(self, space: SpillSpace, tensors: Tensors) -> None:
        self.space = space
        self.tensors = tensors
        self._extents: dict[int, Any] = {}

    def release(self) -> None:
        """Give the extents back."""
        while self._extents:
            self.space.release(self._extents.popitem()[1])

    def start_write(self, index: int, on_done: Callable[[Transfer], None]) -> None:
        """Take an extent for this tensor, and begin to write it."""
        tensor = self.tensors.tensors[index]
        extent = self._extents[index] = self.space.allocate(tensor.nbytes)
        self.space.write(extent, tensor.data_ptr(), tensor.nbytes, tensor, on_done)

    def start_read(self, index: int, on_done: Callable[[Transfer], None]) -> None:
        tensor = self.tensors.destinations[index]
        extent = self._extents[index]
        self.space.read(extent, tensor.data_ptr(), tensor.nbytes, tensor, on_done, priority=PREFETCH)

    def write(self, indices: Sequence[int]) -> None:
        """Write these tensors at once, and wait for all."""
        waiting = Waiting(len(indices))
        for index in indices:
            self.start_write(index, waiting.done)
        waiting.wait()

    def read(self, indices: Sequence[int]) -> None:
        waiting = Waiting(len(indices))
        for index in indices:
            self.start_read(index, waiting.done)
        waiting.wait()

    def settle(self, choosing: bool) -> None:
        """Write and read until the file is written everywhere and a choice has tried all I/O paths."""
        count = len(self.tensors.tensors)
        paths = len(self.space.paths)
        passes = -(-SETTLING_TRANSFERS_PER_WAY * paths // count)
        for _ in range(max(passes, 2) if choosing else 2):
            self.release()
            for index in range(count):
                self.write([index])
            for index in range(count):
                self.read([index])


class Spill(Row):
    name = "penstock spill"
    does = (
        "spill space as the runtime uses it: overwrites a preallocated file past the page cache, never "
        "synced there; write+fsync adds fdatasync of the file after each tensor. No checksum, by default"
    )
    bypasses = True
    kinds: Sequence[str] = (*KINDS, *IN_FLIGHT)
    page_cache: ClassVar[bool] = False

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        slots_bytes = sum(-(-size_bytes // 4096) * 4096 for size_bytes in self.tensors.sizes_bytes)
        cache_bytes = slots_bytes if self.page_cache else 0
        self.space = SpillSpace(
            place.directory,
            IoOptions(page_cache_budget=cache_bytes),
            capacity_bytes=slots_bytes + cache_bytes,
        )
        self._spilled = Spilled(self.space, self.tensors)
        try:
            self._spilled.settle(choosing=True)
            self._descriptors = spill_descriptors(place.directory)
        except BaseException:
            self.space.close()
            raise

    def begin(self) -> None:
        self._spilled.release()

    def write(self, durable: bool) -> None:
        for index in range(len(self.tensors.tensors)):
            self._spilled.write([index])
            if durable:
                for descriptor in self._descriptors:
                    os.fdatasync(descriptor)

    def read(self) -> list[Tensor]:
        for index in range(len(self.tensors.tensors)):
            self._spilled.read([index])
        return self.tensors.destinations

    def write_in_flight(self) -> None:
        self._spilled.write(range(len(self.tensors.tensors)))

    def read_in_flight(self) -> list[Tensor]:
        self._spilled.read(range(len(self.tensors.tensors)))
        return self.tensors.destinations

    def settings(self) -> dict[str, Any]:
        return {"moved_bytes_by_path": self.space.moved_bytes_by_path}

    def close(self) -> None:
        self.space.close()


class SpillWithPageCache(Spill):
    name = "penstock spill, page cache"
    does = (
        "as penstock spill, allowed to keep as many bytes in the page cache, where that is faster: what "
        "it writes there is on no disk before the kernel writes it back"
    )
    page_cache = True
    kinds = ("write", "warm read", *IN_FLIGHT)


def spill_descriptors(directory: Path) -> list[int]:
    """The process's descriptors of spill files in ``directory``: files without a name."""
    found: dict[int, int] = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except FileNotFoundError:  # the listing's own
            continue
        if target.startswith(f"{directory.resolve()}/") and target.endswith(" (deleted)"):
            found.setdefault(os.fstat(int(entry)).st_ino, int(entry))
    return list(found.values())


# -- the strongest simple way ----------------------------------------------------------------------


class PlainFile(Row):
    name = "plain file"
    does = "overwrites one open file through the page cache, reads into memory that is there"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._path = place.directory / "plain"
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        os.posix_fallocate(self._descriptor, 0, self.tensors.total_bytes)
        self.write(durable=True)

    def write(self, durable: bool) -> None:
        offset = 0
        for tensor in self.tensors.tensors:
            offset += move_all(os.pwritev, self._descriptor, tensor, offset)
            if durable:
                os.fdatasync(self._descriptor)

    def read(self) -> list[Tensor]:
        offset = 0
        for tensor in self.tensors.destinations:
            offset += move_all(os.preadv, self._descriptor, tensor, offset)
        return self.tensors.destinations

    def paths(self) -> list[Path]:
        return [self._path]

    def close(self) -> None:
        os.close(self._descriptor)
        remove(self._path)


def move_all(move: Callable[..., int], descriptor: int, tensor: Tensor, offset: int) -> int:
    """The bytes of ``tensor``, all of them moved."""
    view = view_at(tensor.data_ptr(), tensor.nbytes, writable=True)
    done = 0
    while done < tensor.nbytes:
        moved = move(descriptor, [view[done:]], offset + done)
        if not moved:
            raise RuntimeError(f"the file ends at {offset + done}")
        done += moved
    return done


def file_for_each(form: type[Format]) -> Callable[[Place], Row]:
    return lambda place: FileForEach(place, form())


ROWS: dict[str, Callable[[Place], Row]] = {
    Spill.name: Spill,
    SpillWithPageCache.name: SpillWithPageCache,
    PlainFile.name: PlainFile,
    **{name: file_for_each(form) for name, form in FORMATS.items()},
}
