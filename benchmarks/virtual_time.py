"""What training inside a budget takes on a GPU, in virtual time: no GPU is used, and nothing was measured
on one.

    python benchmarks/virtual_time.py -o out/virtual_time.json [--machine rtx4090-pcie4] [--models gpt vit]

The device is the emulated one of the tests (tests/device/emu). Its kernels do nothing, and take the time that
a data sheet allows; so models have the sizes that they have on a GPU, and the allocator its own. A step is
planned on a trace whose kernels have their virtual times, for links with the machine's rates, and then
carried out by the runtime with host memory as the tier, or the disk, and host memory for staging alone. Where
it takes longer than the simulator says for the same plan, the runtime is why. Times are medians of steps that
follow one another; shares are of all steps.

A step that takes longer than a plain one does so for the bandwidth, or for the plan. `bound` is what no plan
can be faster than, proven by the planner: where that is above the plain step, it is the bandwidth; what the
prediction is above the bound is the plan, or the bound. `link` is what the plan's bytes take on the slowest
link of one way, and `least` what the bytes take there that leave by any plan: what is live at once, less the
budget and all that can be computed again. `copies` cross the bus in a step; in brackets the share of the step
that the host takes to launch those below 1 MiB: all that it could gain by joining them.

Attention writes its scores to memory, as the emulated device has no other.

The JSON holds the reports of virtual time. See `--quick` for a check that it all works; its figures mean
nothing.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from rich.table import Table
from step_time import ROOT, add_common_arguments, heading, wide_console, write

import penstock
from penstock.capture import slices
from penstock.core.columns import sum_over
from penstock.core.hardware import LINKS
from penstock.core.trace import Trace
from penstock.machine import available_bytes
from penstock.runtime.devices.accelerator import CHUNK_BYTES, CHUNKS
from penstock.runtime.devices.drivers import DRIVERS
from penstock.runtime.devices.reserved import plannable, spare_bytes
from penstock.simulator import simulate
from penstock.units import format_bytes, format_seconds

sys.path.insert(0, str(ROOT / "tests" / "device"))

import emu
from emu.disk import DISK
from emu.driver import EmuDriver

slices.LEAST_BYTES.pop("emu")  # as on other accelerators
# Nothing is written to spill files, which need no room then.
os.posix_fallocate = lambda file, offset, size_bytes: os.ftruncate(file, offset + size_bytes)
SHARES = (0.5, 0.25)  # of the peak of a plain step
UNMEASURED_STEPS = 9  # recorded, and the first that are planned, which begin with other tensors on the device
STAGING_BYTES = 2 * CHUNK_BYTES * CHUNKS
# By tier. Nothing is written to it, but no more can be had than there is.
HOST_BYTES = {"host": min(64 << 30, available_bytes() - (4 << 30)), "disk": STAGING_BYTES}
DISK_BYTES = 1 << 40
SMALL_BYTES = 1 << 20  # a copy of less takes the bus less than ten launches
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


def trained(
    model: torch.nn.Module,
    loss: Callable[[], torch.Tensor],
    autocast: bool = True,
    optimizer_of: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    parts: int = 1,
) -> Train:
    """parts   of the batch, one after the other; the loss is that of one"""
    optimizer = optimizer_of(model.parameters(), lr=1e-3)

    def train() -> None:
        for _ in range(parts):
            with torch.autocast("emu", torch.bfloat16, enabled=autocast):
                value = loss()
            value.backward()
        optimizer.step()
        optimizer.zero_grad()

    return train


def words_of(vocabulary: int, sequences: int, length: int) -> torch.Tensor:
    return torch.zeros(sequences, length, dtype=torch.int64, device="emu").clamp_(max=vocabulary - 1)


def _gpt(blocks: int) -> Train:
    """GPT-2 medium: 355 M parameters, 4 sequences of 1024 words, weights in float32."""
    with torch.device("emu"):
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_layer=blocks, n_embd=1024, n_head=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
            )
        )
        words = words_of(50257, 4, 1024)
    return trained(model, lambda: model(words, labels=words, use_cache=False).loss)


def _llama(blocks: int) -> Train:
    """Llama 3.2 1B: 2 sequences of 1024 words, weights and Adam's state in bfloat16."""
    with torch.device("emu"):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                num_hidden_layers=blocks, hidden_size=2048, intermediate_size=8192, num_attention_heads=32,
                num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=True,
            )
        ).to(torch.bfloat16)  # fmt: skip
        words = words_of(128256, 2, 1024)
    return trained(model, lambda: model(words, labels=words, use_cache=False).loss, autocast=False)


