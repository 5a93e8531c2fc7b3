"""Seconds and resident bytes of one training step, by the way memory is managed.

    python benchmarks/step_time.py -o out/step_time.json

The ways take turns, step by step, in processes that live throughout: in memory (the reference),
torch.utils.checkpoint on each block, penstock at 45 % of the activations' memory, penstock at the
peak of checkpointing, and saved-tensor hooks that write every tensor to a file and read it back.
Each trains the same GPT from the same seed on the same batches; losses and weights are compared
bit for bit after the timing. The files of the last way go through the page cache and are never
synced; penstock's transfers bypass the page cache where the disk allows it, never synced either.

The JSON holds every sample. See `--quick` for a check that it all works, in less than a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import gpt  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402
from rich.table import Table  # noqa: E402
from ways import UNSETTLED_STEPS, Job, Result, Worker, trace_of  # noqa: E402

import penstock  # noqa: E402
from penstock.core.pressure import minimum_bytes  # noqa: E402
from penstock.units import format_bytes, format_bytes_up, format_seconds  # noqa: E402

FRACTION = 0.45
QUICK = gpt.Config(layers=12, width=64, heads=4, context=64, batch=2)
REFERENCE = "in memory"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=24, help="of each way; default: %(default)s")
    parser.add_argument("--batch", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--spill-dir", default=tempfile.gettempdir(), metavar="DIR", help="default: %(default)s"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model, for a few steps")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "out" / "step_time.json", metavar="FILE")
    options = parser.parse_args(arguments)
    if options.steps <= UNSETTLED_STEPS:
        parser.error(f"--steps: give {UNSETTLED_STEPS + 1} or more")

    steps = UNSETTLED_STEPS + 2 if options.quick else options.steps
    config = replace(QUICK if options.quick else gpt.Config(batch=options.batch), seed=options.seed)
    console = Console(highlight=False)
    console.width = max(console.width, 110)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        hardware_file = Path(scratch) / "hardware.json"
        hardware = penstock.probe(options.spill_dir, time_budget_s=1.0 if options.quick else 10.0)
        hardware.save(hardware_file)
        jobs, left_out = plan_jobs(config, hardware_file, options.spill_dir)
        results = measure(jobs, steps, console)

    summaries = {name: summary(jobs[name], result, results[REFERENCE]) for name, result in results.items()}
    document = {
        "benchmark": "step_time",
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "machine": machine(),
        "hardware": msgspec.to_builtins(hardware),
        "versions": versions(),
        "config": asdict(config),
        "unsettled_steps": UNSETTLED_STEPS,
        "left_out": left_out,
        "ways": summaries,
    }
    options.output.write_text(json.dumps(document, indent=1) + "\n")
    console.print(drawn(summaries))
    for name, reason in left_out.items():
        console.print(f"{name}: left out, {reason}")
    console.print(f"wrote {options.output}")
    return 0


def plan_jobs(
    config: gpt.Config, hardware_file: Path, spill_dir: str
) -> tuple[dict[str, Job], dict[str, str]]:
    """What each way is to do, by name; and what is left out, and why."""
    trace, checkpointed = trace_of(config), trace_of(replace(config, checkpoint=True))
    minimum = minimum_bytes(trace)
    budgets = {
        f"penstock at {FRACTION:.0%}": trace.persistent_bytes
        + int(FRACTION * (trace.peak_bytes - trace.persistent_bytes)),
        "penstock at checkpoint's peak": checkpointed.peak_bytes,
    }
    jobs = {way: Job(way, config, spill_dir=spill_dir) for way in (REFERENCE, "checkpoint", "files")}
    left_out = {}
    for name, budget in budgets.items():
        if budget < minimum:
            left_out[name] = f"{format_bytes(budget)} is below the minimum of {format_bytes_up(minimum)}"
        else:
            jobs[name] = Job("penstock", config, budget, str(hardware_file), spill_dir=spill_dir)
    return jobs, left_out


def measure(jobs: dict[str, Job], steps: int, console: Console) -> dict[str, Result]:
    """Let the ways take turns; each round begins with another one."""
    names = list(jobs)
    with ExitStack() as stack:
        workers = {name: stack.enter_context(Worker(job)) for name, job in jobs.items()}
        progress = stack.enter_context(Progress(console=console))
        bar = progress.add_task("steps", total=steps * len(names))
        for round_number in range(steps):
            shift = round_number % len(names)
            for name in names[shift:] + names[:shift]:
                progress.update(bar, description=f"{name:<30}")
                workers[name].step()
                progress.advance(bar)
        return {name: worker.finish() for name, worker in workers.items()}


def summary(job: Job, result: Result, reference: Result) -> dict[str, Any]:
    lower, median, upper = statistics.quantiles(result.settled_s, n=4, method="inclusive")
    return {
        "device_budget_bytes": job.device_budget_bytes or None,
        "median_s": median,
        "min_s": min(result.settled_s),
        "quartiles_s": [lower, upper],
        "ratio": median / statistics.median(reference.settled_s),
        "peak_resident_bytes": result.peak_resident_bytes,
        "memory_ratio": result.peak_resident_bytes / reference.peak_resident_bytes,
        "same_bits": result.same_bits(reference),
        "loss": [step.loss for step in result.steps],
        "samples_s": [step.step_s for step in result.steps],
    }


def drawn(summaries: dict[str, dict[str, Any]]) -> Table:
    columns = ("", "median", "of in memory", "least", "quartiles", "peak resident", "of in memory", "bits")
    table = Table(*columns, box=None)
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for name, row in summaries.items():
        table.add_row(
            name,
            format_seconds(row["median_s"]),
            f"{row['ratio']:.2f} x",
            format_seconds(row["min_s"]),
            " - ".join(map(format_seconds, row["quartiles_s"])),
            format_bytes(row["peak_resident_bytes"]),
            f"{row['memory_ratio']:.0%}",
            "equal" if row["same_bits"] else "DIFFERENT",
        )
    return table


def commit() -> str:
    """The commit of the code, marked where files differ from it."""
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
    }


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "penstock": penstock.__version__,
    }


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
