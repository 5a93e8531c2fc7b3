"""Values to files and back: JSON with a schema name, gzipped where the path ends in ``.gz``.

A file is ``{"schema": "penstock.<type>/<version>", "value": ...}``. Files are not trusted: nothing in
them is executed, and how much is read and unpacked has a limit. A file is written beside its
destination, made durable, and renamed: a reader sees the old file or the new one, and so does a
machine that lost power.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import io
import os
import re
import stat
import zlib
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_origin

import msgspec
import numpy as np

from penstock._native import Descriptor
from penstock.errors import InvalidFile

VERSIONS = {"trace": 2, "plan": 3, "timeline": 2, "packing": 2}  # by type; the others are at 1
MOST_TEXT_BYTES = 256 << 20  # of JSON text, unpacked; a trace of a hundred thousand kernels has about 20 MB
Value = TypeVar("Value")

_PIECE_BYTES = 1 << 20
_MOST_DRAFTS = 1000  # that killed processes left behind

_REMEDY = {
    "Trace": "record it again with `penstock trace`",
    "Plan": "record its trace again with `penstock trace`, and make the plan with `penstock plan`",
}


class _Named(msgspec.Struct):
    schema: str


class _Valued(msgspec.Struct):
    value: Any


def _schema(kind: type) -> str:
    name = kind.__name__.lower()
    return f"penstock.{name}/{VERSIONS.get(name, 1)}"


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} cannot be written to a file")


_LISTS: dict[Any, Any] = {np.int64: list[int], np.float64: list[float], np.bool_: list[bool]}


def _decode(kind: Any, value: Any) -> Any:
    if get_origin(kind) is np.ndarray:
        (element,) = kind.__args__[1].__args__
        return np.array(msgspec.convert(value, _LISTS[element]), dtype=element)
    raise NotImplementedError(f"{kind} cannot be read from a file")


def encoded(value: Any) -> bytes:
    """``value`` as the text of a file."""
    return msgspec.json.encode({"schema": _schema(type(value)), "value": value}, enc_hook=_encode)


def decoded(kind: type[Value], data: bytes, name: str) -> Value:
    """The ``kind`` in what `encoded` gave. Raises InvalidFile, with ``name``, where it is something else."""
    try:
        source = FileText(msgspec.json.decode(data, type=_Named).schema, data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidFile(f"{name} is not JSON that names its schema: {error}") from error
    return value(kind, source, name)


def save(value: Any, path: str | Path) -> None:
    """Write ``value`` to ``path``, durably; the folder must exist. Raises OSError, with ``path``."""
    write(encoded(value), path)


def write(data: bytes, path: str | Path) -> None:
    """Write ``data`` to ``path``, durably, gzipped where it ends in ``.gz``. Raises OSError, as `save`.

    Drafts of it that processes which were killed, or disks that failed, have left are removed.
    """
    path = Path(path)
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise OSError(errno.EINVAL, "It is not a regular file")
        for left in drafts(path):
            remove_unlocked(left)
        with _new_file_beside(path) as file:
            draft = Path(file.name)
            try:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                draft.replace(path)
            finally:
                draft.unlink(missing_ok=True)
        sync_folder(path.parent)
    except OSError as error:
        error.filename, error.filename2 = os.fspath(path), None
        raise


def drafts(path: Path) -> list[Path]:
    """What is being written beside ``path`` to take its place, or was when a process was killed; nothing if
    the folder cannot be read."""
    name = re.compile(re.escape(_draft_name(path)) + r"\d+\.\d+")
    with contextlib.suppress(OSError):
        return [each for each in path.parent.iterdir() if name.fullmatch(each.name)]
    return []


def _draft_name(path: Path) -> str:
    return f".{path.name[:50]}."


def _new_file_beside(path: Path) -> io.BufferedWriter:
    """Never a file, or a link to one, that somebody else put there. It is locked."""
    for number in range(_MOST_DRAFTS):
        draft = path.with_name(f"{_draft_name(path)}{os.getpid()}.{number}")
        with contextlib.suppress(FileExistsError), contextlib.ExitStack() as undo:
            file = undo.enter_context(draft.open("xb"))
            undo.callback(draft.unlink, missing_ok=True)
            lock(file.fileno())
            if os.fstat(file.fileno()).st_nlink:  # nobody removed it before it was locked
                undo.pop_all()
                return file
    raise FileExistsError(errno.EEXIST, "There are too many drafts of this file, remove them")


def lock(descriptor: int) -> None:
    """Say that the file is being written: `remove_unlocked` leaves it."""
    with contextlib.suppress(OSError):  # a file system without locks: there it leaves every file
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def remove_unlocked(path: Path) -> None:
    """Remove a regular file, where that is possible and nobody has locked it."""
    # Without waiting: it could be a pipe that somebody else put there.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    with contextlib.suppress(OSError), Descriptor(path, flags) as file:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable, where it can be opened and its file system supports that.

    Raises OSError where the disk fails.
    """
    try:
        opened = Descriptor(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:
        return
    with opened:
        try:
            os.fsync(opened.fileno())
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY):
                raise


