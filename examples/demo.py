"""Train one GPT three ways: in memory, with checkpointing, and with penstock in less memory.

    python examples/demo.py

Says beforehand what penstock will need and how long a step will take, then trains with the same
seed and the same batches, and holds everything against everything. Takes about six minutes on two
cores, and leaves a picture in out/demo.png.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from ways import UNSETTLED_STEPS, Job, Result, Worker

import penstock
from penstock import cli
from penstock.units import format_bytes, format_seconds, parse_bytes

OUT = Path(__file__).resolve().parents[1] / "out"
FRACTION = 0.45  # of the activations' memory

console = Console(highlight=False)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30, help="default: %(default)s")
    parser.add_argument("--spill-dir", default="", metavar="DIR", help="default: for temporary files")
    options = parser.parse_args()
    if options.steps <= UNSETTLED_STEPS:
        parser.error(f"--steps: give {UNSETTLED_STEPS + 1} or more")

    folder = OUT / "demo"
    trace_file, hardware_file = folder / "trace.json.gz", folder / "hardware.json"
    script = Path(__file__).with_name("gpt.py")

    console.rule("Before: what will it need?", align="left")
    spill = ["--spill-dir", options.spill_dir] if options.spill_dir else []
    command("probe", "--seconds", "5", *spill, "-o", str(hardware_file))
    command("trace", f"{script}:build", "-o", str(trace_file))
    trace = penstock.Trace.load(trace_file)
    activations_bytes = trace.peak_bytes - trace.persistent_bytes
    budget = f"{(trace.persistent_bytes + int(FRACTION * activations_bytes)) >> 20}MiB"
    console.print(
        f"\nThe budget: weights and optimizer state, {format_bytes(trace.persistent_bytes)}, "
        f"and {FRACTION:.0%} of the {format_bytes(activations_bytes)} that activations and gradients take."
    )
    command(
        "plan",
        str(trace_file),
        "--hardware",
        str(hardware_file),
        "--device-budget",
        budget,
        "-o",
        str(folder / "plan.json"),
    )

    console.rule(f"Three times {options.steps} steps", align="left")
    job = Job(
        "penstock",
        device_budget_bytes=parse_bytes(budget),
        hardware_file=str(hardware_file),
        record_folder=str(folder / "run"),
        spill_dir=options.spill_dir,
    )
    results = {
        way: train(replace(job, way=way), options.steps) for way in ("in memory", "checkpoint", "penstock")
    }

    console.rule("After", align="left")
    console.print(comparison(results))
    command("report", str(folder / "run"), "-o", str(OUT / "demo.png"))
    return 0


def command(*arguments: str) -> None:
    """Show a penstock command, and run it."""
    console.print(f"\n[bold]$ penstock {' '.join(map(shortened, arguments))}[/bold]", soft_wrap=True)
    if exit_code := cli.main(arguments):
        sys.exit(exit_code)


def shortened(argument: str) -> str:
    """Paths as seen from the repository."""
    return argument.removeprefix(f"{OUT.parent}/")


def train(job: Job, steps: int) -> Result:
    """Train one way in a process of its own, with a bar."""
    columns = (
        TextColumn(f"{job.way:<11}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress, Worker(job) as worker:
        bar = progress.add_task("", total=steps, state="")
        for _ in range(steps):
            step = worker.step()
            progress.update(
                bar, advance=1, state=f"loss {step.loss:.3f}  {format_seconds(step.step_s)} a step"
            )
        return worker.finish()


def comparison(results: dict[str, Result]) -> Table:
    reference = results["in memory"]
    reference_s = statistics.median(reference.settled_s)
    table = Table("", "step", "ratio", "peak resident", "ratio", "loss", "bits", box=None)
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for way, result in results.items():
        step_s = statistics.median(result.settled_s)
        table.add_row(
            way,
            format_seconds(step_s),
            f"{step_s / reference_s:.2f} x",
            format_bytes(result.peak_resident_bytes),
            f"{result.peak_resident_bytes / reference.peak_resident_bytes:.0%}",
            f"{result.steps[0].loss:.3f} -> {result.steps[-1].loss:.3f}",
            "equal" if result.same_bits(reference) else "DIFFERENT",
        )
    return table


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
