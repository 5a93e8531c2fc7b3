"""Values to files and back: JSON with a schema name, gzipped where the path ends in ``.gz``.

A file is ``{"schema": "penstock.<type>/<version>", "value": ...}``. Nothing in a file is ever
executed. A file is written beside its destination and renamed, so that a reader sees all or none.
"""

from __future__ import annotations

import gzip
import os
import zlib
from pathlib import Path
from typing import Any, TypeVar, get_origin

import msgspec
import numpy as np

from penstock.errors import InvalidFile

VERSION = 1
Value = TypeVar("Value")


def _schema(kind: type) -> str:
    return f"penstock.{kind.__name__.lower()}/{VERSION}"


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} cannot be written to a file")


def _decode(kind: Any, value: Any) -> Any:
    if get_origin(kind) is np.ndarray:
        (element,) = kind.__args__[1].__args__
        return np.array(value, dtype=element)
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


def load(kind: type[Value], path: str | Path) -> Value:
    """Read a ``kind`` from ``path``. Raises InvalidFile where the file holds something else."""
    data = Path(path).read_bytes()
    try:
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        document = msgspec.json.decode(data)
        schema = document["schema"]
        if schema != _schema(kind):
            raise InvalidFile(
                f"{path} holds {schema!r}, not {_schema(kind)!r}: give the file of a {kind.__name__}, "
                "written by this version of penstock"
            )
        return msgspec.convert(document["value"], kind, dec_hook=_decode)
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError, EOFError, OSError, zlib.error) as error:
        if isinstance(error, InvalidFile):
            raise
        raise InvalidFile(f"{path} is not a penstock {kind.__name__.lower()} file: {error}") from error
