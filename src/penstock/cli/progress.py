"""How far a long command is, on standard error: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

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
    if quiet:
        yield None
    elif sys.stderr.isatty():
        with _bar(doing, samples, size_bytes) as progress:
            yield progress
    else:
        yield _lines(doing)


@contextlib.contextmanager
def _bar(doing: str, samples: int | None, size_bytes: int | None) -> Iterator[Progress]:
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(doing),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TextColumn("{task.fields[done]}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=progress_console()) as shown:
        task = shown.add_task("", total=samples if size_bytes is None else size_bytes, done="")
        begun: _Begun | None = None

        def progress(samples_done: int, bytes_done: int) -> None:
            nonlocal begun
            completed = samples_done if size_bytes is None else bytes_done
            if begun is None:
                begun = _Begun(bytes_done)
                shown.reset(task, completed=completed)
            of = "" if samples is None else f" of {samples:,}"
            done = f"{samples_done:,}{of} samples, {format_bytes(bytes_done)}, {begun.rate(bytes_done)}"
            shown.update(task, completed=completed, done=done)

        yield progress


class _Begun:
    """When this run began: what an earlier one has done says nothing about its speed."""

    def __init__(self, bytes_done: int) -> None:
        self._bytes, self._s = bytes_done, time.monotonic()

    def rate(self, bytes_done: int) -> str:
        return format_rate((bytes_done - self._bytes) / max(time.monotonic() - self._s, 1e-3))


def _lines(doing: str) -> Progress:
    begun: _Begun | None = None
    next_s = time.monotonic() + LINE_S

    def progress(samples_done: int, bytes_done: int) -> None:
        nonlocal begun, next_s
        begun = begun or _Begun(bytes_done)
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + LINE_S
            done = f"{samples_done:,} samples, {format_bytes(bytes_done)}, {begun.rate(bytes_done)}"
            print(f"{doing} {done}", file=sys.stderr, flush=True)

    return progress
