"""The papers' policies and penstock's own in real training: seconds, bytes and what was predicted.

    python benchmarks/policies.py -o out/policies.json [--models GPT VGG] [--shares 65 35]

Seven small models, in memory and by each policy at shares of the in-memory peak (weights, gradients,
optimizer state and activations), step by step in turns, in processes that live throughout. Each policy may do
what its paper has, and so none but `optimal` recomputes. Losses, weights and optimizer state are compared bit
for bit after the timing. What was predicted is said by penstock's own report at the end, with the kernel
times of the steps that were recorded.

--batches adds what each policy plans for larger batches in the memory that the model takes in training as it
is: the largest that fits, and the most samples a second. Nothing is run for that.

Not here: vDNN's lock-step (one copy beside one kernel, and both wait for the other), which no run carries
out and benchmarks/papers.py simulates; G10 as its artifact has it, which plans for published traces
(benchmarks/planners.py).

The JSON holds every sample. See `--quick` for a check that it all works, on two models at one share if no
others are named; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from step_time import (
    REFERENCE,
    ROOT,
    MethodFailed,
    add_common_arguments,
    heading,
    measure,
    summary,
    wide_console,
    write,
)

sys.path.insert(0, str(ROOT / "examples"))

from methods import UNSETTLED_STEPS, Job
from papers_bench import programs
from papers_bench.programs import Config, captured

import penstock
from penstock.errors import PenstockError
from penstock.units import format_bytes, format_seconds

MODELS = {  # and with --quick
    "GPT": (Config("gpt", 32, 6, 256, 128), Config("gpt", 2, 2, 64, 32)),
    "Llama": (Config("llama", 16, 4, 256, 128), Config("llama", 2, 2, 64, 16)),
    "ViT": (Config("vit", 32, 6, 256, 64), Config("vit", 2, 2, 64, 32)),
    "ResNet-50": (Config("resnet50", 32, 0, 0, 64), Config("resnet50", 2, 0, 0, 32)),
    "VGG": (Config("vgg", 128, 2, 32, 64), Config("vgg", 4, 1, 8, 32)),
    "LSTM": (Config("lstm", 64, 2, 256, 64), Config("lstm", 2, 2, 32, 8)),
    "DLRM": (Config("dlrm", 2048, 12, 64, 20000), Config("dlrm", 64, 8, 32, 4000)),
}
_ALONE = {"recompute": False, "compress": False}
POLICIES: dict[str, dict[str, Any]] = {
    "optimal": {},
    "evict_all": {"policy": "evict_all", **_ALONE},
    "vdnn_all": {"policy": "vdnn_all", **_ALONE},
    "vdnn_conv": {"policy": "vdnn_conv", **_ALONE},
    "flashneuron": {"policy": "flashneuron", **_ALONE},
    "flashneuron, CSR": {"policy": "flashneuron", "recompute": False},
    "flashneuron, FP16": {"policy": "flashneuron", **_ALONE, "lossy": "fp16"},
    "flashneuron, CSR and FP16": {"policy": "flashneuron", "recompute": False, "lossy": "fp16"},
    "modnn": {"policy": "modnn", **_ALONE},
    "modnn, variants": {"policy": "modnn", **_ALONE, "variants": True},
    "g10": {"policy": "g10", **_ALONE},
}
OTHER_BITS = ("lossy", "variants")  # options that give other ones than training in memory
SHARES = (65, 50, 35)  # percent of the in-memory peak
QUICK_MODELS, QUICK_SHARES = ("GPT", "DLRM"), (50,)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12, help="of each policy; default: %(default)s")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="default: all")
    parser.add_argument("--shares", nargs="+", type=int, metavar="PERCENT", help="default: 65 50 35")
    parser.add_argument("--batches", action="store_true", help="plan for larger ones, too")
    add_common_arguments(parser, "policies")
    options = parser.parse_args(arguments)
    steps = UNSETTLED_STEPS + 2 if options.quick else options.steps
    if steps <= UNSETTLED_STEPS:
        parser.error(f"--steps: give {UNSETTLED_STEPS + 1} or more")

    console = wide_console()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        hardware_file = Path(scratch) / "hardware.json"
        hardware = penstock.probe(options.spill_dir, time_limit_s=1.0 if options.quick else 10.0)
        hardware.save(hardware_file)
        for name in options.models or (QUICK_MODELS if options.quick else MODELS):
            config = MODELS[name][options.quick]
            trace = captured(config)
            peak_bytes = trace.peak_bytes
            for share in options.shares or (QUICK_SHARES if options.quick else SHARES):
                job = Job(
                    "penstock",
                    config,
                    str(programs.__file__),
                    device_budget_bytes=peak_bytes * share // 100,
                    hardware_file=str(hardware_file),
                    spill_dir=options.spill_dir,
                )
                cells = at_share(job, trace, hardware, steps, console)
                console.print(drawn(f"{name}, {share} % of {format_bytes(peak_bytes)}", cells))
                rows += [
                    {"model": name, "share": share, "policy": policy, **cell}
                    for policy, cell in cells.items()
                ]
            if options.batches:
                for policy in (name for name in POLICIES if "," not in name):  # codecs are not planned for
                    planning = POLICIES[policy]
                    found = larger_batches(config, trace, hardware, planning)
                    rows.append({"model": name, "policy": policy, "batches": found})
                    console.print(f"{name}, {policy}, batches in {format_bytes(peak_bytes)}: {found}")
            # What was found stays where a later model fails.
            document = {**heading("policies"), "hardware": msgspec.to_builtins(hardware), "rows": rows}
            write({**document, "unsettled_steps": UNSETTLED_STEPS}, options.output, console)
    return 0


def at_share(
    job: Job, trace: penstock.Trace, hardware: penstock.Hardware, steps: int, console: Console
) -> dict[str, dict[str, Any]]:
    """A row of each policy in the budget of the job, and of training in memory. Where a policy cannot plan
    for it, or cannot be run in it, the row says why."""
    refused: dict[str, str] = {}
    jobs = {REFERENCE: replace(job, method=REFERENCE)}
    machine = replace(hardware, device_bytes=job.device_budget_bytes)
    for policy, planning in POLICIES.items():
        if reason := refusal(trace, machine, planning):
            refused[policy] = reason
        else:
            jobs[policy] = replace(job, planning=planning)
    while True:
        try:
            results = measure(jobs, steps, console)
            break
        except MethodFailed as error:
            if error.name == REFERENCE:
                raise
            refused[error.name] = str(error)
            del jobs[error.name]
    rows = {key: summary(jobs[key], result, results[REFERENCE]) for key, result in results.items()}
    return rows | {policy: {"refused": reason} for policy, reason in refused.items()}


def refusal(trace: penstock.Trace, machine: penstock.Hardware, planning: dict[str, Any]) -> str:
    """Why the policy has no plan for the machine. Empty where it has one."""
    options = penstock.PlanOptions(**planning)
    try:
        penstock.plan(trace, machine, options.policy, options.recompute, options.compress, 1.0)
    except PenstockError as error:
        return str(error)
    return ""


def larger_batches(
    config: Config, trace: penstock.Trace, hardware: penstock.Hardware, planning: dict[str, Any]
) -> dict[str, Any] | str:
    """The largest batch that is planned for the memory of the trace, the fastest a sample, and how much
    faster that is than the configuration's own in memory. Or why there is none."""

    def make_step(samples: int) -> Callable[[], None]:
        model, optimizer, batches, loss = programs.build(replace(config, batch=samples))
        batch = next(batches)

        def step() -> None:
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    options = penstock.PlanOptions(**planning)
    machine = replace(hardware, device_bytes=trace.peak_bytes)
    try:
        found = penstock.best_batch(make_step, machine, options.policy, recompute=options.recompute)
    except PenstockError as error:
        return str(error)
    plain_s = trace.ideal_s / config.batch
    return {
        "largest": found.largest.samples,
        "fastest": found.fastest.samples,
        "gain": plain_s * found.fastest.samples / found.fastest.step_s,
    }


