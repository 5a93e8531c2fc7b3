"""Reading a store whole, and comparing everything in it that can be compared."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import TimeoutError as WaitedTooLong
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock import _native
from penstock.errors import InvalidFile, SampleError
from penstock.samples import layout
from penstock.samples.catalog import Directory
from penstock.samples.places import Place, Progress, check_sums, places_of, reporter
from penstock.samples.threads import DaemonThreads
from penstock.storage.aligned import AlignedBuffer, align_up
from penstock.storage.checksum import crc32c, crc32c_at

Numbers = npt.NDArray[np.int64]

ENTRIES_AT_ONCE = 1 << 18
NAMES_AT_ONCE = 1 << 16
PIECE_BYTES = 8 << 20
READ_TIMEOUT_S = 120.0
MOST_PROBLEMS = 1000  # kept in words; damaged samples are all kept


@dataclass(frozen=True)
class DamagedSample:
    """A sample whose bytes are not those that were packed.

    index   over all partitions, as a mounted store counts
    name    None where the names are damaged, too
    """

    index: int
    name: str | None


@dataclass(frozen=True)
class Verification:
    """What reading a store whole has found.

    samples      how many it should hold
    size_bytes   of them all
    problems     a sentence each, at most 1000
    damaged      in stored order
    complete     everything could be compared: where the directory is damaged, samples cannot be
    """

    path: str
    samples: int
    size_bytes: int
    problems: tuple[str, ...]
    damaged: tuple[DamagedSample, ...]
    complete: bool

    @property
    def sound(self) -> bool:
        return self.complete and not self.problems and not self.damaged


def verify(path: str | os.PathLike[str], progress: Progress | None = None) -> Verification:
    """Read the store at ``path`` once, and compare all checksums, the directory, the names and the lookup.

    path       of a store, or of a folder of its partitions; or the URL of a namespace that has one
    progress   called now and then with the samples and the bytes that were read so far

    Data is read past the page cache where that works: what counts is what the disk holds. Damage is
    reported, and everything else still compared. Raises SampleError where there is no store or a partition
    is missing, InvalidFile where a manifest is damaged.
    """
    findings = _Findings(reporter(progress))
    places = places_of(path)
    for place in places:
        _verify_partition(place, findings, f"{place.name}/" if len(places) > 1 else "")
    return Verification(
        os.fspath(path),
        findings.samples,
        findings.size_bytes,
        tuple(findings.problems),
        tuple(findings.damaged),
        findings.complete,
    )


class _Findings:
    """What was found so far. prefix: of problems, the partition's name."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.prefix = ""
        self.samples = self.size_bytes = self._read_samples = self._read_bytes = 0
        self.problems: list[str] = []
        self.damaged: list[DamagedSample] = []
        self.complete = True

    def add(self, problems: Sequence[str]) -> None:
        room = max(0, MOST_PROBLEMS - len(self.problems))
        self.problems += [self.prefix + problem for problem in problems[:room]]

    def advance(self, samples: int, size_bytes: int) -> None:
        self._read_samples += samples
        self._read_bytes += size_bytes
        self._progress(self._read_samples, self._read_bytes)


def _verify_partition(place: Place, findings: _Findings, prefix: str) -> None:
    directory = Directory(place, verify=False)
    manifest = directory.manifest
    begin = findings.samples
    findings.samples += manifest.samples
    findings.size_bytes += manifest.size_bytes
    bad = _check_files(directory)
    findings.prefix = ""  # these name their place
    findings.add([*place.problems(), *bad.values()])
    findings.prefix = prefix
    if bad.keys() - {layout.NAMES, layout.ANCHORS, layout.LOOKUP, layout.LABELS}:
        findings.complete = False
        return
    firsts, problems = _check_entries(directory)
    findings.add(problems)
    if layout.LABELS not in bad:
        findings.add(_check_labels(directory))
    names = None
    if not bad.keys() & {layout.NAMES, layout.ANCHORS, layout.LOOKUP}:
        names, problems = _check_names(directory)
        findings.add(problems)
    if firsts is None:
        findings.complete = False
        return
    damaged: list[int] = []
    chunk = 0
    for number, data_file in enumerate(manifest.data_files):
        damaged += _Scan(directory, number, firsts, chunk, findings).run()
        chunk += data_file.chunks
    for index in sorted(damaged):
        name = None if names is None else layout.text_of(names.name(index))
        findings.damaged.append(DamagedSample(begin + index, name))


