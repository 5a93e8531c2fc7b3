"""What every policy predicts of a training step, and what is measured: seconds, peak and bytes.

    python benchmarks/policies.py -o out/policies.json

Two small models, a GPT and a residual network, in memory and by each policy, step by step in turns, in
processes that live throughout. The budget is half of the in-memory peak (weights, gradients, optimizer state
and activations), or where a policy cannot reach that, the first twentieth of the peak more that it can.
Losses, weights and optimizer state are compared bit for bit after the timing. What was predicted is said by
penstock's own report at the end, with the kernel times of the steps that were recorded.

The JSON holds every sample. See `--quick` for a check that it all works; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
from rich.table import Table
from step_time import (
    REFERENCE,
    ROOT,
    add_common_arguments,
    heading,
    measure,
    summary,
    wide_console,
    write,
)

sys.path.insert(0, str(ROOT / "examples"))
sys.path.insert(0, str(Path(__file__).with_name("programs")))

import cnn
import gpt
from methods import UNSETTLED_STEPS, Job, trace_of

import penstock
from penstock.errors import InvalidArgument, PenstockError
from penstock.units import format_bytes, format_seconds

POLICIES = ("flashneuron", "g10", "modnn", "vdnn_all", "vdnn_conv", "optimal")
MODELS: dict[
    str, tuple[ModuleType, Any, Any]
] = {  # the program, and what it is asked to do, also with --quick
    "GPT": (gpt, gpt.Config(layers=6, width=256, heads=8, context=128, batch=16), gpt.QUICK),
    "CNN": (cnn, cnn.Config(), cnn.Config(blocks=3, width=24, batch=16)),
}
TWENTIETHS = range(10, 21)  # of the in-memory peak; with all of it nothing moves


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=24, help="of each policy; default: %(default)s")
    parser.add_argument("--model", choices=MODELS, action="append", help="default: both")
    add_common_arguments(parser, "policies")
    options = parser.parse_args(arguments)
    steps = UNSETTLED_STEPS + 2 if options.quick else options.steps
    if steps <= UNSETTLED_STEPS:
        parser.error(f"--steps: give {UNSETTLED_STEPS + 1} or more")

    console = wide_console()
    models: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        hardware_file = Path(scratch) / "hardware.json"
        hardware = penstock.probe(options.spill_dir, time_budget_s=1.0 if options.quick else 10.0)
        hardware.save(hardware_file)
        for name in options.model or MODELS:
            program, config, quick = MODELS[name]
            config = quick if options.quick else config
            trace = trace_of(config, program.build)
            common = {"config": config, "program": str(program.__file__), "spill_dir": options.spill_dir}
            jobs = {REFERENCE: Job(REFERENCE, **common)}
            for policy in POLICIES:
                jobs[policy] = Job(
                    "penstock",
                    **common,
                    policy=policy,
                    device_budget_bytes=budget_of(trace, hardware, policy),
                    hardware_file=str(hardware_file),
                )
            results = measure(jobs, steps, console)
            rows = {key: summary(jobs[key], result, results[REFERENCE]) for key, result in results.items()}
            models[name] = {
                "config": asdict(config),
                "in_memory_peak_bytes": trace.peak_bytes,
                "policies": rows,
            }
            console.print(drawn(name, rows))
    document = {
        **heading("policies"),
        "hardware": msgspec.to_builtins(hardware),
        "unsettled_steps": UNSETTLED_STEPS,
        "models": models,
    }
    write(document, options.output, console)
    return 0


def budget_of(trace: penstock.Trace, hardware: penstock.Hardware, policy: str) -> int:
    """The first budget that the policy can reach. Raises PenstockError where it reaches none."""
    machine = replace(hardware, device_bytes=trace.peak_bytes)
    failure: PenstockError = InvalidArgument(f"the policy {policy!r} was tried with no budget")
    for share in TWENTIETHS:
        budget_bytes = trace.peak_bytes * share // 20
        try:
            penstock.plan(trace, machine, policy, False, False, 1.0, device_budget_bytes=budget_bytes)
        except PenstockError as refused:
            failure = refused
        else:
            return budget_bytes
    raise failure


def drawn(model: str, rows: dict[str, dict[str, Any]]) -> Table:
    columns = (
        model,
        "budget",
        "policy",
        "step",
        "quartiles",
        "ratio",
        "predicted",
        "error",
        "stalls",
        "predicted",
        "peak",
        "predicted",
        "moved out",
        "predicted",
        "replans",
        "bits",
    )
    table = Table(*columns, box=None, padding=(0, 1))
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    table.columns[0].justify = "left"
    for name, row in rows.items():
        report, own = row["report"], [""] * 8
        if report is not None:
            own = [
                format_seconds(report["predicted_step_s"]),
                f"{row['median_s'] / report['predicted_step_s'] - 1:+.1%}"
                if report["predicted_step_s"]
                else "",
                format_seconds(report["stall_s"]),
                format_seconds(report["predicted_stall_s"]),
                format_bytes(report["peak_bytes"]),
                format_bytes(report["predicted_peak_bytes"]),
                format_bytes(report["evicted_bytes"]),
                format_bytes(report["predicted_evicted_bytes"]),
            ]
        table.add_row(
            name,
            format_bytes(row["device_budget_bytes"]) if row["device_budget_bytes"] else "",
            report["policy"] if report is not None else "",
            format_seconds(row["median_s"]),
            " - ".join(map(format_seconds, row["quartiles_s"])),
            f"{row['ratio']:.2f} x",
            *own,
            str(report["replans"]) if report is not None else "",
            "equal" if row["same_bits"] else "DIFFERENT",
        )
    return table


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
