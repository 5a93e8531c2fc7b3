"""Reading a store whole, and comparing everything in it that can be compared."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock import _native
from penstock.errors import InvalidArgument
from penstock.samples import layout
from penstock.samples.catalog import Directory
from penstock.samples.checks import (
    Extents,
    ScannedFile,
    Words,
    check_entries,
    check_files,
    check_labels,
    scan,
)
from penstock.samples.places import Place, places_of

Progress = Callable[[int, int], None]

NAMES_AT_ONCE = 1 << 16
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
    if progress is not None and not callable(progress):
        raise InvalidArgument(f"progress={progress!r} cannot be called: give a function of samples and bytes")
    findings = _Findings(progress or (lambda samples, size_bytes: None))
    places = places_of(path)
    several = len(places) > 1
    for place in places:
        _verify_partition(place, f"{place.name}/" if several else "", findings)
    return Verification(
        os.fspath(path),
        findings.samples,
        findings.size_bytes,
        tuple(findings.problems),
        tuple(findings.damaged),
        findings.complete,
    )


class _Findings:
    """What was found so far."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.samples = self.size_bytes = 0
        self._read = [0, 0]
        self.problems: list[str] = []
        self.damaged: list[DamagedSample] = []
        self.complete = True

    def add(self, problems: Sequence[str], prefix: str) -> None:
        room = max(0, MOST_PROBLEMS - len(self.problems))
        self.problems += [prefix + problem for problem in problems[:room]]

    def advance(self, samples: int, size_bytes: int) -> None:
        self._read = [self._read[0] + samples, self._read[1] + size_bytes]
        self._progress(*self._read)


def _verify_partition(place: Place, prefix: str, findings: _Findings) -> None:
    directory = Directory.open(place, verify=False)
    manifest = directory.manifest
    begin = findings.samples
    findings.samples += manifest.samples
    findings.size_bytes += manifest.size_bytes
    findings.add(place.problems(), prefix)
    bad = check_files(directory)
    findings.add(list(bad.values()), prefix)
    if bad.keys() & {layout.DIRECTORY, layout.SUMS, layout.CHUNKS, layout.LARGE, ""}:
        findings.complete = False
        return
    extents, problems = check_entries(directory)
    findings.add(problems, prefix)
    if layout.LABELS not in bad:
        findings.add(check_labels(directory), prefix)
    names = None
    if not bad.keys() & {layout.NAMES, layout.ANCHORS, layout.LOOKUP}:
        names, problems = _check_names(directory)
        findings.add(problems, prefix)
    if extents is None:
        findings.complete = False
        return
    for index in sorted(_damaged(directory, extents, prefix, findings)):
        name = None if names is None else layout.text_of(names.name(index))
        findings.damaged.append(DamagedSample(begin + index, name))


def _damaged(directory: Directory, extents: Extents, prefix: str, findings: _Findings) -> Iterator[int]:
    """Indices of samples in the store whose bytes are wrong; notes what else is wrong with its data."""
    manifest = directory.manifest
    begin = 0
    for number, data_file in enumerate(manifest.data_files):
        end = begin + data_file.chunks
        file = ScannedFile(
            directory.place,
            layout.data_file_name(number),
            data_file,
            manifest.chunk_bytes,
            extents,
            extents.firsts[begin : end + 1],
            directory.chunks[begin:end],
            directory.sums,
        )
        for piece in scan(file):
            findings.add(piece.problems, prefix)
            findings.advance(piece.samples, piece.size_bytes)
            yield from piece.damaged
        begin = end


def _check_names(directory: Directory) -> tuple[_native.SampleNames | None, list[str]]:
    """The names, if they can be read, and what is wrong with them: each has to lead to its own sample."""
    samples = directory.manifest.samples
    anchors = directory.files[layout.ANCHORS].view("<u8")
    problems: list[str] = []
    position = 0
    try:
        names = directory.names
        for begin in range(0, samples, NAMES_AT_ONCE):
            block = names.names(begin, min(begin + NAMES_AT_ONCE, samples))
            sizes = np.fromiter(map(len, block), np.int64, len(block))
            places = position + np.cumsum(sizes + 2) - sizes - 2
            position = int(places[-1] + sizes[-1] + 2)
            anchored = anchors[begin // layout.ANCHOR_NAMES :][: -(-len(block) // layout.ANCHOR_NAMES)]
            if not np.array_equal(anchored, places[:: layout.ANCHOR_NAMES].astype(np.uint64)):
                problems.append(f"{layout.ANCHORS} does not say where names {begin} and on begin")
            problems += _wrong_names(names, block, sizes, begin, directory.entries)
    except ValueError as error:
        return None, [*problems, f"{layout.NAMES} or {layout.LOOKUP} contradicts itself: {error}"]
    if position != directory.files[layout.NAMES].size:
        problems.append(f"{layout.NAMES} goes on after its last name, from byte {position}")
    return names, problems


def _wrong_names(
    names: _native.SampleNames,
    block: list[bytes],
    sizes: npt.NDArray[np.int64],
    begin: int,
    entries: Words,
) -> list[str]:
    keys = np.fromiter(map(_native.sample_key, block), np.uint64, len(block))
    stored = entries[begin : begin + len(block), 0] & np.uint64((1 << layout.KEY_BITS) - 1)
    wrong_key = np.flatnonzero(keys != stored)
    found = names.find_many(np.frombuffer(b"".join(block), np.uint8), np.cumsum(sizes))
    lost = np.flatnonzero(found != np.arange(begin, begin + len(block)))
    return [f"the directory's key of sample {begin + at} is not that of its name" for at in wrong_key] + [
        f"{layout.LOOKUP} leads from the name of sample {begin + at} to "
        + (f"sample {found[at]}" if found[at] >= 0 else "nothing")
        for at in lost
    ]
