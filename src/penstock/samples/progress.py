"""How far packing has come: `packing.json`, which is in a store's folder until the store is whole."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.core import files
from penstock.errors import InvalidArgument, InvalidFile, SampleError
from penstock.samples import layout
from penstock.samples.manifest import Field, FileSum, Sealed

logger = logging.getLogger("penstock")

PROGRESS = "packing.json"
# A file system without locks, or one that locks only what is open for writing.
_NO_LOCKS = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

_NAMES = {*layout.FILES, layout.MANIFEST, PROGRESS}
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_DATA = re.compile(r"data-\d{5}\.bin")
# Left by a killed process; those with "next" by one of an earlier version.
_DRAFT = re.compile(r"\.(store\.json|packing\.(json|next))\.\d+\.\d+|packing\.next")


# The file keeps its earlier names.
_IN_THE_FILE = {"data_file_bytes": "node_bytes", "partition": "part", "partitions": "parts"}


class PackingSettings(msgspec.Struct, frozen=True, kw_only=True, rename=_IN_THE_FILE):
    """What decides the bytes of a store, besides the samples. Packing goes on only with the same.

    samples, size_bytes   of the source, where it knows them beforehand
    """

    chunk_bytes: int
    data_file_bytes: int
    encoding: str
    fields: tuple[Field, ...]
    classes: tuple[str, ...]
    partition: int
    partitions: int
    samples: int | None
    size_bytes: int | None


class Packing(Sealed, frozen=True, kw_only=True):
    """A store that is being written: what of it is durable, before this is saved.

    id           drawn when the packing was begun: its objects below a URL are known by it
    samples      that are packed
    size_bytes   of them
    files        by name, how much of each file they fill, and its CRC-32C (0 for data files)
    state        of the builder
    crc32c       of this value's JSON text with this field 0
    """

    recipe: PackingSettings
    id: str = msgspec.field(default_factory=lambda: secrets.token_hex(16))
    samples: int = 0
    size_bytes: int = 0
    files: dict[str, FileSum] = msgspec.field(default_factory=dict)
    state: bytes = b""
    crc32c: int = 0


def read(folder: Path) -> Packing | None:
    """How far packing into ``folder`` has come; None where there is none. Raises SampleError."""
    path = folder / PROGRESS
    try:
        packing = files.load(Packing, path)
    except FileNotFoundError:
        return None
    except InvalidFile as error:
        raise SampleError(f"{error}. Remove {folder}, or pass resume=False to pack it anew") from error
    if not packing.is_sealed():
        raise SampleError(
            f"{path} is damaged: its checksum is wrong. Remove {folder}, or pass resume=False to pack it anew"
        )
    return packing


class PackingFolder(NamedTuple):
    """A folder that this process alone packs into.

    folder     to write into
    done       what is already in it, durable
    replaces   the store whose place the folder takes once it is whole
    """

    folder: Path
    done: Packing
    replaces: Path | None = None

    def publish(self) -> None:
        """Put the whole store in its place, in one step. Raises SampleError; the old store then stays."""
        if self.replaces is None:
            return
        try:
            shutil.copymode(self.replaces, self.folder)
            _exchange(self.folder, self.replaces)
            files.sync_folder(self.replaces.parent)
        except OSError as error:
            raise SampleError(
                f"cannot put {self.folder} in the place of {self.replaces}: {error.strerror}. Both are whole "
                "stores: exchange them yourself, or pack to a new folder"
            ) from error
        try:
            empty(self.folder, layout.MANIFEST)
            self.folder.rmdir()
        except OSError as error:
            logger.warning(
                "%s, a store that was replaced, cannot be removed: %s", self.folder, error.strerror
            )


@contextlib.contextmanager
def lock_folder(
    folder: Path, recipe: PackingSettings, *, resume: bool, overwrite: bool
) -> Iterator[PackingFolder]:
    """The folder for this process alone, or a hidden one beside it where it has a store to be replaced.

    Raises InvalidArgument where the folder is not one to write into, SampleError where another process
    packs into it, or it cannot be written, or what it has was packed in another way.
    """
    with _locked(folder):
        if not overwrite or not (folder / layout.MANIFEST).exists():
            yield PackingFolder(folder, _prepare(folder, recipe, resume, overwrite))
            return
        folder = Path(os.path.realpath(folder))
        _check_names(folder, sorted(os.listdir(folder)), overwrite)
        beside = folder.with_name(f".{folder.name}.packing")
        with _locked(beside):
            _check_exchange(beside, folder)
            (folder / PROGRESS).unlink(missing_ok=True)  # of a packing that ended: the store is whole
            yield PackingFolder(beside, _prepare(beside, recipe, resume, overwrite), folder)


def empty(folder: Path, last: str) -> None:
    """Remove the files of a store, ``last`` after the others: what is left by a killed process is then known
    to be ours. Raises OSError."""
    for name in sorted(filter(_ours, os.listdir(folder)), key=last.__eq__):
        os.unlink(folder / name)


def _exchange(one: Path, other: Path) -> None:
    """Exchange two files or folders in one step. Raises OSError."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    code = errno.ENOSYS
    if rename is not None:
        if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
            return
        code = ctypes.get_errno()
    raise OSError(code, os.strerror(code))


