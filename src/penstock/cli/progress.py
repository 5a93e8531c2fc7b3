"""How far a long command is, on standard error: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from penstock.cli.output import progress_console
from penstock.units import format_bytes, format_rate

LINE_S = 10.0  # between lines

Progress = Callable[[int, int], None]


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
