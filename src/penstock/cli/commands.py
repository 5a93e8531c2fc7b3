"""The commands that measure and capture. Each returns an Answer; nothing is printed here."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

import penstock
from penstock.cli import script
from penstock.cli.output import Answer, Table, save
from penstock.core.hardware import LINKS
from penstock.core.memory_profile import minimum_bytes
from penstock.core.trace import Trace
from penstock.errors import InvalidArgument
from penstock.runtime.resident import default_spill_dir
from penstock.units import format_bytes, format_bytes_up, format_rate, format_seconds


def probe(options: Namespace) -> Answer:
    directories = options.spill_dir or [Path(default_spill_dir())]
    hardware = penstock.probe(directories, device=options.device, time_budget_s=options.seconds)
    save(hardware, options.output)
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
    save(captured, options.output)
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
