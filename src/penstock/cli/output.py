"""The files that the user names, what commands answer, and how it is printed: as text, or one JSON object."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.errors import BudgetTooSmall, PenstockError

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.core.timeline import Timeline

Value = TypeVar("Value")

_UNDECODED = re.compile(
    "[\udc80-\udcff]+"
)  # how Python keeps bytes that are no text in the locale's encoding

# Exit codes.
DONE, ERROR, INFEASIBLE, INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True)
class Table:
    """Rows of text under column titles; without titles, names and what they stand for.

    chosen   index of the row to bring out
    notes    lines below
    """

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    chosen: int | None = None
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Lines:
    """Any number of lines, printed as they come."""

    lines: Iterable[str]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a command found out.

    values    for programs: goes into the JSON object
    shown     for people: texts, lines and tables, in order
    written   files, or URLs, named at the end
    """

    values: dict[str, Any]
    shown: Sequence[str | Lines | Table] = ()
    written: Sequence[Path | str] = field(default_factory=list)
    exit_code: int = DONE


def progress_console() -> Console:
    """Standard error: standard output is for answers."""
    from rich.console import Console

    return Console(stderr=True)


def show(answer: Answer, *, as_json: bool) -> None:
    if as_json:
        _print_json({**answer.values, "written": [str(path) for path in answer.written]})
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True)
    for part in answer.shown:
        if isinstance(part, Lines):
            sys.stdout.writelines(f"{line}\n" for line in part.lines)
        elif isinstance(part, str):
            console.print(part)
        else:
            drawn = _rich_table(part) if part.columns else _rich_names(part)
            _print_whole(console, drawn)
        for note in part.notes if isinstance(part, Table) else ():
            console.print(f"  {note}")
    for path in answer.written:
        console.print(f"wrote {printable(str(path))}")


def show_error(error: PenstockError, *, as_json: bool) -> None:
    """One line on standard error, and with ``as_json`` also an object on standard output."""
    print(*map(printable, f"penstock: error: {error}".split("\n")), sep="\n", file=sys.stderr)
    if as_json:
        minimum = {"minimum_bytes": error.minimum_bytes} if isinstance(error, BudgetTooSmall) else {}
        _print_json({"error": str(error), **minimum})


@contextlib.contextmanager
def own_files(path: Path | None = None) -> Iterator[None]:
    """Files the user named that cannot be read or written: an error for people, not a traceback.

    path   the one that is named; otherwise the one of the error
    """
    try:
        yield
    except PenstockError:
        raise
    except OSError as error:
        where = error.filename2 or error.filename if path is None else path
        raise PenstockError(f"{where}: {error.strerror}") from error


def require_writable(path: Path | None) -> None:
    """Before the work whose result is written there. Raises PenstockError."""
    if path is None:
        return
    there = path if path.is_dir() else next(folder for folder in path.absolute().parents if folder.is_dir())
    if not os.access(there, os.W_OK | os.X_OK):
        raise PenstockError(
            f"{path} cannot be written: {there} is read-only for you. Give another path by -o"
        )


def load(kind: type[Value], path: Path) -> Value:
    """The ``kind`` that a file holds. Raises PenstockError where it cannot be read."""
    from penstock.core import files
    from penstock.core.trace import Trace

    with own_files():
        if kind is Trace:
            return Trace.load(path)  # type: ignore[return-value]  # it reads published ones too
        return files.load(kind, path)


def save(value: object, path: Path) -> None:
    """Write a value; its folder is made where missing."""
    from penstock.core import files

    with own_files(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.save(value, path)


def save_chrome_trace(path: Path, timeline: Timeline, *others: Timeline) -> None:
    """`Timeline.save_chrome_trace`; the folder is made where missing."""
    with own_files(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        timeline.save_chrome_trace(path, *others)


def save_text(text: str, path: Path) -> None:
    """Write a text file; its folder is made where missing."""
    with own_files(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def readers_may_leave() -> Iterator[None]:
    """A reader that closes standard output, as ``head`` does, has seen enough: no error."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_json(value: dict[str, Any]) -> None:
    import msgspec

    try:
        text = msgspec.json.encode(value).decode()
    except UnicodeEncodeError:  # a path, or a name, with bytes that are no UTF-8
        text = json.dumps(msgspec.to_builtins(value))
    print(text)


def _rich_table(table: Table) -> Any:
    import rich.box
    import rich.table

    drawn = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    for index, column in enumerate(table.columns):
        drawn.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for index, row in enumerate(table.rows):
        drawn.add_row(*row, style="bold" if index == table.chosen else None)
    return drawn


def _print_whole(console: Console, drawn: Any) -> None:
    """As wide as it needs to be: in a narrow window its lines wrap, and nothing is cut."""
    width = console.width
    console.width = max(width, console.measure(drawn, options=console.options.update(width=10_000)).maximum)
    console.print(drawn)
    console.width = width


def _rich_names(table: Table) -> Any:
    import rich.table

    drawn = rich.table.Table.grid(padding=(0, 2))
    for row in table.rows:
        drawn.add_row(*row)
    return drawn


def printable(text: str) -> str:
    """Text that others chose, such as a name: without control characters and halves of characters."""
    if text.isprintable():
        return text
    text = _UNDECODED.sub(
        lambda found: found[0].encode("ascii", "surrogateescape").decode("utf-8", "backslashreplace"), text
    )
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )
