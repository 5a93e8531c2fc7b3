"""The commands that decide, replay, show and ask further. Each returns an Answer; nothing is printed here."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

import penstock
from penstock.cli.output import ERROR, INFEASIBLE, Answer, Table, load, writing
from penstock.core.check import check
from penstock.core.hardware import Hardware
from penstock.core.memory_profile import minimum_bytes
from penstock.core.plan import Plan
from penstock.core.timeline import Timeline
from penstock.core.trace import Trace
from penstock.errors import InvalidArgument
from penstock.options import BatchOptions, PlanOptions
from penstock.planners import Problem, solve
from penstock.planners.microbatch import SHARE, MicroBatch
from penstock.report import Record
from penstock.report.html import page
from penstock.report.plot import plot
from penstock.report.summary import summarise
from penstock.report.sweep import (
    Cell,
    PolicyResult,
    cases,
    compare_policies,
    disk_rates,
    sweep,
    verdict,
    workers_for,
)
from penstock.units import format_bytes, format_bytes_up, format_rate, format_seconds

OF_A_PLAN = ("policy", "reason", "lossy", "predicted_step_s", "predicted_peak_bytes", "lower_bound_s", "gap")
TIMING = ("step", "of ideal", "above bound", "stalls", "evicted")  # titles of Summary.timing
BUDGET_FRACTIONS = (0.0, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0)  # from the minimum, 0, to the peak, 1


def plan(options: Namespace) -> Answer:
    hardware = load(Hardware, options.hardware)
    shown: list[str | Table] = []
    if options.micro_batch is None:
        if options.micro_batch_order is not None:
            raise InvalidArgument("--micro-batch-order is of batches in parts: give --micro-batch, too")
        captured = load(Trace, options.trace)
    else:
        captured, shown = _divided(options, hardware)
    if options.keep_weights:
        captured = captured.with_weights_kept()
    problem = Problem(
        trace=captured, hardware=hardware, budget_bytes=options.device_budget, **_liberties(options)
    )
    chosen = solve(problem, options.policy)
    with writing(options.output):
        chosen.save(options.output)
    timeline = penstock.simulate(captured, chosen, hardware)
    summary = summarise(captured, chosen, timeline, options.endurance)
    values = {name: getattr(chosen, name) for name in OF_A_PLAN} | {
        "minimum_bytes": chosen.minimum_bytes,
        "in_memory_bytes": captured.peak_bytes,
        "in_memory_s": captured.ideal_s,
        "micro_batch": int(captured.notes.get("micro_batch", 0)),
        "micro_batch_order": captured.notes.get("micro_batch_order", "part"),
        "evictions": len(chosen.evictions),
        "recomputations": len(chosen.recomputations),
        "disk_written_bytes_per_day": summary.disk_wear.written_bytes_per_day,
        "disk_lifetime_s": summary.disk_wear.lifetime_s,
        "summary": dataclasses.asdict(summary),
    }
    shown.append(f"policy {chosen.policy}: {chosen.reason}")
    if options.compress and not len(captured.tensor_density):
        shown.append("nothing is compressed: only a trace of a real run (--real) knows what that saves")
    if chosen.lossy:
        shown.append(chosen.lossy_text)
    if options.compare_policies:
        found = compare_policies(problem, known=chosen)
        values["policies"] = [dataclasses.asdict(entry) for entry in found]
        shown.append(policy_table(found, chosen.policy))
    if options.compare_budgets:
        budgets, table = _budgets(captured, options, hardware)
        values["budgets"] = budgets
        shown.append(table)
    return Answer(values=values, shown=[*shown, Table((), summary.rows())], written=[options.output])


def _liberties(options: Namespace) -> dict[str, Any]:
    """What a plan may do, and how long planning may take."""
    names = {"recompute": "recompute", "compress": "compress", "lossy": "lossy", "time_limit_s": "time_limit"}
    return {name: getattr(options, typed) for name, typed in names.items()}


def _divided(options: Namespace, hardware: Hardware) -> tuple[Trace, list[str | Table]]:
    """A script's step with its batch divided, traced without running it; and what each size comes to."""
    from penstock.cli.training import first_batch, load_script  # need torch
    from penstock.runtime import micro_batches

    build = load_script(str(options.trace))
    mode = penstock.fake_mode()
    with mode:
        training = build()
        batch = first_batch(training)
        splitter = micro_batches.Splitter(
            BatchOptions(micro_batch=options.micro_batch, micro_batch_order=options.micro_batch_order)
        )
        shown: list[str | Table] = []
        named = ("policy", "recompute", "compress", "lossy", "keep_weights")
        machine = {
            "hardware": hardware,
            "budget_bytes": options.device_budget,
            "planning": PlanOptions(**{name: getattr(options, name) for name in named}),
            "mode": mode,
        }
        parts = list(splitter.parts(batch, training.loss_of, lambda: machine))
        if splitter.chosen is not None:
            shown.append(_micro_batch_table(splitter.chosen))

    def accumulate(order: str) -> Any:
        return micro_batches.accumulate(parts, training.loss_of, order, training.model)

    if splitter.order == micro_batches.AUTO:
        splitter.order = micro_batches.choose_order(accumulate, **machine)
        shown.append(f"micro-batches {splitter.order} by {splitter.order}")
    captured = penstock.trace(lambda: training.step(batch, lambda *_: accumulate(splitter.order)), mode=mode)
    return dataclasses.replace(captured, notes={**captured.notes, **splitter.notes}), shown


