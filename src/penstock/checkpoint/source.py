"""A checkpoint file that is open for reading."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from penstock.checkpoint.failures import cannot_read, os_error, shown
from penstock.checkpoint.header import Header, TensorEntry, decode, header_bytes
from penstock.checkpoint.pieces import io_path
from penstock.checkpoint.remote import ObjectPath, OpenObject
from penstock.errors import CheckpointError, InvalidArgument, InvalidCheckpoint, with_errno
from penstock.options import IoOptions
from penstock.storage import files
from penstock.storage.nvme.url import is_url
from penstock.storage.objects import FORMS, is_object_url
from penstock.storage.page_cache import cached_share
from penstock.storage.paths import IoPath

# From this share of the file in the page cache on, it is quicker to use what is there.
_CACHED_SHARE = 0.9

_BEGINNING_BYTES = 64 << 10
_ZIP = b"PK\x03\x04"

OWN_SUFFIXES = (".safetensors",)
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")

PathLike = str | os.PathLike[str]


def path_of(path: PathLike, others: str = "") -> Path:
    """Raises InvalidArgument where ``path`` is none, or a URL. ``others``: what else could be given."""
    if isinstance(path, str) and is_url(path):
        scheme = path.partition("://")[0]
        raise InvalidArgument(
            f"{path} is of the kind {scheme}://, which cannot be used here: give a path{others}"
        )
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise InvalidArgument(
            f"{path!r} is not a path: give the name of a file, as text or pathlib.Path. Open files and "
            "buffers cannot be written past the page cache, nor replaced at once."
        )
    return Path(path)


def place_of(place: PathLike) -> Path | ObjectPath:
    """Of a file, or of an object at a URL. Raises InvalidArgument."""
    return ObjectPath.of(str(place)) if is_object_url(place) else path_of(place, f", or {FORMS}")


def place_to_save(place: PathLike) -> Path | ObjectPath:
    """Raises InvalidArgument also where it cannot be written, and for a suffix behind which readers expect
    what torch.save writes."""
    found = place_of(place)
    if isinstance(found, ObjectPath):
        found.bucket.require_writable()
    if found.suffix.lower() in TORCH_SUFFIXES:
        name = os.path.splitext(found.name)[0] + OWN_SUFFIXES[0]
        raise InvalidArgument(
            f"{found} would not be a file of torch.save, as {found.suffix} says, but of safetensors: name it "
            f"{name}, of which penstock.checkpoint.convert makes one of torch.save"
        )
    return found


class _OpenPath(files.Closing):
    """A file that is read. One that replaces it meanwhile is not seen. Raises CheckpointError."""

    def __init__(self, path: Path, io: IoOptions | None, follow_links: bool) -> None:
        self._path, self._io = path, io
        try:
            descriptor = files.open_regular(path, 0 if follow_links else os.O_NOFOLLOW)
            self.size_bytes = os.fstat(descriptor.fileno()).st_size
            self.opened = files.from_descriptor(descriptor, os.fspath(path))
        except OSError as error:
            raise cannot_read(path, error) from error

    @property
    def way(self) -> IoPath:
        return io_path("read", self._path, self.size_bytes, self._io)

    def read(self, begin: int, end: int) -> bytes:
        data = b""
        try:
            while begin + len(data) < end:
                more = os.pread(self.opened.file.buffered, end - begin - len(data), begin + len(data))
                if not more:
                    raise os_error(errno.EIO)  # the file became shorter
                data += more
        except OSError as error:
            raise cannot_read(self._path, error, begin + len(data)) from error
        return data

    def failure(self, error_number: int, offset: int, tensors: str) -> CheckpointError:
        return cannot_read(self._path, os_error(error_number), offset, tensors)

    def sibling(self, name: str) -> Path:
        return Path(os.path.realpath(self._path)).with_name(name)

    def close(self) -> None:
        self.opened.close()


class Volume(NamedTuple):
    """A file that holds tensors of a checkpoint: the entries of its header with these indexes."""

    source: CheckpointSource
    indexes: Sequence[int]


class CheckpointSource(files.Closing):
    """A checkpoint, open for reading. A context manager.

    is_object   it lies at a URL, and cannot be mapped

    It is opened once: one that replaces it meanwhile is not seen. Raises CheckpointError where there is
    none, or it cannot be read.
    """

    def __init__(
        self, path: PathLike | ObjectPath, io: IoOptions | None = None, *, follow_links: bool = True
    ) -> None:
        """``io``: says by which I/O path a file is read past the page cache; see `io_path`."""
        self.path, self._io = path if isinstance(path, ObjectPath) else place_of(path), io
        self.is_object = isinstance(self.path, ObjectPath)
        self._others: list[CheckpointSource] = []
        self._open: OpenObject | _OpenPath
        if isinstance(self.path, ObjectPath):
            self._open = OpenObject(self.path, io)
        else:
            self._open = _OpenPath(self.path, io, follow_links)
        self.size_bytes, self.opened, self.file = (
            self._open.size_bytes,
            self._open.opened,
            self._open.opened.file,
        )
        self.failure = self._open.failure
        try:
            self._beginning = self._open.read(0, min(_BEGINNING_BYTES, self.size_bytes))
        except BaseException:
            self.close()
            raise

    @property
    def way(self) -> IoPath:
        return self._open.way

    @property
    def is_torch(self) -> bool:
        """Raises InvalidArgument where it is, and lies at a URL."""
        is_zip = self._beginning.startswith(_ZIP)
        if is_zip and self.is_object:
            raise InvalidArgument(
                f"{self.path} is a file of torch.save: copy it to a disk, and load it there"
            )
        return is_zip

    def raw_header(self) -> bytes:
        """The bytes before the data."""
        return self._open.read(0, self.header.data_offset)

    @cached_property
    def header(self) -> Header:
        """What the file holds. Raises InvalidCheckpoint where it is none, or its header is damaged."""
        self._refuse_other_formats()
        length = header_bytes(self._beginning[:8], self.size_bytes, str(self.path))
        data = self._beginning[:length]
        if len(data) < length:
            data += self._open.read(len(data), length)
        return decode(data, self.size_bytes, str(self.path))

    @cached_property
    def volumes(self) -> tuple[Volume, ...]:
        """The files that hold the tensors: this one, and for an increment those that its header names.

        Raises InvalidCheckpoint where one of them is not there, or does not hold what is wanted of it.
        """
        wanted: dict[str, list[TensorEntry]] = {}
        for file, entry in self.header.elsewhere:
            wanted.setdefault(file, []).append(entry)
        own = Volume(self, range(len(self.header.entries)))
        return own, *(self._volume(file, entries) for file, entries in wanted.items())

    @property
    def entries(self) -> list[TensorEntry]:
        """All tensors, in the order of the volumes. They lie in the data section of their volume's file."""
        return [volume.source.header.entries[i] for volume in self.volumes for i in volume.indexes]

    def _volume(self, file: str, wanted: Sequence[TensorEntry]) -> Volume:
        path = self._open.sibling(file)
        try:
            other = CheckpointSource(path, self._io, follow_links=False)
            self._others.append(other)
            held = {entry: index for index, entry in enumerate(other.header.entries)}
        except CheckpointError as error:
            problem = os.strerror(error.errno) if error.errno else "it is damaged"
            not_whole = self._not_whole(wanted, f"lie in {path}, which cannot be read ({problem})")
            raise with_errno(not_whole, error.errno) from error
        if all(entry.sum64 is None for entry in held):  # it was converted: the rest says enough
            wanted = [entry._replace(sum64=None) for entry in wanted]
        if missing := [entry for entry in wanted if entry not in held]:
            raise self._not_whole(missing, f"are not in {path} as they were: it is another file by now")
        return Volume(other, [held[entry] for entry in wanted])

    def _not_whole(self, entries: Sequence[TensorEntry], problem: str) -> InvalidCheckpoint:
        names = shown([entry.name for entry in entries])
        return InvalidCheckpoint(
            f"{self.path} is not whole: its tensors {names} {problem}. Put that file back, or load another "
            "checkpoint."
        )

    @property
    def is_cached(self) -> bool:
        """The page cache holds nearly all of the files."""
        return not self.is_object and all(
            cached_share(volume.source.file.buffered) >= _CACHED_SHARE
            for volume in self.volumes
            if volume.indexes
        )

    def read_ahead(self) -> None:
        with contextlib.suppress(OSError):  # it is only advice
            os.posix_fadvise(self.file.buffered, 0, 0, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        for each in (self._open, *self._others):
            each.close()

    def _refuse_other_formats(self) -> None:
        beginning = self._beginning
        if not beginning:
            raise InvalidCheckpoint(f"{self.path} is empty: it was never written. Load another checkpoint.")
        if beginning[:1] == b"\x80" and beginning[1:2] in b"\x02\x03\x04\x05" and beginning[8:9] != b"{":
            raise InvalidCheckpoint(
                f"{self.path} is a pickle, as torch.save wrote them before version 1.6: pickles can run any "
                "code, and are not loaded. If you trust the file, convert it once: "
                "penstock.save(torch.load(path, weights_only=False), new_path)."
            )
