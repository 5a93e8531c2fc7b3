"""What training inside a budget takes on a GPU, in virtual time: no GPU is used, and nothing was measured
on one.

    python benchmarks/virtual_time.py -o out/virtual_time.json [--machine rtx4090-pcie4]

The device is the emulated one of the tests (tests/device/emu): work is carried out by the CPU, and takes the
time that a data sheet allows. The models are small ones, and the machine is shrunk until each kernel and copy
takes as long as that of a large model would: `Machine.shrunk`. A step is planned on a trace whose kernels
have their virtual times, for links with the machine's rates, and then carried out by the runtime with host
memory as the tier. Where it takes longer than the simulator says for the same plan, the runtime is why.

The JSON holds the reports of virtual time. See `--quick` for a check that it all works; its figures mean
nothing.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from rich.table import Table
from step_time import ROOT, add_common_arguments, heading, wide_console, write

import penstock
from penstock.core.trace import Trace
from penstock.runtime.devices.drivers import DRIVERS
from penstock.simulator import simulate
from penstock.units import format_bytes, format_seconds

sys.path.insert(0, str(ROOT / "tests" / "device"))
sys.path.insert(0, str(ROOT))

import emu
from emu.driver import EmuDriver

from tests.support.families import _Gpt

SHARES = (0.5, 0.25)  # of the peak of a plain step
UNMEASURED_STEPS = 6  # recorded, and one more
HOST_BYTES = 1 << 30
SEGMENT_BYTES = 2 << 20  # of the emulated allocator, for tensors of up to 1 MiB

Train = Callable[[], None]


class Model(NamedTuple):
    """build    on the device, of so many blocks; gives what trains it for a step
    shrink   how many times as small its sizes are as those that are meant
    """

    build: Callable[[int], Train]
    shrink: float
    blocks: int


class _Residual(torch.nn.Module):
    """x: [batch, 32, height, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = torch.nn.ModuleList(torch.nn.Conv2d(32, 32, 3, padding=1) for _ in range(2))
        self.norms = torch.nn.ModuleList(torch.nn.GroupNorm(8, 32) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norms[0](self.convolutions[0](x)))
        return F.relu(x + self.norms[1](self.convolutions[1](y)))


def _trained(model: torch.nn.Module, loss: Callable[[int], torch.Tensor]) -> Train:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    numbers = iter(range(1 << 30))

    def train() -> None:
        loss(next(numbers)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return train


def _gpt(blocks: int) -> Train:
    """Stands for width 4096, and 4 sequences of 2048 words."""
    with torch.device("emu"):
        model = _Gpt(width=128, blocks=blocks, heads=4)

    def loss(number: int) -> torch.Tensor:
        words = torch.randint(0, 64, (4, 64), generator=torch.Generator().manual_seed(number)).to("emu")
        return F.cross_entropy(model(words).flatten(0, 1), words.roll(-1, 1).flatten())

    return _trained(model, loss)


def _resnet(blocks: int) -> Train:
    """Stands for 256 channels, and 128 images of 16 x 16."""
    with torch.device("emu"):
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 32, 3, padding=1), *(_Residual() for _ in range(blocks))
        )

    def loss(number: int) -> torch.Tensor:
        images = torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(number)).to("emu")
        return model(images).square().mean()

    return _trained(model, loss)


MODELS = {"gpt": Model(_gpt, 32, 10), "resnet": Model(_resnet, 8, 8)}


class _Timed(EmuDriver):
    """Notes the virtual time before and after each kernel that is recorded."""

    noted_s: list[float]

    def synchronize(self) -> None:
        super().synchronize()
        self.noted_s.append(emu.now_s())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", choices=emu.MACHINES, default="h100-pcie5", help="default: %(default)s")
    parser.add_argument("--policy", default="optimal", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=3, help="that are timed; default: %(default)s")
    add_common_arguments(parser, "virtual_time")
    options = parser.parse_args(arguments)
    console = wide_console()
    rows = []
    for name, model in MODELS.items():
        if options.quick:
            model = model._replace(blocks=3)
        machine = emu.MACHINES[options.machine].shrunk(model.shrink)
        for result in results(model, machine, options.policy, options.steps, options.spill_dir):
            console.print(f"{name}, {result['share']:.0%} of the peak: {result.pop('text')}")
            rows.append({"model": name, "blocks": model.blocks, **result})
    document = {
        **heading("virtual_time"),
        "is_virtual": True,
        "machine": asdict(emu.MACHINES[options.machine]),
        "policy": options.policy,
        "rows": rows,
    }
    console.print(drawn(options.machine, rows))
    write(document, options.output, console)
    return 0


def results(
    model: Model, machine: emu.Machine, policy: str, steps: int, spill_dir: str
) -> list[dict[str, Any]]:
    """A plain step, and one at each share of its peak."""
    begin(machine)
    plain, peak_bytes = plain_step(model, steps)
    begin(machine)
    trace = traced(model, machine, spill_dir)
    found = []
    for share in SHARES:
        result = inside_at_least(model, machine, trace, int(share * peak_bytes), policy, steps, spill_dir)
        plain_s = plain.step_s / steps
        found.append({"share": share, "peak_bytes": peak_bytes, "plain_s": plain_s, **result})
    return found


