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
    samples, size_bytes   all there are, None where nobody knows
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
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn(doing),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TextColumn("{task.fields[done]}"),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=progress_console()) as shown:
        task = shown.add_task("", total=size_bytes, done="")
        begun = False

        def progress(samples_done: int, bytes_done: int) -> None:
            nonlocal begun
            if not begun:  # what an earlier run has done says nothing about this one's speed
                shown.reset(task, completed=bytes_done)
                begun = True
            of = f" of {samples:,}" if samples is not None else ""
            done = f"{samples_done:,}{of} samples, {format_bytes(bytes_done)}"
            shown.update(task, completed=bytes_done, done=done)

        yield progress


def _lines(doing: str) -> Progress:
    last_s = time.monotonic()
    last_bytes: int | None = None

    def progress(samples_done: int, bytes_done: int) -> None:
        nonlocal last_s, last_bytes
        now_s = time.monotonic()
        if last_bytes is None:
            last_s, last_bytes = now_s, bytes_done
        if now_s - last_s >= LINE_S:
            rate = format_rate((bytes_done - last_bytes) / (now_s - last_s))
            print(
                f"{doing} {samples_done:,} samples, {format_bytes(bytes_done)}, {rate}",
                file=sys.stderr,
                flush=True,
            )
            last_s, last_bytes = now_s, bytes_done

    return progress
