"""What it costs, and saves, that large weights leave memory in parts.

    python benchmarks/large_tensors.py -o out/large_tensors.json

An embedding whose weight, gradient and Adam state take four times its size W is trained with a small head, in
turns: in memory, and inside budgets of some W, divided into parts and whole. Where a budget is too small for
whole tensors, their row says so. All must have the same bits.

The JSON holds every sample. See `--quick` for a check that it all works; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from rich.table import Table
from step_time import add_common_arguments, heading, quartiles, wide_console, write
from torch import nn

import penstock
from penstock.capture import slices
from penstock.units import format_bytes, format_seconds

WIDTH = 512
UNMEASURED_STEPS = 5  # recorded, or before there is a plan
OPTIMIZERS = {
    "AdamW, fused": {"fused": True},
    "AdamW, foreach": {"foreach": True},
}
Key = tuple[str, str, float]  # optimizer, how, budget in W


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=192, help="W, in MiB; default: %(default)s")
    parser.add_argument("--steps", type=int, default=8, help="that are measured; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    add_common_arguments(parser, "large_tensors")
    options = parser.parse_args(arguments)
    rounds, steps = (1, 2) if options.quick else (options.rounds, options.steps)
    size_bytes = (64 if options.quick else options.megabytes) << 20
    console = wide_console()
    keys: list[Key] = [(name, "in memory", 0.0) for name in OPTIMIZERS]
    for name in OPTIMIZERS:
        keys += [(name, how, budget) for budget in (1.6, 3.1, 4.2) for how in ("in parts", "whole")]
    runs: dict[Key, list[dict[str, Any]]] = {key: [] for key in keys}
    for _ in range(rounds):
        for key, found in runs.items():
            result = train(key, size_bytes, options.spill_dir, steps)
            found.append(result)
            said = result.get("error") or format_seconds(result["median_s"])
            console.print(f"{key[0]:<18}{key[1]:<12}{key[2] or '':<6}{said}")
    for name in OPTIMIZERS:
        bits = {
            result["bits"]
            for key, found in runs.items()
            for result in found
            if key[0] == name and "bits" in result
        }
        if len(bits) != 1:
            raise SystemExit(f"{name}: the bits differ")
    console.print(drawn(runs, size_bytes))
    document = {
        **heading("large_tensors"),
        "weight_bytes": size_bytes,
        "runs": [
            {"optimizer": key[0], "how": key[1], "budget_w": key[2], "rounds": found}
            for key, found in runs.items()
        ],
    }
    write(document, options.output, console)
    return 0


def train(key: Key, size_bytes: int, spill_dir: str, steps: int) -> dict[str, Any]:
    name, how, budget = key
    torch.manual_seed(0)
    rows = size_bytes // (WIDTH * 4)
    model = nn.Sequential(nn.Embedding(rows, WIDTH), nn.Linear(WIDTH, 16))
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZERS[name])
    generator = torch.Generator().manual_seed(1)

    def step() -> None:
        words = torch.randint(0, rows, (64, 32), generator=generator)
        model(words).logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    samples_s = []
    found: dict[str, Any] = {}
    divisible_bytes = slices.DIVISIBLE_BYTES
    slices.DIVISIBLE_BYTES = 1 << 62 if how == "whole" else divisible_bytes
    try:
        if how == "in memory":
            for _ in range(UNMEASURED_STEPS + steps):
                begun_s = perf_counter()
                step()
                samples_s.append(perf_counter() - begun_s)
        else:
            with penstock.offload(
                model, optimizer, device_budget=int(budget * size_bytes), spill_dir=spill_dir
            ) as run:
                for _ in range(UNMEASURED_STEPS + steps):
                    begun_s = perf_counter()
                    with run.step():
                        step()
                    samples_s.append(perf_counter() - begun_s)
                report = run.report()
            found = {
                "minimum_bytes": report.minimum_bytes,
                "peak_bytes": report.peak_bytes,
                "predicted_step_s": report.predicted_step_s,
                "evicted_bytes": report.evicted_bytes,
            }
    except penstock.BudgetTooSmall as error:
        return {"error": f"needs {format_bytes(error.minimum_bytes)}"}
    finally:
        slices.DIVISIBLE_BYTES = divisible_bytes
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(memoryview(parameter.detach().numpy()).cast("B"))
        for value in optimizer.state[parameter].values():
            digest.update(memoryview(value.numpy().reshape(-1)).cast("B"))
    measured_s = samples_s[-steps:]
    return found | {
        "bits": digest.hexdigest(),
        "samples_s": samples_s,
        "median_s": statistics.median(measured_s),
        "slowest_step": max(samples_s[1:]) / statistics.median(measured_s),
    }


def drawn(runs: dict[Key, list[dict[str, Any]]], size_bytes: int) -> Table:
    table = Table(title=f"W = {format_bytes(size_bytes)}; medians of steps, their quartiles")
    for column in (
        "optimizer",
        "budget",
        "tensors",
        "step",
        "quartiles",
        "predicted",
        "minimum",
        "evicted a step",
    ):
        table.add_column(column)
    for (name, how, budget), found in runs.items():
        if "error" in found[0]:
            table.add_row(name, f"{budget} W", how, found[0]["error"])
            continue
        samples_s = [sample for result in found for sample in result["samples_s"][UNMEASURED_STEPS:]]
        low, middle, high = quartiles(samples_s)
        row = [name, f"{budget} W" if budget else "", how, format_seconds(middle)]
        row.append(f"{format_seconds(low)} to {format_seconds(high)}")
        if budget:
            row.append(format_seconds(statistics.median(result["predicted_step_s"] for result in found)))
            row.append(f"{found[0]['minimum_bytes'] / size_bytes:.2f} W")
            row.append(f"{found[-1]['evicted_bytes'] / size_bytes:.1f} W")
        table.add_row(*row)
    return table


if __name__ == "__main__":
    raise SystemExit(main())
