"""The commands that show and ask further. Each returns an Answer; nothing is printed here."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from penstock.cli.output import (
    ERROR,
    INFEASIBLE,
    Answer,
    Table,
    load,
    own_files,
    save_chrome_trace,
    save_text,
)
from penstock.cli.planning import cell_values, policy_table, summary_table
from penstock.core.check import check
from penstock.core.hardware import Hardware
from penstock.core.plan import Plan
from penstock.core.timeline import Timeline
from penstock.core.trace import Trace
from penstock.errors import InvalidArgument
from penstock.planners import Problem
from penstock.report import Record
from penstock.report.html import page
from penstock.report.plot import plot
from penstock.report.policies import Candidate, compare_policies, workers_for
from penstock.report.summary import summarise
from penstock.report.sweep import Cell, cases, disk_rates, sweep
from penstock.report.verdict import verdict
from penstock.simulator import simulate
from penstock.units import format_bytes, format_rate, format_seconds

LEAST_S = 1.0  # to plan one cell of a sweep in
PLANNING = 0.8  # of a sweep's time: the rest is for starting processes, and for what limits each plan


def report(options: Namespace) -> Answer:
    shown: list[str | Table]
    if len(options.source) == 1 and options.source[0].is_file():
        raise InvalidArgument(f"{options.source[0]} alone is not a report: give FOLDER, or TRACE PLAN")
    if len(options.source) == 1:
        if options.hardware or options.measured:
            raise InvalidArgument("--hardware and --measured belong to TRACE PLAN: a FOLDER has its own")
        folder = options.source[0]
        record = Record.load(folder)
        values: dict[str, Any] = {"report": msgspec.to_builtins(record.report)}
        shown = [str(record.report)]
        if record.plan is None:
            return Answer(values=values, shown=[*shown, "no plan could be made: there is nothing to draw"])
        trace, plan, hardware, measured = record.trace, record.plan, record.hardware, record.measured
    elif len(options.source) == 2:
        if options.hardware is None:
            raise InvalidArgument("TRACE PLAN need --hardware FILE, that `penstock probe` wrote")
        folder = Path()
        trace, plan = load(Trace, options.source[0]), load(Plan, options.source[1])
        hardware = load(Hardware, options.hardware)
        measured = load(Timeline, options.measured) if options.measured else None
        if violations := check(trace, plan, hardware):
            text = "\n".join([f"the plan breaks {len(violations)} rule(s):", *violations])
            return Answer(values={"violations": violations}, shown=[text], exit_code=ERROR)
        values, shown = {}, []
    else:
        raise InvalidArgument("give one FOLDER, or two files: TRACE PLAN")

    predicted = simulate(trace, plan, hardware)
    output = options.output or folder / "report.html"
    if output.suffix.lower() in (".html", ".htm"):
        found = [] if options.no_policies else _policies(options, trace, hardware, plan)
        save_text(page(trace, plan, hardware, predicted, measured, found), output)
        if found:
            values["policies"] = msgspec.to_builtins(found)
            shown.append(policy_table(found, plan.policy))
    else:
        budget, peak = format_bytes(plan.device_budget_bytes), format_bytes(trace.peak_bytes)
        with own_files():
            output.parent.mkdir(parents=True, exist_ok=True)
            title = f"One training step within {budget}; {peak} with everything in memory"
            plot(trace, plan, predicted, measured, output, title)
    written = [output]
    if options.chrome_trace:
        save_chrome_trace(options.chrome_trace, predicted, *([measured] if measured is not None else []))
        written.append(options.chrome_trace)
    shown.append(summary_table(summarise(trace, plan, predicted)))
    return Answer(values=values, shown=shown, written=written)


def _policies(options: Namespace, trace: Trace, hardware: Hardware, plan: Plan) -> list[Candidate]:
    problem = Problem(
        trace=trace,
        hardware=hardware,
        budget_bytes=plan.device_budget_bytes,
        recompute=options.recompute or bool(plan.recomputations),
        compress=options.compress or any(evict.codec == "csr" for evict in plan.evictions),
        lossy=plan.lossy,
        time_limit_s=options.time_limit,
    )
    return compare_policies(problem, known=plan)


def whatif(options: Namespace) -> Answer:
    hardware = load(Hardware, options.hardware)
    traces = _labelled(options.trace)
    asked = cases(
        traces,
        hardware,
        options.device_budget or [],
        options.host_budget or [],
        options.disks,
        options.disk_rate,
        policy=options.policy,
        recompute=options.recompute,
        compress=options.compress,
    )
    workers = min(len(asked), workers_for(sum(case.trace.kernels for case in asked)))
    limit_s = max(LEAST_S, PLANNING * options.seconds * workers / len(asked))
    cells = sweep([replace(case, time_limit_s=limit_s) for case in asked], workers)
    said = verdict(cells)
    infeasible = all(cell.summary is None for cell in cells)
    values = {"cells": [cell_values(cell) for cell in cells], "verdict": said}
    if options.output:
        save_text(msgspec.json.format(msgspec.json.encode(values)).decode(), options.output)
    return Answer(
        values=values,
        shown=[_whatif_table(cells), said],
        written=[options.output] if options.output else [],
        exit_code=INFEASIBLE if infeasible else 0,
    )


def _labelled(paths: Sequence[Path]) -> dict[str, Trace]:
    """Each trace by its file's name, without what all of them end in."""
    traces: dict[str, Trace] = {}
    for path in paths:
        label = path.name.removesuffix(".gz").removesuffix(".json").removesuffix(".trace")
        if label in traces:
            raise InvalidArgument(f"two traces are called {label}: rename one, or leave it out")
        traces[label] = load(Trace, path)
    return traces


# A column of the sweep: its title, and what stands there. Shown where it differs between cells.
_ASKED: tuple[tuple[str, Callable[[Cell], str]], ...] = (
    ("trace", lambda cell: cell.case.label),
    ("budget", lambda cell: format_bytes(cell.case.budget_bytes)),
    ("host", lambda cell: format_bytes(cell.case.hardware.host_bytes)),
    ("disks", lambda cell: f"{cell.case.disks:g}, {_disk_rates(cell.case.hardware)}"),
)


def _disk_rates(hardware: Hardware) -> str:
    """Written and read, or both in one where they are the same."""
    return " / ".join(dict.fromkeys(format_rate(rate) for rate in disk_rates(hardware)))


def _whatif_table(cells: Sequence[Cell]) -> Table:
    asked = [(title, say) for title, say in _ASKED if len({say(cell) for cell in cells}) > 1]
    asked = asked or list(_ASKED[:1])
    by_sample = any(cell.sample_s is not None for cell in cells) and len({c.case.label for c in cells}) > 1
    answered = ("step", "of ideal", "above bound", "stalls", "evicted")
    columns = (
        *(title for title, _ in asked),
        *answered,
        *(["a sample"] if by_sample else []),
        "disk",
        "limited by",
    )
    rows, notes = [], []
    for cell in cells:
        row = [say(cell) for _, say in asked]
        if cell.summary is None:
            rows.append((*row, "cannot", *[""] * (len(columns) - len(row) - 1)))
            notes.append(f"{', '.join(row)}: {cell.reason}")
            continue
        row += cell.summary.timing()
        if by_sample:
            row.append(format_seconds(cell.sample_s) if cell.sample_s is not None else "")
        disk = ("fast enough" if cell.disk_is_enough else "too slow") if cell.uses_disk else "not used"
        rows.append((*row, disk, cell.limits))
    return Table(columns, rows, notes=notes)
