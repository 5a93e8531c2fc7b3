"""Samples of tar archives as WebDataset has them: the files of one name, with different extensions."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from penstock.errors import InvalidArgument, SampleError
from penstock.samples.format.encoding import encode
from penstock.samples.format.manifest import Field
from penstock.samples.sources.paths import Paths, shards_of
from penstock.samples.sources.source import Labels, Part, RawSample, printable
from penstock.samples.sources.tar import members
from penstock.units import parse_bytes

_log = logging.getLogger("penstock")


@dataclass(frozen=True)
class Shards:
    """The samples of several archives. A share has whole archives, or takes turns if they are few."""

    shards: tuple[tuple[str, str], ...]
    description: str
    prefix: str | None
    largest_bytes: int
    label_column: str | None
    labels: Labels
    part: Part = field(default_factory=Part)
    encoding: str = "msgpack"
    fields: tuple[Field, ...] = ()
    samples: int | None = None

    @property
    def classes(self) -> tuple[str, ...]:
        return self.labels.classes

    @property
    def size_bytes(self) -> int | None:
        shards, part = self.part.deal(self.shards)
        if any(path.endswith("gz") for path, _ in shards):
            return None
        return sum(os.path.getsize(path) for path, _ in shards) // part.world

    def __iter__(self) -> Iterator[RawSample]:
        shards, part = self.part.deal(self.shards)
        position = 0
        for path, shard in shards:
            before = f"{shard}/" if self.prefix else ""
            for key, files in _samples(path, self.largest_bytes):
                if part.has(position):
                    value = files.get(self.label_column) if self.label_column else None
                    try:
                        yield RawSample(before + key, encode(files), self.labels.label(value, key))
                    except InvalidArgument as error:
                        raise SampleError(f"archive {path}, sample {key}: {error}") from None
                position += 1

    def share(self, rank: int, world: int) -> Shards:
        return replace(self, part=self.part.divide(rank, world))


def open_webdataset(
    source: Paths,
    *,
    prefix: str | None = None,
    label_column: str | None = None,
    classes: Sequence[str] | None = None,
    max_sample_bytes: int | str = "1GiB",
) -> Shards:
    """Samples of tar archives, with or without gzip.

    source            a path, a folder, a pattern such as "train-{000..127}.tar", or a list of these
    prefix            "shard": samples are named "shard.tar/key"; needed where keys repeat in other archives
    label_column      the extension of files that hold a class's name or number, such as "cls"
    classes           what labels count; otherwise all archives are read once more to find out
    max_sample_bytes  a file in an archive that is said to be larger is an error

    As in WebDataset, the key of a file is its path up to the first dot of its last part, the rest is the
    extension, and a sample is the files of one key that follow each other: a map from extension, in lower
    case, to bytes. Files with no extension are left out, and so are those whose names begin with "__".

    Iteration raises SampleError for archives that are damaged, cut off or hostile. Nothing is put on disk.
    """
    if prefix not in (None, "shard"):
        raise InvalidArgument(f"prefix={prefix!r} is unknown: give 'shard', or leave it out")
    shards = tuple(shards_of(source, "webdataset"))
    name = printable(shards[0][1]) + (f" and {len(shards) - 1} more" if len(shards) > 1 else "")
    largest_bytes = parse_bytes(max_sample_bytes)
    opened = Shards(shards, name, prefix, largest_bytes, label_column, Labels(classes or ()))
    if label_column is None or classes is not None:
        return opened
    values = (files.get(label_column) for path, _ in shards for _, files in _samples(path, largest_bytes))
    return replace(opened, labels=Labels.of_values(values))


def _samples(path: str, largest_bytes: int) -> Iterator[tuple[str, dict[str, bytes]]]:
    current: str | None = None
    files: dict[str, bytes] = {}
    total, skipped = 0, 0
    for member in members(path, largest_bytes):
        folder, slash, base = member.path.rpartition("/")
        stem, dot, extension = base.partition(".")
        if not stem or not dot or base.startswith("__"):
            skipped += 1
            continue
        key, extension = folder + slash + stem, extension.lower()
        if key != current:
            if current is not None:
                yield current, files
            current, files, total = key, {}, 0
        if extension in files:
            raise SampleError(f"archive {path}: sample {key} has two files with the extension {extension!r}")
        files[extension] = member.data
        total += len(member.data)
        if total > largest_bytes:
            raise SampleError(f"archive {path}: sample {key} has more than {largest_bytes} bytes")
    if current is not None:
        yield current, files
    if skipped:
        _log.warning("archive %s: %d files have no extension, and are left out", path, skipped)
