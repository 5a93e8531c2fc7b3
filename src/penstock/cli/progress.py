"""How far a long command is, on standard error: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

from penstock.cli.output import progress_console
from penstock.units import format_bytes, format_rate

if TYPE_CHECKING:
    from rich.console import RenderableType

LINE_S = 10.0  # between lines

Progress = Callable[[int, int], None]
Steps = Callable[[int, float, Callable[[], str]], None]


@contextlib.contextmanager
def steps_progress(doing: str, total: int | None) -> Iterator[Steps]:
    """A function to call after each step: with the steps so far, the loss, and what says how the run goes.

    doing   until the first step has ended
    total   steps there are, None where that is not known
    """
    if sys.stderr.isatty():
        with _steps_bar(doing, total) as show:
            yield show
    else:
        yield _steps_lines(total)


@contextlib.contextmanager
def _steps_bar(doing: str, total: int | None) -> Iterator[Steps]:
    """A bar, and below it one line that says how the run goes."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.text import Text

    below = Text()

    class TwoLines(Progress):
        def get_renderables(self) -> Iterable[RenderableType]:
            yield from super().get_renderables()
            yield below

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with TwoLines(*columns, console=progress_console()) as shown:
        task = shown.add_task(doing, total=total, loss="")

        def show(steps: int, loss: float, state: Callable[[], str]) -> None:
            below.plain = state()
            shown.update(task, completed=steps, description="training", loss=f"loss {loss:.4f}")

        yield show


def _steps_lines(total: int | None) -> Steps:
    next_s = time.monotonic() + LINE_S

    def show(steps: int, loss: float, state: Callable[[], str]) -> None:
        nonlocal next_s
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + LINE_S
            of = "" if total is None else f" of {total}"
            print(f"step {steps}{of}, loss {loss:.4f}, {state()}", file=sys.stderr, flush=True)

    return show


@contextlib.contextmanager
def samples_progress(
    doing: str, samples: int | None, size_bytes: int | None, *, quiet: bool
) -> Iterator[Progress | None]:
    """A function to call with the samples and bytes so far; None where nothing is to be shown.

    doing                 such as "packed"
    samples, size_bytes   all there are, None where that is not known
    """
    with _shown(doing, samples if size_bytes is None else size_bytes, quiet) as show:
        of = "" if samples is None or not sys.stderr.isatty() else f" of {samples:,}"

        def progress(samples_done: int, bytes_done: int) -> None:
            assert show is not None
            done = samples_done if size_bytes is None else bytes_done
            show(done, None, bytes_done, f"{samples_done:,}{of} samples, ")

        yield None if show is None else progress


@contextlib.contextmanager
def bytes_progress(doing: str, *, quiet: bool) -> Iterator[Progress | None]:
    """A function to call with the bytes so far, and all there are; None where nothing is to be shown."""
    with _shown(doing, None, quiet) as show:

        def progress(bytes_done: int, size_bytes: int) -> None:
            assert show is not None
            show(bytes_done, size_bytes, bytes_done, "")

        yield None if show is None else progress


class _Show(Protocol):
    def __call__(self, done: int, total: int | None, bytes_done: int, more: str) -> None:
        """``total``: of how many, where that is new. ``more``: what to say besides the bytes."""


@contextlib.contextmanager
def _shown(doing: str, total: int | None, quiet: bool) -> Iterator[_Show | None]:
    if quiet:
        yield None
    elif sys.stderr.isatty():
        with _bar(doing, total) as show:
            yield show
    else:
        yield _lines(doing)


@contextlib.contextmanager
def _bar(doing: str, all_: int | None) -> Iterator[_Show]:
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(doing),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TextColumn("{task.fields[done]}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=progress_console()) as shown:
        task = shown.add_task("", total=all_, done="")
        begun: _Begun | None = None

        def show(done: int, total: int | None, bytes_done: int, more: str) -> None:
            nonlocal begun
            if begun is None:
                begun = _Begun(bytes_done)
                shown.reset(task, completed=done, total=all_ if total is None else total)
            said = f"{more}{format_bytes(bytes_done)}, {begun.rate(bytes_done)}"
            shown.update(task, completed=done, done=said)

        yield show


class _Begun:
    """When this run began: what an earlier one has done says nothing about its speed."""

    def __init__(self, bytes_done: int) -> None:
        self._bytes, self._s = bytes_done, time.monotonic()

    def rate(self, bytes_done: int) -> str:
        return format_rate((bytes_done - self._bytes) / max(time.monotonic() - self._s, 1e-3))


def _lines(doing: str) -> _Show:
    begun: _Begun | None = None
    next_s = time.monotonic() + LINE_S

    def show(done: int, total: int | None, bytes_done: int, more: str) -> None:
        nonlocal begun, next_s
        begun = begun or _Begun(bytes_done)
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + LINE_S
            said = f"{more}{format_bytes(bytes_done)}, {begun.rate(bytes_done)}"
            print(f"{doing} {said}", file=sys.stderr, flush=True)

    return show
