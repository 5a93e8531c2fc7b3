"""Samples as files again.

Names come from whoever packed the store: none may lead out of the folder they are written to.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote_from_bytes

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidArgument, InvalidFile, SampleError
from penstock.samples.layout import DIRECTORY, bytes_of, text_of
from penstock.samples.manifest import AGAIN
from penstock.samples.places import Progress, reporter
from penstock.samples.store import Store, mount
from penstock.storage.files import Closing
from penstock.storage.nvme.url import is_url

Bytes: TypeAlias = "bytes | bytearray | memoryview"

BATCH_BYTES = 32 << 20
BATCH_SAMPLES = 4096
LARGEST_PART_BYTES = 255  # of a path, on Linux file systems

Wanted: TypeAlias = "range | npt.NDArray[np.int64]"  # all samples, or some

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_PLAIN = b" !#$&'()+,;=@[]^_`{}~-."  # that a flat name keeps


def unpack(
    path: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    names: Sequence[str] | None = None,
    *,
    flat: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> int:
    """Write samples of the store at ``path`` to files in the folder ``dest``, by their names.

    path        of a store, or the URL of a namespace that has one
    names       which; None: all
    flat        no folders below ``dest``: a name becomes one file name, in which / and % and what else a
                file name should not have is written as in a URL, %2F
    overwrite   replace files that are there
    progress    called now and then with the samples and the bytes that were written so far

    Samples of fields become a folder each: a file for each field of bytes, ``FIELD.npy`` for each array, and
    ``fields.json`` for all others. A file appears under its name once it is whole. Links in ``dest`` are not
    followed. Returns how many samples were written.

    Raises SampleError before anything is written where a name cannot be that of a file in ``dest``, or one
    name is the folder of another; later where a file is in the way, or the disk fails or is full. Raises
    InvalidFile for damaged samples, InvalidArgument for names that the store does not have.
    """
    if is_url(dest):
        raise InvalidArgument(f"{dest} is not a local folder: samples are unpacked to one")
    report = reporter(progress)
    with mount(path, order="full") as store:
        indices = range(len(store)) if names is None else store.indices(names)
        _check_names(store, indices, flat)
        written = size_bytes = 0
        with _FileWriter(Path(dest), overwrite) as writer:
            for batch in _batches(store, indices):
                for at, data in zip(batch.tolist(), store.read_many(batch), strict=True):
                    place = _place(store.name(at), flat)
                    if store.encoding == "raw":
                        writer.write(place, data)
                    else:
                        writer.write_fields(place, store.decoder.sample(data))
                    size_bytes += len(data)
                written += len(batch)
                report(written, size_bytes)
    return written


def _batches(store: Store, indices: Wanted) -> Iterator[npt.NDArray[np.int64]]:
    """All indices in order, in batches that fit in memory: one sample at least."""
    left_bytes = sum(manifest.size_bytes for manifest in store.manifests)
    for block in _blocks(indices):
        sizes = store.sizes(block)
        left_bytes -= int(sizes.sum()) if isinstance(indices, range) else 0
        if left_bytes < 0:
            raise InvalidFile(f"{DIRECTORY} gives samples more bytes than the store has. {AGAIN}")
        cuts = np.cumsum(sizes) // BATCH_BYTES
        yield from np.split(block, np.flatnonzero(np.diff(cuts)) + 1)


def _blocks(indices: Wanted) -> Iterator[npt.NDArray[np.int64]]:
    for begin in range(0, len(indices), BATCH_SAMPLES):
        yield np.asarray(indices[begin : begin + BATCH_SAMPLES], np.int64)


def _place(name: str, flat: bool) -> tuple[bytes, ...]:
    """The parts of the path of a sample, in the folder that it is written to."""
    encoded = bytes_of(name)
    if not flat:
        return tuple(encoded.split(b"/"))
    quoted = quote_from_bytes(encoded, safe=_PLAIN).encode()
    return (quoted.replace(b".", b"%2E") if quoted in (b".", b"..") else quoted,)


def _check_names(store: Store, indices: Wanted, flat: bool) -> None:
    """Raises SampleError for a name that can be no file's, or that is also the folder of another."""

    def places() -> Iterator[tuple[str, tuple[bytes, ...]]]:
        for block in _blocks(indices):
            for name in store.names_of(block):
                yield name, _place(name, flat)

    def refused(name: str, reason: str) -> SampleError:
        return SampleError(f"sample {name!r} {reason}: nothing was written. Unpack with flat names (--flat)")

    folders: set[tuple[bytes, ...]] = set()
    for name, place in places():
        if reason := _refusal(place):
            raise refused(name, reason)
        if len(place) > 1 and place[:-1] not in folders:
            folders.update(place[:length] for length in range(1, len(place)))
    for name, place in places() if folders else ():
        if place in folders:
            raise refused(name, "would be a file, and also the folder of others")