def drawn(title: str, rows: dict[str, dict[str, Any]]) -> Table:
    columns = (
        "",
        "step",
        "quartiles",
        "ratio",
        "predicted",
        "error",
        "stalls",
        "predicted",
        "peak",
        "predicted",
    )
    table = Table(
        *columns, "moved out", "predicted", "replans", "bits", title=title, box=None, padding=(0, 1)
    )
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    table.columns[0].justify = "left"
    for name, row in rows.items():
        if "refused" in row:
            table.add_row(name, "-")
            continue
        report, own = row["report"], [""] * 9
        if report is not None:
            predicted_s = report["predicted_step_s"]
            own = [
                format_seconds(predicted_s),
                f"{row['median_s'] / predicted_s - 1:+.1%}" if predicted_s else "",
                format_seconds(report["stall_s"]),
                format_seconds(report["predicted_stall_s"]),
                format_bytes(report["peak_bytes"]),
                format_bytes(report["predicted_peak_bytes"]),
                format_bytes(report["evicted_bytes"]),
                format_bytes(report["predicted_evicted_bytes"]),
                str(report["replans"]),
            ]
        table.add_row(
            name,
            format_seconds(row["median_s"]),
            " - ".join(map(format_seconds, row["quartiles_s"])),
            f"{row['ratio']:.2f} x",
            *own,
            bits(name, row["same_bits"]),
        )
    return table


def bits(policy: str, equal: bool) -> str:
    if any(option in POLICIES.get(policy, {}) for option in OTHER_BITS):
        return "rounded" if "lossy" in POLICIES[policy] else "of other kernels"
    return "equal" if equal else "DIFFERENT"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
