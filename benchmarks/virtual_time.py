"""What training inside a budget takes on a GPU, in virtual time: no GPU is used, and nothing was measured
on one.

    python benchmarks/virtual_time.py -o out/virtual_time.json [--machine rtx4090-pcie4] [--models gpt vit]

The device is the emulated one of the tests (tests/device/emu). Its kernels do nothing, and take the time that
a data sheet allows; so models have the sizes that they have on a GPU, and the allocator its own. A step is
planned on a trace whose kernels have their virtual times, for links with the machine's rates, and then
carried out by the runtime with host memory as the tier. Where it takes longer than the simulator says for the
same plan, the runtime is why. Times are medians of steps that follow one another; shares are of all steps.

Attention writes its scores to memory, as the emulated device has no other.

The JSON holds the reports of virtual time. See `--quick` for a check that it all works; its figures mean
nothing.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from rich.table import Table
from step_time import ROOT, add_common_arguments, heading, wide_console, write

import penstock
from penstock.core.trace import Trace
from penstock.machine import available_bytes
from penstock.runtime.devices.drivers import DRIVERS
from penstock.runtime.devices.reserved import plannable, spare_bytes
from penstock.simulator import simulate
from penstock.units import format_bytes, format_seconds

sys.path.insert(0, str(ROOT / "tests" / "device"))

import emu
from emu.driver import EmuDriver

SHARES = (0.5, 0.25)  # of the peak of a plain step
UNMEASURED_STEPS = 9  # recorded, and the first that are planned, which begin with other tensors on the device
# Nothing is written to it, but no more can be had than there is.
HOST_BYTES = min(64 << 30, available_bytes() - (1 << 30))
DISK_BYTES, DISK_RATE = 1 << 40, 28e9  # four NVMe drives at 7 GB/s; nothing is planned to go there
LARGE_BYTES = 1 << 40  # of the device, where nothing has to leave

Train = Callable[[], None]


class Model(NamedTuple):
    """build   on the device, of about so many blocks; gives what trains it for a step
    blocks  that it has
    few     for a check that it works
    """

    build: Callable[[int], Train]
    blocks: int
    few: int


def _trained(model: torch.nn.Module, loss: Callable[[], torch.Tensor], autocast: bool = True) -> Train:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train() -> None:
        with torch.autocast("emu", torch.bfloat16, enabled=autocast):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()

    return train


def _words(vocabulary: int, sequences: int, length: int) -> torch.Tensor:
    return torch.zeros(sequences, length, dtype=torch.int64, device="emu").clamp_(max=vocabulary - 1)


def _gpt(blocks: int) -> Train:
    """GPT-2 medium: 355 M parameters, 4 sequences of 1024 words, weights in float32."""
    with torch.device("emu"):
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_layer=blocks, n_embd=1024, n_head=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
            )
        )
        words = _words(50257, 4, 1024)
    return _trained(model, lambda: model(words, labels=words, use_cache=False).loss)


def _llama(blocks: int) -> Train:
    """Llama 3.2 1B: 2 sequences of 1024 words, weights and Adam's state in bfloat16."""
    with torch.device("emu"):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                num_hidden_layers=blocks, hidden_size=2048, intermediate_size=8192, num_attention_heads=32,
                num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=True,
            )
        ).to(torch.bfloat16)  # fmt: skip
        words = _words(128256, 2, 1024)
    return _trained(model, lambda: model(words, labels=words, use_cache=False).loss, autocast=False)


def _vit(blocks: int) -> Train:
    """ViT-L/16: 304 M parameters, 48 images of 224 x 224, weights in float32."""
    with torch.device("emu"):
        model = transformers.ViTForImageClassification(
            transformers.ViTConfig(
                num_hidden_layers=blocks, hidden_size=1024, intermediate_size=4096, num_attention_heads=16,
                num_labels=1000,
            )
        )  # fmt: skip
        images, labels = torch.zeros(48, 3, 224, 224), _words(1000, 48, 1).flatten()
    return _trained(model, lambda: F.cross_entropy(model(images).logits, labels))


def _resnet(blocks: int) -> Train:
    """ResNet-152, which has 36 blocks in its third stage: 60 M parameters, 64 images of 224 x 224."""
    with torch.device("emu"):
        model = transformers.ResNetForImageClassification(
            transformers.ResNetConfig(depths=[3, 8, blocks, 3], num_labels=1000)
        )
        images, labels = torch.zeros(64, 3, 224, 224), _words(1000, 64, 1).flatten()
    return _trained(model, lambda: F.cross_entropy(model(images).logits, labels), autocast=False)


