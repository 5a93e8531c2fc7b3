"""Reading a data file once, from its first byte to its last, and comparing the checksums of what passes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitedTooLong
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock import _native
from penstock.errors import SampleError
from penstock.samples.format import layout
from penstock.samples.format.manifest import DataFile
from penstock.samples.maintenance.structure import Extents, Numbers
from penstock.samples.reader.places import Place, StoreFile
from penstock.storage.aligned import AlignedBuffer, align_up
from penstock.storage.checksum import crc32c, crc32c_at

PIECE_BYTES = 8 << 20
READ_TIMEOUT_S = 120.0

Sums = npt.NDArray[np.uint32]


class Piece(NamedTuple):
    """What one read has brought to light.

    samples      that begin in it
    size_bytes   that were read
    damaged      indices of samples that were found wrong
    problems     of the file, in words
    """

    samples: int
    size_bytes: int
    damaged: list[int]
    problems: list[str]


class ScannedFile(NamedTuple):
    """A data file, and what its bytes are compared with.

    place     where it lies, under its name
    firsts    [chunks + 1] the first sample of each of its chunks, then the index after its last sample
    records   [chunks] CHUNK_RECORD
    sums      [samples] of the whole store
    """

    place: Place
    name: str
    data_file: DataFile
    chunk_bytes: int
    extents: Extents
    firsts: Numbers
    records: npt.NDArray[Any]
    sums: Sums


def scan(file: ScannedFile) -> Iterator[Piece]:
    """Compare all of ``file``, piece by piece; the next one is read while one is compared.

    Raises SampleError where the file cannot be opened, or a read does not end.
    """
    if not file.data_file.chunks:
        return
    comparison = _Comparison(file)
    size_bytes = file.data_file.chunks * file.chunk_bytes
    chunks = max(1, PIECE_BYTES // file.chunk_bytes)
    # With the end of a piece comes what its last body has beyond it.
    margin_bytes = align_up(layout.long_edge_bytes(file.chunk_bytes), layout.SMALLEST_CHUNK_BYTES)
    spans = [
        (begin, min(begin + chunks * file.chunk_bytes + margin_bytes, size_bytes))
        for begin in range(0, size_bytes, chunks * file.chunk_bytes)
    ]
    with (
        contextlib.closing(file.place.open(file.name, None, "")) as opened,
        contextlib.closing(_stretches(file, opened, spans)) as stretches,
    ):
        for number, read in enumerate(stretches):
            first = number * chunks
            yield comparison.take(read, first, min(first + chunks, file.data_file.chunks))


class _Bytes(NamedTuple):
    """Bytes ``begin`` to ``end`` of the file, the first one at ``address``; or why there are none."""

    begin: int
    end: int
    address: int
    error: str | None

    def crc(self, begin: int, end: int, crc: int = 0) -> int:
        """Of a stretch of the file that is here."""
        return crc32c_at(self.address + begin - self.begin, end - begin, crc)


def _stretches(
    scanned: ScannedFile, file: StoreFile, spans: list[tuple[int, int]]
) -> Generator[_Bytes, None, None]:
    """Stretches of a file, one read ahead, each in a thread that the process does not wait for at its end.

    The memory of one is used again for the one after the next.
    """
    buffers = [AlignedBuffer(max(end - begin for begin, end in spans)) for _ in range(2)]

    def read(number: int) -> Future[str | None]:
        coming: Future[str | None] = Future()
        arguments = (coming, file, buffers[number % 2], *spans[number])
        threading.Thread(target=_finish, args=arguments, name="penstock-verify", daemon=True).start()
        return coming

    coming: Future[str | None] | None = read(0)
    try:
        for number, (begin, end) in enumerate(spans):
            assert coming is not None
            try:
                error = coming.result(READ_TIMEOUT_S)
            except WaitedTooLong:
                coming = None
                raise SampleError(
                    f"waited {READ_TIMEOUT_S:.0f} s for {scanned.place.path_of(scanned.name)}, bytes {begin} "
                    f"to {end}. {scanned.place.hang_text()}"
                ) from None
            coming = read(number + 1) if number + 1 < len(spans) else None
            yield _Bytes(begin, end, buffers[number % 2].address, error)
    finally:
        if coming is not None:
            with contextlib.suppress(WaitedTooLong):
                coming.exception(READ_TIMEOUT_S)


def _finish(coming: Future[str | None], *arguments: Any) -> None:
    try:
        coming.set_result(_read(*arguments))
    except BaseException as error:
        coming.set_exception(error)


def _read(file: StoreFile, buffer: AlignedBuffer, begin: int, end: int) -> str | None:
    """Fill the buffer with the file's bytes. None, or why that failed."""
    try:
        file.read_into(begin, buffer.view()[: end - begin])
    except OSError as error:
        return error.strerror or str(error)
    return None


