"""Train one GPT five times: in memory, with checkpointing, and with penstock in less and less memory.

    python examples/demo.py

Says beforehand what penstock will need and how long a step will take, then trains with the same seed and
the same batches, and compares times, memory and every bit. Budgets are fractions of all that the step has
in memory: weights, gradients, optimizer state and activations. Takes about two minutes on two cores, and
leaves a picture in out/demo.png. See `--full` for the model of the published figures, with twice the layers,
and `--quick` for a tiny one, in which penstock's fixed costs weigh most.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from pathlib import Path

import gpt
from methods import UNSETTLED_STEPS, Job, Result, Worker
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import penstock
from penstock import cli
from penstock.units import format_bytes, format_seconds

OUT = Path(__file__).resolve().parents[1] / "out"
PERCENT = (65, 35, 20)  # of what the step takes in memory
SHOWN_PERCENT = 35  # planned beforehand, and drawn afterwards
REFERENCE = "in memory"

console = Console(highlight=False)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=8, help="of each method; default: %(default)s")
    parser.add_argument("--spill-dir", default="", metavar="DIR", help="default: for temporary files")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--full", action="store_true", help="the model of the published figures")
    size.add_argument("--quick", action="store_true", help="a tiny model")
    parser.add_argument(
        "-o", "--output", type=Path, default=OUT, metavar="DIR", help="default: out, beside the examples"
    )
    options = parser.parse_args()
    if options.steps <= UNSETTLED_STEPS:
        parser.error(f"--steps: give {UNSETTLED_STEPS + 1} or more")

    console.width = max(console.width, 120)
    config, function = gpt.HALF, "build_half"
    if options.full or options.quick:
        config, function = (gpt.QUICK, "build_quick") if options.quick else (gpt.Config(), "build")
    folder = options.output / "demo"
    trace_file, hardware_file = folder / "trace.json.gz", folder / "hardware.json"
    script = Path(__file__).with_name("gpt.py")

    console.rule("Before: what will it need?", align="left")
    spill = ["--spill-dir", options.spill_dir] if options.spill_dir else []
    command("probe", "--time-limit", "1" if options.quick else "5", *spill, "-o", str(hardware_file))
    command("trace", f"{script}:{function}", "-o", str(trace_file))
    trace = penstock.Trace.load(trace_file)
    budgets = {percent: trace.peak_bytes * percent // 100 for percent in PERCENT}
    console.print(
        f"\nIn memory, a step takes {format_bytes(trace.peak_bytes)} at its peak, of which weights and "
        f"optimizer state are {format_bytes(trace.persistent_bytes)}. A plan for {SHOWN_PERCENT} % of that:"
    )
    planned = ["--hardware", str(hardware_file), "--device-budget", str(budgets[SHOWN_PERCENT])]
    planned += [] if options.full else ["--time-limit", "1" if options.quick else "5"]
    jobs = {name: Job(name, config) for name in (REFERENCE, "checkpoint")}
    for percent, budget_bytes in budgets.items():
        jobs[f"penstock, {percent} %"] = Job(
            "penstock",
            config,
            device_budget_bytes=budget_bytes,
            hardware_file=str(hardware_file),
            record_folder=str(folder / f"run-{percent}"),
            spill_dir=options.spill_dir,
        )
    with contextlib.ExitStack() as open_workers:
        # They load their code while this process plans, and wait.
        workers = {name: open_workers.enter_context(Worker(job)) for name, job in jobs.items()}
        command("plan", str(trace_file), *planned, "-o", str(folder / "plan.json"))
        console.rule(f"{len(jobs)} times {options.steps} steps", align="left")
        for worker in workers.values():
            worker.wait_until_loaded()
        results = {name: train(name, worker, options.steps) for name, worker in workers.items()}

    console.rule("After", align="left")
    console.print(comparison(jobs, results))
    command("report", str(folder / f"run-{SHOWN_PERCENT}"), "-o", str(options.output / "demo.png"))
    return 0 if all(result.same_bits(results[REFERENCE]) for result in results.values()) else 1


def command(*arguments: str) -> None:
    """Show a penstock command, and run it."""
    console.print(f"\n[bold]$ penstock {' '.join(map(shortened, arguments))}[/bold]", soft_wrap=True)
    if exit_code := cli.main(arguments):
        sys.exit(exit_code)


def shortened(argument: str) -> str:
    """Paths as seen from the repository."""
    return argument.removeprefix(f"{OUT.parent}/")


def train(name: str, worker: Worker, steps: int) -> Result:
    """Train by one method in its own process, with a bar."""
    columns = (
        TextColumn(f"{name:<14}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=steps, state="")
        for _ in range(steps):
            step = worker.step()
            progress.update(
                bar, advance=1, state=f"loss {step.loss:.3f}  {format_seconds(step.step_s)} a step"
            )
        return worker.finish()


def comparison(jobs: dict[str, Job], results: dict[str, Result]) -> Table:
    reference = results[REFERENCE]
    reference_s = statistics.median(reference.settled_s)
    table = Table(
        "",
        "step",
        "of in memory",
        "predicted",
        "budget",
        "peak",
        "predicted",
        "resident",
        "loss",
        "bits",
        box=None,
    )
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for name, result in results.items():
        step_s, report = statistics.median(result.settled_s), result.report
        table.add_row(
            name,
            format_seconds(step_s),
            f"{step_s / reference_s:.2f} x",
            format_seconds(report.predicted_step_s) if report else "",
            format_bytes(jobs[name].device_budget_bytes) if report else "",
            format_bytes(report.peak_bytes) if report else "",
            format_bytes(report.predicted_peak_bytes) if report else "",
            format_bytes(result.peak_resident_bytes),
            f"{result.steps[0].loss:.3f} -> {result.steps[-1].loss:.3f}",
            "equal" if result.same_bits(reference) else "DIFFERENT",
        )
    table.caption = (
        "Step: the median after the first ones. Peak: of all tensors and workspace. Resident: by how much "
        "the process grew, everything counted."
    )
    table.caption_justify = "left"
    return table


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
