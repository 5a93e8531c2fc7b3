"""Whether a source still gives what was packed of it, so that packing can go on."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import numpy as np

from penstock.errors import SampleError
from penstock.samples.format import layout
from penstock.samples.writer.progress import Packing

_NAMES_AT_ONCE = 4096
_SAMPLE_BYTES = {
    layout.DIRECTORY: 16,
    layout.SUMS: 4,
    layout.LABELS: 4,
}  # in files that have so many for each


class Packed:
    """The files of an interrupted packing, read from the start. A context manager.

    Its functions raise SampleError where the source gives something else.
    """

    def __init__(self, folder: Path, done: Packing) -> None:
        self._folder, self._done = folder, done
        self._open: dict[str, int] = {}
        self._at: dict[str, int] = {}  # how far each file was read

    def compare(self, pieces: Iterable[tuple[str, bytes]]) -> None:
        """What was made of the next samples of the source, by file."""
        for name, made in pieces:
            begin = self._at.get(name, 0)
            had = self._read(name, len(made))
            if had != made:
                if name not in _SAMPLE_BYTES:
                    raise self._changed("")
                sample = (begin + _first_difference(had, made)) // _SAMPLE_BYTES[name]
                raise self._changed(f": sample {sample} is another now")

    def compare_names(self, names: Iterable[str]) -> None:
        """All names of the source, of which those that are packed are looked at."""
        packed = islice(names, self._done.samples)
        count = 0
        while part := [layout.bytes_of(name) for name in islice(packed, _NAMES_AT_ONCE)]:
            made = b"".join([struct.pack("<H", len(name) & 0xFFFF) + name for name in part])
            if self._read(layout.NAMES, len(made)) != made:
                raise self._changed(
                    f": one of the samples {count} to {count + len(part) - 1} has another name"
                )
            count += len(part)
        self.check_count(count)

    def check_count(self, samples: int) -> None:
        """The source ended after so many, or has given what is packed."""
        if samples < self._done.samples:
            raise self._changed(f": it has {samples} samples, and {self._done.samples} were packed")

    def _changed(self, how: str) -> SampleError:
        return SampleError(
            f"the source has changed since packing into {self._folder} was begun{how}. "
            f"Remove {self._folder}, or pass resume=False to pack it anew"
        )

    def _read(self, name: str, size_bytes: int) -> bytes:
        """The next bytes of a file, fewer where what is good of it ends."""
        good = self._done.files.get(name)
        begin = self._at.get(name, 0)
        size_bytes = min(size_bytes, good.size_bytes - begin if good else 0)
        if size_bytes == 0:
            return b""
        try:
            if name not in self._open:
                self._open[name] = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC)
            data = os.pread(self._open[name], size_bytes, begin)  # all of it: the folder is ours
        except OSError as error:
            raise SampleError(f"cannot read {self._folder / name}: {error.strerror}") from error
        self._at[name] = begin + size_bytes
        return data

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def __enter__(self) -> Packed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _first_difference(one: bytes, other: bytes) -> int:
    """Where the first byte differs, or the shorter ends."""
    shared = min(len(one), len(other))
    differs = np.frombuffer(one, np.uint8)[:shared] != np.frombuffer(other, np.uint8)[:shared]
    return int(differs.argmax()) if differs.any() else shared