class FileText(NamedTuple):
    """A file's JSON text, unpacked, and the schema that it names."""

    schema: str
    data: bytes


def read(path: str | Path) -> FileText:
    """The text of ``path`` and its schema.

    Raises InvalidFile where it is cut, is larger than `MOST_TEXT_BYTES`, is not a regular file or names no
    schema, and OSError where it cannot be opened.
    """
    with open(path, "rb", opener=_open) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise InvalidFile(f"{path} is not a regular file: give the file that penstock wrote")
        try:
            is_packed = file.peek(2)[:2] == b"\x1f\x8b"
            data = _read(gzip.GzipFile(fileobj=file) if is_packed else file)
            if len(data) > MOST_TEXT_BYTES:
                much = f"more than {MOST_TEXT_BYTES >> 20} MiB of text{' once unpacked' * is_packed}"
                raise InvalidFile(f"{path} holds {much}: no file of penstock is so large. Give another one")
            return FileText(msgspec.json.decode(data, type=_Named).schema, data)
        except (
            msgspec.MsgspecError,
            RecursionError,
            UnicodeDecodeError,
            EOFError,
            OSError,
            zlib.error,
        ) as error:
            raise InvalidFile(f"{path} is not a whole JSON file that names its schema: {error}") from error


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe would wait for its writer


def _read(file: io.BufferedIOBase) -> bytes:
    """All of ``file``, or the first piece beyond `MOST_TEXT_BYTES` too."""
    pieces, size = [], 0
    while size <= MOST_TEXT_BYTES and (piece := file.read(_PIECE_BYTES)):
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces)


def load(kind: type[Value], path: str | Path) -> Value:
    """Read a ``kind`` from ``path``. Raises InvalidFile where the file holds something else."""
    return value(kind, read(path), path)


def value(kind: type[Value], source: FileText, path: str | Path) -> Value:
    """The ``kind`` in what was read from ``path``."""
    name, _, version = source.schema.partition("/")
    wanted, _, now = _schema(kind).partition("/")
    if name == wanted and version.isdecimal() and int(version) < int(now):
        raise InvalidFile(
            f"{path} was made by an earlier version of penstock ({source.schema!r}, now {_schema(kind)!r}): "
            f"{_REMEDY.get(kind.__name__, 'make it again')}"
        )
    if source.schema != _schema(kind):
        raise InvalidFile(
            f"{path} holds {source.schema!r}, not {_schema(kind)!r}: give the file of a {kind.__name__}, "
            "written by this version of penstock"
        )
    try:
        found = msgspec.json.decode(source.data, type=_Valued).value
        msgspec.msgpack.encode(found)  # refuses integers beyond 64 bits, which fail where they are used
        return msgspec.convert(found, kind, dec_hook=_decode)
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise InvalidFile(f"{path} is not a penstock {kind.__name__.lower()} file: {error}") from error


class Saveable:
    """A value that can be saved."""

    def save(self, path: str | Path) -> None:
        """Write to ``path`` as versioned JSON, gzipped where the name ends in ``.gz``."""
        save(self, path)

    @classmethod
    def load(cls: type[Value], path: str | Path) -> Value:
        """Read what `save` wrote. Raises InvalidFile where it is something else."""
        return load(cls, path)
