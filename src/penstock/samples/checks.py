"""Whether the files of a store agree with its manifest, each other, and their checksums."""

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
from penstock.errors import InvalidFile, SampleError
from penstock.samples import layout
from penstock.samples.catalog import Directory
from penstock.samples.manifest import DataFile, StoreManifest
from penstock.samples.places import Place, StoreFile
from penstock.storage.aligned import AlignedBuffer, align_up
from penstock.storage.checksum import crc32c, crc32c_at

Words = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]

ENTRIES_AT_ONCE = 1 << 18


class Extents(NamedTuple):
    """Where samples lie, once the directory is known to agree with itself.

    firsts      [chunks + 1]: the first sample of each chunk, then the number of samples
    """

    directory: Directory
    firsts: Numbers

    def of(self, begin: int, end: int) -> tuple[Numbers, Numbers]:
        """Offsets and true lengths of samples ``begin`` to ``end``, which lie in one data file."""
        entries, lengths = self.directory.located(slice(begin, end))
        return entries.offset.astype(np.int64), lengths


def check_files(directory: Directory) -> dict[str, str]:
    """What is wrong with the store's files, by name, with all data files under "": presence and sizes, and
    the checksums of all but data files."""
    place, manifest = directory.place, directory.manifest
    chunk_bytes = manifest.chunk_bytes
    wrong = {name: problem for name in manifest.files if (problem := _file_problem(place, manifest, name))}
    sizes = [
        problem
        for number, file in enumerate(manifest.data_files)
        if (problem := _size_problem(place, layout.data_file_name(number), file.chunks * chunk_bytes))
    ]
    return {**wrong, "": "; ".join(sizes)} if sizes else wrong


def _file_problem(place: Place, manifest: StoreManifest, name: str) -> str | None:
    listed = manifest.files[name]
    if problem := _size_problem(place, name, listed.size_bytes):
        return problem
    try:
        crc = place.sum_of(name)
    except OSError as error:
        return f"{name} cannot be read: {error.strerror or error}"
    except InvalidFile as error:
        return str(error)
    return None if crc == listed.crc32c else f"{name} is damaged: its checksum is wrong"


def _size_problem(place: Place, name: str, expected_bytes: int) -> str | None:
    try:
        size_bytes = place.size_bytes(name)
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror or error}"
    if size_bytes == expected_bytes:
        return None
    return f"{name} has {size_bytes} bytes instead of {expected_bytes}"


def check_entries(directory: Directory) -> tuple[Extents | None, list[str]]:
    """Where all samples lie, or None and why that cannot be known; and what else is wrong with chunks.bin.

    In each data file, samples have to lie back to back, in the order of the directory.
    """
    manifest, large = directory.manifest, directory.large
    if problem := _large_problem(large, manifest.samples):
        return None, [problem]
    walk = _Walk(directory)
    for begin in range(0, manifest.samples, ENTRIES_AT_ONCE):
        wrong = walk.take(begin)
        if wrong is not None:
            return None, [f"{layout.DIRECTORY}: the entry of sample {wrong} does not follow the one before"]
    found = list(zip(walk.counts.tolist(), walk.ends.tolist(), strict=True))
    if found != [(data_file.samples, data_file.size_bytes) for data_file in manifest.data_files]:
        return None, [f"{layout.DIRECTORY} does not fill the data files as {layout.MANIFEST} says"]
    extents = Extents(directory, walk.firsts)
    return extents, _chunk_problems(directory, walk.firsts)


