"""Reading and writing the files that the user names."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from penstock.cli.output import own_files
from penstock.core import files
from penstock.core.trace import Trace

Value = TypeVar("Value")


def load(kind: type[Value], path: Path) -> Value:
    """The ``kind`` that a file holds. Raises PenstockError where it cannot be read."""
    with own_files():
        if kind is Trace:
            return Trace.load(path)  # type: ignore[return-value]  # it reads published ones too
        return files.load(kind, path)


def save(value: object, path: Path) -> None:
    """Write a value; its folder is made where missing."""
    with own_files():
        path.parent.mkdir(parents=True, exist_ok=True)
        files.save(value, path)


def save_text(text: str, path: Path) -> None:
    """Write a text file; its folder is made where missing."""
    with own_files():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
