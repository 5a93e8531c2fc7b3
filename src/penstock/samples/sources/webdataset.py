"""Samples of tar archives as WebDataset has them: the files of one name, with different extensions.

Archives are read with no trust in them, and nothing is put on disk. Formats: POSIX.1-2017, pax, "ustar
Interchange Format" and "pax Header Block"; GNU tar manual, "Basic Tar Format".
"""

from __future__ import annotations

import io
import logging
import tarfile
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from penstock.errors import InvalidArgument, SampleError
from penstock.samples.encoding import encode
from penstock.samples.layout import text_of
from penstock.samples.sources.paths import Paths, shards_of
from penstock.samples.sources.source import Labels, RawSample, Sharded, described, read_up_to, unpacked
from penstock.units import format_bytes, parse_bytes

_BLOCK = 512
_LARGEST_HEADER_BYTES = 1 << 20  # of names and other attributes that do not fit a block

_REFUSED = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"6": "a pipe",
    b"S": "a sparse file",
    b"M": "a file that goes on in another archive",
}


class _Header(NamedTuple):
    path: bytes
    size_bytes: int
    kind: bytes


def members(path: str, largest_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Path and bytes of each regular file of an archive, in its order. Paths are relative, and without "..".

    path           ends in "gz" or "tgz" where it is compressed
    largest_bytes  that a member may have

    Raises SampleError, with the archive and the member, for an archive that is damaged or cut off, and for
    what no honest one has: absolute paths, "..", links, devices, sizes larger than the file.
    """
    with unpacked(path) as opened:
        yield from _Archive(path, opened, largest_bytes).members()


class _Archive:
    """opened: the file, and its size where it is not compressed."""

    def __init__(self, path: str, opened: tuple[io.BufferedIOBase, int | None], largest_bytes: int) -> None:
        self._path, self._largest_bytes, self._at = path, largest_bytes, 0
        self._file, self._size_bytes = opened

    def members(self) -> Iterator[tuple[str, bytes]]:
        attributes: dict[bytes, bytes] = {}
        everywhere: dict[bytes, bytes] = {}
        while (header := self._header()) is not None:
            if header.kind in (b"L", b"K", b"x", b"g"):
                data = self._data(header, _LARGEST_HEADER_BYTES, "header")
                if header.kind == b"L":
                    attributes[b"path"] = data.partition(b"\0")[0]
                elif header.kind == b"x":
                    attributes |= self._attributes(data)
                elif header.kind == b"g":
                    everywhere |= self._attributes(data)
                continue
            header = self._overridden(header, everywhere | attributes)
            attributes = {}
            name = self._checked(header)
            if header.kind == b"5" or (header.path.endswith(b"/") and not header.size_bytes):
                continue
            if header.kind not in (b"0", b"\0", b"7"):
                what = _REFUSED.get(header.kind, f"of the unknown kind {header.kind!r}")
                raise self._wrong(f"{name} is {what}: only regular files are packed")
            yield name, self._data(header, self._largest_bytes, name)
        # Behind the end mark are zeros; once they are read, gzip verifies its checksum.
        behind = 0
        while data := self._file.read(1 << 20):
            behind += len(data) - data.count(0)
        if behind:
            _log.warning("archive %s: what lies behind its end mark is left out", self._path)

    def _header(self) -> _Header | None:
        """The next header; None at the end of the archive."""
        block = self._read(_BLOCK)
        if len(block) < _BLOCK:
            where = "has no end mark" if not block else f"ends in a header, at byte {self._at}"
            raise self._wrong(f"it {where}: it was cut off" if self._at else "it is empty")
        if not any(block):
            return None
        path = block[:100].partition(b"\0")[0]
        try:
            found = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            changed = "checksum" in str(error)
            if self._at == _BLOCK and (changed or block[257:262] != b"ustar"):
                raise self._wrong("it is not a tar archive") from None
            if changed:
                raise self._wrong(f"the header at byte {self._at - _BLOCK} is damaged: {error}") from None
            raise self._wrong(f"{_shown(path)} has no valid size, owner or time") from None
        prefix = block[345:500].partition(b"\0")[0]
        if block[257:263] == b"ustar\0" and prefix:
            path = prefix + b"/" + path
        if found.size < 0:
            raise self._wrong(f"{_shown(path)} has no valid size")
        return _Header(path, found.size, block[156:157])

    def _overridden(self, header: _Header, pax: dict[bytes, bytes]) -> _Header:
        path, digits = pax.get(b"path", header.path), pax.get(b"size", b"%d" % header.size_bytes)
        if any(key.startswith(b"GNU.sparse") for key in pax):
            raise self._wrong(f"{_shown(path)} is a sparse file: only regular files are packed")
        if not digits.isdigit() or len(digits) > 20:
            raise self._wrong(f"{_shown(path)} has no valid size")
        return header._replace(path=path, size_bytes=int(digits))

    def _checked(self, header: _Header) -> str:
        """The member's path, which must stay where it is."""
        parts = [part for part in header.path.split(b"/") if part not in (b"", b".")]
        if header.path.startswith(b"/") or b".." in parts or b"\0" in header.path:
            raise self._wrong(f"{_shown(header.path)} leads out of the archive: no sample can have this path")
        if not parts and header.kind != b"5":
            raise self._wrong(f"the member at byte {self._at - _BLOCK} has no name")
        return text_of(b"/".join(parts))

    def _data(self, header: _Header, most_bytes: int, name: str) -> bytes:
        size_bytes = header.size_bytes
        if self._size_bytes is not None and self._at + size_bytes > self._size_bytes:
            raise self._wrong(
                f"{name} is said to have {size_bytes} bytes, of which {self._size_bytes - self._at} are "
                "there: the archive is cut off or damaged"
            )
        if size_bytes > most_bytes:
            more = "" if name == "header" else ", or pass max_sample_bytes="
            raise self._wrong(
                f"{name} is said to have {size_bytes} bytes: more than {format_bytes(most_bytes)}. Check the "
                f"archive{more}"
            )
        data = self._read(size_bytes)
        padding = self._read(-size_bytes % _BLOCK)
        if len(data) < size_bytes or len(padding) < -size_bytes % _BLOCK:
            raise self._wrong(f"{name} has {len(data)} bytes of {size_bytes}: the archive is cut off")
        return data

    def _attributes(self, data: bytes) -> dict[bytes, bytes]:
        """The records "length key=value" of a pax header."""
        found, at = {}, 0
        while at < len(data) and data[at] != 0:
            digits, _, _ = data[at : at + 20].partition(b" ")
            length = int(digits) if digits.isdigit() else 0
            record = data[at + len(digits) + 1 : at + length]
            key, equals, value = record.partition(b"=")
            if not equals or not value.endswith(b"\n") or at + length > len(data):
                raise self._wrong(f"the pax header before byte {self._at} is damaged")
            found[key] = value[:-1]
            at += length
        return found

    def _read(self, size_bytes: int) -> bytes:
        data = read_up_to(self._file.read, size_bytes)
        self._at += len(data)
        return data

    def _wrong(self, what: str) -> SampleError:
        return SampleError(f"archive {self._path}: {what}")


def _shown(path: bytes) -> str:
    text = path.decode("utf-8", "backslashreplace")
    return repr(text if len(text) < 200 else text[:200] + "...")


_log = logging.getLogger("penstock")


def open_webdataset(
    source: Paths,
    *,
    prefix: str | None = None,
    label_column: str | None = None,
    classes: Sequence[str] | None = None,
    max_sample_bytes: int | str = "1GiB",
) -> Sharded:
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
    read = partial(_samples, largest_bytes=parse_bytes(max_sample_bytes))
    labels = Labels(classes or ())
    if label_column is not None and classes is None:
        labels = Labels.of_values(files.get(label_column) for path, _ in shards for _, files in read(path))

    def sample(path: str, shard: str, _: int, item: tuple[str, dict[str, bytes]]) -> RawSample:
        key, files = item
        value = files.get(label_column) if label_column else None
        try:
            return RawSample(f"{shard}/{key}" if prefix else key, encode(files), labels.label(value, key))
        except InvalidArgument as error:
            raise SampleError(f"archive {path}, sample {key}: {error}") from None

    return Sharded(described(shards), "msgpack", labels.classes, shards, read, sample)


def _samples(path: str, largest_bytes: int) -> Iterator[tuple[str, dict[str, bytes]]]:
    current: str | None = None
    files: dict[str, bytes] = {}
    total, skipped = 0, 0
    for name, data in members(path, largest_bytes):
        folder, slash, base = name.rpartition("/")
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
        files[extension] = data
        total += len(data)
        if total > largest_bytes:
            raise SampleError(f"archive {path}: sample {key} has more than {largest_bytes} bytes")
    if current is not None:
        yield current, files
    if skipped:
        _log.warning("archive %s: %d files have no extension, and are left out", path, skipped)