class _Walk:
    """Goes through the directory, a block of entries at a time.

    counts, ends   [data files]: samples, and the end of the last one
    firsts         [chunks + 1], as in Extents
    """

    def __init__(self, directory: Directory) -> None:
        self._directory, manifest = directory, directory.manifest
        self._chunk_bytes = manifest.chunk_bytes
        self._chunks = np.array([data_file.chunks for data_file in manifest.data_files], np.int64)
        self._chunks_before = np.cumsum(self._chunks) - self._chunks
        self._data_file = self._end = self._filled = 0
        self.counts = np.zeros(len(manifest.data_files), np.int64)
        self.ends = np.zeros(len(manifest.data_files), np.int64)
        self.firsts = np.full(manifest.chunks + 1, manifest.samples, np.int64)

    def take(self, begin: int) -> int | None:
        """A block of entries from index ``begin`` on. The first one that is wrong, if any is."""
        block = slice(begin, begin + ENTRIES_AT_ONCE)
        short = layout.unpack_entries(self._directory.entries[block]).length
        listed = _listed(self._directory.large, begin, len(short))
        wrong = np.flatnonzero(listed != (short == layout.LARGE_LENGTH))
        if len(wrong):
            return begin + int(wrong[0])
        entries, lengths = self._directory.located(block)
        data_files, offsets = entries.data_file.astype(np.int64), entries.offset.astype(np.int64)
        ends = offsets + lengths
        before = np.concatenate(([self._data_file], data_files[:-1]))
        expected = np.where(data_files == before, np.concatenate(([self._end], ends[:-1])), 0)
        right = (data_files >= before) & (data_files < len(self._chunks)) & (offsets == expected)
        wrong = np.flatnonzero(~right | (entries.present != 0))
        if len(wrong):
            return begin + int(wrong[0])
        self._data_file, self._end = int(data_files[-1]), int(ends[-1])
        self.counts += np.bincount(data_files, minlength=len(self.counts))
        np.maximum.at(self.ends, data_files, ends)
        chunks = np.minimum(offsets // self._chunk_bytes, self._chunks[data_files] - 1)
        chunks += self._chunks_before[data_files]
        upto = int(chunks[-1]) + 1
        if upto > self._filled:
            self.firsts[self._filled : upto] = begin + np.searchsorted(chunks, np.arange(self._filled, upto))
            self._filled = upto
        return None


def _large_problem(large: Words, samples: int) -> str | None:
    indices, lengths = large[:, 0], large[:, 1]
    ascending = np.all(indices[1:] > indices[:-1]) and (not len(indices) or int(indices[-1]) < samples)
    possible = np.all((lengths >= layout.LARGE_LENGTH) & (lengths <= layout.DATA_FILE_BYTES))
    return None if ascending and possible else f"{layout.LARGE} contradicts itself"


def _listed(large: Words, begin: int, count: int) -> npt.NDArray[np.bool_]:
    listed = np.zeros(count, np.bool_)
    low, high = np.searchsorted(large[:, 0], (begin, begin + count))
    listed[large[low:high, 0].astype(np.int64) - begin] = True
    return listed


def _chunk_problems(directory: Directory, firsts: Numbers) -> list[str]:
    records = directory.chunks
    wrong = np.flatnonzero((records["first"] != firsts[:-1].astype(np.uint64)) | (records["reserved"] != 0))
    if not len(wrong):
        return []
    return [
        f"{layout.CHUNKS} is wrong about which samples begin in {len(wrong)} chunks, the first {wrong[0]}"
    ]


def check_labels(directory: Directory) -> list[str]:
    """Labels count the manifest's classes; -1 is none."""
    labels, classes = directory.labels, len(directory.manifest.classes)
    if labels is None:
        return []
    wrong = np.flatnonzero((labels < -1) | (labels >= classes))
    if not len(wrong):
        return []
    return [f"{layout.LABELS} gives sample {wrong[0]} the class {labels[wrong[0]]} of {classes}"]


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
        pending: Future[str | None] = Future()
        arguments = (pending, file, buffers[number % 2], *spans[number])
        threading.Thread(target=_finish, args=arguments, name="penstock-verify", daemon=True).start()
        return pending

    pending: Future[str | None] | None = read(0)
    try:
        for number, (begin, end) in enumerate(spans):
            assert pending is not None
            try:
                error = pending.result(READ_TIMEOUT_S)
            except WaitedTooLong:
                pending = None
                raise SampleError(
                    f"waited {READ_TIMEOUT_S:.0f} s for {scanned.place.path_of(scanned.name)}, bytes {begin} "
                    f"to {end}. {scanned.place.hang_text()}"
                ) from None
            pending = read(number + 1) if number + 1 < len(spans) else None
            yield _Bytes(begin, end, buffers[number % 2].address, error)
    finally:
        if pending is not None:
            with contextlib.suppress(WaitedTooLong):
                pending.exception(READ_TIMEOUT_S)


def _finish(pending: Future[str | None], *arguments: Any) -> None:
    try:
        pending.set_result(_read(*arguments))
    except BaseException as error:
        pending.set_exception(error)


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