def _vit(blocks: int) -> Train:
    """ViT-L/16: 304 M parameters, 48 images of 224 x 224, weights in float32."""
    with torch.device("emu"):
        model = transformers.ViTForImageClassification(
            transformers.ViTConfig(
                num_hidden_layers=blocks, hidden_size=1024, intermediate_size=4096, num_attention_heads=16,
                num_labels=1000,
            )
        )  # fmt: skip
        images, labels = torch.zeros(48, 3, 224, 224), words_of(1000, 48, 1).flatten()
    return trained(model, lambda: F.cross_entropy(model(images).logits, labels))


def _resnet(blocks: int) -> Train:
    """ResNet-152, which has 36 blocks in its third stage: 60 M parameters, 64 images of 224 x 224."""
    with torch.device("emu"):
        model = transformers.ResNetForImageClassification(
            transformers.ResNetConfig(depths=[3, 8, blocks, 3], num_labels=1000)
        )
        images, labels = torch.zeros(64, 3, 224, 224), words_of(1000, 64, 1).flatten()
    return trained(model, lambda: F.cross_entropy(model(images).logits, labels), autocast=False)


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
    parser.add_argument(
        "--tiers", nargs="+", choices=HOST_BYTES, default=list(HOST_BYTES), help="default: both"
    )
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
        for result in results(model, machine, planning, options.tiers, options.steps, options.spill_dir):
            ratio = f"{result['share']:.0%} of the peak, {result['ratio']:.3f} of the prediction"
            console.print(f"{name}, {result['tier']}, {ratio}: {result.pop('text')}")
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
    model: Model,
    machine: emu.Machine,
    planning: penstock.PlanOptions,
    tiers: Sequence[str],
    steps: int,
    spill_dir: str,
) -> Iterator[dict[str, Any]]:
    """A plain step, and one at each share of its peak with each tier."""
    begin(machine)
    plain_s, peak_bytes, small_bytes = plain_step(model, steps)
    begin(machine)
    trace = traced(model, machine, planning, spill_dir)
    for tier, share in itertools.product(tiers, SHARES):
        begin(machine)
        given = hardware(machine, int(share * peak_bytes), tier)
        result = inside(model, machine, trace, small_bytes, given, planning, steps, spill_dir)
        yield {"tier": tier, "share": share, "peak_bytes": peak_bytes, "plain_s": plain_s, **result}


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


def hardware(machine: emu.Machine, budget_bytes: int, tier: str) -> penstock.Hardware:
    """With no latency: copies that are under way together hide it."""
    on_disk = tier == "disk"
    return penstock.Hardware(
        device_bytes=budget_bytes,
        host_bytes=HOST_BYTES[tier] - STAGING_BYTES,
        disk_bytes=on_disk * DISK_BYTES,
        device_to_host_bytes_per_s=machine.to_host_bytes_per_s,
        host_to_device_bytes_per_s=machine.to_device_bytes_per_s,
        disk_read_bytes_per_s=machine.disk_read_bytes_per_s,
        disk_write_bytes_per_s=machine.disk_write_bytes_per_s,
        name=machine.name,
    )


def traced(model: Model, machine: emu.Machine, planning: penstock.PlanOptions, spill_dir: str) -> Trace:
    """A step, with the virtual times of its kernels, where everything is in memory."""
    DRIVERS["emu"] = _Timed
    _Timed.noted_s = noted_s = []
    trace, times_s = None, np.empty(0)
    try:
        with opened(spill_dir, hardware(machine, LARGE_BYTES, "host"), planning) as run:
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
    spill_dir: str,
    given: penstock.Hardware,
    planning: penstock.PlanOptions,
    plan: penstock.Plan | None = None,
) -> penstock.Offload:
    return penstock.offload(
        device="emu:0",
        device_budget=given.device_bytes,
        host_budget=given.host_bytes + STAGING_BYTES,
        spill_dir=spill_dir,
        hardware=given,
        io=penstock.IoOptions(paths=[DISK]),
        planning=planning,
        plan=plan,
    )


def planned(
    trace: Trace, given: penstock.Hardware, planning: penstock.PlanOptions, small_bytes: int
) -> penstock.Plan:
    """As a run plans on an accelerator."""
    movable, budget_bytes = plannable(trace, given.device_bytes, small_bytes)
    plan = penstock.plan(
        movable, given, planning.policy, recompute=planning.recompute, compress=planning.compress,
        device_budget=budget_bytes, keep_weights=planning.keep_weights,
    )  # fmt: skip
    return replace(plan, trace=trace)


