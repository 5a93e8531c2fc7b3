"""Files that the user names, results of commands, and their output: as text, or as one JSON object.

Long commands report progress on standard error: by a bar on a terminal, otherwise by a line now and then.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.errors import BudgetTooSmall, PenstockError
from penstock.units import format_bytes, format_rate

if TYPE_CHECKING:
    from rich.console import Console

Value = TypeVar("Value")

SCRIPT = "penstock_script_"  # begins the names of the modules of users' scripts

# How Python keeps bytes that are no text in the locale's encoding.
_UNDECODED = re.compile("[\udc80-\udcff]+")

# Exit codes.
DONE, ERROR, INFEASIBLE, INTERRUPTED = 0, 1, 3, 130  # argparse has 2, for what cannot be typed


@dataclass(frozen=True)
class Table:
    """Rows of text under column titles; without titles, pairs of a name and a value.

    chosen   index of the row to emphasize
    notes    lines below the table
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
    """The result of a command.

    values    for programs: fields of the JSON object
    shown     for people: texts, lines and tables, in order
    written   files, or URLs, that were written: named at the end
    go_on     what the command does once this is shown, until it is ended
    """

    values: dict[str, Any]
    shown: Sequence[str | Lines | Table] = ()
    written: Sequence[Path | str] = field(default_factory=list)
    exit_code: int = DONE
    go_on: Callable[[], None] = lambda: None


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
            _print_whole(console, _rich_table(part))
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


def show_script_error(error: Exception, *, as_json: bool) -> bool:
    """An error in the user's script: as `show_error`, with its traceback from the script's first frame on.
    Returns whether it is one."""
    frames = error.__traceback__
    while frames is not None and not str(frames.tb_frame.f_globals.get("__name__")).startswith(SCRIPT):
        frames = frames.tb_next
    if frames is None and not isinstance(error, SyntaxError):
        return False
    traceback.print_exception(type(error), error, frames)
    if as_json:
        _print_json({"error": traceback.format_exception_only(error)[-1].strip()})
    return True


@contextlib.contextmanager
def user_file_errors(path: Path | None = None) -> Iterator[None]:
    """Turn an OSError of a file that the user named into a PenstockError, which prints without a traceback.

    path   the file; None: that of the error
    """
    try:
        yield
    except PenstockError:
        raise
    except OSError as error:
        where = error.filename2 or error.filename if path is None else path
        raise PenstockError(f"{where}: {error.strerror}") from error


def require_writable(path: Path | None) -> None:
    """Check that a file can be written, before the work for it. Raises PenstockError."""
    if path is None:
        return
    there = path if path.is_dir() else next(folder for folder in path.absolute().parents if folder.is_dir())
    if not os.access(there, os.W_OK | os.X_OK):
        raise PenstockError(
            f"{path} cannot be written: {there} is read-only for you. Give another path by -o"
        )


def load(kind: type[Value], path: Path) -> Value:
    """Load a value of this type from a file. Raises PenstockError where it cannot be read."""
    from penstock.core import files

    with user_file_errors():
        return files.load(kind, path)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """A context to write a file that the user named. Makes its folder where missing."""
    with user_file_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        yield


@contextlib.contextmanager
def broken_pipe_ignored() -> Iterator[None]:
    """End silently where the reader closes standard output, as ``head`` does."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more at exit.
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

    drawn = (
        rich.table.Table(box=rich.box.SIMPLE_HEAD) if table.columns else rich.table.Table.grid(padding=(0, 2))
    )
    for index, column in enumerate(table.columns):
        drawn.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for index, row in enumerate(table.rows):
        drawn.add_row(*row, style="bold" if index == table.chosen else None)
    return drawn


def _print_whole(console: Console, drawn: Any) -> None:
    """Print at full width: in a narrow window lines wrap, and nothing is cut."""
    width = console.width
    console.width = max(width, console.measure(drawn, options=console.options.update(width=10_000)).maximum)
    console.print(drawn)
    console.width = width


def printable(text: str) -> str:
    """Untrusted text, such as a name, with control characters and undecodable bytes escaped."""
    if text.isprintable():
        return text
    text = _UNDECODED.sub(
        lambda found: found[0].encode("ascii", "surrogateescape").decode("utf-8", "backslashreplace"), text
    )
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


LINE_S = 10.0  # between lines

MakeText = Callable[[], str]


@contextlib.contextmanager
def progress(first: str = "") -> Iterator[Callable[[float, float | None, MakeText], None]]:
    """A function to call with the amount done, the total (None: unknown), and a function that makes the text.

    first   text until the first call
    """
    if not sys.stderr.isatty():
        next_s = time.monotonic() + LINE_S

        def line(done: float, total: float | None, make_text: MakeText) -> None:
            nonlocal next_s
            if time.monotonic() >= next_s:
                next_s = time.monotonic() + LINE_S
                print(make_text(), file=sys.stderr, flush=True)

        yield line
        return
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn
    from rich.text import Text

    console, below = Console(stderr=True), Text(first)
    columns = (BarColumn(bar_width=24), TaskProgressColumn(), TimeRemainingColumn(compact=True))
    bar = Progress(*columns, console=console)
    task = bar.add_task("", total=None)
    begun = False

    def show(done: float, total: float | None, make_text: MakeText) -> None:
        nonlocal begun
        if not begun:  # what an earlier run has done must not count for the speed
            begun = True
            bar.reset(task, completed=done, total=total)
        bar.update(task, completed=done)
        below.plain = make_text()

    with Live(Group(bar, below), console=console):
        yield show


@contextlib.contextmanager
def steps_progress(first: str, total: int | None) -> Iterator[Callable[[int, float, MakeText], None]]:
    """A function to call after each step: with the steps so far, the loss, and a function that makes a text.

    total   number of steps; None: unknown
    """
    of = "" if total is None else f" of {total}"
    with progress(first) as show:
        yield lambda steps, loss, state: show(
            steps, total, lambda: f"step {steps}{of}, loss {loss:.4f}, {state()}"
        )


@contextlib.contextmanager
def samples_progress(
    doing: str, samples: int | None, size_bytes: int | None, *, quiet: bool
) -> Iterator[Callable[[int, int], None] | None]:
    """A function to call with the samples and bytes so far; None where ``quiet``.

    doing                 such as "packed"
    samples, size_bytes   totals; None: unknown
    """
    of = "" if samples is None else f" of {samples:,}"
    with bytes_progress(doing, quiet=quiet) as show:
        if show is None:
            yield None
            return

        def moved(samples_done: int, bytes_done: int) -> None:
            more = f"{samples_done:,}{of} samples, "
            if size_bytes is None:
                show(bytes_done, samples, samples_done, more)
            else:
                show(bytes_done, size_bytes, more=more)

        yield moved


@contextlib.contextmanager
def bytes_progress(doing: str, *, quiet: bool) -> Iterator[Callable[..., None] | None]:
    """A function to call with the bytes so far, and their total; None where ``quiet``.

    It also takes the amount done, where the total is not in bytes, and a text to put before the bytes.
    """
    if quiet:
        yield None
        return
    begun: tuple[int, float] | None = None
    with progress() as show:

        def moved(bytes_done: int, total: int | None, done: int | None = None, more: str = "") -> None:
            nonlocal begun
            begun = begun or (bytes_done, time.monotonic())
            rate = (bytes_done - begun[0]) / max(time.monotonic() - begun[1], 1e-3)
            text = f"{doing} {more}{format_bytes(bytes_done)}, {format_rate(rate)}"
            show(bytes_done if done is None else done, total, lambda: text)

        yield moved