def _check_files(directory: Directory) -> dict[str, str]:
    """What is wrong with the store's files, by name. Of data files only presence and size are looked at."""
    place, manifest, wrong = directory.place, directory.manifest, {}
    for name, size_bytes in manifest.file_sizes.items():
        try:
            if name in manifest.files:
                check_sums(place, manifest, {name: place.load(name, size_bytes)})
            else:
                place.open(name, size_bytes).close()
        except (SampleError, InvalidFile) as error:
            wrong[name] = str(error)
    return wrong


def _check_entries(directory: Directory) -> tuple[Numbers | None, list[str]]:
    """[chunks + 1] the first sample of each chunk, then the number of samples, or None and why that cannot be
    known; and what else is wrong with chunks.bin.

    In each data file, samples have to lie back to back, in the order of the directory.
    """
    manifest, data_files = directory.manifest, directory.manifest.data_files
    large = directory.large.astype(np.int64)
    indices, large_bytes = large[:, 0], large[:, 1]
    is_ascending = np.all(np.diff(indices, prepend=-1, append=manifest.samples) > 0)
    if not is_ascending or np.any(
        (large_bytes < layout.LARGE_LENGTH) | (large_bytes > layout.DATA_FILE_BYTES)
    ):
        return None, [f"{layout.LARGE} contradicts itself"]
    chunks = np.array([data_file.chunks for data_file in data_files], np.int64)
    chunks_before = np.cumsum(chunks) - chunks
    counts, file_ends = np.zeros(len(chunks), np.int64), np.zeros(len(chunks), np.int64)
    firsts = np.full(manifest.chunks + 1, manifest.samples, np.int64)
    last_file = last_end = known_chunks = 0
    for begin in range(0, manifest.samples, ENTRIES_AT_ONCE):
        block = slice(begin, min(begin + ENTRIES_AT_ONCE, manifest.samples))
        said_large = layout.unpack_entries(directory.entries[block]).length == layout.LARGE_LENGTH
        wrong = np.flatnonzero(said_large != np.isin(np.arange(block.start, block.stop), indices))
        if not len(wrong):
            entries, lengths = directory.located(block)
            files, offsets = entries.data_file.astype(np.int64), entries.offset.astype(np.int64)
            ends = offsets + lengths
            files_before = np.concatenate(([last_file], files[:-1]))
            expected = np.where(files == files_before, np.concatenate(([last_end], ends[:-1])), 0)
            right = (files >= files_before) & (files < len(chunks)) & (offsets == expected)
            wrong = np.flatnonzero(~right | (entries.present != 0))
        if len(wrong):
            problem = (
                f"{layout.DIRECTORY}: the entry of sample {begin + wrong[0]} does not follow the one before"
            )
            return None, [problem]
        last_file, last_end = int(files[-1]), int(ends[-1])
        counts += np.bincount(files, minlength=len(chunks))
        np.maximum.at(file_ends, files, ends)
        inside = chunks_before[files] + np.minimum(offsets // manifest.chunk_bytes, chunks[files] - 1)
        new_chunks = np.arange(known_chunks, inside[-1] + 1)
        firsts[new_chunks] = begin + np.searchsorted(inside, new_chunks)
        known_chunks = max(known_chunks, int(inside[-1]) + 1)
    found = list(zip(counts.tolist(), file_ends.tolist(), strict=True))
    if found != [(data_file.samples, data_file.size_bytes) for data_file in data_files]:
        return None, [f"{layout.DIRECTORY} does not fill the data files as {layout.MANIFEST} says"]
    records = directory.chunks
    wrong = np.flatnonzero((records["first"] != firsts[:-1].astype(np.uint64)) | (records["reserved"] != 0))
    if not len(wrong):
        return firsts, []
    which = f"in {len(wrong)} chunks, the first {wrong[0]}"
    return firsts, [f"{layout.CHUNKS} is wrong about which samples begin {which}"]


def _check_labels(directory: Directory) -> list[str]:
    """Labels count the manifest's classes; -1 is none."""
    labels, classes = directory.labels, len(directory.manifest.classes)
    wrong = np.empty(0, np.int64) if labels is None else np.flatnonzero((labels < -1) | (labels >= classes))
    if labels is None or not len(wrong):
        return []
    return [f"{layout.LABELS} gives sample {wrong[0]} the class {labels[wrong[0]]} of {classes}"]


def _check_names(directory: Directory) -> tuple[_native.SampleNames | None, list[str]]:
    """The names, if they can be read, and what is wrong with them: each has to lead to its own sample."""
    anchors = directory.file(layout.ANCHORS).view("<u8")
    problems: list[str] = []
    position = 0
    try:
        names = directory.names
        for begin in range(0, directory.manifest.samples, NAMES_AT_ONCE):
            end = min(begin + NAMES_AT_ONCE, directory.manifest.samples)
            block = names.names(begin, end)
            sizes = np.fromiter(map(len, block), np.int64, len(block))
            places = position + np.cumsum(sizes + 2) - sizes - 2
            position = int(places[-1] + sizes[-1] + 2)
            anchored = anchors[begin // layout.ANCHOR_NAMES :][: -(-len(block) // layout.ANCHOR_NAMES)]
            if not np.array_equal(anchored, places[:: layout.ANCHOR_NAMES].astype(np.uint64)):
                problems.append(f"{layout.ANCHORS} does not say where names {begin} and on begin")
            joined, ends = np.frombuffer(b"".join(block), np.uint8), np.cumsum(sizes)
            stored = layout.unpack_entries(directory.entries[begin:end]).key
            for at in np.flatnonzero(_native.sample_keys(joined, ends) != stored):
                problems.append(f"the directory's key of sample {begin + at} is not that of its name")
            found = names.find_many(joined, ends)
            for at in np.flatnonzero(found != np.arange(begin, end)):
                what = f"sample {found[at]}" if found[at] >= 0 else "nothing"
                problems.append(f"{layout.LOOKUP} leads from the name of sample {begin + at} to {what}")
    except ValueError as error:
        return None, [*problems, f"{layout.NAMES} or {layout.LOOKUP} contradicts itself: {error}"]
    if position != directory.file(layout.NAMES).size:
        problems.append(f"{layout.NAMES} goes on after its last name, from byte {position}")
    return names, problems


class _Read(NamedTuple):
    """Bytes ``begin`` to ``end`` of a data file, the first one at ``address``; or why there are none."""

    begin: int
    end: int
    address: int
    error: str = ""

    def crc(self, begin: int, end: int, crc: int = 0) -> int:
        """Of a stretch of the file that is here."""
        return crc32c_at(self.address + begin - self.begin, end - begin, crc)


class _Tail(NamedTuple):
    """A long sample that goes on in the next piece: up to ``position`` its checksum is known."""

    sample: int
    position: int
    end: int
    crc: int


class _Scan:
    """Compares all of a data file, piece by piece; the next one is read while one is compared.

    firsts   [chunks + 1], of the whole store; ``chunk``: which of these chunks is the file's first
    """

    def __init__(
        self, directory: Directory, number: int, firsts: Numbers, chunk: int, findings: _Findings
    ) -> None:
        self._directory, self._name, self._findings = directory, layout.data_file_name(number), findings
        self._data_file = directory.manifest.data_files[number]
        self._chunk_bytes, self._chunks = directory.manifest.chunk_bytes, self._data_file.chunks
        self._firsts = firsts[chunk : chunk + self._chunks + 1]
        self._sums_of_chunks = directory.chunks["crc32c"][chunk : chunk + self._chunks]
        self._tail: _Tail | None = None
        self._damaged: list[int] = []

    def run(self) -> list[int]:
        """The damaged samples. Raises SampleError where the file cannot be opened, or a read hangs."""
        chunks = max(1, PIECE_BYTES // self._chunk_bytes)
        for number, read in enumerate(self._reads(chunks * self._chunk_bytes)):
            first = number * chunks
            self._compare(read, first, min(first + chunks, self._chunks))
        return self._damaged

    def _reads(self, step: int) -> Iterator[_Read]:
        """One ahead. The memory of one is used again for the one after the next."""
        size_bytes, place = self._chunks * self._chunk_bytes, self._directory.place
        # With the end of a piece comes what its last body has beyond it.
        margin_bytes = align_up(layout.long_edge_bytes(self._chunk_bytes), layout.SMALLEST_CHUNK_BYTES)
        spans = [(at, min(at + step + margin_bytes, size_bytes)) for at in range(0, size_bytes, step)]
        buffers = [AlignedBuffer(min(step + margin_bytes, size_bytes)) for _ in range(2)]
        with (
            contextlib.closing(place.open(self._name)) as opened,
            contextlib.closing(DaemonThreads("penstock-verify")) as thread,
        ):

            def read(number: int) -> _Read:
                (begin, end), buffer = spans[number], buffers[number % 2]
                try:
                    opened.read_into(begin, buffer.view()[: end - begin])
                except OSError as error:
                    return _Read(begin, end, buffer.address, error.strerror or str(error))
                return _Read(begin, end, buffer.address)

            pending, hangs = thread.submit(read, 0), False
            try:
                for number, (begin, end) in enumerate(spans):
                    try:
                        current = pending.result(READ_TIMEOUT_S)
                    except WaitedTooLong:
                        hangs = True
                        raise SampleError(
                            f"waited {READ_TIMEOUT_S:.0f} s for {place.path_of(self._name)}, bytes {begin} "
                            f"to {end}. {place.hang_text}"
                        ) from None
                    if number + 1 < len(spans):
                        pending = thread.submit(read, number + 1)
                    yield current
            finally:
                if not hangs:
                    pending.exception(READ_TIMEOUT_S)  # it uses the file and the memory

    def _compare(self, read: _Read, first: int, upto: int) -> None:
        """Compare the chunks ``first`` to ``upto`` of the file, which begin with the bytes read."""
        begin, end = int(self._firsts[first]), int(self._firsts[upto])
        self._findings.advance(end - begin, (upto - first) * self._chunk_bytes)
        if read.error:
            self._findings.add([f"{self._name} cannot be read from {read.begin} to {read.end}: {read.error}"])
            self._damaged += [*([] if self._tail is None else [self._tail.sample]), *range(begin, end)]
            self._tail = None
            return
        self._follow_tail(read)
        entries, lengths = self._directory.located(slice(begin, end))
        offsets = entries.offset.astype(np.int64)
        ends = offsets + lengths
        sums = self._directory.sums[begin:end]
        right = np.ones(end - begin, np.bool_)
        here = int(np.searchsorted(ends, read.end, side="right"))  # samples that end in what was read
        if here:  # they lie back to back
            address = read.address + int(offsets[0]) - read.begin
            right[:here] = _native.sample_sums(address, ends[:here] - offsets[0]) == sums[:here]
        if here < end - begin:  # the last one
            self._tail = _Tail(begin + here, int(offsets[here]), int(ends[here]), 0)
            self._follow_tail(read)
        self._damaged += (begin + np.flatnonzero(~right)).tolist()
        room = self._chunk_bytes - offsets % self._chunk_bytes
        long = (lengths > room) & (lengths >= layout.long_edge_bytes(self._chunk_bytes))
        problems = []
        for chunk in range(first, upto):
            low, high = int(self._firsts[chunk]) - begin, int(self._firsts[chunk + 1]) - begin
            body = high - 1 if high > low and long[high - 1] else high
            crc = read.crc(int(offsets[low]), int(ends[body - 1])) if body > low else 0
            if crc != self._sums_of_chunks[chunk] and right[low:high].all():
                problems.append(f"{layout.CHUNKS} has a wrong checksum for chunk {chunk} of {self._name}")
        padding = self._data_file.size_bytes
        if upto == self._chunks and read.crc(padding, read.end) != crc32c(bytes(read.end - padding)):
            problems.append(f"{self._name} has something other than zeros after its last sample")
        self._findings.add(problems)

    def _follow_tail(self, read: _Read) -> None:
        """Go on with a sample that did not end."""
        tail = self._tail
        if tail is None:
            return
        upto = min(tail.end, read.end)
        if upto > tail.position:
            tail = tail._replace(position=upto, crc=read.crc(tail.position, upto, tail.crc))
        self._tail = tail if tail.position < tail.end else None
        if self._tail is None and tail.crc != self._directory.sums[tail.sample]:
            self._damaged.append(tail.sample)