def inside_at_least(
    model: Model, machine: emu.Machine, trace: Trace, budget_bytes: int, *args: Any
) -> dict[str, Any]:
    """In the first budget from this one on in which there is room beside the allocator's fragments: to these
    small tensors its segments are large."""
    while True:
        begin(machine)
        try:
            return inside(model, machine, trace, budget_bytes, *args)
        except penstock.BudgetTooSmall:
            budget_bytes += SEGMENT_BYTES


def begin(machine: emu.Machine) -> None:
    gc.collect()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    emu.configure(order="eager", machine=machine)
    torch.manual_seed(7)


def timed(train: Callable[[], None], steps: int) -> emu.Report:
    torch.accelerator.synchronize()
    emu.reset_report()
    for _ in range(steps):
        train()
    torch.accelerator.synchronize()
    return emu.report()


def plain_step(model: Model, steps: int) -> tuple[emu.Report, int]:
    train = model.build(model.blocks)
    for _ in range(2):
        train()
    report = timed(train, steps)
    return report, torch.accelerator.max_memory_allocated()


def hardware(machine: emu.Machine, budget_bytes: int) -> penstock.Hardware:
    return penstock.Hardware(
        device_bytes=budget_bytes,
        host_bytes=HOST_BYTES,
        device_to_host_bytes_per_s=machine.to_host_bytes_per_s,
        host_to_device_bytes_per_s=machine.to_device_bytes_per_s,
        name=machine.name,
    )


def traced(model: Model, machine: emu.Machine, spill_dir: str) -> Trace:
    """A step, with the virtual times of its kernels, where everything is in memory."""
    DRIVERS["emu"] = _Timed
    _Timed.noted_s = noted_s = []
    trace, times_s = None, np.empty(0)
    try:
        with opened(1 << 31, spill_dir, hardware(machine, 1 << 31)) as run:
            train = model.build(model.blocks)
            for _ in range(UNMEASURED_STEPS):
                noted_s.clear()
                with run.step():
                    train()
                trace = run.trace
                if trace is not None and len(noted_s) == 2 * len(trace.kernel_name):
                    times_s = kernels_between(noted_s)
    finally:
        DRIVERS["emu"] = EmuDriver
    if trace is None or len(times_s) != len(trace.kernel_name):
        raise SystemExit("no step was recorded kernel by kernel")
    return trace.with_times(times_s)


def kernels_between(noted_s: list[float]) -> np.ndarray:
    """Seconds of kernels from each even one of these to the next."""
    times_s = np.zeros(len(noted_s) // 2)
    for span in emu.spans():
        place = np.searchsorted(noted_s, span.begin_s, "right") - 1
        if span.kind == "kernel" and place >= 0 and place % 2 == 0:
            times_s[place // 2] += span.end_s - span.begin_s
    return times_s


def opened(budget_bytes: int, spill_dir: str, machine: penstock.Hardware, **options: Any) -> penstock.Offload:
    return penstock.offload(
        device="emu:0",
        device_budget=budget_bytes,
        host_budget=HOST_BYTES,
        spill_dir=spill_dir,
        hardware=machine,
        smallest_bytes=4096,
        compress=False,
        recompute=False,
        **options,
    )


def inside(
    model: Model,
    machine: emu.Machine,
    trace: Trace,
    budget_bytes: int,
    policy: str,
    steps: int,
    spill_dir: str,
) -> dict[str, Any]:
    given = hardware(machine, budget_bytes)
    plan = penstock.plan(trace, given, policy)
    predicted = simulate(trace, plan, given)
    with opened(budget_bytes, spill_dir, given, plan=plan) as run:
        train = model.build(model.blocks)

        def step() -> None:
            with run.step():
                train()

        for _ in range(UNMEASURED_STEPS):
            step()
        mismatches = run.report().trace_mismatches
        found = timed(step, steps)
        if run.report().trace_mismatches > mismatches:
            raise SystemExit("the steps are other ones than the one that was planned")
        stalls = run.report().stall_s
    carried_s = found.step_s / steps
    return {
        "budget_bytes": budget_bytes,
        "predicted_s": predicted.iteration_s,
        "predicted_moved_bytes": predicted.evicted_bytes,
        "carried_s": carried_s,
        "ratio": carried_s / predicted.iteration_s,
        "to_host_share": found.to_host.busy_s / found.step_s,
        "to_device_share": found.to_device.busy_s / found.step_s,
        "moved_bytes": found.to_host.size_bytes // steps,
        "report": asdict(found),
        "stall_s": stalls,
        "text": str(found),
    }


def drawn(machine: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(
        "",
        "peak",
        "budget",
        "plain",
        "predicted",
        "carried out",
        "ratio",
        "to host",
        "to device",
        "late for copies",
        "memory",
        "host",
        title=f"VIRTUAL time of a step on {machine}: no GPU was used",
        box=None,
        padding=(0, 1),
    )
    for row in rows:
        idle = row["report"]["idle_s_by_cause"]
        step_s = row["report"]["step_s"]
        table.add_row(
            row["model"],
            format_bytes(row["peak_bytes"]),
            format_bytes(row["budget_bytes"]),
            format_seconds(row["plain_s"]),
            format_seconds(row["predicted_s"]),
            format_seconds(row["carried_s"]),
            f"{row['ratio']:.2f}",
            f"{row['to_host_share']:.0%} busy",
            f"{row['to_device_share']:.0%} busy",
            *(f"{idle[cause] / step_s:.0%}" for cause in ("copies", "memory", "host")),
        )
    return table


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
