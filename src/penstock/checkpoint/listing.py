"""The checkpoints of one directory: which there are, whether they are whole, and who may change them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.checkpoint.failures import cannot_read, cannot_write
from penstock.checkpoint.header import Reference
from penstock.checkpoint.remote import ObjectPath, failed
from penstock.checkpoint.replace import remove_stale
from penstock.checkpoint.source import CheckpointSource, PathLike, path_of
from penstock.core.files import sync_folder
from penstock.errors import CheckpointError
from penstock.storage.objects import FORMS, Bucket, ObjectError, is_object_url

_LOCK = ".penstock.lock"

# Objects' names end with what makes them unique.
_NAME = re.compile(r"step-([0-9]{10,18})(-[0-9a-f]{8})?\.safetensors")

# Errors that say nothing about the checkpoint.
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ETIMEDOUT)


@dataclass(frozen=True)
class Saved:
    """A checkpoint in a directory.

    step           that it was saved as
    path           give it to `penstock.load`
    size_bytes     of its file alone
    tensor_bytes   of all its tensors
    elsewhere      the files beside it that hold some of them
    problem        why it cannot be loaded; empty where it is whole
    """

    step: int
    path: str
    size_bytes: int
    tensor_bytes: int = 0
    elsewhere: tuple[str, ...] = ()
    problem: str = ""


def ls(directory: PathLike) -> list[Saved]:
    """The checkpoints in the directory of a `Manager`, or under its URL, by step. Their headers are read, not
    their tensors.

    Raises CheckpointError where it cannot be read.
    """
    folder = folder_of(directory)
    return [look_at(folder.at(name))[0] for name in folder.identities()]


def folder_of(directory: PathLike) -> CheckpointFolder | CheckpointObjects:
    """Raises InvalidArgument."""
    return (
        CheckpointObjects(str(directory))
        if is_object_url(directory)
        else CheckpointFolder(path_of(directory, f", or {FORMS}"))
    )


def look_at(path: Path | ObjectPath) -> tuple[Saved, CheckpointSource | None]:
    """The checkpoint at ``path``, which has a name of `CheckpointFolder.name_of`; where it is whole also its
    source, closed.

    Raises CheckpointError where the next attempt may well find it whole.
    """
    step = _step_of(path.name)
    try:
        with CheckpointSource(path) as source:
            elsewhere = tuple(volume.source.path.name for volume in source.volumes[1:])
            tensor_bytes = sum(entry.size_bytes for entry in source.entries)
            return Saved(step, str(path), source.size_bytes, tensor_bytes, elsewhere), source
    except CheckpointError as error:
        if error.errno in _PASSING:
            raise
        return Saved(step, str(path), 0, problem=str(error)), None


def references_to(source: CheckpointSource) -> dict[str, Reference]:
    """Its tensors by name, as another checkpoint of the same folder can refer to them."""
    return {
        entry.name: Reference(volume.source.path.name, entry)
        for volume in source.volumes
        for entry in map(volume.source.header.entries.__getitem__, volume.indexes)
    }


def referring_to(path: Path) -> list[str]:
    """The checkpoints beside this one that have tensors in it. Raises CheckpointError."""
    if not _NAME.fullmatch(path.name) or not path.exists():
        return []
    return [each.path for each in ls(path.parent) if path.name in each.elsewhere]


class CheckpointFolder:
    """A directory with checkpoints. `CheckpointObjects` has the same methods."""

    is_exclusive = True  # from `acquire` on nobody else removes anything

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = -1

    def __del__(self) -> None:
        self.release()

    @staticmethod
    def name_of(step: int) -> str:
        return f"step-{step:010d}.safetensors"

    def at(self, name: str) -> Path:
        return self.path / name

    def identities(self) -> dict[str, object]:
        """By name, what is another where a file is another one, by step. Raises CheckpointError."""
        found: dict[str, object] = {}
        try:
            with os.scandir(self.path) as entries:
                for entry in entries:
                    if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        found[entry.name] = (status.st_ino, status.st_size, status.st_mtime_ns)
        except OSError as error:
            raise cannot_read(self.path, error) from error
        return _by_step(found)

    def remove(self, name: str) -> None:
        """Raises OSError."""
        os.unlink(self.path / name)

    def acquire(self) -> None:
        """Make the directory where it is not there, and be the only one that changes it, until `release` or
        the end of the process. What killed processes left there is removed.

        Raises CheckpointError, also where another has it.
        """
        self.path = self.path.absolute()  # the same one wherever the process goes
        try:
            if not self.path.is_dir():
                os.makedirs(self.path)
                sync_folder(self.path.parent)
            # A file: NFS locks no directories.
            self._lock = os.open(
                self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666
            )
            _held.add(self)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.release()
            if error.errno == errno.EWOULDBLOCK:
                raise CheckpointError(
                    f"another manager has {self.path}: close it, end its process, or give another directory. "
                    "penstock.checkpoint.ls looks at the checkpoints there meanwhile"
                ) from None
            if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                raise CheckpointError(
                    f"the file system of {self.path} has no locks, without which two managers could remove "
                    "each other's files: mount it with locks (flock), or give a directory on another one"
                ) from None
            raise cannot_write(self.path / self.name_of(0), error, 0) from error
        remove_stale(self.path, lambda name: _NAME.fullmatch(name) is not None)

    @property
    def is_held(self) -> bool:
        """Between `acquire` and `release`, not in a child of fork, and while nobody removes the file of the
        lock: another manager could lock another one."""
        try:
            return self._lock >= 0 and os.path.samestat(
                os.fstat(self._lock), os.stat(self.path / _LOCK, follow_symlinks=False)
            )
        except OSError:
            return False

    def release(self, *, in_child: bool = False) -> None:
        lock, self._lock = self._lock, -1
        if lock >= 0:
            with contextlib.suppress(OSError):  # closing it lets go as well, where no child has it open
                if not in_child:  # of fork: its parent's lock is the same one
                    fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)


class CheckpointObjects:
    """The checkpoints under a URL. A name is never used twice: two managers overwrite nothing of each
    other's, but one may remove what the other refers to."""

    is_exclusive = False
    is_held = True

    def __init__(self, url: str) -> None:
        self.path = Bucket(url)

    @staticmethod
    def name_of(step: int) -> str:
        return f"step-{step:010d}-{secrets.token_hex(4)}.safetensors"

    def at(self, name: str) -> ObjectPath:
        return ObjectPath(self.path.url_of(name), self.path)

    def identities(self) -> dict[str, object]:
        try:
            return _by_step(
                {name: found for name, found in self.path.listed().items() if _NAME.fullmatch(name)}
            )
        except ObjectError as error:
            raise failed(error) from error

    def remove(self, name: str) -> None:
        self.path.delete([name])

    def acquire(self) -> None:
        """Nothing is locked."""

    release = acquire


def _by_step(found: Mapping[str, object]) -> dict[str, object]:
    return {name: found[name] for name in sorted(found, key=lambda name: (_step_of(name), name))}


def _step_of(name: str) -> int:
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1])


# A child of fork would keep the lock after its parent has ended.
_held: weakref.WeakSet[CheckpointFolder] = weakref.WeakSet()


def _release_in_child() -> None:
    for folder in list(_held):
        folder.release(in_child=True)


os.register_at_fork(after_in_child=_release_in_child)
