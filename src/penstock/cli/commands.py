"""The commands that measure, decide and compare. Each returns an Answer; nothing is printed here."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

import penstock
from penstock.cli import script
from penstock.cli.output import ERROR, Answer, Table, own_files
from penstock.core import files
from penstock.core.check import check
from penstock.core.hardware import LINKS, Hardware
from penstock.core.plan import Plan
from penstock.core.pressure import minimum_bytes
from penstock.core.timeline import Timeline
from penstock.core.trace import Trace
from penstock.errors import InvalidArgument
from penstock.planners import budget_table
from penstock.report.plot import plot
from penstock.report.record import Record
from penstock.runtime.offload import default_spill_dir
from penstock.units import format_bytes, format_bytes_up, format_rate, format_seconds

Value = TypeVar("Value")


def probe(options: Namespace) -> Answer:
    directories = options.spill_dir or [Path(default_spill_dir())]
    hardware = penstock.probe(directories, device=options.device, time_budget_s=options.seconds)
    _save(hardware, options.output)
    links = [link for link in LINKS if link in hardware.measured_rates]
    sizes = sorted({size for link in links for size, _ in hardware.measured_rates[link]})
    by_link = {link: dict(hardware.measured_rates[link]) for link in links}
    rows = [
        (
            format_bytes(size),
            *(format_rate(by_link[link][size]) if size in by_link[link] else "" for link in links),
        )
        for size in sizes
    ]
    text = (
        f"{hardware.name}\n"
        f"device {format_bytes(hardware.device_bytes)}, disk {format_bytes(hardware.disk_bytes)} free in "
        f"{', '.join(map(str, directories))}; both directions at once: {hardware.duplex:.0%} of the rate each"
    )
    table = Table(("transfer", *(link.replace("_", " ") for link in links)), rows)
    return Answer(
        values={"hardware": msgspec.to_builtins(hardware)}, shown=[text, table], written=[options.output]
    )


def trace(options: Namespace) -> Answer:
    if options.real and options.device:
        raise InvalidArgument(
            "--device says whose times to estimate: leave it out with --real, which measures"
        )
    build = script.load(options.script)
    captured = _trace_real(build) if options.real else _trace_fake(build, options.device or "cpu")
    _save(captured, options.output)
    values = {
        "kernels": captured.kernels,
        "tensors": captured.tensors,
        "persistent_bytes": captured.persistent_bytes,
        "peak_bytes": captured.peak_bytes,
        "minimum_bytes": minimum_bytes(captured),
        "ideal_s": captured.ideal_s,
        "measured": captured.measured,
    }
    text = (
        f"{captured.kernels} kernels, {captured.tensors} tensors\n"
        f"weights and optimizer state {format_bytes(captured.persistent_bytes)}, "
        f"peak in memory {format_bytes(captured.peak_bytes)}, "
        f"smallest device budget {format_bytes_up(minimum_bytes(captured))}\n"
        f"step with everything in memory {format_seconds(captured.ideal_s)}, "
        f"{'measured' if captured.measured else 'estimated'}"
    )
    return Answer(values=values, shown=[text], written=[options.output])


def _trace_fake(build: Callable[[], script.Training], device: str) -> Trace:
    mode = penstock.fake_mode()
    with mode:
        training = build()
        batch = script.first_batch(training)
    return penstock.trace(lambda: training.step(batch), device=device, mode=mode)


def _trace_real(build: Callable[[], script.Training]) -> Trace:
    training = build()
    batch = script.first_batch(training)
    device = next((parameter.device for parameter in training.model.parameters()), torch.device("cpu"))
    return penstock.trace(lambda: training.step(batch), fake=False, device=str(device))


def plan(options: Namespace) -> Answer:
    captured, hardware = _load(Trace, options.trace), _load(Hardware, options.hardware)
    chosen = penstock.plan(captured, hardware, options.policy, device_budget_bytes=options.device_budget)
    _save(chosen, options.output)
    plans = dict(budget_table(captured, hardware))
    plans[chosen.device_budget_bytes] = chosen
    ordered = [plans[budget] for budget in sorted(plans)]
    timelines = [penstock.simulate(captured, entry, hardware) for entry in ordered]
    text = (
        f"minimum {format_bytes_up(chosen.minimum_bytes)}, everything in memory "
        f"{format_bytes(captured.peak_bytes)}\n"
        f"policy {chosen.policy}: {chosen.reason}\n"
        f"predicted step {format_seconds(chosen.predicted_s)}, "
        f"peak {format_bytes(chosen.predicted_peak_bytes)}, "
        f"{len(chosen.evictions)} evictions"
    )
    values = {
        "minimum_bytes": chosen.minimum_bytes,
        "in_memory_bytes": captured.peak_bytes,
        "in_memory_s": captured.ideal_s,
        "policy": chosen.policy,
        "reason": chosen.reason,
        "predicted_s": chosen.predicted_s,
        "predicted_peak_bytes": chosen.predicted_peak_bytes,
        "evictions": len(chosen.evictions),
        "budgets": [
            {
                "device_budget_bytes": entry.device_budget_bytes,
                "policy": entry.policy,
                "predicted_s": entry.predicted_s,
                "predicted_peak_bytes": entry.predicted_peak_bytes,
                "stall_s": timeline.stall_s,
                "evicted_bytes": timeline.evicted_bytes,
            }
            for entry, timeline in zip(ordered, timelines, strict=True)
        ],
    }
    table = Table(
        ("device budget", "step", "of in-memory", "stalls", "evicted", "policy"),
        [_budget_row(captured, entry, timeline) for entry, timeline in zip(ordered, timelines, strict=True)],
        chosen=ordered.index(chosen),
    )
    return Answer(values=values, shown=[text, table], written=[options.output])


def _budget_row(captured: Trace, entry: Plan, timeline: Timeline) -> tuple[str, ...]:
    return (
        format_bytes_up(entry.device_budget_bytes),
        format_seconds(entry.predicted_s),
        f"{entry.predicted_s / captured.ideal_s:.2f} x" if captured.ideal_s else "",
        format_seconds(timeline.stall_s) if timeline.stall_s else "none",
        format_bytes(timeline.evicted_bytes) if timeline.evicted_bytes else "none",
        entry.policy,
    )


def simulate(options: Namespace) -> Answer:
    captured, hardware = _load(Trace, options.trace), _load(Hardware, options.hardware)
    judged = _load(Plan, options.plan)
    violations = check(captured, judged, hardware)
    if violations:
        text = "\n".join([f"the plan breaks {len(violations)} rule(s):", *violations])
        return Answer(values={"violations": violations}, shown=[text], exit_code=ERROR)
    timeline = penstock.simulate(captured, judged, hardware)
    _save(timeline, options.output)
    streams = list(dict.fromkeys(span.stream for span in timeline.spans))
    text = (
        f"the plan is legal\nstep {format_seconds(timeline.iteration_s)}, of it stalls "
        f"{format_seconds(timeline.stall_s)}; peak {format_bytes(timeline.peak_bytes)} of "
        f"{format_bytes(judged.device_budget_bytes)}"
    )
    table = Table(
        ("stream", "busy", "of the step", "moved"),
        [
            (
                stream.replace("_", " "),
                format_seconds(timeline.busy_s(stream)),
                f"{timeline.busy_s(stream) / timeline.iteration_s:.0%}",
                format_bytes(timeline.moved_bytes(stream)) if stream != "compute" else "",
            )
            for stream in streams
        ],
    )
    values = {
        "violations": [],
        "iteration_s": timeline.iteration_s,
        "stall_s": timeline.stall_s,
        "peak_bytes": timeline.peak_bytes,
        "evicted_bytes": timeline.evicted_bytes,
        "busy_s": {stream: timeline.busy_s(stream) for stream in streams},
    }
    return Answer(values=values, shown=[text, table], written=[options.output])


def report(options: Namespace) -> Answer:
    record = Record.load(options.folder)
    picture = options.output or options.folder / "picture.png"
    budget = format_bytes(record.plan.device_budget_bytes)
    title = f"One training step within {budget} instead of {format_bytes(record.trace.peak_bytes)}"
    with own_files():
        picture.parent.mkdir(parents=True, exist_ok=True)
        plot(record.trace, record.plan, record.predicted, record.measured, picture, title)
    return Answer(
        values={"report": msgspec.to_builtins(record.report)}, shown=[str(record.report)], written=[picture]
    )


def _load(kind: type[Value], path: Path) -> Value:
    with own_files():
        return files.load(kind, path)


def _save(value: object, path: Path) -> None:
    with own_files():
        path.parent.mkdir(parents=True, exist_ok=True)
        files.save(value, path)