MODELS = {
    "gpt": Model(_gpt, 24, 2),
    "llama": Model(_llama, 16, 2),
    "vit": Model(_vit, 24, 2),
    "resnet": Model(_resnet, 36, 2),
}


class _Timed(EmuDriver):
    """Notes the host's virtual time wherever an event is recorded that is timed: where a step begins, before
    and after each kernel of a step that is recorded, and where the step ends."""

    noted_s: list[float]

    def make_event(self, timed: bool = False) -> Any:
        if timed:
            self.noted_s.append(emu.now_s())
        return super().make_event(timed)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", choices=emu.MACHINES, default="h100-pcie5", help="default: %(default)s")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: all")
    parser.add_argument("--policy", default="optimal", help="default: %(default)s")
    parser.add_argument("--moves-alone", action="store_true", help="tensors are moved, and none recomputed")
    parser.add_argument("--steps", type=int, default=9, help="that are timed; default: %(default)s")
    add_common_arguments(parser, "virtual_time")
    options = parser.parse_args(arguments)
    console = wide_console()
    rows = []
    machine = emu.MACHINES[options.machine]
    planning = penstock.PlanOptions(policy=options.policy, recompute=not options.moves_alone, compress=False)
    for name in options.models:
        model = MODELS[name]
        if options.quick:
            model = model._replace(blocks=model.few)
        for result in results(model, machine, planning, options.steps, options.spill_dir):
            ratio = f"{result['share']:.0%} of the peak, {result['ratio']:.2f} of the prediction"
            console.print(f"{name}, {ratio}: {result.pop('text')}")
            rows.append({"model": name, "blocks": model.blocks, **result})
    document = {
        **heading("virtual_time"),
        "is_virtual": True,
        "machine": asdict(machine),
        "policy": options.policy,
        "recompute": planning.recompute,
        "rows": rows,
    }
    console.print(drawn(options.machine, rows))
    write(document, options.output, console)
    return 0


def results(
    model: Model, machine: emu.Machine, planning: penstock.PlanOptions, steps: int, spill_dir: str
) -> list[dict[str, Any]]:
    """A plain step, and one at each share of its peak."""
    begin(machine)
    plain_s, peak_bytes, small_bytes = plain_step(model, steps)
    begin(machine)
    trace = traced(model, machine, planning, spill_dir)
    found = []
    for share in SHARES:
        begin(machine)
        budget_bytes = int(share * peak_bytes)
        result = inside(model, machine, trace, small_bytes, budget_bytes, planning, steps, spill_dir)
        found.append({"share": share, "peak_bytes": peak_bytes, "plain_s": plain_s, **result})
    return found


def begin(machine: emu.Machine) -> None:
    gc.collect()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    emu.configure(LARGE_BYTES, order="eager", machine=machine, computes=False)


def timed(train: Callable[[], None], steps: int) -> tuple[emu.Report, np.ndarray]:
    """The report of ``steps`` steps and one before them, and seconds from each one's end to the next's."""
    torch.accelerator.synchronize()
    emu.reset_report()
    launched_s = []
    for _ in range(1 + steps):  # the first begins with nothing on its way
        train()
        launched_s.append(emu.now_s())
    torch.accelerator.synchronize()
    times = [(span.launched_s, span.end_s) for span in emu.spans() if span.kind == "kernel"]
    ended_s = [max(end_s for begun_s, end_s in times if begun_s <= last_s) for last_s in launched_s]
    return emu.report(), np.diff(ended_s)


def plain_step(model: Model, steps: int) -> tuple[float, int, int]:
    """Its median seconds; most bytes in use, and most in segments of small blocks."""
    train = model.build(model.blocks)
    for _ in range(2):
        train()
    _, steps_s = timed(train, steps)
    memory = EmuDriver(torch.device("emu:0")).memory()
    return float(np.median(steps_s)), memory.peak_allocated_bytes, memory.peak_small_bytes


def hardware(machine: emu.Machine, budget_bytes: int) -> penstock.Hardware:
    return penstock.Hardware(
        device_bytes=budget_bytes,
        host_bytes=HOST_BYTES,
        device_to_host_bytes_per_s=machine.to_host_bytes_per_s,
        host_to_device_bytes_per_s=machine.to_device_bytes_per_s,
        name=machine.name,
    )