def inside(
    model: Model,
    machine: emu.Machine,
    trace: Trace,
    small_bytes: int,
    given: penstock.Hardware,
    planning: penstock.PlanOptions,
    steps: int,
    spill_dir: str,
) -> dict[str, Any]:
    try:
        plan = planned(trace, given, planning, small_bytes)
    except penstock.BudgetTooSmall as error:  # a kernel alone needs more than the share
        least_bytes = error.minimum_bytes
        given = replace(given, device_bytes=least_bytes + 2 * spare_bytes(trace, least_bytes, small_bytes))
        plan = planned(trace, given, planning, small_bytes)
    return carried_out(model, machine, trace, given, planning, plan, steps, spill_dir)


def carried_out(
    model: Model,
    machine: emu.Machine,
    trace: Trace,
    given: penstock.Hardware,
    planning: penstock.PlanOptions,
    plan: penstock.Plan,
    steps: int,
    spill_dir: str,
) -> dict[str, Any]:
    """What the plan predicts, and what it comes to."""
    # A run has a disk, and so keeps, or writes, what no kernel reads again and the plan counts as gone.
    predicted = simulate(trace, plan, replace(given, disk_bytes=DISK_BYTES))
    with opened(spill_dir, given, planning, plan) as run:
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
    copied_bytes = [span.size_bytes for span in emu.spans() if span.kind in ("to_device", "to_host")]
    small = sum(size_bytes < SMALL_BYTES for size_bytes in copied_bytes)
    planned_bytes = Counter[str]()
    for span in predicted.spans:
        if span.stream in LINKS:
            planned_bytes[span.stream] += span.size_bytes
    slowest = min(given.evict_links(tier_of(given)), key=given.rate_bytes_per_s)
    return {
        "budget_bytes": given.device_bytes,
        "least_s": least_away_bytes(trace, plan) / given.rate_bytes_per_s(slowest),
        "link_s": max(
            (size_bytes / given.rate_bytes_per_s(link) for link, size_bytes in planned_bytes.items()),
            default=0.0,
        ),
        "bound_s": plan.lower_bound_s,
        "predicted_s": predicted.step_s,
        "predicted_bytes": dict(planned_bytes),
        "carried_s": carried_s,
        "steps_s": steps_s.tolist(),
        "ratio": carried_s / predicted.step_s,
        "moved_bytes": {kind: link.size_bytes // (1 + steps) for kind, link in found.links.items()},
        "copies": len(copied_bytes) / (1 + steps),
        "small_copies": small / (1 + steps),
        "small_launches_share": small * machine.launch_s / found.step_s,
        "report": asdict(found),
        "stall_s": stalls,
        "text": str(found),
    }


def tier_of(given: penstock.Hardware) -> str:
    return "disk" if given.disk_bytes else "host"


def least_away_bytes(trace: Trace, plan: penstock.Plan) -> int:
    """That have left at some kernel by any plan: what is live then, and cannot be computed again, less the
    budget."""
    live = np.array(trace.live_bytes)
    again = np.flatnonzero(trace.tensor_recompute >= 0) if len(trace.tensor_recompute) else np.empty(0, int)
    death = np.minimum(trace.tensor_death[again], trace.kernels)
    live = live - sum_over(trace.kernels, trace.tensor_birth[again], death, trace.tensor_bytes[again])
    return max(int(live.max()) - plan.device_budget_bytes, 0)


def drawn(machine: str, rows: list[dict[str, Any]]) -> Table:
    columns = ("", "tier", "budget", "plain", "least", "link", "bound", "predicted", "carried out", "slowest")
    waits = ("busy while waited for", "late for copies", "memory", "host", "copies")
    table = Table(
        *columns,
        "ratio",
        *waits,
        title=f"VIRTUAL time of a step on {machine}: no GPU was used",
        box=None,
        padding=(0, 1),
    )
    for row in rows:
        idle, step_s = row["report"]["idle_s_by_cause"], row["report"]["step_s"]
        times_s = (row[f"{name}_s"] for name in columns[3:8])
        table.add_row(
            row["model"],
            row["tier"],
            f"{format_bytes(row['budget_bytes'])} of {format_bytes(row['peak_bytes'])}",
            *(format_seconds(time_s) for time_s in (*times_s, row["carried_s"], max(row["steps_s"]))),
            f"{row['ratio']:.3f}",
            busy_text(row["report"]),
            *(f"{idle[cause] / step_s:.1%}" for cause in ("copies", "memory", "host")),
            f"{row['copies']:.0f} ({row['small_launches_share']:.1%})",
        )
    return table


def busy_text(report: dict[str, Any]) -> str:
    """Of each link that limits steps for a hundredth of the time: its share of busy time meanwhile."""
    shares = [
        f"{kind.replace('_', ' ')} {1 - link['limiting_gaps_s'] / link['limiting_s']:.1%}"
        for kind in ("to_device", "to_host", "disk_read", "disk_write")
        if (link := report[kind])["limiting_s"] > report["step_s"] / 100
    ]
    return ", ".join(shares)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
