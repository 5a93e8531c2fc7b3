"""Steps whose shapes change, and steps of tiny kernels: what penstock costs where it has little to do.

    python benchmarks/changing_shapes.py -o out/changing_shapes.json

Two models, each in memory, with a budget that holds everything, and with half of the memory, step by step in
turns. `llama`: a small Llama of transformers (pip install '.[bench-train]') on batches of 120 to 192 tokens.
`tiny kernels`: some thousand kernels of about 5 us each, and a few tensors that are worth moving. The memory
is what penstock counts with a budget that holds everything, in a run beforehand. The clock is the time that
the runtime itself takes, by operator.

The JSON holds every sample. See `--quick` for a check that it all works; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from step_time import (
    REFERENCE,
    ROOT,
    add_common_arguments,
    drawn,
    heading,
    measure,
    summary,
    wide_console,
    write,
)

sys.path.insert(0, str(ROOT / "examples"))
sys.path.insert(0, str(Path(__file__).with_name("programs")))

import tiny_kernels
from methods import UNSETTLED_STEPS, Job, Worker

import penstock
from penstock.units import format_seconds

MODELS = ("llama", "tiny kernels")
EVERYTHING_BYTES = 16 << 30
PERCENT = 50


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40, help="of each method; default: %(default)s")
    parser.add_argument("--model", choices=MODELS, action="append", help="default: both")
    add_common_arguments(parser, "changing_shapes")
    options = parser.parse_args(arguments)
    if options.steps <= UNSETTLED_STEPS:
        parser.error(f"--steps: give {UNSETTLED_STEPS + 1} or more")
    if options.quick:
        options.steps = UNSETTLED_STEPS + 3

    console = wide_console()
    hardware = penstock.probe(options.spill_dir, time_limit_s=1.0 if options.quick else 10.0)
    hardware_file = options.output.with_suffix(".hardware.json")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    hardware.save(hardware_file)
    try:
        measured = {
            name: measure_model(name, options, hardware_file, console) for name in options.model or MODELS
        }
    finally:
        hardware_file.unlink()
    write({**heading("changing_shapes"), "models": measured}, options.output, console)
    return 0


def measure_model(
    name: str, options: argparse.Namespace, hardware_file: Path, console: Console
) -> dict[str, Any]:
    plain = Job(REFERENCE, *program(name, options.quick))
    paged = replace(
        plain,
        method="penstock",
        device_budget_bytes=EVERYTHING_BYTES,
        hardware_file=str(hardware_file),
        spill_dir=options.spill_dir,
    )
    peak_bytes = memory_of(paged, options.steps)
    half = replace(paged, device_budget_bytes=peak_bytes * PERCENT // 100)
    jobs = {REFERENCE: plain, "penstock, everything fits": paged, f"penstock, {PERCENT} %": half}
    results = measure(jobs, options.steps, console)
    rows = {key: summary(jobs[key], result, results[REFERENCE]) for key, result in results.items()}
    console.rule(f"{name}", align="left")
    console.print(drawn(rows))
    for key, row in rows.items():
        if report := row["report"]:
            row["clock_s_per_operator"] = report["clock_s"] / max(report["operators"], 1)
            cost = "the clock rests"
            if report["operators"]:
                cost = (
                    f"{report['operators']} operators, the clock "
                    f"{format_seconds(row['clock_s_per_operator'])} each"
                )
            console.print(
                f"{key}: {cost}; {report['trace_mismatches']} steps ran other operators than those traced"
            )
    return {"config": asdict(plain.config), "in_memory_peak_bytes": peak_bytes, "methods": rows}


def program(name: str, quick: bool) -> tuple[Any, str]:
    """Its config, and its file."""
    if name == "llama":
        try:
            import llama
        except ModuleNotFoundError:
            sys.exit("Llama needs transformers: pip install '.[bench-train]', or --model 'tiny kernels'")
        return llama.Config(layers=2, width=128) if quick else llama.Config(), llama.__file__
    config = tiny_kernels.Config(layers=6, kernels=40) if quick else tiny_kernels.Config()
    return config, tiny_kernels.__file__


def memory_of(job: Job, steps: int) -> int:
    """The most bytes of tensors and workspace in any of the steps, with everything in memory."""
    with Worker(job) as worker:
        for _ in range(steps):
            worker.step()
        report = worker.finish().report
    assert report is not None
    return report.peak_bytes


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