def traced(model: Model, machine: emu.Machine, planning: penstock.PlanOptions, spill_dir: str) -> Trace:
    """A step, with the virtual times of its kernels, where everything is in memory."""
    DRIVERS["emu"] = _Timed
    _Timed.noted_s = noted_s = []
    trace, times_s = None, np.empty(0)
    try:
        with opened(LARGE_BYTES, spill_dir, hardware(machine, LARGE_BYTES), planning) as run:
            train = model.build(model.blocks)
            for _ in range(UNMEASURED_STEPS):
                noted_s.clear()
                emu.reset_report()
                with run.step():
                    train()
                trace = run.trace
                if trace is not None and len(noted_s) == 2 * len(trace.kernel_name) + 2:
                    times_s = kernels_between(noted_s[1:-1])
    finally:
        DRIVERS["emu"] = EmuDriver
    if trace is None or len(times_s) != len(trace.kernel_name):
        raise SystemExit("no step was recorded kernel by kernel")
    return trace.with_times(times_s)


def kernels_between(noted_s: list[float]) -> np.ndarray:
    """Seconds of kernels that were launched from each even one of these to the next."""
    kernels = [span for span in emu.spans() if span.kind == "kernel"]
    places = np.searchsorted(noted_s, [span.launched_s for span in kernels]) - 1
    took_s = np.array([span.end_s - span.begin_s for span in kernels])
    counted = (places >= 0) & (places % 2 == 0)
    return np.bincount(places[counted] // 2, took_s[counted], minlength=len(noted_s) // 2)


def opened(
    budget_bytes: int,
    spill_dir: str,
    machine: penstock.Hardware,
    planning: penstock.PlanOptions,
    plan: penstock.Plan | None = None,
) -> penstock.Offload:
    return penstock.offload(
        device="emu:0",
        device_budget=budget_bytes,
        host_budget=HOST_BYTES,
        spill_dir=spill_dir,
        hardware=machine,
        planning=planning,
        plan=plan,
    )


def planned(
    trace: Trace, given: penstock.Hardware, planning: penstock.PlanOptions, small_bytes: int
) -> penstock.Plan:
    """As a run plans on an accelerator."""
    movable, budget_bytes = plannable(trace, given.device_bytes, small_bytes)
    plan = penstock.plan(
        movable, given, planning.policy, recompute=planning.recompute, device_budget_bytes=budget_bytes
    )
    return replace(plan, trace=trace)


def inside(
    model: Model,
    machine: emu.Machine,
    trace: Trace,
    small_bytes: int,
    budget_bytes: int,
    planning: penstock.PlanOptions,
    steps: int,
    spill_dir: str,
) -> dict[str, Any]:
    try:
        plan = planned(trace, given := hardware(machine, budget_bytes), planning, small_bytes)
    except penstock.BudgetTooSmall as error:  # a kernel alone needs more than the share
        least_bytes = error.minimum_bytes
        budget_bytes = least_bytes + 2 * spare_bytes(trace, least_bytes, small_bytes)
        plan = planned(trace, given := hardware(machine, budget_bytes), planning, small_bytes)
    # A run has a disk, and so keeps, or writes, what no kernel reads again and the plan counts as gone.
    disk = {"disk_bytes": DISK_BYTES, "disk_read_bytes_per_s": DISK_RATE, "disk_write_bytes_per_s": DISK_RATE}
    predicted = simulate(trace, plan, replace(given, **disk))
    with opened(budget_bytes, spill_dir, given, planning, plan) as run:
        train = model.build(model.blocks)

        def step() -> None:
            with run.step():
                train()

        for _ in range(UNMEASURED_STEPS):
            step()
        mismatches = run.report().trace_mismatches
        found, steps_s = timed(step, steps)
        if run.report().trace_mismatches > mismatches:
            raise SystemExit("the steps are other ones than the one that was planned")
        stalls = run.report().stall_s
    carried_s = float(np.median(steps_s))
    return {
        "budget_bytes": budget_bytes,
        "predicted_s": predicted.iteration_s,
        "predicted_moved_bytes": predicted.evicted_bytes,
        "carried_s": carried_s,
        "steps_s": steps_s.tolist(),
        "ratio": carried_s / predicted.iteration_s,
        "to_host_share": found.to_host.busy_s / found.step_s,
        "to_device_share": found.to_device.busy_s / found.step_s,
        "moved_bytes": found.to_host.size_bytes // (1 + steps),
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
        "slowest",
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
            format_seconds(max(row["steps_s"])),
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