def _micro_batch_table(chosen: MicroBatch) -> Table:
    """What each size comes to."""
    return Table(
        ("micro-batch", "parts", "batch", "peak", "minimum"),
        [
            (
                str(row.size),
                str(row.count),
                "cannot" if row.reason else format_seconds(row.predicted_s),
                "" if row.reason else format_bytes(row.peak_bytes),
                format_bytes_up(row.least_bytes),
            )
            for row in chosen.table
        ],
        chosen=[row.size for row in chosen.table].index(chosen.size),
        notes=[
            f"with {chosen.working_set_size} samples, any {SHARE:.0%} of the kernels fit at once: what "
            "moDNN's equation 8 alone would choose"
        ],
    )


def simulate(options: Namespace) -> Answer:
    captured, hardware = load(Trace, options.trace), load(Hardware, options.hardware)
    planned = load(Plan, options.plan)
    if violations := check(captured, planned, hardware):
        return _illegal(violations)
    timeline = penstock.simulate(captured, planned, hardware)
    with writing(options.output):
        timeline.save(options.output)
    written = [options.output, *_chrome_trace(options, timeline)]
    summary = summarise(captured, planned, timeline)
    streams = list(dict.fromkeys(span.stream for span in timeline.spans))
    values = {
        "violations": [],
        "step_s": timeline.step_s,
        "stall_s": timeline.stall_s,
        "peak_bytes": timeline.peak_bytes,
        "evicted_bytes": timeline.evicted_bytes,
        "busy_s": {stream: timeline.busy_s(stream) for stream in streams},
        "summary": dataclasses.asdict(summary),
    }
    return Answer(
        values=values,
        shown=["the plan is legal", _streams(timeline, streams), Table((), summary.rows())],
        written=written,
    )


def _illegal(violations: list[str]) -> Answer:
    text = "\n".join([f"the plan breaks {len(violations)} rule(s):", *violations])
    return Answer(values={"violations": violations}, shown=[text], exit_code=ERROR)


def _chrome_trace(options: Namespace, *timelines: Timeline) -> list[Path]:
    """The file, where one is asked for."""
    if options.chrome_trace is None:
        return []
    with writing(options.chrome_trace):
        timelines[0].save_chrome_trace(options.chrome_trace, *timelines[1:])
    return [options.chrome_trace]


def policy_table(found: Sequence[PolicyResult], chosen: str) -> Table:
    """Every policy with its time, over the ideal and above the bound, and what it moves."""
    rows = []
    for entry in found:
        if (summary := entry.summary) is None:
            rows.append((entry.policy, "cannot", *[""] * 5))
            continue
        rows.append((entry.policy, *summary.timing(), str(summary.recomputations or "")))
    names = [entry.policy for entry in found]
    return Table(
        ("policy", *TIMING, "recomputed"),
        rows,
        chosen=names.index(chosen) if chosen in names else None,
        notes=[f"{entry.policy}: {entry.reason}" for entry in found if entry.summary is None],
    )


def _streams(timeline: Timeline, streams: Sequence[str]) -> Table:
    return Table(
        ("stream", "busy", "of the step", "moved"),
        [
            (
                stream.replace("_", " "),
                format_seconds(timeline.busy_s(stream)),
                f"{timeline.busy_s(stream) / timeline.step_s:.0%}" if timeline.step_s else "",
                format_bytes(timeline.moved_bytes(stream)) if stream != "compute" else "",
            )
            for stream in streams
        ],
    )


