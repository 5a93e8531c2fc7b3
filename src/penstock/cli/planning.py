"""The commands that decide and replay. Each returns an Answer; nothing is printed here."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import penstock
from penstock.cli.output import ERROR, Answer, Table, load, save, save_chrome_trace
from penstock.core.check import check
from penstock.core.hardware import Hardware
from penstock.core.memory_profile import minimum_bytes
from penstock.core.plan import Plan
from penstock.core.timeline import Timeline
from penstock.core.trace import Trace
from penstock.errors import InvalidArgument
from penstock.planners import Problem
from penstock.planners.microbatch import SHARE, MicroBatch
from penstock.report.policies import Candidate, compare_policies
from penstock.report.summary import Summary, summarise
from penstock.report.sweep import Cell, cases, sweep
from penstock.units import format_bytes, format_bytes_up, format_seconds

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
    chosen = penstock.plan(
        captured,
        hardware,
        options.policy,
        options.recompute,
        options.compress,
        options.time_limit,
        device_budget_bytes=options.device_budget,
        lossy=options.lossy,
    )
    save(chosen, options.output)
    timeline = penstock.simulate(captured, chosen, hardware)
    summary = summarise(captured, chosen, timeline, options.endurance)
    values = {
        "minimum_bytes": chosen.minimum_bytes,
        "in_memory_bytes": captured.peak_bytes,
        "in_memory_s": captured.ideal_s,
        "micro_batch": int(captured.notes.get("micro_batch", 0)),
        "micro_batch_order": captured.notes.get("micro_batch_order", "part"),
        "policy": chosen.policy,
        "reason": chosen.reason,
        "lossy": chosen.lossy,
        "predicted_s": chosen.predicted_s,
        "predicted_peak_bytes": chosen.predicted_peak_bytes,
        "evictions": len(chosen.evictions),
        "recomputations": len(chosen.recomputations),
        "lower_bound_s": chosen.lower_bound_s,
        "gap": chosen.gap,
        "disk_written_bytes_per_day": summary.disk_wear.written_bytes_per_day,
        "disk_lifetime_s": summary.disk_wear.lifetime_s,
        "summary": dataclasses.asdict(summary),
    }
    shown.append(f"policy {chosen.policy}: {chosen.reason}")
    if chosen.lossy:
        shown.append(chosen.lossy_text)
    if options.compare_policies:
        problem = Problem(
            trace=captured,
            hardware=hardware,
            budget_bytes=chosen.device_budget_bytes,
            recompute=options.recompute,
            compress=options.compress,
            lossy=options.lossy,
            time_limit_s=options.time_limit,
        )
        found = compare_policies(problem, known=chosen)
        values["policies"] = [dataclasses.asdict(entry) for entry in found]
        shown.append(policy_table(found, chosen.policy))
    if options.compare_budgets:
        budgets, table = _budgets(captured, options, hardware)
        values["budgets"] = budgets
        shown.append(table)
    return Answer(values=values, shown=[*shown, summary_table(summary)], written=[options.output])


def _divided(options: Namespace, hardware: Hardware) -> tuple[Trace, list[str | Table]]:
    """A script's step with its batch divided, traced without running it; and what each size comes to."""
    from penstock.cli import script  # needs torch
    from penstock.runtime import micro_batches

    build = script.load(str(options.trace))
    mode = penstock.fake_mode()
    with mode:
        training = build()
        batch = script.first_batch(training)
        order = options.micro_batch_order or micro_batches.PART
        splitter = micro_batches.Splitter(options.micro_batch, order)
        shown: list[str | Table] = []

        def choose(batch: Any, samples: int) -> int:
            chosen = micro_batches.choose(
                training.loss_of, batch, hardware, options.device_budget, options.policy, mode=mode
            )
            shown.append(_micro_batch_table(chosen))
            return chosen.size

        parts = list(splitter.parts(batch, choose))

    def accumulate(order: str) -> Any:
        return micro_batches.accumulate(parts, training.loss_of, order, training.model)

    if order == micro_batches.AUTO:
        splitter.order = micro_batches.choose_order(
            accumulate, hardware, options.device_budget, options.policy, mode=mode
        )
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
    violations = check(captured, planned, hardware)
    if violations:
        text = "\n".join([f"the plan breaks {len(violations)} rule(s):", *violations])
        return Answer(values={"violations": violations}, shown=[text], exit_code=ERROR)
    timeline = penstock.simulate(captured, planned, hardware)
    save(timeline, options.output)
    written = [options.output]
    if options.chrome_trace:
        save_chrome_trace(options.chrome_trace, timeline)
        written.append(options.chrome_trace)
    summary = summarise(captured, planned, timeline)
    streams = list(dict.fromkeys(span.stream for span in timeline.spans))
    values = {
        "violations": [],
        "iteration_s": timeline.iteration_s,
        "stall_s": timeline.stall_s,
        "peak_bytes": timeline.peak_bytes,
        "evicted_bytes": timeline.evicted_bytes,
        "busy_s": {stream: timeline.busy_s(stream) for stream in streams},
        "summary": dataclasses.asdict(summary),
    }
    return Answer(
        values=values,
        shown=["the plan is legal", _streams(timeline, streams), summary_table(summary)],
        written=written,
    )


def summary_table(summary: Summary) -> Table:
    """The few numbers at the end."""
    return Table((), summary.rows())


def policy_table(found: Sequence[Candidate], chosen: str) -> Table:
    """Every policy with its time, over the ideal and above the bound, and what it moves."""
    rows = []
    for entry in found:
        if (summary := entry.summary) is None:
            rows.append((entry.policy, "cannot", *[""] * 5))
            continue
        rows.append((entry.policy, *summary.timing(), str(summary.recomputations or "")))
    names = [entry.policy for entry in found]
    return Table(
        ("policy", "step", "of ideal", "above bound", "stalls", "evicted", "recomputed"),
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
                f"{timeline.busy_s(stream) / timeline.iteration_s:.0%}" if timeline.iteration_s else "",
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
        recompute=options.recompute,
        compress=options.compress,
        lossy=options.lossy,
        time_limit_s=options.time_limit,
    )
    cells = [cell for cell in sweep(asked) if cell.summary is not None]
    values = [cell_values(cell) for cell in cells]
    chosen = [cell.case.budget_bytes for cell in cells].index(options.device_budget)
    columns = ("device budget", "step", "of ideal", "above bound", "stalls", "evicted", "limited by")
    return values, Table(columns, [_budget_row(cell) for cell in cells], chosen=chosen)


def _budget_row(cell: Cell) -> tuple[str, ...]:
    assert cell.summary is not None
    return (format_bytes_up(cell.case.budget_bytes), *cell.summary.timing(), cell.limits)


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
        values |= {
            "policy": summary.policy,
            "predicted_s": summary.predicted_s,
            "ideal_s": summary.ideal_s,
            "lower_bound_s": summary.lower_bound_s,
            "gap": summary.gap,
            "sample_s": cell.sample_s,
            "predicted_peak_bytes": summary.peak_bytes,
            "stall_s": sum(summary.stall_s.values()),
            "evicted_bytes": sum(summary.written_bytes.values()),
            "limits": cell.limits,
            "if_doubled_s": cell.if_doubled_s,
            "fast_disk_s": cell.fast_disk_s,
            "uses_disk": cell.uses_disk,
            "disk_is_enough": cell.disk_is_enough,
        }
    return values
