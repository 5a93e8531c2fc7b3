"""Training under a hard memory limit of the operating system: penstock against the system's swap.

    python benchmarks/memory_limit.py -o out/memory_limit.json

Needs root, for a memory control group (version 1 or 2) and a swap file. Two parts.

`swap`: the GPT of examples/demo.py in memory without a limit; then with penstock at a fifth of its in-memory
peak, and plain PyTorch that the system swaps, each in a process that has no more memory than penstock's
budget, 5 % and 64 MiB, and what Python and torch need before a model is built. The swap file lies in
--spill-dir, on the disk that penstock uses, and is removed afterwards. Swap is on for both; pages swapped are
the whole system's, counted during the steps after the first ones.

`larger`: a GPT whose weights and Adam state are four times the budget, built inside it, under such a limit.
Its step is held against the longer of two bounds: the step of the same model in memory, and the bytes that
penstock moved at the rates that the disk was measured to have, each way alone and both at once.

The JSON holds every sample. See `--quick` for a check that it all works; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
from control_groups import ControlGroup, Unavailable, require_root, swap_file, swapped_pages
from rich.console import Console
from rich.table import Table
from step_time import ROOT, add_common_arguments, drawn, heading, summary, wide_console, write

sys.path.insert(0, str(ROOT / "examples"))

import gpt
from methods import UNSETTLED_STEPS, Job, Result, Worker, trace_of

import penstock
from penstock.units import format_bytes, format_seconds

PARTS = ("swap", "larger")
PERCENT = 20  # of the in-memory peak, in part `swap`
TIMES = 4  # weights and Adam state over the budget, in part `larger`
LARGER = gpt.Config(layers=14, width=1024, heads=16, batch=4)  # 2 GiB of weights and Adam state
QUICK_LARGER = gpt.Config(layers=8, width=256, heads=4, context=64, batch=2)
SWAP_STEPS = 3  # of plain PyTorch, which take long

Measured = tuple[Result, dict[str, Any]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12, help="of each method; default: %(default)s")
    parser.add_argument(
        "--swap-steps", type=int, default=SWAP_STEPS, help="of what the system swaps; default: %(default)s"
    )
    parser.add_argument("--part", choices=PARTS, action="append", help="default: both")
    add_common_arguments(parser, "memory_limit")
    options = parser.parse_args(arguments)
    if options.steps <= UNSETTLED_STEPS:
        parser.error(f"--steps: give {UNSETTLED_STEPS + 1} or more")
    if options.swap_steps < 2:
        parser.error("--swap-steps: give 2 or more")
    try:
        require_root()
    except Unavailable as error:
        parser.error(str(error))

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # the swap file has to go
    if options.quick:
        options.steps, options.swap_steps = UNSETTLED_STEPS + 2, 2
    console = wide_console()
    parts = {"swap": measure_swap, "larger": measure_larger}
    with tempfile.TemporaryDirectory() as scratch:
        hardware_file = Path(scratch) / "hardware.json"
        hardware = penstock.probe(options.spill_dir, time_limit_s=1.0 if options.quick else 10.0)
        hardware.save(hardware_file)
        try:
            measured = {part: parts[part](options, hardware_file, console) for part in options.part or PARTS}
        except Unavailable as error:
            sys.exit(f"this cannot be measured here: {error}")
    write({**heading("memory_limit"), "hardware": msgspec.to_builtins(hardware), **measured}, options.output,
          console)  # fmt: skip
    return 0


def measure_swap(options: argparse.Namespace, hardware_file: Path, console: Console) -> dict[str, Any]:
    config = gpt.QUICK if options.quick else gpt.Config()
    peak_bytes = trace_of(config).peak_bytes
    plain = Job("in memory", config)
    paged = Job(
        "penstock",
        config,
        device_budget_bytes=peak_bytes * PERCENT // 100,
        hardware_file=str(hardware_file),
        spill_dir=options.spill_dir,
    )
    console.rule("The same training under a hard limit", align="left")
    in_memory = train(plain, options.steps)
    # What is swapped takes its time: fewer steps, and the same number in memory to compare bits with.
    few = train(plain, options.swap_steps)
    with swap_file(options.spill_dir, 2 * peak_bytes + (256 << 20)):
        ours, our_facts = train_limited(paged, options.steps)
        limit_bytes = our_facts["limit_bytes"]
        swapped, swap_facts = train_limited(plain, options.swap_steps, limit_bytes)

    rows = {
        "in memory, no limit": {**summary(plain, in_memory, in_memory)},
        f"penstock, {PERCENT} %": {**summary(paged, ours, in_memory), **our_facts},
        "the system's swap": {**swap_summary(swapped, few, in_memory), **swap_facts},
    }
    table = Table("", "step", "ratio", "limit", "most", "pages swapped in", "out", "bits", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, row in rows.items():
        table.add_row(
            name,
            format_seconds(row["median_s"]),
            f"{row['ratio']:.2f} x",
            format_bytes(row["limit_bytes"]) if "limit_bytes" in row else "none",
            format_bytes(row["group_peak_bytes"]) if "limit_bytes" in row else "",
            str(row.get("pages_swapped_in", 0)),
            str(row.get("pages_swapped_out", 0)),
            "equal" if row["same_bits"] else "DIFFERENT",
        )
    console.print(table)
    faster = rows["the system's swap"]["median_s"] / rows[f"penstock, {PERCENT} %"]["median_s"]
    console.print(f"penstock is {faster:.1f} times as fast as the system's swap")
    return {"config": asdict(config), "in_memory_peak_bytes": peak_bytes, "faster": faster, "rows": rows}


def swap_summary(result: Result, same_steps: Result, in_memory: Result) -> dict[str, Any]:
    """Of few steps, of which the first one is left out: everything is swapped from then on."""
    samples_s = [step.step_s for step in result.steps]
    median_s = statistics.median(samples_s[1:])
    return {
        "median_s": median_s,
        "ratio": median_s / statistics.median(in_memory.settled_s),
        "same_bits": result.same_bits(same_steps),
        "samples_s": samples_s,
    }


def measure_larger(options: argparse.Namespace, hardware_file: Path, console: Console) -> dict[str, Any]:
    config = QUICK_LARGER if options.quick else LARGER
    persistent_bytes = trace_of(config).persistent_bytes
    plain = Job("in memory", config)
    paged = Job(
        "penstock",
        config,
        device_budget_bytes=persistent_bytes // TIMES,
        hardware_file=str(hardware_file),
        spill_dir=options.spill_dir,
    )
    console.rule(
        f"{format_bytes(persistent_bytes)} of weights and Adam state in "
        f"{format_bytes(paged.device_budget_bytes)}",
        align="left",
    )
    in_memory = train(plain, options.steps)
    ours, facts = train_limited(paged, options.steps)
    rows = {
        "in memory, no limit": summary(plain, in_memory, in_memory),
        "penstock": {**summary(paged, ours, in_memory), **facts},
    }
    hardware = penstock.Hardware.load(hardware_file)
    report = ours.report
    assert report is not None
    bounds = disk_bounds_s(hardware, report.evicted_bytes, report.loaded_bytes)
    compute_s = rows["in memory, no limit"]["median_s"]
    bound_s = max(compute_s, bounds["disk_s"])
    step_s = rows["penstock"]["median_s"]
    console.print(drawn(rows))
    console.print(
        f"compute {format_seconds(compute_s)}; the disk {format_seconds(bounds['disk_s'])} for "
        f"{format_bytes(report.evicted_bytes)} out and {format_bytes(report.loaded_bytes)} in; the step "
        f"takes {step_s / bound_s:.2f} of the larger one. Limit {format_bytes(facts['limit_bytes'])}, most "
        f"{format_bytes(facts['group_peak_bytes'])}, {facts['pages_swapped_out']} pages swapped out"
    )
    return {
        "config": asdict(config),
        "persistent_bytes": persistent_bytes,
        "compute_s": compute_s,
        **bounds,
        "over_bound": step_s / bound_s,
        "rows": rows,
    }


def disk_bounds_s(hardware: penstock.Hardware, written_bytes: int, read_bytes: int) -> dict[str, float]:
    """The least seconds that the disk needs, at the rates of large transfers.

    While both directions are busy each runs at `Hardware.duplex` of its rate; what is left of the longer
    one runs alone.
    """
    write_s = written_bytes / rate(hardware, "disk_write")
    read_s = read_bytes / rate(hardware, "disk_read")
    both_s = min(write_s, read_s) / hardware.duplex
    return {"write_s": write_s, "read_s": read_s, "disk_s": both_s + abs(write_s - read_s)}


def rate(hardware: penstock.Hardware, link: str) -> float:
    large = 4 << 20
    return large / hardware.transfer_s(link, large)


def train(job: Job, steps: int) -> Result:
    with Worker(job) as worker:
        for _ in range(steps):
            worker.step()
        return worker.finish()


def train_limited(
    job: Job, steps: int, limit_bytes: int | None = None, more_bytes: int | None = None
) -> Measured:
    """In a control group of its own, with a limit from before the model is built.

    limit_bytes   None: what the process takes by then, and `more_bytes`
    more_bytes    None: the budget, and 5 % of it and 64 MiB for the rest of penstock
    """
    with (
        ControlGroup("penstock-benchmark") as group,
        Worker(replace(job, control_group=str(group.path))) as worker,
    ):
        worker.wait_until_loaded()
        before_bytes = group.unevictable_bytes()
        if limit_bytes is None:
            if more_bytes is None:
                more_bytes = job.device_budget_bytes * 105 // 100 + (64 << 20)
            limit_bytes = before_bytes + more_bytes
        group.limit(limit_bytes)
        worker.build()
        first_steps = min(UNSETTLED_STEPS, steps - 1) if job.method == "penstock" else 1
        for _ in range(first_steps):
            worker.step()
        before = swapped_pages()
        for _ in range(steps - first_steps):
            worker.step()
        after = swapped_pages()
        facts = {
            "limit_bytes": limit_bytes,
            "before_bytes": before_bytes,
            "group_peak_bytes": group.peak_bytes(),
            "swapped_bytes": group.swapped_bytes(),
            "refaulted_pages": group.swapped_in_pages(),
            "pages_swapped_in": after[0] - before[0],
            "pages_swapped_out": after[1] - before[1],
            "control_groups": group.version,
        }
        result = worker.finish()
    return result, facts


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