def _budgets(captured: Trace, options: Namespace, hardware: Hardware) -> tuple[list[dict[str, Any]], Table]:
    """From the smallest budget to the peak: for programs, and for people."""
    least, peak = minimum_bytes(captured), captured.peak_bytes
    budgets = {least + round(fraction * (peak - least)) for fraction in BUDGET_FRACTIONS}
    asked = cases(
        {options.trace.name: captured},
        hardware,
        sorted(budget for budget in {*budgets, options.device_budget} if budget <= hardware.device_bytes),
        policy=options.policy,
        **_liberties(options),
    )
    cells = [cell for cell in sweep(asked) if cell.summary is not None]
    chosen = [cell.case.budget_bytes for cell in cells].index(options.device_budget)
    return [cell_values(cell) for cell in cells], _cells_table(cells, chosen)


def cell_values(cell: Cell) -> dict[str, Any]:
    """A cell for programs."""
    hardware, summary = cell.case.hardware, cell.summary
    values: dict[str, Any] = {
        "trace": cell.case.label,
        "device_budget_bytes": cell.case.budget_bytes,
        "host_bytes": hardware.host_bytes,
        "disk_bytes": hardware.disk_bytes,
        "disks": cell.case.disks,
        "disk_write_bytes_per_s": hardware.disk_write_bytes_per_s,
        "disk_read_bytes_per_s": hardware.disk_read_bytes_per_s,
        "reason": cell.reason,
    }
    if summary is not None:
        of_summary = ("policy", "predicted_step_s", "ideal_s", "lower_bound_s", "gap")
        of_cell = ("sample_s", "limits", "if_doubled_s", "fast_disk_s", "uses_disk", "disk_is_enough")
        values |= {name: getattr(summary, name) for name in of_summary}
        values |= {name: getattr(cell, name) for name in of_cell}
        values |= {
            "predicted_peak_bytes": summary.peak_bytes,
            "stall_s": sum(summary.stall_s.values()),
            "evicted_bytes": sum(summary.written_bytes.values()),
        }
    return values


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
            return _illegal(violations)
        values, shown = {}, []
    else:
        raise InvalidArgument("give one FOLDER, or two files: TRACE PLAN")

    predicted = penstock.simulate(trace, plan, hardware)
    output = options.output or folder / "report.html"
    if output.suffix.lower() in (".html", ".htm"):
        found = [] if options.no_policies else _policies(options, trace, hardware, plan)
        text = page(trace, plan, hardware, predicted, measured, found)
        with writing(output):
            output.write_text(text, encoding="utf-8")
        if found:
            values["policies"] = msgspec.to_builtins(found)
            shown.append(policy_table(found, plan.policy))
    else:
        with writing(output):
            plot(trace, plan, predicted, measured, output)
    written = [output, *_chrome_trace(options, predicted, *([measured] if measured is not None else []))]
    shown.append(Table((), summarise(trace, plan, predicted).rows()))
    return Answer(values=values, shown=shown, written=written)


def _policies(options: Namespace, trace: Trace, hardware: Hardware, plan: Plan) -> list[PolicyResult]:
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
    limit_s = max(LEAST_S, PLANNING * options.time_limit * workers / len(asked))
    cells = sweep([replace(case, time_limit_s=limit_s) for case in asked], workers)
    said = verdict(cells)
    infeasible = all(cell.summary is None for cell in cells)
    values = {"cells": [cell_values(cell) for cell in cells], "verdict": said}
    if options.output:
        with writing(options.output):
            options.output.write_bytes(msgspec.json.format(msgspec.json.encode(values)))
    return Answer(
        values=values,
        shown=[_cells_table(cells), said],
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


def _disk_rates(cell: Cell) -> list[str]:
    """Written and read, or both in one where they are the same."""
    return list(dict.fromkeys(format_rate(rate) for rate in disk_rates(cell.case.hardware)))


# A column of the sweep: its title, and what stands there. Shown where it differs between cells.
_ASKED: tuple[tuple[str, Callable[[Cell], str]], ...] = (
    ("trace", lambda cell: cell.case.label),
    ("budget", lambda cell: format_bytes_up(cell.case.budget_bytes)),
    ("host", lambda cell: format_bytes(cell.case.hardware.host_bytes)),
    ("disks", lambda cell: f"{cell.case.disks:g}, {' / '.join(_disk_rates(cell))}"),
)


def _cells_table(cells: Sequence[Cell], chosen: int | None = None) -> Table:
    asked = [(title, say) for title, say in _ASKED if len({say(cell) for cell in cells}) > 1]
    asked = asked or list(_ASKED[:1])
    by_sample = any(cell.sample_s is not None for cell in cells) and len({c.case.label for c in cells}) > 1
    columns = (*(title for title, _ in asked), *TIMING, *(["a sample"] if by_sample else []))
    columns += ("disk", "limited by")
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
    return Table(columns, rows, chosen, notes)
