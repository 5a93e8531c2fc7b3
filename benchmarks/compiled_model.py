"""What it costs to train a model that torch.compile compiled as a whole in a budget.

    python benchmarks/compiled_model.py -o out/compiled_model.json

A GPT is compiled as a whole and trained, in turns, step by step, in processes that live throughout: in memory
as one region; in memory, divided into the parts that the smallest budget divides it into; and in budgets that
are shares of what the first takes at its peak. In memory and in the smallest budget the parts are the same,
and so must be the bits. Inductor adds up an embedding's gradient in any order but where torch is to be
deterministic, as here.

The JSON holds every sample. See `--quick` for a check that it all works; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import multiprocessing
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import gpt
from step_time import add_common_arguments, heading, quartiles, wide_console, write

import penstock
from penstock.units import format_bytes, format_seconds

PERCENT = (60, 40)
UNMEASURED_STEPS = 6  # compiled, recorded, or before there is a plan
LARGE_BYTES = 1 << 40  # a budget in which nothing leaves, nor is divided


class Way(NamedTuple):
    """How a process trains.

    budget_bytes   0: in memory, without a run
    part_bytes     0: as one region, or as the run divides it
    """

    budget_bytes: int = 0
    part_bytes: int = 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=6, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=10, help="that are measured; default: %(default)s")
    add_common_arguments(parser, "compiled_model")
    options = parser.parse_args(arguments)
    config = gpt.QUICK if options.quick else gpt.Config(layers=options.layers, batch=options.batch)
    steps = 2 if options.quick else options.steps
    console = wide_console()
    in_memory = Worker(Way(LARGE_BYTES), config, options.spill_dir)
    for _ in range(UNMEASURED_STEPS):
        in_memory.step()
    peak_bytes = in_memory.end()["peak_bytes"]
    console.print(f"in memory the compiled step takes {format_bytes(peak_bytes)}")
    least_bytes = peak_bytes * min(PERCENT) // 100
    ways = {"in memory": Way(), "in memory, in parts": Way(part_bytes=least_bytes // 8)}
    ways |= {f"penstock, {percent} %": Way(peak_bytes * percent // 100) for percent in PERCENT}
    workers = {name: Worker(way, config, options.spill_dir) for name, way in ways.items()}
    with Progress(console=console) as progress:
        bar = progress.add_task("steps", total=(UNMEASURED_STEPS + steps) * len(workers))
        for number in range(UNMEASURED_STEPS + steps):
            names = list(workers)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                progress.update(bar, description=f"{name:<20}")
                workers[name].step()
                progress.advance(bar)
    found = {name: worker.end() for name, worker in workers.items()}
    if found["in memory, in parts"]["bits"] != found[f"penstock, {min(PERCENT)} %"]["bits"]:
        raise SystemExit("the bits differ")
    console.print(drawn(found))
    write(
        {**heading("compiled_model"), "in_memory_peak_bytes": peak_bytes, "ways": found},
        options.output,
        console,
    )
    return 0


class Worker:
    """A process that trains, a step at a time."""

    def __init__(self, way: Way, config: gpt.Config, spill_dir: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=train, args=(theirs, way, config, spill_dir), daemon=True)
        self._process.start()
        theirs.close()

    def step(self) -> None:
        self._connection.send(True)
        self._connection.recv()

    def end(self) -> dict[str, Any]:
        self._connection.send(False)
        found: dict[str, Any] = self._connection.recv()
        self._process.join()
        return found


def train(connection: Connection, way: Way, config: gpt.Config, spill_dir: str) -> None:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    samples_s: list[float] = []
    found: dict[str, Any] = {"samples_s": samples_s, **way._asdict()}
    with contextlib.ExitStack() as stack:
        run = None
        if way.budget_bytes:
            run = stack.enter_context(penstock.offload(device_budget=way.budget_bytes, spill_dir=spill_dir))
        model, optimizer, batches, loss = gpt.build(config)
        compiled = (
            torch.compile(model, backend="penstock", options={"part_bytes": way.part_bytes})
            if way.part_bytes
            else torch.compile(model)
        )
        while connection.recv():
            text = next(batches)
            begun_s = perf_counter()
            with run.step() if run is not None else contextlib.nullcontext():
                loss(compiled, text).backward()
                optimizer.step()
                optimizer.zero_grad()
            samples_s.append(perf_counter() - begun_s)
            connection.send(None)
        if run is not None:
            report = run.report()
            found["peak_bytes"] = report.peak_bytes
            found["minimum_bytes"] = report.minimum_bytes
            found["predicted_step_s"] = report.predicted_step_s
            found["evicted_bytes"] = report.evicted_bytes
            found["report"] = str(report)
            assert run.trace is not None
            found["regions"] = sum("inductor" in name for name in run.trace.kernel_name)
        digest = hashlib.sha256()
        for parameter in model.parameters():
            digest.update(memoryview(parameter.detach().numpy()).cast("B"))
        found["bits"] = digest.hexdigest()
    connection.send(found)


def drawn(ways: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="medians of steps, their quartiles")
    for column in ("", "step", "quartiles", "ratio", "budget", "predicted", "minimum", "evicted", "regions"):
        table.add_column(column)
    measured = {name: quartiles(way["samples_s"][UNMEASURED_STEPS:]) for name, way in ways.items()}
    reference_s = measured["in memory"][1]
    for name, way in ways.items():
        low, middle, high = measured[name]
        row = [
            name,
            format_seconds(middle),
            f"{format_seconds(low)} to {format_seconds(high)}",
            f"{middle / reference_s:.2f}",
        ]
        if way["budget_bytes"]:
            row += [format_bytes(way["budget_bytes"]), format_seconds(way["predicted_step_s"] or 0)]
            row += [format_bytes(way[key]) for key in ("minimum_bytes", "evicted_bytes")]
            row.append(str(way["regions"]))
        table.add_row(*row)
    return table


if __name__ == "__main__":
    raise SystemExit(main())
