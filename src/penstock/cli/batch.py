"""The command that says which batch sizes fit."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable
from typing import Any, NamedTuple

import penstock
from penstock.cli.output import Answer, Table, load, user_file_errors, writing
from penstock.cli.training import ScriptTraining, first_batch, load_script, new_folder
from penstock.core.hardware import Hardware
from penstock.errors import InvalidArgument
from penstock.planners.batch_sizes import BatchSize, BatchSizes
from penstock.runtime.batch_parts import repeated
from penstock.units import format_bytes, format_bytes_up, format_seconds

STEPS = 8  # run to confirm a size: those that are recorded, and some that are not
MEANINGS = {
    "largest": "the largest that runs",
    "unslowed": "the largest that is not slowed down",
    "in_memory": "the largest of which nothing has to leave the device",
    "fastest": "the fastest a sample, of those that were tried",
}


class BatchCost(NamedTuple):
    """What steps of a size took: seconds, and the most device bytes in use."""

    step_s: float
    peak_bytes: int


def batch(options: Namespace) -> Answer:
    if options.run and options.device:
        raise InvalidArgument(
            "--device says whose times to estimate: leave it out with --run, which measures"
        )
    hardware = load(Hardware, options.hardware)
    build = load_script(options.script)

    @functools.cache
    def fake() -> tuple[ScriptTraining, Any]:
        training = build()
        return training, first_batch(training)

    def make_step(samples: int) -> Callable[[], object]:
        training, first = fake()
        given = repeated(first, samples)
        return lambda: training.step(given)

    with new_folder(options.output):
        found = penstock.best_batch(
            make_step,
            hardware,
            options.policy,
            device_budget=options.device_budget,
            device=options.device or "cpu",
            least=options.least,
            most=options.most,
            slowdown=options.slowdown,
            recompute=options.recompute,
            time_limit_s=options.time_limit,
        )
        named = {name: size for name in MEANINGS if (size := getattr(found, name)) is not None}
        measured: dict[int, BatchCost] = {}
        if options.run:
            device = next((parameter.device for parameter in fake()[0].model.parameters()), "cpu")
            for size in sorted({size.samples for size in named.values()}):
                measured[size] = _run(build, size, hardware, options, str(device))
        written = []
        for name, size in named.items():
            assert size.plan is not None
            with writing(path := options.output / f"{name}.json"):
                size.plan.save(path)
            written.append(path)
    values: dict[str, Any] = {name: size.samples for name, size in named.items()}
    values["tried"] = [_values(size, measured.get(size.samples)) for size in found.tried]
    said = "\n".join(f"{size.samples}: {MEANINGS[name]}" for name, size in named.items())
    return Answer(values=values, shown=[_table(found, measured), said], written=written)


def _run(
    build: Callable[[], ScriptTraining],
    samples: int,
    hardware: Hardware,
    options: Namespace,
    device: str,
) -> BatchCost:
    with (
        user_file_errors(),
        penstock.offload(
            device_budget=options.device_budget, spill_dir=options.spill_dir, hardware=hardware, device=device
        ) as offload,
    ):
        training = build()  # inside: it may be larger than the budget
        given = repeated(first_batch(training), samples)
        for _ in range(STEPS):
            with offload.step():
                training.step(given)
        report = offload.report()
    return BatchCost(report.step_s, report.peak_bytes)


def _values(size: BatchSize, measured: BatchCost | None) -> dict[str, Any]:
    names = ("samples", "minimum_bytes", "peak_bytes", "in_memory_s", "step_s", "sample_s", "reason")
    values = {name: getattr(size, name) for name in names}
    if measured is not None:
        values |= {"measured_step_s": measured.step_s, "measured_peak_bytes": measured.peak_bytes}
    return values


def _table(found: BatchSizes, measured: dict[int, BatchCost]) -> Table:
    columns: tuple[str, ...] = ("batch", "minimum", "in memory", "step", "of in memory", "a sample")
    rows = []
    for size in found.tried:
        row: tuple[str, ...] = (str(size.samples), format_bytes_up(size.minimum_bytes))
        row += (format_bytes(size.peak_bytes),)
        if size.plan is None:
            row += ("cannot", "", "")
        else:
            row += (format_seconds(size.step_s), f"{size.slowdown:.2f}", format_seconds(size.sample_s))
        if measured:
            ran = measured.get(size.samples)
            row += ("", "") if ran is None else (format_seconds(ran.step_s), format_bytes(ran.peak_bytes))
        rows.append(row)
    if measured:
        columns += ("measured step", "measured peak")
    chosen = [size.samples for size in found.tried].index(found.fastest.samples)
    return Table(columns, rows, chosen=chosen)