def _check_exchange(beside: Path, folder: Path) -> None:
    """Raises SampleError where a store cannot be replaced in one step: before the work, not after it."""
    probes = [beside / f".{PROGRESS}.{os.getpid()}.{number}" for number in (0, 1)]
    try:
        for probe in probes:
            probe.touch()
        _exchange(*probes)
        if os.path.ismount(folder):
            raise OSError(errno.EBUSY, "a file system is mounted there")
    except OSError as error:
        raise SampleError(
            f"the store at {folder} cannot be replaced in one step: {error.strerror}. Pack to a new "
            "folder, and remove the old store then"
        ) from error
    finally:
        for probe in probes:
            probe.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The folder, made where there is none, for this process alone."""
    while True:
        try:
            created = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            if created:
                files.sync_folder(folder.parent)
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileExistsError, NotADirectoryError) as error:
            raise InvalidArgument(f"{folder} is not a folder: give one that is new or empty") from error
        except OSError as error:
            raise SampleError(f"cannot make a store at {folder}: {error.strerror}") from error
        try:
            _lock(folder, descriptor)
            if _is_there(folder, descriptor):
                yield
                return
        finally:
            os.close(descriptor)


def _lock(folder: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise SampleError(
            f"another process is packing into {folder}: wait until it has ended, or choose another folder"
        ) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise SampleError(f"cannot lock {folder}: {error.strerror}") from error
        text = "%s cannot be locked (%s): see to it that no other process packs into it"
        logger.warning(text, folder, error.strerror)


def _is_there(folder: Path, descriptor: int) -> bool:
    """False: who had it before has removed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(folder))
    except FileNotFoundError:
        return False


def _prepare(folder: Path, recipe: PackingSettings, resume: bool, overwrite: bool) -> Packing:
    """Look at what is in the folder, begin or go on, and leave a file that says so."""
    try:
        names = sorted(os.listdir(folder))
        _check_names(folder, names, overwrite)
        packing = _begun(folder, recipe, resume)
        (folder / layout.MANIFEST).unlink(missing_ok=True)  # packing.json stays until all else is durable
        files.sync_folder(folder)
        _restore(folder, packing)
    except SampleError:
        raise
    except OSError as error:
        raise SampleError(f"cannot pack into {folder}: {error.strerror}") from error
    return packing


def _begun(folder: Path, recipe: PackingSettings, resume: bool) -> Packing:
    """The packing that goes on, or a new one, durable, which replaces the objects of the old one."""
    try:
        old = read(folder)
    except SampleError:
        if resume:
            raise
        old = None
    if old is not None and resume:
        _check_recipe(folder, old.recipe, recipe)
        return old
    new = Packing(recipe=recipe) if old is None else Packing(recipe=recipe, id=old.id)
    return new.save(folder / PROGRESS)


def _check_names(folder: Path, names: list[str], overwrite: bool) -> None:
    begun, whole = PROGRESS in names, layout.MANIFEST in names
    if whole and not begun and not overwrite:
        raise InvalidArgument(
            f"{folder} is already a store: choose another folder, or overwrite it "
            "(--overwrite, or overwrite=True)"
        )
    for name in names:
        if not (_ours(name) and (begun or whole)) and not _DRAFT.fullmatch(name):
            raise InvalidArgument(
                f"{folder} holds {name!r}, which packing did not write: choose a new or an empty folder"
            )


def _ours(name: str) -> bool:
    return name in _NAMES or bool(_DATA.fullmatch(name) or _DRAFT.fullmatch(name))


def _check_recipe(folder: Path, old: PackingSettings, new: PackingSettings) -> None:
    for name in PackingSettings.__struct_fields__:
        was, is_ = getattr(old, name), getattr(new, name)
        if was != is_:
            what = f"a source with {name}" if name in ("samples", "size_bytes") else name
            raise SampleError(
                f"packing into {folder} was begun with {what}={_short(was)}, not {_short(is_)}: "
                f"give the same to go on, or remove {folder}, or pass resume=False to pack it anew"
            )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _restore(folder: Path, packing: Packing) -> None:
    """Cut the files to what is good of them, and remove what came later."""
    for name in os.listdir(folder):
        if name not in packing.files and name != PROGRESS and _ours(name):
            os.unlink(folder / name)
    for name, good in packing.files.items():
        path = folder / name
        size_bytes = path.stat().st_size if path.exists() else 0
        if size_bytes < good.size_bytes:
            raise SampleError(
                f"{path} has {size_bytes} of the {good.size_bytes} bytes that were packed: remove {folder}, "
                "or pass resume=False to pack it anew"
            )
        os.truncate(path, good.size_bytes)
