"""Values to files and back: JSON with a schema name, gzipped where the path ends in ``.gz``.

A file is ``{"schema": "penstock.<type>/<version>", "value": ...}``. Nothing in a file is ever
executed. A file is written beside its destination and renamed, so that a reader sees all or none.
"""

from __future__ import annotations

import gzip
import os
import zlib
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_origin

import msgspec
import numpy as np

from penstock.errors import InvalidFile

VERSIONS = {"trace": 2, "plan": 2}  # by type; the others are at 1
Value = TypeVar("Value")


_ANEW = {
    "Trace": "make it anew with `penstock trace`",
    "Plan": "make its trace anew with `penstock trace`, and the plan with `penstock plan`",
}


class _Named(msgspec.Struct):
    schema: str


class _Valued(msgspec.Struct):
    value: Any


def _schema(kind: type) -> str:
    name = kind.__name__.lower()
    return f"penstock.{name}/{VERSIONS.get(name, 1)}"


def _is_earlier(schema: str, wanted: str) -> bool:
    """Whether a schema is an earlier version of the one wanted."""
    name, _, version = schema.partition("/")
    other, _, now = wanted.partition("/")
    return name == other and version.isdecimal() and int(version) < int(now)


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


def save(value: Any, path: str | Path) -> None:
    """Write ``value`` to ``path``; the folder must exist."""
    path = Path(path)
    data = msgspec.json.encode({"schema": _schema(type(value)), "value": value}, enc_hook=_encode)
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(data)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


class Source(NamedTuple):
    """A file's JSON text, unpacked, and the schema that it names."""

    schema: str
    data: bytes


def read(path: str | Path) -> Source:
    """The text of ``path`` and its schema. Raises InvalidFile where it is cut or names no schema."""
    data = Path(path).read_bytes()
    try:
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        return Source(msgspec.json.decode(data, type=_Named).schema, data)
    except (msgspec.MsgspecError, UnicodeDecodeError, EOFError, OSError, zlib.error) as error:
        raise InvalidFile(f"{path} is not a whole JSON file that names its schema: {error}") from error


def load(kind: type[Value], path: str | Path) -> Value:
    """Read a ``kind`` from ``path``. Raises InvalidFile where the file holds something else."""
    return value(kind, read(path), path)


def value(kind: type[Value], source: Source, path: str | Path) -> Value:
    """The ``kind`` in what was read from ``path``."""
    if _is_earlier(source.schema, _schema(kind)):
        raise InvalidFile(
            f"{path} was made by an earlier version of penstock ({source.schema!r}, now {_schema(kind)!r}): "
            f"{_ANEW[kind.__name__]}"
        )
    if source.schema != _schema(kind):
        raise InvalidFile(
            f"{path} holds {source.schema!r}, not {_schema(kind)!r}: give the file of a {kind.__name__}, "
            "written by this version of penstock"
        )
    try:
        return msgspec.convert(msgspec.json.decode(source.data, type=_Valued).value, kind, dec_hook=_decode)
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise InvalidFile(f"{path} is not a penstock {kind.__name__.lower()} file: {error}") from error