class _Unfinished(NamedTuple):
    """A long sample that goes on in the next piece: up to where its checksum is known."""

    sample: int
    position: int
    end: int
    crc: int


class _Comparison:
    """Compares one piece after the other."""

    def __init__(self, file: ScannedFile) -> None:
        self._file = file
        self._unfinished: _Unfinished | None = None

    def take(self, read: _Bytes, first: int, upto: int) -> Piece:
        """Compare the chunks ``first`` to ``upto``, which begin with the bytes read."""
        file = self._file
        begin, end = int(file.firsts[first]), int(file.firsts[upto])
        size_bytes = (upto - first) * file.chunk_bytes
        if read.error is not None:
            problem = f"{file.name} cannot be read from {read.begin} to {read.end}: {read.error}"
            lost = [] if self._unfinished is None else [self._unfinished.sample]
            self._unfinished = None
            return Piece(end - begin, size_bytes, lost + list(range(begin, end)), [problem])
        wrong = self._finish(read)
        offsets, lengths = file.extents.of(begin, end)
        ends = offsets + lengths
        right = np.ones(end - begin, np.bool_)
        here = int(np.searchsorted(ends, read.end, side="right"))  # samples that end in what was read
        if here:  # they lie back to back
            address = read.address + int(offsets[0]) - read.begin
            right[:here] = _native.sample_sums(address, ends[:here] - offsets[0]) == file.sums[begin:][:here]
        if here < end - begin:  # the last one
            self._unfinished = _Unfinished(begin + here, int(offsets[here]), int(ends[here]), 0)
            self._finish(read)
        wrong += (begin + np.flatnonzero(~right)).tolist()
        room = file.chunk_bytes - offsets % file.chunk_bytes
        long = (lengths > room) & (lengths >= layout.long_edge_bytes(file.chunk_bytes))
        problems = []
        for chunk in range(first, upto):
            low, high = int(file.firsts[chunk]) - begin, int(file.firsts[chunk + 1]) - begin
            body = high - 1 if high > low and long[high - 1] else high
            crc = read.crc(int(offsets[low]), int(ends[body - 1])) if body > low else 0
            if crc != file.records[chunk]["crc32c"] and right[low:high].all():
                problems.append(f"{layout.CHUNKS} has a wrong checksum for chunk {chunk} of {file.name}")
        if upto == file.data_file.chunks:
            problems += self._padding(read)
        return Piece(end - begin, size_bytes, wrong, problems)

    def _finish(self, read: _Bytes) -> list[int]:
        """Go on with the unfinished sample. Its index, if that was all of it, and it is wrong."""
        long = self._unfinished
        if long is None:
            return []
        upto = min(long.end, read.end)
        if upto > long.position:
            long = long._replace(position=upto, crc=read.crc(long.position, upto, long.crc))
        self._unfinished = long if long.position < long.end else None
        if self._unfinished is not None or long.crc == self._file.sums[long.sample]:
            return []
        return [long.sample]

    def _padding(self, read: _Bytes) -> list[str]:
        """After the last sample there are zeros."""
        begin = self._file.data_file.size_bytes
        if read.crc(begin, read.end) == crc32c(bytes(read.end - begin)):
            return []
        return [f"{self._file.name} has something other than zeros after its last sample"]
