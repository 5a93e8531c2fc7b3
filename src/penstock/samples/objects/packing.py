"""Packing a store below a URL: each data file is sent once it is whole, and then leaves this machine."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from penstock.errors import InvalidArgument, SampleError
from penstock.samples import layout, progress
from penstock.samples.manifest import StoreManifest
from penstock.samples.objects.claim import NOTE, PART_BYTES, Claim
from penstock.samples.objects.place import as_sample_errors
from penstock.samples.writing import Background, restored
from penstock.storage.files import Closing
from penstock.storage.objects import Bucket, ObjectInfo

DATA_FILE_BYTES = 1 << 30  # of a store that is packed below a URL, unless told otherwise

_AGAIN = ". Pack again with the same arguments: it goes on where it stopped"
_WAITING = 1  # data files that are whole and wait, while one is sent


def staging_path(url: str) -> Path:
    """Where the files of a store that is packed to ``url`` wait: the same for each call."""
    name = f"penstock-packing-{os.geteuid()}-{hashlib.sha256(url.encode()).hexdigest()[:16]}"
    return Path(tempfile.gettempdir()) / name


def make_private(folder: Path) -> None:
    """Make a folder of this user's alone, if it is not there. Raises SampleError where it cannot be had."""
    user = os.geteuid()
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise SampleError(f"cannot make {folder}: {error.strerror}. Give staging= (--staging)") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != user or found.st_mode & 0o077:
        raise SampleError(f"{folder} is not a private folder of this user: give staging= (--staging)")


class Sending(Closing):
    """Sends the files of one store. A context manager.

    bucket          of the store, or of the partition
    overwrite       replace the store that is there
    removes_folder  from which files are sent, once nothing is left in it
    sent_bytes      so far

    Its functions raise SampleError.
    """

    def __init__(self, bucket: Bucket, *, overwrite: bool = False, removes_folder: bool = True) -> None:
        self._bucket, self._overwrite = bucket, overwrite
        self.removes_folder = removes_folder
        self._folder = Path()
        self._put: set[str] = set()
        self._sent: list[str] = []
        self.sent_bytes = 0
        self._is_broken_off = threading.Event()
        self._thread = Background(f"sending to {bucket}", _WAITING, progress=lambda: self.sent_bytes)

    def begin(self, folder: Path, done: progress.Packing) -> None:
        """Send from the folder, which is locked, and where ``done`` is durable.

        Raises SampleError, before anything is changed, where another store is there, or another packing, or
        not all that was sent.
        """
        self._folder = folder
        with as_sample_errors():
            self._claim = claim = Claim(self._bucket, done.id.encode())
            if not self._overwrite:
                claim.check_free()
            kept = _sent_before(folder, done)
            for name, size_bytes in kept.items():
                self._require(name, size_bytes, claim.there if claim.is_held else {})
            claim.take(kept.keys())

    def _require(self, name: str, size_bytes: int, there: Mapping[str, ObjectInfo]) -> None:
        if name not in there or there[name].size_bytes != size_bytes:
            raise SampleError(
                f"{self._bucket.url_of(name)}, which was sent, is not there any more, or another: pack with "
                "resume=False"
            )

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
        """Send what is left, the manifest last."""
        self._thread.drain()
        with as_sample_errors():
            there = self._bucket.listed()
        for name, size_bytes in manifest.file_sizes.items():
            is_there = name in self._put and name in there and there[name].size_bytes == size_bytes
            if not (self._folder / name).exists():
                self._require(name, size_bytes, there)
            elif not is_there:
                self._send(name)
        self._send(layout.MANIFEST)
        self._claim.give_up()

    def break_off(self) -> None:
        """What is being sent leaves nothing, and what waits is not sent. Does not wait."""
        self._is_broken_off.set()

    def close(self) -> None:
        """Break off what is being sent, and end the thread. Idempotent."""
        self.break_off()
        self._thread.close()

    def _send(self, name: str) -> None:
        path = self._folder / name
        with as_sample_errors(_AGAIN):
            self._claim.write(name, self._parts(path), path.stat().st_size)
        self._sent.append(name)

    def _parts(self, path: Path) -> Iterator[bytes]:
        with open(path, "rb") as file:
            while part := file.read(PART_BYTES):
                if self._is_broken_off.is_set():
                    raise SampleError(f"{path} was not sent to the end")
                yield part
                self.sent_bytes += len(part)


def _sent_before(folder: Path, done: progress.Packing) -> dict[str, int]:
    """The data files that are whole and not in the folder any more, and their bytes. Raises SampleError."""
    if not done.samples:
        return {}
    sizes = {
        layout.data_file_name(number): chunks * done.recipe.chunk_bytes
        for number, (_, chunks, _) in enumerate(restored(folder, done).whole_data_files)
    }
    return {name: size_bytes for name, size_bytes in sizes.items() if name not in done.files}


def check_partitions(bucket: Bucket, world_size: int) -> None:
    """Raises InvalidArgument where there is a store, or one is being written, or partitions of another
    number."""
    with as_sample_errors():
        if not {layout.MANIFEST, NOTE}.isdisjoint(bucket.listed()):
            raise InvalidArgument(f"{bucket} is a store without partitions: choose another prefix")
        folders = bucket.folders()
    for name in folders:
        found = layout.PARTITION.fullmatch(name)
        if found is not None and int(found[2]) != world_size:
            raise InvalidArgument(
                f"{bucket} holds {name!r}, which is not a partition of a store of {world_size}: choose "
                "another prefix"
            )
