"""`penstock run`: train a script inside a budget, show how it goes, and keep the record."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

import penstock
from penstock.cli import script
from penstock.cli.output import DONE, INTERRUPTED, Answer, own_files
from penstock.cli.progress import steps_progress
from penstock.core.hardware import Hardware
from penstock.core.plan import Plan
from penstock.errors import InvalidArgument
from penstock.report import Record
from penstock.runtime.run import Offload
from penstock.units import format_bytes, format_seconds


def run(options: Namespace) -> Answer:
    with own_files():
        hardware = Hardware.load(options.hardware) if options.hardware else None
        plan = Plan.load(options.plan) if options.plan else None
    build = script.load(options.script)
    losses: list[float] = []
    interrupted = False
    with new_folder(options.output), contextlib.ExitStack() as stack:
        offload = stack.enter_context(
            penstock.offload(
                device=options.device,
                device_budget=options.device_budget,
                spill_dir=options.spill_dir,
                host_budget=options.host_budget,
                disk_budget=options.disk_budget,
                policy=options.policy,
                plan=plan,
                hardware=hardware,
                page_cache_budget=options.page_cache_budget,
                io_paths=options.io_path,
                io_costs=options.io_costs,
                verify_spill=options.verify_spill,
                endurance=options.endurance,
                micro_batch=options.micro_batch,
                micro_batch_order=options.micro_batch_order,
                variants=options.variants,
                lossy=options.lossy,
            )
        )
        training = build()  # inside: it may be larger than the budget
        _check_device(training.model, options.device)
        try:
            for loss in _train(offload, training, options.steps):
                losses.append(loss)
        except KeyboardInterrupt:
            if not losses:
                raise
            interrupted = True  # what was measured so far is kept
        if not losses:
            raise InvalidArgument("batches is empty: give at least one batch")
        record = Record.of(offload)
        with own_files(options.output):
            written = record.save(options.output)
    shown = [str(record.report), f"  loss {losses[0]:.4f} -> {losses[-1]:.4f}"]
    if options.steps is not None and len(losses) < options.steps and not interrupted:
        shown.append(f"only {len(losses)} of {options.steps} steps: batches is an iterator, and it ended")
    return Answer(
        values={
            "report": msgspec.to_builtins(record.report),
            "losses": losses,
            "folder": str(options.output),
        },
        shown=shown,
        written=written,
        exit_code=INTERRUPTED if interrupted else DONE,
    )


def _check_device(model: torch.nn.Module, wanted: str) -> None:
    found = {parameter.device.type for parameter in model.parameters()}
    if found - {torch.device(wanted).type}:
        raise InvalidArgument(f"the model is on {', '.join(sorted(found))}: say so with --device")


def _train(offload: Offload, training: script.Training, steps: int | None) -> Iterator[float]:
    """Train, and yield the loss of each step."""
    total = steps if steps is not None else getattr(training.batches, "__len__", lambda: None)()
    divided = partial(offload.accumulate, blocks=training.model)
    with steps_progress("recording", total) as show, interrupts_noted() as interrupted:
        for done, batch in enumerate(_batches(training.batches, steps), start=1):
            begun_s = time.perf_counter()
            with offload.step():
                loss = training.step(batch, divided if offload.micro_batch is not None else None)
            value = loss.item()
            step_s = time.perf_counter() - begun_s
            yield value
            show(done, value, partial(state_line, offload, step_s))
            if interrupted():
                raise KeyboardInterrupt


def _batches(batches: Iterable[Any], steps: int | None) -> Iterator[Any]:
    """One for each step: all of them again and again, but for an iterator, which can be read once."""
    if steps is None:
        yield from batches
        return
    given = 0
    while given < steps:
        before = given
        for batch in itertools.islice(batches, steps - given):
            given += 1
            yield batch
        if given == before or isinstance(batches, Iterator):
            return


@contextlib.contextmanager
def interrupts_noted() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed; pressed again, it raises KeyboardInterrupt immediately.

    An exception amid a step could strike in a destructor, where Python drops it. Where SIGINT is ignored, as
    in a background job of a shell, it stays so.
    """
    noted = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        yield noted.is_set
        return

    def note(*_: object) -> None:
        noted.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield noted.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def state_line(offload: Offload, step_s: float) -> str:
    report = offload.report()
    resident = f", {format_bytes(report.peak_resident_bytes)} resident" if report.peak_resident_bytes else ""
    return (
        f"{format_seconds(step_s)} a step; peak {format_bytes(report.peak_bytes)} of "
        f"{format_bytes(report.device_budget_bytes)}{resident}; {format_bytes(report.evicted_bytes)} out, "
        f"{format_bytes(report.loaded_bytes)} in"
    )


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[None]:
    """Make the folder now, so that a run does not fail at its end; undo it where the run fails."""
    missing = list(itertools.takewhile(lambda folder: not folder.exists(), [path, *path.parents]))
    with own_files():
        path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for folder in missing:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
