"""What it costs when a disk becomes three times slower while a run goes on.

    python benchmarks/slow_disk.py -o out/slow_disk.json

A small GPT trains in half of its memory, on a disk of a given rate each way: bytes pass through the page
cache, and each transfer is made to last as long as it would at that rate. Later the rate is a third.
Compared are, in turns, seconds a step when the disk has long been slow:

- planned again: what penstock does by itself
- planned for the slow disk: the run was told its rates at the start, and it was slow from then on
- planned for the fast disk: the same plan is kept (`offload(plan=...)`)

The JSON holds every sample. See `--quick` for a check that it all works; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from time import perf_counter
from typing import Any

from rich.table import Table
from step_time import ROOT, add_common_arguments, heading, quartiles, wide_console, write

sys.path.insert(0, str(ROOT / "examples"))
sys.path.insert(0, str(ROOT))

import gpt
from methods import trace_of, train_step

import penstock
from penstock.storage.paths import TRANSPORTS
from penstock.units import format_rate, format_seconds
from tests.support.slow_disk import Rate, SlowDisk

SLOWER = 3
FAST_STEPS = 15  # the first five are recorded, or slow
MEASURED_STEPS = 20
AGAIN, SLOW, KEPT = "planned again", "planned for the slow disk", "planned for the fast disk"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=80, help="on the slow disk; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--rate", type=float, default=200.0, help="of the disk, MB/s; default: %(default)s")
    add_common_arguments(parser, "slow_disk")
    options = parser.parse_args(arguments)
    rounds = 1 if options.quick else options.rounds
    console = wide_console()
    runs: dict[str, list[dict[str, Any]]] = {AGAIN: [], SLOW: [], KEPT: []}
    plan: penstock.Plan | None = None
    for _ in range(rounds):
        for name, found in runs.items():
            result = train(name, options.spill_dir, options.steps, options.rate * 1e6, plan)
            plan = plan or result.pop("plan")
            result.pop("plan", None)
            found.append(result)
            console.print(f"{name:<28}{format_seconds(result['median_s']):>10}  {result['replans']} replans")
    document = {
        **heading("slow_disk"),
        "config": asdict(gpt.QUICK),
        "fast_bytes_per_s": options.rate * 1e6,
        "slow_bytes_per_s": options.rate * 1e6 / SLOWER,
        "runs": runs,
    }
    console.print(drawn(runs))
    write(document, options.output, console)
    return 0


def train(
    name: str, spill_dir: str, steps: int, fast_bytes_per_s: float, plan: penstock.Plan | None
) -> dict[str, Any]:
    """Some steps on the fast disk, and then on the slow one. Gives the plan for the fast disk, too."""
    rate = Rate(fast_bytes_per_s / SLOWER if name == SLOW else fast_bytes_per_s)
    TRANSPORTS["posix"] = lambda: SlowDisk(rate)
    budget_bytes = trace_of(gpt.QUICK).peak_bytes // 2
    hardware = penstock.Hardware(
        device_bytes=budget_bytes,
        disk_bytes=8 << 30,
        disk_read_bytes_per_s=rate.bytes_per_s,
        disk_write_bytes_per_s=rate.bytes_per_s,
        disk_shares_bus=False,
    )
    samples_s: list[float] = []
    with penstock.offload(
        device_budget=budget_bytes,
        spill_dir=spill_dir,
        hardware=hardware,
        plan=plan if name == KEPT else None,
        io=penstock.IoOptions(paths="posix direct"),
        planning=penstock.PlanOptions(smallest_bytes="16KiB", compress=False, recompute=False),
    ) as run:
        model, optimizer, batches, loss = gpt.build(replace(gpt.QUICK, seed=0))
        for step in range(FAST_STEPS + steps):
            if step == FAST_STEPS:
                fast_plan = run.plan
                rate.bytes_per_s = fast_bytes_per_s / SLOWER
            begun_s = perf_counter()
            with run.step():
                train_step(model, optimizer, loss, next(batches))
            samples_s.append(perf_counter() - begun_s)
        report = run.report()
    measured_s = samples_s[-MEASURED_STEPS:]
    return {
        "plan": fast_plan,
        "median_s": statistics.median(measured_s),
        "quartiles_s": quartiles(measured_s),
        "predicted_s": report.predicted_step_s,
        "stall_s": report.stall_s,
        "replans": report.replans,
        "planned_rates_bytes_per_s": dict(report.planned_rates_bytes_per_s),
        "samples_s": samples_s,
    }


def drawn(runs: dict[str, list[dict[str, Any]]]) -> Table:
    table = Table(
        "", "step", "ratio", "rounds", "predicted", "replans", "planned for", box=None, padding=(0, 1)
    )
    slow_s = statistics.median(result["median_s"] for result in runs[SLOW])
    for name, results in runs.items():
        median_s = statistics.median(result["median_s"] for result in results)
        last = results[-1]
        table.add_row(
            name,
            format_seconds(median_s),
            f"{median_s / slow_s:.2f} x",
            ", ".join(format_seconds(result["median_s"]) for result in results),
            format_seconds(last["predicted_s"]),
            str(last["replans"]),
            ", ".join(
                f"{link} {format_rate(rate)}" for link, rate in last["planned_rates_bytes_per_s"].items()
            ),
        )
    return table


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
