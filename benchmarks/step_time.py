"""Seconds and bytes of one training step, by the method that manages memory.

    python benchmarks/step_time.py -o out/step_time.json

The methods take turns, step by step, in processes that live throughout: in memory (the reference),
torch.utils.checkpoint on each block, saved-tensor hooks that write every tensor to a file and read it back,
and penstock with budgets from a fifth of the whole in-memory peak (weights, gradients, optimizer state and
activations) to one that holds everything; at the smallest also with host memory as a tier. With penstock the
model is built inside the budget. Each trains the same GPT from the same seed on the same batches; losses,
weights and optimizer state are compared bit for bit after the timing. The files of the hooks go through the
page cache and are never synced; penstock's transfers bypass the page cache where the disk allows it, never
synced either.

The JSON holds every sample, and penstock's own reports. See `--quick` for a check that it all works, in less
than two minutes; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import gpt  # noqa: E402
from io_bench.machine import heading  # noqa: E402
from methods import UNSETTLED_STEPS, Job, Result, Worker, trace_of  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402
from rich.table import Table  # noqa: E402

import penstock  # noqa: E402
from penstock.units import format_bytes, format_seconds  # noqa: E402

PERCENT = (105, 65, 35, 20)  # of the whole in-memory peak
REFERENCE = "in memory"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=24, help="of each method; default: %(default)s")
    parser.add_argument("--batch", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--only", action="append", metavar="METHOD", help="beside the reference; repeated; default: all"
    )
    add_common_arguments(parser, "step_time")
    options = parser.parse_args(arguments)
    if options.steps <= UNSETTLED_STEPS:
        parser.error(f"--steps: give {UNSETTLED_STEPS + 1} or more")

    steps = UNSETTLED_STEPS + 2 if options.quick else options.steps
    config = replace(gpt.QUICK if options.quick else gpt.Config(batch=options.batch), seed=options.seed)
    console = wide_console()
    peak_bytes = trace_of(config).peak_bytes
    with tempfile.TemporaryDirectory() as scratch:
        hardware_file = Path(scratch) / "hardware.json"
        hardware = penstock.probe(
            options.spill_dir, time_limit_s=1.0 if options.quick else 10.0, host_budget=peak_bytes
        )
        hardware.save(hardware_file)
        jobs = {
            name: Job(name, config, spill_dir=options.spill_dir)
            for name in (REFERENCE, "checkpoint", "files")
        }
        for percent in PERCENT:
            jobs[f"penstock, {percent} %"] = Job(
                "penstock",
                config,
                device_budget_bytes=peak_bytes * percent // 100,
                hardware_file=str(hardware_file),
                spill_dir=options.spill_dir,
            )
        smallest = jobs[f"penstock, {PERCENT[-1]} %"]
        jobs[f"penstock, {PERCENT[-1]} %, host"] = replace(smallest, host_budget_bytes=peak_bytes)
        if unknown := set(options.only or ()) - jobs.keys():
            parser.error(f"--only: there is no {', '.join(unknown)}, only {', '.join(jobs)}")
        jobs = {name: job for name, job in jobs.items() if name in (REFERENCE, *(options.only or jobs))}
        results = measure(jobs, steps, console)

    summaries = {name: summary(jobs[name], result, results[REFERENCE]) for name, result in results.items()}
    document = {
        **heading("step_time"),
        "hardware": msgspec.to_builtins(hardware),
        "config": asdict(config),
        "in_memory_peak_bytes": peak_bytes,
        "unsettled_steps": UNSETTLED_STEPS,
        "methods": summaries,
    }
    console.print(drawn(summaries))
    write(document, options.output, console)
    return 0


# -- what the benchmarks of training share ---------------------------------------------------------


def add_common_arguments(parser: argparse.ArgumentParser, name: str, quick: bool = True) -> None:
    parser.add_argument(
        "--spill-dir", default=tempfile.gettempdir(), metavar="DIR", help="default: %(default)s"
    )
    if quick:
        parser.add_argument("--quick", action="store_true", help="a tiny model, for a few steps")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "out" / f"{name}.json", metavar="FILE")


def wide_console() -> Console:
    console = Console(highlight=False)
    console.width = max(console.width, 180)
    return console


class MethodFailed(RuntimeError):
    """The process of the method ``name`` failed; its own error is on standard error."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name


def measure(jobs: dict[str, Job], steps: int, console: Console) -> dict[str, Result]:
    """Let the methods take turns; each round begins with another one. Raises MethodFailed."""
    names = list(jobs)
    with ExitStack() as stack:
        workers = {name: stack.enter_context(Worker(job)) for name, job in jobs.items()}
        progress = stack.enter_context(Progress(console=console))
        bar = progress.add_task("steps", total=steps * len(names))
        for round_number in range(steps):
            shift = round_number % len(names)
            for name in names[shift:] + names[:shift]:
                progress.update(bar, description=f"{name:<30}")
                try:
                    workers[name].step()
                except RuntimeError as error:
                    raise MethodFailed(name, str(error)) from error
                progress.advance(bar)
        return {name: worker.finish() for name, worker in workers.items()}


def summary(job: Job, result: Result, reference: Result) -> dict[str, Any]:
    """As a row of the table, and of the document. Ratios are to the reference."""
    lower, median, upper = quartiles(result.settled_s)
    return {
        "device_budget_bytes": job.device_budget_bytes or None,
        "median_s": median,
        "min_s": min(result.settled_s),
        "quartiles_s": [lower, upper],
        "ratio": median / statistics.median(reference.settled_s),
        "peak_resident_bytes": result.peak_resident_bytes,
        "memory_ratio": result.peak_resident_bytes / reference.peak_resident_bytes,
        "same_bits": result.same_bits(reference),
        "report": msgspec.to_builtins(result.report),
        "loss": [step.loss for step in result.steps],
        "samples_s": [step.step_s for step in result.steps],
    }


def quartiles(samples_s: Sequence[float]) -> tuple[float, float, float]:
    if len(samples_s) == 1:
        return (samples_s[0],) * 3
    lower, median, upper = statistics.quantiles(samples_s, n=4, method="inclusive")
    return lower, median, upper


def drawn(summaries: dict[str, dict[str, Any]]) -> Table:
    columns = (
        "",
        "step",
        "ratio",
        "least",
        "quartiles",
        "predicted",
        "stalls",
        "clock",
        "moved out, in",
        "budget",
        "peak",
        "predicted",
        "resident",
        "bits",
    )
    table = Table(*columns, box=None, padding=(0, 1))
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    table.columns[0].justify = "left"
    for name, row in summaries.items():
        report = row["report"]
        own = [""] * 7
        if report is not None:
            own = [
                format_seconds(report["predicted_step_s"]),
                format_seconds(report["stall_s"]),
                format_seconds(report["clock_s"]),
                f"{format_bytes(report['evicted_bytes'])}, {format_bytes(report['loaded_bytes'])}",
                format_bytes(report["device_budget_bytes"]),
                format_bytes(report["peak_bytes"]),
                format_bytes(report["predicted_peak_bytes"]),
            ]
        table.add_row(
            name,
            format_seconds(row["median_s"]),
            f"{row['ratio']:.2f} x",
            format_seconds(row["min_s"]),
            " - ".join(map(format_seconds, row["quartiles_s"])),
            *own,
            format_bytes(row["peak_resident_bytes"]),
            "equal" if row["same_bits"] else "DIFFERENT",
        )
    return table


def write(document: dict[str, Any], path: Path, console: Console) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    console.print(f"wrote {path}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
