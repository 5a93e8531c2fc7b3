"""Samples of tar archives as WebDataset has them: the files of one name, with different extensions."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.errors import InvalidArgument, SampleError
from penstock.samples.format.encoding import encode
from penstock.samples.sources.paths import Paths, shards_of
from penstock.samples.sources.source import Labels, RawSample, Sharded
from penstock.samples.sources.tar import members
from penstock.units import parse_bytes

_log = logging.getLogger("penstock")


@dataclass(frozen=True)
class Shards(Sharded):
    """The samples of several archives."""

    prefix: str | None
    label_column: str | None
    labels: Labels
    encoding: str = "msgpack"

    @property
    def classes(self) -> tuple[str, ...]:
        return self.labels.classes

    def read(self, path: str) -> Iterator[tuple[str, dict[str, bytes]]]:
        return _samples(path, self.largest_bytes)

    def sample(self, path: str, shard: str, number: int, item: tuple[str, dict[str, bytes]]) -> RawSample:
        key, files = item
        value = files.get(self.label_column) if self.label_column else None
        try:
            name = f"{shard}/{key}" if self.prefix else key
            return RawSample(name, encode(files), self.labels.label(value, key))
        except InvalidArgument as error:
            raise SampleError(f"archive {path}, sample {key}: {error}") from None


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
    largest_bytes = parse_bytes(max_sample_bytes)
    opened = Shards(shards, largest_bytes, prefix, label_column, Labels(classes or ()))
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