def _refusal(place: tuple[bytes, ...]) -> str | None:
    for part in place:
        if part in (b"", b".", b".."):
            return "would not be written into the folder" if part else "has an empty part, or none"
        if b"\0" in part:
            return "has a NUL in its name"
        if len(part) > LARGEST_PART_BYTES:
            return f"has a part of {len(part)} bytes in its name; file systems take {LARGEST_PART_BYTES}"
    return None


class _FileWriter(Closing):
    """Writes files below a folder, never through links. Keeps the last folder open."""

    def __init__(self, dest: Path, overwrite: bool) -> None:
        self._dest, self._overwrite = dest, overwrite
        self._draft = f".penstock-{secrets.token_hex(8)}".encode()
        try:
            dest.mkdir(parents=True, exist_ok=True)
            self._root = os.open(dest, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise SampleError(f"{dest} cannot be written to: {error.strerror}") from error
        self._folder: tuple[bytes, ...] = ()  # the last one
        self._descriptor = self._root

    def close(self) -> None:
        self._leave()
        os.close(self._root)

    def write(self, place: tuple[bytes, ...], data: Bytes) -> None:
        try:
            self._write(place, data)
        except OSError as error:
            raise _failure(self._dest.joinpath(*map(os.fsdecode, place)), error) from error

    def write_fields(self, place: tuple[bytes, ...], sample: Any) -> None:
        """One folder for the sample, a map of fields: see `unpack`."""
        others = {}
        for field, value in sample.items():
            if isinstance(value, bytes | bytearray | memoryview):
                self._write_field(place, field, value)
            elif isinstance(value, np.ndarray):
                file = io.BytesIO()
                np.save(file, value, allow_pickle=False)
                self._write_field(place, f"{field}.npy", file.getbuffer())
            else:
                others[field] = value
        if others or not sample:
            self.write((*place, b"fields.json"), msgspec.json.encode(others, enc_hook=_plain))

    def _write_field(self, place: tuple[bytes, ...], field: str, data: Bytes) -> None:
        name = bytes_of(field)
        if b"/" in name or name == b"fields.json" or _refusal((name,)):
            sample = text_of(b"/".join(place))
            raise SampleError(
                f"field {field!r} of sample {sample!r} cannot be a file name. Read the store with "
                "penstock.samples.mount instead"
            )
        self.write((*place, name), data)

    def _write(self, place: tuple[bytes, ...], data: Bytes) -> None:
        folder = self._enter(place[:-1])
        draft = os.open(self._draft, _NEW_FILE, 0o666, dir_fd=folder)
        try:
            try:
                view = memoryview(data)
                while len(view):
                    view = view[os.write(draft, view) :]
            finally:
                os.close(draft)
            if not self._overwrite:
                with contextlib.suppress(FileNotFoundError):
                    os.stat(place[-1], dir_fd=folder, follow_symlinks=False)
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            os.rename(self._draft, place[-1], src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.unlink(self._draft, dir_fd=folder)
            raise

    def _enter(self, folder: tuple[bytes, ...]) -> int:
        """A descriptor of the folder, which is made where missing."""
        if self._folder == folder:
            return self._descriptor
        self._leave()
        descriptor = os.dup(self._root)
        try:
            for part in folder:
                try:
                    below = os.open(part, _FOLDER, dir_fd=descriptor)
                except FileNotFoundError:
                    os.mkdir(part, dir_fd=descriptor)
                    below = os.open(part, _FOLDER, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = below
        except BaseException:
            os.close(descriptor)
            raise
        self._folder, self._descriptor = folder, descriptor
        return descriptor

    def _leave(self) -> None:
        if self._descriptor != self._root:
            os.close(self._descriptor)
        self._folder, self._descriptor = (), self._root


def _failure(path: Path, error: OSError) -> SampleError:
    remedies = {
        errno.EEXIST: "Remove it, unpack to another folder, or let it be replaced (--overwrite)",
        errno.ENOSPC: "Free space, and unpack again with --overwrite",
        errno.EDQUOT: "Free space, and unpack again with --overwrite",
        errno.ENOTDIR: "A file or a link is in the way of a folder: remove it, or unpack to another folder",
        errno.ELOOP: "A link is in the way of a folder: remove it, or unpack to another folder",
    }
    remedy = remedies.get(error.errno or 0, "Unpack to another folder")
    return SampleError(f"{path} cannot be written: {error.strerror}. {remedy}")


def _plain(value: Any) -> Any:
    """What JSON has no word for, inside lists and maps."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise SampleError(f"a {type(value).__name__} cannot be written as JSON")
