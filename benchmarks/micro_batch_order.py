"""What the order of micro-batches costs where weights move: part by part, and layer by layer.

    python benchmarks/micro_batch_order.py -o out/micro_batch_order.json

A GPT trains in half of the bytes of its weights, each batch in four parts, on a disk of a given rate each
way: bytes pass through the page cache, and each transfer is made to last as long as it would at that rate.
Compared are, in turns, the two orders, whose bits are equal, and the whole batch, where the budget has room
for it.

The JSON holds every sample. See `--quick` for a check that it all works; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from time import perf_counter
from typing import Any

from rich.table import Table
from step_time import ROOT, add_common_arguments, heading, quartiles, wide_console, write

sys.path.insert(0, str(ROOT / "examples"))
sys.path.insert(0, str(ROOT))

import gpt

import penstock
from penstock.storage.paths import TRANSPORTS
from penstock.units import format_bytes, format_seconds
from tests.support.slow_disk import Rate, SlowDisk

PARTS = 4
UNMEASURED_STEPS = 5  # recorded, or before there is a plan
PART, LAYER, WHOLE = "part by part", "layer by layer", "the whole batch"
OPTIONS: dict[str, dict[str, Any]] = {
    PART: {"micro_batch": 1, "micro_batch_order": "part"},
    LAYER: {"micro_batch": 1, "micro_batch_order": "layer"},
    WHOLE: {},
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=8, help="that are measured; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--rate", type=float, default=300.0, help="of the disk, MB/s; default: %(default)s")
    parser.add_argument("--width", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--context", type=int, default=64, help="default: %(default)s")
    add_common_arguments(parser, "micro_batch_order")
    options = parser.parse_args(arguments)
    rounds, steps = (1, 2) if options.quick else (options.rounds, options.steps)
    config = gpt.Config(layers=6, width=options.width, context=options.context, batch=PARTS)
    if options.quick:
        config = replace(config, width=256, context=32)
    console = wide_console()
    TRANSPORTS["posix"] = lambda: SlowDisk(Rate(options.rate * 1e6))
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in OPTIONS}
    for _ in range(rounds):
        for name, found in runs.items():
            result = train(name, config, options.spill_dir, steps, options.rate * 1e6)
            found.append(result)
            console.print(f"{name:<20}{result.get('error') or format_seconds(result['median_s'])}")
    if {tuple(result["losses"]) for name in (PART, LAYER) for result in runs[name]} != {
        tuple(runs[PART][0]["losses"])
    }:
        raise SystemExit("the losses of the two orders differ")
    document = {
        **heading("micro_batch_order"),
        "config": asdict(config),
        "disk_bytes_per_s": options.rate * 1e6,
        "runs": runs,
    }
    console.print(drawn(runs))
    write(document, options.output, console)
    return 0


def train(name: str, config: gpt.Config, spill_dir: str, steps: int, bytes_per_s: float) -> dict[str, Any]:
    """Some steps in half of the bytes of the weights, the last ones measured."""
    with penstock.fake_mode():
        weights_bytes = sum(parameter.nbytes for parameter in gpt.GPT(config).parameters())
    budget_bytes = weights_bytes // 2
    hardware = penstock.Hardware(
        device_bytes=budget_bytes,
        disk_bytes=64 << 30,
        disk_read_bytes_per_s=bytes_per_s,
        disk_write_bytes_per_s=bytes_per_s,
        disk_shares_bus=False,
    )
    samples_s: list[float] = []
    losses: list[str] = []
    try:
        with penstock.offload(
            device_budget=budget_bytes,
            spill_dir=spill_dir,
            hardware=hardware,
            **penstock.options.grouped({"paths": "posix direct"} | OPTIONS[name]),
        ) as run:
            model, optimizer, batches, loss = gpt.build(config)
            for _ in range(UNMEASURED_STEPS + steps):
                begun_s = perf_counter()
                with run.step():
                    batch_loss = run.accumulate(next(batches), partial(loss, model), blocks=model)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(batch_loss.item().hex())
                samples_s.append(perf_counter() - begun_s)
            report = run.report()
    except penstock.BudgetTooSmall as error:
        return {"error": str(error), "losses": losses}
    measured_s = samples_s[-steps:]
    return {
        "median_s": statistics.median(measured_s),
        "quartiles_s": quartiles(measured_s),
        "predicted_s": report.predicted_step_s,
        "in_memory_s": report.ideal_s,
        "stall_s": report.stall_s,
        "weights_bytes": weights_bytes,
        "budget_bytes": budget_bytes,
        "peak_bytes": report.peak_bytes,
        "read_bytes": report.loaded_bytes,
        "written_bytes": report.disk_written_bytes,
        "recomputed_bytes": report.recomputed_bytes,
        "samples_s": samples_s,
        "losses": losses,
    }


def drawn(runs: dict[str, list[dict[str, Any]]]) -> Table:
    table = Table(
        "",
        "step",
        "rounds",
        "predicted",
        "in memory",
        "read",
        "written",
        "recomputed",
        box=None,
        padding=(0, 1),
    )
    for name, results in runs.items():
        if any("error" in result for result in results):
            table.add_row(name, "does not fit")
            continue
        table.add_row(
            name,
            format_seconds(statistics.median(result["median_s"] for result in results)),
            ", ".join(format_seconds(result["median_s"]) for result in results),
            *(
                format_seconds(statistics.median(result[key] for result in results))
                for key in ("predicted_s", "in_memory_s")
            ),
            *(
                format_bytes(statistics.median_low(result[key] for result in results))
                for key in ("read_bytes", "written_bytes", "recomputed_bytes")
            ),
        )
    return table


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
