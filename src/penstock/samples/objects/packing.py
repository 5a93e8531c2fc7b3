"""Packing a store below a URL: each data file is sent once it is whole, and then leaves this machine."""

from __future__ import annotations

import hashlib
import os
import platform
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec

from penstock.errors import InvalidArgument, SampleError
from penstock.samples import layout, progress
from penstock.samples.manifest import StoreManifest
from penstock.samples.objects.place import as_sample_errors
from penstock.samples.objects.upload import NOTE, PART_BYTES, manifests, write
from penstock.samples.writing import Background
from penstock.storage.files import Closing
from penstock.storage.objects import Bucket

DATA_FILE_BYTES = 1 << 30  # of a store that is packed below a URL, unless told otherwise

_AGAIN = "Pack again with the same arguments: it goes on where it stopped"
_WAITING = 1  # data files that are whole and wait, while one is sent


def staging_folder(url: str) -> Path:
    """A private folder for the files of a store that is packed to ``url``: the same one at each call.

    Raises SampleError where it cannot be had.
    """
    user = os.geteuid()
    name = f"penstock-packing-{user}-{hashlib.sha256(url.encode()).hexdigest()[:16]}"
    folder = Path(tempfile.gettempdir()) / name
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise SampleError(f"cannot make {folder}: {error.strerror}. Give staging= (--staging)") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != user or found.st_mode & 0o077:
        raise SampleError(f"{folder} is not a private folder of this user: give staging= (--staging)")
    return folder


class Sending(Closing):
    """Sends the files of one store. A context manager.

    bucket     of the store, or of the partition
    folder     where packing writes them
    recipe     of the packing. One with the same recipe and folder goes on
    overwrite  replace the store that is there
    resume     go on where sending was interrupted

    Its functions raise SampleError; so does the constructor, where another store is there.
    """

    def __init__(
        self, bucket: Bucket, folder: Path, recipe: progress.Recipe, *, overwrite: bool, resume: bool
    ) -> None:
        self._bucket, self._folder = bucket, folder
        self._put: set[str] = set()
        self._sent: list[str] = []
        self._is_closed = threading.Event()
        self._thread = Background(f"sending to {bucket}", _WAITING)
        packing = progress.read(folder) if resume else None
        with as_sample_errors():
            goes_on = packing is not None and packing.samples > 0
            self._begin(self._packing_id(recipe), overwrite, goes_on)

    def _packing_id(self, recipe: progress.Recipe) -> bytes:
        """Says whose packing it is."""
        who = [platform.node(), os.path.realpath(self._folder)]
        return hashlib.sha256(msgspec.json.encode([who, recipe])).digest()[:16]

    def _begin(self, note: bytes, overwrite: bool, goes_on: bool) -> None:
        there = self._bucket.listed()
        ours = [name for name in there if layout.UPLOADED.fullmatch(name)]
        is_same = NOTE in there and bytes(self._bucket.read(NOTE)) == note
        if ours and not is_same and not overwrite:
            whole = any(name.endswith(layout.MANIFEST) for name in ours)
            what = "is already a store" if whole else "holds a part of another store"
            raise SampleError(
                f"{self._bucket} {what}: nothing was written. Give another prefix, or replace it with "
                "overwrite=True (--overwrite)"
            )
        if is_same and goes_on:
            return
        self._bucket.delete(manifests(ours))  # what nobody can mount any more may be replaced
        self._bucket.write(NOTE, note)
        self._bucket.delete(ours)

    def put(self, name: str) -> None:
        """Send a data file that is whole and durable. Waits where others wait."""
        if name not in self._put:
            self._put.add(name)
            self._thread.put(lambda: self._send(name))

    def take_sent(self) -> list[str]:
        """The data files that are there now, and were not before. They may leave the folder."""
        sent, self._sent = self._sent, []
        return sent

    def finish(self, manifest: StoreManifest) -> None:
        """Send what is left, the manifest last; then the folder is empty, but for what says how to go on."""
        self._thread.drain()
        with as_sample_errors():
            there = self._bucket.listed()
        sizes = manifest.file_sizes
        for name in set(sizes).difference(os.listdir(self._folder)):
            if name not in there or there[name].size_bytes != sizes[name]:
                raise SampleError(
                    f"{self._bucket.url_of(name)}, which was sent, is not there any more, or another: pack "
                    "with resume=False"
                )
        for name in [*sizes, layout.MANIFEST]:
            if name not in self._put and (self._folder / name).exists():
                self._send(name)
        with as_sample_errors():
            self._bucket.delete([NOTE])

    def close(self) -> None:
        """What is being sent is broken off, and leaves nothing. Idempotent."""
        self._is_closed.set()
        self._thread.close()

    def _send(self, name: str) -> None:
        path = self._folder / name
        try:
            with as_sample_errors():
                write(self._bucket, name, self._parts(path), path.stat().st_size)
        except SampleError as error:
            raise SampleError(f"{error}. {_AGAIN}") from error
        self._sent.append(name)

    def _parts(self, path: Path) -> Iterator[bytes]:
        with open(path, "rb") as file:
            while part := file.read(PART_BYTES):
                if self._is_closed.is_set():
                    raise SampleError(f"{path} was not sent to the end")
                yield part


def check_partitions(bucket: Bucket, world: int) -> None:
    """Raises InvalidArgument where there is a store, or partitions of another number."""
    with as_sample_errors():
        if layout.MANIFEST in bucket.listed():
            raise InvalidArgument(f"{bucket} is a store without partitions: choose another prefix")
        folders = bucket.folders()
    for name in folders:
        found = layout.PARTITION.fullmatch(name)
        if found is not None and int(found[2]) != world:
            raise InvalidArgument(
                f"{bucket} holds {name!r}, which is not a partition of a store of {world}: choose another "
                "prefix"
            )
